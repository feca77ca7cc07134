"""Level 2: module functions on the process's default communicator, or on `comm=`."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, SupportsFloat, TypeVar, overload

import numpy as np

from pccl import _arrays, _core, _settings, collectives, communicator
from pccl import quantize as quantization
from pccl import tree as trees
from pccl._arrays import Array, Leaf, Staging
from pccl._state import State
from pccl.communicator import Communicator
from pccl.errors import InvalidArgument, InvalidUsage, NotInitialized, NotSupported
from pccl.quantize import Quantize
from pccl.reduce import pieces
from pccl.reduce.weighted import WeightedMean
from pccl.tools.progress import reporting
from pccl.types import ReduceInfo, ReduceOp, SyncInfo

__all__ = [
    "Membership",
    "Work",
    "admit",
    "allgather",
    "allreduce",
    "allreduce_async",
    "barrier",
    "broadcast",
    "init",
    "is_initialized",
    "membership",
    "rank",
    "reduce_scatter",
    "shutdown",
    "sync",
    "world_size",
]

# One second apart: a master that is started together with its peers is up by then.
_JOIN_ATTEMPTS = 10
_MAX_PEERS = 2**31 - 1

_Tree = TypeVar("_Tree")
_Out = TypeVar("_Out")
_Result = TypeVar("_Result", covariant=True)
_Mean = Literal["avg", "mean", ReduceOp.AVG]  # of a Python int it is a float

_default: Communicator | None = None
_init_lock = threading.Lock()


@dataclass(frozen=True)
class Membership:
    """Who reduces together; equal on all members after the same pccl call.

    Attributes:
        epoch: Number of this membership.
        rank: This peer's place in order of admission; -1 while it waits to be let in.
        world_size: Number of members.
        peers: Their ids (32 hex digits), in rank order.
        peer_group: The group's number.
        replicas: Which replica each of them is a rank of, in rank order; empty without replicas.
    """

    epoch: int
    rank: int
    world_size: int
    peers: tuple[str, ...]
    peer_group: int
    replicas: tuple[str, ...] = ()


def init(
    master: str | None = None,
    *,
    peer_group: int = 0,
    min_peers: int | None = None,
    timeout: float | None = None,
    port: int | None = None,
    advertise: str | Sequence[str] | None = None,
    secret: str | bytes | None = None,
    replica_id: str | None = None,
    ranks_per_replica: int | None = None,
) -> Communicator:
    """Joins a run and makes this process's default communicator.

    Returns once `min_peers` peers have joined. When the group has started before, it returns at
    once: the first collective call then waits for the members to let this peer in, which they do in
    `admit`.

    Args:
        master: The master's "host:port"; host names, IPv4 and "[IPv6]:port". Default: PCCL_MASTER.
        peer_group: Peers reduce only with peers of the same group.
        min_peers: Peers to wait for before the group starts. Default: PCCL_MIN_PEERS, else 1.
        timeout: Seconds for the whole call. Default: PCCL_TIMEOUT; without either, about ten
            seconds to reach the master and no limit for the other peers to come.
        port: Where other peers connect. Default: PCCL_PORT, else any free port.
        advertise: More addresses at which other peers may find this one. Default: PCCL_ADVERTISE,
            comma-separated.
        secret: The run's secret, the same on its master and on all of its peers; at least 32 bytes or
            characters (`pccl secret` makes one). All connections are authenticated and encrypted
            with it, and no others are made. Default: PCCL_SECRET, else the file that
            PCCL_SECRET_FILE names; without any of them nothing is.
        replica_id: Name of the replica that this peer is a rank of, when a model is sharded over
            several peers. Its ranks are `peer_group` 0 to `ranks_per_replica` - 1 and name the
            same. They are let in together, and when one of them is lost the others get `Evicted`.
            `min_peers` counts replicas then.
        ranks_per_replica: Ranks of each replica, the same in the whole run.

    Raises:
        InvalidArgument: There is no master's address, or an argument makes no sense.
        InvalidUsage: Already initialised.
        Unreachable: No master at that address.
        AuthenticationFailed: The master has another secret or none, or has one and this peer does not.
        Refused: The master does not take this peer; says why.
        Timeout: Not enough peers came in time.
    """
    global _default
    func = "init"
    if not _init_lock.acquire(blocking=False):
        raise InvalidUsage.because(func, "another thread is in pccl.init()")
    try:
        if is_initialized():
            sentence = "pccl is initialised already; call pccl.shutdown() first"
            raise InvalidUsage.because(func, sentence)
        address = master if master is not None else _settings.text("PCCL_MASTER")
        if address is None:
            sentence = (
                "no master: pass pccl.init('host:port'), set PCCL_MASTER, or start this program with "
                "`pccl run -n 4 -- python ...`"
            )
            raise InvalidArgument.because(func, sentence)
        peers = _settings.integer(
            min_peers, "min_peers", func, 1, _MAX_PEERS, variable="PCCL_MIN_PEERS", default=1
        )
        limit = _settings.seconds(timeout, func)
        attempts = _JOIN_ATTEMPTS if limit is None else int(limit) + 1
        comm = Communicator(
            address,
            peer_group,
            port=port,
            advertise=advertise,
            secret=secret,
            replica_id=replica_id,
            ranks_per_replica=ranks_per_replica,
        )
        comm._join(func, min_peers=peers, attempts=attempts, timeout=limit, enter=False)
        _default = comm
        _core.use_by_default(comm._number)
        return comm
    finally:
        _init_lock.release()


def shutdown() -> None:
    """Leaves the run. Does nothing when not initialised. Runs by itself at exit."""
    global _default
    comm, _default = _default, None
    if comm is not None:
        _core.use_by_default(0)
        comm.close()


@atexit.register
def _at_exit() -> None:
    """Leaves the run, and holds on to nothing: some libraries keep modules, with what is in them, to the last."""
    global _default
    comm, _default = _default, None
    if comm is not None:
        comm._leave_at_exit()


def is_initialized() -> bool:
    """Whether `init` was called in this process, and neither `shutdown` nor the communicator's `close` since."""
    comm = _default
    return comm is not None and not comm._closed and comm._fork == communicator._forks


