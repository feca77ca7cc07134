"""Sparse pseudo-gradients: the largest elements of each chunk, with two bits for each value.

The algorithm is SparseLoCo (Sarfi et al., arXiv 2508.15706). A member adds its pseudo-gradient to
what its earlier codes left out (error feedback, which decays), sends the k largest elements of each
chunk, and keeps the rest for the next round. The error feedback plays the role of outer momentum.

A code has a fixed size, so that members can gather the codes of all. It has two parts:

* an entry for each element that is sent, in `log2(chunk) + 2` bits, most significant bit first:
  its place in the chunk, whether it is one of the chunk's large values, and whether it is negative.
  Entries may repeat, which changes nothing;
* two bfloat16 for each chunk: its small value, and its large one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from pccl.errors import InvalidArgument
from pccl.frameworks import Array
from pccl.training.diloco.robust import Mean, Robust, Shares, clipped, make_floats, norm, total_of

_LEAST_CHUNK, _MOST_CHUNK = 64, 16384  # an entry has at most 16 bits
_AT_ONCE = 1 << 20  # elements that are searched at once: bounds the memory for their places


@dataclass(frozen=True)
class Sparse:
    """How DiLoCo sends pseudo-gradients as their largest elements: `compression=` of `DiLoCo`.

    Attributes:
        density: Share of each chunk's elements that is sent, above 0 and at most 1. At least one of
            each chunk is. The paper's runs send 1 to 3 %.
        chunk: Elements among which the largest are found: a power of two from 64 to 16384. No chunk
            crosses from one parameter into the next, so the last one of a parameter may be shorter.
        decay: Factor by which a value that was not sent is multiplied for the next round: from 0 to
            1.
    """

    density: float = 1 / 32
    chunk: int = 4096
    decay: float = 0.95

    def __post_init__(self) -> None:
        def refuse(sentence: str) -> InvalidArgument:
            return InvalidArgument.because("Sparse", sentence)

        make_floats(self, ("density", "decay"), "Sparse")
        if not 0 < self.density <= 1:
            raise refuse(f"density is above 0 and at most 1, not {self.density!r}")
        if not 0 <= self.decay <= 1:
            raise refuse(f"decay is from 0 to 1, not {self.decay!r}")
        chunk: Any = self.chunk
        if isinstance(chunk, bool) or not isinstance(chunk, Integral):
            chunk = 0
        if not _LEAST_CHUNK <= chunk <= _MOST_CHUNK or chunk & (chunk - 1):
            raise refuse(f"chunk is a power of two from 64 to 16384, not {self.chunk!r}")
        object.__setattr__(self, "chunk", int(chunk))


def parse(value: object, func: str) -> Sparse:
    """The value of a user's `compression=`.

    Raises:
        InvalidArgument: It is neither a `Sparse` nor "sparse".
    """
    if isinstance(value, Sparse):
        return value
    if isinstance(value, str) and value == "sparse":
        return Sparse()
    raise InvalidArgument.because(func, f'compression is "sparse" or a Sparse, not {value!r}')


def words(how: Sparse) -> str:
    """For errors, and to compare: ` sparse (density=0.03125, chunk=4096, decay=0.95)`."""
    return f" sparse (density={how.density}, chunk={how.chunk}, decay={how.decay})"


class Chunks(NamedTuple):
    """Chunks of one length, one after the other.

    Attributes:
        first: Index of their first element among all.
        chunks: How many there are.
        length: Elements of each.
        sent: How many of these are sent.
    """

    first: int
    chunks: int
    length: int
    sent: int


class Sparsifier:
    """Makes codes of one fragment's pseudo-gradients, and keeps what the codes leave out.

    Args:
        how: Density, chunks and decay.
        like: Arrays of the pseudo-gradients' shapes and types.

    Attributes:
        size: Bytes of a code.
        runs: The chunks, in order.
        feedback: What was not sent, for all elements in order. It is this member's own.
    """

    def __init__(self, how: Sparse, like: Sequence[Array]) -> None:
        self._decay = how.decay
        self._like = [(array.shape, array.dtype, array.size) for array in like]
        self.runs: list[Chunks] = []
        first = 0
        for array in like:
            whole, rest = divmod(array.size, how.chunk)
            for count, length in ((whole, how.chunk), (1, rest)):
                if count * length > 0:
                    sent = min(length, max(1, round(how.density * length)))
                    self.runs.append(Chunks(first, count, length, sent))
                    first += count * length
        self.feedback: Array = np.zeros(first, np.result_type(np.float32, *[a.dtype for a in like]))
        self._bits = (how.chunk - 1).bit_length() + 2
        self._firsts, self._lengths, self._sent = rows_of(self.runs)
        self._entries, self._chunks = int(self._sent.sum()), self._sent.size
        self._entry_bytes = -(-self._entries * self._bits // 8)
        self.size = self._entry_bytes + 4 * self._chunks

    def forget(self) -> None:
        """Begins again with nothing left out."""
        self.feedback[...] = 0

    def nothing(self) -> Array:
        """A code for a member whose weight is 0. Nobody decodes it."""
        return np.zeros(self.size, np.uint8)

    @np.errstate(invalid="ignore", over="ignore")  # what is not finite is sent as it is
    def encode(self, gradients: Sequence[Array]) -> Array:
        """The code of these pseudo-gradients with what earlier codes left out."""
        self.feedback *= self._decay
        first = 0
        for gradient in gradients:
            self.feedback[first : first + gradient.size] += gradient.reshape(-1)
            first += gradient.size
        entries, levels = take_largest(self.feedback, self.runs)
        code = np.empty(self.size, np.uint8)
        code[: self._entry_bytes] = packed(entries, self._bits)
        code[self._entry_bytes :] = levels.view(np.uint8)
        return code

    @np.errstate(invalid="ignore", over="ignore")
    def mean(self, codes: Array, weights: Sequence[float], robust: Robust | None = None) -> Mean:
        """The weighted mean of what the members' codes stand for; zeros if no weight counts.

        Elements are added in the order of the members, so all get the same bytes.

        Args:
            codes: One row for each member.
            weights: Of the members; a code of weight 0 is not looked at.
            robust: Bounds the influence of each; a code that makes no sense does not count then.

        Raises:
            InvalidArgument: A code names a place outside its chunk, and `robust` is None.
        """
        total = np.zeros_like(self.feedback)
        shares, limited, whole = self._shares(codes, weights, robust)
        for rank, share in enumerate(shares):
            if share > 0:
                places, values = self._decoded(codes[rank], rank)
                total[places] += values.astype(total.dtype) * total.dtype.type(share)
        return Mean(self.shaped(total), any(share > 0 for share in shares), limited, whole)

    def shaped(self, elements: Array) -> list[Array]:
        """Arrays of the pseudo-gradients' shapes and types from all elements in order."""
        made, first = [], 0
        for shape, dtype, size in self._like:
            made.append(elements[first : first + size].astype(dtype, copy=False).reshape(shape))
            first += size
        return made

    def _shares(self, codes: Array, weights: Sequence[float], robust: Robust | None) -> Shares:
        if robust is None:
            return plain_shares(weights)
        norms = [
            0.0 if weight == 0 else self._norm(codes[r], r) for r, weight in enumerate(weights)
        ]
        return clipped(robust, lambda rank: [self._dense(codes[rank], rank)], norms, weights)

    def _norm(self, code: Array, rank: int) -> float:
        """The norm of the meaning of a code; not a number if it makes no sense."""
        try:
            return norm([self._dense(code, rank)])
        except InvalidArgument:
            return math.nan

    def _dense(self, code: Array, rank: int) -> Array:
        places, values = self._decoded(code, rank)
        dense = np.zeros_like(self.feedback)
        dense[places] = values  # entries may repeat
        return dense

    def _decoded(self, code: Array, rank: int) -> tuple[Array, Array]:
        """Places among all elements, and the values there."""
        entries, levels = self.split(code)
        places = (entries >> 2).astype(np.int64)
        if (places >= np.repeat(self._lengths, self._sent)).any():
            raise makes_no_sense(rank)
        places += np.repeat(self._firsts, self._sent)
        return places, values_of(entries, levels, self._sent)

    def split(self, code: Array) -> tuple[Array, Array]:
        """The entries of a code, and its levels: two bfloat16 for each chunk."""
        entries = unpacked(code[: self._entry_bytes], self._bits, self._entries)
        return entries, np.ascontiguousarray(code[self._entry_bytes :]).view("<u2")


