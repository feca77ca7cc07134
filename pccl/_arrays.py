"""Arrays of any framework <-> the flat byte views that the engine works on.

The adapter of a framework's arrays is found by the module names of the array's type, and imported
only then.
"""

from __future__ import annotations

import importlib
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from pccl import result_pool
from pccl.errors import InvalidArgument, NotSupported
from pccl.types import DataType, ReduceOp

if TYPE_CHECKING:
    from pccl.reduce.pieces import Staged

Array = npt.NDArray[Any]
Rebuild = Callable[[Sequence[object]], object]


class Buffer(NamedTuple):
    """CPU memory of an array.

    Attributes:
        array: NumPy view of it, any shape and strides. Its own dtype only has the right size.
        dtype: What the elements are.
    """

    array: Array
    dtype: DataType


class Place(NamedTuple):
    """Where an array's own elements lie, also if `Shared.data` is a copy of them.

    Attributes:
        address: Of the first element.
        item: Bytes of an element.
        shape: The array's shape.
        strides: Bytes from one element to the next, for each axis.
        reading: How elements are read, beside their dtype: byte order, lazy conjugation.
        written: A sync writes new bytes there.
    """

    address: int
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    reading: str
    written: bool


class Shared(NamedTuple):
    """An array's bytes for the shared state.

    Attributes:
        kind: Its dtype's name, the same in all frameworks.
        shape: Its shape.
        data: Its bytes in C order, flat uint8: its own memory, or a copy.
        writable: Bytes written to `data` are the array's new ones.
        origin: The framework: first part of its module's name; "" for NumPy.
        place: Its elements' memory. None: that of `data` if it is writable, else nobody else's.
    """

    kind: str
    shape: tuple[int, ...]
    data: Array
    writable: bool
    origin: str
    place: Place | None = None


class Node(NamedTuple):
    """One level of a tree: `keys` as text, e.g. "['w']" or ".bias"; equally many `children`."""

    keys: Sequence[str]
    children: Sequence[object]
    rebuild: Rebuild


class Adapter(Protocol):
    """What pccl asks of a framework. Errors it raises need no path: the caller adds it."""

    def recognises(self, leaf: object) -> bool:
        """Whether `leaf` is one of its arrays."""

    def to_buffers(self, leaf: Any, *, writable: bool) -> Sequence[Buffer]:
        """Views of the array's memory, kept alive by them.

        Args:
            leaf: The array.
            writable: The views are to be written; what is written is seen in `leaf`.

        Raises:
            InvalidArgument: It cannot be reduced, or not written.
            NotSupported: It could be, but not yet.
        """

    def from_buffers(self, like: Any, buffers: Sequence[Buffer]) -> object:
        """A new array of the kind of `like`, from memory that belongs to it from now on."""

    def share(self, leaf: Any) -> Shared:
        """The array's bytes, whatever its dtype.

        Raises:
            InvalidArgument: It has none that could be shared.
            NotSupported: Not yet.
        """

    def adopt(self, kind: str, shape: tuple[int, ...], data: Array, like: Any) -> object:
        """An array of those bytes, which belong to it from now on.

        Args:
            kind: Its dtype's name.
            shape: Its shape.
            data: Its bytes, in C order.
            like: The array whose place it takes: may be written and returned. None: a new place.
        """

    def flatten(self, node: object) -> Node | None:
        """One level of a container type registered with the framework; None for all else."""


class DeviceAdapter(Adapter, Protocol):
    """An adapter of a framework that has arrays on accelerators."""

    def devices_in_use(self) -> bool:
        """Whether this process has any. Called in every reduction: must be cheap."""

    def on_device(self, leaf: Any) -> bool:
        """Whether the elements of `leaf` are there."""

    def stage(self, leaf: Any) -> Staged:
        """The array on its device; raises as `to_buffers`."""


_KNOWN = {
    "torch": "pccl.adapters.torch.tensors",
    "jax": "pccl.adapters.jax.arrays",
    "jaxlib": "pccl.adapters.jax.arrays",
}
_registered: dict[str, Adapter] = {}
_unusable: set[str] = set()  # loaded frameworks whose adapter cannot be
_by_type: WeakKeyDictionary[type, tuple[Adapter, ...]] = WeakKeyDictionary()


def register(module: str, adapter: Adapter) -> None:
    """Teaches pccl another framework's arrays.

    Args:
        module: First part of the name of the module that defines the array type, e.g. "cupy".
        adapter: An object, or a module, with the functions of `Adapter`.
    """
    _registered[module] = adapter
    _by_type.clear()


