"""Arrays of any framework <-> the flat byte views that the engine works on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pccl import frameworks
from pccl.errors import InvalidArgument, NotSupported, located
from pccl.frameworks import Array, Buffer, Bytes, DeviceAdapter, Place, Shared
from pccl.types import DataType, ReduceOp, check_op

_SHARED = "its elements share memory, or may do so (broadcast? windows?); pass a copy"


class Leaf(NamedTuple):
    """One array or number on its way in.

    Attributes:
        buffers: Its memory.
        restore: Makes the result's kind from result arrays, one per buffer.
        guards: Number of trailing buffers that only tell `restore` whether the result is right. An
            output array has no place for them.
    """

    buffers: Sequence[Buffer]
    restore: Callable[[Sequence[Array]], object]
    guards: int = 0


def read(leaf: object, func: str, where: str, *, op: ReduceOp | None = None) -> Leaf:
    """The memory of an input leaf: array, NumPy scalar, or Python int or float.

    Args:
        leaf: The array or number.
        func: The user's call, for errors.
        where: Names the leaf in errors.
        op: How it will be reduced. Under avg a Python int becomes a float, since its mean is one.
            Under sum and prod a float travels beside it, which tells whether the result fits.

    Raises:
        InvalidArgument: It is no array or number, or cannot be reduced with this op.
        NotSupported: Not yet.
    """
    with located(func, where):
        found = _read(leaf, op, f"{func}: {where}")
        if op is not None:
            for _, dtype in found.buffers:
                check_op(dtype, op, "")
        return found


def _read(leaf: object, op: ReduceOp | None, name: str) -> Leaf:
    if isinstance(leaf, np.ndarray):
        return Leaf([_numpy_buffer(leaf)], lambda results: results[0])
    if isinstance(leaf, np.generic):
        scalar = np.asarray(leaf)
        if scalar.dtype == np.int64 and op in _GROWING:  # meets other members' Python ints
            return Leaf(_with_float(scalar), lambda r: np.int64(_checked(r, name)), guards=1)
        return Leaf([_numpy_buffer(scalar)], lambda results: results[0][()])
    if isinstance(leaf, int | float) and not isinstance(leaf, bool):
        as_float = op is ReduceOp.AVG or isinstance(leaf, float)
        try:
            number = np.array(leaf, np.float64 if as_float else np.int64)
        except OverflowError:
            raise InvalidArgument.because("", "the int does not fit in 64 bits") from None
        if not as_float and op in _GROWING:
            return Leaf(_with_float(number), lambda results: _checked(results, name), guards=1)
        dtype = DataType.DOUBLE if as_float else DataType.INT64
        return Leaf([Buffer(number, dtype)], lambda results: results[0].item())
    adapter = frameworks.any_adapter(leaf)
    if adapter is None:
        sentence = f"a {_type_name(leaf)} is neither an array nor a number"
        raise InvalidArgument.because("", sentence + _cure(leaf))
    buffers = adapter.to_buffers(leaf, writable=False)

    def restore(results: Sequence[Array]) -> object:
        made = [Buffer(r, b.dtype) for r, b in zip(results, buffers, strict=True)]
        return adapter.from_buffers(leaf, made)

    return Leaf(buffers, restore)


def _type_name(leaf: object) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")


# Results of these ops may need more bits than their inputs.
_GROWING = (ReduceOp.SUM, ReduceOp.PROD)


def _with_float(number: Array) -> list[Buffer]:
    """An int64, and a float of about the same value, which does not wrap."""
    return [Buffer(number, DataType.INT64), Buffer(number.astype(np.float64), DataType.DOUBLE)]


def _checked(results: Sequence[Array], name: str) -> int:
    """The result for an int, from those of `_with_float`: the same on all members.

    Raises:
        OverflowError: It does not fit in 64 bits.
    """
    exact: int = results[0].item()
    rounded: float = results[1].item()
    # A wrapped int is off by at least 2**64. Rounding is off by much less than half of that.
    # A NaN is infinity times zero, and the product is zero.
    if abs(rounded - exact) >= 2.0**63:
        raise OverflowError(f"{name}: the result for these ints does not fit in 64 bits")
    return exact


class Target(NamedTuple):
    """An output leaf.

    Attributes:
        buffers: Where its elements go: its own memory, or CPU memory for an array on a device.
        finish: Moves them from there to the leaf, where they are not there yet.
    """

    buffers: Sequence[Buffer]
    finish: Callable[[], object]


def write(leaf: object, func: str, where: str) -> Target:
    """The memory of an output leaf.

    Raises:
        InvalidArgument: It cannot be written.
        NotSupported: Not yet.
    """
    device = frameworks.device_adapter(leaf)
    if device is not None:
        return _write_to_device(leaf, device, func, where)
    return Target(_writable(leaf, func, where), _nothing)


def _nothing() -> None:
    pass


def _write_to_device(leaf: object, adapter: DeviceAdapter, func: str, where: str) -> Target:
    with located(func, where):
        check_device_target(leaf)
        staged = adapter.stage(leaf)
    host = staged.device.pinned(staged.size)

    def finish() -> None:
        results = staged.device.empty(staged.flat)
        staged.device.store(results, 0, host)()
        staged.write(results)

    elements = host.view(f"V{staged.dtype.size}").reshape(staged.shape)
    return Target([Buffer(elements, staged.dtype)], finish)


def check_device_target(leaf: object) -> None:
    """Refuses an array on a device that cannot be written.

    Raises:
        InvalidArgument: Its elements share memory.
    """
    adapter = frameworks.device_adapter(leaf)
    if adapter is not None and adapter.elements_share_memory(leaf):
        raise InvalidArgument.because("", _SHARED)


def _writable(leaf: object, func: str, where: str) -> Sequence[Buffer]:
    with located(func, where):
        if isinstance(leaf, np.ndarray):
            buffers: Sequence[Buffer] = [_numpy_buffer(leaf)]
        else:
            adapter = frameworks.any_adapter(leaf)
            if adapter is None:
                sentence = f"a {type(leaf).__name__} cannot be written; only arrays can be outputs"
                raise InvalidArgument.because("", sentence)
            buffers = adapter.to_buffers(leaf, writable=True)
        for array, _ in buffers:
            if not array.flags.writeable:
                raise InvalidArgument.because("", "the array is read-only")
            if overlaps(array.shape, array.strides, array.itemsize):
                raise InvalidArgument.because("", _SHARED)
    return buffers


def _numpy_buffer(array: Array) -> Buffer:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidArgument.because("", "a masked array cannot be reduced; fill it first")
    return Buffer(np.asarray(array), DataType.from_numpy_dtype(array.dtype))


def share(leaf: object) -> Shared:
    """The bytes of an array of any framework.

    Raises:
        InvalidArgument: It is no array, or cannot be shared.
        NotSupported: Not yet.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)
        if isinstance(leaf, np.ma.MaskedArray) or array.dtype.hasobject or array.dtype.names:
            raise InvalidArgument.because("", f"an array of {array.dtype} cannot be shared")
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        own = isinstance(leaf, np.ndarray) and array.flags.writeable
        kind = array.dtype.name
        if array.dtype.kind in "US" or array.dtype.type is np.void:
            kind = array.dtype.str[1:]
        if not array.itemsize or _dtype_of(kind) != native.dtype:
            raise InvalidArgument.because("", f"an array of {array.dtype} cannot be shared")
        writable = own and native is array and array.flags.c_contiguous
        data = flat_bytes(native)
        return Shared(kind, array.shape, data, writable, "", place_of(array, written=own))
    adapter = frameworks.any_adapter(leaf)
    if adapter is None:
        sentence = (
            f"a {_type_name(leaf)} is no array, number, string or None, and has no state_dict"
        )
        raise InvalidArgument.because("", sentence + _cure(leaf))
    if not hasattr(adapter, "share"):
        raise NotSupported.because("", f"the adapter of {type(leaf).__name__} cannot share arrays")
    return adapter.share(leaf)


