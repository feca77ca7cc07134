"""DiLoCo: members train on their own for many steps, then average what they have learned.

Every member takes `sync_every` steps of its own (inner) optimizer. The difference between the
parameters that it began with and those that it has now, its pseudo-gradient, is averaged over the
members, and an outer optimizer takes one step with the mean. Three modes: "sync" (Douillard et al.,
arXiv 2311.08105), "async", where the reduction runs behind the next inner steps, up to a whole
round of them, and "streaming" (Douillard et al., arXiv 2501.18512), where fragments of the
parameters go in turn. In "async" a member trains on with what it has learned, as in the eager
updates of Kale et al. (arXiv 2502.12996), and when the mean has come, it moves to the new outer
parameters and what it has learned meanwhile (with plain averages: CoCoD-SGD, Shen et al., arXiv
1906.12043).

What is here knows NumPy alone. `pccl.adapters.torch.DiLoCo` and `pccl.adapters.jax.diloco` put it
around a model.

How members come and go: outer parameters, the state of the outer optimizer and the count of steps
are shared state. Newcomers are let in where a round ends, after what was in flight has come, and
before the new reductions begin. What has come and is not yet applied is part of the shared state. So
a newcomer holds everything that the members hold; and it takes part in the reductions that begin
there, with a weight that does not count, so it also gets what they bring.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from pccl import api
from pccl import quantize as quantization
from pccl import tree as trees
from pccl._arrays import Array
from pccl.communicator import Communicator
from pccl.errors import InvalidArgument, InvalidUsage, PCCLError, PeerLost, RevisionMismatch
from pccl.quantize import Quantize
from pccl.types import ReduceInfo, SyncInfo

__all__ = ["SGD", "DiLoCo", "Inner", "OuterOptimizer"]

_FUNC = "diloco"
# One for all: operations of a tag meet in the order of the calls, and do not mix with the program's own.
_TAG = 0xD11_0C0
# The least weight there is: beside any other it vanishes in the sum, and alone it is not 0, which all would be told of.
_UNCOUNTED = 1e-18
_LEAST_TOKENS, _MOST_TOKENS = 1e-6, 1e15

_Made = TypeVar("_Made")


class Inner(Protocol):
    """A model's parameters, as the inner optimizer sees them.

    Attributes:
        names: Of the parameters; the same on all members, in the same order.
    """

    names: Sequence[str]

    def read(self, index: int) -> Array:
        """The elements as they are now, of float32 (float64 for float64). Not written, not kept."""

    def write(self, index: int, value: Array) -> None:
        """Sets them; `value` has the dtype and shape of `read`."""

    def rounded(self, index: int, value: Array) -> Array:
        """What `read` would give after `write(index, value)`. May be `value`."""


class Data(Protocol):
    """Who trains on which example, as `pccl.data.ElasticSampler`. Its state is part of the shared state."""

    def seal(self) -> None:
        """A reduction begins, of what was learned from the examples that were taken so far."""

    def commit(self, contributors: ReduceInfo | Iterable[str]) -> None:
        """The oldest such reduction has come; from these peers."""

    def pin(self, info: ReduceInfo | None = None) -> None:
        """What is taken from now on is for those who are members now, where all have met; or in a reduction."""

    def rollback(self) -> None:
        """What was learned from examples that are not committed is dropped."""

    def follow(self, comm: Communicator) -> None:
        """The members are that communicator's from now on."""

    def state_dict(self) -> dict[str, Any]:
        """Equal on all members."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the run's."""


class OuterOptimizer(Protocol):
    """What moves the outer parameters. One is made for each fragment.

    It must do the same with the same numbers on every member.
    """

    def state(self) -> Mapping[str, Any]:
        """What a newcomer needs: writable NumPy arrays, written in place, and objects with `state_dict` and
        `load_state_dict`, in nested dicts and lists."""

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array]) -> None:
        """One step, in place.

        Args:
            parameters: Always the same arrays: float32 (float64 for float64).
            gradients: Of the same shapes and dtypes. May be used up.
        """


