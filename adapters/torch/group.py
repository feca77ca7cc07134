"""A c10d process group without its operations: how it is made, named, run and left."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from _pccl_torch import other_accelerators
from pccl.adapters.torch.devices import after_caller
from pccl.adapters.torch.errors import as_torch_error, fresh, refused
from pccl.adapters.torch.exchange import Alone, Exchange, Gone
from pccl.adapters.torch.messages import Messages
from pccl.adapters.torch.rendezvous import Member
from pccl.adapters.torch.tensor_bytes import Array
from pccl.adapters.torch.work import DESTROYED, Queue, Work, profile
from pccl.errors import InvalidUsage, PCCLError


def _clone(store: Any) -> Any:
    """The store for messages, with a connection of its own: who waits for a key blocks a connection
    for others.

    It is made with the group: a new connection to a store that is gone is tried for long.
    """
    try:
        return store.clone()
    except RuntimeError:  # a store in Python
        return store


class Group(dist.ProcessGroup):  # type: ignore[misc]  # torch is not typed
    """One process's part of a c10d group."""

    is_pccl = True
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, options: Any) -> None:
        rank, size = int(options.group_rank), int(options.group_size)
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._store = options.store
        self._options = _c10d.Backend.Options("pccl", options.timeout)
        self._name = str(options.group_id)
        self._desc = "undefined"
        self._members = list(options.global_ranks_in_group) or list(range(size))
        self._queue = Queue(f"pccl {self._name}")
        self._lost: PCCLError | None = None
        self._closed = False
        self._monitored = 0  # calls of `monitored_barrier`
        self._sequence = 0  # collectives called so far
        self._member: Member | None = None
        self._word = os.urandom(8).hex()  # names this object in the store, in all attempts to meet
        self._exchange: Exchange = Alone()
        self._messages = Messages(rank, size, f"pccl {self._name}", self._make_pair, self._departed)
        if size > 1:
            self._own_store = _clone(self._store)
            timeout = self._timeout.total_seconds()
            self._member = Member(self._store, self._name, self._members, rank, timeout, self._word)
            self._member.join()
            self._exchange = Exchange(self._member.comm, rank, self._member.order)

    def _make_pair(self, other: int, timeout: float) -> Member:
        """This process in the pccl group of two with another rank."""
        lower, higher = sorted((self._rank, other))
        store = dist.PrefixStore(f"{lower}-{higher}/", self._own_store)
        members = [self._members[lower], self._members[higher]]
        name, own = f"{self._name} {lower}-{higher}", int(self._rank != lower)
        return Member(store, name, members, own, timeout, self._word)

    def _departed(self, other: int, func: str) -> PCCLError | None:
        member = self._member
        return member.departed(other, func) if member is not None else None

    @property
    def options(self) -> Any:
        """Backend name, timeout, name and global ranks, as c10d's `Backend.Options`."""
        self._options.group_name = self._name
        self._options.global_ranks_in_group = self._members
        return self._options

    @property
    def _timeout(self) -> timedelta:
        timeout: timedelta = self._options._timeout
        return timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._options._timeout = timeout

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    # Other calls of c10d. This object is the group and its only backend.

    def getBackendName(self) -> str:
        return "pccl"

    name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        found = ["cuda"] if torch.cuda.is_available() else other_accelerators()
        return [torch.device(name) for name in ("cpu", *found)]

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def __repr__(self) -> str:
        return (
            f"<pccl.adapters.torch.ProcessGroup {self._name} rank={self._rank} size={self._size}>"
        )

    def _parts(self) -> list[Member | Messages]:
        return [self._messages, self._member] if self._member is not None else [self._messages]

    def _leave(self) -> None:
        self._closed = True
        for part in self._parts():
            part.leave()

    def shutdown(self) -> None:
        """Leaves the group. Unfinished collectives end with an error. May be called again."""
        self._leave()
        for part in self._parts():
            part.close()
        self._queue.close()
        self._exchange = Gone()
        self._member = None

    def abort(self) -> None:
        """As `shutdown`."""
        self.shutdown()

    # How a collective runs.

    def _seconds(self, options: Any) -> float:
        own: timedelta = options.timeout
        return (own if own > timedelta(0) else self._timeout).total_seconds()

    def _run(
        self,
        func: str,
        options: Any,
        results: Sequence[torch.Tensor],
        exchange: Callable[[float], None],
        written: Sequence[Array] = (),
        finish: Callable[[], None] | None = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> Work:
        """Runs `exchange(timeout)`, then writes the `written` arrays back, then calls `finish`."""
        self._check_open(func)
        self._sequence += 1
        work = Work(results)
        profile(work, func, results if inputs is None else inputs)
        timeout = self._seconds(options)
        ordered = after_caller([*results, *(inputs or ())])

        def job() -> None:
            try:
                if self._lost is not None:
                    raise fresh(self._lost)  # kept for every later call
                with torch.no_grad(), ordered():
                    exchange(timeout)
                    for array in written:
                        array.write_back()
                    if finish is not None:
                        finish()
            except PCCLError as error:
                work.finish(self._judge(error))
            except Exception as error:
                work.finish(error)
            except BaseException as error:  # Ctrl-C, in a synchronous call
                work.finish(InvalidUsage.because(func, "interrupted"))
                raise error
            else:
                work.finish(None)

        try:
            self._queue.run(job, func, here=not options.asyncOp)
        except PCCLError as error:  # it has not begun
            work.finish(error)
            raise as_torch_error(error) from None
        return work

    def _check_open(self, func: str) -> None:
        if self._closed:
            raise as_torch_error(InvalidUsage.because(func, DESTROYED))

    def _check_rank(self, rank: int, func: str) -> None:
        if not 0 <= rank < self._size:
            raise refused(func, f"invalid rank {rank} in a group of {self._size}")

    def _judge(self, error: PCCLError) -> PCCLError:
        """The error for the caller. One that ends the group is kept for all later calls."""
        if self._lost is None and self._member is not None and not self._closed:
            loss = self._member.loss(error)
            # Its traceback has the call, with its tensors.
            self._lost = None if loss is None else loss.with_traceback(None)
        return self._lost or error
