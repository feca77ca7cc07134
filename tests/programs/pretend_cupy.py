"""A stand-in for CuPy on machines without a GPU.

It has what `pccl.adapters.cupy` and its tests use. Its arrays are NumPy's inside, and nothing but
its own functions can look into them. Copies to and from host memory happen as late as they may:
when an event behind them is awaited. Until then the target has no meaning.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np

Copy = Callable[[], object]
_BUSY = threading.RLock()


class Once:
    """Work on a stream. It is done at most once, whoever waits for it."""

    def __init__(self, work: Copy) -> None:
        self._work: Copy | None = work

    def __call__(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class Event:
    """The work that a stream had when the event was recorded."""

    def __init__(self, due: list[Once]) -> None:
        self._due = due

    def synchronize(self) -> None:
        with _BUSY:  # what another thread does is over as well
            for work in self._due:
                work()


class Stream:
    """Keeps what it was told to do until somebody waits for it."""

    def __init__(self, non_blocking: bool = False) -> None:
        self._due: list[Once] = []

    def add(self, work: Copy) -> None:
        with _BUSY:
            self._due.append(Once(work))

    def record(self) -> Event:
        with _BUSY:
            return Event(list(self._due))

    def wait_event(self, event: Event) -> None:
        self.add(event.synchronize)

    def synchronize(self) -> None:
        self.record().synchronize()
        with _BUSY:
            self._due.clear()


CURRENT = Stream()


class Device:
    def __init__(self, number: int = 0) -> None:
        self.id = number

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Pointer:
    """The elements of an array, as copies see them."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self._bytes = memory
        self.ptr = memory.__array_interface__["data"][0]

    def copy_to_host_async(self, address: int, size: int, stream: Stream) -> None:
        self._check(size)
        ctypes.memset(address, 0xFF, size)
        stream.add(lambda: ctypes.memmove(address, self.ptr, size))

    def copy_from_host_async(self, address: int, size: int, stream: Stream) -> None:
        self._check(size)
        ctypes.memset(self.ptr, 0xFF, size)
        stream.add(lambda: ctypes.memmove(self.ptr, address, size))

    def _check(self, size: int) -> None:
        assert self._bytes.flags.c_contiguous and self._bytes.nbytes == size


class ndarray:  # noqa: N801
    __module__ = "cupy"

    def __init__(self, inside: Any) -> None:
        self._inside = np.asarray(inside)
        self.device = Device()

    def __getattr__(self, name: str) -> Any:
        if name not in ("dtype", "shape", "strides", "itemsize", "nbytes", "size", "ndim"):
            raise AttributeError(name)
        return getattr(self._inside, name)

    @property
    def data(self) -> Pointer:
        return Pointer(self._inside)

    @property
    def T(self) -> ndarray:  # noqa: N802
        return ndarray(self._inside.T)

    def reshape(self, *shape: Any) -> ndarray:
        return ndarray(self._inside.reshape(*shape))

    def view(self, dtype: Any) -> ndarray:
        return ndarray(self._inside.view(dtype))

    def get(self) -> np.ndarray[Any, Any]:
        CURRENT.synchronize()
        elements: np.ndarray[Any, Any] = self._inside.copy()
        return elements

    def __getitem__(self, where: Any) -> ndarray:
        return ndarray(self._inside[where])

    def __setitem__(self, where: Any, value: ndarray) -> None:
        def write() -> None:
            self._inside[where] = value._inside

        CURRENT.add(write)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("no implicit conversion to a NumPy array; use .get()")


def asarray(value: Any) -> ndarray:
    return value if isinstance(value, ndarray) else ndarray(np.array(value))


def ascontiguousarray(value: ndarray) -> ndarray:
    """A copy whose elements are written when somebody waits for them."""
    if value._inside.flags.c_contiguous:
        return value
    made = ndarray(np.full_like(value._inside, -1, order="C", subok=False))
    made[...] = value
    return made


def install() -> None:
    """Makes it the module `cupy` of this process."""
    module: Any = types.ModuleType("cupy")
    module.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    module.ndarray, module.asarray, module.uint8 = ndarray, asarray, np.uint8
    module.ascontiguousarray = ascontiguousarray
    module.empty_like = lambda value: ndarray(np.empty_like(value._inside))
    module.broadcast_to = lambda value, shape: ndarray(np.broadcast_to(value._inside, shape))
    module.cuda = types.SimpleNamespace(
        Device=Device,
        Stream=Stream,
        get_current_stream=lambda: CURRENT,
        alloc_pinned_memory=bytearray,
    )
    sys.modules["cupy"] = module
