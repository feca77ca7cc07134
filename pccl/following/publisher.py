"""The members' side: keeping a copy of the state, and sending it to followers."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np

from pccl import _settings, api
from pccl.communicator import Communicator
from pccl.errors import Refused
from pccl.following.doors import check_group, door_of
from pccl.following.offer import END, LATER, NEWS, NEWS_SECONDS, PIECE, Published
from pccl.following.pair import Pair
from pccl.following.snapshot import Snapshot
from pccl.following.threads import Threads
from pccl.frameworks import Array

FUNC = "publish"
_MOST_REVISION = 2**63 - 1
_MOST_FOLLOWERS = 8  # at a time
_MOST_KEPT = 3  # revisions that followers hold; the latest may be a fourth one
# Shares of their time that a member's threads send: of each one while the member has no operation
# in flight, and of all together while it has one, which may need the same links.
_SHARE, _SHARE_BESIDE = 0.8, 0.1
_MOST_COUNTED = 2.0  # seconds of one piece
_LOOK_SECONDS = 0.25  # between looks whether an operation is in flight
_MOST_REST = 5.0  # seconds; the engine warns of a call that waits for longer than ten
_SILENT_SECONDS = 120.0  # after which a follower loses its place; others ask every few seconds
_DOOR_SECONDS = 60.0  # then a new one: the first may be at a master that nobody asks any more
_FIRST_PAUSE, _LAST_PAUSE = 0.25, 5.0  # seconds between attempts to open a door

_log = logging.getLogger(__name__)


def publish(state: Any, revision: int, *, comm: Communicator | None = None) -> None:
    """Offers the state to followers: see `pccl.follow`. No collective call.

        if diloco.step():
            pccl.publish(diloco.parameters, diloco.outer_step)

    Some members or all of them call it whenever there is something new; what they publish with one
    number is the same, byte for byte. Followers receive different pieces from several of them. It
    copies the state and returns; threads send it. While the member has no operation in flight, each
    follower takes up to 80 % of a thread's time, and all of them together 10 % otherwise. The
    member keeps a copy of the latest revision, and of up to three older ones while followers
    receive them.

    Args:
        state: As in `pccl.sync`. A dict, list or tuple, for followers that have no such state
            themselves.
        revision: Its number, at least 0. Followers take the latest.
        comm: Default: the process's communicator. Followers leave when it is closed; a member that
            was put out publishes to nobody.

    Raises:
        InvalidArgument: The revision is no such number, something in the state cannot be sent, or
            the communicator's group is 4096 or higher.
        NotInitialized: `pccl.init` was not called.
        InvalidUsage: `comm` is not connected, or closed.
    """
    found = api._use(comm, FUNC)
    found._joined(FUNC)
    number = _settings.integer(revision, "revision", FUNC, 0, _MOST_REVISION)
    snapshot = Snapshot(state, FUNC)
    with found._lock:
        publisher = found._publisher
        if not isinstance(publisher, Publisher):
            publisher = found._publisher = Publisher(found)
    publisher.publish(number, snapshot)


class Publisher:
    """Keeps what a member publishes, and sends it to followers. *any thread*"""

    def __init__(self, comm: Communicator) -> None:
        check_group(comm._group, FUNC)
        self._comm = comm
        self._changed = threading.Condition()  # guards what follows
        self._latest: Published | None = None
        self._count = 0  # of revisions published
        self._followers: set[_Follower] = set()
        self._opens = False  # whether a thread waits for followers
        self._stopped = False
        self._rests_until = 0.0  # while an operation is in flight
        self._threads = Threads("pccl publisher")

    def publish(self, revision: int, snapshot: Snapshot) -> None:
        with self._changed:
            self._count += 1
            self._latest = Published(revision, snapshot, self._count)
            if not self._opens and not self._stopped:
                try:
                    self._threads.start(self._open)
                    self._opens = True
                except RuntimeError as error:  # the system has no more threads
                    _log.warning("no follower can come for now: %s", error)
            self._changed.notify_all()

    def stop(self) -> None:
        """Opens no door any more."""
        with self._changed:
            self._stopped = True
            self._latest = None
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits for its threads, when their companions are closed."""
        self._threads.wait()

    @property
    def belongs(self) -> bool:
        """Whether this process is still a member of the run."""
        return self._comm._is_connected() and not self._stopped

    # Revisions. Each follower holds the one that it receives.

    def news(self, follower: _Follower) -> Published | None:
        """A revision that the follower has not had; None: there is none within a second."""
        with self._changed:
            follower.waits = True
            self._changed.notify_all()
            found = self._changed.wait_for(
                lambda: self._stopped or self._next_for(follower), NEWS_SECONDS
            )
            if not isinstance(found, Published):
                return None
            follower.waits, follower.holds, follower.had = False, found, found.number
            self._drop()
            self._changed.notify_all()
            return found

    def _next_for(self, follower: _Follower) -> Published | None:
        """The latest; while others still receive as many older ones as are kept, one of those.

        So none is dropped that somebody has begun to receive: a follower that takes longer than
        the run for a revision would never have a whole one.
        """
        kept = {one.holds for one in self._followers - {follower} if one.holds and not one.waits}
        found = self._latest
        if found not in kept and len(kept) >= _MOST_KEPT:
            found = max(kept, key=lambda one: one.number)
        return found if found is not None and found.number > follower.had else None

    def _drop(self) -> None:
        """Followers hold no more revisions than are kept.

        One that waits needs its own only if another publisher fails to send a piece of it.
        """
        held = {one.holds for one in self._followers if one.holds}
        wanted = {one.holds for one in self._followers if not one.waits}
        excess = len(held) - _MOST_KEPT
        for least in sorted(held - wanted, key=lambda one: one.number)[: max(0, excess)]:
            for one in self._followers:
                if one.holds is least:
                    one.holds = None

    def held(self, follower: _Follower) -> Published | None:
        """The revision that the follower has had last, if it is still kept."""
        with self._changed:
            follower.waits = False
            return follower.holds

    # Sending.

    def may_send(self) -> bool:
        """Whether to send a piece now. Waits for a while first."""
        until = time.monotonic() + _MOST_REST
        while not self._stopped and self._is_busy():
            now = time.monotonic()
            with self._changed:
                if now >= self._rests_until:
                    return True
                if now >= until:
                    return False
                self._changed.wait(min(self._rests_until, until, now + _LOOK_SECONDS) - now)
        return True

    def sent(self, seconds: float) -> None:
        """A piece was sent in that time. The followers of a busy member share what it sends."""
        busy = self._is_busy()
        with self._changed:
            if busy:
                begins = max(time.monotonic(), self._rests_until)
                # A piece takes longer than that where the follower's own line is slow.
                counted = min(seconds, _MOST_COUNTED)
                self._rests_until = begins + counted * (1 / _SHARE_BESIDE - 1)
            else:
                rest = min(_MOST_REST, seconds * (1 / _SHARE - 1))
                self._changed.wait_for(lambda: self._stopped, rest)

    def _is_busy(self) -> bool:
        engine = self._comm._engine
        return engine is not None and engine.unfinished() > 0

    # The door.

    def _open(self) -> None:
        pause = _FIRST_PAUSE
        try:
            while self._has_room():
                follower = self._meet()
                if follower is not None:
                    pause = _FIRST_PAUSE
                    self._begin(follower)
                    continue
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, pause)
                pause = min(2 * pause, _LAST_PAUSE)
        finally:
            with self._changed:
                self._opens = False

    def _has_room(self) -> bool:
        """Waits until one more follower may come; False: this process is no member any more."""
        with self._changed:
            while self.belongs:
                if self._changed.wait_for(lambda: len(self._followers) < _MOST_FOLLOWERS, 1.0):
                    return self.belongs
            return False

    def _meet(self) -> _Follower | None:
        """Waits at a new door."""
        pair = None
        try:
            comm = self._comm._companion(door_of(self._comm._group))
            pair = Pair(comm, FUNC, timeout=_SILENT_SECONDS)
            if self.belongs:  # else nobody would end the wait
                pair.join(_DOOR_SECONDS)
                return _Follower(pair)
        except Exception as error:  # a thread's end would end all following
            _log.debug("no follower can come for now: %s", error)
        if pair is not None:
            pair.close()
        return None

    def _begin(self, follower: _Follower) -> None:
        with self._changed:
            self._followers.add(follower)
        try:
            self._threads.start(self._serve, follower)
        except RuntimeError as error:  # the system has no more threads
            _log.debug("a follower is sent away: %s", error)
            self._end(follower)

    def _end(self, follower: _Follower) -> None:
        follower.pair.close()
        with self._changed:
            self._followers.discard(follower)
            self._changed.notify_all()

    def _serve(self, follower: _Follower) -> None:
        try:
            while self._answer(follower):
                pass
        except Exception as error:  # memory, say
            if self.belongs:
                _log.debug("a follower receives no more from here: %s", error)
        finally:
            self._end(follower)

    def _answer(self, follower: _Follower) -> bool:
        pair = follower.pair
        request = np.zeros(2, np.int64)
        pair.receive(request)
        what, index = request.tolist()
        if what == END or not self.belongs:
            return False
        if what not in (NEWS, PIECE):
            raise Refused.because(FUNC, f"a follower sends a request of unknown kind {what}")
        answer: Array = np.empty(0, np.uint8)
        if what == NEWS:
            found = self.news(follower)
            answer = answer if found is None else found.offer()
        elif (found := self.held(follower)) is not None:
            if not 0 <= index < found.pieces:
                raise Refused.because(FUNC, f"a follower asks for piece {index} of {found.pieces}")
            if not self.may_send():
                pair.send(np.array([LATER], np.int64))
                return True
            answer = found.piece(index)
        began = time.monotonic()
        pair.send(np.array([answer.size], np.int64))
        if answer.size:
            pair.send(answer)
        if what == PIECE:
            self.sent(time.monotonic() - began)
        return True


class _Follower:
    """One that a thread of the publisher serves. The publisher's lock guards all but `pair`.

    Attributes:
        holds: What it receives, or has had last.
        had: The count of that revision.
        waits: It has all that it wants, and waits for news.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.holds: Published | None = None
        self.had = 0
        self.waits = False
