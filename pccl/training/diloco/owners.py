"""Sparse codes that owners reduce, in place of an all-gather of all members' codes.

The chunks of a fragment are cut into one range for each rank. Each member sends each owner its
part: the elements of its code that are in the owner's range. The owner adds them up by weight, and
encodes the mean as a code of its own, which has room for all places that members have sent. All
members receive the codes of all ranges, and decode the same bytes.

A part and an owner's code have one format, and a size that follows from the chunks alone:

* the places in the range, ascending, as an Elias-Fano sequence: the lowest bits of each, and for
  the higher ones a 1 for each place after a 0 for each step of the higher bits;
* two bits for each place: whether it is one of its chunk's large values, and whether it is
  negative;
* two bfloat16 for each chunk, as in a member's code.

Places may repeat, which changes nothing. Each chunk has a fixed number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pccl.frameworks import Array
from pccl.training.diloco.sparse import (
    Chunks,
    Sparsifier,
    makes_no_sense,
    packed,
    rows_of,
    take_largest,
    unpacked,
    values_of,
)

# A member sends at most one of so many elements: a mean of denser codes has too many different
# values for the two that a code has for a chunk.
_LEAST_ELEMENTS = 8
# Before an owner's code: 0, or 1 more than the rank of a member whose part makes no sense. So all
# members learn it.
_ODD_BYTES = 4


class _Format:
    """A code of a range of chunks, with so many places of each.

    Attributes:
        size: Bytes.
        count: Places.
    """

    def __init__(self, runs: Sequence[Chunks]) -> None:
        self._firsts, self._lengths, self._sent = rows_of(runs)
        self.count, elements = int(self._sent.sum()), int(self._lengths.sum())
        ratio = elements // self.count if self.count else 1
        self._low = ratio.bit_length() - 1
        self._high_bits = self.count + (elements >> self._low) + 1 if self.count else 0
        bits = (self.count * self._low, self._high_bits, self.count * 2)
        sizes = [-(-one // 8) for one in bits] + [4 * self._sent.size]
        self._ends = np.cumsum(sizes).tolist()
        self.size = self._ends[-1]

    def encode(self, entries: Array, levels: Array) -> Array:
        """From a code's entries, and two levels for each chunk."""
        places = (entries >> 2).astype(np.int64) + np.repeat(self._firsts, self._sent)
        marked = np.sort(places << 2 | (entries & 3))
        places = marked >> 2
        high = np.zeros(self._high_bits, bool)
        high[(places >> self._low) + np.arange(self.count)] = True
        low = (places & ((1 << self._low) - 1)).astype(np.uint16)
        marks = (marked & 3).astype(np.uint16)
        parts = packed(low, self._low), np.packbits(high), packed(marks, 2), levels.view(np.uint8)
        return np.concatenate(parts)

    def decode(self, code: Array) -> tuple[Array, Array] | None:
        """Places in the range, and the values there; None: it makes no sense."""
        low_end, high_end, marks_end, end = self._ends
        low = unpacked(code[:low_end], self._low, self.count)
        bits = np.unpackbits(code[low_end:high_end], count=self._high_bits)
        high = np.flatnonzero(bits)
        if high.size != self.count:
            return None
        places = (high - np.arange(self.count)) << self._low | low
        first = np.repeat(self._firsts, self._sent)
        if ((places < first) | (places >= first + np.repeat(self._lengths, self._sent))).any():
            return None
        marks = unpacked(code[high_end:marks_end], 2, self.count)
        levels = np.ascontiguousarray(code[marks_end:end]).view("<u2")
        return places, values_of(marks, levels, self._sent)


class _Range(NamedTuple):
    """The range of one member.

    Attributes:
        first: Index of its first element among all.
        elements: How many it has.
        entries: Those of a member's code that are in it: from, to.
        chunks: Its chunks: from, to.
        part: The format of a member's part.
        runs: The chunks of the owner's code, with the index of their first element in the range.
        code: The format of the owner's code.
    """

    first: int
    elements: int
    entries: slice
    chunks: slice
    part: _Format
    runs: list[Chunks]
    code: _Format


