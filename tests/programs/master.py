"""A master."""

from __future__ import annotations

import resource

import pccl
from programs.peer import say


def serve(listen: str, open_files: int | None = None) -> None:
    """Serves until the process ends. `open_files`: the most descriptors that it may have."""
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    master = pccl.MasterNode(listen)
    master.run()
    say(event="listening", address=master.address)
    master.wait()
