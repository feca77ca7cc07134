"""Broadcast, all-gather, reduce-scatter and all-to-all.

All but reduce-scatter send bytes: arrays of any dtype without Python objects. After a loss the
engine runs the simple API's broadcasts and all-gathers again under the same number, if the root
remains and the results of fewer members fit. Other operations fail on all members. The engine
decides, not this module: a member that enters late knows other members than those that entered in
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pccl import _arrays, _settings, frameworks, result_pool
from pccl import tree as trees
from pccl._arrays import Target
from pccl.errors import NotSupported, located
from pccl.frameworks import Array, Buffer, Shared
from pccl.reduce.request import Collective, Request
from pccl.reduce.staging import Staging
from pccl.reduce.work import Work, reduce_info
from pccl.tree import Entry
from pccl.types import DataType, ReduceInfo, check_op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pccl import _core


class Kind(IntEnum):
    """The engine's numbers for them."""

    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    BROADCAST = 3
    ALL_TO_ALL = 4


def _members(request: Request) -> int:
    """The number of members that a call is made for; a newcomer waits to be let in."""
    engine = request.joined
    _, rank, size, *_ = engine.membership()
    if rank < 0:
        engine.admit(request.deadline.left())
        _, _, size, *_ = engine.membership()
    return size


def _start(
    request: Request,
    which: Kind,
    staging: Staging,
    entries: Sequence[Entry],
    *,
    wait: bool = True,
    **collective: Unpack[Collective],
) -> _core.Operation:
    """Starts the operation; `wait`: returns, or raises, when it is over."""
    # The explicit API takes any shapes; what travels as bytes must still be the same elements.
    compared = entries if request.level == 2 else [Entry("", kind, ()) for _, kind, _ in entries]
    signature = request.sign(entries, compared)
    if which is Kind.ALL_GATHER and request.level == 2 and request.out is not None:
        signature = signature._replace(description=signature.description + " to `out`")
    collective.setdefault("rerun", False)
    collective["kind"] = int(which)
    return request.start(staging.arrays, signature, wait=wait, **collective)


def _run(
    request: Request,
    which: Kind,
    staging: Staging,
    entries: Sequence[Entry],
    **collective: Unpack[Collective],
) -> ReduceInfo:
    """Runs the operation: `staging.results` are complete when it returns."""
    operation = _start(request, which, staging, entries, **collective)
    staging.finish()
    return reduce_info(operation.wait(None))


# The simple API.


def broadcast(request: Request) -> Any:
    """`pccl.broadcast`."""
    flat = request.flat
    shared = _shared_leaves(request)
    targets = _targets(request, shared)
    root = _root(request, _members(request))
    received = _bytes_for(shared, targets)
    staging = Staging(_bytes_of(shared), received)
    if targets is not None:
        own = request.flat.leaves if root == _rank(request) else ()
        _count_writes([t for t in targets if not any(t.leaf is leaf for leaf in own)])
    _run(request, Kind.BROADCAST, staging, _entries(flat.paths, shared), rerun=True, root=root)
    return _results(request, shared, targets, received)


def allgather(request: Request) -> Any:
    """`pccl.allgather`."""
    work = start_allgather(request, wait=True)
    result = work._wait(None)
    return (result, work.info) if request.return_info else result


def start_allgather(request: Request, *, wait: bool = False) -> Work[Any]:
    """`pccl.allgather_async`; `wait`: returns, or raises, when it is over."""
    flat = request.flat
    shared = _shared_leaves(request)
    parts = _members(request)
    targets = _targets(request, shared, parts)
    received = _bytes_for(shared, targets, parts)
    staging = Staging(_bytes_of(shared), received, gathers=True)
    _count_writes(targets or ())
    operation = _start(
        request,
        Kind.ALL_GATHER,
        staging,
        _entries(flat.paths, shared),
        wait=wait,
        rerun=request.out is None,  # arrays of the caller's are for so many members
        parts=parts,
    )

    def finish() -> Any:
        staging.finish()
        if targets is not None:
            return _filled(request, targets, received)
        world = operation.wait(None).world_size  # fewer than `parts` after a loss
        made = [
            _arrays.adopt(
                s.origin, s.kind, (world, *s.shape), _first(data, world * s.data.size), beside=leaf
            )
            for leaf, s, data in zip(flat.leaves, shared, received, strict=True)
        ]
        return flat.unflatten(made)

    return Work(request.comm, operation, finish, on_device=request.touches_a_device())


