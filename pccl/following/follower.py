"""The followers' side: finding publishers, and receiving from several of them at a time."""

from __future__ import annotations

import atexit
import json
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pccl import _core, _settings, process
from pccl.communicator import Communicator
from pccl.errors import (
    AuthenticationFailed,
    InvalidArgument,
    InvalidUsage,
    PCCLError,
    Refused,
    StateUnavailable,
    Timeout,
    Unreachable,
)
from pccl.following.doors import GROUPS, group_behind
from pccl.following.offer import END, LATER, MOST_OFFER, NEWS, PIECE, Assembly, Offer, digest_of
from pccl.following.pair import Pair
from pccl.following.snapshot import restore
from pccl.following.threads import Threads
from pccl.frameworks import Array
from pccl.tools.status import ask_any

if TYPE_CHECKING:
    from typing_extensions import Self

FUNC = "follow"
_MOST_LINES = 4
# For a publisher to answer at its door, where nobody may wait any more; and more for each master
# that may come before the one that serves, and not answer.
_DOOR_SECONDS, _MASTER_SECONDS = 3.0, 7.0
_PATIENCE_SECONDS = 30.0
# Seconds between looks at the master's status: the first, the longest while nobody sends, and the
# longest while somebody does.
_FIRST_PAUSE, _SHORT_PAUSE, _LONG_PAUSE = 0.25, 5.0, 30.0
_MOST_PAUSE = 30.0  # seconds until a publisher that fails is tried again
_ANSWER_SECONDS = 120.0  # for each message of a publisher, which may have to hash all of it first
_STALLED_SECONDS = 15.0  # without a piece, after which a later revision is received instead
# A revision that is not higher than the last one counts when nothing else is on offer for so long.
_BACK_SECONDS = 10.0

_open: set[Follower] = set()
_log = logging.getLogger(__name__)


@atexit.register
def _at_exit() -> None:
    for follower in list(_open):
        follower.close()  # nothing in a forked child


class Revision:
    """A revision of the run's shared state, received whole and checked.

    Attributes:
        revision: Its number.
        size: Bytes of the state.
        received_bytes: Of these, what had changed and was received.
        seconds: From the first byte to the last.
    """

    def __init__(self, assembly: Assembly, seconds: float) -> None:
        self.revision = assembly.offer.revision
        self.size = assembly.offer.size
        self.received_bytes = assembly.received
        self.seconds = seconds
        self._entries = assembly.offer.entries
        self._data = assembly.data

    def state(self) -> Any:
        """The state, made anew: dicts, lists and tuples of arrays, numbers and strings.

        Raises:
            InvalidArgument: It has what only the run's program can make: load it into your own.
        """
        return self.load(_container_of(self._entries))

    def load(self, state: Any) -> Any:
        """Writes it into a state of your own, and returns that: see `pccl.sync`.

        Arrays are written in place; a model or another object with a state dict loads it.

            revision.load(model)

        Raises:
            InvalidArgument: This state has no place for it. Nothing is changed then.
        """
        return restore(state, self._entries, self._data, FUNC)

    def __repr__(self) -> str:
        return (
            f"<pccl Revision {self.revision}, {self.size} bytes of which {self.received_bytes} "
            f"were received in {self.seconds:.3g} s>"
        )


def _container_of(entries: Sequence[Any]) -> Any:
    """An empty container of the kind that these entries are in."""
    kinds: dict[str, Any] = {"l": [], "t": ()}
    try:
        kind = json.loads(entries[0][3])[1][0]
        return kinds.get(kind, {})
    except (ValueError, TypeError, LookupError):  # no entries, no container, or no sense
        return {}


