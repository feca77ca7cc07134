"""Arrays in memory that peers of one host read where they are."""

from __future__ import annotations

import math
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from pccl import _arrays, _core, frameworks
from pccl.errors import InvalidArgument, NotSupported, located

__all__ = ["empty", "from_array", "full", "zeros"]

_ALIGNMENT = 64

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Shape = int | tuple[int, ...]


@overload
def empty(shape: _Shape) -> npt.NDArray[np.float32]: ...
@overload
def empty(shape: _Shape, dtype: type[_Scalar] | np.dtype[_Scalar]) -> npt.NDArray[_Scalar]: ...
@overload
def empty(shape: _Shape, dtype: npt.DTypeLike) -> npt.NDArray[Any]: ...


def empty(shape: _Shape, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """A new NumPy array in shared memory, with undefined elements.

    Peers of this host reduce it in place, without a copy of its elements; everywhere else it is an
    array like any other. It is C-contiguous and aligned to 64 bytes, so `torch.from_numpy`, DLPack
    and `jax.device_put` take it without a copy; `jnp.asarray` copies. Their arrays count as shared,
    too, as does every slice that is C-contiguous. The memory is given back when the last array that
    looks into it is gone. A forked child shares it with its parent: each sees the writes of the
    other. Where the system refuses shared memory, the result is an ordinary array.

    Args:
        shape: The number of elements, or one number per dimension.
        dtype: Any without Python objects.

    Raises:
        InvalidArgument: A negative shape, or a dtype with Python objects.
        MemoryError: There is not enough memory.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        sentence = f"{kind} holds Python objects, which cannot be shared"
        raise InvalidArgument.because("empty", sentence)
    dimensions = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if any(size < 0 for size in dimensions):
        raise InvalidArgument.because("empty", f"negative dimensions in {dimensions}")
    size = math.prod(dimensions) * kind.itemsize
    if size >= 1 << 62:
        raise MemoryError(f"{dimensions} of {kind} are {size} bytes")
    memory = _core.shared_memory(size)
    if memory is None:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        memory = memory[start : start + size]
    return memory.view(kind).reshape(dimensions) if size else np.empty(dimensions, kind)


@overload
def zeros(shape: _Shape) -> npt.NDArray[np.float32]: ...
@overload
def zeros(shape: _Shape, dtype: type[_Scalar] | np.dtype[_Scalar]) -> npt.NDArray[_Scalar]: ...
@overload
def zeros(shape: _Shape, dtype: npt.DTypeLike) -> npt.NDArray[Any]: ...
def zeros(shape: _Shape, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """As `empty`, all bytes zero: numbers are 0, texts empty."""
    array = empty(shape, dtype)
    if array.nbytes:
        _arrays.flat_bytes(array)[...] = 0
    return array


@overload
def full(shape: _Shape, fill_value: Any) -> npt.NDArray[np.float32]: ...
@overload
def full(
    shape: _Shape, fill_value: Any, dtype: type[_Scalar] | np.dtype[_Scalar]
) -> npt.NDArray[_Scalar]: ...
@overload
def full(shape: _Shape, fill_value: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]: ...
def full(shape: _Shape, fill_value: Any, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """As `empty`, all elements `fill_value`."""
    array = empty(shape, dtype)
    array[...] = fill_value
    return array


@overload
def from_array(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]: ...
@overload
def from_array(array: Any) -> npt.NDArray[Any]: ...
def from_array(array: Any) -> npt.NDArray[Any]:
    """A copy in shared memory of any array: NumPy, torch, JAX, CuPy, nested lists.

    Raises:
        InvalidArgument: As `empty`, or the array has no bytes that could be copied.
        NotSupported: It is a DTensor, or NumPy does not have its dtype. NumPy has bfloat16 and the
            8-bit floats where ml_dtypes is installed.
    """
    if frameworks.find_adapter(array) is None:
        source = np.asarray(array)
    else:
        with located("from_array", "array"):
            shared = _arrays.share(array)
            if shared.part:
                sentence = "it is spread over ranks; pass its local tensor"
                raise NotSupported.because("", sentence)
            source = _arrays.as_array(shared.kind, shared.shape, shared.data)
    copy = empty(source.shape, source.dtype)
    copy[...] = source
    return copy