def _adapter_of_module(module: str) -> Adapter | None:
    if module not in _registered and module in _KNOWN:
        register(module, importlib.import_module(_KNOWN[module]))
    return _registered.get(module)


def find_adapter(leaf: object) -> Adapter | None:
    """The adapter that recognises `leaf`."""
    found = _by_type.get(type(leaf))
    if found is None:
        roots = dict.fromkeys(base.__module__.partition(".")[0] for base in type(leaf).__mro__)
        found = tuple(a for a in map(_adapter_of_module, roots) if a is not None)
        _by_type[type(leaf)] = found
    return next((adapter for adapter in found if adapter.recognises(leaf)), None)


def _any_adapter(leaf: object) -> Adapter | None:
    """The adapter that recognises `leaf`, or the one of last resort for what shows its memory."""
    found = find_adapter(leaf)
    if found is None:
        generic: Adapter = importlib.import_module("pccl.adapters.generic")
        if generic.recognises(leaf):
            return generic
    return found


def _in_use(framework: str) -> Adapter | None:
    """Its adapter, if the program has loaded it, and it is a version that the adapter works with."""
    loaded = sys.modules.get(framework)
    if loaded is None or framework in _unusable:
        return None
    if framework not in _registered and getattr(loaded.__spec__, "_initializing", False):
        return None  # another thread is about to load it
    try:
        return _adapter_of_module(framework)
    except Exception:  # of whatever another version lacks; who passes its arrays is told
        _unusable.add(framework)
        return None


def find_tracing(tree: object) -> Any:
    """The adapter of the framework that traces the caller's function, so that `tree` is no array yet.

    Its `allreduce_traced` makes the call a part of what is traced.
    """
    adapter: Any = _in_use("jax")
    return adapter if adapter is not None and adapter.is_traced(tree) else None


def flatten_registered(node: object) -> Node | None:
    """One level of a container that a framework in use knows: JAX, or a registered one."""
    _in_use("jax")
    for adapter in dict.fromkeys(_registered.values()):
        found = adapter.flatten(node)
        if found is not None:
            return found
    return None


def devices_in_use() -> bool:
    """Whether there can be arrays on accelerators. Cheap; `on_device` asks for one array."""
    for framework in ("jax", "torch"):
        _in_use(framework)  # its first array may be on a device
    return any(getattr(adapter, "devices_in_use", bool)() for adapter in _registered.values())


def on_device(leaf: object) -> bool:
    """Whether an array has to be staged: its elements are on an accelerator."""
    adapter = find_adapter(leaf)
    return hasattr(adapter, "on_device") and cast("DeviceAdapter", adapter).on_device(leaf)


def stage(leaf: object, func: str, where: str) -> Staged | None:
    """An array on an accelerator; None for what is in CPU memory.

    Raises:
        InvalidArgument: It cannot be reduced.
        NotSupported: Not yet.
    """
    if not on_device(leaf):
        return None
    try:
        return cast("DeviceAdapter", find_adapter(leaf)).stage(leaf)
    except (InvalidArgument, NotSupported) as error:
        raise _named(error, func, where) from error.__cause__


class Leaf(NamedTuple):
    """One array or number on its way in.

    Attributes:
        buffers: Its memory.
        restore: Makes the result's kind from result arrays, one per buffer.
        guards: How many of the buffers, the last ones, only tell `restore` whether the result is
            right. An array that the result is written to has no place for them.
    """

    buffers: Sequence[Buffer]
    restore: Callable[[Sequence[Array]], object]
    guards: int = 0


def _named(error: InvalidArgument | NotSupported, func: str, where: str) -> Exception:
    """The same error, of the call that the user made, naming the array."""
    return type(error).because(func, f"{where}: {error.reason}")


def read(leaf: object, func: str, where: str, *, op: ReduceOp | None = None) -> Leaf:
    """The memory of an input leaf: array, NumPy scalar, or Python int or float.

    Args:
        leaf: The array or number.
        func: The user's call, for errors.
        where: Names the leaf in errors.
        op: How it will be reduced. Under avg a Python int becomes a float, since its mean is one.
            Under sum and prod a float travels beside it, which tells whether the result fits.

    Raises:
        InvalidArgument: Not an array or number that can be reduced.
        NotSupported: Not yet.
    """
    try:
        return _read(leaf, op, f"{func}: {where}")
    except (InvalidArgument, NotSupported) as error:
        raise _named(error, func, where) from error.__cause__


