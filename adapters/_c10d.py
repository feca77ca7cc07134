"""The torch.distributed backend "pccl": a process group whose collectives are pccl operations.

Every c10d group is a pccl group of its own, with a fixed world: what a collective promises, such as the
mean that DDP makes of a sum, holds for all members or for none. So a lost member ends the group, and
every later collective says so; programs that go on without it use `pccl.allreduce` or `ddp_hook`.

Collectives run in the order in which they were called, as c10d asks of all members: asynchronous ones on
the group's thread, synchronous ones where they were called if nothing is before them.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pccl import _settings
from pccl._halves import Kind
from pccl.communicator import Communicator, MasterNode
from pccl.errors import (
    Evicted,
    InvalidUsage,
    MasterLost,
    NotSupported,
    PCCLError,
    PeerLost,
    Result,
    Timeout,
    TooFewPeers,
    Unreachable,
)
from pccl.types import DataType, ReduceOp

__all__ = ["ProcessGroup", "create"]

Bytes = npt.NDArray[np.uint8]

_FAREWELL = timedelta(
    seconds=10
)  # how long a member that runs the master waits for the others to leave
_TAG = 0  # of all collectives: calls of one tag meet by order, whatever thread makes them

_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def create(options: Any, _: Any = None) -> ProcessGroup:
    """Makes this process's part of a group; what c10d calls for backend "pccl"."""
    group = ProcessGroup(options)
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


# The master that this process runs for the groups whose first rank it is, when PCCL_MASTER is not set. Its
# end ends them, as does the end of any member.
class _Master:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._node: MasterNode | None = None
        self._groups = 0

    def acquire(self, host: str) -> str:
        with self._lock:
            if self._node is None:
                node = MasterNode(f"{host}:0")
                node.run()
                self._node = node
            self._groups += 1
            return self._node.address

    def release(self) -> None:
        with self._lock:
            self._groups -= 1
            if self._groups == 0 and self._node is not None:
                node, self._node = self._node, None
                node.interrupt()


_master = _Master()


def _own_host(first_of_job: bool) -> str:
    """An address of this host that the group's other members reach."""
    name = _settings.text("PCCL_BIND")
    if name is None and first_of_job:
        name = _settings.text("MASTER_ADDR")  # of the job's first rank, by torch's convention
    family, _, _, _, address = socket.getaddrinfo(
        name or socket.gethostname(), 0, type=socket.SOCK_STREAM
    )[0]
    return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])