def _use(comm: Communicator | None, func: str) -> Communicator:
    if comm is not None and not isinstance(comm, Communicator):
        raise InvalidArgument.because(func, f"comm must be a Communicator, not {comm!r}")
    found = _default if comm is None else comm
    if found is None or (comm is None and found._closed and found._fork == communicator._forks):
        raise NotInitialized.because(func, "call pccl.init('host:port') first")
    return found


def _engine(comm: Communicator | None, func: str) -> _core.Communicator:
    return _use(comm, func)._joined(func)


def admit(*, timeout: float | None = None, comm: Communicator | None = None) -> bool:
    """Lets waiting newcomers in. All members call it at the same place.

    Costs nothing when nobody waits. First completes this peer's own operations in flight. A
    newcomer's first call waits to be let in. Once operations between hosts have turned out slow,
    members measure their links here, in some seconds, and the plan follows (`PCCL_MEASURE_AFTER`).

    Args:
        timeout: Seconds for the whole call. Default: PCCL_TIMEOUT, else no limit.
        comm: Default: the process's communicator.

    Returns:
        True when members were added since this peer's previous admission point: time to share the
        state.

    Raises:
        NotInitialized: Before `init`.
        Timeout, MasterLost, Evicted, Deadlock: See `pccl.errors`.
        PeerLost: Another member was interrupted here. All members call it again.
    """
    return _engine(comm, "admit").admit(_settings.seconds(timeout, "admit"))


def barrier(*, timeout: float | None = None, comm: Communicator | None = None) -> None:
    """Waits until all members are here.

    Args:
        timeout: Seconds for the whole call. Default: PCCL_TIMEOUT, else no limit.
        comm: Default: the process's communicator.

    Raises:
        NotInitialized: Before `init`.
        Timeout, MasterLost, Evicted, Deadlock: See `pccl.errors`.
    """
    _engine(comm, "barrier").barrier(_settings.seconds(timeout, "barrier"))


