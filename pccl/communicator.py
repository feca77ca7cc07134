"""Level 1, and the master: what peers and masters do, and what happens at fork and exit."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pccl import _arrays, _core, _settings, collectives, tree
from pccl import quantize as quantization
from pccl.errors import (
    InvalidArgument,
    InvalidUsage,
    NotSupported,
    PCCLError,
    PeerLost,
    PendingOperations,
    Result,
)
from pccl.quantize import Quantize
from pccl.types import (
    OP_CODES,
    Attribute,
    DataType,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Schedule,
    SharedState,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
    Topology,
)

if TYPE_CHECKING:
    from pccl._arrays import Buffer, Prepared, Staging

__all__ = ["AsyncReduceHandle", "Communicator", "MasterNode"]

_MAX_GROUP = 2**32 - 1
_MAX_STRIPES = 255
_MAX_PEERS = 2**31 - 1
_MAX_REPLICA_NAME = 256
_MAX_RANKS = 4096
_MAX_IN_FLIGHT = 2**31 - 1
_MAX_ATTEMPTS = 2**31 - 1
_INTERRUPT_SECONDS = 5.0  # a master that was told to stop has closed its port long before

# Forks between this process and the one that imported pccl: tells a forked copy from the original.
_forks = 0
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_masters: set[MasterNode] = set()  # running


def _after_fork_in_child() -> None:
    global _forks
    _forks += 1
    _masters.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    """Leaves every run, then keeps the process alive while it serves as a master."""
    for comm in list(_open):
        comm._leave_at_exit()
    ended_by = getattr(sys, "last_type", None)
    try:
        for master in list(_masters):
            if ended_by is not None:  # by Ctrl-C or an error: nobody is served by staying
                master.interrupt()
            else:
                print(f"pccl: still master on {master.address}; Ctrl-C ends it", file=sys.stderr)
                master.wait()
    except KeyboardInterrupt:
        for master in list(_masters):
            master.interrupt()


class _Residual(NamedTuple):
    """What rounding left out of an array: float32 for each element (float64 of float64)."""

    key: tuple[int | None, str]  # the calls' tag, and the array's path
    outline: str  # "float32[3,4]": of other arrays at the same place nothing is kept
    values: npt.NDArray[np.uint8]


class Communicator(_core.Reducer):
    """One peer's part in a run.

    Any thread may call it; calls without a tag, or with tag 0, the default, come from one thread: in
    another one they raise InvalidUsage while the first one lives. Use as a context manager to connect
    and close.

    Args:
        address: The master's "host:port"; host names, IPv4 and "[IPv6]:port".
        peer_group: Peers reduce only with peers of the same group.
        p2p_connection_pool_size: TCP connections per link to another host; 0 adapts.
        port: Where other peers connect. Default: PCCL_PORT, else any free port.
        advertise: More addresses at which other peers may find this one. Default: PCCL_ADVERTISE,
            comma-separated.
        secret: The run's secret, the same on its master and on all of its peers; at least 32 bytes or
            characters (`pccl secret` makes one). All connections are authenticated and encrypted
            with it, and no others are made. Default: PCCL_SECRET, else the file that
            PCCL_SECRET_FILE names; without any of them nothing is.
        replica_id: Name of the replica that this peer is a rank of. Its ranks are `peer_group` 0 to
            `ranks_per_replica` - 1 and name the same; they are let in and put out together.
        ranks_per_replica: Ranks of each replica, the same in the whole run.

    Raises:
        InvalidArgument: An argument or its variable makes no sense.
    """

    def __init__(
        self,
        address: str,
        peer_group: int = 0,
        p2p_connection_pool_size: int = 0,
        *,
        port: int | None = None,
        advertise: str | Sequence[str] | None = None,
        secret: str | bytes | None = None,
        replica_id: str | None = None,
        ranks_per_replica: int | None = None,
    ) -> None:
        super().__init__()
        func = "Communicator"
        if not isinstance(address, str) or not address:
            raise InvalidArgument.because(func, f"address must be 'host:port', not {address!r}")
        self._secret = _settings.secret(secret, func)
        self._address = address
        self._group = _settings.integer(peer_group, "peer_group", func, 0, _MAX_GROUP)
        self._stripes = _settings.integer(
            p2p_connection_pool_size, "p2p_connection_pool_size", func, 0, _MAX_STRIPES
        )
        self._port = _settings.integer(
            port, "port", func, 0, 65535, variable="PCCL_PORT", default=0
        )
        self._advertise = _settings.addresses(advertise, func)
        self._replica, self._ranks = self._check_replica(replica_id, ranks_per_replica)
        self._engine: _core.Communicator | None = None
        self._joining = False
        self._candidate: _core.Communicator | None = None  # while it joins
        self._closed = False
        self._fork = _forks
        # By tag and path: what rounding left out of an array the last time.
        self._residuals: dict[tuple[int | None, str], _Residual] = {}
        # Guards _residuals, _joining and _engine; never held in a blocking call.
        self._lock = threading.Lock()

    def _check_replica(self, name: str | None, ranks: int | None) -> tuple[str, int]:
        func = "Communicator"
        if name is None and ranks is None:
            return "", 0
        if not isinstance(name, str) or not 0 < len(name.encode()) <= _MAX_REPLICA_NAME:
            sentence = (
                f"replica_id must be a string of 1 to {_MAX_REPLICA_NAME} bytes, not {name!r}"
                if ranks is not None
                else "replica_id and ranks_per_replica go together"
            )
            raise InvalidArgument.because(func, sentence)
        if ranks is None:
            sentence = "replica_id and ranks_per_replica go together"
            raise InvalidArgument.because(func, sentence)
        ranks = _settings.integer(ranks, "ranks_per_replica", func, 1, _MAX_RANKS)
        if self._group >= ranks:
            sentence = f"peer_group is the rank in the replica, 0 to {ranks - 1} of {ranks}, not {self._group}"
            raise InvalidArgument.because(func, sentence)
        return name, ranks

    # Joining and leaving.

    def connect(self, n_attempts: int = 5, *, timeout: float | None = None) -> None:
        """Joins the run. The first peer of a group returns at once, a later one when the members let it in.

        Args:
            n_attempts: How often to try to reach the master, one second apart.
            timeout: Seconds for the whole call. None waits for the members as long as they make
                progress.

        Raises:
            PCCLError: `Unreachable` after the last attempt, `Refused`, `Timeout` ...; all with the
                result MASTER_CONNECTION_FAILED.
            InvalidUsage: Connected already, or closed.
        """
        attempts = _settings.integer(n_attempts, "n_attempts", "connect", 1, _MAX_ATTEMPTS)
        self._join("connect", min_peers=1, attempts=attempts, timeout=timeout, enter=True)

    def _join(
        self, func: str, *, min_peers: int, attempts: int, timeout: float | None, enter: bool
    ) -> None:
        limit = _settings.seconds(timeout, func)
        self._check_usable(func)
        with self._lock:
            if self._joining or (self._engine is not None and self._engine.is_open()):
                raise InvalidUsage.because(func, "this communicator is connected already")
            self._joining = True
        try:
            # A peer that failed to join, or was cut off, comes back as a new peer.
            engine = _core.Communicator(
                self._address,
                peer_group=self._group,
                stripes=self._stripes,
                port=self._port,
                advertise=self._advertise,
                replica=self._replica,
                ranks_per_replica=self._ranks,
                secret=self._secret,
            )
            self._candidate = engine
            try:
                self._check_usable(func)  # closed by another thread, meanwhile
                engine.join(min_peers=min_peers, attempts=attempts, timeout=limit, enter=enter)
            except BaseException:
                engine.close()
                raise
            with self._lock:
                self._residuals.clear()  # a newcomer starts with nothing
            self._engine = engine
            self._attach(engine)
            _open.add(self)
            if self._closed:
                self._attach(None)
                engine.close()
        finally:
            self._joining = False
            self._candidate = None

    def close(self) -> None:
        """Leaves the run: the others see a departure, not a loss. May be called again; afterwards nothing else may.

        Calls of other threads end with an error, a `connect` that waits, too.
        """
        self._close("")

    def _close(self, failure: str) -> None:
        if self._fork != _forks:
            return
        self._closed = True
        self._attach(None)
        _open.discard(self)
        for engine in (self._candidate, self._engine):
            if engine is not None:
                engine.close(failure)
        with self._lock:
            self._residuals.clear()

    def _leave_at_exit(self) -> None:
        # The other ranks of a replica have nothing to wait for when a program ended by an exception.
        error = getattr(sys, "last_type", None)
        try:
            self._close("" if error is None else f"its program ended with {error.__name__}")
        except (PCCLError, KeyboardInterrupt):
            pass  # the process ends anyway; the master notices

    def __enter__(self) -> Communicator:
        if self._engine is None or not self._engine.is_open():
            self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close("" if kind is None else f"its program ended with {kind.__name__}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not connected" if self._engine is None else "joined"
        return f"<pccl.Communicator master={self._address} peer_group={self._group} {state}>"

    def _check_usable(self, func: str) -> None:
        if self._fork != _forks:
            sentence = "this process was forked; its copy of the communicator cannot be used"
            raise InvalidUsage.because(func, sentence)
        if self._closed:
            raise InvalidUsage.because(func, "this communicator is closed; make a new one")

    def _joined(self, func: str) -> _core.Communicator:
        self._check_usable(func)
        if self._engine is None:
            raise InvalidUsage.because(func, "not connected; call connect() first")
        return self._engine

    # Membership.

    def update_topology(self, *, timeout: float | None = None) -> None:
        """Lets waiting peers in. All members call it; the first call after joining returns at once.

        Raises:
            PendingOperations: Handles of this communicator are not finished.
            PCCLError: Any other failure, with the result UPDATE_TOPOLOGY_FAILED.
        """
        func = "update_topology"
        self._joined(func).update_topology(_settings.seconds(timeout, func))

    def are_peers_pending(self, *, timeout: float | None = None) -> bool:
        """Whether peers wait to be let in. All members call it and get the same answer; operations may be in flight."""
        func = "are_peers_pending"
        return self._joined(func).peers_pending(_settings.seconds(timeout, func))

    def get_attribute(self, attribute: Attribute) -> int:
        """A number of peers or groups, as of this peer's last call that updated its view."""
        func = "get_attribute"
        try:
            which = Attribute(attribute)
        except ValueError:
            raise InvalidArgument.because(func, f"no attribute {attribute!r}") from None
        return self._joined(func).attribute(int(which))

    def optimize_topology(self, *, timeout: float | None = None) -> None:
        """Measures the network between members, and plans by it. All members call it.

        For three seconds it finds out how long ways are and what each peer can send and receive;
        then the master chooses the ring's order, who combines how much, and which of them serves
        which sizes. Members that share memory measure nothing among each other. `topology` shows
        what came out. Alone, it returns at once.

        Args:
            timeout: Seconds for the whole call. Default: PCCL_TIMEOUT, else no limit.

        Raises:
            PendingOperations: Handles of this communicator are not finished.
            PeerLost: Another member was interrupted in this call; call again.
            PCCLError: Any other failure, with the result TOPOLOGY_OPTIMIZATION_FAILED.
        """
        func = "optimize_topology"
        engine = self._joined(func)
        limit = _settings.seconds(timeout, func)
        count = engine.unfinished()
        if count:
            sentence = f"{count} operation{'s' * (count > 1)} of this communicator not finished yet"
            raise PendingOperations.because(func, sentence)
        try:
            engine.optimize_topology(limit)
        except PCCLError as error:
            error.func_name = func
            if error.result is Result.RANK_CONNECTION_LOST and not isinstance(error, PeerLost):
                error.result = Result.TOPOLOGY_OPTIMIZATION_FAILED
            raise

    def topology(self) -> Topology:
        """What is known of the network between members, and the plan made of it.

        It is measured in `optimize_topology`. Changes only inside a pccl call.

        Raises:
            InvalidUsage: Not connected.
        """
        found = self._joined("topology").topology()
        peers, hosts, links, ring, classes, places, regions, relayed = found
        pairs = [divmod(at, len(peers)) for at in range(len(links))]
        largest = 2**64 - 1
        return Topology(
            peers=tuple(peers),
            hosts=tuple(places or range(len(peers))),
            up=tuple(up * 1000.0 or None for up, _ in hosts) or (None,) * len(peers),
            down=tuple(down * 1000.0 or None for _, down in hosts) or (None,) * len(peers),
            rate={
                pair: rate * 1000.0 for pair, (_, rate, _) in zip(pairs, links, strict=True) if rate
            },
            rtt={pair: rtt * 1e-6 for pair, (_, _, rtt) in zip(pairs, links, strict=True) if rtt},
            unreachable=frozenset(
                pair for pair, (unreachable, _, _) in zip(pairs, links, strict=True) if unreachable
            ),
            relayed=frozenset(relayed),
            ring=tuple(ring),
            regions=tuple(regions),
            schedules=tuple(
                Schedule(
                    None if up_to == largest else up_to,
                    ("ring", "direct", "host_ring", "host_direct", "regional")[kind],
                    tuple(share / (sum(shares) or 1) for share in shares),
                )
                for (up_to, kind, shares), before in zip(
                    classes, [0, *(size for size, _, _ in classes)], strict=False
                )
                if up_to > before  # others serve halves of an all-reduce only
            ),
        )

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
        *,
        timeout: float | None = None,
    ) -> SharedStateSyncInfo:
        """Makes the entries equal on all members, byte for byte. All members call it.

        The highest revision that a standing member offers counts (standing: it was in the sync
        before), then the content that most have, then the longest-standing member's. Only 1 MiB
        pieces that differ move. It succeeds for all members, or leaves all as they were.

        Args:
            shared_state: The entries. Where they differ from the elected ones they are written, and
                the revision is set. Count one up before the next sync.
            strategy: SEND_ONLY and RECEIVE_ONLY peers may mix with each other, not with
                ENFORCE_POPULAR.
            timeout: Seconds for the whole call. Default: PCCL_TIMEOUT, else no limit.

        Returns:
            Bytes of entries sent and received; both 0 where members were in step.

        Raises:
            PendingOperations: Handles of this communicator are not finished.
            InvalidArgument: An entry cannot be shared. Also, on all members: two entries of
                somebody's state overlap and are not the same array; names peer and entries.
            MismatchedCall: Members' entries have other names, counts or dtypes, or are one array
                here and two there; names peer and entry. A newcomer that does this is put out, and the
                members go on.
            RevisionMismatch: This newcomer's revision is ahead of the run's.
            StateUnavailable: All that had the state are gone, or nobody offers one.
            PeerLost: Another member was interrupted in this call; call again.
            Evicted: Among others: the strategies do not mix, or SEND_ONLY lost the election.
            PCCLError: Any other failure; most with the result INVALID_USAGE.
        """
        func = "sync_shared_state"
        engine = self._joined(func)
        limit = _settings.seconds(timeout, func)
        try:
            how = SharedStateSyncStrategy(strategy)
        except ValueError:
            raise InvalidArgument.because(func, f"no strategy {strategy!r}") from None
        entries = []
        for info in shared_state.tensor_infos:
            info._check_sharable(func, receives=how is not SharedStateSyncStrategy.SEND_ONLY)
            data = _arrays.memory_at(info.data_ptr, info.numel, info.dtype).array
            kind, loose = info.dtype.label, info.allow_content_inequality
            entries.append((info.name, kind, (info.numel,), "", loose, data, True, None))
        revision = shared_state.revision
        synced = engine.sync(
            entries,
            level=1,
            revision=revision,
            strategy=int(how),
            progress=None,
            check=None,
            timeout=limit,
        )
        shared_state.revision = synced.revision
        synced.finish()
        return SharedStateSyncInfo(synced.tx_bytes, synced.rx_bytes)

    # Reductions.

    def _all_reduce(
        self,
        send: Any,
        recv: Any,
        op: ReduceOp | str,
        tag: int,
        operand_descriptor: ReduceOperandDescriptor | None,
        quantization_options: QuantizationOptions | None,
        timeout: float | None,
    ) -> ReduceInfo:
        """The long way of `all_reduce`: arrays that are not plain, and whatever is wrong."""
        func = "all_reduce"
        deadline = _settings.Deadline(_settings.seconds(timeout, func))
        handle = self._launch(
            func,
            send,
            recv,
            op,
            tag,
            operand_descriptor,
            quantization_options,
            deadline.left(),
            wait=True,
        )
        return handle._finish(deadline.left())

    def _reduce_plain(
        self,
        func: str,
        tree: object,
        out: object,
        op: ReduceOp | str,
        tag: int | None,
        timeout: float | None,
    ) -> tuple[Any, _core.ReduceInfo] | None:
        """Reduces plain arrays for level 2, and waits: the result, and how it went.

        Small reductions take no longer than their preparation, so these have the shortest one.

        Returns:
            None when it is not that simple, or wrong. Then nothing was started.
        """
        engine = self._joined(func)
        code = _plain_code(tree, op)
        return None if code is None else engine.reduce_tree(tree, out, code, tag, timeout)

    def _start_plain(
        self,
        func: str,
        tree: object,
        out: object,
        op: ReduceOp | str,
        tag: int | None,
        timeout: float | None,
    ) -> tuple[_core.Operation, Any] | None:
        """The same, begun: with the result, which is complete when the operation is done."""
        engine = self._joined(func)
        code = _plain_code(tree, op)
        return None if code is None else engine.start_tree(tree, out, code, tag, timeout)

    def all_reduce_async(
        self,
        send: Any,
        recv: Any,
        *,
        op: ReduceOp | str,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
    ) -> AsyncReduceHandle:
        """As `all_reduce`, without waiting. Neither array may be touched before the handle says that it is over.

        Raises:
            TooFewPeers, InvalidArgument: As in `all_reduce`; what fails later is the handle's to
                tell.
        """
        func = "all_reduce_async"
        timeout = _settings.seconds(None, func)
        return self._launch(
            func, send, recv, op, tag, operand_descriptor, quantization_options, timeout
        )

    def _launch(
        self,
        func: str,
        send: Any,
        recv: Any,
        op: ReduceOp | str,
        tag: int,
        operand_descriptor: ReduceOperandDescriptor | None,
        quantization_options: QuantizationOptions | None,
        timeout: float | None,
        *,
        wait: bool = False,
    ) -> AsyncReduceHandle:
        self._joined(func)
        how = ReduceOp.parse(op, func)
        coding, travels = self._coding(quantization_options, how, func)
        sent = _one_buffer(_arrays.read(send, func, "send").buffers, func, "send")
        received = _one_buffer(_arrays.write(recv, func, "recv"), func, "recv")
        if sent.dtype != received.dtype:
            sentence = f"send is {sent.dtype.label}, but recv is {received.dtype.label}"
            raise InvalidArgument.because(func, sentence)
        if sent.array.size != received.array.size:
            sentence = f"send has {sent.array.size} elements, but recv has {received.array.size}"
            raise InvalidArgument.because(func, sentence)
        if operand_descriptor is not None and operand_descriptor.datatype != sent.dtype:
            declared = DataType(operand_descriptor.datatype).label
            sentence = f"the descriptor says {declared}, but the data is {sent.dtype.label}"
            raise InvalidArgument.because(func, sentence)
        staging = _arrays.Staging([sent], [received.array])
        operation = self._start(
            func,
            staging,
            op=how,
            tag=_settings.tag(tag, func),
            level=1,
            rerun=False,
            structure=travels.encode(),
            description=tree.describe_buffer(sent) + travels,
            timeout=timeout,
            quantize=coding,
            wait=wait,
        )
        return AsyncReduceHandle(self, operation, staging)

    def _start(
        self,
        func: str,
        staging: Prepared,
        *,
        op: ReduceOp,
        tag: int | None,
        level: int,
        rerun: bool,
        structure: bytes,
        description: str,
        timeout: float | None,
        kept: object = None,
        quantize: Quantize | None = None,
        names: Sequence[tuple[str, str]] = (),
        wait: bool = False,
        **collective: int,
    ) -> _core.Operation:
        """Starts an operation, which keeps its arrays and `kept` until it is finished, even if nobody waits.

        `wait`: return, or raise, when it is finished. Calls that block pass it: Ctrl-C between the start
        and a wait of its own would leave the other members in the operation.
        `names`: of the arrays and what they are, for error feedback. `collective`: of another kind than an
        all-reduce, `kind`, `root` and `parts`.
        """
        coding: dict[str, Any] = {}
        residuals: list[_Residual | None] = []
        if quantize is not None:
            coding["quantize"] = quantization.codes(quantize)
            if quantize.error_feedback:
                residuals = self._residuals_of(staging.arrays, tag, names)
                coding["residuals"] = [kept and kept.values for kept in residuals]
                with self._lock:
                    self._residuals.update(
                        {left.key: left for left in residuals if left is not None}
                    )
        return self._joined(func).start(
            staging.arrays,
            op=int(op),
            tag=tag,
            level=level,
            rerun=rerun,
            structure=structure,
            description=description,
            timeout=timeout,
            wait=wait,
            kept=kept,
            **{**collective, **coding},
        )

    def broadcast(
        self, array: Any, *, root: int = 0, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Makes `array` what it is on the member of rank `root`, and waits.

        Args:
            array: NumPy array (or CPU torch tensor) of any dtype without Python objects,
                C-contiguous, the same shape and dtype on all members. On the others it is written;
                after a failure it is as before.
            root: Rank of the member whose elements all get.
            tag: As in `all_reduce`.
            timeout: Seconds for the whole call. None waits as long as members make progress.

        Raises:
            TooFewPeers, PeerLost, MismatchedCall: As in `all_reduce`.
            InvalidArgument: The array cannot be written in place, or there is no such rank.
        """
        return collectives.broadcast_in_place(self, array, root, tag, timeout)

    def all_gather(
        self, send: Any, recv: Any, *, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Puts every member's `send` into `recv`, one after the other in rank order, and waits.

        Args:
            send: NumPy array (or CPU torch tensor) of any dtype without Python objects, the same
                shape and dtype on all members.
            recv: C-contiguous array of the same kind and dtype with as many times the elements of
                `send` as there are members, in any shape. After a failure it may have been written
                to. `send` may be this member's part of it.
            tag: As in `all_reduce`.
            timeout: Seconds for the whole call. None waits as long as members make progress.

        Raises:
            TooFewPeers, PeerLost, MismatchedCall, InvalidArgument: As in `all_reduce`.
        """
        return collectives.gather_into(self, send, recv, tag, timeout)

    def reduce_scatter(
        self,
        send: Any,
        recv: Any,
        *,
        op: ReduceOp | str,
        tag: int = 0,
        timeout: float | None = None,
    ) -> ReduceInfo:
        """Reduces `send` over all members; each gets the part of its rank, in `recv`. Waits.

        Args:
            send: NumPy array (or CPU torch tensor) of numbers, any shape. Unchanged, unless `recv`
                is a part of it.
            recv: C-contiguous array of the same kind and dtype; `send` has as many times its
                elements as there are members. After a failure it may have been written to.
            op: How elements are combined.
            tag: As in `all_reduce`.
            timeout: Seconds for the whole call. None waits as long as members make progress.

        Raises:
            TooFewPeers, PeerLost, MismatchedCall, InvalidArgument: As in `all_reduce`.
        """
        return collectives.reduce_into(self, send, recv, op, tag, timeout)

    def _residuals_of(
        self,
        arrays: Sequence[tuple[Any, Any, int]],
        tag: int | None,
        names: Sequence[tuple[str, str]],
    ) -> list[_Residual | None]:
        """What rounding left out of these arrays the last time; None of what is not quantized."""
        found: list[_Residual | None] = []
        with self._lock:
            for (send, _, code), (path, outline) in zip(arrays, names, strict=False):
                element, residual = quantization.FLOATING.get(DataType(code), (1, 0))
                count = send.size // element
                if residual == 0 or count < quantization.EXACT_BELOW:
                    found.append(None)
                    continue
                kept = self._residuals.get((tag, path))
                if kept is None or kept.outline != outline:
                    kept = _Residual((tag, path), outline, np.zeros(count * residual, np.uint8))
                found.append(kept)
        return found

    def _feedback(self, tag: int | None, names: Sequence[str]) -> list[_Residual]:
        """What is kept of these arrays at the moment: copies."""
        with self._lock:
            found = [self._residuals.get((tag, name)) for name in names]
        return [kept._replace(values=kept.values.copy()) for kept in found if kept is not None]

    def _take_back(self, tag: int | None, names: Sequence[str], before: list[_Residual]) -> None:
        """Keeps what was kept before, when results that have changed it since do not count."""
        with self._lock:
            for name in names:
                self._residuals.pop((tag, name), None)
            self._residuals.update({kept.key: kept for kept in before})

    @staticmethod
    def _coding(
        options: QuantizationOptions | None, op: ReduceOp, func: str
    ) -> tuple[Quantize | None, str]:
        """How the operand travels, for the engine and in words."""
        how = quantization.from_options(options, func)
        if how is None:
            return None, ""
        quantization.check_op(how, op, func)
        return how, quantization.words(how)

    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4
    ) -> ReduceInfo:
        """Runs several reductions, each again among the survivors when a member is lost, and waits for all.

        Args:
            descriptors: What to reduce; members pass the same tags.
            max_in_flight: How many run at once.

        Returns:
            The last reduction's info, with bytes and attempts of all.

        Raises:
            TooFewPeers: Alone in the group.
            InvalidArgument: `max_in_flight` is not positive.
        """
        func = "all_reduce_multiple_with_retry"
        limit = _settings.integer(max_in_flight, "max_in_flight", func, 1, _MAX_IN_FLIGHT)
        deadline = _settings.Deadline(_settings.seconds(None, func))
        self._joined(func)
        for descriptor in descriptors:  # before the first one starts
            what = descriptor.reduce_descriptor
            self._coding(what.quantization_options, ReduceOp.parse(what.op, func), func)
        running: deque[AsyncReduceHandle] = deque()
        done: list[ReduceInfo] = []
        try:
            for descriptor in descriptors:
                if len(running) == limit:
                    done.append(running[0]._finish(deadline.left()))
                    running.popleft()
                running.append(self._launch_at_addresses(descriptor, func))
            while running:
                done.append(running[0]._finish(deadline.left()))
                running.popleft()
        except PCCLError:
            for handle in running:  # the caller's memory is in use until they are over
                handle.wait()
            raise
        except BaseException:  # Ctrl-C: the others are given up, too, for all members
            for handle in running:
                handle._abandon()
            raise
        if not done:
            return ReduceInfo(local_world_size=self._joined(func).membership()[2])
        return ReduceInfo(
            local_world_size=done[-1].local_world_size,
            tx_bytes=sum(info.tx_bytes for info in done),
            rx_bytes=sum(info.rx_bytes for info in done),
            contributors=done[-1].contributors,
            epoch=done[-1].epoch,
            attempts=sum(info.attempts for info in done),
        )

    def _launch_at_addresses(self, descriptor: ReduceOpDescriptor, func: str) -> AsyncReduceHandle:
        what = descriptor.reduce_descriptor
        op = ReduceOp.parse(what.op, func)
        coding, travels = self._coding(what.quantization_options, op, func)
        dtype = DataType(what.operand_descriptor.datatype)
        sent = _arrays.memory_at(descriptor.sendbuf_ptr, what.count, dtype)
        received = _arrays.memory_at(descriptor.recvbuf_ptr, what.count, dtype)
        staging = _arrays.Staging([sent], [received.array])
        operation = self._start(
            func,
            staging,
            op=op,
            tag=_settings.tag(what.tag, func),
            level=1,
            rerun=True,
            structure=travels.encode(),
            description=f"{dtype.label}[{what.count}]{travels}",
            quantize=coding,
            timeout=_settings.seconds(None, func),
            kept=descriptor,  # which has the arrays, if it was made from any
        )
        return AsyncReduceHandle(self, operation, staging, descriptor)