class SGD:
    """Gradient descent with momentum (Sutskever et al., ICML 2013), as torch's SGD has it without dampening.

    Args:
        parameters: Arrays of float32 or float64: what to make momentum for.
        lr: Learning rate.
        momentum: 0: none is kept.
        nesterov: Whether to look ahead.
    """

    def __init__(
        self,
        parameters: Sequence[Array],
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
    ) -> None:
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self._velocities = [np.zeros_like(array) for array in parameters] if momentum else []

    def state(self) -> dict[str, Any]:
        """The momentum, from zero on."""
        return {"momentum": self._velocities}

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array]) -> None:
        """v = momentum v + g, then parameters -= lr (g + momentum v); without Nesterov lr v. Uses `gradients` up."""
        # Python's numbers do not widen float32, and every operation rounds once: the same bytes on every machine.
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if self.momentum:
                velocity = self._velocities[index]
                np.multiply(velocity, self.momentum, out=velocity)
                np.add(velocity, gradient, out=velocity)
                if self.nesterov:
                    np.add(gradient, velocity * self.momentum, out=gradient)
                else:
                    gradient = velocity.copy()
            np.multiply(gradient, self.lr, out=gradient)
            np.subtract(parameter, gradient, out=parameter)


class _Arrays:
    """A tree of NumPy arrays as `Inner`."""

    def __init__(self, tree: object) -> None:
        flat = trees.flatten(tree, _FUNC, "parameters")
        self.names: Sequence[str] = flat.paths
        self._leaves: list[Array] = []
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            if not isinstance(leaf, np.ndarray) or leaf.dtype not in (np.float32, np.float64):
                sentence = f"parameters{path} is no NumPy array of float32 or float64"
                raise InvalidArgument.because(_FUNC, sentence)
            if not leaf.flags.writeable:
                raise InvalidArgument.because(_FUNC, f"parameters{path} cannot be written")
            self._leaves.append(leaf)

    def read(self, index: int) -> Array:
        return self._leaves[index]

    def write(self, index: int, value: Array) -> None:
        self._leaves[index][...] = value

    def rounded(self, index: int, value: Array) -> Array:
        return value


@dataclass
class _Flight:
    """A fragment's reduction under way, or come and not yet applied.

    Attributes:
        due: The inner step at which it is applied.
        result: {"gradients": by name, "present": whether anybody's counted}; None: still under way.
    """

    due: int
    result: dict[str, Any] | None = None
    tree: dict[str, Any] = field(default_factory=dict)
    weight: float = 0.0
    work: api.Work[Any] | None = None
    started: float = 0.0
    seen: float = 0.0  # when it was last found to be under way
    info: ReduceInfo | None = None


@dataclass
class _Seen:
    """What a fragment's pseudo-gradient is made of: what this member did since it last gave one."""

    steps: int = 0
    tokens: float = 0.0
    counted: bool = False  # whether the program says how many tokens there were


def _retried(call: Callable[[], _Made]) -> _Made:
    """Calls again when another member was interrupted: all members are told, and nothing has changed."""
    while True:
        try:
            return call()
        except PeerLost:
            continue


def _cut(sizes: Sequence[int], parts: int) -> list[list[int]]:
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


