"""The simple API: module functions on the process's default communicator, or on `comm=`."""

from __future__ import annotations

import atexit
import html
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    SupportsFloat,
    TypedDict,
    TypeVar,
    overload,
)

from pccl import _core, _settings, departure
from pccl._changes import Changes, Subscription
from pccl._state import State
from pccl.communicator import Communicator
from pccl.errors import InvalidArgument, InvalidUsage, NotInitialized
from pccl.peer import MOST_ATTEMPTS
from pccl.quantize import Quantize
from pccl.reduce import general, request, routes
from pccl.reduce.work import Work, reduce_info
from pccl.tools.progress import reporting
from pccl.types import MembershipChange, ReduceInfo, ReduceOp, RunStats, SyncInfo

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Membership",
    "Work",
    "admit",
    "allreduce",
    "allreduce_async",
    "barrier",
    "drain",
    "init",
    "is_initialized",
    "membership",
    "on_membership_change",
    "prepare",
    "rank",
    "shutdown",
    "stats",
    "sync",
    "world_size",
]

# One second apart: a master that is started together with its peers is up by then.
_JOIN_ATTEMPTS = 10
_MAX_PEERS = 2**31 - 1

_Tree = TypeVar("_Tree")
_Out = TypeVar("_Out")
_Op = ReduceOp | str
_Mean = Literal["avg", "mean", ReduceOp.AVG]  # of a Python int it is a float
_No = Literal[False]
_Yes = Literal[True]


class _Async(TypedDict, total=False):
    """Keywords of `allreduce_async` that do not change the type of its result."""

    weight: SupportsFloat | None
    quantize: Quantize | str | None
    tag: int | None
    comm: Communicator | None


class _How(_Async, total=False):
    """Those of `allreduce`."""

    timeout: float | None


class _Sync(TypedDict, total=False):
    """Those of `sync`."""

    revision: int | None
    overwrite: bool
    progress: Callable[[int, int], None] | bool | None
    timeout: float | None
    comm: Communicator | None


class _Unmet(NamedTuple):
    """Requests of the program to a communicator that was put out before it was closed."""

    changes: Changes
    leaves: bool


_default: Communicator | None = None
_unmet: _Unmet | None = None  # of the one before: the next one does it
_init_lock = threading.Lock()


