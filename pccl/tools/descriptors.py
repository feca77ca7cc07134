"""Open files of a launcher: every rank takes some."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pccl.tools.parsing import Misuse

__all__ = ["enough_for", "give_back"]

_EACH = 5  # two pipes, the process, its connection to the master, and ssh's input
_OTHERS = 64
_Limits = tuple[int, int]  # soft and hard


@contextmanager
def enough_for(ranks: int) -> Iterator[_Limits | None]:
    """Raises this process's limit of open files if so many ranks need it.

    Yields:
        The former limits, for `give_back`; None: nothing was changed.

    Raises:
        Misuse: The hard limit is too low.
    """
    wanted = _OTHERS + _EACH * ranks
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    if former[0] >= wanted or former[0] == resource.RLIM_INFINITY:
        yield None
        return
    with suppress(OSError, ValueError):  # macOS refuses its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (former[1], former[1]))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if wanted > most != resource.RLIM_INFINITY:
        raise Misuse(
            f"{ranks} ranks need {wanted} open files here, and the limit is {most}; raise it "
            "(`ulimit -Hn`), or start fewer"
        )
    try:
        yield former
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)


def give_back(former: _Limits | None, process: int) -> None:
    """Gives a child the former limits: programs with select() do not stand higher ones."""
    if former is not None and hasattr(resource, "prlimit"):
        with suppress(OSError):  # it has ended
            resource.prlimit(process, resource.RLIMIT_NOFILE, former)
