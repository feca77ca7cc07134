"""The followers' side: finding publishers, and receiving from several of them at a time."""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pccl import _core, _settings
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
from pccl.following.offer import END, MOST_OFFER, NEWS, PIECE, Assembly, Offer, digest_of
from pccl.following.pair import Pair
from pccl.following.snapshot import restore
from pccl.following.threads import Threads
from pccl.tools.status import ask_any

if TYPE_CHECKING:
    from typing_extensions import Self

FUNC = "follow"
_MOST_PAIRS = 4
_DOOR_SECONDS = 5.0  # for a publisher to answer at its door: somebody else may have taken it
_PATIENCE_SECONDS = 30.0
# Seconds between looks at the master's status: the first, the longest while nobody sends, and the
# longest while somebody does.
_FIRST_PAUSE, _SHORT_PAUSE, _LONG_PAUSE = 0.2, 2.0, 10.0
# A revision that is not higher than the last one counts when nothing else is on offer for so long.
_BACK_SECONDS = 10.0

_open: set[Follower] = set()
_log = logging.getLogger(__name__)


@atexit.register
def _at_exit() -> None:
    for follower in list(_open):
        follower.close()


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
        return self.load({})

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
    address = _settings.text("PCCL_MASTER") if master is None else master
    if not isinstance(address, str) or not address:
        sentence = f"master must be 'host:port', not {address!r}"
        if address is None:
            sentence = "give the master as 'host:port', or set PCCL_MASTER"
        raise InvalidArgument.because(FUNC, sentence)
    _core.parse_masters(address, FUNC)
    number = _settings.integer(group, "group", FUNC, 0, GROUPS - 1)
    known = _settings.secret(secret, FUNC)
    return Follower(address, number, known, _settings.name(name, FUNC) or None)


class _Door(NamedTuple):
    number: int
    publisher: str  # its name