def reduce_scatter(request: Request) -> Any:
    """`pccl.reduce_scatter`."""
    func, flat = request.func, request.flat
    leaves = [_arrays.read(leaf, func, where) for where, leaf in request.leaves]
    sends = []
    for read, (where, leaf) in zip(leaves, request.leaves, strict=True):
        sends.append(only_buffer(read.buffers, func, where))
        _check_whole(leaf, func, where)
        with located(func, where):
            check_op(sends[-1].dtype, request.op, "")
    parts = _members(request)
    shapes = [
        _part(request, send, parts, where)
        for send, (where, _) in zip(sends, request.leaves, strict=True)
    ]
    kinds = zip(shapes, sends, strict=True)
    targets: list[Target] = []
    if request.out is None:
        recvs = [result_pool.empty(shape, send.array.dtype) for shape, send in kinds]
    else:
        recvs = []
        for (shape, send), (where, leaf) in zip(kinds, request.targets, strict=True):
            _check_whole(leaf, func, where)
            target = _arrays.write(leaf, func, where)
            memory = only_buffer(target.buffers, func, where)
            wanted = [Entry("", send.dtype.label, shape)]
            request.check_target(where, trees.outlines([memory]), wanted)
            targets.append(target)
            recvs.append(memory.array)
    staging = Staging(sends, recvs)
    entries = trees.entries_of(flat.paths, [[send] for send in sends])
    _run(request, Kind.REDUCE_SCATTER, staging, entries, parts=parts)
    if request.out is not None:
        for target in targets:
            target.finish()
        return request.out
    made = [leaf.restore([part]) for leaf, part in zip(leaves, staging.results, strict=True)]
    return flat.unflatten(made)


def alltoall(request: Request) -> Any:
    """`pccl.alltoall`."""
    flat = request.flat
    shared = _shared_leaves(request)
    targets = _targets(request, shared)
    parts = _members(request)
    for source, (where, _) in zip(shared, request.leaves, strict=True):
        if not source.shape or source.shape[0] % parts != 0:
            request.refuse(_indivisible(where, _shown("", source), parts))
    received = _bytes_for(shared, targets)
    staging = Staging(_bytes_of(shared), received, in_place=False)
    _count_writes(targets or ())
    info = _run(request, Kind.ALL_TO_ALL, staging, _entries(flat.paths, shared), parts=parts)
    result = _results(request, shared, targets, received)
    return (result, info) if request.return_info else result


def _check_whole(leaf: object, func: str, where: str) -> None:
    """Raises: NotSupported: The array is spread."""
    if frameworks.is_spread(leaf):
        sentence = f"{where} is spread over devices or ranks; only allreduce takes it"
        raise NotSupported.because(func, sentence)


def only_buffer(buffers: Sequence[Buffer], func: str, where: str) -> Buffer:
    """The buffer of an array that has one.

    Raises:
        NotSupported: It has several.
    """
    if len(buffers) != 1:
        sentence = f"{where} has several parts; only pccl.allreduce takes it"
        raise NotSupported.because(func, sentence)
    return buffers[0]


def _rank(request: Request) -> int:
    return request.joined.membership()[1]


def _root(request: Request, members: int) -> int:
    return _settings.integer(request.root, "root", request.func, 0, members - 1)


