"""Broadcast, all-gather and reduce-scatter: each is half an all-reduce.

What only travels, travels as bytes: arrays of any dtype without Python objects. After a loss the
engine runs level 2's broadcasts and all-gathers again under the same number, where the root is left
and the results of fewer members fit. All others fail on all members. Nothing here decides that: a
member that comes late knows other members than those that came in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pccl import _arrays, _settings, result_pool
from pccl import tree as trees
from pccl._arrays import Array, Buffer, Shared, Staging
from pccl.errors import InvalidArgument, NotSupported
from pccl.tree import Entry
from pccl.types import DataType, ReduceInfo, ReduceOp

if TYPE_CHECKING:
    from pccl import _core
    from pccl.communicator import Communicator


class Kind(IntEnum):
    """What the engine calls them."""

    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    BROADCAST = 3


class _Group(NamedTuple):
    """The members whom a call is made for."""

    rank: int
    peers: list[str]


def _group(comm: Communicator, func: str, deadline: _settings.Deadline) -> _Group:
    """Waits to be let in, if this is a newcomer."""
    engine = comm._joined(func)
    _, rank, _, peers, *_ = engine.membership()
    if rank < 0:
        engine.admit(deadline.left())
        _, rank, _, peers, *_ = engine.membership()
    return _Group(rank, peers)


def _run(
    comm: Communicator,
    func: str,
    staging: Staging,
    entries: Sequence[Entry],
    *,
    kind: Kind,
    level: int,
    tag: int | None,
    deadline: _settings.Deadline,
    rerun: bool = False,
    op: ReduceOp = ReduceOp.SUM,
    root: int = 0,
    parts: int = 0,
    nones: Sequence[str] = (),
) -> _core.ReduceInfo:
    given = kind is Kind.ALL_GATHER and level == 2 and not rerun
    operation = comm._start(
        func,
        staging,
        op=op,
        tag=tag,
        level=level,
        rerun=rerun,
        # Level 1 takes any shapes; what travels as bytes must still be the same elements.
        structure=trees.structure_of(
            entries if level == 2 else [Entry("", entry.kind, ()) for entry in entries], nones
        ),
        description=trees.describe_all(entries, nones) + (" to `out`" if given else ""),
        timeout=deadline.left(),
        wait=True,
        kind=int(kind),
        root=root,
        parts=parts,
    )
    staging.finish()
    return operation.wait(None)


# Level 2.


def broadcast(
    comm: Communicator, tree: Any, root: int, out: Any, tag: int | None, timeout: float | None
) -> Any:
    """`pccl.broadcast`."""
    func = "broadcast"
    deadline = _settings.Deadline(timeout)
    flat = trees.flatten_operands(tree, func)
    shared = _shared(flat, func)
    targets = None if out is None else _targets(flat.paths, shared, out, func)
    group = _group(comm, func, deadline)
    received = _bytes_for(shared, targets)
    _run(
        comm,
        func,
        Staging(_bytes_of(shared), received),
        _entries(flat.paths, shared),
        kind=Kind.BROADCAST,
        level=2,
        tag=tag,
        deadline=deadline,
        rerun=True,
        root=_settings.integer(root, "root", func, 0, len(group.peers) - 1),
        nones=flat.nones,
    )
    if targets is not None:
        for target, data in zip(targets, received, strict=True):
            target.fill(data)
        return out
    return flat.unflatten(
        [
            _restored(leaf, s, s.shape, data)
            for leaf, s, data in zip(flat.leaves, shared, received, strict=True)
        ]
    )


def allgather(
    comm: Communicator, tree: Any, out: Any, tag: int | None, timeout: float | None
) -> Any:
    """`pccl.allgather`."""
    func = "allgather"
    deadline = _settings.Deadline(timeout)
    flat = trees.flatten_operands(tree, func)
    shared = _shared(flat, func)
    parts = len(_group(comm, func, deadline).peers)
    targets = None if out is None else _targets(flat.paths, shared, out, func, parts)
    received = _bytes_for(shared, targets, parts)
    info = _run(
        comm,
        func,
        Staging(_bytes_of(shared), received),
        _entries(flat.paths, shared),
        kind=Kind.ALL_GATHER,
        level=2,
        tag=tag,
        deadline=deadline,
        rerun=out is None,  # arrays of the caller's are for so many members
        parts=parts,
        nones=flat.nones,
    )
    if targets is not None:
        for target, data in zip(targets, received, strict=True):
            target.fill(data)
        return out
    world = info.world_size  # fewer than `parts` after a loss
    return flat.unflatten(
        [
            _arrays.adopt(s.origin, s.kind, (world, *s.shape), _first(data, world * s.data.size))
            for s, data in zip(shared, received, strict=True)
        ]
    )


def reduce_scatter(
    comm: Communicator,
    tree: Any,
    op: ReduceOp | str,
    out: Any,
    tag: int | None,
    timeout: float | None,
) -> Any:
    """`pccl.reduce_scatter`."""
    func = "reduce_scatter"
    deadline = _settings.Deadline(timeout)
    how = ReduceOp.parse(op, func)
    flat = trees.flatten_operands(tree, func)
    leaves = [
        _arrays.read(leaf, func, f"tree{path}")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    ]
    sends = [
        _one(leaf.buffers, func, f"tree{path}")
        for path, leaf in zip(flat.paths, leaves, strict=True)
    ]
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if _arrays.is_spread(leaf):
            sentence = f"tree{path} is spread over devices or ranks; only allreduce takes it"
            raise NotSupported.because(func, sentence)
    parts = len(_group(comm, func, deadline).peers)
    shapes = [
        _part(buffer, parts, func, f"tree{path}")
        for path, buffer in zip(flat.paths, sends, strict=True)
    ]
    recvs = (
        [result_pool.empty(shape, s.array.dtype) for s, shape in zip(sends, shapes, strict=True)]
        if out is None
        else _outputs(flat.paths, sends, shapes, out, func)
    )
    entries = [
        Entry(path, buffer.dtype.label, buffer.array.shape)
        for path, buffer in zip(flat.paths, sends, strict=True)
    ]
    staging = Staging(sends, recvs)
    _run(
        comm,
        func,
        staging,
        entries,
        kind=Kind.REDUCE_SCATTER,
        level=2,
        tag=tag,
        deadline=deadline,
        op=how,
        parts=parts,
        nones=flat.nones,
    )
    if out is not None:
        return out
    return flat.unflatten(
        [leaf.restore([part]) for leaf, part in zip(leaves, staging.results, strict=True)]
    )


# Arrays as bytes.


def _shared(flat: trees.Tree, func: str) -> list[Shared]:
    found = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
            leaf = np.asarray(leaf)
        try:
            found.append(_arrays.share(leaf))
        except (InvalidArgument, NotSupported) as error:
            raise type(error).because(func, f"tree{path}: {error.reason}") from error.__cause__
    return found


def _entries(paths: Sequence[str], shared: Sequence[Shared]) -> list[Entry]:
    return [Entry(path, s.kind, s.shape) for path, s in zip(paths, shared, strict=True)]


def _bytes_of(shared: Sequence[Shared]) -> list[Buffer]:
    return [Buffer(s.data, DataType.UINT8) for s in shared]


class _Target:
    """An array of `out`, and what is received for it."""

    def __init__(self, leaf: object, shared: Shared) -> None:
        self._leaf = leaf
        self._shared = shared

    def memory(self) -> Array:
        """Its own, if bytes can be received there."""
        if self._shared.writable:
            return self._shared.data
        return result_pool.empty(self._shared.data.shape, np.dtype(np.uint8))

    def fill(self, data: Array) -> None:
        if not self._shared.writable:
            _arrays.adopt(
                self._shared.origin, self._shared.kind, self._shared.shape, data, self._leaf
            )


def _targets(
    paths: Sequence[str], shared: Sequence[Shared], out: Any, func: str, parts: int | None = None
) -> list[_Target]:
    flat = trees.flatten(out, func, "out")
    _same_paths(paths, flat.paths, func)
    targets = []
    for path, leaf, source in zip(paths, flat.leaves, shared, strict=True):
        if not _arrays.can_be_written(leaf):
            raise InvalidArgument.because(func, f"out{path} cannot be written")
        target = _arrays.share(leaf)
        shape = source.shape if parts is None else (parts, *source.shape)
        if (target.kind, target.shape) != (source.kind, shape):
            have = trees.describe_all([Entry("", target.kind, target.shape)])
            want = trees.describe_all([Entry("", source.kind, shape)])
            raise InvalidArgument.because(func, f"out{path} is {have}, but must be {want}")
        targets.append(_Target(leaf, target))
    return targets


def _same_paths(paths: Sequence[str], others: Sequence[str], func: str) -> None:
    if list(paths) != list(others):
        only = sorted(set(paths).symmetric_difference(others))[:3]
        sentence = f"out has another structure than tree; only one of them has {', '.join(only)}"
        raise InvalidArgument.because(func, sentence)


def _bytes_for(
    shared: Sequence[Shared], targets: Sequence[_Target] | None, parts: int = 1
) -> list[Array]:
    if targets is not None:
        return [target.memory() for target in targets]
    return [result_pool.empty((parts * s.data.size,), np.dtype(np.uint8)) for s in shared]


def _first(data: Array, count: int) -> Array:
    return data if data.size == count else data[:count].copy()  # lets the rest go


def _restored(leaf: object, shared: Shared, shape: tuple[int, ...], data: Array) -> object:
    if isinstance(leaf, np.generic):
        return _arrays.as_array(shared.kind, shape, data)[()]
    made = _arrays.adopt(shared.origin, shared.kind, shape, data)
    number = isinstance(leaf, bool | int | float | complex)
    return made.item() if number else made  # type: ignore[attr-defined]


# Arrays to be reduced.


def _one(buffers: Sequence[Buffer], func: str, where: str) -> Buffer:
    if len(buffers) != 1:
        raise NotSupported.because(func, f"{where} has several parts; only allreduce takes it")
    return buffers[0]


def _part(buffer: Buffer, parts: int, func: str, where: str) -> tuple[int, ...]:
    """The shape of one member's part."""
    shape = buffer.array.shape
    if not shape or shape[0] % parts != 0:
        have = trees.describe_buffer(buffer)
        sentence = f"{where} is {have}: its first axis must divide by the {parts} members"
        raise InvalidArgument.because(func, sentence)
    return (shape[0] // parts, *shape[1:])


def _outputs(
    paths: Sequence[str],
    sends: Sequence[Buffer],
    shapes: Sequence[tuple[int, ...]],
    out: Any,
    func: str,
) -> list[Array]:
    flat = trees.flatten(out, func, "out")
    _same_paths(paths, flat.paths, func)
    arrays = []
    for path, leaf, send, shape in zip(paths, flat.leaves, sends, shapes, strict=True):
        target = _one(_arrays.write(leaf, func, f"out{path}"), func, f"out{path}")
        if (target.dtype, target.array.shape) != (send.dtype, shape):
            have = trees.describe_buffer(target)
            want = trees.describe_all([Entry("", send.dtype.label, shape)])
            raise InvalidArgument.because(func, f"out{path} is {have}, but must be {want}")
        arrays.append(target.array)
    return arrays


# Level 1.


def broadcast_in_place(
    comm: Communicator, array: Any, root: int, tag: int, timeout: float | None
) -> ReduceInfo:
    """`Communicator.broadcast`."""
    func = "broadcast"
    deadline = _settings.Deadline(_settings.seconds(timeout, func))
    group = _group(comm, func, deadline)
    shared = _memory_of(array, func, "array", writable=True)
    info = _run(
        comm,
        func,
        Staging(_bytes_of([shared]), [shared.data]),
        _entries([""], [shared]),
        kind=Kind.BROADCAST,
        level=1,
        tag=_settings.tag(tag, func),
        deadline=deadline,
        root=_settings.integer(root, "root", func, 0, len(group.peers) - 1),
        parts=len(group.peers),
    )
    return _info(info)


def gather_into(
    comm: Communicator, send: Any, recv: Any, tag: int, timeout: float | None
) -> ReduceInfo:
    """`Communicator.all_gather`."""
    func = "all_gather"
    deadline = _settings.Deadline(_settings.seconds(timeout, func))
    parts = len(_group(comm, func, deadline).peers)
    source = _memory_of(send, func, "send", writable=False)
    target = _memory_of(recv, func, "recv", writable=True)
    if source.kind != target.kind or target.data.size != parts * source.data.size:
        have = trees.describe_all([Entry("recv", target.kind, target.shape)])
        want = trees.describe_all([Entry("send", source.kind, source.shape)])
        sentence = f"{have} does not hold {want} of each of {parts} members"
        raise InvalidArgument.because(func, sentence)
    info = _run(
        comm,
        func,
        Staging(_bytes_of([source]), [target.data]),
        _entries([""], [source]),
        kind=Kind.ALL_GATHER,
        level=1,
        tag=_settings.tag(tag, func),
        deadline=deadline,
        parts=parts,
    )
    return _info(info)


def reduce_into(
    comm: Communicator,
    send: Any,
    recv: Any,
    op: ReduceOp | str,
    tag: int,
    timeout: float | None,
) -> ReduceInfo:
    """`Communicator.reduce_scatter`."""
    func = "reduce_scatter"
    deadline = _settings.Deadline(_settings.seconds(timeout, func))
    parts = len(_group(comm, func, deadline).peers)
    source = _one(_arrays.read(send, func, "send").buffers, func, "send")
    target = _one(_arrays.write(recv, func, "recv"), func, "recv")
    if source.dtype != target.dtype or source.array.size != parts * target.array.size:
        have, want = trees.describe_buffer(source), trees.describe_buffer(target)
        sentence = f"send is {have}, which is not {parts} times recv, {want}"
        raise InvalidArgument.because(func, sentence)
    info = _run(
        comm,
        func,
        Staging([source], [target.array]),
        [Entry("", source.dtype.label, source.array.shape)],
        kind=Kind.REDUCE_SCATTER,
        level=1,
        tag=_settings.tag(tag, func),
        deadline=deadline,
        op=ReduceOp.parse(op, func),
        parts=parts,
    )
    return _info(info)


def _memory_of(array: Any, func: str, where: str, *, writable: bool) -> Shared:
    try:
        shared = _arrays.share(array)
    except (InvalidArgument, NotSupported) as error:
        raise type(error).because(func, f"{where}: {error.reason}") from error.__cause__
    if writable and not shared.writable:
        sentence = f"{where}: only a writable, C-contiguous array can be written"
        raise InvalidArgument.because(func, sentence)
    return shared


def _info(info: _core.ReduceInfo) -> ReduceInfo:
    return ReduceInfo(
        info.world_size,
        info.tx_bytes,
        info.rx_bytes,
        tuple(info.contributors),
        info.epoch,
        info.attempts,
    )