@overload
def sync(
    state: _Tree,
    *,
    revision: int | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: Literal[False] = False,
) -> _Tree: ...
@overload
def sync(
    state: _Tree,
    *,
    revision: int | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: Literal[True],
) -> tuple[_Tree, SyncInfo]: ...
@overload
def sync(
    state: _Tree,
    *,
    revision: int | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: bool,
) -> Any: ...
def sync(
    state: Any,
    *,
    revision: int | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: bool = False,
) -> Any:
    """Lets newcomers in and makes `state` equal on all members, byte for byte. All members call it.

    The highest revision counts, then what most members hold, and never what a newcomer brings:
    newcomers receive, members are verified (by hashes; members in step move no byte). It succeeds
    for all members, or leaves all as they were. First completes this peer's own operations in
    flight. A newcomer's first call waits to be let in.

    Args:
        state: Arrays (as in `allreduce`, of any dtype), Python numbers, strings and None in nested
            containers, and objects with `state_dict` and `load_state_dict`. Its structure is part
            of the state: a newcomer's must not contradict it, but may lack entries, as an optimizer
            does that has not stepped yet.
        revision: Only to resume from a checkpoint: the `SyncInfo.revision` it was saved at. When a
            run starts, the highest one counts.
        progress: Called with (bytes received, bytes to receive) while it takes long. Default: a
            progress bar when the program runs in a terminal; False: none.
        timeout: Seconds for the whole call. Default: PCCL_TIMEOUT, else no limit.
        comm: Default: the process's communicator.
        return_info: Return `(state, SyncInfo)`.

    Returns:
        The state. Writable NumPy arrays and torch tensors are updated in place, and objects through
        `load_state_dict`; JAX arrays, read-only arrays and values are new where they changed, and
        with them their containers.

    Raises:
        InvalidArgument: A leaf cannot be shared; names its path. Also, on all members: two entries
            of somebody's state overlap and are not the same array; names peer and entries.
        MismatchedCall: States have other names, shapes or dtypes, or entries that are one array here
            and two there, or a newcomer cannot make what it lacks; names peer and entry. The
            newcomer is put out with that sentence, and the members go on.
        RevisionMismatch: This newcomer's `revision` is ahead of the run's.
        StateUnavailable: All that had the state are gone.
        PeerLost: Another member was interrupted in this call; call again.
        Timeout, MasterLost, Evicted, Deadlock: See `pccl.errors`. Whatever pccl raises, nothing was
            written.
        Exception: What an object's `load_state_dict` raises passes through. Arrays have the new
            state by then, the other members all of it; this one is fed again by the next sync.
    """
    func = "sync"
    engine = _engine(comm, func)
    limit = _settings.seconds(timeout, func)
    if revision is not None:
        revision = _settings.integer(revision, "revision", func, 0, 2**63 - 1)
    shared = State(state, func)
    with reporting(progress, func) as report:
        synced = engine.sync(
            shared.entries,
            level=2,
            revision=revision,
            strategy=0,
            progress=report,
            check=shared.check,
            timeout=limit,
        )
    result = shared.finish(synced.written, synced.replaced)
    synced.finish()
    if not return_info:
        return result
    info = SyncInfo(
        revision=synced.revision,
        epoch=synced.epoch,
        world_size=len(synced.members),
        peers=tuple(synced.members),
        tx_bytes=synced.tx_bytes,
        rx_bytes=synced.rx_bytes,
        received=tuple(sorted([*synced.written, *(name for name, *_ in synced.replaced)])),
        diverged={peer: tuple(names) for peer, names in synced.diverged},
    )
    return result, info


def membership(comm: Communicator | None = None) -> Membership:
    """Who reduces together. Changes only inside a pccl call.

    Raises:
        NotInitialized: Before `init`.
    """
    epoch, own_rank, size, peers, group, replicas = _engine(comm, "membership").membership()
    return Membership(epoch, own_rank, size, tuple(peers), group, tuple(replicas))


def rank(comm: Communicator | None = None) -> int:
    """This peer's place in order of admission, 0 for the longest-standing; -1 while it waits to be let in.

    Raises:
        NotInitialized: Before `init`.
    """
    return _engine(comm, "rank").membership()[1]


def world_size(comm: Communicator | None = None) -> int:
    """Number of members.

    Raises:
        NotInitialized: Before `init`.
    """
    return _engine(comm, "world_size").membership()[2]