def follow(
    master: str | None = None,
    *,
    group: int = 0,
    secret: str | bytes | None = None,
    name: str | None = None,
) -> Follower:
    """Receives each revision of a run's shared state without being a member of the run.

        with pccl.follow("10.0.0.1:48148") as follower:
            for revision in follower:
                revision.load(model)
                evaluate(model)

    The run's members offer it by `pccl.publish`. Up to four of them send, each other pieces, and
    only what has changed since the last revision. Threads of this process receive it. A follower
    counts in no quorum, and nobody waits for it. It receives the latest revision whenever it has
    received one; others between the two are left out.

    Args:
        master: As in `pccl.init`. Default: PCCL_MASTER.
        group: The members' `peer_group`.
        secret: The run's. Default: PCCL_SECRET, else what is in the file PCCL_SECRET_FILE.
        name: As in `pccl.init`.

    Raises:
        InvalidArgument: An argument makes no sense.
    """
    address = _settings.master(master, FUNC)
    if address is None:
        sentence = "give the master as 'host:port', or set PCCL_MASTER"
        raise InvalidArgument.because(FUNC, sentence)
    _settings.masters(address, FUNC)
    _core.check_settings(FUNC)
    number = _settings.integer(group, "group", FUNC, 0, GROUPS - 1)
    known = _settings.secret(secret, FUNC)
    own = _settings.name(name, FUNC) or None
    Communicator(address, number, port=0, secret=known, name=own)  # checks the other settings
    return Follower(address, number, known, own)


class _Door(NamedTuple):
    number: int
    publisher: str  # its name


@dataclass
class _Failure:
    """A publisher that could not be received from.

    Attributes:
        pause: Seconds until it is tried again.
        until: The time of that.
    """

    pause: float
    until: float


