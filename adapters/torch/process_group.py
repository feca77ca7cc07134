"""The torch.distributed backend "pccl": a process group whose collectives are pccl operations.

Every c10d group is a pccl group of its own, with a fixed world: what a collective promises, such as the
mean that DDP makes of a sum, holds for all members or for none. So a lost member ends the group, and
every later collective says so; programs that go on without it use `pccl.allreduce` or `ddp_hook`.

Collectives run in the order in which they were called, as c10d asks of all members: asynchronous ones on
the group's thread, synchronous ones where they were called if nothing is before them.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from pccl.adapters.torch import composed
from pccl.adapters.torch.channel import USER, Letter, Messages, Receipt
from pccl.adapters.torch.errors import as_torch_error, fresh, refused
from pccl.adapters.torch.exchange import Alone, Exchange, Gone
from pccl.adapters.torch.monitored_barrier import monitored_barrier
from pccl.adapters.torch.rendezvous import Member
from pccl.adapters.torch.short_form import short_form
from pccl.adapters.torch.tensor_bytes import Array, Bytes, array_of, names_of, operation_of, write
from pccl.adapters.torch.work import DESTROYED, Queue, Work, all_untraced, profile, typed_work
from pccl.errors import InvalidUsage, NotSupported, PCCLError
from pccl.types import DataType, ReduceOp

__all__ = ["ProcessGroup", "create"]

_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def create(options: Any, _: Any = None) -> ProcessGroup:
    """Makes this process's part of a group; what c10d calls for backend "pccl"."""
    try:
        group = ProcessGroup(options)
    except PCCLError as error:
        raise as_torch_error(error) from error
    _open.add(group)
    return group


# A forked child has its parent's store connection, and nothing to say on it.
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _at_exit() -> None:
    groups = list(_open)
    # All first, since who runs one's master may wait for others to leave another's.
    for step in (ProcessGroup._leave, ProcessGroup.shutdown):
        for group in groups:
            with suppress(Exception):  # the process ends anyway; the others notice
                step(group)


