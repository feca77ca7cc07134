"""Memory for results, used again when nobody holds them any more.

Memory of a large result, or of many in one tree, that is new each time costs more than the
reduction: the kernel hands it out page by page, and clears every page.
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

POOLED = 256 << 10  # bytes from which on a result's memory is kept
_KEPT = 256 << 20  # bytes of memory that is kept and in nobody's use, in all
_ALIGNMENT = 64


class _Block(NamedTuple):
    memory: npt.NDArray[np.uint8]
    interface: dict[str, object]  # of its aligned part, for NumPy
    size: int


class _Pool:
    """*any thread*. Never waits for its lock: a result may be dropped in the middle of `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[_Block]] = {}  # by size; the size given back last is the last
        self._kept = 0  # bytes in there

    def take(self, size: int) -> _Block:
        if self._lock.acquire(False):
            try:
                blocks = self._free.get(size)
                if blocks:
                    self._kept -= size
                    return blocks.pop()  # the newest: it may be in a cache still
            finally:
                self._lock.release()
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        address = memory.ctypes.data
        data = (address + -address % _ALIGNMENT, False)
        interface = {"version": 3, "shape": (size,), "typestr": "|u1", "data": data}
        return _Block(memory, interface, size)

    def give_back(self, block: _Block) -> None:
        if self._lock.acquire(False):
            try:
                blocks = self._free.pop(block.size, [])
                blocks.append(block)
                self._free[block.size] = blocks
                self._kept += block.size
                while self._kept > _KEPT:
                    size, oldest = next(iter(self._free.items()))
                    if oldest:
                        oldest.pop(0)
                        self._kept -= size
                    if not oldest:
                        del self._free[size]
            finally:
                self._lock.release()


_pool = _Pool()


class _Lease:
    """The owner of a result's memory: the base of the array, and with it of all its views."""

    def __init__(self, pool: _Pool, block: _Block) -> None:
        self._pool = pool
        self._block = block
        self.__array_interface__ = block.interface

    def __del__(self) -> None:
        self._pool.give_back(self._block)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A new array, C-contiguous, its elements not set. A large one is aligned to 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    if size < POOLED or dtype.hasobject or dtype.kind not in "iufV":
        return np.empty(shape, dtype)
    return np.asarray(_Lease(_pool, _pool.take(size))).view(dtype).reshape(shape)