class Follower:
    """Receives revisions until it is closed. Made by `pccl.follow`. *any thread*"""

    def __init__(
        self, master: str, group: int, secret: _core.Secret | None, name: str | None
    ) -> None:
        self._master, self._group, self._secret, self._name = master, group, secret, name
        self._fork = process.forks
        self._changed = threading.Condition()  # guards what follows
        self._closed = False
        self._lines: list[_Line] = []
        self._failures: dict[str, _Failure] = {}  # by the publisher's name
        self._target: Assembly | None = None  # what is being received
        self._prepares = False  # whether a line makes the next one
        self._began = 0.0  # when the target was first offered
        self._known: Assembly | None = None  # the latest that is complete
        self._latest: Revision | None = None
        self._given: Revision | None = None  # by `next`
        self._seen = time.monotonic()  # when a publisher has answered last
        self._behind_since: float | None = None  # all offers are not higher than what is known
        self._trouble: PCCLError | None = None  # with the master, or the last publisher
        self._look_failed = False  # whether that was the master's status
        self._places_taken = False  # by others, at all publishers
        self._threads = Threads("pccl follower")
        self._threads.start(self._look)
        _open.add(self)

    @property
    def latest(self) -> Revision | None:
        """The latest revision that has been received; None before the first."""
        return self._latest

    def next(self, timeout: float | None = None) -> Revision:
        """Waits for a revision that it has not returned, and returns the latest one.

        Args:
            timeout: Seconds for the whole call. Default: PCCL_TIMEOUT, else no limit.

        Raises:
            StateUnavailable: For half a minute, there was nobody that publishes in this group and
                has a place for this follower.
            AuthenticationFailed: The run has another secret.
            Unreachable: For half a minute, no master and no member answered.
            InvalidUsage: Closed; or this process was forked from the one that follows.
            Timeout: The deadline has passed.
        """
        deadline = _settings.Deadline(_settings.seconds(timeout, FUNC))
        if self._fork != process.forks:
            raise InvalidUsage.because(FUNC, "this process was forked; follow again here")
        with self._changed:
            while self._latest is None or self._latest is self._given:
                if self._closed:
                    raise InvalidUsage.because(FUNC, "this follower is closed")
                self._check_for_publishers()
                left = deadline.left()
                if left == 0:
                    sentence = f"no new revision within {deadline.seconds:g} s"
                    raise Timeout.because(FUNC, sentence)
                self._changed.wait(0.5 if left is None else min(left, 0.5))
            self._given = self._latest
            return self._latest

    def __iter__(self) -> Iterator[Revision]:
        """Revisions as they come; without a deadline, whatever PCCL_TIMEOUT is.

        Ends when there was nobody that publishes for half a minute, unless that is so from the
        beginning: see `next`.
        """
        while True:
            try:
                yield self.next(math.inf)
            except (StateUnavailable, Unreachable) as error:
                if self._given is None:
                    raise
                _log.info("%s", error)
                return

    def close(self) -> None:
        """Leaves. May be called again."""
        if self._fork != process.forks:
            return
        with self._changed:
            self._closed = True
            lines = list(self._lines)
            self._changed.notify_all()
        _open.discard(self)
        for line in lines:
            line.close()
        self._threads.wait()
        with self._changed:
            self._target = self._known = None  # their memory

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<pccl.Follower master={self._master} group={self._group} latest={self._latest!r}>"

    def _check_for_publishers(self) -> None:
        trouble = self._trouble
        if not isinstance(trouble, AuthenticationFailed):
            # A line ends by itself if its publisher hangs.
            present = any(line.offer is not None for line in self._lines)
            if present or time.monotonic() - self._seen < _PATIENCE_SECONDS:
                return
            self._seen = time.monotonic()  # the next call waits again
        if self._places_taken:
            sentence = f"all places at the members of group {self._group} that publish are taken"
            raise StateUnavailable.because(FUNC, sentence)
        if trouble is not None:
            expected = isinstance(trouble, AuthenticationFailed | Unreachable)
            kind = type(trouble) if expected else StateUnavailable
            raise kind.because(FUNC, trouble.reason)
        sentence = f"no member of group {self._group} has published for {_PATIENCE_SECONDS:.0f} s"
        raise StateUnavailable.because(FUNC, sentence)

    # Publishers.

    def _look(self) -> None:
        """Finds publishers while there are fewer than wanted."""
        pause = _FIRST_PAUSE
        while not self._closed:
            if len(self._lines) < _MOST_LINES:
                try:
                    self._enter_doors()
                except Exception as error:  # this thread's end would end all following
                    self._tell(error, of_a_look=True)
            with self._changed:
                count = len(self._lines)
                now = time.monotonic()
                heard = [line.heard for line in self._lines if line.offer is not None]
                self._seen = max([self._seen, *heard])
                if not heard:
                    self._behind_since = None
                most = _LONG_PAUSE if heard else _SHORT_PAUSE
                pause = min(pause, most)

                def wakes(count: int = count, first: float = now + _FIRST_PAUSE) -> bool:
                    lost = len(self._lines) < count and time.monotonic() >= first
                    return self._closed or lost

                if self._changed.wait_for(wakes, _FIRST_PAUSE) or self._changed.wait_for(
                    wakes, max(0.0, pause - _FIRST_PAUSE)
                ):
                    pause = _FIRST_PAUSE
                else:
                    pause *= 2

    def _tell(self, error: Exception, *, of_a_look: bool = False) -> None:
        """Keeps an error for those that wait in vain."""
        # A new one: the traceback of `error` has frames that hold this follower.
        if isinstance(error, PCCLError):
            told = type(error).because(FUNC, error.reason or str(error))
        else:
            told = StateUnavailable.because(FUNC, f"{type(error).__name__}: {error}")
        with self._changed:
            self._trouble, self._look_failed = told, of_a_look
            self._places_taken = self._places_taken and not of_a_look
            self._changed.notify_all()

    def _enter_doors(self) -> None:
        groups = ask_any(self._master, secret=self._secret)[1]["groups"]
        ours = [group for group in groups if group_behind(group["group"]) == self._group]
        doors = [
            _Door(group["group"], group["newcomers"][0]["name"])
            for group in ours
            if not group["members"] and len(group["newcomers"]) == 1
        ]
        random.shuffle(doors)
        # Each publisher has one door: two of one name are of two publishers.
        count = Counter(door.publisher for door in doors)
        now = time.monotonic()
        with self._changed:
            self._places_taken = bool(ours) and not doors and not self._lines
            if self._look_failed:
                self._trouble, self._look_failed = None, False
            for door in doors:
                name = door.publisher
                failure = self._failures.get(name)
                if failure is not None and now < failure.until:
                    continue
                if len(self._lines) == _MOST_LINES or self._closed:
                    return
                if sum(line.publisher == name for line in self._lines) < count[name]:
                    line = _Line(self, door)
                    self._threads.start(line.run)
                    self._lines.append(line)

    # For lines.

    def _end(self, line: _Line, reason: str) -> None:
        """`reason`: why it failed; empty if it did not."""
        with self._changed:
            self._lines.remove(line)
            if line.offer is not None:
                self._failures.pop(line.publisher, None)
            failure = self._failures.get(line.publisher) or _Failure(_FIRST_PAUSE, 0.0)
            pause = min(2 * failure.pause, _MOST_PAUSE)
            self._failures[line.publisher] = _Failure(pause, time.monotonic() + pause)
            self._changed.notify_all()
        if reason and not self._closed:
            sentence = f"{line.publisher} sends nothing: {reason}"
            _log.debug("%s", sentence)
            self._tell(StateUnavailable.because(FUNC, sentence))

    def _offered(self, line: _Line, offer: Offer | None) -> None:
        """A publisher has answered, with an offer or without."""
        with self._changed:
            line.heard = self._seen = time.monotonic()
            if offer is not None:
                line.offer = offer
                self._trouble = None

    def _piece_for(self, line: _Line) -> tuple[Assembly, int] | None:
        """A piece of what the line's publisher offers, that is to be asked for now."""
        offer = line.offer
        assert offer is not None
        with self._changed:
            target = self._target
            if target is None or target.offer.digest != offer.digest:
                # Others have the target, and receive it first.
                if self._prepares or (target is not None and not self._is_given_up(target)):
                    return None
                if not self._is_new(offer):
                    return None
                self._prepares = True
        if target is None or target.offer.digest != offer.digest:
            target = self._prepare(offer, target)
        with self._changed:
            index = target.take(line.asked) if target is self._target else None
            return None if index is None else (target, index)

    def _prepare(self, offer: Offer, partial: Assembly | None) -> Assembly:
        """Begins to receive what is offered. Without the lock: it may copy the whole state."""
        began = time.monotonic()
        known = [one for one in (partial, self._known) if one is not None]
        target = None
        try:
            target = Assembly(offer, known)
            return target
        finally:
            with self._changed:
                self._prepares = False
                if target is not None and not self._closed:
                    self._target, self._began = target, began
                    self._finish()  # nothing may be missing

    def _is_given_up(self, target: Assembly) -> bool:
        """Whether nobody offers the rest of it any more, or nobody has sent any of it for long."""
        heard = [
            line.heard
            for line in self._lines
            if line.offer is not None and line.offer.digest == target.offer.digest
        ]
        # A publisher that rests says so.
        return not heard or time.monotonic() - max(target.changed, *heard) > _STALLED_SECONDS

    def _is_new(self, offer: Offer) -> bool:
        known = self._known
        if known is None or offer.revision > known.offer.revision:
            self._behind_since = None
            return True
        offers = [line.offer for line in self._lines if line.offer is not None]
        if any(
            one.digest == known.offer.digest or one.revision > known.offer.revision
            for one in offers
        ):
            self._behind_since = None
            return False
        now = time.monotonic()
        if self._behind_since is None:
            self._behind_since = now
        if now - self._behind_since < _BACK_SECONDS:
            return False
        was = known.offer.revision
        _log.warning("the run has gone back from revision %d to %d", was, offer.revision)
        self._behind_since = None
        return True

    def _came(self, target: Assembly, index: int, piece: Array | None) -> None:
        """A piece has come, and is right; None: it has not come."""
        with self._changed:
            if piece is None:
                target.put_back(index)
            elif not target.complete:
                target.put(index, piece)
                if target is self._target:
                    self._finish()

    def _finish(self) -> None:
        target = self._target
        if target is None or not target.complete:
            return
        self._target, self._known = None, target
        target.data.flags.writeable = False
        self._latest = Revision(target, time.monotonic() - self._began)
        self._changed.notify_all()