@all_untraced
class ProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch is not typed
    """One process's part of a c10d group on pccl. Made by c10d; see `docs/torch.md` for what it does."""

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
        self._word = os.urandom(8).hex()  # this life's, whichever attempt to meet the others it is
        self._exchange: Exchange = Alone()
        self._messages = Messages(rank, size, f"pccl {self._name}", self._make_pair, self._departed)
        if size > 1:
            timeout = self._timeout.total_seconds()
            self._member = self._make_member(self._store, "", self._members, rank, timeout)
            self._member.join()
            self._exchange = Exchange(self._member.comm, rank, self._member.order)

    def _make_member(
        self, store: Any, suffix: str, members: Sequence[int], rank: int, timeout: float
    ) -> Member:
        return Member(
            store,
            self._name + suffix,
            ",".join(map(str, members)),
            rank,
            len(members),
            timeout,
            members[0] == 0,
            self._word,
        )

    def _make_pair(self, other: int, timeout: float) -> Member:
        """This process in the pccl group of it and another rank."""
        lower, higher = sorted((self._rank, other))
        # It has a connection of its own: waiting for a key blocks the connection for others.
        store = dist.PrefixStore(f"{lower}-{higher}/", self._store.clone())
        members = [self._members[lower], self._members[higher]]
        own = 0 if self._rank == lower else 1
        return self._make_member(store, f" {lower}-{higher}", members, own, timeout)

    def _departed(self, other: int, func: str) -> PCCLError | None:
        member = self._member
        return member.departed(other, func) if member is not None else None

    @property
    def options(self) -> Any:
        """Backend name, timeout, name and global ranks, as `torch._C._distributed_c10d.Backend.Options`."""
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

    # What c10d asks of a group beside collectives. There are no backends inside: this is the group and its
    # only backend.

    def getBackendName(self) -> str:
        return "pccl"

    def name(self) -> str:
        return "pccl"

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
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
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
        """Leaves the group; collectives that have not finished end with an error. May be called again."""
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
        """A collective: `exchange(timeout)`, then copies back what is not `written` in place, then `finish`."""
        self._check_open(func)
        self._sequence += 1
        work = Work(results)
        profile(work, func, results if inputs is None else inputs)
        timeout = self._seconds(options)

        def job() -> None:
            try:
                if self._lost is not None:
                    raise fresh(self._lost)  # kept for every later call
                with torch.no_grad():
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

        self._queue.run(job, here=not options.asyncOp)
        return work

    def _check_open(self, func: str) -> None:
        if self._closed:
            raise InvalidUsage.because(func, DESTROYED)

    def _judge(self, error: PCCLError) -> PCCLError:
        """What the caller gets for an engine's error; what ends the group is kept for all later calls."""
        if self._lost is None and self._member is not None and not self._closed:
            self._lost = self._member.loss(error)
        return self._lost or error

    def _what(self, func: str, tensors: Sequence[torch.Tensor], op: object = "") -> str:
        return f"{func} of {names_of(tensors)}" + (f", {op}" if op else "")

    # Collectives.

    def _reduce_all(self, func: str, tensors: Sequence[torch.Tensor], options: Any) -> Work:
        op, _ = operation_of(options.reduceOp, tensors[0].dtype, func)
        arrays = [array_of(tensor) for tensor in tensors]
        dtypes = [operation_of(options.reduceOp, tensor.dtype, func)[1] for tensor in tensors]
        what = self._what(func, tensors, op.name)

        def exchange(timeout: float) -> None:
            in_place = [(a.data, a.data, dtype) for a, dtype in zip(arrays, dtypes, strict=True)]
            self._exchange.all_reduce(in_place, op, what, timeout)

        return self._run(func, options, tensors, exchange, arrays)

    @short_form(_c10d.AllreduceOptions, 1, "op", "timeout")
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        options = opts or _c10d.AllreduceOptions()
        if tensors[0].layout == torch.sparse_coo:
            return self._reduce_sparse(tensors, options)
        work = self._reduce_all("allreduce", tensors, options)
        # DDP's built-in fp16 hook, in C++, takes the value of the work's future for a C++ list.
        calls = sys._getframe(2).f_code.co_names
        in_cpp = tensors[0].dtype == torch.float16 and "allreduce" not in calls
        return typed_work(work) if in_cpp else work

    def _reduce_sparse(self, tensors: Any, options: Any) -> Work:
        (tensor,) = tensors
        if options.reduceOp != dist.ReduceOp.SUM:
            raise NotSupported.because("allreduce", "backend pccl only sums sparse tensors")
        what = self._what("allreduce of sparse", tensors, "SUM")

        def exchange(timeout: float) -> None:
            total = composed.reduce_sparse(self._exchange, tensor, self._size, what, timeout)
            tensor.copy_(total)

        return self._run("allreduce", options, tensors, exchange)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        options = opts or _c10d.AllreduceCoalescedOptions()
        if len({tensor.dtype == torch.bool for tensor in tensors}) > 1:
            raise NotSupported.because("allreduce_coalesced", "bool and other dtypes in one call")
        return self._reduce_all("allreduce_coalesced", tensors, options)

    @short_form(_c10d.ReduceOptions, 1, "root", "op", "timeout")
    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        (tensor,) = tensors
        opts = opts or _c10d.ReduceOptions()
        op, dtype = operation_of(opts.reduceOp, tensor.dtype, "reduce")
        array = array_of(tensor)
        is_root = self._rank == opts.rootRank
        target = array.data if is_root else np.empty_like(array.data)
        what = self._what(f"reduce to {opts.rootRank}", tensors, op.name)

        def exchange(timeout: float) -> None:
            self._exchange.all_reduce([(array.data, target, dtype)], op, what, timeout)

        return self._run("reduce", opts, tensors, exchange, [array] if is_root else [])

    @short_form(_c10d.BroadcastOptions, 1, "root", "timeout")
    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or _c10d.BroadcastOptions()
        is_root = self._rank == opts.rootRank
        arrays = [array_of(tensor, read=is_root) for tensor in tensors]
        what = self._what("broadcast", tensors)

        def exchange(timeout: float) -> None:
            self._exchange.broadcast([a.data for a in arrays], opts.rootRank, what, timeout)

        return self._run("broadcast", opts, tensors, exchange, [] if is_root else arrays)

    def _gather_all(
        self,
        func: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        options: Any,
    ) -> Work:
        """Every output gets all members' inputs of its place, one after the other."""
        for output, own in zip(outputs, inputs, strict=True):
            if output.dtype != own.dtype or output.numel() != own.numel() * self._size:
                sentence = (
                    f"{names_of([output])} does not hold {self._size} times {names_of([own])}"
                )
                raise refused(func, sentence)
        pairs = [
            (array_of(own), array_of(output, read=False))
            for output, own in zip(outputs, inputs, strict=True)
        ]
        what = self._what(func, inputs)

        def exchange(timeout: float) -> None:
            self._exchange.all_gather([(s.data, r.data) for s, r in pairs], what, timeout)

        return self._run(
            func, options, outputs, exchange, [recv for _, recv in pairs], inputs=inputs
        )

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        return self._gather_all(
            "all_gather_single", [output], [input], opts or _c10d.AllgatherOptions()
        )

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        options = opts or _c10d.AllgatherOptions()
        return self._gather_all("all_gather_single_coalesced", outputs, inputs, options)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_lists(
        self, func: str, lists: Sequence[Any], inputs: Sequence[torch.Tensor], options: Any
    ) -> Work:
        """As `_gather_all`, to a list of tensors for each input, or none where nobody asks."""
        arrays = [array_of(own) for own in inputs]
        wholes = [np.empty(self._size * array.data.size, np.uint8) for array in arrays]
        what = self._what(func, inputs)
        for outputs, own in zip(lists, inputs, strict=True):
            if len(outputs) not in (0, self._size):
                raise refused(func, f"{len(outputs)} outputs for {self._size} ranks")
            if any(o.dtype != own.dtype or o.numel() != own.numel() for o in outputs):
                raise refused(
                    func, f"{names_of(outputs)} cannot take {names_of([own])} of each rank"
                )

        def exchange(timeout: float) -> None:
            pairs = [(a.data, whole) for a, whole in zip(arrays, wholes, strict=True)]
            self._exchange.all_gather(pairs, what, timeout)

        def finish() -> None:
            for outputs, whole in zip(lists, wholes, strict=True):
                for output, part in zip(outputs, np.split(whole, self._size), strict=False):
                    write(output, part)

        flat = [output for outputs in lists for output in outputs]
        return self._run(func, options, flat, exchange, finish=finish, inputs=inputs)

    @short_form(_c10d.AllgatherOptions, 2, "timeout")
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        options = opts or _c10d.AllgatherOptions()
        return self._gather_lists("allgather", output_tensors, input_tensors, options)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Work:
        # By rank, unlike those of all others: outputs[rank][tensor].
        if len(output_lists) != self._size or any(
            len(outputs) != len(input_list) for outputs in output_lists
        ):
            sentence = f"outputs must be {self._size} lists of {len(input_list)} tensors"
            raise refused("allgather_coalesced", sentence)
        by_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        options = opts or _c10d.AllgatherOptions()
        return self._gather_lists("allgather_coalesced", by_tensor, input_list, options)

    @short_form(_c10d.GatherOptions, 2, "root", "timeout")
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        opts = opts or _c10d.GatherOptions()
        lists = output_tensors if self._rank == opts.rootRank else [[] for _ in input_tensors]
        return self._gather_lists(f"gather to {opts.rootRank}", lists, input_tensors, opts)

    @short_form(_c10d.ScatterOptions, 2, "root", "timeout")
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        opts = opts or _c10d.ScatterOptions()
        (output,) = output_tensors
        size = output.numel() * output.element_size()
        whole = np.zeros(self._size * size, np.uint8)
        if self._rank == opts.rootRank:
            (parts,) = input_tensors
            if any(p.dtype != output.dtype or p.numel() != output.numel() for p in parts):
                raise refused("scatter", f"{names_of(parts)} do not fit {names_of([output])}")
            whole = np.concatenate([array_of(part).data for part in parts])
        what = self._what("scatter", output_tensors)

        def exchange(timeout: float) -> None:
            self._exchange.broadcast([whole], opts.rootRank, what, timeout)

        def finish() -> None:
            write(output, np.split(whole, self._size)[self._rank])

        return self._run("scatter", opts, output_tensors, exchange, finish=finish)

    def _scatter_reduced(
        self,
        func: str,
        outputs: Sequence[torch.Tensor],
        sends: Sequence[Bytes],
        dtypes_in: Sequence[torch.dtype],
        options: Any,
    ) -> Work:
        """Every output gets this rank's part of the reduced bytes of its place."""
        for output, given in zip(outputs, dtypes_in, strict=True):
            if output.dtype != given:
                raise refused(func, f"{given} cannot be reduced into {names_of([output])}")
        op, _ = operation_of(options.reduceOp, outputs[0].dtype, func)
        dtypes = [operation_of(options.reduceOp, output.dtype, func)[1] for output in outputs]
        arrays = [array_of(output, read=False) for output in outputs]
        for output, array, send in zip(outputs, arrays, sends, strict=True):
            if send.size != array.data.size * self._size:
                elements = send.size // output.element_size()
                sentence = f"{elements} elements are not {self._size} times {names_of([output])}"
                raise refused(func, sentence)
        what = self._what(func, outputs, op.name)

        def exchange(timeout: float) -> None:
            triples = [
                (send, array.data, dtype)
                for send, array, dtype in zip(sends, arrays, dtypes, strict=True)
            ]
            self._exchange.reduce_scatter(triples, op, what, timeout)

        return self._run(func, options, outputs, exchange, arrays)

    @short_form(_c10d.ReduceScatterOptions, 2, "op", "timeout")
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        options = opts or _c10d.ReduceScatterOptions()
        sends = [np.concatenate([array_of(part).data for part in parts]) for parts in input_tensors]
        dtypes = [
            next((part.dtype for part in parts if part.dtype != output.dtype), output.dtype)
            for parts, output in zip(input_tensors, output_tensors, strict=True)
        ]
        if any(len({part.numel() for part in parts}) > 1 for parts in input_tensors):
            return self._scatter_unevenly(output_tensors, input_tensors, sends, dtypes, options)
        return self._scatter_reduced("reduce_scatter", output_tensors, sends, dtypes, options)

    def _scatter_unevenly(
        self,
        outputs: Sequence[torch.Tensor],
        lists: Sequence[Sequence[torch.Tensor]],
        sends: Sequence[Bytes],
        dtypes_in: Sequence[torch.dtype],
        options: Any,
    ) -> Work:
        """A reduce-scatter to parts of several sizes, as an all-reduce of which each rank keeps its part."""
        func = "reduce_scatter"
        for output, parts, given in zip(outputs, lists, dtypes_in, strict=True):
            if len(parts) != self._size or given != output.dtype:
                raise refused(func, f"{names_of(parts)} for {self._size} ranks")
            if parts[self._rank].numel() != output.numel():
                sentence = f"{names_of([output])} cannot take {names_of([parts[self._rank]])}"
                raise refused(func, sentence)
        op, _ = operation_of(options.reduceOp, outputs[0].dtype, func)
        dtypes = [operation_of(options.reduceOp, output.dtype, func)[1] for output in outputs]
        whole = [np.empty_like(send) for send in sends]
        what = "; ".join(f"{func} of " + ",".join(str(p.numel()) for p in ps) for ps in lists)

        def exchange(timeout: float) -> None:
            triples = list(zip(sends, whole, dtypes, strict=True))
            self._exchange.all_reduce(triples, op, f"{what}, {op.name}", timeout)

        def finish() -> None:
            for output, parts, data in zip(outputs, lists, whole, strict=True):
                size = output.element_size()
                first = size * sum(part.numel() for part in parts[: self._rank])
                write(output, data[first : first + size * output.numel()])

        return self._run(func, options, outputs, exchange, finish=finish)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        return self._scatter_reduced(
            "reduce_scatter_single",
            [output],
            [array_of(input).data],
            [input.dtype],
            opts or _c10d.ReduceScatterOptions(),
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        options = opts or _c10d.ReduceScatterOptions()
        sends = [array_of(tensor).data for tensor in inputs]
        dtypes = [tensor.dtype for tensor in inputs]
        func = "reduce_scatter_single_coalesced"
        return self._scatter_reduced(func, outputs, sends, dtypes, options)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @short_form(_c10d.BarrierOptions, 0, "timeout")
    def barrier(self, opts: Any = None) -> Work:
        token = np.zeros(1, np.uint8)

        def exchange(timeout: float) -> None:
            self._exchange.all_reduce(
                [(token, token, DataType.UINT8)], ReduceOp.SUM, "barrier", timeout
            )

        return self._run("barrier", opts or _c10d.BarrierOptions(), [], exchange)

    # Messages.

    def _message(self, func: str, tensors: Any, other: int | None, tag: int) -> Work:
        self._check_open(func)
        if other == self._rank:
            raise refused(func, f"rank {other} is this rank")
        (tensor,) = tensors
        work = Receipt(tensors)
        # A message may be shorter than the tensor that receives it, whose other elements stay.
        array = array_of(tensor)

        def done(error: Exception | None) -> None:
            if error is None and func == "recv":
                try:
                    with torch.no_grad():
                        array.write_back()
                except Exception as failure:  # of the tensor, which is not the channel's matter
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

    def _to_all(
        self,
        func: str,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        sends: Sequence[Bytes],
        receives: Sequence[Bytes],
        arrays: Sequence[Array],
        options: Any,
    ) -> Work:
        """Every rank gets its part of every rank's `sends`."""
        tensor = results[0]
        what = f"{func} of {str(tensor.dtype).removeprefix('torch.')}"
        number = self._sequence

        def exchange(timeout: float) -> None:
            composed.AllToAll(
                self._exchange,
                self._messages,
                self._rank,
                number,
                sends,
                receives,
                tensor.element_size(),
            ).run(func, what, timeout)

        return self._run(func, options, results, exchange, arrays, inputs=inputs)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = (),
        input_split_sizes: Any = (),
        opts: Any = None,
    ) -> Work:
        if output.dtype != input.dtype:
            sentence = f"{names_of([output])} cannot take {names_of([input])}"
            raise refused("all_to_all_single", sentence)
        source, target = array_of(input), array_of(output, read=False)
        return self._to_all(
            "all_to_all_single",
            [output],
            [input],
            self._split(source, input_split_sizes, "input"),
            self._split(target, output_split_sizes, "output"),
            [target],
            opts or _c10d.AllToAllOptions(),
        )

    alltoall_base = all_to_all_single

    def _split(self, array: Array, splits: Any, name: str) -> list[Bytes]:
        rows = array.tensor.shape[0] if array.tensor.dim() else 1
        try:
            return composed.split(array.data, list(splits), rows, self._size, name)
        except PCCLError as error:
            raise as_torch_error(error) from None

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        if len(output_tensors) != self._size or len(input_tensors) != self._size:
            counts = f"{len(input_tensors)} inputs and {len(output_tensors)} outputs"
            raise refused("all_to_all", f"{counts} for {self._size} ranks")
        if len({tensor.dtype for tensor in [*output_tensors, *input_tensors]}) > 1:
            raise refused("all_to_all", "tensors of several dtypes")
        sources = [array_of(tensor) for tensor in input_tensors]
        targets = [array_of(tensor, read=False) for tensor in output_tensors]
        return self._to_all(
            "all_to_all",
            output_tensors,
            input_tensors,
            [array.data for array in sources],
            [array.data for array in targets],
            targets,
            opts or _c10d.AllToAllOptions(),
        )

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
        raise NotSupported.because("split_group", "backend pccl has no split_group; use new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> None:
        raise NotSupported.because("merge_remote_group", "backend pccl has no merge_remote_group")
