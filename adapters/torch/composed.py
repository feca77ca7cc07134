"""Collectives of c10d that the engine has no operation for, made of those that it has.

| | made of | bytes that one of N ranks receives |
|---|---|---|
| all-to-all | messages between pairs | its own output |
| bitwise reductions | all-gather in pieces, then bitwise here | N - 1 times the tensor |
| sparse all-reduce | all-gather of indices and values, then a sum | N times the most nonzeros |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pccl import _settings
from pccl.adapters.torch.messages import Messages
from pccl.adapters.torch.tensor_bytes import Bitwise, Bytes, bytes_of
from pccl.errors import InvalidArgument, InvalidUsage, MismatchedCall, PCCLError, Timeout

_PIECE = 16 << 20  # bytes gathered at once for a bitwise reduction, over all ranks
_CONFIRM = 5.0  # seconds at least for the last step of an all-to-all, which all ranks must take


class Group(Protocol):
    """A group's operations on the engine."""

    def all_gather(
        self, pairs: Sequence[tuple[Bytes, Bytes]], what: str, timeout: float | None
    ) -> None: ...


@contextmanager
def named(func: str) -> Iterator[None]:
    """Errors of the operations inside name the function that is made of them."""
    try:
        yield
    except PCCLError as error:
        error.func_name = func
        raise


def _gather_row(
    group: Group, row: Sequence[int], size: int, what: str, timeout: float | None
) -> npt.NDArray[np.int64]:
    """All ranks' rows, which are equally long."""
    own = np.array(row, np.int64)
    table = np.empty((size, own.size), np.int64)
    group.all_gather([(own.view(np.uint8), table.reshape(-1).view(np.uint8))], what, timeout)
    return table


# Bitwise reductions.


