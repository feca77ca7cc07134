"""The collectives of a c10d group, by the names and in the forms in which c10d calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from pccl import _settings
from pccl.adapters.torch import composed
from pccl.adapters.torch.errors import as_torch_error, not_supported, refused
from pccl.adapters.torch.group import Group
from pccl.adapters.torch.short_form import short_form
from pccl.adapters.torch.tensor_bytes import (
    Array,
    Bitwise,
    Bytes,
    array_of,
    copy_into,
    counts_of,
    names_of,
    operation_of,
    write,
)
from pccl.adapters.torch.work import TypedWork, Work
from pccl.errors import PCCLError
from pccl.types import DataType, ReduceOp

Tensors = Sequence[torch.Tensor]
Arrays = Sequence[tuple[Bytes, Bytes, DataType]]  # (send, recv, dtype) each
# Runs one operation: (arrays, op, its name in errors, seconds).
Reduction = Callable[[Arrays, ReduceOp | Bitwise, str, float | None], None]


def _what(func: str, tensors: Tensors, op: str = "") -> str:
    """Names a call in errors; must be equal on all members."""
    return f"{func} of {counts_of(tensors)}" + (f", {op}" if op else "")


class _Reductions:
    """The engine's operations for one call, in the same order on all members.

    Tensors of one call may need several: the sum of bools is another operation than that of floats.
    """

    def __init__(
        self,
        func: str,
        tensors: Tensors,
        pairs: Sequence[tuple[Bytes, Bytes]],
        options: Any,
        describe: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """`pairs`: (send, recv) of each tensor. `describe`: names the tensors of these places."""
        places: dict[ReduceOp | Bitwise, list[int]] = {}
        dtypes = []
        for place, tensor in enumerate(tensors):
            op, dtype = operation_of(options.reduceOp, tensor.dtype, func)
            dtypes.append(dtype)
            places.setdefault(op, []).append(place)
        self._calls = []
        for op, own in places.items():
            arrays = [(*pairs[place], dtypes[place]) for place in own]
            named = describe(own) if describe else counts_of([tensors[place] for place in own])
            self._calls.append((arrays, op, f"{func} of {named}, {op.name}"))

    def run(self, reduction: Reduction, timeout: float) -> None:
        deadline = _settings.Deadline(timeout)
        for arrays, op, what in self._calls:
            reduction(arrays, op, what, deadline.left())


class Collectives(Group):
    """Collectives on the group's `Exchange`, and all-to-all on its `Messages`."""

    def _is_root(self, options: Any, func: str) -> bool:
        self._check_rank(options.rootRank, func)
        return self._rank == int(options.rootRank)

    # Reductions.

    def _reduce_all(self, func: str, tensors: Tensors, options: Any) -> Work:
        arrays = [array_of(tensor, func) for tensor in tensors]
        in_place = [(array.data, array.data) for array in arrays]
        reductions = _Reductions(func, tensors, in_place, options)

        def exchange(timeout: float) -> None:
            reductions.run(self._exchange.all_reduce, timeout)

        return self._run(func, options, tensors, exchange, arrays)

    @short_form(_c10d.AllreduceOptions, 1, "op", "timeout")
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].layout == torch.sparse_coo:
            return self._reduce_sparse(tensors, opts)
        work = self._reduce_all("allreduce", tensors, opts)
        # DDP's built-in fp16 hook, in C++, takes the value of the work's future for a C++ list.
        # Callers in Python need the other kind: they may give it to C++, as DDP's `join` does.
        # Autograd's thread for a GPU has no frame of Python below this call.
        caller = sys._getframe(1).f_back
        calls = () if caller is None else caller.f_code.co_names
        in_cpp = tensors[0].dtype == torch.float16 and "allreduce" not in calls
        return TypedWork(work) if in_cpp else work

    def _reduce_sparse(self, tensors: Any, options: Any) -> Work:
        (tensor,) = tensors
        if options.reduceOp != dist.ReduceOp.SUM:
            raise not_supported("allreduce", "backend pccl only sums sparse tensors")
        # Indices are those of a shape.
        what = f"allreduce of sparse {names_of(tensors)}, SUM"

        def exchange(timeout: float) -> None:
            total = composed.reduce_sparse(self._exchange, tensor, self._size, what, timeout)
            copy_into(tensor, total)

        return self._run("allreduce", options, tensors, exchange)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        options = opts or _c10d.AllreduceCoalescedOptions()
        return self._reduce_all("allreduce_coalesced", tensors, options)

    @short_form(_c10d.ReduceOptions, 1, "root", "op", "timeout")
    def reduce(self, tensors: Any, opts: Any) -> Work:
        is_root = self._is_root(opts, "reduce")
        array = array_of(tensors[0], "reduce")
        target = array.data if is_root else np.empty_like(array.data)
        func = f"reduce to {opts.rootRank}"
        reductions = _Reductions(func, tensors, [(array.data, target)], opts)

        def exchange(timeout: float) -> None:
            reductions.run(self._exchange.all_reduce, timeout)

        return self._run("reduce", opts, tensors, exchange, [array] if is_root else [])

    def _scatter_reduced(
        self,
        func: str,
        outputs: Tensors,
        sends: Sequence[Bytes],
        dtypes_in: Sequence[torch.dtype],
        options: Any,
    ) -> Work:
        """Every output gets this rank's part of the reduced bytes of its place."""
        for output, given in zip(outputs, dtypes_in, strict=True):
            if output.dtype != given:
                raise refused(func, f"{given} cannot be reduced into {names_of([output])}")
        arrays = [array_of(output, func, read=False) for output in outputs]
        for output, array, send in zip(outputs, arrays, sends, strict=True):
            if send.size != array.data.size * self._size:
                elements = send.size // output.element_size()
                sentence = f"{elements} elements are not {self._size} times {names_of([output])}"
                raise refused(func, sentence)
        pairs = list(zip(sends, [array.data for array in arrays], strict=True))
        reductions = _Reductions(func, outputs, pairs, options)

        def exchange(timeout: float) -> None:
            reductions.run(self._exchange.reduce_scatter, timeout)

        return self._run(func, options, outputs, exchange, arrays)

    @short_form(_c10d.ReduceScatterOptions, 2, "op", "timeout")
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        sends = [
            np.concatenate([array_of(part, "reduce_scatter").data for part in parts])
            for parts in input_tensors
        ]
        dtypes = [
            next((part.dtype for part in parts if part.dtype != output.dtype), output.dtype)
            for parts, output in zip(input_tensors, output_tensors, strict=True)
        ]
        if any(len({part.numel() for part in parts}) > 1 for parts in input_tensors):
            return self._scatter_unevenly(output_tensors, input_tensors, sends, dtypes, opts)
        return self._scatter_reduced("reduce_scatter", output_tensors, sends, dtypes, opts)

    def _scatter_unevenly(
        self,
        outputs: Tensors,
        lists: Sequence[Tensors],
        sends: Sequence[Bytes],
        dtypes_in: Sequence[torch.dtype],
        options: Any,
    ) -> Work:
        """For parts of several sizes: an all-reduce of which each rank keeps its part."""
        func = "reduce_scatter"
        for output, parts, given in zip(outputs, lists, dtypes_in, strict=True):
            if len(parts) != self._size or given != output.dtype:
                raise refused(func, f"{names_of(parts)} for {self._size} ranks")
            if parts[self._rank].numel() != output.numel():
                sentence = f"{names_of([output])} cannot take {names_of([parts[self._rank]])}"
                raise refused(func, sentence)
        whole = [np.empty_like(send) for send in sends]

        def describe(places: Sequence[int]) -> str:
            return "; ".join(",".join(str(part.numel()) for part in lists[i]) for i in places)

        pairs = list(zip(sends, whole, strict=True))
        reductions = _Reductions(func, outputs, pairs, options, describe)

        def exchange(timeout: float) -> None:
            reductions.run(self._exchange.all_reduce, timeout)

        def finish() -> None:
            for output, parts, data in zip(outputs, lists, whole, strict=True):
                size = output.element_size()
                first = size * sum(part.numel() for part in parts[: self._rank])
                write(output, data[first : first + size * output.numel()], func)

        return self._run(func, options, outputs, exchange, finish=finish)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        options = opts or _c10d.ReduceScatterOptions()
        sends, dtypes = [array_of(input, "reduce_scatter_single").data], [input.dtype]
        return self._scatter_reduced("reduce_scatter_single", [output], sends, dtypes, options)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        func = "reduce_scatter_single_coalesced"
        options = opts or _c10d.ReduceScatterOptions()
        sends = [array_of(tensor, func).data for tensor in inputs]
        dtypes = [tensor.dtype for tensor in inputs]
        return self._scatter_reduced(func, outputs, sends, dtypes, options)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @short_form(_c10d.BarrierOptions, 0, "timeout")
    def barrier(self, opts: Any) -> Work:
        token = np.zeros(1, np.uint8)

        def exchange(timeout: float) -> None:
            arrays = [(token, token, DataType.UINT8)]
            self._exchange.all_reduce(arrays, ReduceOp.SUM, "barrier", timeout)

        return self._run("barrier", opts, [], exchange)

    # Copies.

    @short_form(_c10d.BroadcastOptions, 1, "root", "timeout")
    def broadcast(self, tensors: Any, opts: Any) -> Work:
        is_root = self._is_root(opts, "broadcast")
        arrays = [array_of(tensor, "broadcast", read=is_root) for tensor in tensors]
        what = _what("broadcast", tensors)

        def exchange(timeout: float) -> None:
            self._exchange.broadcast([a.data for a in arrays], opts.rootRank, what, timeout)

        return self._run("broadcast", opts, tensors, exchange, [] if is_root else arrays)

    def _gather_all(self, func: str, outputs: Tensors, inputs: Tensors, options: Any) -> Work:
        """Every output gets all members' inputs of its place, one after the other."""
        for output, own in zip(outputs, inputs, strict=True):
            if output.dtype != own.dtype or output.numel() != own.numel() * self._size:
                held = f"{self._size} times {names_of([own])}"
                raise refused(func, f"{names_of([output])} does not hold {held}")
        sends = [array_of(own, func) for own in inputs]
        targets = [array_of(output, func, read=False) for output in outputs]
        pairs = [(send.data, recv.data) for send, recv in zip(sends, targets, strict=True)]
        what = _what(func, inputs)

        def exchange(timeout: float) -> None:
            self._exchange.all_gather(pairs, what, timeout)

        return self._run(func, options, outputs, exchange, targets, inputs=inputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        options = opts or _c10d.AllgatherOptions()
        return self._gather_all("all_gather_single", [output], [input], options)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        options = opts or _c10d.AllgatherOptions()
        return self._gather_all("all_gather_single_coalesced", outputs, inputs, options)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_lists(self, func: str, lists: Sequence[Any], inputs: Tensors, options: Any) -> Work:
        """As `_gather_all`, to a list of tensors for each input. An empty list discards it."""
        arrays = [array_of(own, func) for own in inputs]
        wholes = [np.empty(self._size * array.data.size, np.uint8) for array in arrays]
        for outputs, own in zip(lists, inputs, strict=True):
            if len(outputs) not in (0, self._size):
                raise refused(func, f"{len(outputs)} outputs for {self._size} ranks")
            if any(o.dtype != own.dtype or o.numel() != own.numel() for o in outputs):
                given = f"{names_of([own])} of each rank"
                raise refused(func, f"{names_of(outputs)} cannot take {given}")
        pairs = [(a.data, whole) for a, whole in zip(arrays, wholes, strict=True)]
        what = _what(func, inputs)

        def exchange(timeout: float) -> None:
            self._exchange.all_gather(pairs, what, timeout)

        def finish() -> None:
            for outputs, whole in zip(lists, wholes, strict=True):
                for output, part in zip(outputs, np.split(whole, self._size), strict=False):
                    write(output, part, func)

        flat = [output for outputs in lists for output in outputs]
        return self._run(func, options, flat, exchange, finish=finish, inputs=inputs)

    @short_form(_c10d.AllgatherOptions, 2, "timeout")
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        return self._gather_lists("allgather", output_tensors, input_tensors, opts)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Work:
        # Here the outputs are by rank: outputs[rank][tensor].
        count = len(input_list)
        if len(output_lists) != self._size or any(len(outs) != count for outs in output_lists):
            sentence = f"outputs must be {self._size} lists of {count} tensors"
            raise refused("allgather_coalesced", sentence)
        by_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        options = opts or _c10d.AllgatherOptions()
        return self._gather_lists("allgather_coalesced", by_tensor, input_list, options)

    @short_form(_c10d.GatherOptions, 2, "root", "timeout")
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        is_root = self._is_root(opts, "gather")
        lists = output_tensors if is_root else [[] for _ in input_tensors]
        return self._gather_lists(f"gather to {opts.rootRank}", lists, input_tensors, opts)

    @short_form(_c10d.ScatterOptions, 2, "root", "timeout")
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        is_root = self._is_root(opts, "scatter")
        (output,) = output_tensors
        whole = np.zeros(self._size * output.numel() * output.element_size(), np.uint8)
        if is_root:
            (parts,) = input_tensors
            if any(p.dtype != output.dtype or p.numel() != output.numel() for p in parts):
                raise refused("scatter", f"{names_of(parts)} do not fit {names_of([output])}")
            whole = np.concatenate([array_of(part, "scatter").data for part in parts])
        what = _what("scatter", output_tensors)

        def exchange(timeout: float) -> None:
            self._exchange.broadcast([whole], opts.rootRank, what, timeout)

        def finish() -> None:
            write(output, np.split(whole, self._size)[self._rank], "scatter")

        return self._run("scatter", opts, output_tensors, exchange, finish=finish)

    # All-to-all.

    def _to_all(
        self,
        func: str,
        outputs: Tensors,
        inputs: Tensors,
        parts: composed.Parts,
        targets: Sequence[Array],
        options: Any,
    ) -> Work:
        """Every rank gets its part of every rank's inputs."""
        what = f"{func} of {str(outputs[0].dtype).removeprefix('torch.')}"
        number = self._sequence

        def exchange(timeout: float) -> None:
            call = composed.AllToAll(self._exchange, self._messages, self._rank, number, parts)
            call.run(func, what, timeout)

        return self._run(func, options, outputs, exchange, targets, inputs=inputs)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = (),
        input_split_sizes: Any = (),
        opts: Any = None,
    ) -> Work:
        func = "all_to_all_single"
        if output.dtype != input.dtype:
            raise refused(func, f"{names_of([output])} cannot take {names_of([input])}")
        source, target = array_of(input, func), array_of(output, func, read=False)
        sends = self._split(source, input_split_sizes, "input")
        receives = self._split(target, output_split_sizes, "output")
        parts = composed.Parts(sends, receives, output.element_size())
        options = opts or _c10d.AllToAllOptions()
        return self._to_all(func, [output], [input], parts, [target], options)

    alltoall_base = all_to_all_single

    def _split(self, array: Array, splits: Any, name: str) -> list[Bytes]:
        rows = array.tensor.shape[0] if array.tensor.dim() else 1
        try:
            return composed.split(array.data, list(splits), rows, self._size, name)
        except PCCLError as error:
            raise as_torch_error(error) from None

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        func = "all_to_all"
        if len(output_tensors) != self._size or len(input_tensors) != self._size:
            counts = f"{len(input_tensors)} inputs and {len(output_tensors)} outputs"
            raise refused(func, f"{counts} for {self._size} ranks")
        if len({tensor.dtype for tensor in [*output_tensors, *input_tensors]}) > 1:
            raise refused(func, "tensors of several dtypes")
        sends = [array_of(tensor, func).data for tensor in input_tensors]
        targets = [array_of(tensor, func, read=False) for tensor in output_tensors]
        receives = [array.data for array in targets]
        parts = composed.Parts(sends, receives, output_tensors[0].element_size())
        options = opts or _c10d.AllToAllOptions()
        return self._to_all(func, output_tensors, input_tensors, parts, targets, options)