class Follower:
    """Receives revisions until it is closed. Made by `pccl.follow`. *any thread*"""

    def __init__(
        self, master: str, group: int, secret: _core.Secret | None, name: str | None
    ) -> None:
        self._master, self._group, self._secret, self._name = master, group, secret, name
        self._changed = threading.Condition()  # guards what follows
        self._closed = False
        self._lines: dict[str, _Line] = {}  # by the publisher's name
        self._target: Assembly | None = None  # what is being received
        self._began = 0.0  # when that was first offered
        self._known: Assembly | None = None  # the latest that is complete
        self._latest: Revision | None = None
        self._given: Revision | None = None  # by `next`
        self._seen = time.monotonic()  # when a publisher was last connected
        self._behind_since: float | None = None  # all offers are not higher than what is known
        self._trouble: PCCLError | None = None
        self._threads = Threads("pccl follower")
        self._threads.start(self._look)
        _open.add(self)

    @property
    def latest(self) -> Revision | None:
        """The latest revision that has been received; None before the first."""
        with self._changed:
            return self._latest

    def next(self, timeout: float | None = None) -> Revision:
        """Waits for a revision that it has not returned, and returns the latest one.

        Args:
            timeout: Seconds for the whole call. Default: PCCL_TIMEOUT, else no limit.

        Raises:
            StateUnavailable: For half a minute, nobody has published in this group.
            AuthenticationFailed: The run has another secret.
            Unreachable: For half a minute, no master answers and no member sends.
            InvalidUsage: Closed.
            Timeout: The deadline has passed.
        """
        deadline = _settings.Deadline(_settings.seconds(timeout, FUNC))
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
        """Revisions as they come. Ends when nobody has sent one for half a minute: see `next`."""
        while True:
            try:
                yield self.next()
            except (StateUnavailable, Unreachable) as error:
                if self._given is None:
                    raise
                _log.info("%s", error)
                return

    def close(self) -> None:
        """Leaves. May be called again."""
        with self._changed:
            self._closed = True
            lines = list(self._lines.values())
            self._changed.notify_all()
        _open.discard(self)
        for line in lines:
            line.close()
        self._threads.wait()

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
        if isinstance(trouble, AuthenticationFailed):
            raise trouble
        if time.monotonic() - self._seen < _PATIENCE_SECONDS:
            return
        self._seen = time.monotonic()  # the next call waits again
        if trouble is not None:
            raise trouble
        sentence = f"no member of group {self._group} has published for {_PATIENCE_SECONDS:.0f} s"
        raise StateUnavailable.because(FUNC, sentence)

    # Publishers.

    def _look(self) -> None:
        """Finds publishers while there are fewer than wanted."""
        pause = _FIRST_PAUSE
        while True:
            with self._changed:
                if self._closed:
                    return
                missing = len(self._lines) < _MOST_PAIRS
            if missing:
                self._enter_doors()
            with self._changed:
                count = len(self._lines)
                if any(line.offer is not None for line in self._lines.values()):
                    self._seen, most = time.monotonic(), _LONG_PAUSE
                else:
                    most = _SHORT_PAUSE

                def lost(count: int = count) -> bool:
                    return self._closed or len(self._lines) < count

                lines_end = self._changed.wait_for(lost, min(pause, most))
                pause = _FIRST_PAUSE if lines_end else min(2 * pause, most)

    def _enter_doors(self) -> None:
        try:
            doors = self._doors()
        except PCCLError as error:
            with self._changed:
                self._trouble = error
                self._changed.notify_all()
            return
        with self._changed:
            self._trouble = None
            for door in doors:
                if len(self._lines) == _MOST_PAIRS or self._closed:
                    return
                if door.publisher not in self._lines:
                    self._lines[door.publisher] = _Line(self, door)

    def _doors(self) -> list[_Door]:
        """All doors of the group's members, in a random order."""
        status = ask_any(self._master, secret=self._secret)[1]
        found = [
            _Door(group["group"], group["newcomers"][0]["name"])
            for group in status["groups"]
            if group_behind(group["group"]) == self._group
            and not group["members"]
            and len(group["newcomers"]) == 1
        ]
        random.shuffle(found)
        return found

    # For lines.

    def _end(self, line: _Line) -> None:
        with self._changed:
            if line.offer is not None:
                self._seen = time.monotonic()
            del self._lines[line.publisher]
            self._changed.notify_all()

    def _piece_of(self, offer: Offer) -> tuple[Assembly, int] | None:
        """A piece of what the line's publisher offers, that is to be asked for now."""
        with self._changed:
            target = self._target
            if target is None or (target.offer.digest != offer.digest and not target.busy):
                if not self._is_new(offer):
                    return None
                target = self._target = Assembly(offer, self._known)
                self._began = time.monotonic()
                self._finish()  # nothing may be missing
            if target.offer.digest != offer.digest:
                return None  # others have it, and receive it first
            index = target.take()
            return None if index is None else (target, index)

    def _is_new(self, offer: Offer) -> bool:
        known = self._known
        if known is None or offer.revision > known.offer.revision:
            self._behind_since = None
            return True
        offers = [line.offer for line in self._lines.values() if line.offer is not None]
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

    def _came(self, target: Assembly, index: int, whole: bool) -> None:
        """A piece has come, or has not."""
        with self._changed:
            if whole:
                target.put(index)
            else:
                target.put_back(index)
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
    """

    def __init__(self, follower: Follower, door: _Door) -> None:
        self.publisher = door.publisher
        self.offer: Offer | None = None
        self._follower = follower
        comm = Communicator(follower._master, door.number, name=follower._name)
        comm._secret = follower._secret
        comm._quiet = True
        self._pair = Pair(comm, FUNC)
        follower._threads.start(self._run)

    def close(self) -> None:
        self._pair.close()

    def _run(self) -> None:
        follower = self._follower
        try:
            self._pair.join(_DOOR_SECONDS)
            while not follower._closed:
                self._hear()
                while self.offer is not None and not follower._closed:
                    found = follower._piece_of(self.offer)
                    if found is None or not self._receive(*found):
                        break
            self._pair.send(np.array([END, 0], np.int64))
        except PCCLError as error:
            if not follower._closed:
                _log.debug("%s sends no more: %s", self.publisher, error)
        finally:
            self._pair.close()
            follower._end(self)

    def _hear(self) -> None:
        """Asks for a new offer, and waits for a while."""
        size = self._ask(NEWS, 0)
        if size == 0:
            return
        if size > MOST_OFFER:
            raise Refused.because(FUNC, f"{self.publisher} offers in {size} bytes")
        told = np.empty(size, np.uint8)
        self._pair.receive(told)
        offer = Offer.read(told, FUNC)
        with self._follower._changed:
            self.offer = offer

    def _receive(self, target: Assembly, index: int) -> bool:
        """Asks for a piece. Returns whether it has come."""
        whole = False
        try:
            place = target.place(index)
            size = self._ask(PIECE, index)
            if size == 0:
                return False  # this publisher has dropped it for later ones
            if size != place.size:
                raise Refused.because(FUNC, f"{self.publisher} sends {size} of {place.size} bytes")
            self._pair.receive(place)
            if digest_of(place) != target.offer.pieces[index]:
                sentence = f"{self.publisher} sends other bytes than it has offered"
                raise Refused.because(FUNC, sentence)
            whole = True
            return True
        finally:
            self._follower._came(target, index, whole)

    def _ask(self, what: int, index: int) -> int:
        """Asks, and returns the answer's length."""
        self._pair.send(np.array([what, index], np.int64))
        size = np.zeros(1, np.int64)
        self._pair.receive(size)
        if size[0] < 0:
            raise Refused.because(FUNC, f"{self.publisher} answers with {size[0]} bytes")
        return int(size[0])