def reduce_bits(
    group: Group,
    arrays: Sequence[tuple[Bytes, Bytes]],
    op: Bitwise,
    size: int,
    part: int | None,
    what: str,
    timeout: float | None,
) -> None:
    """Combines `send` of all `size` ranks into `recv`, for each (send, recv); may be in place.

    With `part`, a rank, it combines only that rank's part. `what` names the call in errors.
    """
    deadline = _settings.Deadline(timeout)
    step = max(1, _PIECE // size)
    for send, recv in arrays:
        first = 0 if part is None else part * recv.size
        for begin in range(0, send.size, step):
            own = send[begin : begin + step]
            whole = np.empty(size * own.size, np.uint8)
            with named(what.partition(" ")[0]):
                group.all_gather([(own, whole)], what, deadline.left())
            # The overlap of this piece with the wanted part.
            low = max(begin, first)
            high = min(begin + own.size, first + recv.size)
            if low < high:
                pieces = whole.reshape(size, own.size)[:, low - begin : high - begin]
                recv[low - first : high - first] = op.combine(pieces)


# All-to-all.


def split(data: Bytes, splits: Sequence[int], rows: int, size: int, name: str) -> list[Bytes]:
    """A tensor's bytes for `all_to_all_single`, by rank.

    `splits` has the number of rows for each of `size` ranks; empty means equal parts. `name` is
    "input" or "output", for errors.
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

    def check(self, func: str) -> None:
        """Raises the same error on all ranks, except those that cannot send messages."""
        if self.unready:
            sentence = f"it could not begin on ranks {self.unready}; see the errors there"
            raise InvalidUsage.because(func, sentence)
        for sender, receiver in np.argwhere(self.sent != self.expected).tolist():
            sent, expected = self.sent[sender, receiver], self.expected[sender, receiver]
            sentence = (
                f"rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}"
            )
            raise MismatchedCall.because(func, sentence)


class Parts(NamedTuple):
    """This rank's parts of an all-to-all, by the rank at the other end.

    Attributes:
        sends: Bytes for each rank.
        receives: Memory for the bytes of each rank.
        item: Bytes of an element.
    """

    sends: list[Bytes]
    receives: list[Bytes]
    item: int


class AllToAll:
    """One all-to-all.

    First, all ranks tell what they send and expect, so a mismatch is an error on all ranks before
    anything moves. Then each part goes to its rank. Last, all ranks tell whether they have all
    parts, so the call succeeds on all ranks or on none.
    """

    def __init__(
        self, group: Group, messages: Messages, rank: int, number: int, parts: Parts
    ) -> None:
        """`number` grows with each call."""
        overlaps = any(np.may_share_memory(a, b) for a in parts.sends for b in parts.receives)
        self._group = group
        self._messages = messages
        self._rank = rank
        self._size = len(parts.sends)
        self._number = number
        self._sends = [part.copy() for part in parts.sends] if overlaps else parts.sends
        self._receives = parts.receives
        self._item = parts.item

    def run(self, func: str, what: str, timeout: float) -> None:
        with named(func):
            self._run(func, what, timeout)

    def _run(self, func: str, what: str, timeout: float) -> None:
        deadline = _settings.Deadline(timeout)
        others = [other for other in range(self._size) if other != self._rank]
        sends = {other: self._sends[other] for other in others if self._sends[other].size}
        receives = {other: self._receives[other] for other in others if self._receives[other].size}
        try:
            self._messages.prepare([*sends], [*receives])
        except PCCLError:
            self._agree(what, True, timeout)
            raise
        counts = self._agree(what, False, timeout)
        counts.check(func)
        try:
            self._messages.exchange(counts.number, sends, receives, deadline.left() or 0.0)
        except BaseException as error:  # the others must learn of Ctrl-C, too
            try:
                self._confirm(what, True, deadline)
            except PCCLError:
                if isinstance(error, PCCLError) and not isinstance(error, Timeout):
                    raise  # a loss, which the group names better
            raise
        ranks = self._confirm(what, False, deadline)
        if ranks:
            raise InvalidUsage.because(func, f"it failed on ranks {ranks}; see the errors there")
        self._receives[self._rank][:] = self._sends[self._rank]

    def _agree(self, what: str, unready: bool, timeout: float) -> _Counts:
        row = [part.size // self._item for part in [*self._sends, *self._receives]]
        row += [unready, self._number]
        table = _gather_row(self._group, row, self._size, what, timeout)
        return _Counts(
            table[:, : self._size],
            table[:, self._size : -2].T,
            np.flatnonzero(table[:, -2]).tolist(),
            int(table[:, -1].max()),
        )

    def _confirm(self, what: str, failed: bool, deadline: _settings.Deadline) -> list[int]:
        """Tells the others how the exchange ended here, and returns the ranks where it failed."""
        # Also after the deadline: calls meet by their order, so all ranks must make this one.
        flag = np.array([failed], np.uint8)
        flags = np.empty(self._size, np.uint8)
        limit = max(_CONFIRM, deadline.left() or 0.0)
        self._group.all_gather([(flag, flags)], f"{what}, the end", limit)
        return [int(rank) for rank in np.flatnonzero(flags)]


# Sparse tensors.


@named("allreduce")
def reduce_sparse(
    group: Group, tensor: torch.Tensor, size: int, what: str, timeout: float | None
) -> torch.Tensor:
    """The sum of all `size` ranks' sparse COO tensors of one shape, coalesced.

    `what` names the call in errors. It has shape and dtype, which must be the same on all ranks.
    """
    deadline = _settings.Deadline(timeout)
    own = tensor.detach().cpu().coalesce()
    indices, values = own.indices(), own.values()
    # Hybrid tensors have a dense part, which `what` does not tell.
    row = [values.shape[0], own.sparse_dim()]
    table = _gather_row(group, row, size, what, deadline.left())
    if len(set(table[:, 1])) > 1:
        sentence = f"ranks have tensors with {table[:, 1].tolist()} sparse dimensions"
        raise MismatchedCall.because("allreduce", sentence)
    most = int(table[:, 0].max())
    if most == 0:
        return own
    places = torch.zeros(most, own.sparse_dim(), dtype=torch.int64, device="cpu")
    places[: indices.shape[1]] = indices.T
    numbers = torch.zeros(most, *values.shape[1:], dtype=values.dtype, device="cpu")
    numbers[: values.shape[0]] = values
    sent = [bytes_of(part) for part in (places, numbers)]
    wholes = [np.empty(size * part.size, np.uint8) for part in sent]
    group.all_gather(list(zip(sent, wholes, strict=True)), what, deadline.left())
    all_places = torch.from_numpy(wholes[0]).view(torch.int64).view(size, *places.shape)
    all_numbers = torch.from_numpy(wholes[1]).view(values.dtype).view(size, *numbers.shape)
    counts = [int(count) for count in table[:, 0]]
    return torch.sparse_coo_tensor(
        torch.cat([all_places[r, :n] for r, n in enumerate(counts)]).T,
        torch.cat([all_numbers[r, :n] for r, n in enumerate(counts)]),
        own.shape,
        device="cpu",
    ).coalesce()