def _read(leaf: object, op: ReduceOp | None, name: str) -> Leaf:
    if isinstance(leaf, np.ndarray):
        return Leaf([_numpy_buffer(leaf)], lambda results: results[0])
    if isinstance(leaf, np.generic):
        scalar = np.asarray(leaf)
        if scalar.dtype == np.int64 and op in _GROWING:  # meets other members' Python ints
            return Leaf(_with_float(scalar), lambda results: results[0][()], guards=1)
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
    adapter = _any_adapter(leaf)
    if adapter is None:
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
        raise InvalidArgument.because("", f"a {kind} is neither an array nor a number")
    buffers = adapter.to_buffers(leaf, writable=False)

    def restore(results: Sequence[Array]) -> object:
        made = [Buffer(r, b.dtype) for r, b in zip(results, buffers, strict=True)]
        return adapter.from_buffers(leaf, made)

    return Leaf(buffers, restore)


# Results of these ops may need more bits than their inputs.
_GROWING = (ReduceOp.SUM, ReduceOp.PROD)


def _with_float(number: Array) -> list[Buffer]:
    """An int64, and a float of about the same value, which does not wrap."""
    return [Buffer(number, DataType.INT64), Buffer(number.astype(np.float64), DataType.DOUBLE)]


def _checked(results: Sequence[Array], name: str) -> int:
    """The result for a Python int, from those of `_with_float`: the same on all members.

    Raises:
        OverflowError: It does not fit in 64 bits.
    """
    exact: int = results[0].item()
    rounded: float = results[1].item()
    # An int that has wrapped is off by 2**64 at least; rounding, by much less than half of that.
    # A NaN is infinity times zero, and the product is zero.
    if abs(rounded - exact) >= 2.0**63:
        raise OverflowError(f"{name}: the result for these ints does not fit in 64 bits")
    return exact


def write(leaf: object, func: str, where: str) -> Sequence[Buffer]:
    """The memory of an output leaf.

    Raises:
        InvalidArgument: It cannot be written.
        NotSupported: Not yet.
    """
    try:
        if isinstance(leaf, np.ndarray):
            buffers: Sequence[Buffer] = [_numpy_buffer(leaf)]
        else:
            adapter = _any_adapter(leaf)
            if adapter is None:
                sentence = f"a {type(leaf).__name__} cannot be written; only arrays can be outputs"
                raise InvalidArgument.because("", sentence)
            buffers = adapter.to_buffers(leaf, writable=True)
        for array, _ in buffers:
            if not array.flags.writeable:
                raise InvalidArgument.because("", "the array is read-only")
            if any(
                stride == 0 and extent > 1
                for stride, extent in zip(array.strides, array.shape, strict=True)
            ):
                raise InvalidArgument.because("", "its elements share memory (it was broadcast)")
    except (InvalidArgument, NotSupported) as error:
        raise _named(error, func, where) from error.__cause__
    return buffers


def _numpy_buffer(array: Array) -> Buffer:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidArgument.because("", "a masked array cannot be reduced; fill it first")
    return Buffer(np.asarray(array), DataType.from_numpy_dtype(array.dtype))


