"""Assigns examples to members, so that the group sees each once per epoch as members come and go.

An epoch is a permutation of all examples. The group shares one place in it: every step takes the
next examples, divided among the members. They are settled when the reduction that the step led to
has succeeded. The parts of members that contributed are done; the part of a lost member goes back,
to be taken first.

    sampler = ElasticSampler(len(examples), batch_size=32)
    state = {"weights": weights, "sampler": sampler}
    while True:
        if pccl.admit():
            state = pccl.sync(state)
        if sampler.epoch == 3:
            break
        batch = examples[sampler.take()]
        mean, info = pccl.allreduce(gradients(batch), "avg", return_info=True)
        sampler.commit(info)
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from pccl import api
from pccl.api import Membership
from pccl.communicator import Communicator
from pccl.errors import InvalidArgument, InvalidUsage
from pccl.training.permutation import Indices, permuted
from pccl.types import ReduceInfo

__all__ = ["ElasticSampler"]


_MAX_LENGTH = 1 << 62
_IN_FLIGHT = "examples are in flight; call commit(info) or rollback() first"
# Turns in which members' reserved examples follow each other. Few turns leave few gaps. With many
# turns the examples that are used are near to each other.
_TURNS = 16
_log = logging.getLogger(__name__)
_ALONE = Membership(epoch=0, rank=0, world_size=1, peers=("",), peer_group=0)


class _Span(NamedTuple):
    """Places [start, stop) of an epoch's permutation."""

    epoch: int
    start: int
    stop: int


class _Take(NamedTuple):
    """The members of one step, in rank order, and what it took for all of them together.

    Or what is reserved for them until the next commit: then `block` is the number of examples after
    which it is the next member's turn. Each member uses a part of its examples.
    """

    peers: tuple[str, ...]
    spans: list[_Span]
    block: int = 0

    def size(self, rank: int) -> int:
        """Examples of one member: all have as many, but the first one more where needed."""
        share, over = divmod(_count(self.spans), len(self.peers))
        return share + (rank < over)

    def part(self, rank: int, first: int = 0, last: int | None = None) -> list[_Span]:
        """One member's examples, or its examples [first, last)."""
        stop = self.size(rank) if last is None else last
        if not self.block:
            share, over = divmod(_count(self.spans), len(self.peers))
            begin = rank * share + min(rank, over)
            return _cut(self.spans, begin + first, begin + stop)
        part: list[_Span] = []
        while first < stop:
            turn, place = divmod(first, self.block)
            length = min(self.block - place, stop - first)
            begin = (turn * len(self.peers) + rank) * self.block + place
            part += _cut(self.spans, begin, begin + length)
            first += length
        return _merged(part)


