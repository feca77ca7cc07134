"""A master."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import pccl
from programs.peer import say


def serve(listen: str, open_files: int | None = None, place: Sequence[int] = (0, 1)) -> None:
    """Serves until the process ends.

    Args:
        open_files: The most descriptors that it may have.
        place: Its index among several masters, and how many there are.
    """
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    master = pccl.MasterNode(listen, place=(place[0], place[1]))
    master.run()
    say(event="listening", address=master.address)
    master.wait()
