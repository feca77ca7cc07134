"""The memory that one operation reads and writes."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from pccl import result_pool
from pccl._arrays import flat_bytes
from pccl.frameworks import Array, Buffer


def _span(flat: Array) -> tuple[int, int]:
    begin = int(flat.__array_interface__["data"][0])
    return begin, begin + flat.size


def _claim(taken: list[tuple[int, int]], begin: int, end: int) -> bool:
    """Adds a range to sorted, disjoint ones; False if it overlaps one of them."""
    at = bisect_right(taken, (begin, sys.maxsize))
    if (at > 0 and taken[at - 1][1] > begin) or (at < len(taken) and taken[at][0] < end):
        return False
    if end > begin:
        taken.insert(at, (begin, end))
    return True


class Staging:
    """The memory that the engine reads and writes for one operation.

    The engine gets the caller's own memory wherever that is safe. Private memory replaces an array
    that is not C-contiguous, an output that overlaps another one, and an output that overlaps an
    input. So inputs are as before if the operation fails.

    Args:
        in_place: Whether an output may be its input exactly, which the engine knows.
        hold: Whether outputs are written by `finish` only.
        gathers: An input may be a part of its output, where its elements stay. If they overlap, the
            input is copied and not the output, which takes less memory.

    Attributes:
        arrays: (send, recv, dtype code) for the engine.
        results: Result arrays, one per input, in the inputs' shapes; complete after `finish`.
    """

    def __init__(
        self,
        sends: Sequence[Buffer],
        recvs: Sequence[Array] | None = None,
        *,
        in_place: bool = True,
        hold: bool = False,
        gathers: bool = False,
    ) -> None:
        self.results: list[Array] = []
        self._copy_back: list[tuple[Array, Array]] = []  # (the caller's array, private result)
        flat_sends = [flat_bytes(array) for array, _ in sends]
        if recvs is None:
            self.results = [result_pool.empty(array.shape, array.dtype) for array, _ in sends]
        else:
            self._place(recvs, hold)
            for send, recv in self._overlaps(flat_sends, in_place):
                if gathers:
                    flat_sends[send] = flat_sends[send].copy()
                elif self.results[recv] is recvs[recv]:
                    self.results[recv] = self._private(recvs[recv])
        self.arrays = [
            (send, flat_bytes(result), int(buffer.dtype))
            for send, result, buffer in zip(flat_sends, self.results, sends, strict=True)
        ]

    def _place(self, recvs: Sequence[Array], hold: bool) -> None:
        """Makes the outputs disjoint: the caller's memory or private memory, with `hold` always."""
        taken: list[tuple[int, int]] = []
        for array in recvs:
            usable = (
                not hold and array.flags.c_contiguous and _claim(taken, *_span(flat_bytes(array)))
            )
            self.results.append(array if usable else self._private(array))

    def _private(self, array: Array) -> Array:
        result = np.empty(array.shape, array.dtype)
        self._copy_back.append((array, result))
        return result

    def _overlaps(self, flat_sends: Sequence[Array], in_place: bool) -> list[tuple[int, int]]:
        """Inputs and outputs that overlap, by index, but for those that may be in place."""
        flat_recvs = [flat_bytes(result) for result in self.results]
        spans = sorted((*_span(recv), index) for index, recv in enumerate(flat_recvs) if recv.size)
        begins = [begin for begin, _, _ in spans]
        found = []
        for index, send in enumerate(flat_sends):
            begin, end = _span(send)
            # Outputs are disjoint, so those that overlap [begin, end) are neighbours in `spans`.
            at = max(0, bisect_right(begins, begin) - 1)
            while at < len(spans) and spans[at][0] < end:
                exact = in_place and spans[at] == (begin, end, index)
                if spans[at][1] > begin and not exact:
                    found.append((index, spans[at][2]))
                at += 1
        return found

    def finish(self) -> None:
        """After the commit: fills the caller's arrays that the engine could not write itself."""
        for array, result in self._copy_back:
            array[...] = result
        self._copy_back.clear()
