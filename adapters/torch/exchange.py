"""A c10d group's operations on the engine, in c10d's rank order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pccl import _settings
from pccl.adapters.torch.composed import named, reduce_bits
from pccl.adapters.torch.tensor_bytes import Bitwise, Bytes
from pccl.adapters.torch.work import DESTROYED
from pccl.collectives import Kind
from pccl.communicator import Communicator
from pccl.errors import InvalidUsage, PeerLost
from pccl.types import DataType, ReduceOp

_TAG = 0  # of all collectives: calls of one tag meet by order, whatever thread makes them


class Exchange:
    """One group's operations on the engine: blocking, one at a time, in the members' common order.

    pccl ranks members by their arrival, c10d by its own rules: `order` has the pccl rank of each.
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
        op: ReduceOp | Bitwise,
        what: str,
        timeout: float | None,
    ) -> None:
        """(send, recv, dtype) each. `what` names the call; it must be equal on all members."""
        if isinstance(op, Bitwise):
            pairs = [(send, recv) for send, recv, _ in arrays]
            reduce_bits(self, pairs, op, self._size, None, what, timeout)
        else:
            self._run(arrays, what, timeout, op=op)

    def broadcast(
        self, arrays: Sequence[Bytes], root: int, what: str, timeout: float | None
    ) -> None:
        in_place = [(array, array, DataType.UINT8) for array in arrays]
        self._run(in_place, what, timeout, kind=Kind.BROADCAST, root=self._order[root])

    def all_gather(
        self, pairs: Sequence[tuple[Bytes, Bytes]], what: str, timeout: float | None
    ) -> None:
        """(send, recv) each: `recv` gets all members' `send` by rank. `send` may lie in `recv`."""
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
        op: ReduceOp | Bitwise,
        what: str,
        timeout: float | None,
    ) -> None:
        """(send, recv, dtype) each: `recv` gets this rank's part of the reduced `send`."""
        if isinstance(op, Bitwise):
            pairs = [(send, recv) for send, recv, _ in arrays]
            reduce_bits(self, pairs, op, self._size, self._rank, what, timeout)
            return
        ordered = [
            (self._by_pccl_rank(send, np.may_share_memory(send, recv)), recv, dtype)
            for send, recv, dtype in arrays
        ]
        self._run(ordered, what, timeout, op=op, kind=Kind.REDUCE_SCATTER)

    def _apart(self, send: Bytes, whole: Bytes) -> Bytes:
        """`send`, copied unless it is exactly its own part of `whole` or does not overlap it."""
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
        kind: int = 0,
        root: int = 0,
    ) -> None:
        deadline = _settings.Deadline(timeout)
        func = what.partition(" ")[0]
        operation = self._comm._joined(func).start(
            [(send, recv, int(dtype)) for send, recv, dtype in arrays],
            op=int(op),
            tag=_TAG,
            level=1,
            any_thread=True,
            rerun=False,
            structure=what.encode(),
            description=what,
            timeout=deadline.left(),
            kind=int(kind),
            root=root,
            parts=self._size,
        )
        with named(func):  # the engine names its own function
            info = operation.wait(deadline.left())
        if info.world_size != self._size:  # a member was lost before: the result lacks its part
            raise PeerLost.because(func, f"made with {info.world_size} of {self._size} members")


class Alone(Exchange):
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


class Gone(Alone):
    """A destroyed group. torch may keep the process group, but its connections have ended."""

    def _run(
        self,
        arrays: Sequence[tuple[Bytes, Bytes, DataType]],
        what: str,
        timeout: float | None,
        **options: object,
    ) -> None:
        raise InvalidUsage.because(what.partition(" ")[0], DESTROYED)

    def broadcast(
        self, arrays: Sequence[Bytes], root: int, what: str, timeout: float | None
    ) -> None:
        self._run([], what, timeout)

    def all_gather(
        self, pairs: Sequence[tuple[Bytes, Bytes]], what: str, timeout: float | None
    ) -> None:
        self._run([], what, timeout)