def share(leaf: object) -> Shared:
    """The bytes of an array of any framework.

    Raises:
        InvalidArgument: It is none, or cannot be shared.
        NotSupported: Not yet.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)
        if isinstance(leaf, np.ma.MaskedArray) or array.dtype.hasobject or array.dtype.names:
            raise InvalidArgument.because("", f"an array of {array.dtype} cannot be shared")
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        own = isinstance(leaf, np.ndarray) and array.flags.writeable
        if own and overlaps(array.shape, array.strides, array.itemsize):
            raise InvalidArgument.because("", "its elements share memory; pass a copy")
        kind = array.dtype.name
        if array.dtype.kind in "US" or array.dtype.type is np.void:
            kind = array.dtype.str[1:]
        if not array.itemsize or _dtype_of(kind) != native.dtype:
            raise InvalidArgument.because("", f"an array of {array.dtype} cannot be shared")
        writable = own and native is array and array.flags.c_contiguous
        data = _flat(np.ascontiguousarray(native))
        return Shared(kind, array.shape, data, writable, "", place_of(array, written=own))
    adapter = _any_adapter(leaf)
    if adapter is None:
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
        sentence = f"a {kind} is no array, number, string or None, and has no state_dict"
        raise InvalidArgument.because("", sentence)
    if not hasattr(adapter, "share"):
        raise NotSupported.because("", f"the adapter of {type(leaf).__name__} cannot share arrays")
    return adapter.share(leaf)


def place_of(array: Array, *, written: bool) -> Place:
    """The memory of a NumPy array."""
    reading = "" if array.dtype.isnative else "swapped"
    address = array.__array_interface__["data"][0]
    return Place(address, array.itemsize, array.shape, array.strides, reading, written)


def is_spread(leaf: object) -> bool:
    """Whether it is one array in parts, over devices or ranks."""
    spread = getattr(find_adapter(leaf), "is_spread", None)
    return spread is not None and bool(spread(leaf))


def can_be_written(leaf: object) -> bool:
    """Whether `adopt` would put bytes into `leaf` itself."""
    if isinstance(leaf, np.ndarray):
        return leaf.flags.writeable
    adapter = find_adapter(leaf)
    return adapter is not None and not getattr(adapter, "immutable", False)


def adopt(
    origin: str, kind: str, shape: tuple[int, ...], data: Array, like: object = None
) -> object:
    """An array of these bytes: in the place of `like`, or a new one of the framework `origin`."""
    if isinstance(like, np.ndarray | np.generic):
        adapter = None
    elif like is not None:
        adapter = _any_adapter(like)
    else:
        # The others' framework, if this process uses it as well.
        adapter = _adapter_of_module(origin) if origin in sys.modules else None
    if adapter is not None:
        return adapter.adopt(kind, shape, data, like)
    array = as_array(kind, shape, data)
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


def _flat(array: Array) -> Array:
    """A C-contiguous array's bytes."""
    return array.reshape(-1).view(np.uint8)


def _span(flat: Array) -> tuple[int, int]:
    begin = int(flat.__array_interface__["data"][0])
    return begin, begin + flat.size


class Prepared(Protocol):
    """(send, recv, dtype code) for the engine, flat bytes each."""

    @property
    def arrays(self) -> list[tuple[Array, Array, int]]: ...


class Staging:
    """What the engine reads and writes for one operation, and the way of the results.

    The engine gets the caller's own memory wherever that is safe. Private copies stand in for
    arrays that are not C-contiguous, and where an input overlaps an output other than exactly (that
    is in place, which the engine does), or two outputs overlap.

    Attributes:
        arrays: (send, recv, dtype code) for the engine.
        results: Result arrays, one per input, in the inputs' shapes; complete after `finish`.
    """

    def __init__(self, sends: Sequence[Buffer], recvs: Sequence[Array] | None = None) -> None:
        self.results: list[Array] = []
        self._copy_back: list[tuple[Array, Array]] = []  # (the caller's array, private result)
        flat_sends = [_flat(np.ascontiguousarray(array)) for array, _ in sends]
        if recvs is None:
            self.results = [result_pool.empty(array.shape, array.dtype) for array, _ in sends]
            flat_recvs = [_flat(result) for result in self.results]
        else:
            flat_recvs = self._place(recvs)
            self._separate(flat_sends, flat_recvs)
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
            if array.flags.c_contiguous:
                begin, end = _span(_flat(array))
                at = bisect_right(taken, (begin, sys.maxsize))
                before = at > 0 and taken[at - 1][1] > begin
                after = at < len(taken) and taken[at][0] < end
                if not (before or after):
                    if end > begin:
                        taken.insert(at, (begin, end))
                else:
                    result = np.empty(array.shape, array.dtype)
            else:
                result = np.empty(array.shape, array.dtype)
            if result is not array:
                self._copy_back.append((array, result))
            self.results.append(result)
            flat_recvs.append(_flat(result))
        return flat_recvs

    @staticmethod
    def _separate(flat_sends: list[Array], flat_recvs: Sequence[Array]) -> None:
        """Copies each input that an output would overwrite, except exactly in place."""
        spans = sorted((*_span(recv), index) for index, recv in enumerate(flat_recvs) if recv.size)
        begins = [begin for begin, _, _ in spans]
        for index, send in enumerate(flat_sends):
            begin, end = _span(send)
            # Outputs are disjoint, so those that overlap [begin, end) are neighbours in `spans`.
            at = max(0, bisect_right(begins, begin) - 1)
            while at < len(spans) and spans[at][0] < end:
                if spans[at][1] > begin and spans[at] != (begin, end, index):
                    flat_sends[index] = send.copy()
                    break
                at += 1

    def finish(self) -> None:
        """After the commit: fills the caller's arrays that the engine could not write itself."""
        for array, result in self._copy_back:
            array[...] = result
        self._copy_back.clear()
