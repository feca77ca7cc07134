"""CuPy arrays. Their elements go through pinned memory, in pieces that overlap with the network.

Copies run on a stream of their own, after the caller's current stream. All results are new arrays
in C order, or are written to `out`, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from pccl.adapters import Buffer, Device, Node, Place, Shared, Staged, as_array, overlaps
from pccl.types import DataType

__all__ = [
    "adopt",
    "beside",
    "devices_in_use",
    "elements_share_memory",
    "flatten",
    "from_buffers",
    "on_device",
    "recognises",
    "share",
    "stage",
    "to_buffers",
]

# CuPy keeps pinned memory for the process, so larger arrays do without.
_PINNED = 1 << 30
_Bytes = npt.NDArray[np.uint8]


class _Gpu:
    """One device, and the stream on which its copies run."""

    _made: dict[int, _Gpu] = {}

    @classmethod
    def of(cls, leaf: Any) -> _Gpu:
        number = int(leaf.device.id)
        if number not in cls._made:
            cls._made[number] = cls(number)
        return cls._made[number]

    def __init__(self, number: int) -> None:
        self._device = cupy.cuda.Device(number)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def pinned(self, size: int) -> _Bytes:
        if size > _PINNED:
            return np.empty(size, np.uint8)
        with self._device:
            memory = cupy.cuda.alloc_pinned_memory(max(size, 1))
        made: _Bytes = np.frombuffer(memory, np.uint8, size)
        return made

    def empty(self, flat: Any) -> Any:
        with self._device:
            return cupy.empty_like(flat)

    # The caller keeps `flat` and `host` until it has called what these return.

    def fetch(self, flat: Any, begin: int, host: _Bytes) -> Callable[[], None]:
        part = flat[begin : begin + host.size]
        return self._copy(part.data.copy_to_host_async, host)

    def store(self, flat: Any, begin: int, host: _Bytes) -> Callable[[], None]:
        part = flat[begin : begin + host.size]
        return self._copy(part.data.copy_from_host_async, host)

    def _copy(self, copy: Callable[[int, int, Any], None], host: _Bytes) -> Callable[[], None]:
        with self._device:
            # Also for new memory: the pool may have taken it from work that still runs.
            self._stream.wait_event(cupy.cuda.get_current_stream().record())
            copy(host.ctypes.data, host.size, self._stream)
            wait: Callable[[], None] = self._stream.record().synchronize
        return wait


def recognises(leaf: object) -> bool:
    """Whether `leaf` is an array of CuPy."""
    return isinstance(leaf, cupy.ndarray)


def devices_in_use() -> bool:
    """Always: CuPy has no arrays in CPU memory."""
    return True


def on_device(leaf: Any) -> bool:
    """Always."""
    return True


def elements_share_memory(leaf: Any) -> bool:
    """Whether writing one element may write another one."""
    return overlaps(leaf.shape, leaf.strides, leaf.itemsize)


def beside(made: Any, like: Any) -> Any:
    """`made` on the device of `like`."""
    if not recognises(made):
        with like.device:
            return cupy.asarray(made)
    if made.device == like.device:
        return made
    # Streams of different devices do not wait for each other, nor do the pools of their memory.
    with made.device:
        cupy.cuda.get_current_stream().synchronize()
    with like.device:
        moved = cupy.asarray(made)
        cupy.cuda.get_current_stream().synchronize()
    return moved


def stage(leaf: Any) -> Staged:
    """The array on its device.

    Raises:
        NotSupported: Its dtype is not there yet.
        InvalidArgument: Its dtype cannot be reduced.
    """
    dtype = DataType.from_numpy_dtype(leaf.dtype)
    device: Device = _Gpu.of(leaf)
    with leaf.device:
        flat = cupy.ascontiguousarray(leaf).reshape(-1).view(cupy.uint8)

    def restore(results: Any) -> Any:
        return results.view(leaf.dtype).reshape(leaf.shape)

    def write(results: Any) -> None:
        with leaf.device:
            leaf[...] = restore(results)

    return Staged(device, dtype, tuple(leaf.shape), flat, restore, write)


def _to_host(leaf: Any) -> npt.NDArray[Any]:
    """Its elements in C order, copied to pinned memory."""
    staged = stage(leaf)
    host: _Bytes = staged.device.pinned(leaf.nbytes)
    staged.device.fetch(staged.flat, 0, host)()
    elements: npt.NDArray[Any] = host.view(leaf.dtype).reshape(leaf.shape)
    return elements


def to_buffers(leaf: Any, *, writable: bool) -> Sequence[Buffer]:
    """A copy in CPU memory, to be read only.

    Raises:
        NotSupported: Its dtype is not there yet.
        InvalidArgument: Its dtype cannot be reduced.
    """
    return [Buffer(_to_host(leaf), DataType.from_numpy_dtype(leaf.dtype))]


def from_buffers(like: Any, buffers: Sequence[Buffer]) -> Any:
    """A new array on the device of `like`."""
    ((array, _),) = buffers
    return beside(array, like)


def share(leaf: Any) -> Shared:
    """A copy of the array's bytes.

    Raises:
        NotSupported: Its dtype is not there yet.
        InvalidArgument: Its dtype cannot be reduced.
    """
    data = _to_host(leaf).reshape(-1).view(np.uint8)
    place = Place(leaf.data.ptr, leaf.itemsize, leaf.shape, leaf.strides, "", written=True)
    return Shared(leaf.dtype.name, leaf.shape, data, False, "cupy", place)


def adopt(kind: str, shape: tuple[int, ...], data: npt.NDArray[Any], like: Any) -> Any:
    """`like` with these bytes, or a new array of them."""
    array = as_array(kind, shape, data)
    if like is None:
        return cupy.asarray(array)
    with like.device:
        like[...] = cupy.asarray(array)
    return like


def flatten(node: Any) -> Node | None:
    """CuPy has no containers."""
    return None
