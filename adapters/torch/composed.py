"""Collectives of c10d that the engine has no operation for, made of those that it has.

| | made of | bytes that one of N ranks receives |
|---|---|---|
| all-to-all | messages between pairs | its own output |
| bitwise reductions | all-gather in pieces, then bitwise here | N - 1 times the tensor |
| sparse all-reduce | all-gather of indices and values, then a sum here | all ranks' nonzeros, each padded to the most |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pccl import _settings
from pccl.errors import InvalidArgument, InvalidUsage, MismatchedCall, PCCLError, Timeout

if TYPE_CHECKING:
    from pccl.adapters.torch.channel import Messages

Bytes = npt.NDArray[np.uint8]

_PIECE = 16 << 20  # bytes gathered at once for a bitwise reduction, over all ranks
_CONFIRM = 5.0  # seconds at least for the last step of an all-to-all, which all ranks must take


class Group(Protocol):
    """A group's operations on the engine."""

    def all_gather(
        self, pairs: Sequence[tuple[Bytes, Bytes]], what: str, timeout: float | None
    ) -> None: ...


@contextmanager
def _named(func: str) -> Iterator[None]:
    """Errors of the operations that a function is made of are the function's."""
    try:
        yield
    except PCCLError as error:
        error.func_name = func
        raise


# Bitwise reductions.


class Bitwise(Enum):
    """A reduction of bits."""

    BAND = "and"
    BOR = "or"
    BXOR = "xor"

    def combine(self, bits: Bytes) -> Bytes:
        """Combines the rows of (ranks, bytes)."""
        function = {
            Bitwise.BAND: np.bitwise_and,
            Bitwise.BOR: np.bitwise_or,
            Bitwise.BXOR: np.bitwise_xor,
        }[self]
        combined: Bytes = function.reduce(bits, axis=0)
        return combined


BITWISE = {
    dist.ReduceOp.BAND: Bitwise.BAND,
    dist.ReduceOp.BOR: Bitwise.BOR,
    dist.ReduceOp.BXOR: Bitwise.BXOR,
}


