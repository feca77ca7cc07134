"""The adapters of array frameworks: their contract, and how an array finds its own.

An adapter is found by the module names of the array's type and imported only then.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from pccl.types import DataType

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Rebuild = Callable[[Sequence[object]], object]
Wait = Callable[[], None]


class Buffer(NamedTuple):
    """CPU memory of an array.

    Attributes:
        array: NumPy view of it, any shape and strides. Its NumPy dtype only has the right size.
        dtype: What the elements are.
    """

    array: Array
    dtype: DataType


class Place(NamedTuple):
    """The memory of an array's own elements, also if `Shared.data` is a copy of them.

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
        place: Its elements' memory. None: that of `data` if it is writable, else memory that no
            other array uses.
        part: Which part it is of an array that is spread over ranks; "" for a whole one.
    """

    kind: str
    shape: tuple[int, ...]
    data: Array
    writable: bool
    origin: str
    place: Place | None = None
    part: str = ""


class Node(NamedTuple):
    """One level of a tree: `keys` as text, e.g. "['w']" or ".bias"; equally many `children`."""

    keys: Sequence[str]
    children: Sequence[object]
    rebuild: Rebuild


class Adapter(Protocol):
    """The functions that a framework's adapter has. Its errors need no path: the caller adds it."""

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
            like: The array that it replaces: may be written and returned. None: there is none.
        """

    def flatten(self, node: object) -> Node | None:
        """One level of a container type registered with the framework; None for all else."""


class Device(Protocol):
    """An accelerator, as `pccl.reduce.pieces` uses it. Copies run in the order of their calls."""

    def pinned(self, size: int) -> Bytes:
        """Host memory that the device copies to and from by itself."""

    def empty(self, flat: Any) -> Any:
        """Memory on the device for the results of `flat`."""

    def fetch(self, flat: Any, begin: int, host: Bytes) -> Wait:
        """Begins to copy bytes `begin...` of `flat` to `host`; the returned function awaits it."""

    def store(self, flat: Any, begin: int, host: Bytes) -> Wait:
        """Begins to copy `host` to the bytes `begin...` of `flat`."""


class Staged(NamedTuple):
    """An array on a device.

    Attributes:
        device: Where it is.
        dtype: What its elements are.
        shape: Its shape.
        flat: Its bytes on the device in logical order, flat: its own memory or a copy.
        restore: Makes an array of its kind from such bytes, which belong to it from now on.
        write: Writes such bytes to the array itself.
    """

    device: Device
    dtype: DataType
    shape: tuple[int, ...]
    flat: Any
    restore: Callable[[Any], object]
    write: Callable[[Any], None]

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.size


class DeviceAdapter(Adapter, Protocol):
    """An adapter of a framework that has arrays on accelerators.

    Its `to_buffers` gives a copy of such an array, to be read; its `adopt` writes to one.
    """

    def devices_in_use(self) -> bool:
        """Whether this process has any. Called in every reduction: must be cheap."""

    def on_device(self, leaf: Any) -> bool:
        """Whether the elements of `leaf` are there."""

    def stage(self, leaf: Any) -> Staged:
        """The array on its device; raises as `to_buffers`."""

    def beside(self, made: Any, like: Any) -> object:
        """The array `made`, on the device of the array `like`."""

    def elements_share_memory(self, leaf: Any) -> bool:
        """Whether writing one element may write another one."""


_KNOWN = {
    "cupy": "pccl.adapters.cupy",
    "torch": "pccl.adapters.torch.tensors",
    "jax": "pccl.adapters.jax.arrays",
    "jaxlib": "pccl.adapters.jax.arrays",
}
_registered: dict[str, Adapter] = {}
_unusable: set[str] = set()  # loaded frameworks whose adapter cannot be imported
_top_trace: Callable[[tuple[()]], object] | None = None  # JAX's function, once it was looked up
_by_type: WeakKeyDictionary[type, tuple[Adapter, ...]] = WeakKeyDictionary()


def register(module: str, adapter: Adapter) -> None:
    """Teaches pccl another framework's arrays.

    Args:
        module: First part of the name of the module that defines the array type, e.g. "mlx".
        adapter: An object, or a module, with the functions of `Adapter`.
    """
    _registered[module] = adapter
    _by_type.clear()


def adapter_of_module(module: str) -> Adapter | None:
    """The adapter of a framework; imports a known one."""
    if module not in _registered and module in _KNOWN:
        register(module, importlib.import_module(_KNOWN[module]))
    return _registered.get(module)


def find_adapter(leaf: object) -> Adapter | None:
    """The adapter that recognises `leaf`."""
    found = _by_type.get(type(leaf))
    if found is None:
        roots = dict.fromkeys(base.__module__.partition(".")[0] for base in type(leaf).__mro__)
        found = tuple(a for a in map(adapter_of_module, roots) if a is not None)
        _by_type[type(leaf)] = found
    return next((adapter for adapter in found if adapter.recognises(leaf)), None)


def any_adapter(leaf: object) -> Adapter | None:
    """The adapter that recognises `leaf`, or the generic one if `leaf` shows its memory."""
    found = find_adapter(leaf)
    if found is None:
        generic: Adapter = importlib.import_module("pccl.adapters.generic")
        if generic.recognises(leaf):
            return generic
    return found


def _in_use(framework: str) -> Adapter | None:
    """Its adapter, if the program has loaded a version of it that the adapter works with."""
    loaded = sys.modules.get(framework)
    if loaded is None or framework in _unusable:
        return None
    if framework not in _registered and getattr(loaded.__spec__, "_initializing", False):
        return None  # another thread is about to load it
    try:
        return adapter_of_module(framework)
    except Exception:  # another version lacks something; a call with its arrays raises the reason
        _unusable.add(framework)
        return None


def in_program() -> bool:
    """Whether JAX makes a program of the caller's function.

    Each call asks, so it is cheap, and imports JAX's adapter only where JAX traces something.
    """
    global _top_trace
    loaded = sys.modules.get("jax")
    if loaded is None:
        return False
    if _top_trace is None:
        if getattr(loaded.__spec__, "_initializing", False):
            return False  # another thread is about to load it
        _top_trace = _find_top_trace()
    if type(_top_trace(())).__name__ == "EvalTrace":
        return False
    adapter: Any = _in_use("jax")
    return adapter is not None and bool(adapter.in_program())


def _find_top_trace() -> Callable[[tuple[()]], object]:
    try:
        found: Callable[[tuple[()]], object] = importlib.import_module(
            "jax.extend.core"
        ).find_top_trace
    except Exception:  # another version lacks it; its adapter cannot be imported, either
        return lambda _: None
    return found


def find_tracing(leaves: Sequence[object]) -> Any:
    """The adapter of the framework that traces the caller's function; None if none does.

    Its `allreduce_traced` makes the call a part of what is traced. A call without a tracer is one
    where a program is traced, too: it would else be made once, when the program is compiled.
    """
    adapter: Any = _in_use("jax")
    if adapter is None:
        return None
    return adapter if any(map(adapter.is_traced, leaves)) or in_program() else None


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
    for framework in ("cupy", "jax", "torch"):
        _in_use(framework)  # its first array may be on a device
    return any(getattr(adapter, "devices_in_use", bool)() for adapter in _registered.values())


def device_adapter(leaf: object) -> DeviceAdapter | None:
    """The adapter that stages `leaf`; None if its elements are in CPU memory."""
    adapter = find_adapter(leaf)
    if not hasattr(adapter, "on_device") or not cast("DeviceAdapter", adapter).on_device(leaf):
        return None
    return cast("DeviceAdapter", adapter)


def is_spread(leaf: object) -> bool:
    """Whether it is one array in parts, over devices or ranks."""
    spread = getattr(find_adapter(leaf), "is_spread", None)
    return spread is not None and bool(spread(leaf))


def parts_of(leaf: object) -> Sequence[str]:
    """Which part of it each of its buffers is, in words; empty if it is whole."""
    tell = getattr(find_adapter(leaf), "parts", None)
    return () if tell is None else cast("Sequence[str]", tell(leaf))


def count_write(leaf: object) -> None:
    """Tells the framework of a write to the memory of `leaf` that does not go through it."""
    tell = getattr(find_adapter(leaf), "count_write", None)
    if tell is not None:
        tell(leaf)


def can_be_output(leaf: object) -> bool:
    """Whether arrays of the kind of `leaf` are written to, if they are not read-only."""
    if isinstance(leaf, np.ndarray):
        return True
    adapter = any_adapter(leaf)
    return adapter is not None and not getattr(adapter, "immutable", False)
