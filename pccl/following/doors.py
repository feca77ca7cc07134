"""The groups in which members wait for followers."""

from __future__ import annotations

import random

from pccl._core import FIRST_DOOR
from pccl.errors import InvalidArgument

GROUPS = 4096  # from 0 on, that may have doors; their numbers are parts of the doors'
_DOORS = 1 << 18  # of each of them


def check_group(group: int, func: str) -> None:
    """Whether members of that group may have doors.

    Raises:
        InvalidArgument: The group's number is too high.
    """
    if group >= GROUPS:
        sentence = f"only groups 0 to {GROUPS - 1} have followers, and this is group {group}"
        raise InvalidArgument.because(func, sentence)


def door_of(group: int) -> int:
    """The number of a new door of the members of a group, chosen at random."""
    return FIRST_DOOR + group * _DOORS + random.SystemRandom().randrange(_DOORS)


def group_behind(door: int) -> int | None:
    """The group whose members have this door; None: it is no door."""
    return (door - FIRST_DOOR) // _DOORS if door >= FIRST_DOOR else None
