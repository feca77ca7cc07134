"""The general route: a tree of any arrays in CPU memory is one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pccl import _arrays
from pccl import tree as trees
from pccl._arrays import Leaf
from pccl.frameworks import Array, Buffer
from pccl.reduce.request import Request
from pccl.reduce.staging import Staging
from pccl.reduce.weighted import WeightedMean
from pccl.reduce.work import Work
from pccl.types import ReduceInfo, ReduceOp


def allreduce(request: Request) -> tuple[Any, ReduceInfo]:
    """Reduces and waits."""
    work = start(request, wait=True)
    return work._wait(None), work.info


def start(request: Request, *, wait: bool = False) -> Work[Any]:
    """Starts the reduction; `wait`: returns, or raises, when it is over."""
    func, flat = request.func, request.flat
    leaves = [_arrays.read(leaf, func, where, op=request.op) for where, leaf in request.leaves]
    buffers = [leaf.buffers for leaf in leaves]
    sends = [buffer for parts in buffers for buffer in parts]
    recvs = None if request.out is None else _outputs(request, leaves)
    mean = None if request.weight is None else WeightedMean(sends, request.weight, func)
    staging = Staging(sends, recvs) if mean is None else Staging(mean.sends)
    operation = request.start(
        staging.arrays,
        request.sign(trees.entries_of(flat.paths, buffers)),
        names=feedback_names(flat.paths, buffers),
        wait=wait,
        op=int(request.op if mean is None else ReduceOp.SUM),
    )

    def finish() -> Any:
        staging.finish()
        results = staging.results if mean is None else mean.finish(staging.results, recvs)
        following = iter(results)
        parts = [[next(following) for _ in leaf.buffers] for leaf in leaves]
        if request.out is None:
            made = [leaf.restore(arrays) for leaf, arrays in zip(leaves, parts, strict=True)]
            return flat.unflatten(made)
        for leaf, arrays in zip(leaves, parts, strict=True):
            if leaf.guards:
                leaf.restore(arrays)  # raises what is wrong with it
        return request.out

    return Work(request.comm, operation, finish)


def feedback_names(
    paths: Sequence[str], buffers: Sequence[Sequence[Buffer]]
) -> list[tuple[str, str]]:
    """(path, outline) for error feedback; a sharded array has a buffer for each shard."""
    return [
        (f"{path} {shard}", trees.describe_buffer(buffer))
        for path, parts in zip(paths, buffers, strict=True)
        for shard, buffer in enumerate(parts)
    ]


def _outputs(request: Request, leaves: Sequence[Leaf]) -> list[Array]:
    """The arrays to write to, checked to match the inputs leaf by leaf."""
    arrays = []
    for leaf, (where, target) in zip(leaves, request.targets, strict=True):
        targets = _arrays.write(target, request.func, where)
        shown = leaf.buffers[: len(leaf.buffers) - leaf.guards]
        request.check_target(where, trees.outlines(targets), trees.outlines(shown))
        arrays += [buffer.array for buffer in targets]
        arrays += [np.empty_like(guard.array) for guard in leaf.buffers[len(shown) :]]
    return arrays