class Owners:
    """How the codes of one fragment are reduced among the members of a group. *immutable*

    Args:
        sparsifier: That of the fragment.
        members: Of the group.
        times: An owner sends at most so many times the elements of each chunk that a member sends.
            Default: as many as there are members, so nothing is left out.

    Attributes:
        members: The same.
        part_bytes: What a member sends to each owner.
        code_bytes: What an owner sends to each member.
    """

    def __init__(self, sparsifier: Sparsifier, members: int, times: int | None = None) -> None:
        self._sparsifier = sparsifier
        self.members = members
        self._ranges = _cut(sparsifier.runs, members, members if times is None else times)
        self.part_bytes = max(one.part.size for one in self._ranges)
        self.code_bytes = _ODD_BYTES + max(one.code.size for one in self._ranges)

    def parts(self, code: Array) -> Array:
        """A member's code, cut: a row for each owner."""
        entries, levels = self._sparsifier.split(code)
        made = np.zeros((len(self._ranges), self.part_bytes), np.uint8)
        for row, one in zip(made, self._ranges, strict=True):
            chunks = slice(2 * one.chunks.start, 2 * one.chunks.stop)
            row[: one.part.size] = one.part.encode(entries[one.entries], levels[chunks])
        return made

    @np.errstate(invalid="ignore", over="ignore")
    def reduce(self, rank: int, parts: Array, shares: Sequence[float]) -> Array:
        """The owner's code of the mean of its range.

        Elements are added in the order of the members.

        Args:
            rank: The owner's.
            parts: What the members have sent it; a row for each.
            shares: Of the members in the mean; a part of share 0 is not looked at.
        """
        own = self._ranges[rank]
        total = np.zeros(own.elements, self._sparsifier.feedback.dtype)
        made = np.zeros(self.code_bytes, np.uint8)
        for sender, share in enumerate(shares):
            if share == 0:
                continue
            found = own.part.decode(parts[sender])
            if found is None:
                made[:_ODD_BYTES].view("<u4")[0] = sender + 1
                return made
            places, values = found
            total[places] += values.astype(total.dtype) * total.dtype.type(share)
        code = own.code.encode(*take_largest(total, own.runs))
        made[_ODD_BYTES : _ODD_BYTES + code.size] = code
        return made

    def mean(self, codes: Array) -> list[Array]:
        """The mean that the owners' codes stand for, in arrays as the pseudo-gradients.

        Raises:
            InvalidArgument: A part or a code makes no sense.
        """
        total = np.zeros_like(self._sparsifier.feedback)
        for rank, (own, code) in enumerate(zip(self._ranges, codes, strict=True)):
            odd = int(code[:_ODD_BYTES].view("<u4")[0])
            found = own.code.decode(code[_ODD_BYTES:])
            if odd or found is None:
                raise makes_no_sense(odd - 1 if odd else rank)
            places, values = found
            total[own.first : own.first + own.elements][places] = values
        return self._sparsifier.shaped(total)


def owners_for(sparsifier: Sparsifier, members: int) -> Owners | None:
    """The owners, if they save at least two fifths of the bytes; None: gathering is better.

    A second call takes a round trip more, and a second code rounds a second time.
    """
    elements, sent = sparsifier.feedback.size, sum(run.chunks * run.sent for run in sparsifier.runs)
    if members < 2 or sent == 0 or _LEAST_ELEMENTS * sent > elements:
        return None
    owners = Owners(sparsifier, members)
    saves = 5 * (owners.part_bytes + owners.code_bytes) <= 3 * sparsifier.size
    return owners if saves else None


def _cut(runs: Sequence[Chunks], members: int, times: int) -> list[_Range]:
    """Ranges of whole chunks, in order, with about as many bytes of a code each."""
    firsts, lengths, sent = rows_of(runs)
    entries = np.concatenate([[0], np.cumsum(sent)])
    ends = np.cumsum(sent + 4)  # a chunk's levels have as many bits as four entries
    cuts = [
        int(np.searchsorted(ends, int(ends[-1]) * r // members, "right")) for r in range(members)
    ]
    made = []
    for begin, end in zip(cuts, [*cuts[1:], len(firsts)], strict=True):
        first = int(firsts[begin]) if begin < end else 0
        own = list(_between(runs, begin, end, first))
        more = [run._replace(sent=min(times * run.sent, run.length)) for run in own]
        made.append(
            _Range(
                first,
                int(lengths[begin:end].sum()),
                slice(int(entries[begin]), int(entries[end])),
                slice(begin, end),
                _Format(own),
                more,
                _Format(more),
            )
        )
    return made


def _between(runs: Sequence[Chunks], begin: int, end: int, first: int) -> Iterator[Chunks]:
    """The chunks from one to before another. Their elements count from `first`."""
    number = 0
    for run in runs:
        start, stop = max(begin, number), min(end, number + run.chunks)
        if start < stop:
            moved = run.first + (start - number) * run.length - first
            yield run._replace(first=moved, chunks=stop - start)
        number += run.chunks