class _Line:
    """Asks one publisher, on a thread of its own.

    Attributes:
        publisher: Its name.
        offer: What it has offered last.
        heard: When it has answered last.
        asked: Pieces of that offer which it has been asked for.
    """

    def __init__(self, follower: Follower, door: _Door) -> None:
        self.publisher = door.publisher
        self.offer: Offer | None = None
        self.heard = 0.0
        self.asked: set[int] = set()
        self._follower = follower
        self._buffer = np.empty(0, np.uint8)
        comm = Communicator._of_own_group(
            door.number,
            follower._master,
            port=0,
            secret=follower._secret,
            name=follower._name,
        )
        comm._quiet = True
        self._pair = Pair(comm, FUNC, timeout=_ANSWER_SECONDS)

    def close(self) -> None:
        self._pair.close()

    def run(self) -> None:
        follower = self._follower
        failure = ""
        try:
            others = follower._master.count(",")
            self._pair.join(_DOOR_SECONDS + others * _MASTER_SECONDS)
            while not follower._closed:
                self._hear()
                while self.offer is not None and not follower._closed:
                    found = follower._piece_for(self)
                    if found is None or not self._receive(*found):
                        break
            self._pair.send(np.array([END, 0], np.int64))
        except Exception as error:  # memory, say
            # Not the error, whose traceback has this frame: such a cycle would keep the connection.
            failure = getattr(error, "reason", "") or f"{type(error).__name__}: {error}"
        finally:
            self._pair.close()
            follower._end(self, failure)

    def _hear(self) -> None:
        """Asks for a new offer, and waits for a while."""
        size = self._ask(NEWS, 0)
        if size > MOST_OFFER:
            raise Refused.because(FUNC, f"{self.publisher} offers in {size} bytes")
        offer = None
        if size > 0:
            told = np.empty(size, np.uint8)
            self._pair.receive(told)
            offer = Offer.read(told, FUNC)
            self.asked.clear()
        self._follower._offered(self, offer)

    def _receive(self, target: Assembly, index: int) -> bool:
        """Asks for a piece. Returns whether to ask this publisher for more."""
        piece = None
        self.asked.add(index)
        try:
            wanted = target.size_of(index)
            size = self._ask(PIECE, index)
            if size == LATER:
                self.asked.discard(index)
                return True
            if size == 0:
                return False  # this publisher has dropped it for later ones
            if size != wanted:
                raise Refused.because(FUNC, f"{self.publisher} sends {size} of {wanted} bytes")
            if self._buffer.size != size:
                self._buffer = np.empty(size, np.uint8)
            # Not into its place: another publisher's may come there first, and be returned.
            self._pair.receive(self._buffer)
            if digest_of(self._buffer) != target.offer.pieces[index]:
                sentence = f"{self.publisher} sends other bytes than it has offered"
                raise Refused.because(FUNC, sentence)
            piece = self._buffer
            return True
        finally:
            self._follower._came(target, index, piece)

    def _ask(self, what: int, index: int) -> int:
        """Asks, and returns the answer's length, or LATER."""
        self._pair.send(np.array([what, index], np.int64))
        size = np.zeros(1, np.int64)
        self._pair.receive(size)
        found = int(size[0])
        if found < 0 and (found != LATER or what != PIECE):
            raise Refused.because(FUNC, f"{self.publisher} answers with {found} bytes")
        with self._follower._changed:
            self.heard = time.monotonic()
        return found
