"""Arrays of any library that shows its CPU memory, by DLPack or by Python's buffer protocol.

The last resort, for types that no other adapter knows: MLX's arrays, TensorFlow's tensors, those of
Array-API libraries, array.array, bytearray, memoryview, ctypes. Inputs in CPU memory are read in
place. Those on another device are read through the buffer protocol where the CPU shares the
device's memory (MLX on Metal), else as the copy that `__array__` makes. A result has the input's
kind if its library takes memory over (`from_dlpack` or `asarray` of its `__array_namespace__`), or
is array.array, bytearray or memoryview; else it is a NumPy array.
"""

from __future__ import annotations

from array import array as PythonArray
from collections.abc import Sequence
from typing import Any

import numpy as np

from pccl import _arrays
from pccl.adapters import Array, Buffer, Node, Shared, as_array
from pccl.errors import InvalidArgument, NotSupported, PCCLError
from pccl.types import DataType

__all__ = ["adopt", "flatten", "from_buffers", "recognises", "share", "to_buffers"]

_DLPACK_CPU = 1


def recognises(leaf: object) -> bool:
    """Whether `leaf` shows memory. Bytes are refused: they are text as often as numbers."""
    if isinstance(leaf, bytes | str | np.generic):
        return False
    if _has_dlpack(leaf):
        return True
    try:
        memoryview(leaf).release()  # type: ignore[arg-type]
    except TypeError:
        return False
    except (BufferError, ValueError):
        pass  # it has memory, and `to_buffers` tells why it does not show it now
    return True


def _has_dlpack(leaf: object) -> bool:
    return hasattr(type(leaf), "__dlpack__") and hasattr(type(leaf), "__dlpack_device__")


def _device_type(leaf: Any) -> int:
    """The number of its device's type in DLPack. Some libraries leave out the device's own."""
    told = leaf.__dlpack_device__()
    return int(told[0] if isinstance(told, tuple) else told)


def _view(leaf: Any, *, writable: bool) -> Array:
    """A NumPy view of the array's memory; read-only where the library says so, or cannot say.

    Raises:
        InvalidArgument: It gives none.
        NotSupported: It is neither in CPU memory nor can be copied there by NumPy, or NumPy does
            not know its elements.
    """
    try:
        if not _has_dlpack(leaf):
            return np.asarray(memoryview(leaf))
        device = _device_type(leaf)
        if device == _DLPACK_CPU:
            return _imported(leaf, writable=writable)
        why = f"its memory is on device type {device} of DLPack; copy it to the CPU first"
    except RuntimeError as error:  # NumPy's, of dtypes
        why = f"NumPy cannot look into it: {error}"
    except (AttributeError, BufferError, TypeError, ValueError) as error:
        raise InvalidArgument.because("", f"it does not show its memory: {error}") from error
    return _on_host(leaf, why)


def _on_host(leaf: Any, why: str) -> Array:
    """Its elements where DLPack does not show them to NumPy, to be read only.

    In the memory that the CPU shares with the device, or in a copy. Only DLPack says whether memory
    may be written: libraries whose arrays do not change let several of them share it.

    Raises:
        NotSupported: There is no other way, either. Says `why` one is needed.
    """
    seen: Array
    try:
        seen = np.asarray(memoryview(leaf))
    except (BufferError, RuntimeError, TypeError, ValueError):
        # Without `__array__`, NumPy would ask for one element after the other.
        if not hasattr(type(leaf), "__array__"):
            raise NotSupported.because("", why) from None
        try:
            seen = np.asarray(leaf)
        except Exception as error:  # the library's own
            raise NotSupported.because("", f"{why} ({error})") from error
    seen = seen.view()
    seen.flags.writeable = False
    return seen


def _imported(leaf: Any, *, writable: bool) -> Array:
    try:
        return np.from_dlpack(leaf, copy=False)
    except TypeError:
        pass  # NumPy before 2.1, or a library before DLPack 1.0: those share, or refuse
    except BufferError:
        if writable:
            raise
        # A copy serves for reading. Writes to it would be lost.
        copy: Array = np.from_dlpack(leaf)
        copy.flags.writeable = False
        return copy
    view: Array = np.from_dlpack(leaf)
    return view


def to_buffers(leaf: Any, *, writable: bool) -> Sequence[Buffer]:
    """One view of the array's memory, any strides.

    Raises:
        NotSupported: The CPU cannot read it, or a dtype that is not there yet.
        InvalidArgument: It shows no memory, or its dtype cannot be reduced.
    """
    view = _view(leaf, writable=writable)
    return [Buffer(view, DataType.from_numpy_dtype(view.dtype))]


def from_buffers(like: Any, buffers: Sequence[Buffer]) -> object:
    """A new array of the kind of `like`, if it can be; else the NumPy array."""
    ((result, _),) = buffers
    if _has_dlpack(like):
        return _handed_over(like, result)
    if isinstance(like, PythonArray):
        made = PythonArray(like.typecode)
        made.frombytes(result.tobytes())
        return made
    if isinstance(like, bytearray):
        return bytearray(result.tobytes())
    return result.data if isinstance(like, memoryview) else result


def _handed_over(like: Any, result: Array) -> object:
    namespace = getattr(like, "__array_namespace__", None)
    if namespace is None:
        return result
    found = namespace()
    dtype = {"dtype": like.dtype} if hasattr(like, "dtype") else {}
    for name, how in (("from_dlpack", {}), ("asarray", {}), ("asarray", dtype)):
        take = getattr(found, name, None)
        try:
            made = None if take is None else take(result, **how)
            # MLX makes float32 of float64 unless it is told the dtype.
            if isinstance(made, type(like)) and _view(made, writable=False).dtype == result.dtype:
                return made
        except (BufferError, PCCLError, RuntimeError, TypeError, ValueError):
            continue  # the values are returned as a NumPy array then
    return result


def share(leaf: Any) -> Shared:
    """The array's bytes; its own memory when that may be written.

    Raises:
        NotSupported: The CPU cannot read it.
        InvalidArgument: It shows no memory.
    """
    return _arrays.share(_view(leaf, writable=False))


def adopt(kind: str, shape: tuple[int, ...], data: Array, like: Any) -> object:
    """`like` with these bytes if they can be written there, else a new array of its kind."""
    made = as_array(kind, shape, data)
    view = _view(like, writable=False)
    if view.flags.writeable and view.shape == made.shape:
        view[...] = made
        return like
    return from_buffers(like, [Buffer(made, DataType.UINT8)])


def flatten(node: object) -> Node | None:
    """Such libraries register no containers."""
    return None