@overload
def allreduce(
    tree: int,
    op: _Mean,
    *,
    out: None = None,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: Literal[False] = False,
) -> float: ...
@overload
def allreduce(
    tree: int,
    op: _Mean,
    *,
    out: None = None,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: Literal[True],
) -> tuple[float, ReduceInfo]: ...
@overload
def allreduce(
    tree: _Tree,
    op: ReduceOp | str = "sum",
    *,
    out: None = None,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: Literal[False] = False,
) -> _Tree: ...
@overload
def allreduce(
    tree: _Tree,
    op: ReduceOp | str = "sum",
    *,
    out: None = None,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: Literal[True],
) -> tuple[_Tree, ReduceInfo]: ...
@overload
def allreduce(
    tree: object,
    op: ReduceOp | str = "sum",
    *,
    out: _Out,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: Literal[False] = False,
) -> _Out: ...
@overload
def allreduce(
    tree: object,
    op: ReduceOp | str = "sum",
    *,
    out: _Out,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: Literal[True],
) -> tuple[_Out, ReduceInfo]: ...
@overload
def allreduce(
    tree: _Tree,
    op: ReduceOp | str = "sum",
    *,
    out: Any = None,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: bool,
) -> Any: ...
def allreduce(
    tree: Any,
    op: ReduceOp | str = "sum",
    *,
    out: Any = None,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: bool = False,
) -> Any:
    """Combines `tree` element-wise over all members of the group.

    When a member is lost it runs again among the others from the untouched inputs. Alone, it
    returns the input's values. In a function that JAX traces (jit, grad, shard_map, pmap, scan) it
    becomes a part of the compiled program: see `pccl.adapters.jax`.

    Args:
        tree: An array, or nested dicts, lists, tuples, named tuples or dataclasses of arrays:
            NumPy, JAX or torch, or of any library that shows its CPU memory by DLPack or the buffer
            protocol; of any shape, contiguous or not; integers and floats of 8 to 64 bits and
            bfloat16. Also Python ints (combined as int64) and floats (float64). All of it
            is one operation: either all leaves are combined over the same members, or none is.
        op: "sum", "avg" or "mean" (divides by the members that contributed; integer arrays round
            toward zero, a Python int gives a float), "prod", "min", "max", or a `ReduceOp`. Sums and
            products of integer arrays wrap as NumPy's do; means are never outside their inputs.
        out: Writable arrays of the same structure, dtypes and shapes to write the results to; may
            be `tree` itself.
            Default: new arrays.
        weight: Only with "avg": this member's weight, any number that is 0 or from 1e-18 to 1e18.
            The result is sum(weight * x) / sum(weight) over the members; what a member with weight
            0 passes does not count. All members pass one, or none does. It costs a scaled copy of
            `tree` on each member, and 4 bytes per element of 16-bit floats, 8 of integers, on the
            way: products and sums are in float32 for floats of 16 and 32 bits, else in float64.
            Integers of more than 53 bits lose their last ones. In a function that JAX traces it may
            be a traced scalar.
        quantize: Send floating-point arrays between hosts in fewer bits: "int8", "uint8", "int4",
            "float8", or a `Quantize`. The result is rounded, and the same bytes on every member all
            the same. Integers (without `weight`) and arrays of fewer than 64 elements stay exact;
            so does everything in a group whose members share one host, where nothing would be saved. Elements that are
            not finite stay what they are, and cost their neighbours three of the block's steps. All
            members pass the same. Not with "prod".
        tag: Members' calls with equal tags meet, whatever the order. Default: calls meet by order,
            and come from one thread.
        timeout: Seconds for the whole call. Default: PCCL_TIMEOUT; without either, waits as long as
            members make progress.
        comm: Default: the process's communicator.
        return_info: Return `(tree, ReduceInfo)`.

    Returns:
        `out` if it was given; else the same structure and kinds of arrays as `tree`. The same bytes
        on every member.

    Raises:
        InvalidArgument: A leaf cannot be reduced or written; names its path. Also, on all members:
            the weights add up to 0, or somebody's is negative, infinite, NaN or out of range.
        InvalidUsage: Another thread makes the calls without a tag.
        OverflowError: On all members: the sum or product of Python ints does not fit in 64 bits.
        MismatchedCall: Members disagree on structure, shape, dtype, op, or on whether there are
            weights; names the odd one out.
        PeerLost: Another member was interrupted in this call; call again.
        Timeout, MasterLost, Evicted, Deadlock: See `pccl.errors`. Whatever is raised, inputs are as
            before the call, also in place; a separate `out` may have been written to.
    """
    func = "allreduce"
    limit = _settings.seconds(timeout, func)
    if weight is None and quantize is None:
        plain = _use(comm, func)._reduce_plain(func, tree, out, op, tag, limit)
        if plain is not None:
            made, info = plain
            return (made, communicator.reduce_info(info)) if return_info else made
    if _arrays.devices_in_use():
        used = _use(comm, func)
        staged = pieces.allreduce(used, func, tree, out, op, weight, quantize, tag, limit)
        if staged is not None:
            return staged if return_info else staged[0]
    tracing = _arrays.find_tracing(tree if weight is None else [tree, weight])
    if tracing is not None:
        special = {"out": out, "info": return_info or None}
        return _trace(tracing, func, tree, op, weight, quantize, tag, limit, comm, special)
    work = _start(func, tree, op, out, weight, quantize, tag, comm, limit, wait=True)
    result = work._wait(None)
    return (result, work.info) if return_info else result


