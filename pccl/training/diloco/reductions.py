"""Reductions of fragments under way, and what they cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pccl import api, collective_api
from pccl.communicator import Communicator
from pccl.errors import InvalidUsage, PeerLost
from pccl.frameworks import Array
from pccl.quantize import Quantize
from pccl.training.diloco import robust
from pccl.training.diloco.exchange import Exchange
from pccl.training.diloco.options import FUNC, Plan
from pccl.training.diloco.owners import Owners, owners_for
from pccl.training.diloco.robust import Robust
from pccl.training.diloco.sparse import Sparsifier
from pccl.types import ReduceInfo

# One tag for all: these operations meet in the order of the calls, apart from the program's own.
TAG = 0xD11_0C0
# The least weight: it vanishes in a sum with any other, and keeps the total from being 0, which
# would be an error on all members.
_UNCOUNTED = 1e-18

_log = logging.getLogger(__name__)


class Contribution(NamedTuple):
    """A member's learning, and its weight. By default it takes part without counting.

    Attributes:
        tokens: Whether the weight is a number of tokens.
    """

    weight: float = 0.0
    gradients: Sequence[Array] = ()
    tokens: bool = False


@dataclass
class Flight:
    """A fragment's reduction that is under way, or over and not yet applied.

    Attributes:
        due: The inner step at which it is applied.
        result: {"gradients": by name, "present": whether any weight counted, "tokens": that the
            contributors have seen}; None: under way.
        tree: What this member sends, until it is over.
        given: What it sends as its own learning, until it is over.
        gathers: Whether members gather what all have, to compute the mean from it.
        names: Of the gradients.
        taken: How many examples each member took for it, by id; None: as many as all others.
    """

    due: int
    result: dict[str, Any] | None = None
    tree: dict[str, Any] = field(default_factory=dict)
    given: Contribution | None = None
    weight: float = 0.0
    sparsifier: Sparsifier | None = None
    gathers: bool = False
    names: list[str] = field(default_factory=list)
    taken: dict[str, int] | None = None
    work: api.Work[Any] | Exchange | None = None
    started: float = 0.0
    restarts: int = 0  # after losses and interrupts of other members
    seen: float = 0.0  # when it was last found to be under way
    info: ReduceInfo | None = None

    def learned(self) -> dict[str, int]:
        """How many examples of each contributor are in the result, once it is over."""
        assert self.info is not None and self.taken is not None
        return {peer: self.taken[peer] for peer in self.info.contributors}


class Reductions:
    """Starts reductions and waits for them. `DiLoCo` documents the public attributes."""

    _comm: Communicator | None
    _plan: Plan
    _quantize: Quantize | None
    _robust: Robust | None

    def __init__(self) -> None:
        self._sparsifiers: list[Sparsifier] = []  # by fragment; none: all elements are sent
        self._flying: dict[int, Flight] = {}  # by fragment, in the order in which they are due
        self.info: ReduceInfo | None = None
        self.tx_bytes = 0
        self.reduction_seconds = 0.0
        self.waited_seconds = 0.0
        self.limited: tuple[str, ...] = ()
        self._warned = False  # of weights that do not compare

    @property
    def hidden(self) -> float:
        """Share of the reductions' time spent on inner steps, not waiting; 1.0 before the first."""
        if self.reduction_seconds <= 0:
            return 1.0
        return max(0.0, 1 - self.waited_seconds / self.reduction_seconds)

    def _launch(
        self,
        fragment: int,
        due: int,
        weight: float,
        gradients: dict[str, Array],
        *,
        tokens: bool,
        taken: dict[str, int] | None = None,
    ) -> Flight:
        """A weight of 0 takes part without counting. `tokens`: whether it is a number of tokens."""
        flight = Flight(due, weight=weight or _UNCOUNTED, taken=taken)
        flight.started = time.perf_counter()
        flight.names = list(gradients)
        flight.gathers = bool(self._sparsifiers) or self._robust is not None
        if self._sparsifiers:
            flight.sparsifier = made = self._sparsifiers[fragment]
            code = made.encode(list(gradients.values())) if weight > 0 else made.nothing()
            flight.tree = {"code": code, "weight": np.array([weight, tokens])}
        elif flight.gathers:
            flight.tree = {"gradients": gradients, "weight": np.array([weight, tokens])}
        else:
            # The mean of "present" is 0 if no weight counts, as when newcomers alone are left, and
            # that of "counted" if the weights are no tokens.
            counts = {"present": weight > 0, "counted": weight > 0 and tokens}
            flight.tree = {key: np.array([float(value)]) for key, value in counts.items()}
            flight.tree["gradients"] = gradients
        self._reduce(flight)
        return flight

    def _reduce(self, flight: Flight) -> None:
        flight.seen = time.perf_counter()
        if flight.gathers:
            owners = self._owners(flight)
            if owners is not None:
                flight.work = Exchange(owners, flight.tree, TAG, self._comm)
            else:
                flight.work = collective_api.allgather_async(flight.tree, tag=TAG, comm=self._comm)
            return
        flight.work = api.allreduce_async(
            flight.tree,
            "avg",
            weight=flight.weight,
            quantize=self._quantize,
            tag=TAG,
            comm=self._comm,
        )

    def _owners(self, flight: Flight) -> Owners | None:
        """The owners that reduce its codes; None: members gather the codes of all.

        All members decide alike, from sizes and from the membership that their latest call has
        ended with. Owners cannot reduce in the background, where nobody makes the second call, and
        `robust` trusts none.
        """
        in_background = self._plan.overlap > 0
        if flight.sparsifier is None or self._robust is not None or in_background:
            return None
        return owners_for(flight.sparsifier, api.world_size(self._comm))

    def _reduces(self) -> bool:
        """Whether a reduction is in flight. *any thread*"""
        return any(flight.work is not None for flight in list(self._flying.values()))

    def _forget_unsent(self) -> None:
        """Drops what codes have left out: it was learned from parameters that count no more."""
        for sparsifier in self._sparsifiers:
            sparsifier.forget()

    def _look(self) -> None:
        """Notes which reductions are still under way."""
        for flight in self._flying.values():
            if flight.work is not None and not flight.work.done():
                flight.seen = time.perf_counter()

    def _complete(self, flight: Flight, *, together: bool = True) -> dict[str, Any]:
        """Waits for a reduction. Only where all members wait `together` may they start it again."""
        if flight.result is None:
            waiting = time.perf_counter()
            self._look()
            while True:
                assert flight.work is not None
                if isinstance(flight.work, Exchange) and not together:
                    sentence = (
                        "interrupted in a reduction, with which the others go on: join() anew"
                    )
                    raise InvalidUsage.because(FUNC, sentence)
                try:
                    flight.result = self._result(flight, flight.work.wait())
                    break
                except PeerLost:  # another member was interrupted; all learn it in the same order
                    if not together:
                        raise
                    flight.restarts += 1
                    self._reduce(flight)
            # One that was over counts up to where it was last seen, so `hidden` is never too high.
            if flight.seen >= waiting:
                flight.seen = time.perf_counter()
                self.waited_seconds += flight.seen - waiting
            self.reduction_seconds += flight.seen - flight.started
            info = flight.work.info
            self.info = flight.info = replace(info, attempts=info.attempts + flight.restarts)
            self.tx_bytes += self.info.tx_bytes
            flight.work, flight.tree, flight.given = None, {}, None
        return flight.result

    def _check_weights(self, counted: float, present: float) -> None:
        """Warns once of weights of which some are numbers of tokens, and others are not."""
        if self._warned or not 0 < counted < present * (1 - 1e-12):
            return
        self._warned = True
        _log.warning("some members pass tokens to step, and others do not: weights do not compare")

    def _result(self, flight: Flight, found: dict[str, Any]) -> dict[str, Any]:
        """The `Flight.result` that the operation's result stands for."""
        assert flight.work is not None
        if not flight.gathers:
            total = flight.work.info.total_weight
            assert total is not None
            # Means with the same weights: equal, but for rounding, if the same members are in both.
            self._check_weights(found["counted"][0], found["present"][0])
            return {
                "gradients": found["gradients"],
                "present": found["present"],
                "tokens": np.array([total if found["counted"][0] > 0 else 0.0]),
            }
        weights = found["weight"][:, 0].tolist()
        counted = found["weight"][:, 1].any()
        there = found["weight"][:, 0] > 0
        self._check_weights(np.sum(there & (found["weight"][:, 1] > 0)), np.sum(there))
        if isinstance(flight.work, Exchange):
            made = found["mean"]
        elif flight.sparsifier is not None:
            made = flight.sparsifier.mean(found["code"], weights, self._robust)
        else:
            assert self._robust is not None
            gathered = [found["gradients"][name] for name in flight.names]
            made = robust.mean(self._robust, gathered, weights)
        self.limited = tuple(flight.work.info.contributors[rank] for rank in made.limited)
        gradients = dict(zip(flight.names, made.arrays, strict=True))
        return {
            "gradients": gradients,
            "present": np.array([float(made.present)]),
            "tokens": np.array([made.weight if counted else 0.0]),
        }