def rows_of(runs: Sequence[Chunks]) -> Array:
    """For each chunk: index of its first element, its length, and how many of it are sent."""
    rows = np.empty((3, sum(run.chunks for run in runs)), np.int64)
    chunk = 0
    for run in runs:
        some = rows[:, chunk : chunk + run.chunks]
        some[0] = run.first + run.length * np.arange(run.chunks)
        some[1:] = [[run.length], [run.sent]]
        chunk += run.chunks
    return rows


def plain_shares(weights: Sequence[float]) -> Shares:
    """Each rank's share of a mean by weight."""
    whole = total_of(weight for weight in weights if weight > 0)
    return Shares([w / whole if w > 0 else 0.0 for w in weights], [], whole)


def makes_no_sense(rank: int) -> InvalidArgument:
    """The error of a code that nobody can have made."""
    sentence = f"the code of rank {rank} names a place outside its chunk"
    return InvalidArgument.because("diloco", sentence)


def take_largest(elements: Array, runs: Sequence[Chunks]) -> tuple[Array, Array]:
    """Entries for the largest elements of each chunk, and the levels of the chunks.

    Their meaning is taken out of `elements`.
    """
    entries = np.empty(sum(run.chunks * run.sent for run in runs), np.uint16)
    levels = np.empty((sum(run.chunks for run in runs), 2), np.float32)
    entry = chunk = 0
    for run in runs:
        step = max(1, _AT_ONCE // run.length)
        for start in range(0, run.chunks, step):
            count = min(step, run.chunks - start)
            begin = run.first + start * run.length
            block = elements[begin : begin + count * run.length]
            found, values = _largest(block.reshape(count, run.length), run.sent)
            entries[entry : entry + found.size] = found.reshape(-1)
            levels[chunk : chunk + count] = values
            entry, chunk = entry + found.size, chunk + count
    return entries, _as_bfloat16(levels).reshape(-1)


def values_of(entries: Array, levels: Array, sent: Array) -> Array:
    """The values that entries stand for, of which each chunk has so many."""
    chunks = np.repeat(np.arange(sent.size), sent)
    values = _from_bfloat16(levels.view(np.uint8)).reshape(-1, 2)[chunks, entries >> 1 & 1]
    signed: Array = np.where(entries & 1, -values, values)
    return signed


def _largest(block: Array, sent: int) -> tuple[Array, Array]:
    """Entries for the `sent` largest elements of each row, and the two values of each row.

    Their meaning is taken out of `block`. Zeros are not sent: a row that has fewer others
    repeats the entry of its largest element. An element that is not finite is among the largest,
    and makes a value of its row not finite, so that the error is noticed.
    """
    length = block.shape[1]
    sizes = np.abs(block)
    places = np.argpartition(sizes, length - sent, axis=1)[:, length - sent :]
    places.sort(axis=1)
    sizes = np.take_along_axis(sizes, places, 1)
    some = sizes != 0
    large = sizes > _mean_of(sizes, some)[:, None]
    small = some & ~large
    small_value = _mean_of(sizes, small)
    large_value = np.where(large.any(axis=1), _mean_of(sizes, large), small_value)
    largest = sizes.argmax(axis=1)[:, None]
    places = np.where(some, places, np.take_along_axis(places, largest, 1))
    large = np.where(some, large, np.take_along_axis(large, largest, 1))
    given = np.take_along_axis(block, places, 1)
    values = np.stack([small_value, large_value], axis=1).astype(np.float32)
    values = _from_bfloat16(_as_bfloat16(values).view(np.uint8)).reshape(values.shape)
    meant = np.where(large, values[:, 1:], values[:, :1])
    negative = np.signbit(given)
    np.put_along_axis(block, places, given - np.where(negative, -meant, meant), 1)
    entries = places << 2 | large.astype(np.int64) << 1 | negative
    return entries.astype(np.uint16), values


def _mean_of(sizes: Array, which: Array) -> Array:
    total: Array = np.where(which, sizes, 0).sum(axis=1, dtype=np.float64)
    return np.asarray(total / np.maximum(which.sum(axis=1), 1))


def packed(entries: Array, bits: int) -> Array:
    """The lowest bits of each entry, one after the other."""
    each = np.unpackbits(entries.astype(">u2").view(np.uint8)).reshape(-1, 16)
    return np.packbits(each[:, 16 - bits :])


def unpacked(packed: Array, bits: int, count: int) -> Array:
    """Entries from what `packed` has made of them."""
    each = np.zeros((count, 16), np.uint8)
    each[:, 16 - bits :] = np.unpackbits(packed, count=count * bits).reshape(count, bits)
    entries: Array = np.packbits(each).view(">u2").astype(np.uint16)
    return entries


def _as_bfloat16(values: Array) -> Array:
    """The upper halves of float32 numbers, rounded, as little-endian numbers of 16 bits."""
    plain = np.where(np.isnan(values), np.float32(np.nan), values).astype("<f4")
    halves: Array = ((plain.view("<u4") + np.uint32(0x8000)) >> 16).astype("<u2")
    return halves


def _from_bfloat16(data: Array) -> Array:
    halves = np.ascontiguousarray(data).view("<u2").astype("<u4")
    made: Array = (halves << 16).view("<f4").astype(np.float32)
    return made
