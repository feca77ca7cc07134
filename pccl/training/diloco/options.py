"""The options that the NumPy, torch and JAX forms of DiLoCo share, and the plan made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from pccl import quantize as quantization
from pccl.communicator import Communicator
from pccl.errors import InvalidArgument
from pccl.quantize import Quantize
from pccl.training.diloco import robust, sparse
from pccl.training.diloco.robust import Robust
from pccl.training.diloco.sparse import Sparse
from pccl.types import ReduceInfo

FUNC = "diloco"


def refused(sentence: str) -> InvalidArgument:
    """An argument makes no sense."""
    return InvalidArgument.because(FUNC, sentence)


class Data(Protocol):
    """Assigns examples to members, as `pccl.data.ElasticSampler`. Its state is shared state."""

    def reserve(self, steps: int) -> None:
        """Members may take different numbers of examples for a reduction: of `steps` at most.

        0: they do not. Called when nothing is in flight.
        """

    def hold(self) -> None:
        """Reserves what is not reserved yet. All members call it before a reduction."""

    @property
    def taken(self) -> int:
        """After `reserve`: examples that this member has taken for the next reduction."""

    def seal(self) -> None:
        """A reduction begins. It covers what was learned from the examples taken so far."""

    def commit(self, contributors: ReduceInfo | Iterable[str] | Mapping[str, int]) -> None:
        """The oldest such reduction has ended with contributions from these peers.

        After `reserve` with the number of examples of each, by id.
        """

    def pin(self, info: ReduceInfo | None = None, *, without: Collection[str] = ()) -> None:
        """Later examples are divided among the present members, or among those of a reduction.

        Called where all members have met. `without`: ids of newcomers that take none yet.
        """

    def rollback(self) -> None:
        """Drops what was learned from examples that are not committed."""

    def follow(self, comm: Communicator) -> None:
        """From now on the members are those of `comm`."""

    def state_dict(self) -> dict[str, Any]:
        """Equal on all members."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the run's."""


class _Required(TypedDict):
    sync_every: int


class Keywords(_Required, total=False):
    """The options that all forms of `DiLoCo` take, which documents them: for programs that pass
    them on.

        options: pccl.diloco.Keywords = {"sync_every": 50, "quantize": "int8"}

    `preset` returns such options. Those of `pccl.adapters.torch.DiLoCo` and of the trainers'
    callbacks are `pccl.adapters.torch.DiLoCoKeywords`, which has two more.
    """

    outer_lr: float | None
    outer_momentum: float | None
    nesterov: bool
    warm_up: int
    round_seconds: float | None
    quorum: float | None
    grace_seconds: float | None
    mode: str
    fragments: int | Sequence[Sequence[str]] | None
    overlap: int | None
    mixing: float | None
    quantize: Quantize | str | None
    compression: Sparse | str | None
    robust: Robust | str | None
    verify_every: int | None
    data: Data | None
    comm: Communicator | None
    rejoin: Callable[[], Communicator] | None
    background_join: bool
    join_megabits: float | None
    join: bool


# Reductions in a round, by the share of the warm-up's rounds that is over.
_REDUCTIONS = ((1 / 7, 10), (3 / 7, 5), (1.0, 2))
_PLAIN = 3 / 7  # share of these rounds in which members take plain means

_USUAL_GRACE_SECONDS, _MOST_GRACE_SECONDS = 2.0, 86400.0


@dataclass(frozen=True)
class Options:
    """`Keywords` with their defaults. `DiLoCo` documents them."""

    sync_every: int
    outer_lr: float | None = None
    outer_momentum: float | None = None
    nesterov: bool = True
    warm_up: int = 0
    round_seconds: float | None = None
    quorum: float | None = None
    grace_seconds: float | None = None
    mode: str = "sync"
    fragments: int | Sequence[Sequence[str]] | None = None
    overlap: int | None = None
    mixing: float | None = None
    quantize: Quantize | str | None = None
    compression: Sparse | str | None = None
    robust: Robust | str | None = None
    verify_every: int | None = None
    data: Data | None = None
    comm: Communicator | None = None
    rejoin: Callable[[], Communicator] | None = None
    background_join: bool = False
    join_megabits: float | None = None
    join: bool = True