class ElasticSampler:
    """Hands out indices of examples, each one once per epoch over all members together.

    Keep it in the shared state (`pccl.sync`) and in checkpoints: it has `state_dict` and
    `load_state_dict`. All members call `take` and `commit` at the same places of the program.

    An example counts as seen when the member that took it has contributed to a successful
    reduction. The others take again what a killed member took since the last commit. An epoch's
    order depends on `seed` and the epoch's number alone, the same on every machine.

    One thread: no two calls at once.

    Attributes:
        length: Number of examples.
        batch_size: Examples per member and step. All members may set it at the same place of the
            program.
        committed: Examples seen so far, over all epochs.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Literal["carry", "short"] = "carry",
        comm: Communicator | None = None,
    ) -> None:
        """Begins at the first example of epoch 0.

        Args:
            length: Number of examples; the same on all members.
            batch_size: Examples per member and step, unless `take` says otherwise; the same on all
                members, and when a run is resumed.
            shuffle: Another order in every epoch; otherwise they come in their own order.
            seed: Selects the orders. A newcomer takes over the run's.
            remainder: Rule for a step when the epoch has too few examples left for all; the same on
                all members. "carry" adds the next epoch's first ones, so every step is full.
                "short" takes what is left, divided as evenly as possible. Some members may get
                nothing, so weight the mean with `len(batch)`.
            comm: Its members take part. Default: those of the process's communicator; before
                `pccl.init` the process is alone.

        Raises:
            InvalidArgument: An argument makes no sense.
        """
        func = "ElasticSampler"
        if not 0 < length <= _MAX_LENGTH:
            raise InvalidArgument.because(func, f"length must be from 1 to 2**62, not {length!r}")
        if batch_size < 1:
            raise InvalidArgument.because(func, f"batch_size must be positive, not {batch_size!r}")
        if remainder not in ("carry", "short"):
            sentence = f'remainder must be "carry" or "short", not {remainder!r}'
            raise InvalidArgument.because(func, sentence)
        self.length = int(length)
        self.batch_size = int(batch_size)
        self.committed = 0
        self._shuffle = bool(shuffle)
        self._seed = int(seed)
        self._remainder = remainder
        self._comm = comm
        self._epoch = 0  # of the next example that nobody has taken yet
        self._position = 0  # its place; always less than the length
        self._returned: list[_Span] = []  # in order; of this epoch or earlier ones
        self._pinned: Membership | None = None
        # Unsettled takes by the reduction that they belong to, oldest first. The last list is open.
        self._phases: list[list[_Take]] = [[]]
        # How many of them this peer sealed since it got the state: the last before the open one.
        self._sealed = 0
        self._reserve = 0  # steps that a member may make between two commits; 0: all make as many
        self._taken = 0  # examples that this member has used of those reserved in the open list
        self._warned = False  # of an epoch that is over

    @property
    def epoch(self) -> int:
        """The epoch that the next `take` begins with. Returned examples may set it back by one.

        With `reserve` it is that of the first example that is not settled, and changes at commits.
        """
        begun = self._returned[0].epoch if self._returned else self._epoch
        return min([begun, *(span.epoch for span in self._reserved_spans())])

    @property
    def remaining(self) -> int:
        """Examples of that epoch that no member has taken, for all members together.

        With `reserve`: those that are not settled.
        """
        epoch = self.epoch
        fresh = self.length - self._position if epoch == self._epoch else 0
        others = [*self._returned, *self._reserved_spans()]
        return fresh + sum(stop - start for e, start, stop in others if e == epoch)

    @property
    def in_flight(self) -> int:
        """Examples taken by all members together, and not settled yet. With `reserve`: reserved."""
        return sum(_count(take.spans) for phase in self._phases for take in phase)

    @property
    def taken(self) -> int:
        """With `reserve`: examples that this member has taken for the next reduction."""
        return self._taken

    def reserve(self, steps: int) -> None:
        """Members may take different numbers of examples between two commits from now on.

        The first `take` or `hold` after a commit reserves `steps * batch_size` examples for each
        member. Its takes are parts of these. `commit` then needs the number that each took, and
        gives back the rest. Test `epoch` after a commit: it changes there.
        `DiLoCo(data=..., round_seconds=...)` does all this.

        All members call it with the same number, before the first `take`.

        Args:
            steps: The most steps that a member makes between two commits. 0: all members make the
                same number of steps again, and nothing is reserved.

        Raises:
            InvalidUsage: Examples are in flight; `commit` or `rollback` first.
            InvalidArgument: The sampler has remainder="short".
        """
        func = "ElasticSampler.reserve"
        if steps < 0:
            raise InvalidArgument.because(func, f"steps must not be negative, but are {steps!r}")
        if steps and self._remainder == "short":
            raise InvalidArgument.because(func, 'it needs remainder="carry"')
        if steps != self._reserve and self._phases != [[]]:
            raise InvalidUsage.because(func, _IN_FLIGHT)
        self._reserve = int(steps)

    def hold(self) -> None:
        """With `reserve`: reserves now what the first `take` would reserve.

        Members that may have taken nothing call it before `taken`, `seal` and `commit`: examples
        are reserved on all members or on none.
        """
        group = self._present()
        if self._reserve and group.rank >= 0:
            self._abandon(group.peers)
            self._reserved(group)

    def take(
        self, batch_size: int | None = None, *, membership: Membership | None = None
    ) -> Indices:
        """This member's next examples. All members call it.

        Args:
            batch_size: For each member; the same on all. For the H steps of a DiLoCo round take H
                times as many at once, or call it H times. Default: the sampler's.
            membership: Divides them among these. Default: the group's present members.

        Returns:
            Indices, int64[batch_size]; at an epoch's end with remainder="short" fewer, or none.

        Raises:
            InvalidUsage: This peer has not been let in yet: call `pccl.sync` first. Or, with
                `reserve`, no examples are left for it, or none were reserved.
        """
        group = self._present() if membership is None else membership
        if group.rank < 0:
            sentence = "this peer is not a member yet; call pccl.sync(state) first"
            raise InvalidUsage.because("ElasticSampler.take", sentence)
        if batch_size is not None and batch_size < 1:
            sentence = f"batch_size must be positive, not {batch_size!r}"
            raise InvalidArgument.because("ElasticSampler.take", sentence)
        self._abandon(group.peers)
        size = self.batch_size if batch_size is None else int(batch_size)
        if self._reserve:
            spans = self._use(size, group)
        else:
            taken = _Take(group.peers, self._draw(size * len(group.peers)))
            self._phases[-1].append(taken)
            spans = taken.part(group.rank)
        parts = [self._indices(span) for span in spans]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def seal(self) -> None:
        """Assigns earlier takes to the reduction that starts now, and later ones to the next.

        Only for reductions that run while training goes on, as in asynchronous DiLoCo: call it when
        one starts, and `commit` when it has succeeded.
        """
        self._phases.append([])
        self._sealed += 1
        self._taken = 0

    def commit(
        self,
        contributors: ReduceInfo | Iterable[str] | Mapping[str, int] | None = None,
    ) -> None:
        """Settles what was taken for a reduction that has succeeded. All members call it.

        Examples of members that did not contribute go back, to be taken next.

        Args:
            contributors: The reduction's `ReduceInfo`, or ids of the peers whose examples are in
                its result. Default: the present members; good directly after the reduction. A
                member that contributed and was lost since does not count then, and its examples are
                seen twice. With `reserve` a mapping from their ids to the number of examples that
                each took, as its `taken` said before the reduction; equal on all members, as by
                `pccl.allgather`.

        Raises:
            InvalidUsage: Examples were reserved, and there are no numbers. Nothing is changed.
        """
        taken = contributors if isinstance(contributors, Mapping) else None
        if taken is None and any(take.block for take in self._phases[0]):
            sentence = "examples were reserved: pass how many each contributor took, by its id"
            raise InvalidUsage.because("ElasticSampler.commit", sentence)
        if contributors is None:
            contributors = self._present().peers
        elif isinstance(contributors, ReduceInfo):
            contributors = contributors.contributors or _ALONE.peers
        self._settle(self._phases.pop(0), frozenset(contributors), taken)
        if not self._phases:
            self._phases.append([])
            self._taken = 0
        self._sealed = min(self._sealed, len(self._phases) - 1)

    def follow(self, comm: Communicator) -> None:
        """Goes on with the members of another communicator, as after coming back to the run."""
        self._comm = comm
        self._pinned = None

    def rollback(self) -> None:
        """Gives back all that was taken and not committed, undoing the steps. All members call it.

        Later takes are for the members at that time, whatever `pin` said.
        """
        self._pinned = None
        for phase in self._phases:
            self._settle(phase, frozenset())
        self._phases, self._sealed, self._taken = [[]], 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of a later epoch. Does nothing in that epoch, as in a resumed loop.

        The rest of the epoch before is skipped, but not what a lost member gave back when all the
        rest was taken. An epoch that is over is not begun again: the newcomer's loop, or its
        trainer, begins with 0, and the run's place counts. A warning says so once.

        Raises:
            InvalidUsage: Examples are in flight; `commit` or `rollback` first.
        """
        if epoch in (self.epoch, self._epoch):
            return
        if epoch < 0:
            raise InvalidArgument.because("ElasticSampler.set_epoch", "there is no such epoch")
        if epoch < self._epoch:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "set_epoch(%d) has no effect: the sampler is in epoch %d already; a loop that "
                    "newcomers may enter is `while sampler.epoch < epochs`",
                    epoch,
                    self.epoch,
                )
            return
        if self.in_flight:
            raise InvalidUsage.because("ElasticSampler.set_epoch", _IN_FLIGHT)
        self._epoch, self._position, self._returned = int(epoch), 0, []

    def __iter__(self) -> Iterator[int]:
        """This member's indices until the epoch ends, for `DataLoader(sampler=...)`.

        They are taken `batch_size` at a time, at the first of each. The loader needs the same
        `batch_size`, and `num_workers=0`, since workers ask for more than the loop has used.

        Raises:
            InvalidArgument: As `batches`.
        """
        return itertools.chain.from_iterable(self.batches())

    def batches(self) -> Iterable[list[int]]:
        """This member's batches until the epoch ends, each taken when it is asked for.

        Iterable again and again, for `DataLoader(batch_sampler=...)` with `num_workers=0`.

        Raises:
            InvalidArgument: The sampler has remainder="short".
        """
        if self._remainder == "short":
            # A loader has no empty batch: a member with an empty part would make one step less.
            sentence = 'a loader needs remainder="carry"; with "short" call take() for every step'
            raise InvalidArgument.because("ElasticSampler.batches", sentence)
        return _Batches(self)

    def state_dict(self) -> dict[str, Any]:
        """The shared place: integers and text, equal on all members."""
        return {
            "length": self.length,
            "batch_size": self.batch_size,
            "remainder": self._remainder,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "committed": self.committed,
            # Text: their number changes, and a newcomer must not have entries that the run lacks.
            "returned": json.dumps(self._returned),
            "in_flight": json.dumps(self._phases),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the place of `state`.

        Raises:
            InvalidArgument: It is of another number of examples, batch_size or remainder; or no
                such state.
        """
        func = "ElasticSampler.load_state_dict"
        if state.get("length") != self.length:
            sentence = f"the state is of {state.get('length')} examples, not {self.length}"
            raise InvalidArgument.because(func, sentence)
        # Members would divide steps differently. Not taken over: a loader around this has it, too.
        for name, own in (("batch_size", self.batch_size), ("remainder", self._remainder)):
            if state.get(name) != own:
                sentence = f"this peer has {name}={own!r}; the state has {state.get(name)!r}"
                raise InvalidArgument.because(func, sentence)
        try:
            returned = [_Span(*span) for span in json.loads(state["returned"])]
            phases = [
                [
                    _Take(tuple(peers), [_Span(*span) for span in spans], *block)
                    for peers, spans, *block in phase
                ]
                for phase in json.loads(state["in_flight"])
            ]
            numbers = [int(state[key]) for key in ("seed", "epoch", "position", "committed")]
            shuffle = bool(state["shuffle"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument.because(func, f"this is no sampler's state: {error!r}") from error
        self._seed, self._epoch, self._position, self.committed = numbers
        self._shuffle, self._returned, self._phases = shuffle, returned, phases or [[]]
        self._sealed = self._taken = 0
        if any(take.peers == _ALONE.peers for phase in self._phases for take in phase):
            self.rollback()  # taken by a process that was alone and has ended

    def pin(self, info: ReduceInfo | None = None, *, without: Collection[str] = ()) -> None:
        """Fixes the present members for later takes, until the next call, `rollback` or `follow`.

        All members call it at the same places. It is for reductions that run while training goes
        on: a member that waits alone may see a loss before the others. `DiLoCo(data=...)` does it.

        Args:
            info: Of a reduction: takes are then for the pinned members that contributed to it. An
                info of an earlier membership than the pinned one changes nothing.
            without: Ids of members that take nothing, the same on all members.

        Raises:
            InvalidArgument: The reduction was not one of the sampler's members.
        """
        group = self._pinned
        if info is None or group is None:
            self._pinned = None
            self._pinned = self._present()
            if without:
                present = self._pinned
                left = tuple(peer for peer in present.peers if peer not in without)
                self._pinned = _of(present, left)
        elif info.epoch > group.epoch:
            own = group.peers[group.rank]
            peers = tuple(peer for peer in info.contributors if peer not in without)
            if own not in peers:
                sentence = (
                    "the reduction is of another group than the sampler's: pass it comm=, too"
                )
                raise InvalidArgument.because("ElasticSampler.pin", sentence)
            self._pinned = _of(replace(group, epoch=info.epoch), peers)

    def _present(self) -> Membership:
        if self._pinned is not None:
            return self._pinned
        if self._comm is None and not api.is_initialized():
            return _ALONE
        return api.membership(self._comm)

    def _draw(self, count: int) -> list[_Span]:
        """The next examples: returned ones first, then fresh ones."""
        only = self.epoch if self._remainder == "short" else None
        drawn: list[_Span] = []
        while count and only in (None, self.epoch):
            if self._returned:
                span = self._returned.pop(0)
                stop = min(span.stop, span.start + count)
                if stop < span.stop:
                    self._returned.insert(0, span._replace(start=stop))
            else:
                span = _Span(self._epoch, self._position, self.length)
                stop = min(span.stop, span.start + count)
                self._epoch += stop == self.length
                self._position = stop % self.length
            drawn.append(span._replace(stop=stop))
            count -= stop - span.start
        return _merged(drawn)

    def _reserved(self, group: Membership) -> _Take:
        """The reservation for the next reduction, made now if not before."""
        reserved = next((take for take in self._phases[-1] if take.block), None)
        if reserved is None:
            block = self.batch_size * -(-self._reserve // _TURNS)
            turns = -(-self._reserve * self.batch_size // block)
            spans = self._draw(turns * block * len(group.peers))
            reserved = _Take(group.peers, spans, block)
            self._phases[-1].append(reserved)
        return reserved

    def _reserved_spans(self) -> list[_Span]:
        takes = [take for phase in self._phases for take in phase if take.block]
        return [span for take in takes for span in take.spans]

    def _use(self, count: int, group: Membership) -> list[_Span]:
        """This member's next examples of those that are reserved for it."""
        func = "ElasticSampler.take"
        reserved = self._reserved(group)
        own = group.peers[group.rank]
        if own not in reserved.peers:
            sentence = "the examples were reserved before this peer came: commit(info) comes first"
            raise InvalidUsage.because(func, sentence)
        rank = reserved.peers.index(own)
        first, last = self._taken, self._taken + count
        if last > reserved.size(rank):
            sentence = (
                f"{reserved.size(rank)} examples are reserved for a member between two commits, "
                f"and {last} are taken: batch_size is the number of examples in a step"
            )
            raise InvalidUsage.because(func, sentence)
        self._taken = last
        return reserved.part(rank, first, last)

    def _settle(
        self,
        phase: Sequence[_Take],
        contributors: frozenset[str],
        taken: Mapping[str, int] | None = None,
    ) -> None:
        back = list(self._returned)
        for take in phase:
            for rank, peer in enumerate(take.peers):
                done = take.size(rank) if peer in contributors else 0
                if take.block and taken is not None:
                    done = min(done, int(taken.get(peer, 0)))
                self.committed += done
                back += take.part(rank, done)
        self._returned = _merged(sorted(back))

    def _abandon(self, present: Sequence[str]) -> None:
        """Gives back what only lost peers took, if no commit will settle it, as after a restart.

        A reduction that this peer sealed will be committed: their examples may be in its result.
        """
        here = frozenset(present)

        def gone(take: _Take) -> bool:
            return here.isdisjoint(take.peers)

        first = len(self._phases) - 1 - self._sealed
        lost = [take for phase in self._phases[:first] for take in phase]
        if all(map(gone, lost)):
            self._phases = self._phases[first:]
        else:
            lost = []
        lost += [take for take in self._phases[-1] if gone(take)]
        self._phases[-1] = [take for take in self._phases[-1] if not gone(take)]
        if lost:
            self._settle(lost, frozenset())

    def _indices(self, span: _Span) -> Indices:
        places = np.arange(span.start, span.stop, dtype=np.int64)
        return permuted(places, self.length, self._seed, span.epoch) if self._shuffle else places


class _Batches:
    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._sampler.epoch
        while self._sampler.epoch <= epoch:
            yield self._sampler.take().tolist()


def _of(group: Membership, peers: tuple[str, ...]) -> Membership:
    """The part of a membership that these peers are. This one is among them."""
    replicas = dict(zip(group.peers, group.replicas, strict=False))
    return replace(
        group,
        rank=peers.index(group.peers[group.rank]),
        world_size=len(peers),
        peers=peers,
        replicas=tuple(replicas[peer] for peer in peers if peer in replicas),
    )


def _count(spans: Iterable[_Span]) -> int:
    return sum(span.stop - span.start for span in spans)


def _cut(spans: Iterable[_Span], first: int, last: int) -> list[_Span]:
    """The places [first, last) of all these spans together."""
    part, passed = [], 0
    for epoch, start, stop in spans:
        begin = start + min(max(first - passed, 0), stop - start)
        end = start + min(max(last - passed, 0), stop - start)
        passed += stop - start
        if end > begin:
            part.append(_Span(epoch, begin, end))
    return part


def _merged(spans: Iterable[_Span]) -> list[_Span]:
    """The same places in the same order, in fewer spans where neighbours touch."""
    merged: list[_Span] = []
    for span in spans:
        if merged and merged[-1].epoch == span.epoch and merged[-1].stop == span.start:
            merged[-1] = merged[-1]._replace(stop=span.stop)
        else:
            merged.append(span)
    return merged
