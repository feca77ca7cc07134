"""The general route: a tree of any arrays is one operation.

Arrays on an accelerator are copied to CPU memory as a whole: only calls that return before their
result is there send them this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pccl import _arrays
from pccl import tree as trees
from pccl._arrays import Leaf, Target
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
    targets = None if request.out is None else _targets(request, leaves)
    recvs = None if targets is None else _memory(targets, leaves)
    mean = None if request.weight is None else WeightedMean(sends, request.weight, func)
    guarded = any(leaf.guards for leaf in leaves)  # `out` is written if the guards are satisfied
    staging = Staging(sends, recvs, hold=guarded) if mean is None else Staging(mean.sends)
    operation = request.start(
        staging.arrays,
        request.sign(trees.entries_of(flat.paths, buffers, flat.leaves)),
        names=feedback_names(flat.paths, buffers),
        weight=1.0 if mean is None else mean.number,
        wait=wait,
        op=int(request.op if mean is None else ReduceOp.SUM),
    )

    def finish() -> Any:
        results = staging.results if mean is None else mean.finish(staging.results, recvs)
        following = iter(results)
        parts = [[next(following) for _ in leaf.buffers] for leaf in leaves]
        if targets is None:
            made = [leaf.restore(arrays) for leaf, arrays in zip(leaves, parts, strict=True)]
            return flat.unflatten(made)
        for leaf, arrays in zip(leaves, parts, strict=True):
            if leaf.guards:
                leaf.restore(arrays)  # raises what is wrong with it
        staging.finish()
        for target in targets:
            target.finish()
        return request.out

    return Work(request.comm, operation, finish, mean, on_device=request.touches_a_device())


def feedback_names(
    paths: Sequence[str], buffers: Sequence[Sequence[Buffer]]
) -> list[tuple[str, str]]:
    """(path, outline) for error feedback; a sharded array has a buffer for each shard."""
    return [
        (f"{path} {shard}", trees.describe_buffer(buffer))
        for path, parts in zip(paths, buffers, strict=True)
        for shard, buffer in enumerate(parts)
    ]


def _shown(leaf: Leaf) -> Sequence[Buffer]:
    return leaf.buffers[: len(leaf.buffers) - leaf.guards]


def _targets(request: Request, leaves: Sequence[Leaf]) -> list[Target]:
    """The leaves of `out`, checked to match the inputs leaf by leaf."""
    targets = []
    for leaf, (where, given) in zip(leaves, request.targets, strict=True):
        target = _arrays.write(given, request.func, where)
        request.check_target(where, trees.outlines(target.buffers), trees.outlines(_shown(leaf)))
        targets.append(target)
    return targets


def _memory(targets: Sequence[Target], leaves: Sequence[Leaf]) -> list[Array]:
    """Where results go: each leaf's output, and memory for its guards."""
    arrays = []
    for leaf, target in zip(leaves, targets, strict=True):
        arrays += [buffer.array for buffer in target.buffers]
        arrays += [np.empty_like(guard.array) for guard in leaf.buffers[len(_shown(leaf)) :]]
    return arrays