class _Work(dist.Work):  # type: ignore[misc]  # torch is not typed
    """A collective under way. *any thread*"""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._results = list(results)
        self._over = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def finish(self, error: Exception | None) -> None:
        with self._lock:
            self._error = error
            self._over.set()
            future = self._future
        if future is not None:
            future.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout.total_seconds()
        if not self._over.wait(limit if limit > 0 else None):
            raise Timeout.because("wait", f"the collective is not over after {limit} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._over.is_set():
                    self._future.set_result(None)
            future = self._future

        # Only an error that a callback raises is one to DDP's reducer, in C++: `set_exception` makes it a
        # value, which the reducer takes for tensors.
        def outcome(_: Any) -> list[torch.Tensor]:
            if self._error is not None:
                raise self._error
            return self._results

        return future.then(outcome)


class _Array(NamedTuple):
    """A tensor's elements in CPU memory, contiguous.

    Attributes:
        data: Their bytes: the tensor's own memory where it is contiguous there, else a copy.
        tensor: The tensor.
        copy: The copy; None where there is none.
    """

    data: Bytes
    tensor: torch.Tensor
    copy: torch.Tensor | None

    def write_back(self) -> None:
        """After `data` was written: the tensor has the new elements, too."""
        if self.copy is not None:
            self.tensor.copy_(self.copy)


def _bytes(tensor: torch.Tensor) -> Bytes:
    made: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return made


def _array(tensor: torch.Tensor, *, read: bool = True) -> _Array:
    """A tensor for the engine. `read`: its elements matter; else they are only written."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise NotSupported.because("", "backend pccl takes dense tensors only")
    plain = tensor.detach()
    own = plain.device.type == "cpu" and plain.is_contiguous()
    if own and not plain.is_neg() and not plain.is_conj():
        return _Array(_bytes(plain), plain, None)
    copy = torch.empty(plain.shape, dtype=plain.dtype)
    if read:
        copy.copy_(plain)
    return _Array(_bytes(copy), plain, copy)


def _names(tensors: Sequence[torch.Tensor]) -> str:
    """Tensors in a few words, for error sentences."""
    shown = [
        f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"
        for tensor in tensors[:3]
    ]
    return ", ".join(shown) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")


_OPS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVG,
    dist.ReduceOp.PRODUCT: ReduceOp.PROD,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
}
# Of truth values, as bytes of 0 and 1.
_BOOL_OPS = {
    dist.ReduceOp.SUM: ReduceOp.MAX,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BOR: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.MIN,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.BAND: ReduceOp.MIN,
}


def _operation(op: Any, dtype: torch.dtype, func: str) -> tuple[ReduceOp, DataType]:
    """What the engine does for a reduction of c10d."""
    ops = _BOOL_OPS if dtype == torch.bool else _OPS
    found = next((ours for theirs, ours in ops.items() if op == theirs), None)
    if found is None:
        name = getattr(op, "op", op)
        raise NotSupported.because(func, f"backend pccl has no {name} of {dtype}")
    if dtype == torch.bool:
        return found, DataType.UINT8
    return found, DataType.from_torch_dtype(dtype)


class _Exchange:
    """One group's operations on the engine: blocking, one at a time, in the members' common order.

    pccl ranks members in the order in which they came, c10d as it likes: `order` has the pccl rank of each.
    """

    def __init__(self, comm: Communicator, rank: int, order: Sequence[int]) -> None:
        self._comm = comm
        self._rank = rank
        self._size = len(order)
        self._order = list(order)
        self._sorted = self._order == sorted(self._order)

    def all_reduce(
        self,
        arrays: Sequence[tuple[Bytes, Bytes, DataType]],
        op: ReduceOp,
        what: str,
        timeout: float | None,
        tag: int = _TAG,
    ) -> None:
        """(send, recv, dtype) each; `what` must be equal on all members, and names the call in errors."""
        self._run(arrays, what, timeout, op=op, tag=tag)

    def broadcast(
        self, arrays: Sequence[Bytes], root: int, what: str, timeout: float | None
    ) -> None:
        in_place = [(array, array, DataType.UINT8) for array in arrays]
        self._run(in_place, what, timeout, kind=Kind.BROADCAST, root=self._order[root])

    def all_gather(
        self, pairs: Sequence[tuple[Bytes, Bytes]], what: str, timeout: float | None
    ) -> None:
        """(send, recv) each: `recv` gets all members' `send` in rank order. `send` may be its own part."""
        wholes = [recv if self._sorted else np.empty_like(recv) for _, recv in pairs]
        arrays = [
            (self._apart(send, whole), whole, DataType.UINT8)
            for (send, _), whole in zip(pairs, wholes, strict=True)
        ]
        self._run(arrays, what, timeout, kind=Kind.ALL_GATHER)
        for (_, recv), whole in zip(pairs, wholes, strict=True):
            if whole is not recv:
                recv.reshape(self._size, -1)[:] = whole.reshape(self._size, -1)[self._order]

    def reduce_scatter(
        self,
        arrays: Sequence[tuple[Bytes, Bytes, DataType]],
        op: ReduceOp,
        what: str,
        timeout: float | None,
    ) -> None:
        """(send, recv, dtype) each: `recv` gets this rank's part of the reduced `send`."""
        ordered = [
            (self._by_pccl_rank(send, np.may_share_memory(send, recv)), recv, dtype)
            for send, recv, dtype in arrays
        ]
        self._run(ordered, what, timeout, op=op, kind=Kind.REDUCE_SCATTER)

    def _apart(self, send: Bytes, whole: Bytes) -> Bytes:
        """The engine takes what is its own part of the whole, or does not overlap it."""
        own = whole.reshape(self._size, send.size)[self._rank]
        exactly = own.ctypes.data == send.ctypes.data
        return send if exactly or not np.may_share_memory(send, whole) else send.copy()

    def _by_pccl_rank(self, send: Bytes, overlaps: bool) -> Bytes:
        if self._sorted:
            return send.copy() if overlaps else send
        made = np.empty_like(send)
        made.reshape(self._size, -1)[self._order] = send.reshape(self._size, -1)
        return made

    def _run(
        self,
        arrays: Sequence[tuple[Bytes, Bytes, DataType]],
        what: str,
        timeout: float | None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = _TAG,
        kind: int = 0,
        root: int = 0,
    ) -> None:
        deadline = _settings.Deadline(timeout)
        func = what.partition(" ")[0]
        operation = self._comm._joined(func).start(
            [(send, recv, int(dtype)) for send, recv, dtype in arrays],
            op=int(op),
            tag=tag,
            level=1,
            rerun=False,
            structure=what.encode(),
            description=what,
            timeout=deadline.left(),
            kind=int(kind),
            root=root,
            parts=self._size,
        )
        info = operation.wait(deadline.left())
        if info.world_size != self._size:  # a member was lost before: the result lacks its part
            raise PeerLost.because(func, f"made with {info.world_size} of {self._size} members")


class _Alone(_Exchange):
    """A group of one."""

    def __init__(self) -> None:
        self._rank, self._size, self._order, self._sorted = 0, 1, [0], True

    def _run(
        self,
        arrays: Sequence[tuple[Bytes, Bytes, DataType]],
        what: str,
        timeout: float | None,
        **options: object,
    ) -> None:
        for send, recv, _ in arrays:
            if recv is not send:
                recv[:] = send


class _Gone(_Alone):
    """What is left of a group that was destroyed. torch keeps process groups in places; not so their peers."""

    def _run(
        self,
        arrays: Sequence[tuple[Bytes, Bytes, DataType]],
        what: str,
        timeout: float | None,
        **options: object,
    ) -> None:
        raise InvalidUsage.because(what.partition(" ")[0], _DESTROYED)

    def broadcast(
        self, arrays: Sequence[Bytes], root: int, what: str, timeout: float | None
    ) -> None:
        self._run([], what, timeout)

    def all_gather(
        self, pairs: Sequence[tuple[Bytes, Bytes]], what: str, timeout: float | None
    ) -> None:
        self._run([], what, timeout)


_JOINING = "init_process_group"
_DESTROYED = "this process group was destroyed"
_ENDING = 15.0  # seconds that threads of a group that is gone may take; longer than the farewell


def _await_end(thread: threading.Thread) -> None:
    # The interpreter cuts off threads that outlive it wherever they are; inside of torch's C++, that is an abort.
    if thread is not threading.current_thread():
        thread.join(_ENDING)


class _Queue:
    """Runs a group's jobs in the order in which they were given. *any thread*"""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held while a job runs
        self._unfinished = 0
        self._closed = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[[], None], *, here: bool) -> None:
        """Runs `job` after all before it: on this thread if `here` and nothing is before it, else on the queue's."""
        with self._lock:
            if self._closed:
                raise InvalidUsage.because(_JOINING, _DESTROYED)
            here = here and self._unfinished == 0
            self._unfinished += 1
            if not here:
                self._jobs.put(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                return
            self._turn.acquire()
        try:
            job()
        finally:
            self._turn.release()
            with self._lock:
                self._unfinished -= 1

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            with self._turn:
                job()
            del job  # lets its tensors go
            with self._lock:
                self._unfinished -= 1

    def close(self) -> None:
        """Ends its thread after the jobs given so far, and waits for that."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            _await_end(thread)


class _Member:
    """This process as one of the fixed members of a pccl group, found through the c10d store. *any thread*

    Keys in the store: "group" (the pccl group's number, and the master's address if a member runs it); with
    that number before them, for each rank "here/<rank>" (a word of its own), "peer/<rank>" (its peer id) and
    "left/<rank>", and "all" (the words that rank 0 has read). Whatever an earlier life of the job has left in
    the store is told from these: torchrun may start the ranks again with the store that they had.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        members: str,
        rank: int,
        size: int,
        timeout: float,
        first_of_job: bool,
        word: str,
    ) -> None:
        self.size = size
        self._store = store
        self._name = f"{name}|{members}|"
        self._number = -1  # of the pccl group; none yet
        self._rank = rank
        self._timeout = timeout
        self._first_of_job = first_of_job
        self._word = word
        self._master_inside = False
        self._serves = False
        self._comm: Communicator | None = None
        self._peers: list[str] = []  # ids, by rank
        self.order: list[int] = []  # pccl's ranks, by rank; empty until `join` is over
        self._present: list[int] = []  # ranks that were members when this one left
        self._left = threading.Event()
        self._lock = threading.Lock()  # guards _serves, _comm and the setting of _left

    @property
    def comm(self) -> Communicator:
        assert self._comm is not None, "join first"
        return self._comm

    def join(self) -> None:
        """Founds the group, or joins it; returns when all are there. Ends with an error when this member leaves."""
        if self.order:
            return
        deadline = _settings.Deadline(self._timeout)
        try:
            address = self._meet(deadline)
            with self._lock:
                self._check_not_left()
                self._comm = Communicator(address, peer_group=self._number)
            self._comm._join(
                _JOINING,
                min_peers=self.size,
                attempts=30,
                timeout=deadline.left(),
                enter=False,
            )
            engine = self._comm._joined(_JOINING)
            self._store.set(self._key("peer", self._rank), engine.peer_id())
            self._peers = [self._read("peer", other, deadline) for other in range(self.size)]
            present = engine.membership()[3]
            if set(present) != set(self._peers):
                sentence = f"peers that are not of this job are in pccl group {self._number}"
                raise InvalidUsage.because(_JOINING, sentence)
            self.order = [present.index(peer) for peer in self._peers]
        except BaseException:
            self.close()
            raise

    def _meet(self, deadline: _settings.Deadline) -> str:
        """Agrees with the other ranks on the group's number; returns its master's address."""
        address = _settings.text("PCCL_MASTER")
        if self._rank == 0:
            where = f"outside {address}" if address else f"inside {self._serve()}"
            # Random: one master may serve many jobs, and jobs have the same names for their groups.
            key = self._name.encode() + os.urandom(16)
            self._number = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big")
            self._store.set("group", f"{self._number} {where}")
            words = [self._read("here", other, deadline) for other in range(1, self.size)]
            self._store.set(self._key("all"), " ".join(words))
        else:
            where = self._find(deadline)
        where, given = where.split(" ")
        self._master_inside = where == "inside"
        return given if self._master_inside or not address else address

    def _find(self, deadline: _settings.Deadline) -> str:
        """Where the master is of the group that rank 0 founds now: the one in which it answers this one's word."""
        where = ""

        def answered() -> bool:
            nonlocal where
            group = self._get("group")
            if group is None:
                return False
            number, where = group.split(" ", 1)
            if int(number) != self._number:  # the first, or what follows one of an earlier life
                self._number = int(number)
                self._store.set(self._key("here", self._rank), self._word)
            return self._word in (self._get(self._key("all")) or "").split(" ")

        self._poll(answered, deadline)
        return where

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{self._number}/{what}" if rank is None else f"{self._number}/{what}/{rank}"

    def _get(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value.decode()

    def _read(self, what: str, rank: int, deadline: _settings.Deadline) -> str:
        """What a rank has set."""
        key = self._key(what, rank)
        self._poll(lambda: bool(self._store.check([key])), deadline)
        value: bytes = self._store.get(key)
        return value.decode()

    def _poll(self, is_there: Callable[[], bool], deadline: _settings.Deadline) -> None:
        """The store's own waiting could not be interrupted."""
        pause = 0.001
        while not is_there():
            self._check_not_left()
            if deadline.left() == 0:
                sentence = f"the group's other ranks did not all come within {self._timeout:g} s"
                raise Timeout.because(_JOINING, sentence)
            self._left.wait(pause)
            pause = min(2 * pause, 0.1)

    def _check_not_left(self) -> None:
        if self._left.is_set():
            raise InvalidUsage.because(_JOINING, _DESTROYED)

    def _serve(self) -> str:
        try:
            address = _master.acquire(_own_host(self._first_of_job))
        except (OSError, PCCLError) as error:
            sentence = (
                f"could not start a master for this group: {error}; set PCCL_BIND to an address of this "
                "host that the others reach, or start `pccl master` and set PCCL_MASTER"
            )
            raise InvalidUsage.because("init_process_group", sentence) from error
        with self._lock:
            self._serves = True
        return address

    def loss(self, error: PCCLError) -> PCCLError | None:
        """What ends this group for good, if `error` means that: to be raised by every later call."""
        func = error.func_name
        if isinstance(error, MasterLost) and self._master_inside:
            sentence = "rank 0, which ran the group's master, is gone"
            return self._lost(func, sentence, 0)
        if isinstance(error, MasterLost | Evicted | Unreachable):
            return error
        if not isinstance(error, PeerLost | TooFewPeers):
            return None
        try:
            present = set(self.comm._joined(func).membership()[3])
        except PCCLError:  # another thread has closed it
            return None
        gone = [rank for rank, peer in enumerate(self._peers) if peer not in present]
        if not gone:
            return None
        named = "rank " + str(gone[0]) if len(gone) == 1 else f"ranks {gone}"
        sentence = f"{named} of {self.size} {'is' if len(gone) == 1 else 'are'} gone"
        return self._lost(func, sentence, gone[0])

    def _lost(self, func: str, sentence: str, rank: int) -> PeerLost:
        advice = "a c10d group has a fixed world: make new groups, or restart the job"
        code = Result.RANK_CONNECTION_LOST
        return PeerLost(code, func, f"{sentence}; {advice}", peer=self._peers[rank])

    def leave(self) -> None:
        """The others see a departure. May be called again."""
        with self._lock:
            if self._left.is_set():
                return
            self._left.set()
            comm = self._comm
        if comm is not None:
            with suppress(PCCLError):
                present = comm._joined("shutdown").membership()[3]
                self._present = [r for r, peer in enumerate(self._peers) if peer in present]
            comm.close()
        with suppress(Exception):  # the store's process may be gone
            self._store.set(self._key("left", self._rank), "1")

    def close(self) -> None:
        """Leaves; and who runs the master waits a while until the others have left."""
        self.leave()
        with self._lock:
            serves, self._serves = self._serves, False
        if serves:
            with suppress(Exception):  # who does not leave in time is cut off
                self._store.wait([self._key("left", rank) for rank in self._present], _FAREWELL)
            _master.release()


class _Channel:
    """Messages between two ranks: a pccl group of these two, founded by the first of them."""

    def __init__(self, make: Callable[[], _Member], is_lower: bool, name: str) -> None:
        self._make = make
        self._is_lower = is_lower
        self._queue = _Queue(name)
        self._threads: set[threading.Thread] = set()  # that wait for a message
        self._lock = threading.Lock()  # guards the two below
        self._closed = False
        self._member: _Member | None = None

    def _joined(self) -> _Member:
        with self._lock:
            if self._closed:
                raise InvalidUsage.because(_JOINING, _DESTROYED)
            member = self._member = self._member or self._make()
        try:
            member.join()
        except BaseException:
            with self._lock:
                self._member = None  # the next message tries again
            raise
        return member

    def run(self, work: _Work, array: _Array, *, sends: bool, tag: int, timeout: float) -> None:
        # Which of them sends is part of the tag, so that both may send at once.
        key = 2 * tag + (sends == self._is_lower)
        data = array.data if sends else np.zeros_like(array.data)

        def finish(operation: Any, size: int) -> None:
            try:
                info = operation.wait(timeout)
                if info.world_size != size:
                    raise PeerLost.because("send" if sends else "recv", "the other rank is gone")
                if not sends:
                    array.write_back()
            except Exception as error:
                work.finish(error)
            else:
                work.finish(None)

        def start() -> None:
            try:
                member = self._joined()
                operation = member.comm._joined("send").start(
                    [(data, data if sends else array.data, int(DataType.UINT8))],
                    op=int(ReduceOp.SUM),
                    tag=key,
                    level=1,
                    rerun=False,
                    structure=b"message",
                    description=f"a message of {data.size} bytes with tag {tag}",
                    timeout=timeout,
                )
            except Exception as error:
                work.finish(error)
                return
            end = (operation, member.size)
            thread = threading.Thread(target=finish, args=end, name="pccl message", daemon=True)
            self._threads = {other for other in self._threads if other.is_alive()} | {thread}
            thread.start()

        self._queue.run(start, here=False)

    def leave(self) -> None:
        """Messages that are under way end with an error, those that wait for the other rank, too."""
        with self._lock:
            self._closed = True
            member = self._member
        if member is not None:
            member.leave()

    def close(self) -> None:
        self.leave()
        with self._lock:
            member = self._member
        if member is not None:
            member.close()
        self._queue.close()  # after that, nobody adds a thread
        for thread in self._threads:
            _await_end(thread)


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
        self._timeout = options.timeout
        self._name = str(options.group_id)
        self._desc = "undefined"
        self._members = list(options.global_ranks_in_group) or list(range(size))
        self._queue = _Queue(f"pccl {self._name}")
        self._lost: PCCLError | None = None
        self._closed = False
        self._channels: dict[int, _Channel] = {}
        self._member: _Member | None = None
        self._word = os.urandom(8).hex()  # this life's, whichever attempt to meet the others it is
        self._exchange: _Exchange = _Alone()
        if size > 1:
            self._member = self._make_member(self._store, "", self._members, rank)
            self._member.join()
            self._exchange = _Exchange(self._member.comm, rank, self._member.order)

    def _make_member(self, store: Any, suffix: str, members: Sequence[int], rank: int) -> _Member:
        return _Member(
            store,
            self._name + suffix,
            ",".join(map(str, members)),
            rank,
            len(members),
            self._timeout.total_seconds(),
            members[0] == 0,
            self._word,
        )

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

    def _parts(self) -> list[_Member | _Channel]:
        channels = list(self._channels.values())
        return [*channels, self._member] if self._member is not None else [*channels]

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
        self._exchange = _Gone()
        self._member = None
        self._channels = {}

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
        written: Sequence[_Array] = (),
        finish: Callable[[], None] | None = None,
    ) -> _Work:
        """A collective: `exchange(timeout)`, then copies back what is not `written` in place, then `finish`."""
        self._check_open(func)
        work = _Work(results)
        timeout = self._seconds(options)

        def job() -> None:
            try:
                if self._lost is not None:
                    raise self._lost
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
            raise InvalidUsage.because(func, _DESTROYED)

    def _judge(self, error: PCCLError) -> PCCLError:
        """What the caller gets for an engine's error; what ends the group is kept for all later calls."""
        if self._lost is None and self._member is not None and not self._closed:
            self._lost = self._member.loss(error)
        return self._lost or error

    def _what(self, func: str, tensors: Sequence[torch.Tensor], op: object = "") -> str:
        return f"{func} of {_names(tensors)}" + (f", {op}" if op else "")

    # Collectives.

    def _reduce_all(self, func: str, tensors: Sequence[torch.Tensor], options: Any) -> _Work:
        op, _ = _operation(options.reduceOp, tensors[0].dtype, func)
        arrays = [_array(tensor) for tensor in tensors]
        dtypes = [_operation(options.reduceOp, tensor.dtype, func)[1] for tensor in tensors]
        what = self._what(func, tensors, op.name)

        def exchange(timeout: float) -> None:
            in_place = [(a.data, a.data, dtype) for a, dtype in zip(arrays, dtypes, strict=True)]
            self._exchange.all_reduce(in_place, op, what, timeout)

        return self._run(func, options, tensors, exchange, arrays)

    def allreduce(self, tensors: Any, opts: Any = None) -> _Work:
        return self._reduce_all("allreduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> _Work:
        options = opts or dist.AllreduceCoalescedOptions()
        if len({tensor.dtype == torch.bool for tensor in tensors}) > 1:
            raise NotSupported.because("allreduce_coalesced", "bool and other dtypes in one call")
        return self._reduce_all("allreduce_coalesced", tensors, options)

    def reduce(self, tensors: Any, opts: Any) -> _Work:
        (tensor,) = tensors
        op, dtype = _operation(opts.reduceOp, tensor.dtype, "reduce")
        array = _array(tensor)
        is_root = self._rank == opts.rootRank
        target = array.data if is_root else np.empty_like(array.data)
        what = self._what(f"reduce to {opts.rootRank}", tensors, op.name)

        def exchange(timeout: float) -> None:
            self._exchange.all_reduce([(array.data, target, dtype)], op, what, timeout)

        return self._run("reduce", opts, tensors, exchange, [array] if is_root else [])

    def broadcast(self, tensors: Any, opts: Any) -> _Work:
        is_root = self._rank == opts.rootRank
        arrays = [_array(tensor, read=is_root) for tensor in tensors]
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
    ) -> _Work:
        """Every output gets all members' inputs of its place, one after the other."""
        for output, own in zip(outputs, inputs, strict=True):
            if output.dtype != own.dtype or output.numel() != own.numel() * self._size:
                sentence = f"{_names([output])} does not hold {self._size} times {_names([own])}"
                raise ValueError(f"{func}: {sentence}")
        pairs = [
            (_array(own), _array(output, read=False))
            for output, own in zip(outputs, inputs, strict=True)
        ]
        what = self._what(func, inputs)

        def exchange(timeout: float) -> None:
            self._exchange.all_gather([(s.data, r.data) for s, r in pairs], what, timeout)

        return self._run(func, options, outputs, exchange, [recv for _, recv in pairs])

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> _Work:
        return self._gather_all(
            "all_gather_single", [output], [input], opts or dist.AllgatherOptions()
        )

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        options = opts or dist.AllgatherOptions()
        return self._gather_all("all_gather_single_coalesced", outputs, inputs, options)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_lists(
        self, func: str, lists: Sequence[Any], inputs: Sequence[torch.Tensor], options: Any
    ) -> _Work:
        """As `_gather_all`, to a list of tensors for each input, or none where nobody asks."""
        arrays = [_array(own) for own in inputs]
        wholes = [np.empty(self._size * array.data.size, np.uint8) for array in arrays]
        what = self._what(func, inputs)
        for outputs, own in zip(lists, inputs, strict=True):
            if len(outputs) not in (0, self._size):
                raise ValueError(f"{func}: {len(outputs)} outputs for {self._size} ranks")
            if any(o.dtype != own.dtype or o.numel() != own.numel() for o in outputs):
                raise ValueError(
                    f"{func}: {_names(outputs)} cannot take {_names([own])} of each rank"
                )

        def exchange(timeout: float) -> None:
            pairs = [(a.data, whole) for a, whole in zip(arrays, wholes, strict=True)]
            self._exchange.all_gather(pairs, what, timeout)

        def finish() -> None:
            for outputs, whole in zip(lists, wholes, strict=True):
                for output, part in zip(outputs, np.split(whole, self._size), strict=False):
                    _write(output, part)

        flat = [output for outputs in lists for output in outputs]
        return self._run(func, options, flat, exchange, finish=finish)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> _Work:
        options = opts or dist.AllgatherOptions()
        return self._gather_lists("allgather", output_tensors, input_tensors, options)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> _Work:
        options = opts or dist.AllgatherOptions()
        return self._gather_lists("allgather_coalesced", output_lists, input_list, options)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> _Work:
        lists = output_tensors if self._rank == opts.rootRank else [[] for _ in input_tensors]
        return self._gather_lists(f"gather to {opts.rootRank}", lists, input_tensors, opts)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> _Work:
        (output,) = output_tensors
        size = output.numel() * output.element_size()
        whole = np.zeros(self._size * size, np.uint8)
        if self._rank == opts.rootRank:
            (parts,) = input_tensors
            if any(p.dtype != output.dtype or p.numel() != output.numel() for p in parts):
                raise ValueError(f"scatter: {_names(parts)} do not fit {_names([output])}")
            whole = np.concatenate([_array(part).data for part in parts])
        what = self._what("scatter", output_tensors)

        def exchange(timeout: float) -> None:
            self._exchange.broadcast([whole], opts.rootRank, what, timeout)

        def finish() -> None:
            _write(output, np.split(whole, self._size)[self._rank])

        return self._run("scatter", opts, output_tensors, exchange, finish=finish)

    def _scatter_reduced(
        self,
        func: str,
        outputs: Sequence[torch.Tensor],
        sends: Sequence[Bytes],
        dtypes_in: Sequence[torch.dtype],
        options: Any,
    ) -> _Work:
        """Every output gets this rank's part of the reduced bytes of its place."""
        for output, given in zip(outputs, dtypes_in, strict=True):
            if output.dtype != given:
                raise ValueError(f"{func}: {given} cannot be reduced into {_names([output])}")
        op, _ = _operation(options.reduceOp, outputs[0].dtype, func)
        dtypes = [_operation(options.reduceOp, output.dtype, func)[1] for output in outputs]
        arrays = [_array(output, read=False) for output in outputs]
        for output, array, send in zip(outputs, arrays, sends, strict=True):
            if send.size != array.data.size * self._size:
                elements = send.size // output.element_size()
                sentence = f"{elements} elements are not {self._size} times {_names([output])}"
                raise ValueError(f"{func}: {sentence}")
        what = self._what(func, outputs, op.name)

        def exchange(timeout: float) -> None:
            triples = [
                (send, array.data, dtype)
                for send, array, dtype in zip(sends, arrays, dtypes, strict=True)
            ]
            self._exchange.reduce_scatter(triples, op, what, timeout)

        return self._run(func, options, outputs, exchange, arrays)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> _Work:
        options = opts or dist.ReduceScatterOptions()
        sends = [np.concatenate([_array(part).data for part in parts]) for parts in input_tensors]
        dtypes = [
            next((part.dtype for part in parts if part.dtype != output.dtype), output.dtype)
            for parts, output in zip(input_tensors, output_tensors, strict=True)
        ]
        return self._scatter_reduced("reduce_scatter", output_tensors, sends, dtypes, options)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> _Work:
        return self._scatter_reduced(
            "reduce_scatter_single",
            [output],
            [_array(input).data],
            [input.dtype],
            opts or dist.ReduceScatterOptions(),
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        options = opts or dist.ReduceScatterOptions()
        sends = [_array(tensor).data for tensor in inputs]
        dtypes = [tensor.dtype for tensor in inputs]
        func = "reduce_scatter_single_coalesced"
        return self._scatter_reduced(func, outputs, sends, dtypes, options)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> _Work:
        token = np.zeros(1, np.uint8)

        def exchange(timeout: float) -> None:
            self._exchange.all_reduce(
                [(token, token, DataType.UINT8)], ReduceOp.SUM, "barrier", timeout
            )

        return self._run("barrier", opts or dist.BarrierOptions(), [], exchange)

    # Messages.

    def _channel(self, other: int) -> _Channel:
        if other not in self._channels:
            lower, higher = sorted((self._rank, other))
            # Of its own connection: one that waits for a key keeps others from using it.
            store = dist.PrefixStore(f"{lower}-{higher}/", self._store.clone())
            members = [self._members[lower], self._members[higher]]
            own = 0 if self._rank == lower else 1
            self._channels[other] = _Channel(
                lambda: self._make_member(store, f" {lower}-{higher}", members, own),
                own == 0,
                f"pccl {self._name} {lower}-{higher}",
            )
        return self._channels[other]

    def _message(self, func: str, tensors: Any, other: int, tag: int) -> _Work:
        self._check_open(func)
        if other == self._rank:
            raise ValueError(f"{func}: rank {other} is this rank")
        (tensor,) = tensors
        work = _Work(tensors)
        sends = func == "send"
        timeout = self._timeout.total_seconds()
        self._channel(other).run(
            work, _array(tensor, read=sends), sends=sends, tag=tag, timeout=timeout
        )
        return work

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> _Work:
        return self._message("send", tensors, dst_rank, tag)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> _Work:
        return self._message("recv", tensors, src_rank, tag)

    # What it does not do.

    def recv_anysource(self, tensors: Any, tag: int = 0) -> _Work:
        raise NotSupported.because("recv", "backend pccl receives from a given rank only: pass src")

    def all_to_all_single(self, *_: Any, **__: Any) -> _Work:
        raise NotSupported.because("all_to_all_single", "backend pccl has no all_to_all_single")

    alltoall_base = all_to_all_single

    def alltoall(self, *_: Any, **__: Any) -> _Work:
        raise NotSupported.because("all_to_all", "backend pccl has no all_to_all")

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        raise NotSupported.because("monitored_barrier", "backend pccl has no monitored_barrier")

    def split_group(self, *_: Any, **__: Any) -> None:
        raise NotSupported.because("split_group", "backend pccl has no split_group; use new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> None:
        raise NotSupported.because("merge_remote_group", "backend pccl has no merge_remote_group")


def _write(tensor: torch.Tensor, data: Bytes) -> None:
    """Gives a tensor of any layout and device these elements, in logical order."""
    array = _array(tensor, read=False)
    array.data[:] = data
    array.write_back()