class DiLoCo:
    """The algorithm, around any model that `Inner` describes. All members make one, with the same arguments.

        diloco = DiLoCo({"w": w, "b": b}, sync_every=50)
        while diloco.outer_step < rounds:  # of the run; a newcomer begins where the others are
            batch = next(batches)
            train(w, b, batch)  # in place
            diloco.step(tokens=len(batch))

    Making one is a collective call: it waits to be let in, and gives the model the run's
    parameters. While the program runs, members may be lost and newcomers come: `step` deals with
    both, and goes on alone when all others are gone. After every round all members hold the same
    outer parameters, byte for byte; in mode "sync" the model's own as well.

    The program's own collective calls belong right before `step`, not after it: a newcomer's first
    inner step comes after the round that let it in.

    Args:
        inner: The model's parameters: nested containers of writable NumPy arrays of float32 or
            float64, or an `Inner`.
        sync_every: Inner steps in a round, the paper's H.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its momentum.
        nesterov: Whether its momentum is Nesterov's.
        outer_optimizer: Makes another one from a list of NumPy arrays (float32, or float64 for
            float64), once for each fragment; the three arguments before are not used then.
        mode: "sync": the reduction blocks. "async": it runs behind the next `overlap` inner steps, after
            which its result is applied. "streaming": fragments go in turn, each behind `overlap` steps.
        fragments: "streaming" only: into how many parts to cut the parameters (default 4, or fewer
            if there are fewer parameters), in their order and of about equal size; or lists of names.
        overlap: Inner steps behind which a reduction runs. "async": from 1 to `sync_every`, where
            the mean comes a whole round later; default half of it. "streaming": the paper's tau, from
            0 to `sync_every` - 1; default a twentieth of `sync_every`, at least 1. The fewer, the
            closer to "sync"; so many that a reduction is over by then (see `hidden`).
        mixing: "streaming" only: how much of a member's own parameters stays when new ones come,
            the paper's alpha; from 0, none, to 1. Default 0.5.
        quantize: As in `pccl.allreduce`: pseudo-gradients in fewer bits between hosts.
        verify_every: Rounds between comparisons of all members' states (one `pccl.sync`); the
            others only look for newcomers. 0: never. With replicas in every round. Default: 1 for "sync", 16 otherwise.
        data: An `ElasticSampler` (`pccl.data`) that the program takes its examples from: newcomers
            learn its place, and each round's reduction settles what was taken for it, in mode
            "streaming" that of the first fragment. The program does not call its `commit` then.
        comm: Default: the process's communicator.
        rejoin: Makes a new communicator when this peer was put out of the run or cut off, as
            `pccl.init`; then it comes back as a newcomer by itself. The old one is closed before. Not for a
            rank of a replica.
            Default: `step` raises, and `join` comes back.
        join: False: do not join yet; load a checkpoint and call `join`.

    Attributes:
        info: The latest reduction's `pccl.ReduceInfo`: bytes sent and received, members; None
            before the first since joining.
        sync_info: The latest sync's `pccl.SyncInfo`; None before.
        tx_bytes: Bytes that this member's reductions sent in all.
        reduction_seconds: What reductions have taken in all. Where nobody waits for one, `step` sees
            whether it still runs: up to there it counts.
        waited_seconds: How much of that this member has waited.

    Raises:
        InvalidArgument: An argument makes no sense, or the run has other settings than this peer, which leaves it.
        PCCLError: What `pccl.sync` and `pccl.allreduce` raise.
    """

    def __init__(
        self,
        inner: Any,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        outer_optimizer: Callable[[Sequence[Array]], OuterOptimizer] | None = None,
        mode: str = "sync",
        fragments: int | Sequence[Sequence[str]] | None = None,
        overlap: int | None = None,
        mixing: float | None = None,
        quantize: Quantize | str | None = None,
        verify_every: int | None = None,
        data: Data | None = None,
        comm: Communicator | None = None,
        rejoin: Callable[[], Communicator] | None = None,
        join: bool = True,
    ) -> None:
        known = all(hasattr(inner, name) for name in ("names", "read", "write", "rounded"))
        self._inner: Inner = inner if known else _Arrays(inner)
        self._sync_every = _whole(sync_every, "sync_every", 1)
        self._mode = mode
        self._quantize = None if quantize is None else quantization.parse(quantize, _FUNC)
        self._data = data
        self._comm = comm
        if comm is not None and data is not None:
            data.follow(comm)
        self._rejoin = rejoin
        self._names = list(self._inner.names)
        if not self._names or len(set(self._names)) != len(self._names):
            raise InvalidArgument.because(_FUNC, "there are no parameters, or two of one name")
        self._outer = [np.array(self._inner.read(i)) for i in range(len(self._names))]
        self._place(fragments, overlap, mixing)
        usual = 1 if mode == "sync" else 16
        self._verify_every = _whole(usual if verify_every is None else verify_every, "verify_every")
        make = outer_optimizer or (
            lambda arrays: SGD(arrays, outer_lr, outer_momentum, nesterov)  # a fresh one each
        )
        self._optimizers = [make(self._arrays(fragment)) for fragment in range(self._count)]
        # What members must have in common and newcomers cannot take over.
        self._settings = (
            f"mode={mode}, sync_every={self._sync_every}, fragments={self._fragments}, "
            f"overlap={self._overlap}, mixing={self._mixing}, verify_every={self._verify_every}, "
            f"reduced{_words(self._quantize)}"
        )
        if outer_optimizer is None:
            self._settings += f", lr={outer_lr}, momentum={outer_momentum}, nesterov={nesterov}"
        self._steps = 0
        self._seen = [_Seen() for _ in range(self._count)]
        self._flying: dict[int, _Flight] = {}  # by fragment, in the order in which they are due
        # What this member has learned is measured from here, if not from the outer parameters.
        self._origin: list[Array] | None = None
        self._between = (
            False  # whether the shared state is that of a round's end, where reductions begin
        )
        self._joined = False
        self._torn = ""  # this peer's id, if a step was interrupted that the others go on with
        self._pinned = False  # whether the data knows for whom its examples are
        self._replicas = False  # whether this peer is a rank of one
        self._restored: list[str] = []  # who contributed to what a checkpoint had in flight
        self.info: ReduceInfo | None = None
        self.sync_info: SyncInfo | None = None
        self.tx_bytes = 0
        self.reduction_seconds = 0.0
        self.waited_seconds = 0.0
        if join:
            self.join()

    def _place(
        self,
        fragments: int | Sequence[Sequence[str]] | None,
        overlap: int | None,
        mixing: float | None,
    ) -> None:
        """What goes when."""
        every = self._sync_every
        if self._mode not in ("sync", "async", "streaming"):
            sentence = f'mode is "sync", "async" or "streaming", not {self._mode!r}'
            raise InvalidArgument.because(_FUNC, sentence)
        if self._mode != "streaming":
            if not fragments is mixing is None:
                sentence = 'fragments and mixing belong to mode "streaming"'
                raise InvalidArgument.because(_FUNC, sentence)
            self._fragments = [list(range(len(self._names)))]
            self._mixing = 0.0
            self._overlap = 0
            if self._mode == "async":
                half = max(1, every // 2)
                self._overlap = half if overlap is None else _whole(overlap, "overlap", 1)
                if self._overlap > every:
                    sentence = f"overlap is at most sync_every, {every}, not {overlap}"
                    raise InvalidArgument.because(_FUNC, sentence)
            elif overlap is not None:
                sentence = 'overlap belongs to the modes "async" and "streaming"'
                raise InvalidArgument.because(_FUNC, sentence)
        else:
            self._fragments = self._divide(fragments)
            self._overlap = _whole(max(1, every // 20) if overlap is None else overlap, "overlap")
            self._mixing = 0.5 if mixing is None else float(mixing)
            if overlap is None:
                self._overlap = min(self._overlap, every - 1)
            if self._overlap >= every:
                sentence = f"overlap is less than sync_every, {every}, not {overlap}"
                raise InvalidArgument.because(_FUNC, sentence)
            if not 0 <= self._mixing <= 1:
                raise InvalidArgument.because(_FUNC, f"mixing is from 0 to 1, not {mixing!r}")
        self._count = len(self._fragments)
        if self._count > every:
            sentence = f"{self._count} fragments do not take turns in {every} steps"
            raise InvalidArgument.because(_FUNC, sentence)

    def _divide(self, fragments: int | Sequence[Sequence[str]] | None) -> list[list[int]]:
        sizes = [array.size for array in self._outer]
        if fragments is None:
            return _cut(sizes, min(4, len(sizes), self._sync_every))
        if isinstance(fragments, int):
            parts = _whole(fragments, "fragments", 1)
            if parts > len(sizes):
                sentence = f"{len(sizes)} parameters cannot be cut into {parts} fragments"
                raise InvalidArgument.because(_FUNC, sentence)
            return _cut(sizes, parts)
        given = [name for names in fragments for name in names]
        if sorted(given) != sorted(self._names) or not all(fragments):
            odd = sorted(set(given).symmetric_difference(self._names))
            sentence = f"fragments name each parameter once, and none is empty: {odd[:3]}"
            raise InvalidArgument.because(_FUNC, sentence)
        place = {name: index for index, name in enumerate(self._names)}
        return [[place[name] for name in names] for names in fragments]

    # What a program sees.

    @property
    def outer_step(self) -> int:
        """Rounds that the run has finished; equal on all members."""
        return self._steps // self._sync_every

    @property
    def inner_step(self) -> int:
        """Inner steps that the run's longest-standing members have made: for learning rates and data."""
        return self._steps

    @property
    def hidden(self) -> float:
        """Share of the reductions' time that was spent on inner steps, not waiting; 1.0 before the first."""
        if self.reduction_seconds <= 0:
            return 1.0
        return max(0.0, 1 - self.waited_seconds / self.reduction_seconds)

    @property
    def parameters(self) -> dict[str, Array]:
        """The outer parameters by name: read-only views of what the members have in common."""
        views = {name: array.view() for name, array in zip(self._names, self._outer, strict=True)}
        for view in views.values():
            view.flags.writeable = False
        return views

    def join(self) -> None:
        """Joins the run, as its founder or a newcomer, and gives the model the run's parameters.

        Also what comes after an exception of `step`, when it is over: `pccl.shutdown()`,
        `pccl.init()` and this, if its advice was "rejoin"; this alone, on all members, after a
        `Timeout`. What the model has learned since its last reduction is dropped then. After a Ctrl-C in the
        middle of `step`, which the others go on with, also leave and come back first; with `rejoin` this does.

        Raises:
            InvalidArgument: The run has other settings than this peer, which leaves it.
            InvalidUsage: This member was interrupted in the middle of a step, and has not left since.
            PCCLError: What `pccl.sync` and `pccl.allreduce` raise.
        """
        self._joined = False
        if self._torn and self._torn == self._own_id():
            if self._rejoin is None or self._replicas:
                sentence = (
                    "interrupted in the middle of a step, with which the others go on: leave and come back, "
                    "as by pccl.shutdown() and pccl.init(), then join()"
                )
                raise InvalidUsage.because(_FUNC, sentence)
            return self._come_back()
        self._torn = ""
        self.info = None
        self._flying.clear()
        self._steps -= self._steps % self._sync_every
        self._between = False
        if self._data is not None:
            if self._restored:
                self._data.commit(self._restored)
            self._data.rollback()
        self._restored = []
        self._share()
        self._replicas = bool(api.membership(self._comm).replicas)
        self._begin()
        if self._between:  # the members begin reductions now
            self._go_on(self._leaving(self._steps), {}, [])
        self._joined = True

    def step(self, tokens: float | None = None) -> bool:
        """Counts an inner step, which the model has just made; reduces where it is time.

        Args:
            tokens: What this member's step has seen, in tokens or samples: its weight in the mean
                is their number in a round. 0 or from 1e-6 to 1e15. All members pass it, or none
                does. Default: all steps weigh the same.

        Returns:
            Whether a round has ended; so it has where this member came back to the run (`info` may be None
            then).

        Raises:
            InvalidArgument: `tokens` is no such number.
            InvalidUsage: Not joined; or not again after an exception.
            PCCLError: What `pccl.admit`, `pccl.sync` and `pccl.allreduce` raise. What the round
                brought so far is kept or dropped by `join`. With `rejoin`, not those whose advice is
                "rejoin", unless coming back fails; on a rank of a replica those, too, since all ranks of it
                have to come back.
        """
        if not self._joined:
            raise InvalidUsage.because(_FUNC, "not joined: call join() first")
        if tokens is not None:
            tokens = float(tokens)
            if tokens != 0 and not _LEAST_TOKENS <= tokens <= _MOST_TOKENS:
                sentence = f"tokens is 0 or from 1e-6 to 1e15, not {tokens!r}"
                raise InvalidArgument.because(_FUNC, sentence)
        if not self._pinned:
            self._pin()
        self._steps += 1
        for seen in self._seen:
            seen.steps += 1
            seen.tokens += tokens or 0.0
            seen.counted = seen.counted or tokens is not None
        self._look()
        self._guarded(self._advance)
        return self._steps % self._sync_every == 0

    def finish(self) -> None:
        """Applies what is still in flight, and gives the model the outer parameters. All members call it.

        At the end of training, or before an evaluation that is to be of the same model on all
        members. What the model has learned since its last reduction is dropped, and with `data` its
        examples are given back.

        Raises:
            InvalidUsage: Not joined.
            PCCLError: As `step`.
        """
        if not self._joined:
            raise InvalidUsage.because(_FUNC, "not joined: call join() first")

        def complete() -> None:
            for fragment in list(self._flying):
                self._apply(fragment)
            self._begin()
            if self._data is not None:
                self._data.rollback()  # what was taken in a round that is not over
                self._pinned = False

        # An eviction is told: there is nothing to come back for.
        with self._attempt():
            complete()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: arrays (copies) and numbers in nested dicts and lists.

        Outer parameters and optimizers, and the count of steps up to the latest round's end. Waits
        for reductions in flight, which are part of it. No collective call: one member may do it
        alone. Best at a round's end: what the model has learned since is not part of it, nor is the
        inner optimizer's state.

        Raises:
            PCCLError: A reduction in flight failed.
        """
        for flight in self._flying.values():
            self._complete(flight, together=False)
        first = self._flying.get(0)
        return {
            "parameters": {
                name: array.copy() for name, array in zip(self._names, self._outer, strict=True)
            },
            "optimizer": [_snapshot(optimizer.state()) for optimizer in self._optimizers],
            "pending": {str(p): _snapshot(flight.result) for p, flight in self._flying.items()},
            # Whose examples of `data` are learned with it. Text: their number differs.
            "contributors": json.dumps(first.info.contributors if first and first.info else []),
            "steps": self._steps - self._steps % self._sync_every,
            "layout": json.dumps(self._layout()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a checkpoint. Before `join`, on any member; that with the most rounds counts for all.

        A newcomer's does not count: it receives the run's state. One that is ahead of the run is
        refused (`RevisionMismatch`). Reductions that were in flight are
        applied.

        Raises:
            InvalidArgument: It is of another model, other fragments, another `sync_every` or another kind of
                outer optimizer. Nothing is changed then.
            InvalidUsage: Joined already: the others would know nothing of it.
        """
        if self._joined:
            sentence = "joined already: make it with join=False, load, then join()"
            raise InvalidUsage.because(_FUNC, sentence)
        self._check_loads(state)
        saved = state["parameters"]
        for name, array in zip(self._names, self._outer, strict=True):
            array[...] = np.asarray(saved[name])
        for optimizer, kept in zip(self._optimizers, state["optimizer"], strict=True):
            _restore(optimizer.state(), kept)
        self._flying.clear()
        for key, result in state["pending"].items():
            arrays = {name: np.array(value) for name, value in result["gradients"].items()}
            present = np.array(result["present"])
            flight = _Flight(0, {"gradients": arrays, "present": present})
            self._flying[int(key)] = flight
            self._apply(int(key))
        self._restored = json.loads(state["contributors"])
        self._steps = int(state["steps"]) // self._sync_every * self._sync_every
        self._begin()

    def _layout(self) -> dict[str, Any]:
        """What a checkpoint's numbers mean, and what they are laid out by."""
        return {
            "parameters": {
                name: f"{array.dtype}{list(array.shape)}"
                for name, array in zip(self._names, self._outer, strict=True)
            },
            "fragments": [[self._names[index] for index in part] for part in self._fragments],
            "sync_every": self._sync_every,
        }

    def _check_loads(self, state: Mapping[str, Any]) -> None:
        try:
            saved = json.loads(state["layout"])
            theirs, fragments = dict(saved["parameters"]), saved["fragments"]
            every, optimizers = int(saved["sync_every"]), list(state["optimizer"])
        except (KeyError, TypeError, ValueError) as error:
            sentence = f"this is no DiLoCo's state: {error!r}"
            raise InvalidArgument.because(_FUNC, sentence) from error
        own = self._layout()
        ours = own["parameters"]
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                there, here = theirs.get(name, "none"), ours.get(name, "none")
                sentence = (
                    f"the checkpoint is of other parameters: {name} is {there} there, {here} here"
                )
                raise InvalidArgument.because(_FUNC, sentence)
        if fragments != own["fragments"]:
            raise InvalidArgument.because(_FUNC, "the checkpoint is of other fragments")
        if every != self._sync_every:
            sentence = f"the checkpoint is of sync_every={every}, not {self._sync_every}"
            raise InvalidArgument.because(_FUNC, sentence)
        pairs = zip(self._optimizers, optimizers, strict=True)
        if not all(_fits(optimizer.state(), kept) for optimizer, kept in pairs):
            sentence = (
                "the checkpoint is of another outer optimizer, or of one with another momentum"
            )
            raise InvalidArgument.because(_FUNC, sentence)

    # The algorithm.

    def _own_id(self) -> str:
        """Empty while this peer is not a member."""
        with suppress(PCCLError):
            group = api.membership(self._comm)
            return group.peers[group.rank] if group.rank >= 0 else ""
        return ""

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """For calls that all members make. Joined again only if it ends well."""
        self._joined = False
        try:
            yield
        except PCCLError:
            raise
        except BaseException:  # Ctrl-C, say: nobody else knows of it
            self._torn = self._own_id()
            raise
        self._joined = True

    def _guarded(self, call: Callable[[], None]) -> None:
        """Runs what may find this peer put out of the run."""
        try:
            with self._attempt():
                call()
        except PCCLError as error:
            # The other ranks of a replica are put out with this one, but may be past their calls: they would wait
            # for this rank inside the replica, and this one for them at the master.
            if error.advice != "rejoin" or self._rejoin is None or self._replicas:
                raise
            self._come_back()

    def _come_back(self) -> None:
        assert self._rejoin is not None
        while True:
            self._leave()
            comm = self._rejoin()
            if self._comm is not None:
                self._comm = comm
                if self._data is not None:
                    self._data.follow(comm)
            try:
                return self.join()
            except RevisionMismatch:
                # The run was founded again by a member that had not seen the latest round, or from a checkpoint.
                if self._steps == 0:
                    raise
                self._steps = 0

    def _leave(self) -> None:
        if self._comm is None:
            api.shutdown()
        else:
            self._comm.close()

    def _leaving(self, step: int) -> list[int]:
        """The fragments whose reduction begins after that inner step: each at its own place in a round."""
        every = self._sync_every
        return [p for p in range(self._count) if (step - p * every // self._count) % every == 0]

    def _advance(self) -> None:
        leaving = self._leaving(self._steps)
        due = [p for p, flight in self._flying.items() if flight.due == self._steps]
        # Before anything is applied: what this member has learned from the parameters that it began with.
        given = {p: (self._weight(p), self._difference(p)) for p in leaving}
        for fragment in due:
            self._apply(fragment)
        if self._steps % self._sync_every == 0 and self._admit():
            # This member's state was not the group's: what it has learned was from something else.
            self._begin()
            given, due = {}, []
        self._go_on(leaving, given, due)

    def _go_on(
        self, leaving: Sequence[int], given: Mapping[int, tuple[float, list[Array]]], due: list[int]
    ) -> None:
        """The end of a step, from where newcomers take part.

        Args:
            leaving: Whose reductions begin.
            given: Their weights and pseudo-gradients; none: takes part without counting.
            due: What was applied before.
        """
        for fragment in leaving:
            weight, gradients = given.get(fragment, (0.0, []))
            self._start(fragment, weight, gradients)
        if self._overlap == 0:
            for fragment in leaving:
                self._apply(fragment)
            due = [*due, *leaving]
        for fragment in due:
            self._give(fragment, self._mixing)
        if self._mode == "async":
            if due:
                self._origin = None
            if leaving:  # what comes after this is of the next reduction
                count = range(len(self._names))
                self._origin = [np.array(self._inner.read(index)) for index in count]

    def _begun(self, index: int) -> Array:
        """Where this member's learning is measured from."""
        return self._outer[index] if self._origin is None else self._origin[index]

    def _arrays(self, fragment: int) -> list[Array]:
        return [self._outer[index] for index in self._fragments[fragment]]

    def _weight(self, fragment: int) -> float:
        seen, self._seen[fragment] = self._seen[fragment], _Seen()
        # A fraction of a round: 1.0 for all but those who came in the middle of one.
        return seen.tokens if seen.counted else seen.steps / self._sync_every

    def _difference(self, fragment: int) -> list[Array]:
        return [
            np.asarray(np.subtract(self._inner.rounded(i, self._begun(i)), self._inner.read(i)))
            for i in self._fragments[fragment]
        ]

    def _give(self, fragment: int, mixing: float) -> None:
        """The model gets the outer parameters, with what it has learned meanwhile or a share of its own."""
        for index in self._fragments[fragment]:
            value = self._outer[index]
            if self._origin is not None:
                value = np.asarray(value + (self._inner.read(index) - self._origin[index]))
            if mixing > 0:
                value = np.asarray(mixing * self._inner.read(index) + (1 - mixing) * value)
            self._inner.write(index, value)

    def _begin(self) -> None:
        """The model begins at the outer parameters."""
        self._origin = None
        for fragment in range(self._count):
            self._give(fragment, 0.0)
            self._seen[fragment] = _Seen()

    def _start(self, fragment: int, weight: float, gradients: list[Array]) -> None:
        if weight == 0:
            gradients = [np.zeros_like(array) for array in self._arrays(fragment)]
        names = [self._names[index] for index in self._fragments[fragment]]
        tree = {
            "gradients": dict(zip(names, gradients, strict=True)),
            # The mean of this is 0 when nobody's weight counts, as when a member is left among newcomers alone.
            "present": np.array([float(weight > 0)]),
        }
        flight = _Flight(self._steps + self._overlap, None, tree, weight or _UNCOUNTED)
        self._reduce(flight)
        self._flying[fragment] = flight
        if fragment == 0 and self._data is not None:
            self._data.seal()

    def _reduce(self, flight: _Flight) -> None:
        flight.started = flight.seen = time.perf_counter()
        flight.work = api.allreduce_async(
            flight.tree,
            "avg",
            weight=flight.weight,
            quantize=self._quantize,
            tag=_TAG,
            comm=self._comm,
        )

    def _look(self) -> None:
        """Notes which reductions are still under way."""
        for flight in self._flying.values():
            if flight.work is not None and not flight.work.done():
                flight.seen = time.perf_counter()

    def _complete(self, flight: _Flight, *, together: bool = True) -> dict[str, Any]:
        """Waits for a reduction.

        Args:
            flight: Which.
            together: Whether all members wait here, so that they may start it once more.
        """
        if flight.result is None:
            waiting = time.perf_counter()
            self._look()
            while True:
                assert flight.work is not None
                try:
                    flight.result = flight.work.wait()
                    break
                except PeerLost:  # another member was interrupted; all are told, in the same order
                    if not together:
                        raise
                    self._reduce(flight)
            # What had ended before counts up to where it was last seen: never as hidden for longer than it was.
            if flight.seen >= waiting:
                flight.seen = time.perf_counter()
                self.waited_seconds += flight.seen - waiting
            self.reduction_seconds += flight.seen - flight.started
            self.info = flight.info = flight.work.info
            self.tx_bytes += self.info.tx_bytes
            flight.work, flight.tree = None, {}
        return flight.result

    def _pin(self, info: ReduceInfo | None = None) -> None:
        """Examples are for these members from now on. Where all members have met, or apply this reduction.

        Who they are is not asked anywhere else: a later reduction may have shown a loss to some of them by then,
        and one of them may have waited alone for a checkpoint.
        """
        self._pinned = True
        if self._data is not None:
            self._data.pin(info)

    def _apply(self, fragment: int) -> None:
        result = self._complete(self._flying[fragment])
        flight = self._flying.pop(fragment)
        # Not where it came, which may be at another step on another member. Restored ones have no info, and nothing in
        # flight; those that newcomers are given are never the first fragment's.
        if fragment == 0 and self._data is not None and flight.info is not None:
            self._data.commit(flight.info)
        if flight.info is not None:
            self._pin(flight.info)
        if result["present"][0] > 0:
            names = [self._names[index] for index in self._fragments[fragment]]
            gradients = [result["gradients"][name] for name in names]
            self._optimizers[fragment].step(self._arrays(fragment), gradients)

    def _admit(self) -> bool:
        """Lets newcomers in, and compares when it is time.

        Returns:
            Whether this member's state was not the group's, and is now.
        """
        every = self._verify_every
        for flight in self._flying.values():
            self._complete(flight)
        verify = every > 0 and self.outer_step % every == 0
        # Replicas may be let in for some of their ranks' groups and lost before the others' get there. All ranks
        # have to make the same calls all the same.
        verify = verify or bool(api.membership(self._comm).replicas)
        if not verify and not _retried(lambda: api.admit(comm=self._comm)):
            self._pin()
            return False
        self._between = True
        return self._share()

    def _share(self) -> bool:
        """One sync. Returns whether something was new here.

        The revision is the number of rounds: a checkpoint's counts when the run starts again, and
        is refused by a run that is behind it.
        """
        state: dict[str, Any] = {
            "settings": self._settings,
            "steps": self._steps,
            "between": self._between,
            "parameters": dict(zip(self._names, self._outer, strict=True)),
            "optimizer": {str(p): made.state() for p, made in enumerate(self._optimizers)},
            "pending": {
                str(p): {"due": flight.due, "result": flight.result}
                for p, flight in self._flying.items()
            },
        }
        if self._data is not None:
            state["data"] = self._data
        shared, info = _retried(
            lambda: api.sync(state, revision=self.outer_step, comm=self._comm, return_info=True)
        )
        self.sync_info = info
        self._pin()
        if shared["settings"] != self._settings:
            self._leave()  # the others would wait for it
            sentence = f"this peer has {self._settings}; the run has {shared['settings']}"
            raise InvalidArgument.because(_FUNC, sentence)
        self._steps, self._between = shared["steps"], shared["between"]
        if info.received:
            pending = sorted(shared["pending"].items(), key=lambda item: (item[1]["due"], item[0]))
            self._flying = {int(p): _Flight(kept["due"], kept["result"]) for p, kept in pending}
        return bool(info.received)


def _words(how: Quantize | None) -> str:
    return " exactly" if how is None else quantization.words(how)


def _whole(value: object, name: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument.because(_FUNC, f"{name} is a number from {least}, not {value!r}")
    return value


def _snapshot(state: Any) -> Any:
    """A copy that later steps do not change."""
    if isinstance(state, Mapping):
        return {key: _snapshot(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_snapshot(value) for value in state]
    if hasattr(state, "state_dict"):
        return copy.deepcopy(state.state_dict())
    return state.copy() if isinstance(state, np.ndarray) else copy.deepcopy(state)


def _fits(state: Any, saved: Any) -> bool:
    """Whether a snapshot is of such a state, as far as one can see."""
    if hasattr(state, "load_state_dict"):
        return isinstance(saved, Mapping)
    if isinstance(state, np.ndarray):
        return bool(np.shape(saved) == state.shape)
    if isinstance(state, Mapping):
        same = isinstance(saved, Mapping) and state.keys() == saved.keys()
        return same and all(_fits(value, saved[key]) for key, value in state.items())
    if isinstance(state, list | tuple):
        same = isinstance(saved, list | tuple) and len(state) == len(saved)
        return same and all(map(_fits, state, saved))
    return True


def _restore(state: Any, saved: Any) -> None:
    """Writes a snapshot back, in place."""
    if hasattr(state, "load_state_dict"):
        state.load_state_dict(saved)
    elif isinstance(state, np.ndarray):
        state[...] = np.asarray(saved)
    elif isinstance(state, Mapping) and state.keys() == saved.keys():
        for key, value in state.items():
            _restore(value, saved[key])
    elif isinstance(state, list | tuple) and len(state) == len(saved):
        for value, kept in zip(state, saved, strict=True):
            _restore(value, kept)
    else:
        sentence = (
            "the outer optimizer's state() has something else than arrays and objects with "
            "load_state_dict, or other entries than before"
        )
        raise InvalidArgument.because(_FUNC, sentence)
