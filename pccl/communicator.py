"""The explicit API: one call of a `Communicator` per phase of a run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pccl import _arrays, _settings, _state, collectives, frameworks, quantize
from pccl import tree as trees
from pccl._changes import Subscription
from pccl.collectives import only_buffer
from pccl.errors import InvalidArgument, PCCLError, PeerLost, PendingOperations, Result, located
from pccl.master_node import MasterNode
from pccl.peer import MOST_NOTICE, Peer
from pccl.reduce import request as requests
from pccl.reduce import routes
from pccl.reduce.request import Request
from pccl.reduce.staging import Staging
from pccl.reduce.work import Work, reduce_info, total
from pccl.tree import Entry
from pccl.types import (
    Attribute,
    DataType,
    MembershipChange,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    RunStats,
    Schedule,
    SharedState,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
    TensorInfo,
    Topology,
    check_op,
    check_operands,
)

__all__ = ["AsyncReduceHandle", "Communicator", "MasterNode"]

_MAX_IN_FLIGHT = 2**31 - 1


class Communicator(Peer):
    """One peer's part in a run.

    Any thread may call it. Calls without a tag, or with tag 0, the default, come from one thread:
    in another thread they raise InvalidUsage while the first one lives. As a context manager it
    connects and closes.

    Args:
        address: The master's "host:port"; host names, IPv4 and "[IPv6]:port". Several with commas
            between them, the preferred one first, if the run has several masters.
        peer_group: Peers reduce only with peers of the same group: 0 to 2^31 - 1.
        p2p_connection_pool_size: TCP connections per link to another host; 0 adapts.
        port: Where other peers connect. Default: PCCL_PORT, else any free port.
        advertise: More addresses at which other peers may find this one. Default: PCCL_ADVERTISE,
            comma-separated.
        secret: The run's secret, the same on its master and on all of its peers; at least 32 bytes
            or characters (`pccl secret` makes one). All connections are authenticated and encrypted
            with it, and no others are made. Default: PCCL_SECRET, else the file that
            PCCL_SECRET_FILE names; without any of them connections are neither authenticated nor
            encrypted.
        replica_id: Name of the replica that this peer is a rank of. Its ranks are `peer_group` 0 to
            `ranks_per_replica` - 1 and name the same replica; they are let in and removed together.
        ranks_per_replica: Ranks of each replica, the same in the whole run.
        name: What messages call this peer: 1 to 64 printable ASCII characters without blanks.
            Default: PCCL_NAME, else the host's name and the process id.

    Raises:
        InvalidArgument: An argument or its variable makes no sense.
    """

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
        """Whether peers wait to be let in; the same answer on all members, which all call it.

        Operations may be in flight.
        """
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

        For three seconds members measure round trips and the rates at which each can send and
        receive. Then the master chooses the ring's order, the share that each member combines, and
        the schedule for each size. Members that share memory measure nothing between each other.
        `topology` shows the result. Alone, the call returns at once.

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

    def prepare(
        self, seconds: float = 0.0, *, nbytes: int | None = None, quantized: bool = False
    ) -> None:
        """Announces this peer's next operation, so that its links are fast when it begins.

        A TCP connection that was idle for a fraction of a second begins slowly again. Six round
        trips before the expected time this peer sends filler to the members to which an all-reduce
        of this size sends: as many bytes as are on the way at full rate. As many follow if the
        operation is 0.1 s late, and then every 0.2 s and a round trip. Filler ends with this peer's
        next reduction or other operation on arrays, at the next change of the membership, or a
        second after the expected time. There is none while an operation runs, and none on links
        with round trips below 5 ms or of which none is known yet: idle links are measured every 5
        s.

        Not a collective call: a peer that makes it prepares what it sends itself. It does not wait
        for the links. DiLoCo does this before each reduction that is not sparse.

        Args:
            seconds: Until the operation: 0 to 3600.
            nbytes: Bytes of its arrays, as they travel. Filler is about a quarter of what an
                all-reduce of them sends, at most. Default: not known, and no limit.
            quantized: Whether its arrays are quantized: these may go to other members.

        Raises:
            InvalidArgument: One of them is no such number.
        """
        func = "prepare"
        engine = self._joined(func)
        try:
            until = float(seconds)
        except (TypeError, ValueError, OverflowError):
            until = math.nan
        if not 0 <= until <= MOST_NOTICE:
            sentence = f"seconds is a number from 0 to {MOST_NOTICE:g}, not {seconds!r}"
            raise InvalidArgument.because(func, sentence)
        size = 0
        if nbytes is not None:
            size = _settings.integer(nbytes, "nbytes", func, 1, 2**63 - 1)
        engine.expect_operation(until, size, bool(quantized))

    def topology(self) -> Topology:
        """The known facts about the network between members, and the plan made of them.

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

    def stats(self) -> RunStats:
        """Returns the sums of this peer since it joined: see `pccl.RunStats`.

        Raises:
            InvalidUsage: Not connected.
        """
        engine = self._joined("stats")
        epoch, rank, members, _peers, _group, _replicas = engine.membership()
        return RunStats(epoch=epoch, rank=rank, world_size=members, **engine.stats())

    def on_membership_change(self, callback: Callable[[MembershipChange], object]) -> Subscription:
        """Calls `callback` with a `pccl.MembershipChange` when members come or go.

        See `pccl.on_membership_change`. May be called before `connect` returns, which then tells of
        the first membership, and once for several connections.

        Raises:
            InvalidArgument: `callback` cannot be called.
            InvalidUsage: Closed.
        """
        func = "on_membership_change"
        self._check_usable(func)
        with self._lock:
            first = not self._changes
            made = self._changes.add(callback, func)
            engine = self._engine
            if first and engine is not None and self._candidate is None:
                self._changes.begin(engine.membership()[3])
                engine.on_change(self._changes.tell)
        return made

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
        *,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> SharedStateSyncInfo:
        """Makes the entries equal on all members, byte for byte. All members call it.

        The highest revision that a standing member offers counts (standing: it was in the sync
        before), then the content that most have, then the longest-standing member's. Only 1 MiB
        pieces that differ move. It succeeds for all members, or without `overwrite` leaves all as
        they were.

        Args:
            shared_state: The entries. Where they differ from the elected ones they are written, and
                the revision is set. Increment the revision before the next sync.
            strategy: SEND_ONLY and RECEIVE_ONLY peers may mix with each other, not with
                ENFORCE_POPULAR.
            overwrite: What this peer receives goes straight to entries in host memory, and not
                beside them until the sync has succeeded: see `pccl.sync`.
            timeout: Seconds for the whole call. Default: PCCL_TIMEOUT, else no limit.

        Returns:
            Bytes of entries sent and received; both 0 where members were in step.

        Raises:
            PendingOperations: Handles of this communicator are not finished.
            InvalidArgument: An entry cannot be shared. Also, on all members: two entries of a
                member's state overlap and are not the same array; names peer and entries.
            MismatchedCall: Members' entries have other names, counts or dtypes, or are one array
                here and two there; names peer and entry. A newcomer with such entries is removed,
                and the members go on.
            RevisionMismatch: This newcomer's revision is ahead of the run's.
            StateUnavailable: All that had the state are gone, or nobody offers one.
            PeerLost: Another member was interrupted in this call; call again.
            Evicted: Among others: the strategies do not mix, or SEND_ONLY lost the election.
            PCCLError: Any other failure; most with the result INVALID_USAGE.
        """
        func = "sync_shared_state"
        engine = self._joined(func)
        limit = _settings.seconds(timeout, func)
        given: object = shared_state
        if not isinstance(given, SharedState):
            sentence = f"shared_state must be a SharedState, not a {type(given).__name__}"
            raise InvalidArgument.because(func, sentence)
        try:
            how = SharedStateSyncStrategy(strategy)
        except ValueError:
            raise InvalidArgument.because(func, f"no strategy {strategy!r}") from None
        entries = []
        for info in shared_state.tensor_infos:
            info._check_sharable(func, receives=how is not SharedStateSyncStrategy.SEND_ONLY)
            entries.append(_entry_of(info, func))
        revision = _settings.integer(shared_state.revision, "revision", func, 0, 2**64 - 1)
        kept: dict[str, Any] = {info.name: info._kept for info in shared_state.tensor_infos}
        try:
            synced = engine.sync(
                entries,
                level=1,
                revision=revision,
                strategy=int(how),
                progress=None,
                check=None,
                timeout=limit,
                overwrite=bool(overwrite),
            )
        except BaseException:
            for array in kept.values() if engine.overwrote() else ():
                frameworks.count_write(array)  # parts may be new
            raise
        for name in synced.written:
            frameworks.count_write(kept[name])
        for name, dtype, shape, _, data in synced.replaced:  # those on devices
            _arrays.adopt("", dtype, tuple(shape), data, _first(kept[name], math.prod(shape)))
        synced.finish()
        shared_state.revision = synced.revision  # once the entries are those of this revision
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
        """The general way of `all_reduce`. The engine calls it if a call is not plain, or wrong."""
        func = "all_reduce"
        coding = quantize.from_options(quantization_options, func)
        request = requests.make(
            func, self, send, op, out=recv, tag=tag, quantize=coding, timeout=timeout, level=1
        )
        return self._launch(request, operand_descriptor, wait=True)._finish(None)

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
        """As `all_reduce`, without waiting.

        Neither array may be touched before the handle says that it is over.

        Raises:
            TooFewPeers, InvalidArgument: As in `all_reduce`. The handle tells what fails later.
        """
        func = "all_reduce_async"
        coding = quantize.from_options(quantization_options, func)
        request = requests.make(func, self, send, op, out=recv, tag=tag, quantize=coding, level=1)
        return self._launch(request, operand_descriptor)

    def _launch(
        self, request: Request, descriptor: ReduceOperandDescriptor | None, *, wait: bool = False
    ) -> AsyncReduceHandle:
        func = request.func
        sent = only_buffer(_arrays.read(request.tree, func, "send").buffers, func, "send")
        target = _arrays.write(request.out, func, "recv")
        received = only_buffer(target.buffers, func, "recv")
        kinds, sizes = (sent.dtype, received.dtype), (sent.array.size, received.array.size)
        check_operands(func, kinds, sizes, descriptor)
        with located(func, "send"):
            check_op(sent.dtype, request.op, "")
        staging = Staging([sent], [received.array])
        signature = request.sign(trees.outlines([sent]), [])  # any shapes meet
        operation = request.start(staging.arrays, signature, wait=wait)

        def finish() -> None:
            staging.finish()
            target.finish()

        return AsyncReduceHandle(Work(self, operation, finish))

    def broadcast(
        self, array: Any, *, root: int = 0, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Copies `array` from the member of rank `root` to all members, and waits.

        Args:
            array: NumPy array or torch tensor of any dtype without Python objects,
                C-contiguous, the same shape and dtype on all members. On the others it is written;
                after a failure it is as before.
            root: Rank of the member whose elements all get.
            tag: As in `all_reduce`.
            timeout: Seconds for the whole call. None waits as long as members make progress.

        Raises:
            TooFewPeers, PeerLost, MismatchedCall: As in `all_reduce`.
            InvalidArgument: The array cannot be written in place, or there is no such rank.
        """
        kind, run = collectives.Kind.BROADCAST, collectives.broadcast_in_place
        return self._collect("broadcast", kind, run, array, array, tag, timeout, root=root)

    def all_gather(
        self, send: Any, recv: Any, *, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Puts every member's `send` into `recv`, one after the other in rank order, and waits.

        Args:
            send: NumPy array or torch tensor of any dtype without Python objects, the same
                shape and dtype on all members.
            recv: C-contiguous array of the same kind and dtype with as many times the elements of
                `send` as there are members, in any shape. After a failure it may have been written
                to. `send` may be this member's part of it.
            tag: As in `all_reduce`.
            timeout: Seconds for the whole call. None waits as long as members make progress.

        Raises:
            TooFewPeers, PeerLost, MismatchedCall, InvalidArgument: As in `all_reduce`.
        """
        kind, run = collectives.Kind.ALL_GATHER, collectives.gather_into
        return self._collect("all_gather", kind, run, send, recv, tag, timeout)

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
            send: NumPy array or torch tensor of numbers, any shape. Unchanged, unless `recv`
                is a part of it.
            recv: C-contiguous array of the same kind and dtype; `send` has as many times its
                elements as there are members. After a failure it may have been written to, unless
                it is a part of `send`.
            op: How elements are combined.
            tag: As in `all_reduce`.
            timeout: Seconds for the whole call. None waits as long as members make progress.

        Raises:
            TooFewPeers, PeerLost, MismatchedCall, InvalidArgument: As in `all_reduce`.
        """
        kind, run = collectives.Kind.REDUCE_SCATTER, collectives.reduce_into
        return self._collect("reduce_scatter", kind, run, send, recv, tag, timeout, op=op)

    def all_to_all(
        self, send: Any, recv: Any, *, tag: int = 0, timeout: float | None = None
    ) -> ReduceInfo:
        """Puts this member's part of every member's `send` into `recv`, in rank order, and waits.

        Args:
            send: NumPy array or torch tensor of any dtype without Python objects, the same shape
                and dtype on all members: an equal number of elements for each member, by rank.
            recv: C-contiguous array of the same kind, dtype and number of elements, in any shape.
                After a failure it may have been written to, unless it is `send`.
            tag: As in `all_reduce`.
            timeout: Seconds for the whole call. None waits as long as members make progress.

        Raises:
            TooFewPeers, PeerLost, MismatchedCall, InvalidArgument: As in `all_reduce`.
        """
        kind, run = collectives.Kind.ALL_TO_ALL, collectives.exchange_into
        return self._collect("all_to_all", kind, run, send, recv, tag, timeout)

    def _collect(
        self,
        func: str,
        kind: collectives.Kind,
        run: Callable[[Request], ReduceInfo],
        send: object,
        recv: object,
        tag: int,
        timeout: float | None,
        **how: Any,
    ) -> ReduceInfo:
        """Makes one native call if the engine takes the arrays as they are, else calls `run`."""
        if recv is not None:  # else `run` says what is wrong
            limit = _settings.seconds(timeout, func)
            engine = self._joined(func)
            plain = routes.collect_plain(engine, kind, send, recv, tag, limit, level=1, **how)
            if plain is not None:
                return reduce_info(plain[1])
        return run(
            requests.make(func, self, send, out=recv, tag=tag, timeout=timeout, level=1, **how)
        )

    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4
    ) -> ReduceInfo:
        """Runs several reductions and waits for all.

        When a member is lost, each runs again among the survivors.

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
        # All are checked before the first one starts.
        checked = [self._request_of(descriptor, func) for descriptor in descriptors]
        deadline = _settings.Deadline(_settings.seconds(None, func))
        running: deque[AsyncReduceHandle] = deque()
        done: list[ReduceInfo] = []
        try:
            for request, descriptor in zip(checked, descriptors, strict=True):
                if len(running) == limit:
                    done.append(running[0]._finish(deadline.left()))
                    running.popleft()
                running.append(self._launch_at_addresses(request, descriptor))
            while running:
                done.append(running[0]._finish(deadline.left()))
                running.popleft()
        except PCCLError:
            for handle in running:  # the caller's memory is in use until they are over
                with suppress(PCCLError):
                    handle._finish(deadline.left())
            raise
        except BaseException:  # Ctrl-C: the others are given up, too, for all members
            for handle in running:
                handle._abandon()
            raise
        if not done:
            return ReduceInfo(local_world_size=self._joined(func).membership()[2])
        return total(done, sum(info.attempts for info in done))

    def _request_of(self, descriptor: ReduceOpDescriptor, func: str) -> Request:
        descriptor._check_kept(func)
        what = descriptor.reduce_descriptor
        coding = quantize.from_options(what.quantization_options, func)
        request = requests.make(
            func, self, descriptor, what.op, tag=what.tag, quantize=coding, level=1
        )
        check_op(DataType(what.operand_descriptor.datatype), request.op, func)
        return request

    def _launch_at_addresses(
        self, request: Request, descriptor: ReduceOpDescriptor
    ) -> AsyncReduceHandle:
        func, what = request.func, descriptor.reduce_descriptor
        dtype = DataType(what.operand_descriptor.datatype)
        if _on_device(descriptor._kept):
            send, recv = (_first(tensor, what.count) for tensor in descriptor._kept)
            sent = only_buffer(_arrays.read(send, func, "send").buffers, func, "send")
            target = _arrays.write(recv, func, "recv")
        else:
            sent = _arrays.memory_at(descriptor.sendbuf_ptr, what.count, dtype)
            memory = _arrays.memory_at(descriptor.recvbuf_ptr, what.count, dtype)
            target = _arrays.Target([memory], lambda: None)
        received = only_buffer(target.buffers, func, "recv")
        staging = Staging([sent], [received.array])
        signature = request.sign([Entry("", dtype.label, (what.count,))], [])
        # `kept`: the descriptor has the arrays, if it was made from any.
        operation = request.start(
            staging.arrays, signature, rerun=True, wait=False, kept=descriptor
        )

        def finish() -> None:
            staging.finish()
            target.finish()

        return AsyncReduceHandle(Work(self, operation, finish))


def _on_device(kept: Sequence[object]) -> bool:
    """Whether these arrays of a descriptor, all on one device, are on an accelerator."""
    return any(frameworks.device_adapter(array) is not None for array in kept)


def _first(tensor: Any, count: int) -> Any:
    """The first elements of a contiguous tensor, sharing its memory, flat and apart from a graph.

    Not by `view(-1)`: see `adapters.torch.tensors`.
    """
    return tensor.detach().as_strided((count,), (1,))


def _entry_of(info: TensorInfo, func: str) -> _state.Entry:
    """An entry for the engine: with its memory, or with a copy of that of a device."""
    name, kind, loose = info.name, info.dtype.label, info.allow_content_inequality
    if not _on_device([info._kept]):
        data = _arrays.memory_at(info.data_ptr, info.numel, info.dtype).array
        return name, kind, (info.numel,), "", loose, data, True, None
    with located(func, name):
        shared = _arrays.share(_first(info._kept, info.numel))
    return name, kind, (info.numel,), "", loose, shared.data, False, shared.place


class AsyncReduceHandle:
    """An explicit-API reduction in flight. Any thread may wait, as often as it likes."""

    def __init__(self, work: Work[None]) -> None:
        self._work = work
        self._error: PCCLError | None = None

    def _finish(self, timeout: float | None) -> ReduceInfo:
        """Waits and raises the failure."""
        self._work._wait(timeout, "wait")
        return self._work.info

    def wait(self) -> tuple[bool, int, ReduceInfo]:
        """Waits until the reduction is over. Never raises, except for Ctrl-C.

        Returns:
            (success, the result code, info). After a failure info is all zero, and `exception()`
            tells the cause.
        """
        if self._error is None:
            try:
                return True, int(Result.SUCCESS), self._finish(_settings.seconds(None, "wait"))
            except PCCLError as error:
                # Its traceback has this call, and so this object, in a cycle.
                self._error = error.with_traceback(None)
        return False, int(self._error.result), ReduceInfo()

    def _abandon(self) -> None:
        """Ends it for all members, so that its arrays are free. Takes about a second at most."""
        with suppress(PCCLError, KeyboardInterrupt):
            self._work._wait(0.0)

    def done(self) -> bool:
        """Whether `wait` would return without waiting for others.

        A `recv` that is on an accelerator or not contiguous is filled only by `wait`.
        """
        return self._error is not None or self._work.done()

    def exception(self) -> PCCLError | None:
        """Waits, and returns the failure; None after a success."""
        self.wait()
        return self._error