def check_written(shared: Shared) -> None:
    """Refuses an array whose elements cannot be written one by one.

    Raises:
        InvalidArgument: Some of them share memory.
    """
    place = shared.place
    if place is not None and place.written and overlaps(place.shape, place.strides, place.item):
        raise InvalidArgument.because("", _SHARED)


def check_target(shared: Shared) -> None:
    """Refuses an array that cannot be an output.

    Raises:
        InvalidArgument: It is read-only, or as in `check_written`.
    """
    if shared.place is not None and not shared.place.written:
        raise InvalidArgument.because("", "the array is read-only")
    check_written(shared)


def _cure(leaf: object) -> str:
    """Advice for what becomes an array only by a copy, such as a variable of TensorFlow."""
    return "; pass numpy.asarray of it" if hasattr(type(leaf), "__array__") else ""


def place_of(array: Array, *, written: bool) -> Place:
    """The memory of a NumPy array."""
    reading = "" if array.dtype.isnative else "swapped"
    address = array.__array_interface__["data"][0]
    return Place(address, array.itemsize, array.shape, array.strides, reading, written)


def adopt(
    origin: str,
    kind: str,
    shape: tuple[int, ...],
    data: Array,
    like: object = None,
    beside: object = None,
) -> object:
    """An array of these bytes: in the place of `like`, or a new one of the framework `origin`.

    `beside`: an array of that framework; a new array is of its kind, and on its device.
    """
    if isinstance(like, np.ndarray | np.generic):
        adapter = None
    elif like is not None:
        adapter = frameworks.any_adapter(like)
    else:
        # The others' framework, if this process uses it as well.
        adapter = frameworks.adapter_of_module(origin) if origin in sys.modules else None
    if adapter is not None:
        made = adapter.adopt(kind, shape, data, like)
        same = beside is not None and frameworks.find_adapter(beside) is adapter
        return adapter.beside(made, beside) if same and hasattr(adapter, "beside") else made
    array = as_array(kind, shape, data)
    if beside is not None and not isinstance(beside, np.ndarray):
        # Arrays that only show their memory are of no framework by which `origin` could name them.
        shows = frameworks.any_adapter(beside)
        if shows is not None:
            return shows.from_buffers(beside, [Buffer(array, DataType.UINT8)])
    if isinstance(like, np.ndarray | np.generic) and like.dtype.newbyteorder("=") == array.dtype:
        array = array.astype(like.dtype, copy=False)
    if isinstance(like, np.ndarray) and like.flags.writeable:
        like[...] = array
        return like
    return array[()] if isinstance(like, np.generic) else array


