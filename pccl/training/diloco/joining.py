"""Where a round ends: newcomers are let in, and members compare their states.

Without `background_join` all members wait until the newcomers have the state. With it a newcomer
watches first: it takes part in reductions with a weight too small to count, keeps their results,
and meanwhile receives a snapshot of the state as it was when it came. With the results applied to
the snapshot in their order it holds what the members hold, and counts from the end of that round.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np

from pccl import _settings, api, collective_api
from pccl.communicator import Communicator
from pccl.errors import InvalidArgument, PCCLError, PeerLost, StateUnavailable
from pccl.following.snapshot import Snapshot, listed, restore, unpack
from pccl.frameworks import Array
from pccl.training.diloco.meeting import FIRST_LINE, LAST_LINE, Meeting, Record
from pccl.training.diloco.options import FUNC, Data, Plan, refused
from pccl.training.diloco.outer import OuterOptimizer
from pccl.training.diloco.reductions import TAG, Flight, Reductions
from pccl.training.diloco.snapshots import Fetch, Holder, Line, Progress
from pccl.types import ReduceInfo, SyncInfo

# Rounds that a newcomer watches, and results of the parameters' size that it keeps of them. A round
# has one result, or up to ten in a warm-up.
_MOST_WATCHED = 16

_Made = TypeVar("_Made")

_log = logging.getLogger(__name__)


def call_timeout() -> float | None:
    """Seconds for each collective call."""
    return _settings.seconds(None, FUNC)


def retried(call: Callable[[], _Made]) -> _Made:
    """Calls again when another member was interrupted. All members do, and nothing has changed."""
    while True:
        try:
            return call()
        except PeerLost:
            continue


class Joining(Reductions):
    """A member at the ends of rounds. `DiLoCo` documents the public attributes."""

    _plan: Plan
    _settings: str
    _data: Data | None
    _names: list[str]
    _outer: list[Array]
    _optimizers: list[OuterOptimizer]
    _progress: Progress

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0
        self._world_tokens = 0.0
        # Whether the shared state is that of a round's end, where reductions begin.
        self._between = False
        self._pinned = False  # whether the data knows for whom its examples are
        self.sync_info: SyncInfo | None = None
        self.observers: tuple[str, ...] = ()
        self._watching = False  # this peer is a newcomer that does not count yet
        self._holds = False  # this peer has the run's state
        # Whether this peer may leave as it was asked to, while newcomers watch: all know that it
        # does, and somebody else has the state and stays.
        self._may_leave = False
        self._came = 0  # the inner step at which this newcomer came
        self._kept: list[tuple[int, Flight]] = []  # what it has to apply to the snapshot
        self._fetch: Fetch | None = None
        self._holding: list[Holder] = []  # for newcomers

    @property
    def outer_step(self) -> int:
        """Rounds that the run has finished; equal on all members."""
        return self._steps // self._plan.sync_every

    # Called here, and defined in `DiLoCo`.

    def _advance(self) -> None:
        raise NotImplementedError

    def _go_on(self, leaving: Sequence[int], given: Any, due: list[int]) -> None:
        raise NotImplementedError

    def _settle(self, fragment: int, flight: Flight) -> None:
        raise NotImplementedError

    def _be_ready_to_go_on(self) -> None:
        raise NotImplementedError

    def _layout(self) -> dict[str, Any]:
        raise NotImplementedError

    # A round's end.

    def _admit(self) -> bool:
        """Lets newcomers in, and compares states when that is due.

        Returns:
            Whether this member's state was not the group's, and is now.
        """
        every = self._plan.verify_every
        self._leave_lost_newcomers()
        for flight in self._flying.values():
            self._complete(flight)
        # A replica may be let into some of its ranks' groups and be lost before the others let it
        # in. All ranks must make the same calls nevertheless.
        verify = every > 0 and self.outer_step % every == 0
        verify = verify or bool(api.membership(self._comm).replicas)
        if self._plan.background_join or not verify:
            grown = retried(lambda: api.admit_and_stay(self._comm, call_timeout()))
            if self._plan.background_join and (grown or self.observers):
                return self._meet()
            if not (verify or grown):
                self._pin()
                return False
        self._between = True
        return self._share()

    def _share(self, *, offers: bool = True) -> bool:
        """One sync. Returns whether something was new here.

        The revision is the number of rounds: a checkpoint's counts when the run starts again, and
        is refused by a run that is behind it. A newcomer that knows the run's step, and not its
        state, offers none: it must not count as a checkpoint if all others are lost.
        """
        revision = self.outer_step if offers else None
        pending = self._pending()
        try:
            shared, info = retried(
                lambda: api.sync_and_stay(
                    self._shared_state(pending),
                    revision,
                    None,
                    call_timeout(),
                    self._comm,
                    lets_in=not self._plan.background_join,
                )
            )
        except InvalidArgument:  # the run's state does not fit here, as that of another sampler
            self._leave()  # the others would wait for it
            raise
        self.sync_info = info
        self._pin()
        if shared["settings"] != self._settings:
            self._leave()  # the others would wait for it
            raise refused(f"this peer has {self._settings}; the run has {shared['settings']}")
        self._steps, self._between = shared["steps"], shared["between"]
        self._world_tokens = shared["world_tokens"]
        if info.received:
            self._flying = _flights(shared["pending"])
        return bool(info.received)

    def _pending(self) -> dict[str, Any]:
        """The results that are not yet applied, as a part of the shared state."""
        return {
            str(p): {"due": flight.due, "result": flight.result}
            for p, flight in self._flying.items()
        }

    def _shared_state(self, pending: dict[str, Any]) -> dict[str, Any]:
        """The common state of all members, with these results that are not yet applied."""
        state: dict[str, Any] = {
            "settings": self._settings,
            "steps": self._steps,
            "between": self._between,
            "world_tokens": self._world_tokens,
            "parameters": dict(zip(self._names, self._outer, strict=True)),
            "optimizer": {str(p): made.state() for p, made in enumerate(self._optimizers)},
            "pending": pending,
        }
        if self._data is not None:
            state["data"] = self._data
        return state

    def _pin(self, info: ReduceInfo | None = None) -> None:
        """Later examples are divided among the present members, or those of a reduction.

        Called where all members have met, or apply this reduction, and nowhere else: at other times
        some members may know of a loss that others do not.
        """
        self._pinned = True
        if self._data is None or self._watching:
            return
        if self.observers:
            self._data.pin(info, without=self.observers)
        else:
            self._data.pin(info)

    def _gather(self, tree: Any) -> tuple[Any, ReduceInfo]:
        """The trees of all members, and the info whose `contributors` they are of."""
        return collective_api.allgather(
            tree, tag=TAG, timeout=call_timeout(), return_info=True, comm=self._comm
        )

    def _own_id(self) -> str:
        """Empty while this peer is not a member."""
        with suppress(PCCLError):
            group = api.membership(self._comm)
            return group.peers[group.rank] if group.rank >= 0 else ""
        return ""

    def _communicator(self) -> Communicator | None:
        return api._default if self._comm is None else self._comm

    @contextmanager
    def _that_others_go_on_with(self) -> Iterator[None]:
        """For calls that belong together. Other members do not learn of a Ctrl-C between them.

        A member that was interrupted there has to leave: its next call would meet another one of
        theirs. That is a fact of the communicator, whatever object makes that call.
        """
        try:
            yield
        except PCCLError:
            raise
        except BaseException:
            comm = self._communicator()
            if comm is not None and self._own_id():
                comm._torn = True
            raise

    def _leave(self) -> None:
        self._stop_holding()
        if self._comm is None:
            api.shutdown()
        else:
            self._comm.close()

    # Joining.

    def _enter(self) -> bool:
        """Becomes a member that holds the run's state, and counts.

        Returns:
            Whether it has done so at the end of a round, and begun the next.
        """
        self.observers = ()
        self._watching = self._holds = False
        self._kept.clear()
        self._stop_holding()
        self._forget_fetch()
        if not self._plan.background_join:
            self._share()
            return False
        before = self._steps
        try:
            retried(lambda: api.admit_and_stay(self._comm, call_timeout()))
            self._meet()
            watches = self._watching
            if watches:
                self._watch()
        except BaseException:
            if not self._holds:
                self._steps = before  # the run's step without its state would be a false revision
            raise
        return watches

    def _meet(self) -> bool:
        """Members and newcomers tell each other how far they are. Returns as `_admit`."""
        meeting = retried(self._say)
        while meeting.waits:  # all that counted are gone
            if self._fetch is not None:
                self._fetch.wait()
                self._adopt_what_is_there()
            meeting = retried(self._say)
        own = next(one for one in meeting.records if one.peer == self._own_id())
        if not meeting.holders:
            if self._watching:
                self._leave()  # newcomers may begin a run
                raise StateUnavailable.because(FUNC, "all that had the run's state are gone")
            self.observers = ()
            shared = self._share()
            self._holds = True
            return shared
        self._between = True
        if meeting.misfit(own):
            self._leave()  # the others would wait for it
            raise own.why_refused(meeting.holders[0])
        if meeting.must_share:
            if own.holds and self._plan.join_megabits is not None:
                _log.warning(
                    "all members wait for a newcomer, and send it the state without a bound: it "
                    "does not get it, or not in %d rounds. join_megabits=%g may be too low",
                    _MOST_WATCHED,
                    self._plan.join_megabits,
                )
            return self._share_with_all()
        self.observers = tuple(record.peer for record in meeting.behind)
        self._may_leave = own.leaves and meeting.stays(own.peer)
        graduates = own in meeting.graduates
        if meeting.graduates and self._data is not None:
            self._share_data(meeting)
        if graduates:
            self._watching = False
            self._forget_fetch()
        elif own in meeting.newcomers:
            self._begin_watching(meeting, own)
        self._hold(meeting, own.peer)
        self._pin()
        return graduates

    def _say(self) -> Meeting:
        comm = api._use(self._comm, FUNC)
        fetch = self._fetch
        watched = self._steps - self._came >= _MOST_WATCHED * self._plan.sync_every
        watched = watched or len(self._kept) >= _MOST_WATCHED * len(self._plan.fragments)
        whole = json.dumps([self._settings, self._layout(), self._data is not None])
        record = Record(
            peer="",
            settings=self._settings,
            digest=hashlib.sha256(whole.encode()).digest(),
            steps=self._steps,
            holds=self._holds,
            counts=self._holds and not self._watching,
            leaves=comm.draining,
            fetches=fetch is not None and not fetch.failed and not self._holds,
            stuck=fetch is not None and (fetch.failed or watched),
            line=random.SystemRandom().randrange(FIRST_LINE, LAST_LINE),
        )
        found, info = self._gather(record.tree())
        return Meeting.of(info.contributors, found, self.observers)

    def _share_with_all(self) -> bool:
        """All wait until the newcomers have the state."""
        watched, self._watching = self._watching, False
        self._forget_fetch()
        self._kept.clear()
        self.observers = ()
        shared = self._share(offers=self._holds)
        self._holds = True
        return shared or watched

    def _share_data(self, meeting: Meeting) -> None:
        """Gives the place in the data to newcomers that count from here on.

        It is a part of the snapshot, too, but its changes since are not reductions' results.
        """
        state = {"data": self._data}
        given = np.empty(0, np.uint8)
        if self._holds and not self._watching:
            given = Snapshot(state, FUNC).packed()

        sizes, _ = retried(lambda: self._gather(np.array([given.size])))
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: given.size] = given
        found, info = retried(lambda: self._gather(padded))
        if not self._watching or not self._holds:
            return
        senders = {record.peer for record in meeting.holders if record.counts}
        for peer, packed in zip(info.contributors, found, strict=True):
            if peer in senders:
                unpack(state, packed, FUNC)
                return

    # Newcomers of others.

    def _hold(self, meeting: Meeting, own: str) -> None:
        """Sends the state to newcomers, where this member is one of their holders."""
        lines = [
            (record.peer, record.line + index)
            for record in meeting.newcomers
            for index, peer in enumerate(meeting.lines(record))
            if peer == own
        ]
        if not lines:
            return
        snapshot = Snapshot(self._shared_state(self._pending()), FUNC)
        comm = api._use(self._comm, FUNC)
        for peer, group in lines:
            self._holding.append(Holder(peer, Line(comm, group), snapshot, self._progress))

    def _leave_lost_newcomers(self) -> None:
        """Ends what is sent to newcomers that are gone.

        One that was lost before it came to a line would be waited for there.
        """
        self._holding = [holder for holder in self._holding if not holder.over]
        if self._holding:
            here = api.membership(self._comm).peers
            for holder in self._holding:
                if holder.newcomer not in here:
                    holder.close()

    def _stop_holding(self) -> None:
        for holder in self._holding:
            holder.close()
        self._holding.clear()

    # A newcomer that watches.

    def _begin_watching(self, meeting: Meeting, own: Record) -> None:
        comm = api._use(self._comm, FUNC)
        self._watching = True
        self._steps = self._came = meeting.holders[0].steps
        count = len(meeting.lines(own))
        self._fetch = Fetch([Line(comm, own.line + index) for index in range(count)])

    def _watch(self) -> None:
        """Makes the calls that members make, at the time when they do, until this peer counts."""
        assert self._fetch is not None
        try:
            self._go_on(self._plan.leaving(self._steps), {}, [])
            while self._watching:
                self._steps = self._next_calls()
                if not self._holds:
                    self._fetch.wait(self._steps)
                    self._adopt_what_is_there()
                self._fetch.follow(self._steps)
                self._adopt_what_is_there()
                self._advance()
        finally:
            self._watching = False
            self._kept.clear()
            self._forget_fetch()

    def _next_calls(self) -> int:
        """The next inner step after which members make collective calls."""
        every, step = self._plan.sync_every, self._steps + 1
        # Members wait where a reduction is due, too, and may have to begin it again there.
        due = {flight.due for flight in self._flying.values()}
        while step % every and step not in due:
            if self._plan.leaving(step):
                break
            step += 1
        return step

    def _adopt_what_is_there(self) -> None:
        """Takes over the snapshot, once it is complete, and applies what was reduced since."""
        fetch = self._fetch
        if self._holds or fetch is None or not fetch.complete:
            return
        try:
            manifest, data = fetch.take()
            shared = restore(self._shared_state({}), listed(manifest), data, FUNC)
        except PCCLError:
            self._leave()  # the others would wait for it
            raise
        self._world_tokens = shared["world_tokens"]
        for fragment, flight in _flights(shared["pending"]).items():
            # Fragments are independent, and have one reduction in flight at a time.
            if flight.due <= self._steps:
                self._settle(fragment, flight)
            else:
                self._flying[fragment] = flight
        for fragment, flight in self._kept:
            self._settle(fragment, flight)
        self._kept.clear()
        self._holds = True
        self._be_ready_to_go_on()

    def _forget_fetch(self) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.end()


def _flights(pending: dict[str, Any]) -> dict[int, Flight]:
    """The flights of `Joining._pending`, in the order in which they are due."""
    found = sorted(pending.items(), key=lambda item: (item[1]["due"], item[0]))
    return {int(p): Flight(kept["due"], kept["result"]) for p, kept in found}
