"""Progress shown to the user while much state is received."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pccl.errors import InvalidArgument
from pccl.tools import screen

_QUIET_SECONDS = 1.0  # shorter transfers show nothing

Progress = Callable[[int, int], None]


@contextmanager
def reporting(progress: Progress | bool | None, func: str) -> Iterator[Progress | None]:
    """The function that gets (bytes done, bytes wanted): the user's, a bar or None.

    Raises:
        InvalidArgument: `progress` is neither a function nor a bool.
    """
    if callable(progress):
        yield progress
    elif progress is not None and not isinstance(progress, bool):
        raise InvalidArgument.because(func, f"progress must be a function, not {progress!r}")
    elif progress is False or (progress is None and not screen.is_terminal(sys.stderr)):
        yield None
    else:
        bar = _Bar()
        try:
            yield bar
        finally:
            bar.close()


class _Bar:
    """A progress bar on standard error, shown after a second."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._shown: Any = None
        self._task: Any = None

    def __call__(self, done: int, wanted: int) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if self._shown is None:
            if now - self._since < _QUIET_SECONDS or done >= wanted:
                return
            self._shown = screen.bar("pccl: receiving state")
            if self._shown is None:  # rich is missing, or the terminal is gone
                return
            self._task = self._shown.add_task("", total=wanted)
            self._shown.start()
        self._shown.update(self._task, completed=done, total=wanted)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()