def as_array(kind: str, shape: tuple[int, ...], data: Array) -> Array:
    """Bytes as a NumPy array.

    Raises:
        NotSupported: NumPy knows no such dtype, and ml_dtypes is not there.
    """
    return data.view(_dtype_of(kind)).reshape(shape)


def _dtype_of(kind: str) -> np.dtype[Any]:
    try:
        return np.dtype(kind)
    except TypeError:
        try:
            made: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), kind))
        except (ImportError, AttributeError):
            raise NotSupported.because("", f"NumPy has no {kind}; install ml_dtypes") from None
        return made


def overlaps(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Whether elements of a strided array may share memory. Exotic layouts count as if they did."""
    end = item
    steps = ((abs(step), extent) for step, extent in zip(strides, shape, strict=True) if extent > 1)
    for step, extent in sorted(steps):
        if step < end:
            return 0 not in shape
        end += step * (extent - 1)
    return False


def memory_at(address: int, count: int, dtype: DataType) -> Buffer:
    """`count` elements at an address, which the caller keeps valid."""
    size = count * dtype.size
    if size == 0:
        return Buffer(np.empty(0, np.uint8), dtype)
    import ctypes

    memory = (ctypes.c_uint8 * size).from_address(address)
    return Buffer(np.ctypeslib.as_array(memory), dtype)


def flat_bytes(array: Array) -> Bytes:
    """An array's bytes in C order: its own memory if it is C-contiguous, else a copy."""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8)
