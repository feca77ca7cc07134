"""The members' side: keeping a copy of the state, and sending it to followers."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np

from pccl import _settings, api
from pccl.communicator import Communicator
from pccl.errors import PCCLError, Refused
from pccl.following.doors import door_of
from pccl.following.offer import END, NEWS, NEWS_SECONDS, PIECE, Published
from pccl.following.pair import Pair
from pccl.following.snapshot import Snapshot
from pccl.following.threads import Threads
from pccl.frameworks import Array

FUNC = "publish"
_MOST_REVISION = 2**63 - 1
_MOST_PAIRS = 8  # at a time
# Revisions that are kept for followers that are slow, beside the latest.
_MOST_KEPT = 2
# Shares of its time that a member sends to one follower: while it has no operation in flight, and
# while it has one, which may need the same links.
_SHARE, _SHARE_BESIDE = 0.8, 0.1
_MOST_REST = 5.0  # seconds; the engine warns of a call that waits for longer than ten
_DOOR_SECONDS = 300.0  # then a new one: the first may be at a master that nobody asks any more
_FIRST_PAUSE, _LAST_PAUSE = 0.25, 5.0  # seconds between attempts to open a door

_log = logging.getLogger(__name__)


def publish(state: Any, revision: int, *, comm: Communicator | None = None) -> None:
    """Offers the state to followers: see `pccl.follow`. No collective call.

        if diloco.step():
            pccl.publish(diloco.parameters, diloco.outer_step)

    Some members or all of them call it whenever there is something new; what they publish with one
    number is the same, byte for byte. Followers receive different pieces from several of them. It
    copies the state and returns; a thread sends it. While the member has no operation in flight, a
    follower takes up to 80 % of the thread's time, and 10 % otherwise. The member keeps the latest
    revision, and up to two older ones while followers receive them.

    Args:
        state: What `pccl.sync` takes; for followers that have no such state themselves, dicts,
            lists and tuples of arrays, numbers and strings.
        revision: Its number, at least 0. Followers take the latest.
        comm: Default: the process's communicator. Followers leave when it is closed.

    Raises:
        InvalidArgument: The revision is no such number, something in the state cannot be sent, or
            the communicator's group is 4096 or higher.
        NotInitialized: Not joined.
    """
    found = api._use(comm, FUNC)
    found._joined(FUNC)
    number = _settings.integer(revision, "revision", FUNC, 0, _MOST_REVISION)
    publisher = found._publisher
    if not isinstance(publisher, Publisher):
        publisher = found._publisher = Publisher(found)
    publisher.publish(Published(number, Snapshot(state, FUNC)))


class Publisher:
    """Keeps what a member publishes, and sends it to followers. *any thread*"""

    def __init__(self, comm: Communicator) -> None:
        door_of(comm._group, FUNC)  # or raises
        self._comm = comm
        self._changed = threading.Condition()  # guards what follows
        self._latest: Published | None = None
        self._kept: list[Published] = []  # that pairs have, in order, and the latest
        self._held: dict[Pair, Published] = {}  # what each pair has had the offer of
        self._pairs = 0
        self._opens = False  # whether a thread waits for followers
        self._closed = False
        self._threads = Threads("pccl publisher")

    def publish(self, made: Published) -> None:
        with self._changed:
            self._latest = made
            older = self._in_use()
            self._kept = [*older[-_MOST_KEPT:], made]
            for pair in [pair for pair, one in self._held.items() if one not in self._kept]:
                del self._held[pair]
            if not self._opens:
                self._opens = True
                self._threads.start(self._open)
            self._changed.notify_all()

    def close(self) -> None:
        """Leaves the followers. The communicator has closed the pairs, as its companions."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.wait()

    def _in_use(self) -> list[Published]:
        held = list(self._held.values())
        return [one for one in self._kept if one in held]

    def next(self, pair: Pair) -> Published | None:
        """The latest, once it is one that the pair has not had; None: not within a second."""
        with self._changed:

            def news() -> bool:
                return self._closed or self._held.get(pair) is not self._latest

            if not self._changed.wait_for(news, NEWS_SECONDS) or self._closed:
                return None
            assert self._latest is not None
            self._held[pair] = self._latest
            self._kept = self._in_use()
            return self._latest

    def held(self, pair: Pair) -> Published | None:
        """Returns the latest that the pair has had, if it is still kept."""
        with self._changed:
            return self._held.get(pair)

    def left(self, pair: Pair) -> None:
        """A follower is gone."""
        pair.close()
        with self._changed:
            self._pairs -= 1
            self._held.pop(pair, None)
            self._changed.notify_all()

    @property
    def belongs(self) -> bool:
        """Whether this process is still a member of the run."""
        engine = self._comm._engine
        return engine is not None and engine.is_open() and not self._closed

    def rest(self, taken: float) -> None:
        """Rests after a piece that it took so many seconds to send."""
        engine = self._comm._engine
        share = _SHARE_BESIDE if engine is not None and engine.unfinished() else _SHARE
        with self._changed:
            self._changed.wait_for(lambda: self._closed, min(_MOST_REST, taken * (1 / share - 1)))

    # The door.

    def _open(self) -> None:
        pause = _FIRST_PAUSE
        while self._has_room():
            pair = Pair(self._comm._companion(door_of(self._comm._group, FUNC)), FUNC)
            try:
                if not self.belongs:  # nobody would end the wait
                    continue
                pair.join(_DOOR_SECONDS)
            except PCCLError as error:
                _log.debug("no follower can come for now: %s", error)
                pair.close()
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, pause)
                pause = min(2 * pause, _LAST_PAUSE)
                continue
            pause = _FIRST_PAUSE
            with self._changed:
                self._pairs += 1
                self._threads.start(_serve, self, pair)

    def _has_room(self) -> bool:
        """Waits until one more follower may come; False: this process is no member any more."""
        with self._changed:
            while self.belongs:
                if self._changed.wait_for(lambda: self._pairs < _MOST_PAIRS, 1.0):
                    return True
            self._opens = False
            return False


def _serve(publisher: Publisher, pair: Pair) -> None:
    try:
        while _answer(publisher, pair):
            pass
    except PCCLError as error:
        if publisher.belongs:
            _log.debug("a follower receives no more from here: %s", error)
    finally:
        publisher.left(pair)


def _answer(publisher: Publisher, pair: Pair) -> bool:
    request = np.zeros(2, np.int64)
    pair.receive(request)
    what, index = request.tolist()
    if what == END or not publisher.belongs:
        return False
    answer: Array = np.empty(0, np.uint8)
    if what == NEWS:
        found = publisher.next(pair)
        answer = answer if found is None else found.offer()
    elif what == PIECE:
        found = publisher.held(pair)
        if found is not None:
            if not 0 <= index < found.pieces:
                raise Refused.because(FUNC, f"a follower asks for piece {index} of {found.pieces}")
            answer = found.piece(index)
    else:
        raise Refused.because(FUNC, f"a follower sends a request of unknown kind {what}")
    began = time.monotonic()
    pair.send(np.array([answer.size], np.int64))
    if answer.size:
        pair.send(answer)
    if what == PIECE:
        publisher.rest(time.monotonic() - began)
    return True
