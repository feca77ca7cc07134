"""Peers that join and make no call of their own."""

from __future__ import annotations

from typing import Any

import pccl
from programs.peer import hear, say, start


def wait(**options: Any) -> None:
    """Joins, says "in", and leaves when it is told anything."""
    start(**options)
    say(event="in")
    hear()


def wait_inside() -> None:
    """Is a member before it says "in"."""
    start()
    pccl.barrier()
    say(event="in")
    hear()


def meet_twice() -> None:
    """Meets the others in a barrier, then waits for them in another one."""
    start()
    pccl.barrier()
    pccl.barrier()


def fail() -> None:
    """Ends with another status than 0, and a sentence."""
    raise SystemExit("it cannot go on")


def leave(**options: Any) -> None:
    """Joins, and leaves at once."""
    start(**options)