def _trace(
    tracing: Any,
    func: str,
    tree: Any,
    op: ReduceOp | str,
    weight: object,
    quantize: object,
    tag: int | None,
    limit: float | None,
    comm: Communicator | None,
    special: dict[str, object],
) -> Any:
    """Makes the call a part of the function that the framework traces."""
    for name in [name for name, value in special.items() if value is not None]:
        name = {"info": "return_info=True"}.get(name, f"{name}=")
        raise NotSupported.because(func, f"{name} does not work inside a traced function")
    number = None if tag is None else _settings.tag(tag, func)
    used = _use(comm, func)
    used._joined(func)
    communicator_number = 0 if comm is None else used._number
    return tracing.allreduce_traced(
        tree,
        ReduceOp.parse(op, func),
        number,
        limit,
        communicator_number,
        weight=weight,
        quantize=None if quantize is None else quantization.parse(quantize, func),
    )


@overload
def allreduce_async(
    tree: int,
    op: _Mean,
    *,
    out: None = None,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    comm: Communicator | None = None,
) -> Work[float]: ...
@overload
def allreduce_async(
    tree: _Tree,
    op: ReduceOp | str = "sum",
    *,
    out: None = None,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    comm: Communicator | None = None,
) -> Work[_Tree]: ...
@overload
def allreduce_async(
    tree: object,
    op: ReduceOp | str = "sum",
    *,
    out: _Out,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    comm: Communicator | None = None,
) -> Work[_Out]: ...
def allreduce_async(
    tree: Any,
    op: ReduceOp | str = "sum",
    *,
    out: Any = None,
    weight: SupportsFloat | None = None,
    quantize: Quantize | str | None = None,
    tag: int | None = None,
    comm: Communicator | None = None,
) -> Work[Any]:
    """As `allreduce`, without waiting: proceeds while Python computes.

    The arrays of `tree` must not be written, and those of `out` not be touched, until the result is
    there.
    """
    func = "allreduce_async"
    timeout = _settings.seconds(None, func)
    if weight is None and quantize is None:
        used = _use(comm, func)
        plain = used._start_plain(func, tree, out, op, tag, timeout)
        if plain is not None:
            operation, result = plain
            return Work(used, operation, lambda: result)
    return _start(func, tree, op, out, weight, quantize, tag, comm, timeout)


def _start(
    func: str,
    tree: Any,
    op: ReduceOp | str,
    out: Any,
    weight: object,
    quantize: object,
    tag: int | None,
    comm: Communicator | None,
    timeout: float | None,
    *,
    wait: bool = False,
) -> Work[Any]:
    deadline = _settings.Deadline(timeout)
    used = _use(comm, func)
    used._joined(func)
    how = ReduceOp.parse(op, func)
    coding = None if quantize is None else quantization.parse(quantize, func)
    if coding is not None:
        quantization.check_op(coding, how, func)
    flat = trees.flatten_operands(tree, func)
    leaves = [
        _arrays.read(leaf, func, f"tree{path}", op=how)
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    ]
    buffers = [leaf.buffers for leaf in leaves]
    sends = [buffer for leaf in leaves for buffer in leaf.buffers]
    recvs = None if out is None else _outputs(func, flat.paths, leaves, out)
    mean = None if weight is None else WeightedMean(sends, weight, how, func)
    staging = Staging(sends, recvs) if mean is None else Staging(mean.sends)
    kind = "" if mean is None else "weighted mean of "
    travels = "" if coding is None else quantization.words(coding)
    names = [  # a sharded array has a buffer for each shard
        (f"{path} {shard}", trees.describe_buffer(buffer))
        for path, leaf in zip(flat.paths, leaves, strict=True)
        for shard, buffer in enumerate(leaf.buffers)
    ]
    operation = used._start(
        func,
        staging,
        op=how if mean is None else ReduceOp.SUM,
        tag=None if tag is None else _settings.tag(tag, func),
        level=2,
        rerun=True,
        structure=(kind + travels).encode() + trees.structure(flat.paths, buffers, flat.nones),
        description=kind + trees.describe(flat.paths, buffers, flat.nones) + travels,
        timeout=deadline.left(),
        quantize=coding,
        names=names,
        wait=wait,
    )

    def finish() -> Any:
        staging.finish()
        results = staging.results if mean is None else mean.finish(staging.results, recvs)
        if out is None:
            return flat.unflatten(_restore(leaves, results))
        for leaf, result in zip(leaves, _by_leaf(leaves, results), strict=True):
            if leaf.guards:
                leaf.restore(result)  # raises what is wrong with it
        return out

    return Work(used, operation, finish)