@dataclass(frozen=True)
class Membership:
    """The members that reduce together; equal on all members after the same pccl call.

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

    def _rows(self) -> Iterator[tuple[bool, tuple[str, ...]]]:
        """For each member: is it this peer, and its rank, the start of its id, its replica."""
        for rank, peer in enumerate(self.peers):
            replica = self.replicas[rank : rank + 1]
            yield rank == self.rank, (str(rank), peer[:8], *replica)

    def _caption(self) -> str:
        count = f"{self.world_size} member{'' if self.world_size == 1 else 's'}"
        waits = "" if self.rank >= 0 else "; this peer waits to be let in"
        return f"group {self.peer_group}, epoch {self.epoch}: {count}{waits}"

    def _columns(self) -> tuple[str, ...]:
        return ("rank", "peer", "replica") if self.replicas else ("rank", "peer")

    def _repr_html_(self) -> str:
        """A table for Jupyter; this peer's row is bold."""
        head = "".join(f"<th>{name}</th>" for name in self._columns())
        body = ""
        for own, cells in self._rows():
            tag = "th" if own else "td"
            body += f"<tr>{''.join(f'<{tag}>{html.escape(c)}</{tag}>' for c in cells)}</tr>"
        return f"<table><caption>{self._caption()}</caption><tr>{head}</tr>{body}</table>"

    def __rich__(self) -> Any:
        """The same table for rich."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(*self._columns(), title=self._caption())
        for own, cells in self._rows():
            table.add_row(*map(escape, cells), style="bold" if own else "")
        return table


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
    name: str | None = None,
    standby: bool | None = None,
) -> Communicator:
    """Joins a run and makes this process's default communicator.

    Returns once `min_peers` peers have joined. When the group has started before, it returns at
    once: the first collective call then waits for the members to let this peer in, which they do in
    `admit`.

    Args:
        master: The master's "host:port"; host names, IPv4 and "[IPv6]:port". Several with commas
            between them, the preferred one first, if the run has several masters: when one is gone,
            another takes over. Default: PCCL_MASTER.
        peer_group: Peers reduce only with peers of the same group: 0 to 2^31 - 1.
        min_peers: Peers to wait for before the group starts. Default: PCCL_MIN_PEERS, else 1.
        timeout: Seconds for the whole call. Default: PCCL_TIMEOUT; without either, about ten
            seconds to reach the master and no limit for the other peers to come.
        port: Where other peers connect. Default: PCCL_PORT, else any free port.
        advertise: More addresses at which other peers may find this one. Default: PCCL_ADVERTISE,
            comma-separated.
        secret: The run's secret, as of `Communicator`. Default: PCCL_SECRET, else the file that
            PCCL_SECRET_FILE names; without any of them nothing is authenticated or encrypted.
        replica_id: Name of the replica that this peer is a rank of, when a model is sharded over
            several peers. Its ranks are `peer_group` 0 to `ranks_per_replica` - 1 and name the
            same. They are let in together, and when one of them is lost the others get `Evicted`.
            `min_peers` counts replicas then.
        ranks_per_replica: Ranks of each replica, the same in the whole run.
        name: What messages call this peer: 1 to 64 printable ASCII characters without blanks.
            Default: PCCL_NAME, else the host's name and the process id.
        standby: Whether this process runs one of the masters too: the first address of the list
            that is this machine's and whose port is free. It ends with the communicator. Default:
            PCCL_STANDBY, else no. With the variable, which all processes of a machine may have, a
            process for which no address is left goes on without a master.

    Raises:
        InvalidArgument: There is no master's address, or an argument makes no sense.
        InvalidUsage: Already initialised.
        Unreachable: No master at that address.
        AuthenticationFailed: The master has another secret or none, or only the master has one.
        Refused: The master does not take this peer; says why.
        Timeout: Not enough peers came in time.
    """
    global _default, _unmet
    func = "init"
    if not _init_lock.acquire(blocking=False):
        raise InvalidUsage.because(func, "another thread is in pccl.init()")
    try:
        if is_initialized():
            sentence = "pccl is initialised already; call pccl.shutdown() first"
            raise InvalidUsage.because(func, sentence)
        shutdown()  # of one that the program has closed itself
        address = _settings.master(master, func)
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
        drain_seconds = departure.drain_seconds(func)
        status = departure.sigterm_status(func)
        attempts = _JOIN_ATTEMPTS if limit is None else min(int(limit) + 1, MOST_ATTEMPTS)
        asked = _settings.integer(None, "standby", func, 0, 1, variable="PCCL_STANDBY", default=0)
        comm = Communicator(
            address,
            peer_group,
            port=port,
            advertise=advertise,
            secret=secret,
            replica_id=replica_id,
            ranks_per_replica=ranks_per_replica,
            name=name,
        )
        if _unmet is not None:
            comm._changes = _unmet.changes
        try:
            if standby or (standby is None and asked):
                deadline = _settings.Deadline(limit)
                comm._serve(func, required=standby is not None, timeout=limit)
                limit = deadline.left()
            comm._join(func, min_peers=peers, attempts=attempts, timeout=limit, enter=False)
        except BaseException:
            comm.close()
            raise
        _default = comm
        _core.use_by_default(comm._number)
        departure.watch(comm, drain_seconds, status)
        unmet, _unmet = _unmet, None
        if unmet is not None and unmet.leaves:
            comm._drain()
        return comm
    finally:
        _init_lock.release()


def shutdown() -> None:
    """Leaves the run. Does nothing when not initialised. Runs by itself at exit."""
    global _default, _unmet
    comm, _default = _default, None
    if comm is not None:
        _core.use_by_default(0)
        departure.unwatch()
        comm.close()
        # One that has left by itself has done what it was asked to.
        _unmet = _Unmet(comm._changes, comm.draining) if comm._was_out else None


@atexit.register
def _at_exit() -> None:
    """Leaves the run, and drops the communicator: some libraries keep modules to the last."""
    global _default
    comm, _default = _default, None
    if comm is not None:
        comm._leave_at_exit()


def is_initialized() -> bool:
    """Whether `init` was called in this process, and neither `shutdown` nor `close` since."""
    comm = _default
    return comm is not None and not comm._closed and not comm._is_forked()


def _use(comm: Communicator | None, func: str) -> Communicator:
    if comm is not None and not isinstance(comm, Communicator):
        raise InvalidArgument.because(func, f"comm must be a Communicator, not {comm!r}")
    found = _default if comm is None else comm
    if found is None or (comm is None and found._closed and not found._is_forked()):
        raise NotInitialized.because(func, "call pccl.init('host:port') first")
    return found


def _engine(comm: Communicator | None, func: str) -> _core.Communicator:
    return _use(comm, func)._joined(func)


def admit(*, timeout: float | None = None, comm: Communicator | None = None) -> bool:
    """Lets waiting newcomers in. All members call it at the same place.

    While nobody waits, costs at most one short message to the master, and nothing after a
    reduction. First completes this peer's own operations in flight. A newcomer's first call waits
    to be let in. After a slow operation between hosts members measure their links here, which takes
    some seconds, and the master plans with the result (`PCCL_MEASURE_AFTER`).

    Args:
        timeout: Seconds for the whole call. Default: PCCL_TIMEOUT, else no limit.
        comm: Default: the process's communicator.

    Returns:
        True when members were added since this peer's previous admission point: time to share the
        state.

    Raises:
        NotInitialized: Before `init`.
        Drained: This peer was asked to leave the run, and has left it: see `drain`.
        Timeout, MasterLost, Evicted, Deadlock: See `pccl.errors`.
        PeerLost: Another member was interrupted here. All members call it again.
    """
    func = "admit"
    limit = _settings.Deadline(_settings.seconds(timeout, func))
    grown = admit_and_stay(comm, limit.seconds)
    if not grown:  # otherwise newcomers may need this member's state: it leaves after that sync
        departure.leave_if_asked(_use(comm, func), func, limit.left())
    return grown


def admit_and_stay(comm: Communicator | None, timeout: float | None) -> bool:
    """As `admit`, for a caller that leaves the run at another point."""
    return _engine(comm, "admit").admit(timeout)


def leave_if_asked(comm: Communicator | None, func: str) -> None:
    """The point where a caller of `admit_and_stay` leaves the run, if this peer is to.

    Raises:
        Drained: It has left.
    """
    departure.leave_if_asked(_use(comm, func), func, _settings.seconds(None, func))


def drain(comm: Communicator | None = None) -> None:
    """Asks this peer to leave the run at its next admission point: in `admit`, `sync` or DiLoCo.

    That call first lets newcomers in and shares the state with them, as usual. When nobody waits,
    it completes this peer's operations, leaves, and raises `Drained`. The others go on without a
    failed call. SIGTERM and the command `pccl drain` ask for the same. Any thread may call it.

    If this peer is put out of the run before that point, and the program comes back by `init`, the
    new communicator of the process is asked to leave. So is a `Communicator` that connects later.

    Args:
        comm: Default: the process's communicator.

    Raises:
        NotInitialized: Before `init`.
    """
    _use(comm, "drain")._drain()


def prepare(
    seconds: float = 0.0,
    *,
    nbytes: int | None = None,
    quantized: bool = False,
    comm: Communicator | None = None,
) -> None:
    """Announces this peer's next operation, so that its links are fast when it begins.

    For programs with pauses between calls, whose peers are far apart: see
    `Communicator.prepare`. Only this peer's links are affected, and it waits for nothing.

    Args:
        seconds: Until the operation: 0 to 3600.
        nbytes: Bytes of its arrays, as they travel. Filler is about a quarter of what an all-reduce
            of them sends, at most. Default: not known, and no limit.
        quantized: Whether its arrays are quantized: these may go to other members.
        comm: Default: the process's communicator.

    Raises:
        NotInitialized: Before `init`.
        InvalidArgument: `seconds` or `nbytes` is no such number.
    """
    _use(comm, "prepare").prepare(seconds, nbytes=nbytes, quantized=quantized)


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
def sync(state: _Tree, *, return_info: _No = False, **how: Unpack[_Sync]) -> _Tree: ...
@overload
def sync(state: _Tree, *, return_info: _Yes, **how: Unpack[_Sync]) -> tuple[_Tree, SyncInfo]: ...
@overload
def sync(state: _Tree, *, return_info: bool, **how: Unpack[_Sync]) -> Any: ...
def sync(
    state: Any,
    *,
    revision: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | bool | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
    return_info: bool = False,
) -> Any:
    """Lets newcomers in and makes `state` equal on all members, byte for byte. All members call it.

    The highest revision counts, then what most members hold, and never what a newcomer brings:
    newcomers receive, members are verified (by hashes; members in step move no byte). It succeeds
    for all members, or without `overwrite` leaves all as they were. First completes this peer's own
    operations in flight. A newcomer's first call waits to be let in.

    Args:
        state: Arrays (as in `allreduce`, of any dtype), Python numbers, strings and None in nested
            containers, and objects with `state_dict` and `load_state_dict`. Its structure is part
            of the state: a newcomer's must not contradict it, but may lack entries, as an optimizer
            does that has not stepped yet.
        revision: For programs with checkpoints: the revision of `state`, such as the number of
            steps, or that of the checkpoint in the first sync. When a run starts, the highest one
            counts. Default: the library counts.
        overwrite: What this peer receives goes straight to its writable arrays, and not beside them
            until the sync has succeeded. It takes no memory for a second copy then, and less time.
            But after an error these arrays may hold parts of both states. This process does not
            offer them to others, and its next sync completes them. Other threads must not read them
            meanwhile.
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
        Drained: This peer was asked to leave the run, and has left it: see `drain`.
        InvalidArgument: A leaf cannot be shared; names its path. Also, on all members: two entries
            of a member's state overlap and are not the same array; names peer and entries.
        MismatchedCall: States have other names, shapes or dtypes, or entries that are one array
            here and two there, or a newcomer cannot make the entries that it lacks; names peer and
            entry. The newcomer is removed with that sentence, and the members go on.
        RevisionMismatch: This newcomer's `revision` is ahead of the run's.
        StateUnavailable: All that had the state are gone.
        PeerLost: Another member was interrupted in this call; call again.
        Timeout, MasterLost, Evicted, Deadlock: See `pccl.errors`. Without `overwrite` nothing was
            written after any error of pccl.
        Exception: An error of an object's `load_state_dict` passes through. Arrays have the new
            state by then, the other members all of it; the next sync sends it to this peer again.
    """
    func = "sync"
    limit = _settings.Deadline(_settings.seconds(timeout, func))
    result, info = sync_and_stay(
        state, revision, progress, limit.seconds, comm, overwrite=bool(overwrite)
    )
    departure.leave_if_asked(_use(comm, func), func, limit.left())
    return (result, info) if return_info else result


def sync_and_stay(
    state: Any,
    revision: int | None,
    progress: Callable[[int, int], None] | bool | None,
    timeout: float | None,
    comm: Communicator | None,
    *,
    lets_in: bool = True,
    overwrite: bool = False,
) -> tuple[Any, SyncInfo]:
    """As `sync` with `return_info`, for a caller that leaves the run at another point.

    Without `lets_in`, the same on all members, it is a sync of the present members.
    """
    func = "sync"
    engine = _engine(comm, func)
    if revision is not None:
        revision = _settings.integer(revision, "revision", func, 0, 2**63 - 1)
    shared = State(state, func)
    with reporting(progress, func) as report, shared.counting_writes(engine.overwrote):
        synced = engine.sync(
            shared.entries,
            level=2,
            revision=revision,
            strategy=0,
            progress=report,
            check=shared.check,
            timeout=timeout,
            lets_in=lets_in,
            overwrite=overwrite,
        )
    result = shared.finish(synced.written, synced.replaced)
    synced.finish()
    return result, SyncInfo(
        revision=synced.revision,
        epoch=synced.epoch,
        world_size=len(synced.members),
        peers=tuple(synced.members),
        tx_bytes=synced.tx_bytes,
        rx_bytes=synced.rx_bytes,
        received=tuple(sorted([*synced.written, *(name for name, *_ in synced.replaced)])),
        diverged={peer: tuple(names) for peer, names in synced.diverged},
    )


def membership(comm: Communicator | None = None) -> Membership:
    """The members that reduce together. Changes only inside a pccl call.

    Raises:
        NotInitialized: Before `init`.
    """
    epoch, own_rank, size, peers, group, replicas = _engine(comm, "membership").membership()
    return Membership(epoch, own_rank, size, tuple(peers), group, tuple(replicas))


def stats(comm: Communicator | None = None) -> RunStats:
    """Returns the sums of this peer since it joined: operations, bytes, seconds.

    Takes some microseconds, more while another thread is inside a call.

    Raises:
        NotInitialized: Before `init`.
    """
    return _use(comm, "stats").stats()


def on_membership_change(
    callback: Callable[[MembershipChange], object], comm: Communicator | None = None
) -> Subscription:
    """Calls `callback` when members come or go.

    It is called by the thread that calls pccl, at the end of the first call in which the program
    sees the new membership, just before this call returns or raises. The results of `sync` and of
    operations on a device are not in place yet. pccl holds no lock meanwhile. If another membership
    follows before the program sees one, that one is not reported by itself; its joined and lost
    members are reported with the next one. Compiled calls (JAX) report nothing; the next other call
    does.

    If this peer is put out of the run, as by an eviction or the loss of the master, and the program
    comes back by `init`, the callbacks of the process's communicator are called for the new one,
    too. The first change then has all members in `joined`. They end when this peer leaves.

    The callback may ask `stats`, `membership` and the like. It should make no collective call:
    others do not know when it runs. An exception of the callback goes to `sys.unraisablehook`,
    which prints it. The call goes on, because the other members have its result.

    Args:
        callback: Takes a `pccl.MembershipChange`.
        comm: Default: the process's communicator.

    Returns:
        A handle; its `remove()` ends the calls. A callback that is there already is called once,
        and has one handle.

    Raises:
        InvalidArgument: `callback` cannot be called.
        NotInitialized: Before `init`.
    """
    return _use(comm, "on_membership_change").on_membership_change(callback)


def rank(comm: Communicator | None = None) -> int:
    """This peer's place in order of admission, 0 for the first; -1 while it waits to be let in.

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
    tree: int, op: _Mean, *, out: None = None, return_info: _No = False, **how: Unpack[_How]
) -> float: ...
@overload
def allreduce(
    tree: int, op: _Mean, *, out: None = None, return_info: _Yes, **how: Unpack[_How]
) -> tuple[float, ReduceInfo]: ...
@overload
def allreduce(
    tree: _Tree, op: _Op = "sum", *, out: None = None, return_info: _No = False, **how: Unpack[_How]
) -> _Tree: ...
@overload
def allreduce(
    tree: _Tree, op: _Op = "sum", *, out: None = None, return_info: _Yes, **how: Unpack[_How]
) -> tuple[_Tree, ReduceInfo]: ...
@overload
def allreduce(
    tree: object, op: _Op = "sum", *, out: _Out, return_info: _No = False, **how: Unpack[_How]
) -> _Out: ...
@overload
def allreduce(
    tree: object, op: _Op = "sum", *, out: _Out, return_info: _Yes, **how: Unpack[_How]
) -> tuple[_Out, ReduceInfo]: ...
@overload
def allreduce(
    tree: _Tree, op: _Op = "sum", *, out: Any = None, return_info: bool, **how: Unpack[_How]
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
            protocol; of any shape, contiguous or not; integers of 8 to 64 bits, float8_e4m3fn,
            float8_e5m2, float16, bfloat16, float32 and float64; complex64 and complex128 under
            "sum" and "avg"; bool under "max" (or) and "min" (and). Also Python ints (combined as
            int64) and floats (float64). All of it is one operation: either all leaves are combined
            over the same members, or none is.
        op: "sum", "avg" or "mean" (divides by the members that contributed; integer arrays round
            toward zero, a Python int gives a float), "prod", "min", "max", or a `ReduceOp`. Sums
            and products of integer arrays wrap as NumPy's do; means are never outside their inputs.
        out: Writable arrays of the same structure, dtypes and shapes to write the results to; may
            be `tree` itself. Default: new arrays.
        weight: Only with "avg": this member's weight, any number that is 0 or from 1e-18 to 1e18.
            The result is sum(weight * x) / sum(weight) over the members; arrays with weight 0 do
            not count. All members pass one, or none does. It costs a scaled copy of `tree` on each
            member. Products and sums are in float32 for floats of 8 to 32 bits and complex64, else
            in float64, so an 8- or 16-bit float is sent as 4 bytes, and an integer as 8. Integers
            of more than 53 bits lose their last bits. In a function that JAX traces it may be a
            traced scalar.
        quantize: Send floating-point arrays between hosts in fewer bits: "int8", "uint8", "int4",
            "float8", or a `Quantize`. The result is rounded, but still the same bytes on every
            member. Integers (without `weight`), complex numbers, 8-bit floats and arrays of fewer
            than 64 elements stay exact. A group whose members share one host stays exact, too,
            since nothing would be saved there. Its first calls may be rounded: they may come before
            the members have found each other's memory. Elements that are not finite stay as they
            are, and leave the other elements of their block three steps fewer. All members pass the
            same. Not with "prod".
        tag: Members' calls with equal tags meet, whatever the order. Default: calls meet by order,
            and come from one thread. Each new tag takes some 65 bytes of memory until a newcomer is
            let in.
        timeout: Seconds for the whole call. Default: PCCL_TIMEOUT; without either, waits as long as
            members make progress.
        comm: Default: the process's communicator.
        return_info: Return `(tree, ReduceInfo)`.

    Returns:
        `out` if it was given; else the same structure and kinds of arrays as `tree`. The same bytes
        on every member.

    Raises:
        InvalidArgument: A leaf cannot be reduced or written; names its path. Also, on all members:
            the weights add up to 0, or one is negative, infinite, NaN or out of range.
        InvalidUsage: Another thread makes the calls without a tag.
        OverflowError: On all members: the sum or product of Python ints or `np.int64` scalars does
            not fit in 64 bits.
        MismatchedCall: Members disagree on structure, shape, dtype, op, or on whether there are
            weights; names the odd one out.
        PeerLost: Another member was interrupted in this call; call again.
        Timeout, MasterLost, Evicted, Deadlock: See `pccl.errors`. After any error inputs are as
            before the call, also in place; a separate `out` may have been written to.
    """
    func = "allreduce"
    limit = _settings.seconds(timeout, func)
    used = _use(comm, func)
    if weight is None:
        plain = routes.reduce_plain(used._joined(func), tree, out, op, quantize, tag, limit)
        if plain is not None:
            made, info = plain
            return (made, reduce_info(info)) if return_info else made
    return routes.allreduce(
        request.make(
            func,
            used,
            tree,
            op,
            out=out,
            weight=weight,
            quantize=quantize,
            tag=tag,
            timeout=timeout,
            return_info=return_info,
            by_default=comm is None,
        )
    )


@overload
def allreduce_async(
    tree: int, op: _Mean, *, out: None = None, **how: Unpack[_Async]
) -> Work[float]: ...
@overload
def allreduce_async(
    tree: _Tree, op: _Op = "sum", *, out: None = None, **how: Unpack[_Async]
) -> Work[_Tree]: ...
@overload
def allreduce_async(
    tree: object, op: _Op = "sum", *, out: _Out, **how: Unpack[_Async]
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
    limit = _settings.seconds(None, func)
    used = _use(comm, func)
    if weight is None:
        plain = routes.start_plain(used._joined(func), tree, out, op, quantize, tag, limit)
        if plain is not None:
            operation, result = plain
            return Work(used, operation, lambda: result)
    made = request.make(
        func, used, tree, op, out=out, weight=weight, quantize=quantize, tag=tag, timeout=limit
    )
    return general.start(made)