@dataclass(frozen=True)
class Plan:
    """The fragments of the parameters, and the inner steps at which each is reduced and applied.

    Attributes:
        mode: "sync", "async" or "streaming".
        sync_every: Inner steps in a round.
        warm_up: Rounds at the run's beginning in which members reduce more often than once.
        round_seconds: Time after which a round ends, even before `sync_every` steps; None: rounds
            do not end by time.
        quorum: Share of the members that need not wait longer than `grace_seconds` for the others;
            None: they wait.
        fragments: Indices of each fragment's parameters.
        overlap: Inner steps from a reduction's start to its application.
        mixing: Share of a member's own parameters that stays.
        verify_every: Rounds between comparisons of all members' states; 0 for none.
        quantize: How their elements travel; None: exactly, or `sparse`.
        sparse: Which of their elements travel; None: all.
        robust: How the influence of each member is bounded; None: it is not bounded.
        background_join: Whether members go on while newcomers receive the state.
        join_megabits: The most that this member sends to newcomers while members go on; None: no
            such bound.
    """

    mode: str
    sync_every: int
    warm_up: int
    round_seconds: float | None
    quorum: float | None
    grace_seconds: float
    fragments: list[list[int]]
    overlap: int
    mixing: float
    verify_every: int
    quantize: Quantize | None
    sparse: Sparse | None
    robust: Robust | None
    background_join: bool
    join_megabits: float | None

    @classmethod
    def of(cls, options: Options, names: Sequence[str], sizes: Sequence[int]) -> Plan:
        """The plan for parameters of these names and sizes.

        Raises:
            InvalidArgument: An option makes no sense.
        """
        every, mode = _whole(options.sync_every, "sync_every", 1), options.mode
        quantize = options.quantize
        parsed = None if quantize is None else quantization.parse(quantize, FUNC)
        compression = options.compression
        sparsely = None if compression is None else sparse.parse(compression, FUNC)
        if parsed is not None and sparsely is not None:
            raise refused("quantize and compression are two ways to send fewer bits; choose one")
        bounded = None if options.robust is None else robust.parse(options.robust, FUNC)
        if bounded is not None and parsed is not None:
            raise refused("robust needs the contribution of each member, and quantize adds them up")
        if bounded is not None and bounded.how == "trimmed" and sparsely is not None:
            # Most values of an element are 0 then, and the others would be left out.
            raise refused('compression goes with robust="clip" only')
        if mode not in ("sync", "async", "streaming"):
            raise refused(f'mode is "sync", "async" or "streaming", not {mode!r}')
        if mode == "sync" and options.overlap is not None:
            raise refused('overlap belongs to the modes "async" and "streaming"')
        fragments, mixing = [list(range(len(names)))], 0.0
        if mode == "streaming":
            fragments = _divide(options.fragments, names, sizes, every)
            usual_mixing = 0.5 if sparsely is None else 0.0
            mixing = usual_mixing if options.mixing is None else float(options.mixing)
            if not 0 <= mixing <= 1:
                raise refused(f"mixing is from 0 to 1, not {options.mixing!r}")
            if mixing > 0 and sparsely is not None:
                # It would be learned twice: once from the codes, once from what they leave out.
                raise refused("mixing is 0 with compression, which keeps unsent learning by itself")
        elif options.fragments is not None or options.mixing is not None:
            raise refused('fragments and mixing belong to mode "streaming"')
        if len(fragments) > every:
            raise refused(f"{len(fragments)} fragments do not take turns in {every} steps")
        warm_up = _whole(options.warm_up, "warm_up")
        if warm_up and options.round_seconds is not None:
            raise refused("warm_up divides rounds by their steps, and round_seconds by their time")
        usual = 1 if mode == "sync" else 16
        verify = usual if options.verify_every is None else options.verify_every
        return cls(
            mode,
            every,
            warm_up,
            _round_seconds(options.round_seconds),
            *_quorum(options),
            fragments,
            _overlap(mode, options.overlap, every),
            mixing,
            _whole(verify, "verify_every"),
            parsed,
            sparsely,
            bounded,
            bool(options.background_join),
            _join_megabits(options),
        )

    def leaving(self, step: int) -> list[int]:
        """The fragments whose reduction begins after that inner step of the run."""
        every, count = self.sync_every, len(self.fragments)
        if self.warms_up(step):
            at, parts = (step - 1) % every + 1, self._reductions(step)
            ends_a_part = at * parts // every > (at - 1) * parts // every
            return list(range(count)) if ends_a_part else []
        return [p for p in range(count) if (step - p * every // count) % every == 0]

    def warms_up(self, step: int) -> bool:
        """Whether all that is reduced after that inner step is applied at once."""
        return self.warm_up > 0 and step <= self.warm_up * self.sync_every

    def is_plain(self, step: int) -> bool:
        """Whether members take the mean of their parameters after that inner step.

        Momentum over rounds of a few steps would overshoot.
        """
        return step > 0 and self.warms_up(step) and self._warmed(step) < _PLAIN

    def _warmed(self, step: int) -> float:
        """The share of the warm-up's rounds that came before that of an inner step in it."""
        return (step - 1) // self.sync_every / self.warm_up

    def _reductions(self, step: int) -> int:
        """How many reductions the round of an inner step in the warm-up has, if it is as long."""
        return next(count for share, count in _REDUCTIONS if self._warmed(step) < share)

    def next_leaving(self, step: int) -> int:
        """The first inner step from `step` on after which a reduction begins."""
        return next(at for at in range(step, step + self.sync_every) if self.leaving(at))

    def __str__(self) -> str:
        """The settings that all members must have in common, compared as text."""
        how = " exactly" if self.quantize is None else quantization.words(self.quantize)
        how = how if self.sparse is None else sparse.words(self.sparse)
        how += "" if self.robust is None else robust.words(self.robust)
        how += ", background_join" if self.background_join else ""
        how += f", warm_up={self.warm_up}" if self.warm_up else ""
        if self.quorum is not None:
            how += f", quorum={self.quorum}, grace_seconds={self.grace_seconds}"
        return (
            f"mode={self.mode}, sync_every={self.sync_every}, fragments={self.fragments}, "
            f"overlap={self.overlap}, mixing={self.mixing}, verify_every={self.verify_every}, "
            f"round_seconds={self.round_seconds}, reduced{how}"
        )


def _round_seconds(given: float | None) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise refused(f"round_seconds is a positive number of seconds, not {given!r}")
    return float(given)


def _quorum(options: Options) -> tuple[float | None, float]:
    quorum, grace = options.quorum, options.grace_seconds
    for name, given in (("quorum", quorum), ("grace_seconds", grace)):
        if isinstance(given, bool) or not isinstance(given, (int, float, type(None))):
            raise refused(f"{name} is a number, not {given!r}")
    if quorum is None:
        if grace is not None:
            raise refused("grace_seconds needs a quorum")
        return None, 0.0
    if not 0.5 < quorum <= 1:
        raise refused(f"quorum is above 0.5 and at most 1, not {quorum!r}")
    grace = _USUAL_GRACE_SECONDS if grace is None else float(grace)
    if not 0 <= grace <= _MOST_GRACE_SECONDS:
        raise refused(f"grace_seconds is from 0 to {_MOST_GRACE_SECONDS:.0f}, not {grace!r}")
    if options.rejoin is None:
        raise refused("quorum needs rejoin: members that are late are put out, and come back")
    return float(quorum), grace


def _join_megabits(options: Options) -> float | None:
    given = options.join_megabits
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise refused(f"join_megabits is a positive number of Mbit/s, not {given!r}")
    if not options.background_join:
        raise refused("join_megabits needs background_join: otherwise members wait for newcomers")
    return float(given)


def _overlap(mode: str, given: int | None, every: int) -> int:
    if mode == "sync":
        return 0
    if mode == "async":
        overlap = max(1, every // 2) if given is None else _whole(given, "overlap", 1)
        if overlap > every:
            raise refused(f"overlap is at most sync_every, {every}, not {given}")
        return overlap
    if given is None:
        return min(max(1, every // 20), every - 1)
    if _whole(given, "overlap") >= every:
        raise refused(f"overlap is less than sync_every, {every}, not {given}")
    return given


def _divide(
    fragments: int | Sequence[Sequence[str]] | None,
    names: Sequence[str],
    sizes: Sequence[int],
    every: int,
) -> list[list[int]]:
    if fragments is None:
        return cut(sizes, min(4, len(sizes), every))
    if isinstance(fragments, int):
        parts = _whole(fragments, "fragments", 1)
        if parts > len(sizes):
            raise refused(f"{len(sizes)} parameters cannot be cut into {parts} fragments")
        return cut(sizes, parts)
    given = [name for part in fragments for name in part]
    if sorted(given) != sorted(names) or not all(fragments):
        odd = sorted(set(given).symmetric_difference(names))
        raise refused(f"fragments name each parameter once, and none is empty: {odd[:3]}")
    place = {name: index for index, name in enumerate(names)}
    return [[place[name] for name in part] for part in fragments]


def cut(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices in `parts` runs of about as many elements each, none empty."""
    cuts: list[list[int]] = []
    first, left = 0, sum(sizes)
    for part in range(parts, 0, -1):
        last, taken = first + 1, sizes[first]
        # The next one belongs here while that brings the run nearer to its share.
        while part > 1 and len(sizes) - last >= part and taken + sizes[last] / 2 <= left / part:
            taken += sizes[last]
            last += 1
        if part == 1:
            last = len(sizes)
        cuts.append(list(range(first, last)))
        first, left = last, left - taken
    return cuts


def _whole(value: object, name: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refused(f"{name} is a whole number of at least {least}, not {value!r}")
    return value