def reduce_bits(
    group: Group,
    arrays: Sequence[tuple[Bytes, Bytes]],
    op: Bitwise,
    size: int,
    part: int | None,
    what: str,
    timeout: float | None,
) -> None:
    """Combines `send` of all ranks into `recv`, for each (send, recv).

    Args:
        group: Where.
        arrays: May be in place.
        op: How.
        size: Ranks.
        part: None combines all of it; a rank combines only the part of `send` that is the rank's.
        what: Names the call in errors.
        timeout: Seconds.
    """
    deadline = _settings.Deadline(timeout)
    step = max(1, _PIECE // size)
    for send, recv in arrays:
        first = 0 if part is None else part * recv.size
        for begin in range(0, send.size, step):
            own = send[begin : begin + step]
            whole = np.empty(size * own.size, np.uint8)
            with _named(what.partition(" ")[0]):
                group.all_gather([(own, whole)], what, deadline.left())
            # Where this piece and what is wanted overlap.
            low = max(begin, first)
            high = min(begin + own.size, first + recv.size)
            if low < high:
                pieces = whole.reshape(size, own.size)[:, low - begin : high - begin]
                recv[low - first : high - first] = op.combine(pieces)


# All-to-all.


def split(data: Bytes, splits: Sequence[int], rows: int, size: int, name: str) -> list[Bytes]:
    """The parts of a tensor for `all_to_all_single`, by rank.

    Args:
        data: The tensor's bytes.
        splits: Rows for each rank; empty: as many for each.
        rows: Of the tensor.
        size: Ranks.
        name: "input" or "output", for errors.
    """
    func = "all_to_all_single"
    if not splits:
        if rows % size != 0:
            sentence = f"the {rows} rows of {name} do not divide by the {size} ranks"
            raise InvalidArgument.because(func, sentence)
        splits = [rows // size] * size
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        sentence = f"the split sizes {list(splits)} of {name} do not share {rows} rows"
        raise InvalidArgument.because(func, f"{sentence} among {size} ranks")
    row = data.size // rows if rows else 0
    ends = np.cumsum(splits) * row
    return [data[end - count * row : end] for end, count in zip(ends, splits, strict=True)]


class _Counts(NamedTuple):
    """How many elements each rank sends to and expects from each other one."""

    sent: npt.NDArray[np.int64]  # [from, to]
    expected: npt.NDArray[np.int64]  # [from, to]
    unready: list[int]  # ranks that cannot send messages
    number: int  # of the call in the group, the same on all ranks

    def check(self, func: str, own: PCCLError | None) -> None:
        """Raises the same on all ranks, but that a rank that cannot take part raises its own error."""
        if own is not None:
            raise own
        if self.unready:
            sentence = f"it could not begin on ranks {self.unready}; see the errors there"
            raise InvalidUsage.because(func, sentence)
        for sender, receiver in np.argwhere(self.sent != self.expected).tolist():
            sent, expected = self.sent[sender, receiver], self.expected[sender, receiver]
            sentence = (
                f"rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}"
            )
            raise MismatchedCall.because(func, sentence)


class AllToAll:
    """One all-to-all.

    Every rank first says what it sends and expects, so that a mismatch is an error on all ranks before
    anything moves. Then each part goes to the rank that needs it. In the end all ranks say whether
    they have everything, so that the call succeeds on all ranks or on none.
    """

    def __init__(
        self,
        group: Group,
        messages: Messages,
        rank: int,
        number: int,
        sends: Sequence[Bytes],
        receives: Sequence[Bytes],
        item: int,
    ) -> None:
        """`number` grows with each call. `sends` and `receives`: by rank; `item`: bytes an element."""
        overlaps = any(np.may_share_memory(a, b) for a in sends for b in receives)
        self._group = group
        self._messages = messages
        self._rank = rank
        self._size = len(sends)
        self._number = number
        self._sends = [part.copy() for part in sends] if overlaps else list(sends)
        self._receives = receives
        self._item = item

    def run(self, func: str, what: str, timeout: float) -> None:
        with _named(func):
            self._run(func, what, timeout)

    def _run(self, func: str, what: str, timeout: float) -> None:
        deadline = _settings.Deadline(timeout)
        others = [other for other in range(self._size) if other != self._rank]
        sends = {other: self._sends[other] for other in others if self._sends[other].size}
        receives = {other: self._receives[other] for other in others if self._receives[other].size}
        unready: PCCLError | None = None
        try:
            self._messages.prepare([*sends], [*receives])
        except PCCLError as error:
            unready = error
        counts = self._agree(what, unready is not None, timeout)
        counts.check(func, unready)
        failure: BaseException | None = None
        try:
            self._messages.exchange(counts.number, sends, receives, deadline.left() or 0.0)
        except BaseException as error:  # of Ctrl-C, too, the others must hear
            failure = error
        self._confirm(func, what, failure, deadline)
        self._receives[self._rank][:] = self._sends[self._rank]

    def _agree(self, what: str, unready: bool, timeout: float) -> _Counts:
        row = np.array(
            [part.size // self._item for part in [*self._sends, *self._receives]]
            + [unready, self._number],
            np.int64,
        )
        table = np.empty((self._size, row.size), np.int64)
        self._group.all_gather(
            [(row.view(np.uint8), table.reshape(-1).view(np.uint8))], what, timeout
        )
        return _Counts(
            table[:, : self._size],
            table[:, self._size : -2].T,
            np.flatnonzero(table[:, -2]).tolist(),
            int(table[:, -1].max()),
        )

    def _confirm(
        self, func: str, what: str, failure: BaseException | None, deadline: _settings.Deadline
    ) -> None:
        # Also when time is over: calls of a group meet by their order, so all ranks must make this one.
        flag = np.array([failure is not None], np.uint8)
        flags = np.empty(self._size, np.uint8)
        limit = max(_CONFIRM, deadline.left() or 0.0)
        try:
            self._group.all_gather([(flag, flags)], f"{what}, the end", limit)
        except PCCLError:
            if (
                failure is None
                or isinstance(failure, PCCLError)
                and not isinstance(failure, Timeout)
            ):
                raise  # a loss, which the group names better
        if failure is not None:
            raise failure
        if flags.any():
            ranks = np.flatnonzero(flags).tolist()
            raise InvalidUsage.because(func, f"it failed on ranks {ranks}; see the errors there")


# Sparse tensors.


def reduce_sparse(
    group: Group, tensor: torch.Tensor, size: int, what: str, timeout: float | None
) -> torch.Tensor:
    """The sum of all ranks' sparse COO tensors of one shape.

    Args:
        group: Where.
        tensor: This rank's.
        size: Ranks.
        what: Names the call in errors; says shape and dtype, which are the same on all ranks.
        timeout: Seconds.

    Returns:
        A coalesced tensor.
    """
    with _named("allreduce"):
        return _reduce_sparse(group, tensor, size, what, _settings.Deadline(timeout))


def _reduce_sparse(
    group: Group, tensor: torch.Tensor, size: int, what: str, deadline: _settings.Deadline
) -> torch.Tensor:
    own = tensor.detach().cpu().coalesce()
    indices, values = own.indices(), own.values()
    # Hybrid tensors have a dense part, which `what` does not tell.
    row = np.array([values.shape[0], own.sparse_dim()], np.int64)
    table = np.empty((size, 2), np.int64)
    group.all_gather(
        [(row.view(np.uint8), table.reshape(-1).view(np.uint8))], what, deadline.left()
    )
    if len(set(table[:, 1])) > 1:
        sentence = f"ranks have tensors with {table[:, 1].tolist()} sparse dimensions"
        raise MismatchedCall.because("allreduce", sentence)
    most = int(table[:, 0].max())
    if most == 0:
        return own
    places = torch.zeros(most, own.sparse_dim(), dtype=torch.int64)
    places[: indices.shape[1]] = indices.T
    numbers = torch.zeros(most, *values.shape[1:], dtype=values.dtype)
    numbers[: values.shape[0]] = values
    sent = [_as_bytes(part) for part in (places, numbers)]
    wholes = [np.empty(size * part.size, np.uint8) for part in sent]
    group.all_gather(list(zip(sent, wholes, strict=True)), what, deadline.left())
    all_places = torch.from_numpy(wholes[0]).view(torch.int64).view(size, *places.shape)
    all_numbers = torch.from_numpy(wholes[1]).view(values.dtype).view(size, *numbers.shape)
    counts = [int(count) for count in table[:, 0]]
    return torch.sparse_coo_tensor(
        torch.cat([all_places[r, :n] for r, n in enumerate(counts)]).T,
        torch.cat([all_numbers[r, :n] for r, n in enumerate(counts)]),
        own.shape,
    ).coalesce()


def _as_bytes(tensor: torch.Tensor) -> Bytes:
    made: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return made
