"""torchft's `Manager` on pccl, for programs that were written for torchft 0.2. Imports no torchft.

Longer than 200 lines, since every name of torchft's Manager is here with its contract: about half
of the lines are docstrings and signatures.
"""

from __future__ import annotations

import copy
import enum
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import pccl
from pccl import _settings
from pccl.errors import Evicted, InvalidUsage, NotSupported, PCCLError, PeerLost, RevisionMismatch

__all__ = ["Manager", "WorldSizeMode"]

_TAG = 0x7F_0000  # a tag, since autograd may reduce on a thread of its own
_OPS = ((dist.ReduceOp.AVG, "avg"), (dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.PRODUCT, "prod"),
        (dist.ReduceOp.MIN, "min"), (dist.ReduceOp.MAX, "max"))  # fmt: skip
# Arguments of torchft that have no counterpart.
_UNUSED = {"store_addr", "store_port", "lighthouse_addr", "port", "hostname", "connect_timeout"}
_UNUSED |= {"heartbeat_interval", "quorum_retries", "rank", "init_sync"}
_log = logging.getLogger(__name__)

_Load = Callable[[Any], object]
_Save = Callable[[], Any]


class WorldSizeMode(enum.Enum):
    """The members whose tensors count: all, or the `min_replica_size` oldest ones."""

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class _Future(torch.futures.Future):  # type: ignore[misc]  # torch is typed in part
    """As torchft's: complete, and its callbacks called, once its work was waited for."""

    work: _Work | None = None

    @property
    def _fut(self) -> _Future:  # torchft's DistributedDataParallel gives it to DDP
        return self

    def wait(self) -> Any:
        if self.work is not None:
            self.work.wait()
        return super().wait()


