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

    The engine gets the caller's own memory wherever that is safe. A private copy replaces an array
    that is not C-contiguous, an input that overlaps an output other than exactly (exactly is in
    place, which the engine does unless `in_place` is False), and an output that overlaps another
    one.

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
    ) -> None:
        self.results: list[Array] = []
        self._copy_back: list[tuple[Array, Array]] = []  # (the caller's array, private result)
        flat_sends = [flat_bytes(array) for array, _ in sends]
        if recvs is None:
            self.results = [result_pool.empty(array.shape, array.dtype) for array, _ in sends]
            flat_recvs = [flat_bytes(result) for result in self.results]
        else:
            flat_recvs = self._place(recvs)
            self._separate(flat_sends, flat_recvs, in_place)
        self.arrays = [
            (send, recv, int(buffer.dtype))
            for send, recv, buffer in zip(flat_sends, flat_recvs, sends, strict=True)
        ]

    def _place(self, recvs: Sequence[Array]) -> list[Array]:
        """The outputs' bytes, disjoint: the caller's memory or private memory."""
        flat_recvs = []
        taken: list[tuple[int, int]] = []
        for array in recvs:
            result = array
            if not (array.flags.c_contiguous and _claim(taken, *_span(flat_bytes(array)))):
                result = np.empty(array.shape, array.dtype)
                self._copy_back.append((array, result))
            self.results.append(result)
            flat_recvs.append(flat_bytes(result))
        return flat_recvs

    @staticmethod
    def _separate(flat_sends: list[Array], flat_recvs: Sequence[Array], in_place: bool) -> None:
        """Copies each input that an output would overwrite, except in place, if that is allowed."""
        spans = sorted((*_span(recv), index) for index, recv in enumerate(flat_recvs) if recv.size)
        begins = [begin for begin, _, _ in spans]
        for index, send in enumerate(flat_sends):
            begin, end = _span(send)
            # Outputs are disjoint, so those that overlap [begin, end) are neighbours in `spans`.
            at = max(0, bisect_right(begins, begin) - 1)
            while at < len(spans) and spans[at][0] < end:
                exact = in_place and spans[at] == (begin, end, index)
                if spans[at][1] > begin and not exact:
                    flat_sends[index] = send.copy()
                    break
                at += 1

    def finish(self) -> None:
        """After the commit: fills the caller's arrays that the engine could not write itself."""
        for array, result in self._copy_back:
            array[...] = result
        self._copy_back.clear()
