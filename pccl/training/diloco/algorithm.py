"""The algorithm: an inner step, a round's end, joining and coming back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pccl import api, departure
from pccl.errors import Evicted, InvalidUsage, PCCLError, RevisionMismatch
from pccl.frameworks import Array
from pccl.training.diloco.checkpoints import check, restore, snapshot
from pccl.training.diloco.inner import Inner, NumPyTree
from pccl.training.diloco.joining import Joining, retried
from pccl.training.diloco.late import Late, combined
from pccl.training.diloco.options import FUNC, Keywords, Options, Plan, refused
from pccl.training.diloco.outer import SGD, OuterOptimizer
from pccl.training.diloco.reductions import Contribution, Flight
from pccl.training.diloco.robust import LEAST_WEIGHT, MOST_WEIGHT
from pccl.training.diloco.round_clock import RoundClock
from pccl.training.diloco.snapshots import Progress
from pccl.training.diloco.sparse import Sparsifier

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NOTICE_SECONDS = 2.0  # more than links take to get ready for a reduction

_log = logging.getLogger(__name__)


@dataclass
class _Seen:
    """This member's work since its last pseudo-gradient of a fragment: the weight of the next."""

    steps: int = 0
    tokens: float = 0.0
    counted: bool = False  # whether the program says how many tokens there were