class _Work(dist._Work):  # type: ignore[misc]
    """A reduction of a step. The manager keeps its error."""

    def __init__(self, manager: Manager, work: pccl.Work[Any] | None, tensor: torch.Tensor) -> None:
        super().__init__()
        self.info: pccl.ReduceInfo | None = None  # None: not over, or failed
        self._manager, self._work, self._tensor = manager, work, tensor
        self._future = _Future()
        self._future.work = self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns whether the tensor has the result."""
        work, self._work = self._work, None
        if work is not None:
            with self._manager._recording():
                work.wait(_seconds(timeout, self._manager._timeout))
                self.info = work.info
        if not self._future.done():
            self._future.work = None
            self._future.set_result(self._tensor)
        return self.info is not None

    block_current_stream = wait

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        return self._future


class Manager:
    """Makes a program that was written for torchft a member of a pccl run. Needs PCCL_MASTER only.

        from pccl.adapters.torchft import Manager  # in the place of torchft's

    `start_quorum` lets newcomers in, and they receive the registered state before it returns.
    `allreduce` runs again among the others when a member is lost. `should_commit` is a collective
    call with one answer for all members. A member that was put out, or interrupted in a call, comes
    back as a newcomer in its next `start_quorum`.

    Args:
        pg: Only kept for torchft's `ManagedProcessGroup`.
        load_state_dict: With `state_dict`: a first part of the state, as `register_state_dict_fn`.
        state_dict: See there.
        min_replica_size: A step of fewer members is not committed. Also the number of members to
            wait for at the start, unless PCCL_MIN_PEERS is more.
        use_async_quorum: torchft's DiLoCo asks for False. The quorum is never asynchronous.
        timeout: Of each call in a step. When it is over, the call fails on all members. Default:
            PCCL_TIMEOUT, else no limit.
        quorum_timeout: The same for `start_quorum`.
        world_size: Ranks of this replica, if not WORLD_SIZE: 1.
        world_size_mode: torchft's or this module's `WorldSizeMode`.
        replica_id: This peer's name in messages.
        checkpoint_transport: Not supported.
        max_retries: `should_commit` raises when it would return False more often in a row.
        rejoin: Joins the run again. Default: `pccl.init`, as at the start.
        unused: Other arguments of torchft's Manager. They have no effect.

    Raises:
        NotSupported: A replica of several ranks, or a checkpoint transport.
        TypeError: An argument that torchft does not have.
        PCCLError: What `pccl.init` raises. It is called, unless the program has done it.
    """

    def __init__(
        self,
        pg: Any = None,
        load_state_dict: _Load | None = None,
        state_dict: _Save | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        timeout: timedelta | None = None,
        quorum_timeout: timedelta | None = None,
        *,
        world_size: int | None = None,
        world_size_mode: Any = WorldSizeMode.DYNAMIC,
        replica_id: str | None = None,
        checkpoint_transport: Any = None,
        max_retries: int | None = None,
        rejoin: Callable[[], object] | None = None,
        **unused: Any,
    ) -> None:
        if unknown := sorted(set(unused) - _UNUSED):
            raise TypeError(f"Manager has no argument {unknown[0]!r}")
        if unused:
            names = ", ".join(sorted(unused))
            _log.warning("without effect: %s (the run's master is PCCL_MASTER)", names)
        if (world_size or int(os.environ.get("WORLD_SIZE") or 1)) > 1:
            raise _refused("a replica is one process here: WORLD_SIZE must be 1 or not set")
        if checkpoint_transport is not None:
            raise _refused("no checkpoint_transport: newcomers receive the state by pccl.sync")
        self._pg = pg
        self._use_async_quorum = use_async_quorum  # DiLoCo reads it
        self._timeout, self._quorum_timeout = timeout, quorum_timeout
        self._least, self._max_retries = min_replica_size, max_retries
        self._spares = world_size_mode.name == "FIXED_WITH_SPARES"
        self._parts: dict[str, tuple[_Load, _Save]] = {}
        self._step = self._batches = self._failures = 0
        self._rank = -1  # in the step
        self._active: tuple[str, ...] = ()  # the members whose tensors count in it
        self._works: list[_Work] | None = None  # of the step; None before the first one
        self._error: Exception | None = None
        self._reported = False  # the error is of the program
        self._misfits = 0  # steps in a row whose error says "fix"
        self._out = False  # this peer has to join again
        self._back = False  # it has joined again, and has no state yet
        self._due = self._standing = False  # a sync must come; this member took part in one
        self._own_state = False  # members' states differ between syncs
        if load_state_dict and state_dict:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        least = _settings.integer(
            None, "min_peers", "Manager", 1, 2**31 - 1, variable="PCCL_MIN_PEERS", default=1
        )
        join = partial(pccl.init, min_peers=max(least, min_replica_size), name=replica_id or None)
        self._rejoin = rejoin or join
        if not pccl.is_initialized():
            join()

    def register_state_dict_fn(self, key: str, load_state_dict: _Load, state_dict: _Save) -> None:
        """Adds a part of the state that newcomers receive: what `pccl.sync` takes."""
        if key in self._parts:
            raise InvalidUsage.because("register_state_dict_fn", f"{key!r} is registered already")
        self._parts[key] = load_state_dict, state_dict

    def set_state_dict_fns(self, load_state_dict: _Load, state_dict: _Save) -> None:
        """An old name of `register_state_dict_fn`."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def disallow_state_dict_read(self) -> None:
        """LocalSGD and DiLoCo call it before an inner step.

        From then on members' states may differ. When a newcomer receives the state of the member
        of longest standing, the others keep theirs.
        """
        self._own_state = True

    def allow_state_dict_read(self) -> None:
        """LocalSGD and DiLoCo call it after an inner step. No effect: nothing reads behind it."""

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begins a step. All members call it.

        Args:
            allow_heal: Let newcomers in. Equal on all members.
            shrink_only: Let nobody in.
            timeout: Default: `quorum_timeout`.

        Raises:
            InvalidUsage: No state is registered.
            NotSupported: The program has joined as a rank of a replica.
            PCCLError: As `pccl.init`, `pccl.admit` and `pccl.sync`.
        """
        if not self._parts:
            raise InvalidUsage.because("start_quorum", "no state: register_state_dict_fn() first")
        with self._calling():
            found = self._begin(
                allow_heal and not shrink_only, _seconds(timeout, self._quorum_timeout)
            )
            self._rank = found.rank
            self._active = found.peers[: self._least] if self._spares else found.peers

    def _begin(self, heals: bool, limit: float | None) -> pccl.Membership:
        """The members of the step that begins."""
        self._works, self._error, self._reported = [], None, False
        while True:
            if self._out:
                pccl.shutdown()
                self._rejoin()
                self._out, self._standing, self._due, self._back = False, False, False, True
            try:
                with self._calling():
                    # A newcomer has to be let in, whatever the others do in this step.
                    if heals or self._due or not self._standing:
                        self._due = pccl.admit(timeout=limit) or self._due
                        if self._due:
                            self._share(limit)
                    found = pccl.membership()
                break
            except PeerLost:  # another member was interrupted: all call again
                continue
            except RevisionMismatch:
                # The run was founded again from an older state. A checkpoint's is refused.
                if not self._back or self._step == 0:
                    raise
                self._step = 0
            except PCCLError:
                if not self._out:
                    raise
        if found.replicas:
            raise _refused("this peer is a rank of a replica of several, whose ranks may disagree")
        return found

    def _share(self, limit: float | None) -> None:
        """One sync of the registered state. Only newcomers' states change, as a rule."""
        parts = {key: save() for key, (_, save) in self._parts.items()}
        keeps = self._own_state and self._standing
        state = {"torchft": self.state_dict(), "user": copy.deepcopy(parts) if keeps else parts}
        state, info = pccl.sync(state, revision=self._step, timeout=limit, return_info=True)
        if info.received and not keeps:
            self.load_state_dict(state["torchft"])
            for key, (load, _) in self._parts.items():
                load(state["user"][key])
        self._due, self._back, self._standing = False, False, True

    def wait_quorum(self) -> None:
        """Checks that a step has begun: `start_quorum` has waited."""
        if self._works is None:
            raise InvalidUsage.because("wait_quorum", "no step has begun: start_quorum() first")

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: Any = dist.ReduceOp.AVG,
    ) -> Any:
        """Starts to reduce a tensor in place, over the members of the step.

        After an error, too: all members make the same calls. On a failure the tensor is as before.

        Args:
            tensor: Of any shape and dtype that `pccl.allreduce` takes.
            should_quantize: Send 8 bits per element between hosts. Equal on all members.
            reduce_op: AVG, SUM, PRODUCT, MIN or MAX of `torch.distributed.ReduceOp`.

        Returns:
            A `torch.distributed.Work`. `wait()` returns whether it succeeded, and calls the
            callbacks of `get_future()`.

        Raises:
            InvalidUsage: No step has begun.
            InvalidArgument: The tensor cannot be reduced.
            NotSupported: Another op.
        """
        self.wait_quorum()
        op = next((ours for theirs, ours in _OPS if reduce_op == theirs), None)
        if op is None:
            raise _refused(f"no {reduce_op}")
        if self._spares and op not in ("avg", "sum"):
            raise _refused(f"no {reduce_op} with spares: theirs would count")
        raw, work, weight = tensor.detach(), None, None
        if self._spares and op == "avg":
            weight = float(self.is_participating())
        elif not self.is_participating():
            raw.zero_()
        how: dict[str, Any] = {"quantize": "int8" if should_quantize else None, "weight": weight}
        with self._recording(start=True):
            if not self._out:
                work = pccl.allreduce_async(raw, op, out=raw, tag=_TAG, **how)
        made = _Work(self, work, tensor)
        self._works.append(made)  # type: ignore[union-attr]
        return made

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Ends a step, and counts it if it succeeded. All members call it, once for each step.

        It fails if a reduction failed, if a member has reported an error, if a member was lost
        between two of the reductions, so that these are over different members, and if there are
        fewer than `min_replica_size` members.

        Args:
            timeout: Default: that of the manager.

        Returns:
            Whether to step the optimizer: the same on all members that are still in the run.

        Raises:
            InvalidUsage: No step has begun.
            MismatchedCall, Deadlock: In the second step in a row, members did not make the same
                calls.
            RuntimeError: It has failed more than `max_retries` times in a row.
        """
        self.wait_quorum()
        with self._calling():  # an interrupt anywhere in here leaves: the others have the verdict
            committed, count = self._decide(_seconds(timeout, self._timeout))
        if committed:
            return True
        self._failures += 1
        error = self._error or f"of {len(self._active)} members {count} took part in all of it"
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        _log.log(level, "step %d is not committed: %s", self._step, error)
        self._misfits = self._misfits + 1 if _asks_for_a_fix(self._error) else 0
        if self._misfits > 1 and self._error:
            raise self._error
        if self._max_retries is not None and self._failures > self._max_retries:
            raise RuntimeError(f"{self._failures} steps in a row failed: {error}")
        return False

    def _decide(self, limit: float | None) -> tuple[bool, int]:
        """Whether the step is committed, and how many members took part in all of it."""
        works, agreed, info = self._works or [], 0, None
        for work in works:
            work.wait()
        before = self._error
        with self._recording():
            if not self._out:
                ok = int(self._error is None and all(work.info for work in works))
                agreed, info = pccl.allreduce(ok, "min", tag=_TAG, timeout=limit, return_info=True)
        if self._reported and not self._out and self._error is not before:
            if _asks_for_a_fix(self._error):
                # The others are in a reduction that this member has not made, and go on without it.
                self._leave()
        infos = [work.info for work in works] or [info]
        members = {frozenset(each.contributors) for each in infos if each is not None}
        count = len(frozenset().union(*members).intersection(self._active))
        committed = bool(agreed) and len(members) == 1 and count >= self._least
        if committed:
            self._step += 1
            self._batches += count
            self._failures = self._misfits = 0
        return committed, count

    def report_error(self, e: Exception) -> None:
        """Keeps a step from being committed, on all members."""
        self._error, self._reported = e, True

    def errored(self) -> Exception | None:
        """The step's error on this member."""
        return self._error

    def wrap_future(self, fut: Any, default: Any, timeout: timedelta | None = None) -> Any:
        """A future that has `default` when `fut` fails, which is reported. No `timeout`."""
        if timeout is not None:
            raise _refused("wrap_future has no timeout")

        def value(done: Any) -> Any:
            try:
                return done.value()
            except Exception as error:
                self.report_error(error)
                return default

        return fut.then(value)

    def state_dict(self) -> dict[str, int]:
        """The counts of steps and batches, for a checkpoint."""
        return {"step": self._step, "batches_committed": self._batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Takes over a checkpoint's counts. When a run starts, the state of most steps counts."""
        self._step, self._batches = state_dict["step"], state_dict["batches_committed"]

    def current_step(self) -> int:
        """Number of committed steps."""
        return self._step

    def batches_committed(self) -> int:
        """Sum of the numbers of members that contributed to committed steps."""
        return self._batches

    def num_participants(self) -> int:
        """Number of members whose tensors count, as of `start_quorum`. 0 before."""
        return len(self._active)

    def participating_rank(self) -> int | None:
        """This member's rank among them; None for a spare, and before `start_quorum`."""
        return self._rank if 0 <= self._rank < len(self._active) else None

    def is_participating(self) -> bool:
        """Whether this member's tensors count."""
        return self.participating_rank() is not None

    def shutdown(self, wait: bool = True) -> None:
        """Leaves the run."""
        pccl.shutdown()

    def _leave(self) -> None:
        """Leaves until the next `start_quorum`, so that the others need not wait for this peer."""
        self._out = True
        pccl.shutdown()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Remembers in `_out` when this peer is out of the run, or out of step with the others."""
        try:
            yield
        except PCCLError as error:
            gone = error.advice == "rejoin" or isinstance(error, Evicted)
            self._out = self._out or gone or "has left the run" in error.reason
            raise
        except BaseException:  # Ctrl-C, or of a `load_state_dict`: the others do not know of it
            self._leave()
            raise

    @contextmanager
    def _recording(self, *, start: bool = False) -> Iterator[None]:
        """Keeps an error of a call in a step. `start`: wrong arguments are raised."""
        try:
            with self._calling():
                yield
        except PCCLError as error:
            if start and error.advice == "fix":
                raise
            self._error = error


def _asks_for_a_fix(error: Exception | None) -> bool:
    return isinstance(error, PCCLError) and error.advice == "fix"


def _seconds(limit: timedelta | None, usual: timedelta | None) -> float | None:
    limit = usual if limit is None else limit
    return None if limit is None else limit.total_seconds()


def _refused(sentence: str) -> NotSupported:
    return NotSupported.because("Manager", sentence)