def _plain_code(tree: object, op: ReduceOp | str) -> int | None:
    """The op's code, if both may be what the engine takes as it is."""
    if type(tree) not in (np.ndarray, dict, list, tuple):
        return None
    return OP_CODES.get(op) if type(op) is ReduceOp or type(op) is str else None


def _one_buffer(buffers: Sequence[Buffer], func: str, name: str) -> Buffer:
    if len(buffers) != 1:
        raise NotSupported.because(func, f"{name} has several parts; only pccl.allreduce takes it")
    return buffers[0]


def reduce_info(info: _core.ReduceInfo) -> ReduceInfo:
    """The engine's account of an operation, as a plain value."""
    made = object.__new__(ReduceInfo)
    # Not by the constructor: that of a frozen dataclass takes as long as a small reduction.
    made.__dict__.update(
        local_world_size=info.world_size,
        tx_bytes=info.tx_bytes,
        rx_bytes=info.rx_bytes,
        contributors=tuple(info.contributors),
        epoch=info.epoch,
        attempts=info.attempts,
    )
    return made


class AsyncReduceHandle:
    """A level-1 reduction in flight. Any thread may wait, as often as it likes."""

    def __init__(
        self,
        comm: Communicator,
        operation: _core.Operation,
        staging: Staging,
        kept: object = None,
    ) -> None:
        self._comm = comm
        self._lock = threading.Lock()  # guards what follows; never held while waiting
        self._running: tuple[_core.Operation, Staging, object] | None = (operation, staging, kept)
        self._info: ReduceInfo | None = None
        self._error: PCCLError | None = None

    def _finish(self, timeout: float | None) -> ReduceInfo:
        """Waits and raises the failure."""
        running = self._running
        if running is not None:
            if self._comm._fork != _forks:
                raise InvalidUsage.because("wait", "this process was forked; the handle is a copy")
            operation, staging, _ = running
            info = reduce_info(operation.wait(timeout))
            with self._lock:
                staging.finish()
                self._info = info
                self._running = None  # lets the arrays go
        assert self._info is not None
        return self._info

    def wait(self) -> tuple[bool, int, ReduceInfo]:
        """Waits until the reduction is over. Never raises, but for Ctrl-C.

        Returns:
            (success, the result code, info); after a failure info is all zero and `exception()`
            tells the cause.
        """
        if self._error is None:
            try:
                return True, int(Result.SUCCESS), self._finish(_settings.seconds(None, "wait"))
            except PCCLError as error:
                self._error = error
        return False, int(self._error.result), ReduceInfo()

    def _abandon(self) -> None:
        """Ends it for all members; then its arrays are in use no more. Takes a second or so at most."""
        running = self._running
        if running is not None:
            with suppress(PCCLError, KeyboardInterrupt):
                running[0].wait(0.0)

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        running = self._running
        return running is None or self._error is not None or running[0].done()

    def exception(self) -> PCCLError | None:
        """Waits, and returns the failure; None after a success."""
        self.wait()
        return self._error


