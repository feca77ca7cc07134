"""This process's peers and masters: what happens to them at fork and at exit."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from contextlib import suppress
from typing import Any

# Forks between this process and the one that imported pccl: tells a forked copy from the original.
forks = 0
peers: weakref.WeakSet[Any] = weakref.WeakSet()  # those that have joined a run
masters: set[Any] = set()  # those that run


def _after_fork_in_child() -> None:
    global forks
    forks += 1
    masters.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _say(line: str) -> None:
    # A standard error that is full, closed or missing is no reason to end.
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


@atexit.register
def _at_exit() -> None:
    """Leaves every run, then keeps the process alive while it serves as a master."""
    for peer in list(peers):
        peer._leave_at_exit()
    ended_by = getattr(sys, "last_type", None)
    try:
        for master in list(masters):
            if ended_by is not None:  # Ctrl-C or an error ended the program: nobody needs it now
                master.interrupt()
            else:
                _say(f"pccl: still master on {master.address}; Ctrl-C ends it")
                master.wait()
    except KeyboardInterrupt:
        for master in list(masters):
            master.interrupt()
