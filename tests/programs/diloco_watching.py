"""Members of a DiLoCo run with `background_join`, and newcomers that are held up as they watch."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pccl
from pccl.data import ElasticSampler
from pccl.errors import PCCLError, Unreachable
from pccl.following import pair
from pccl.following.pair import Pair
from pccl.following.snapshot import Snapshot
from pccl.training.diloco import joining, snapshots
from pccl.training.diloco.snapshots import Fetch, Holder, Line
from programs import diloco_member as member
from programs.peer import say


class Late(Fetch):
    """A snapshot that takes `rounds` of `every` inner steps longer to come than it does."""

    def __init__(self, lines: list[Line], rounds: int, every: int) -> None:
        self._begun: int | None = None
        self._takes = rounds * every
        super().__init__(lines)

    @property
    def complete(self) -> bool:
        if self._begun is None and self._steps > 0:
            self._begun = self._steps
        late = self._begun is not None and self._steps >= self._begun + self._takes
        return self._missing == 0 and late


def make_late(own_number: int, rounds: int, *, most: int = 16, **options: Any) -> None:
    """As `member.make`, for a newcomer that watches for so many rounds, if it may for `most`."""
    vars(joining)["Fetch"] = partial(Late, rounds=rounds, every=options["sync_every"])
    joining._MOST_WATCHED = most
    member.make(own_number, **options)


def make_without_lines(own_number: int, **options: Any) -> None:
    """As `member.make`, for a newcomer that reaches no holder."""

    def refuse(self: Pair, timeout: float | None = None) -> None:
        raise Unreachable.because("connect", "no route to host")

    Pair.join = refuse  # type: ignore[method-assign]
    member.make(own_number, **options)


def start_no_threads(name: str) -> None:
    """From now on: the system has no thread for those of this name."""
    start = threading.Thread.start

    def start_or_fail(self: threading.Thread) -> None:
        if self.name == name:
            raise RuntimeError("can't start new thread")
        start(self)

    threading.Thread.start = start_or_fail  # type: ignore[method-assign]


def make_or_fail(
    own_number: int, rounds: int = 0, *, sampled: bool = False, **options: Any
) -> None:
    """As `make_late`, and says how it failed. `sampled`: with data."""
    if sampled:
        options["data"] = ElasticSampler(500, batch_size=5)
    try:
        make_late(own_number, rounds, **options)
    except PCCLError as error:
        say(event="failed", kind=type(error).__name__, text=str(error))


def make_and_die(own_number: int, lines: int, **options: Any) -> None:
    """As `member.make`, for a newcomer that is killed at some moment of its joining.

    It is killed when its threads together have run so many lines of DiLoCo's Python, wherever the
    others are meanwhile, and at the latest where it begins to count.
    """
    small_pieces()
    ran = itertools.count()
    rooms = tuple(str(Path(one.__file__).parent) for one in (joining, pair) if one.__file__)

    def count(frame: FrameType, event: str, what: object) -> Any:
        if event == "line" and next(ran) >= lines:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    def look(frame: FrameType, event: str, what: object) -> Any:
        return count if frame.f_code.co_filename.startswith(rooms) else None

    threading.settrace(look)
    sys.settrace(look)
    member.make(own_number, **options)
    sys.settrace(None)
    say(event="ran", lines=next(ran))
    os.kill(os.getpid(), signal.SIGKILL)


def make_ahead(own_number: int, saved: str, **options: Any) -> None:
    """Comes with a checkpoint, and says how it failed."""
    member.make(own_number, join=False, **options)
    member.load(saved)
    try:
        member.diloco.join()
    except PCCLError as error:
        say(event="failed", kind=type(error).__name__, text=str(error))


def die_as_a_newcomer_asks() -> None:
    """From now on: killed by the first newcomer that asks this holder for something."""

    def die(self: Holder, snapshot: Snapshot) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    Holder._answer = die  # type: ignore[method-assign]


def send_after_the_end_of(pid: int) -> None:
    """From now on: this holder sends pieces once that process has been killed.

    The program may learn of it later: its call may wait for the newcomer that gets these pieces.
    """
    read = Snapshot.read

    def wait_and_read(self: Snapshot, first: int, length: int) -> Any:
        while is_running(pid):
            threading.Event().wait(0.01)
        return read(self, first, length)

    Snapshot.read = wait_and_read  # type: ignore[method-assign]


def is_running(pid: int) -> bool:
    """False for a zombie, too: its parent may wait for it later."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"


def die_as_all_wait_for_a_newcomer() -> None:
    """From now on: killed where the members would give the state to a newcomer."""

    def die() -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    member.diloco._share_with_all = die  # type: ignore[method-assign]


def small_pieces() -> None:
    """From now on: snapshots travel in pieces of 64 bytes."""
    snapshots._PIECE_BYTES = 64


def drain() -> None:
    """Asks this peer to leave."""
    pccl.drain()


def go_until_newcomers_count(
    more: int, *, came: bool = False, tokens: int | None = None, pace: float = 0.0
) -> None:
    """Trains until newcomers have come and none of them watches any more, and `more` rounds.

    `came`: they have come, as this one has. `pace`: seconds of an inner step until then.
    """
    diloco = member.diloco
    met = came
    log: list[dict[str, Any]] = []
    while not met or diloco.observers:
        time.sleep(pace)
        member.train(member.model, member.number)
        if diloco.step(tokens):
            log.append(member.look())
        met = met or bool(diloco.observers)
    before = diloco.outer_step
    while diloco.outer_step < before + more:
        member.train(member.model, member.number)
        if diloco.step(tokens):
            log.append(member.look())
    say(event="went", log=log)


def come_back_and_go(more: int) -> None:
    """Trains until this peer finds that it was put out, and has come back; and `more` rounds."""
    while True:
        member.train(member.model, member.number)
        if member.diloco.step():
            break
    say(event="counts", round=member.diloco.outer_step)
    member.go(more)


def show_observers() -> None:
    """Says how many newcomers watch, and how many of this member's holders are at work."""
    holding: list[Holder] = [one for one in member.diloco._holding if not one.over]
    say(event="observers", watching=len(member.diloco.observers), holding=len(holding))


def go_until_drained() -> None:
    """Trains until this peer is let go."""
    try:
        member.go(1000)
    except pccl.Drained:
        say(event="drained", round=member.diloco.outer_step)