class MasterNode:
    """A master in this process, on a thread of the engine's.

    While it runs the process stays alive at its end, until Ctrl-C (or SIGTERM). `with` runs it and
    interrupts it.

    Args:
        listen_address: "host:port" to listen on; port 0 takes a free one, see `address`.
        secret: The run's secret, as of `Communicator`. Without one anybody who reaches it may join:
            there is a warning when that is more than this machine.
        min_peers: A group starts when so many peers are there, whatever they ask for themselves;
            of replicas, so many of those.

    Raises:
        InvalidArgument: The address or the secret makes no sense.
    """

    def __init__(
        self,
        listen_address: str,
        *,
        secret: str | bytes | _core.Secret | None = None,
        min_peers: int = 1,
    ) -> None:
        if not isinstance(listen_address, str) or not listen_address:
            sentence = f"listen_address must be 'host:port', not {listen_address!r}"
            raise InvalidArgument.because("MasterNode", sentence)
        self._secret = _settings.secret(secret, "MasterNode")
        self._min_peers = _settings.integer(min_peers, "min_peers", "MasterNode", 1, _MAX_PEERS)
        self._listen_address = listen_address
        self._address = listen_address
        self._engine: _core.Master | None = None
        self._fork = _forks

    @property
    def address(self) -> str:
        """host:port really bound; before `run`, the one asked for."""
        return self._address

    def run(self) -> None:
        """Listens and serves; returns at once.

        Raises:
            InvalidUsage: It runs already, or the address cannot be bound.
        """
        if self in _masters:
            raise InvalidUsage.because("MasterNode.run", "this master runs already")
        engine = _core.Master(self._listen_address, self._secret, self._min_peers)
        engine.run()
        self._engine = engine
        self._address = engine.address()
        self._fork = _forks
        _masters.add(self)

    def _started(self, func: str) -> _core.Master:
        if self._engine is None:
            raise InvalidUsage.because(func, "this master was never run")
        if self._fork != _forks:
            raise InvalidUsage.because(func, "this process was forked; its copy is no master")
        return self._engine

    def interrupt(self) -> None:
        """Stops it. When this returns its port is free again. May be called again."""
        engine = self._started("MasterNode.interrupt")
        engine.interrupt()
        engine.wait(_INTERRUPT_SECONDS)
        _masters.discard(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has stopped. Ctrl-C while waiting stops it.

        Args:
            timeout: Seconds; None waits without end.

        Returns:
            Whether it has stopped.
        """
        engine = self._started("MasterNode.wait")
        try:
            stopped = engine.wait(timeout)
        except KeyboardInterrupt:
            self.interrupt()
            raise
        if stopped:
            _masters.discard(self)
        return stopped

    def __enter__(self) -> MasterNode:
        self.run()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.interrupt()