class DiLoCo(Joining):
    """The algorithm around any model that `Inner` describes. Arguments are equal on all members.

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
        sync_every: Inner steps in a round, the paper's H. With `round_seconds` the most of them.
        outer_lr: Learning rate of the outer optimizer. Default: 0.7; with `compression` 1.0, which
            is for hundreds of rounds: 3.0 for 50 or fewer (see `pccl.diloco.preset`).
        outer_momentum: Its momentum. Default: 0.9; with `compression` 0.
        nesterov: Whether its momentum is Nesterov's. Default: True.
        outer_optimizer: Makes another one from a list of NumPy arrays (float32, or float64 for
            float64), once for each fragment. The three arguments before are not used then.
        warm_up: Rounds at the beginning of a run from random parameters, 0 by default, in which
            members reduce several times: 10 times in the first seventh of these rounds, 5 times in
            the next two, 2 times in the rest. In the first three sevenths they take the mean of
            their parameters, without the outer optimizer. In all modes they wait for these
            reductions. With `compression` the mean is that of the codes. Not with `round_seconds`.
        round_seconds: A round's time, for machines of different speed: each member makes as many
            inner steps as fit, at least one, and at most `sync_every`. Members weigh by their steps
            or tokens. Stop training only where `step` has returned True: other places are not the
            same on all members. In "streaming" every fragment has the same part of this time. Not
            for a rank of a replica. Default: a round ends after `sync_every` steps only.
        quorum: Share of the members, above 0.5, that does not wait long for the others. Once so
            many have entered a call, for example at the end of a round, the others have
            `grace_seconds`. Then the master evicts them, and they come back by `rejoin`, which a
            quorum requires; set `background_join`, too. Their learning counts in the next round
            that they take part in, if that is at most four rounds later. It does not count in
            "streaming", or with `data`, where others learn from their examples.
            Not for a rank of a replica. Default: all wait for all.
        grace_seconds: See `quorum`. Longer than the usual difference between members. Default: 2.
        mode: "sync" (the default): the reduction blocks. "async": it runs in the background of the
            next `overlap` inner steps, after which its result is applied. "streaming": fragments
            take turns, each in the background of `overlap` steps.
        fragments: "streaming" only: number of parts to cut the parameters into (default 4, or fewer
            if there are fewer parameters), in order and of about equal size; or lists of names.
        overlap: Inner steps during which a reduction runs in the background. "async": from 1 to
            `sync_every`, where the mean comes a whole round later; default half of it. "streaming":
            the paper's tau, from 0 to `sync_every` - 1; default a twentieth of `sync_every`, at
            least 1. Fewer steps are closer to "sync"; take enough for a reduction to be over by
            then (see `hidden`).
        mixing: "streaming" only: share of a member's own parameters that stays when new ones come,
            the paper's alpha; from 0, none, to 1. Default 0.5; with `compression` always 0.
        quantize: As in `pccl.allreduce`: pseudo-gradients in fewer bits between hosts.
        compression: "sparse", or a `Sparse`: members send the largest elements of each chunk of
            their pseudo-gradients, in two bits each, and add the rest to the next ones (SparseLoCo,
            arXiv 2508.15706). The rest is each member's own; newcomers begin without. Not with
            `quantize`.
        robust: "clip" or "trimmed", or a `Robust`: members gather the pseudo-gradients of all, and
            no member has more than a bounded influence on the mean. Each receives n - 1
            pseudo-gradients of a group of n, and holds n. Not with `quantize`; "clip" also with
            `compression`.
        verify_every: Rounds between comparisons of all members' states (one `pccl.sync`); the
            others only look for newcomers. 0: never. With replicas in every round; not at the end
            of rounds where newcomers watch. Default: 1 for "sync", 16 otherwise.
        data: An `ElasticSampler` (`pccl.data`) that the program takes its examples from. Newcomers
            learn its place. Each round's reduction settles what was taken for it, in mode
            "streaming" that of the first fragment. The program does not call its `commit` then.
        comm: Default: the process's communicator.
        rejoin: Makes a new communicator, as `pccl.init`, when this peer was removed from the run or
            cut off, or has none. It then returns as a newcomer by itself. The old communicator is
            closed before.
            Not for a replica's rank. Default: `step` raises, and `join` comes back.
        background_join: Whether members go on while a newcomer receives the state. The newcomer
            comes in at a round's end and watches for some rounds, in which it makes no inner steps.
            It keeps the result of each reduction, and holders keep a copy of the state. After 16
            rounds, or where it keeps 16 results or more at a round's end, the members wait for it.
            Its constructor returns when its learning counts. The program makes no collective calls
            of its own then, since a newcomer that watches does not make them. Not for a rank of a
            replica. Default: False, all wait at the round's end.
        join_megabits: With `background_join`: the most that this member sends to newcomers while
            nobody waits for them, in Mbit/s; each member's own. Where up to four holders together
            cannot send the state in 16 rounds, members wait and send the rest without a bound.
            Default: 80 % of the time, 25 % beside a reduction.
        join: False: do not join yet; load a checkpoint and call `join`. Default: True.

    Attributes:
        info: The latest reduction's `pccl.ReduceInfo`: bytes sent and received, members; None
            before the first since joining.
        sync_info: The latest sync's `pccl.SyncInfo`; None before.
        tx_bytes: Bytes that this member's reductions sent in all, in their last runs.
        reduction_seconds: Seconds that reductions have taken in all. While nobody waits for a
            reduction, it counts up to the last `step` that found it under way.
        waited_seconds: The part of it that this member has waited.
        limited: Ids of peers whose part or weight in the latest reduction `robust` has scaled down,
            or which it has left out because they were far too long or not finite.
        observers: Ids of newcomers that do not count yet, with `background_join`.
        round_steps: Inner steps that this member made in its latest round; 0 before.

    Raises:
        InvalidArgument: An argument makes no sense, or the run has other settings than this peer,
            which leaves it.
        PCCLError: What `pccl.sync` and `pccl.allreduce` raise.
    """

    def __init__(
        self,
        inner: Any,
        *,
        outer_optimizer: Callable[[Sequence[Array]], OuterOptimizer] | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        super().__init__()
        options = Options(**keywords)
        known = all(hasattr(inner, name) for name in ("names", "read", "write", "rounded"))
        self._inner: Inner = inner if known else NumPyTree(inner)
        self._names = list(self._inner.names)
        if not self._names or len(set(self._names)) != len(self._names):
            raise refused("there are no parameters, or two of one name")
        self._outer = [np.array(self._inner.read(i)) for i in range(len(self._names))]
        self._plan = plan = Plan.of(options, self._names, [array.size for array in self._outer])
        self._quantize = plan.quantize
        self._robust = plan.robust
        self._progress = Progress(self._reduces, plan.join_megabits)
        self._data = options.data
        self._comm = options.comm
        self._rejoin = options.rejoin
        if options.comm is not None and options.data is not None:
            options.data.follow(options.comm)
        self._settings = str(plan)
        made = outer_optimizer
        if made is None:
            # Error feedback plays the role of momentum in SparseLoCo.
            usual = (0.7, 0.9) if plan.sparse is None else (1.0, 0.0)
            # As floats, which print alike on all members whatever kind of number was given.
            lr = float(usual[0] if options.outer_lr is None else options.outer_lr)
            momentum = usual[1] if options.outer_momentum is None else options.outer_momentum
            momentum = float(momentum)
            nesterov = options.nesterov
            self._settings += f", lr={lr}, momentum={momentum}, nesterov={nesterov}"

            def made(arrays: Sequence[Array]) -> OuterOptimizer:
                return SGD(arrays, lr, momentum, nesterov)

        fragments = range(len(plan.fragments))
        self._optimizers = [made(self._arrays(fragment)) for fragment in fragments]
        if plan.sparse is not None:
            self._sparsifiers = [Sparsifier(plan.sparse, self._arrays(p)) for p in fragments]
        self.round_steps = 0
        self._clock = RoundClock(plan.round_seconds, len(plan.fragments))
        self._leaves_at = 0  # the step of the next reduction
        self._announced = False  # links were told of it
        self._given: Mapping[int, Contribution] = {}  # in the present call of `_advance`
        self._late: Late | None = None
        in_turns = plan.mode == "streaming"
        self._keeps_learning = plan.quorum is not None and not in_turns and self._data is None
        self._seen = [_Seen() for _ in fragments]
        # Where this member's learning is measured from; None: from the outer parameters.
        self._origin: list[Array] | None = None
        self._joined = False
        self._replicas = False  # whether this peer is a rank of one
        # The contributors to the reduction that a checkpoint had in flight. With `round_seconds`
        # and `data` also the number of examples that each took.
        self._restored: list[str] | dict[str, int] = []
        if options.join:
            self.join()

    @property
    def inner_step(self) -> int:
        """Inner steps of the run's longest-standing members: for learning rates and data.

        With `round_seconds` a round counts as `sync_every` of them, however many members make, and
        the number is equal on all members at the end of a round only.
        """
        return self._steps

    @property
    def world_tokens(self) -> float:
        """Tokens that the outer parameters have learned from, over all members and rounds.

        For learning rates that follow the data, whoever joins or leaves. Equal on all members at
        the end of a round. It grows when a round is applied, by what its contributors have passed
        to `step`: 0 if they pass none. With `robust` a member counts with its bounded weight, and
        one that is left out does not count. With replicas it is the number of the ranks that
        reduce with this one, and may differ between the ranks of a replica.
        """
        return self._world_tokens

    @property
    def parameters(self) -> dict[str, Array]:
        """The outer parameters by name: read-only views of what the members have in common."""
        views = {name: array.view() for name, array in self._named_outer()}
        for view in views.values():
            view.flags.writeable = False
        return views

    def log_dict(self) -> dict[str, float]:
        """Numbers for W&B or TensorBoard: a flat dict.

            wandb.log(diloco.log_dict(), step=diloco.inner_step)

        Times are in seconds and bytes are of this member. Keys with "round/" are of the
        latest reduction, and missing before the first; steps and tokens are those of the run, and
        the others are since this object was made.
        """
        made: dict[str, float] = {
            "diloco/outer_step": self.outer_step,
            "diloco/inner_step": self.inner_step,
            "diloco/tx_bytes": self.tx_bytes,
            "diloco/reduction_seconds": self.reduction_seconds,
            "diloco/waited_seconds": self.waited_seconds,
            "diloco/hidden": self.hidden,
            "diloco/world_tokens": self._world_tokens,
            "diloco/in_flight": len(self._flying),
            "diloco/round_steps": self.round_steps,
            "diloco/limited": len(self.limited),
            "diloco/observers": len(self.observers),
        }
        info = self.info
        if info is not None:
            made |= {
                "round/members": info.world_size,
                "round/epoch": info.epoch,
                "round/attempts": info.attempts,
                "round/bytes": info.bytes,
                "round/tx_bytes": info.tx_bytes,
                "round/rx_bytes": info.rx_bytes,
                "round/seconds": info.seconds,
                "round/waiting_seconds": info.waiting_seconds,
                "round/moving_seconds": info.moving_seconds,
            }
        return made

    def join(self) -> None:
        """Joins the run, as its founder or a newcomer, and gives the model the run's parameters.

        Also call it after an exception of `step`: if its advice was "rejoin", after
        `pccl.shutdown()` and `pccl.init()`; after a `Timeout`, on all members. The model then loses
        what it has learned since its last reduction. After a Ctrl-C in the middle of `step`, which
        the others go on with, leave and come back first. With `rejoin` this method leaves and comes
        back itself, after both.

        Raises:
            Drained: This peer is no member any more, and was asked to leave: see `pccl.drain`.
            InvalidArgument: The run has other settings or data than this peer, which leaves it.
            InvalidUsage: This member was interrupted in the middle of a step and has not left.
            PCCLError: What `pccl.sync` and `pccl.allreduce` raise.
        """
        self._joined = False
        # The others may have gone on with what it has sent, or without.
        self._given, self._late, self._seen[0] = {}, None, _Seen()
        self._flying.clear()
        comm = self._communicator()
        if self._comes_back and (comm is None or comm._torn or comm._closed):
            return self._come_back()
        if comm is not None and comm._torn and not comm._closed:
            sentence = (
                "interrupted in the middle of a step, with which the others go on: leave and come "
                "back, as by pccl.shutdown() and pccl.init(), then join()"
            )
            raise InvalidUsage.because(FUNC, sentence)
        try:
            self._join_once()
        except PCCLError as error:
            if error.advice != "rejoin" or not self._comes_back:
                raise
            self._come_back()

    def _join_once(self) -> None:
        comm = api._use(self._comm, FUNC)
        if self._plan.background_join and comm._replica:
            raise refused("background_join is not for ranks of a replica, which come together")
        if self._plan.quorum is not None and comm._replica:
            raise refused("quorum is not for ranks of a replica, which cannot come back alone")
        comm._wait_no_longer_than(0, 0)  # until this peer counts: see _be_ready_to_go_on
        self.info = None
        self._flying.clear()
        self._forget_unsent()
        self._steps -= self._steps % self._plan.sync_every
        self._between = False
        if self._data is not None:
            if self._restored:
                self._data.commit(self._restored)
            self._data.rollback()
            self._data.reserve(self._most_steps())
        self._restored = []
        with self._that_others_go_on_with():
            begun = self._enter()
            self._replicas = bool(api.membership(self._comm).replicas)
            if self._replicas and self._plan.round_seconds is not None:
                self._leave()
                raise refused("round_seconds is not for ranks of a replica: each has its own clock")
            self._be_ready_to_go_on()
            if not begun:
                self._begin()
                if self._between:  # the members begin reductions now
                    self._given = {0: self._with_late(Contribution())}
                    self._go_on(self._plan.leaving(self._steps), self._given, [])
                    self._given = {}
            self._clock.begin()
            self._leaves_at = 0
            self._joined = True

    def step(self, tokens: float | None = None) -> bool:
        """Counts an inner step, which the model has just made. Reduces and applies what is due.

        Args:
            tokens: What this member's step has seen, in tokens or samples: its weight in the mean
                is their number in a round. 0 or from 1e-6 to 1e15. All members pass it to all
                steps, or none does; where only some members do, a warning is logged. Default: all
                steps weigh the same.

        Returns:
            Whether a round has ended. Also True where this member came back to the run (`info` may
            be None then).

        Raises:
            Drained: A round has ended, this peer has contributed to it, and has left the run, as it
                was asked to: see `pccl.drain`.
            InvalidArgument: `tokens` is no such number, or other steps of the round had none.
            InvalidUsage: Not joined; or not again after an exception.
            PCCLError: What `pccl.admit`, `pccl.sync` and `pccl.allreduce` raise. `join` keeps or
                drops what the round brought so far. With `rejoin`, errors whose advice is
                "rejoin" are raised only if coming back fails, or on a rank of a replica, since all
                ranks of it have to come back.
        """
        self._check_joined()
        if tokens is not None:
            tokens = float(tokens)
            if tokens != 0 and not LEAST_WEIGHT <= tokens <= MOST_WEIGHT:
                raise refused(f"tokens is 0 or from 1e-6 to 1e15, not {tokens!r}")
        if self._seen[0].steps > 0 and self._seen[0].counted != (tokens is not None):
            raise refused("tokens was passed to some steps of this round, and not to others")
        if not self._pinned:
            self._pin()
        # Until the end the others go on with this step, wherever this member is interrupted.
        with self._attempt():
            self._count(tokens)
            self._look()
            try:
                with self._progress.calling(self._steps):
                    self._advance()
            except PCCLError as error:
                if error.advice != "rejoin" or not self._comes_back:
                    raise
                self._come_back()
            ended = self._steps % self._plan.sync_every == 0
            if ended:
                self._clock.begin()
                # Not in `admit`, which comes before this round's contribution.
                if not self.observers or self._may_leave:
                    api.leave_if_asked(self._comm, FUNC)
            self._announce()
        return ended

    def finish(self) -> None:
        """Applies what is in flight, and gives the model the outer parameters. All members call it.

        For the end of training, or before an evaluation that needs the same model on all members.
        The model loses what it has learned since its last reduction, and with `data` the examples
        of that are given back. In the middle of a run call it before the first step of a round: a
        newcomer whose constructor has just returned can do the same, and never directly after a
        `step`, which it has not made.

        Raises:
            InvalidUsage: Not joined.
            PCCLError: As `step`, also those whose advice is "rejoin".
        """
        self._check_joined()
        with self._attempt():
            for fragment in list(self._flying):
                self._apply(fragment)
            self._begin()
            if self._data is not None:
                self._data.rollback()  # what was taken in a round that is not over
                self._pinned = False

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: arrays (copies) and numbers in nested dicts and lists.

        Outer parameters and optimizers, and the count of steps up to the latest round's end. Waits
        for reductions in flight, which are part of it. No collective call: one member may do it
        alone. Best at a round's end: what the model has learned since is not part of it, nor is the
        inner optimizer's state.

        Raises:
            InvalidUsage: This member was interrupted in a reduction that two calls make.
            PCCLError: A reduction in flight failed.
        """
        for flight in self._flying.values():
            self._complete(flight, together=False)
        first = self._flying.get(0)
        contributors: Any = first.info.contributors if first and first.info else []
        if first and first.taken is not None:
            contributors = first.learned()
        return {
            "parameters": {name: array.copy() for name, array in self._named_outer()},
            "optimizer": [snapshot(optimizer.state()) for optimizer in self._optimizers],
            "pending": {str(p): snapshot(flight.result) for p, flight in self._flying.items()},
            # Whose examples of `data` are learned with it. As text, since their number differs.
            "contributors": json.dumps(contributors),
            "steps": self._steps - self._steps % self._plan.sync_every,
            "world_tokens": self._world_tokens,
            "layout": json.dumps(self._layout()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a checkpoint, before `join`. The one with the most rounds becomes the run's.

        A newcomer's does not count: it receives the run's state. One that is ahead of the run is
        refused (`RevisionMismatch`). Reductions that were in flight are applied.

        Raises:
            InvalidArgument: It is of another model, other fragments, another `sync_every` or
                another kind of outer optimizer. Nothing is changed then.
            InvalidUsage: Joined already, so the others would not learn of it.
        """
        if self._joined:
            sentence = "joined already: make it with join=False, load, then join()"
            raise InvalidUsage.because(FUNC, sentence)
        check(state, self._layout(), self._optimizers)
        for name, array in self._named_outer():
            array[...] = np.asarray(state["parameters"][name])
        for optimizer, kept in zip(self._optimizers, state["optimizer"], strict=True):
            restore(optimizer.state(), kept)
        self._flying.clear()
        # Older checkpoints have none.
        self._world_tokens = float(state.get("world_tokens", 0.0))
        for key, result in state["pending"].items():
            arrays = {name: np.array(value) for name, value in result["gradients"].items()}
            pending = {"gradients": arrays, "present": np.array(result["present"])}
            pending["tokens"] = np.array(result.get("tokens", [0.0]))
            self._flying[int(key)] = Flight(0, pending)
            self._apply(int(key))
        self._restored = json.loads(state["contributors"])
        every = self._plan.sync_every
        self._steps = int(state["steps"]) // every * every
        self._begin()

    def _layout(self) -> dict[str, Any]:
        """The meaning and layout of a checkpoint's numbers."""
        return {
            "parameters": {
                name: f"{array.dtype}{list(array.shape)}" for name, array in self._named_outer()
            },
            "fragments": [self._names_of(p) for p in range(len(self._plan.fragments))],
            "sync_every": self._plan.sync_every,
        }

    def _named_outer(self) -> Iterator[tuple[str, Array]]:
        return zip(self._names, self._outer, strict=True)

    def _names_of(self, fragment: int) -> list[str]:
        return [self._names[index] for index in self._plan.fragments[fragment]]

    def _arrays(self, fragment: int) -> list[Array]:
        return [self._outer[index] for index in self._plan.fragments[fragment]]

    # Joining, and coming back.

    def _check_joined(self) -> None:
        if not self._joined:
            raise InvalidUsage.because(FUNC, "not joined: call join() first")

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """For calls that all members make. Joined again only if it ends well."""
        self._joined = False
        with self._that_others_go_on_with():
            yield
            self._joined = True

    @property
    def _comes_back(self) -> bool:
        """Whether this peer makes a new communicator itself where it needs one.

        The other ranks of a replica are evicted with this one, but may be past their calls: they
        would wait for this rank in the replica, and this one for them at the master.
        """
        comm = self._communicator()
        of_replica = self._replicas or (comm is not None and bool(comm._replica))
        return self._rejoin is not None and not of_replica

    def _come_back(self) -> None:
        assert self._rejoin is not None
        while True:
            old = self._communicator()
            if old is not None and old.draining:
                self._stop_holding()
                departure.leave(old)
            self._late = self._kept_for_later()
            self._leave()
            comm = self._rejoin()
            if self._comm is not None:
                self._comm = comm
                if self._data is not None:
                    self._data.follow(comm)
            try:
                return self._join_once()
            except RevisionMismatch:
                # The run was founded again from an older state: a member's or a checkpoint's.
                if self._steps == 0:
                    raise
                self._steps = 0
            except PCCLError as error:
                if not self._was_late(error):
                    raise

    # A step.

    def _most_steps(self) -> int:
        """Steps for which data is reserved in a round; 0: all members make as many."""
        return 0 if self._plan.round_seconds is None else self._plan.sync_every

    def _count(self, tokens: float | None) -> None:
        """Counts the step that the model has made."""
        self._steps += 1
        for seen in self._seen:
            seen.steps += 1
            seen.tokens += tokens or 0.0
            seen.counted = seen.counted or tokens is not None
        if self._plan.round_seconds is None:
            self._clock.step()
        else:
            self._count_in_time()

    def _count_in_time(self) -> None:
        """Goes to where the next reduction begins, if the time for that has come."""
        if self._data is not None:
            self._data.hold()
        wait = getattr(self._inner, "wait", None)
        if wait is not None:
            wait()
        if self._clock.step():
            self._steps = self._plan.next_leaving(self._steps)
        if self._plan.leaving(self._steps):
            self._clock.next_turn()

    def _announce(self) -> None:
        """Has the links get ready if a reduction is near, as after a pause they begin slowly."""
        if self._plan.sparse is not None:
            return  # what is sparse has fewer bytes than it takes to get links ready
        if self._leaves_at <= self._steps:
            self._leaves_at = self._plan.next_leaving(self._steps + 1)
            self._announced = False
        steps = min(self._leaves_at - self._steps, self._clock.steps_left())
        seconds = steps * self._clock.mean_seconds
        # The last step tells when it is again.
        if steps > 1 and (self._announced or seconds > _NOTICE_SECONDS):
            return
        comm = self._communicator()
        if comm is not None:
            self._announced = True
            leaving = self._plan.leaving(self._leaves_at)
            arrays = [array for fragment in leaving for array in self._arrays(fragment)]
            nbytes = sum(one.nbytes if self._quantize is None else one.size for one in arrays)
            with suppress(InvalidUsage):  # closed by another thread
                if self._robust is not None:
                    # An all-gather sends as much as an all-reduce of n / 2 times the array.
                    nbytes = nbytes * api.world_size(comm) // 2
            comm._expect_operation(seconds, nbytes, self._quantize is not None)

    def _advance(self) -> None:
        leaving = self._plan.leaving(self._steps)
        # A round that is over by its time goes past steps in which reductions were due.
        due = [p for p, flight in self._flying.items() if flight.due <= self._steps]
        # Before anything is applied: the differences to the parameters that this member began with.
        given = {} if self._watching else {p: self._contribution(p) for p in leaving}
        self._given = given
        for fragment in due:
            self._apply(fragment)
        if self._steps % self._plan.sync_every == 0 and self._admit():
            # This member's state was not the group's, so its differences are meaningless.
            self._forget_unsent()
            self._begin()
            self._given = given = {}
            due = []
        self._go_on(leaving, given, due)
        self._given = {}

    def _go_on(
        self, leaving: Sequence[int], given: Mapping[int, Contribution], due: list[int]
    ) -> None:
        """The end of a step, from where newcomers take part.

        Reductions begin for the fragments `leaving`, with the weights and pseudo-gradients `given`;
        without these a fragment takes part without counting. `due` were applied before.
        """
        for fragment in leaving:
            self._start(fragment, given.get(fragment, Contribution()))
        warms_up = self._plan.warms_up(self._steps)
        if self._plan.overlap == 0 or warms_up:
            for fragment in leaving:
                self._apply(fragment)
            due = [*due, *leaving]
        if warms_up:
            self._origin = None  # nothing was learned since these reductions began
        for fragment in due:
            self._give(fragment, 0.0 if warms_up else self._plan.mixing)
        if self._plan.mode == "async" and not self._watching:
            if due:
                self._origin = None
            if leaving:  # what comes after this is of the next reduction
                count = range(len(self._names))
                self._origin = [np.array(self._inner.read(index)) for index in count]

    def _contribution(self, fragment: int) -> Contribution:
        seen, self._seen[fragment] = self._seen[fragment], _Seen()
        if fragment == 0:
            # In a warm-up the round may have had other reductions.
            goes_on = (self._steps - seen.steps) % self._plan.sync_every > 0
            before = self.round_steps if goes_on and self._plan.warms_up(self._steps) else 0
            self.round_steps = before + seen.steps
        # A fraction of a round: 1.0 for all members but those that came in the middle of one.
        weight = seen.tokens if seen.counted else seen.steps / self._plan.sync_every
        gradients = self._difference(fragment)
        if self._robust is not None and not all(np.isfinite(one).all() for one in gradients):
            # The others would leave it out, in every round from now on.
            _log.warning("what was learned is not finite: it is dropped, and does not count")
            weight, gradients = 0.0, []
            self._forget_unsent()
            self._origin = None
            for index in self._plan.fragments[fragment]:
                self._inner.write(index, self._outer[index])
        made = Contribution(weight, gradients, seen.counted)
        return self._with_late(made) if fragment == 0 else made

    # Being late: see `quorum`.

    def _kept_for_later(self) -> Late | None:
        """This member's learning that is in no result, since the others went on without it."""
        given, self._given = self._given.get(0), {}
        if not self._keeps_learning:
            return None
        parts = [flight.given for flight in self._flying.values() if flight.given is not None]
        if given is None and self._seen[0].steps > 0:  # since the reduction in flight began
            given = self._contribution(0)
        if given is not None and not any(part is given for part in parts):
            parts.append(given)
        steps = self._steps
        if self._plan.warms_up(steps):  # the run may be founded again from the round's begin
            steps -= steps % self._plan.sync_every
        if self._late is not None:  # it came back, and was late again before it sent anything
            parts.append(self._late.contribution)
            steps = self._late.steps
        kept = combined(parts)
        return None if kept is None else Late(steps, kept)

    def _was_late(self, error: PCCLError) -> bool:
        """Whether this peer was evicted before it counted, most likely for being late again."""
        late = self._plan.quorum is not None and isinstance(error, Evicted)
        return late and error.advice == "rejoin" and not self._replicas

    def _be_ready_to_go_on(self) -> None:
        """From now on this member does not wait long for others.

        Not before it has the state: otherwise the only member that has it might be evicted.
        """
        if self._plan.quorum is not None:
            comm = api._use(self._comm, FUNC)
            comm._wait_no_longer_than(self._plan.quorum, self._plan.grace_seconds)

    def _with_late(self, own: Contribution) -> Contribution:
        late, self._late = self._late, None
        if late is None or not late.counts(self._steps, self._plan.sync_every):
            return own
        return combined([late.contribution, own]) or own

    def _difference(self, fragment: int) -> list[Array]:
        begun = self._outer if self._origin is None else self._origin
        return [
            np.asarray(np.subtract(self._inner.rounded(i, begun[i]), self._inner.read(i)))
            for i in self._plan.fragments[fragment]
        ]

    def _give(self, fragment: int, mixing: float) -> None:
        """Gives the model the outer parameters, with its learning since or a share of its own."""
        if self._watching:
            return
        for index in self._plan.fragments[fragment]:
            value = self._outer[index]
            if self._origin is not None:
                value = np.asarray(value + (self._inner.read(index) - self._origin[index]))
            if mixing > 0:
                value = np.asarray(mixing * self._inner.read(index) + (1 - mixing) * value)
            self._inner.write(index, value)

    def _begin(self) -> None:
        """The model begins at the outer parameters."""
        self._origin = None
        for fragment in range(len(self._plan.fragments)):
            self._give(fragment, 0.0)
            self._seen[fragment] = _Seen()

    def _taken_by_all(self, own: int) -> dict[str, int]:
        """The numbers of examples that the members took, by their ids. All members call it."""
        numbers, info = retried(lambda: self._gather(np.array([own])))
        return dict(zip(info.contributors, numbers[:, 0].tolist(), strict=True))

    def _start(self, fragment: int, given: Contribution) -> None:
        weight, gradients, tokens = given
        if weight == 0:
            gradients = [np.zeros_like(array) for array in self._arrays(fragment)]
        named = dict(zip(self._names_of(fragment), gradients, strict=True))
        due = self._steps
        if not self._plan.warms_up(due):
            due += self._plan.overlap
        taken = None
        if fragment == 0 and self._data is not None and self._plan.round_seconds is not None:
            # Before the reduction, and not beside it: a member that is lost between the two must
            # not be in the mean with a number that the others do not know.
            taken = self._taken_by_all(self._data.taken if weight > 0 else 0)
        self._flying[fragment] = self._launch(
            fragment, due, weight, named, tokens=tokens, taken=taken
        )
        if self._keeps_learning:
            self._flying[fragment].given = given
        if fragment == 0 and self._data is not None and not self._watching:
            self._data.seal()

    def _apply(self, fragment: int) -> None:
        self._complete(self._flying[fragment])
        flight = self._flying.pop(fragment)
        if self._watching:
            if self._holds:
                self._settle(fragment, flight)
            else:
                self._kept.append((fragment, flight))
            return
        # Not where the result came: that may be at different steps on different members. Restored
        # flights have neither info nor examples; those given to newcomers are never fragment 0's.
        if fragment == 0 and self._data is not None and flight.info is not None:
            self._data.commit(flight.info if flight.taken is None else flight.learned())
        if flight.info is not None:
            self._pin(flight.info)
        self._settle(fragment, flight)

    def _settle(self, fragment: int, flight: Flight) -> None:
        """The outer optimizer's step with a result."""
        result = flight.result
        assert result is not None
        if fragment == 0:
            self._world_tokens += float(result["tokens"][0])
        if result["present"][0] > 0:
            gradients = [result["gradients"][name] for name in self._names_of(fragment)]
            if self._plan.is_plain(flight.due):
                for array, gradient in zip(self._arrays(fragment), gradients, strict=True):
                    np.subtract(array, gradient, out=array)
            else:
                self._optimizers[fragment].step(self._arrays(fragment), gradients)
