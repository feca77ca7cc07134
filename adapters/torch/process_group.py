"""The torch.distributed backend "pccl": a process group whose collectives are pccl operations.

Every c10d group is a pccl group with a fixed world: the promise of a collective, such as the mean
that DDP makes of a sum, holds for all members or for none. A lost member therefore ends the group,
and every later collective raises. To go on without it use `pccl.allreduce` or `ddp_hook`.

Collectives run in the order of their calls, as c10d asks of all members: asynchronous ones on the
group's thread, synchronous ones on the caller's if no other is unfinished.
"""

from __future__ import annotations

import atexit
import os
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from pccl.adapters.torch.collectives import Collectives
from pccl.adapters.torch.devices import after_caller
from pccl.adapters.torch.errors import as_torch_error, not_supported, refused
from pccl.adapters.torch.mailbox import USER, Letter
from pccl.adapters.torch.messages import Receipt
from pccl.adapters.torch.monitored_barrier import monitored_barrier
from pccl.adapters.torch.tensor_bytes import array_of
from pccl.adapters.torch.work import Work, all_untraced, callbacks, profile
from pccl.errors import PCCLError

__all__ = ["ProcessGroup", "create"]

_CALLBACK_SECONDS = 1.0  # that the end of the process waits for callbacks of futures

_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def create(options: Any, _: Any = None) -> ProcessGroup:
    """Makes this process's part of a group. c10d calls it for the backend "pccl"."""
    try:
        group = ProcessGroup(options)
    except PCCLError as error:
        raise as_torch_error(error) from error
    _open.add(group)
    return group


# A forked child shares its parent's store connection, and must not use it.
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _at_exit() -> None:
    groups = list(_open)
    # All leave first: a process that runs a master may wait in `shutdown` for others to leave.
    for step in (ProcessGroup._leave, ProcessGroup.shutdown):
        for group in groups:
            with suppress(Exception):  # the process ends anyway; the others notice
                step(group)
    callbacks.wait(_CALLBACK_SECONDS)


@all_untraced
class ProcessGroup(Collectives):
    """One process's part of a c10d group on pccl, made by c10d; see `docs/guide/pytorch.md`."""

    # Messages.

    def _message(self, func: str, tensors: Any, other: int | None, tag: int) -> Work:
        self._check_open(func)
        if other is not None:
            self._check_rank(other, func)
        if other == self._rank:
            raise refused(func, f"rank {other} is this rank")
        (tensor,) = tensors
        work = Receipt(tensors)
        # A message may be shorter than the tensor that receives it, whose other elements stay.
        array = array_of(tensor, func)
        ordered = after_caller(tensors if func == "recv" else [])

        def done(error: Exception | None) -> None:
            if error is None and func == "recv":
                try:
                    with torch.no_grad(), ordered():
                        array.write_back()
                except Exception as failure:  # of the tensor; the channel goes on
                    error = failure
            work.finish(error)

        letter = Letter(array.data, USER, tag, done, self._timeout.total_seconds(), other)
        work.source = letter if func == "recv" else None
        profile(work, func, tensors)
        try:
            if func == "send":
                self._messages.send(letter)
            else:
                self._messages.receive(letter)
        except PCCLError as error:
            work.finish(error)
            raise as_torch_error(error) from None
        return work

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> Work:
        return self._message("send", tensors, dst_rank, tag)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> Work:
        return self._message("recv", tensors, src_rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._message("recv", tensors, None, tag)

    # Other calls.

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self._check_open("monitored_barrier")
        number, self._monitored = self._monitored, self._monitored + 1
        if self._member is not None:
            limit = (timeout or self._timeout).total_seconds()
            monitored_barrier(self._member, self._rank, number, limit, wait_all_ranks)

    def split_group(self, *_: Any, **__: Any) -> None:
        raise not_supported("split_group", "backend pccl has no split_group; use new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> None:
        raise not_supported("merge_remote_group", "backend pccl has no merge_remote_group")