def _outputs(func: str, paths: Sequence[str], leaves: Sequence[Leaf], out: Any) -> list[Array]:
    """The arrays to write to, checked to match the inputs leaf by leaf."""
    flat = trees.flatten(out, func, "out")
    if flat.paths != list(paths):
        different = set(paths).symmetric_difference(flat.paths)
        sentence = "out has another structure than tree: " + ", ".join(
            f"only {'tree' if path in paths else 'out'}{path}" for path in sorted(different)[:3]
        )
        raise InvalidArgument.because(func, sentence)
    arrays = []
    for path, leaf, target in zip(paths, leaves, flat.leaves, strict=True):
        targets = _arrays.write(target, func, f"out{path}")
        shown = leaf.buffers[: len(leaf.buffers) - leaf.guards]
        wanted = [(buffer.dtype, buffer.array.shape) for buffer in shown]
        if wanted != [(buffer.dtype, buffer.array.shape) for buffer in targets]:
            have = ", ".join(map(trees.describe_buffer, targets))
            want = ", ".join(map(trees.describe_buffer, shown))
            raise InvalidArgument.because(func, f"out{path} is {have}, but tree{path} is {want}")
        arrays += [buffer.array for buffer in targets]
        arrays += [np.empty_like(guard.array) for guard in leaf.buffers[len(shown) :]]
    return arrays


def _restore(leaves: Sequence[Leaf], results: Sequence[Array]) -> list[object]:
    """The results as the kinds of arrays and numbers that came in."""
    return [
        leaf.restore(result) for leaf, result in zip(leaves, _by_leaf(leaves, results), strict=True)
    ]


def _by_leaf(leaves: Sequence[Leaf], results: Sequence[Array]) -> list[list[Array]]:
    """The results, one per buffer, of each leaf."""
    following = iter(results)
    return [[next(following) for _ in leaf.buffers] for leaf in leaves]