def _part(request: Request, buffer: Buffer, parts: int, where: str) -> tuple[int, ...]:
    """The shape of one member's part."""
    shape = buffer.array.shape
    if not shape or shape[0] % parts != 0:
        request.refuse(_indivisible(where, trees.describe_buffer(buffer), parts))
    return (shape[0] // parts, *shape[1:])


def _indivisible(where: str, have: str, parts: int) -> str:
    return f"{where} is {have}: its first axis must divide by the {parts} members"


# Arrays as bytes.


def _shared_leaves(request: Request) -> list[Shared]:
    found = []
    for where, leaf in request.leaves:
        if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
            leaf = np.asarray(leaf)
        with located(request.func, where):
            found.append(_share(leaf))
    return found


def _share(leaf: object) -> Shared:
    """The bytes of an array that is whole."""
    shared = _arrays.share(leaf)
    if shared.part:
        sentence = "it is spread over ranks: only allreduce and sync take it; pass its local tensor"
        raise NotSupported.because("", sentence)
    return shared


def _entries(paths: Sequence[str], shared: Sequence[Shared]) -> list[Entry]:
    return [Entry(path, s.kind, s.shape) for path, s in zip(paths, shared, strict=True)]


def _shown(where: str, shared: Shared) -> str:
    """The array in error sentences."""
    return trees.describe([Entry(where, shared.kind, shared.shape)])


def _bytes_of(shared: Sequence[Shared]) -> list[Buffer]:
    return [Buffer(s.data, DataType.UINT8) for s in shared]


class _Target(NamedTuple):
    """An array of `out`, and its bytes."""

    leaf: object
    shared: Shared


def _targets(
    request: Request, shared: Sequence[Shared], parts: int | None = None
) -> list[_Target] | None:
    """The arrays of `out`, checked; None without it. `parts`: their first axis, if there is one."""
    if request.out is None:
        return None
    targets = []
    for source, (where, leaf) in zip(shared, request.targets, strict=True):
        if not frameworks.can_be_output(leaf):
            request.refuse(f"{where} cannot be written")
        with located(request.func, where):
            target = _share(leaf)
            _arrays.check_target(target)
        shape = source.shape if parts is None else (parts, *source.shape)
        have, want = Entry("", target.kind, target.shape), Entry("", source.kind, shape)
        request.check_target(where, [have], [want])
        targets.append(_Target(leaf, target))
    return targets


def _count_writes(targets: Sequence[_Target]) -> None:
    """Tells frameworks of the writes that the engine is about to make."""
    for leaf, memory in targets:
        if memory.writable:
            frameworks.count_write(leaf)


def _bytes_for(
    shared: Sequence[Shared], targets: Sequence[_Target] | None, parts: int = 1
) -> list[Array]:
    """Memory for what is received: that of a target where bytes can be received in it."""
    sizes = [parts * s.data.size for s in shared]
    own = [None] * len(sizes) if targets is None else [target.shared for target in targets]
    return [
        found.data
        if found is not None and found.writable
        else result_pool.empty((size,), np.dtype(np.uint8))
        for found, size in zip(own, sizes, strict=True)
    ]


def _filled(request: Request, targets: Sequence[_Target], received: Sequence[Array]) -> Any:
    """`out`, with the bytes that could not be received in its own memory."""
    for (leaf, shared), data in zip(targets, received, strict=True):
        if not shared.writable:
            _arrays.adopt(shared.origin, shared.kind, shared.shape, data, leaf)
    return request.out


def _results(
    request: Request,
    shared: Sequence[Shared],
    targets: Sequence[_Target] | None,
    received: Sequence[Array],
) -> Any:
    """`out`, or new arrays that are as the inputs are, with the bytes received."""
    if targets is not None:
        return _filled(request, targets, received)
    leaves = zip(request.flat.leaves, shared, received, strict=True)
    return request.flat.unflatten([_restored(leaf, s, data) for leaf, s, data in leaves])


def _first(data: Array, count: int) -> Array:
    return data if data.size == count else data[:count].copy()  # lets the rest go


def _restored(leaf: object, shared: Shared, data: Array) -> object:
    if isinstance(leaf, np.generic):
        return _arrays.as_array(shared.kind, shared.shape, data)[()]
    made = _arrays.adopt(shared.origin, shared.kind, shared.shape, data, beside=leaf)
    number = isinstance(leaf, bool | int | float | complex)
    return made.item() if number else made  # type: ignore[attr-defined]


# The explicit API: arrays of the caller's own.


def broadcast_in_place(request: Request) -> ReduceInfo:
    """`Communicator.broadcast`."""
    members = _members(request)
    shared = _memory_of(request, request.tree, "array", writable=True)
    staging = Staging(_bytes_of([shared]), [shared.data])
    root = _root(request, members)
    return _fill(request, Kind.BROADCAST, staging, shared, shared, parts=members, root=root)


def gather_into(request: Request) -> ReduceInfo:
    """`Communicator.all_gather`."""
    parts = _members(request)
    source = _memory_of(request, request.tree, "send", writable=False)
    target = _memory_of(request, request.out, "recv", writable=True)
    if source.kind != target.kind or target.data.size != parts * source.data.size:
        have, want = _shown("recv", target), _shown("send", source)
        request.refuse(f"{have} does not hold {want} of each of {parts} members")
    staging = Staging(_bytes_of([source]), [target.data], gathers=True)
    return _fill(request, Kind.ALL_GATHER, staging, source, target, parts=parts)


def reduce_into(request: Request) -> ReduceInfo:
    """`Communicator.reduce_scatter`."""
    func = request.func
    parts = _members(request)
    _check_whole(request.tree, func, "send")
    _check_whole(request.out, func, "recv")
    source = only_buffer(_arrays.read(request.tree, func, "send").buffers, func, "send")
    written = _arrays.write(request.out, func, "recv")
    target = only_buffer(written.buffers, func, "recv")
    if source.dtype != target.dtype or source.array.size != parts * target.array.size:
        have, want = trees.describe_buffer(source), trees.describe_buffer(target)
        request.refuse(f"send is {have}, which is not {parts} times recv, {want}")
    with located(func, "send"):
        check_op(source.dtype, request.op, "")
    staging = Staging([source], [target.array])
    info = _run(request, Kind.REDUCE_SCATTER, staging, trees.outlines([source]), parts=parts)
    written.finish()
    return info


def exchange_into(request: Request) -> ReduceInfo:
    """`Communicator.all_to_all`."""
    parts = _members(request)
    source = _memory_of(request, request.tree, "send", writable=False)
    target = _memory_of(request, request.out, "recv", writable=True)
    if source.kind != target.kind or source.data.size != target.data.size:
        request.refuse(f"{_shown('recv', target)} does not fit {_shown('send', source)}")
    if math.prod(source.shape) % parts != 0:
        have = _shown("send", source)
        request.refuse(f"{have} does not divide into {parts} equal parts, one for each member")
    staging = Staging(_bytes_of([source]), [target.data], in_place=False)
    return _fill(request, Kind.ALL_TO_ALL, staging, source, target, parts=parts)


def _fill(
    request: Request,
    which: Kind,
    staging: Staging,
    source: Shared,
    target: Shared,
    **collective: Unpack[Collective],
) -> ReduceInfo:
    """Runs the operation, and puts the bytes of `target` into the caller's array."""
    if collective.get("root") != _rank(request):  # the root of a broadcast is as before
        _count_writes([_Target(request.out, target)])
    info = _run(request, which, staging, _entries([""], [source]), **collective)
    _filled(request, [_Target(request.out, target)], [target.data])
    return info


def _memory_of(request: Request, array: Any, where: str, *, writable: bool) -> Shared:
    with located(request.func, where):
        shared = _share(array)
        if writable:
            _arrays.check_written(shared)
        # The bytes of an array on a device are a copy, from which it is filled.
        here = frameworks.device_adapter(array) is None
        if writable and here and not shared.writable:
            request.refuse("only a writable, C-contiguous array can be written")
    return shared