def broadcast(
    tree: Any,
    root: int = 0,
    *,
    out: Any = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """What `tree` is on the member of rank `root`, for all members.

    When a member other than the root is lost it runs again among the others.

    Args:
        tree: Arrays and numbers in nested containers, as in `allreduce`, of any dtype without
            Python objects; the same structure, shapes and dtypes on all members.
        root: A rank, as of this call.
        out: Writable arrays of the same structure, shapes and dtypes to write to; may be `tree`
            itself. Default: new arrays.
        tag: As in `allreduce`.
        timeout: As in `allreduce`.
        comm: Default: the process's communicator.

    Returns:
        `out` if it was given; else the same structure and kinds of arrays as `tree`.

    Raises:
        PeerLost: The root was lost, or another member was interrupted in this call. Inputs are as
            before.
        InvalidArgument: There is no such rank, or an array cannot be sent or written.
        MismatchedCall, Timeout, MasterLost, Evicted, Deadlock: As in `allreduce`.
    """
    func = "broadcast"
    limit = _settings.seconds(timeout, func)
    number = None if tag is None else _settings.tag(tag, func)
    return collectives.broadcast(_use(comm, func), tree, root, out, number, limit)


def allgather(
    tree: Any,
    *,
    out: Any = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Every member's `tree`, stacked: the members are a new first axis of each array, in rank order.

    When a member is lost it runs again among the others. With `out`, which is for so many members,
    it raises PeerLost instead.

    Args:
        tree: Arrays and numbers in nested containers, as in `allreduce`, of any dtype without
            Python objects; the same structure, shapes and dtypes on all members.
        out: Writable arrays of the same structure and dtypes to write to; one is of shape
            (members, ...) where the tree's is of shape (...). All members pass it, or none does.
            Default: new arrays.
        tag: As in `allreduce`.
        timeout: As in `allreduce`.
        comm: Default: the process's communicator.

    Returns:
        `out` if it was given; else the same structure and kinds of arrays as `tree`; NumPy's for
        numbers.

    Raises:
        PeerLost: A member was lost, and `out` was given; it may have been written to. Or another
            member was interrupted in this call.
        InvalidArgument: An array cannot be sent or written.
        MismatchedCall, Timeout, MasterLost, Evicted, Deadlock: As in `allreduce`.
    """
    func = "allgather"
    limit = _settings.seconds(timeout, func)
    number = None if tag is None else _settings.tag(tag, func)
    return collectives.allgather(_use(comm, func), tree, out, number, limit)


def reduce_scatter(
    tree: Any,
    op: ReduceOp | str = "sum",
    *,
    out: Any = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Combines `tree` element-wise over all members; each gets the part of its rank.

    Args:
        tree: Arrays in nested containers, as in `allreduce`. The first axis of each is divided
            among the members: its length must divide by their number.
        op: As in `allreduce`.
        out: Writable arrays of the parts' shapes to write to. Default: new arrays.
        tag: As in `allreduce`.
        timeout: As in `allreduce`.
        comm: Default: the process's communicator.

    Returns:
        `out` if it was given; else the same structure and kinds of arrays as `tree`.

    Raises:
        PeerLost: A member was lost, or interrupted in this call. Inputs are as before; `out` may
            have been written to.
        InvalidArgument: An array cannot be reduced, written or divided.
        MismatchedCall, Timeout, MasterLost, Evicted, Deadlock: As in `allreduce`.
    """
    func = "reduce_scatter"
    limit = _settings.seconds(timeout, func)
    number = None if tag is None else _settings.tag(tag, func)
    return collectives.reduce_scatter(_use(comm, func), tree, op, out, number, limit)


class Work(Generic[_Result]):
    """An `allreduce_async` in flight. Dropping it is safe: it runs to its end and keeps its arrays until then.

    Awaitable: `await work` waits in a thread of its own. An `out=` array that is
    not contiguous, or gets a weighted mean, is filled when somebody waits.
    """

    def __init__(
        self, comm: Communicator, operation: _core.Operation, result: Callable[[], _Result]
    ) -> None:
        self._comm = comm
        # Guards what follows; held while a result is made, never while waiting.
        self._lock = threading.Lock()
        self._operation: _core.Operation | None = operation
        self._make: Callable[[], Any] | None = result  # until made
        self._result: Any = None
        self._info: ReduceInfo | None = None

    def wait(self, timeout: float | None = None) -> _Result:
        """Waits for the result. May be called again, from any thread: returns the same object.

        Args:
            timeout: Seconds. Default: PCCL_TIMEOUT, else no limit. When it passes, the operation
                ends with `Timeout` on all members, as any call does; to look without waiting, use
                `done`.

        Returns:
            `out` if it was given; else a tree like the input's.

        Raises:
            PCCLError: As `allreduce`.
        """
        return self._wait(_settings.seconds(timeout, "Work.wait"))

    def _wait(self, timeout: float | None) -> _Result:
        operation = self._operation
        if operation is not None:
            self._check_not_forked()
            info = operation.wait(timeout)
            with self._lock:
                if self._make is not None:
                    self._result = self._make()
                    self._info = communicator.reduce_info(info)
                    self._make = self._operation = None  # lets the inputs go
        result: _Result = self._result
        return result

    def _check_not_forked(self) -> None:
        if self._comm._fork != communicator._forks:
            raise InvalidUsage.because("Work.wait", "this process was forked; the Work is a copy")

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        operation = self._operation
        return operation is None or operation.done()

    @property
    def info(self) -> ReduceInfo:
        """How the operation went.

        Raises:
            InvalidUsage: It is not finished.
            PCCLError: It failed.
        """
        if not self.done():
            raise InvalidUsage.because("Work.info", "the operation is not finished; wait() first")
        self._wait(None)
        assert self._info is not None
        return self._info

    def __await__(self) -> Generator[Any, None, _Result]:
        # A thread of its own, not one of the loop's executor: that one is waited for at the loop's end, Ctrl-C or not.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def wait() -> None:
            result, error = None, None
            try:
                result = self.wait()
            except BaseException as caught:
                error = caught
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(tell, result, error)

        threading.Thread(target=wait, name="pccl await", daemon=True).start()
        return future.__await__()
