"""A stand-in for CUDA in torch, for `pccl.adapters.torch.devices`, on machines without a GPU.

Its tensors are in CPU memory. Work on them waits in a stream until somebody waits for it, as late
as it may be done, and new memory is poisoned. So whoever does not wait finds other elements.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from programs import pretend_cupy

DEVICE = torch.device("cuda", 0)
POISON = 0xEE


class Stream(pretend_cupy.Stream):
    def __init__(self, device: torch.device = DEVICE) -> None:
        super().__init__()

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record())


class Event:
    def record(self, stream: Stream) -> None:
        self._due = stream.record()

    def synchronize(self) -> None:
        self._due.synchronize()


DEFAULT = Stream()
_own = threading.local()
_freed: list[torch.Tensor] = []  # memory that the allocator gives out again


def current_stream(device: torch.device = DEVICE) -> Stream:
    """The calling thread's."""
    found: Stream = getattr(_own, "stream", DEFAULT)
    return found


@contextmanager
def stream(one: Stream) -> Iterator[None]:
    before, _own.stream = current_stream(), one
    try:
        yield
    finally:
        _own.stream = before


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    """Contiguous memory on the device, of which nobody knows what it holds."""
    if _freed:
        return _freed.pop().as_subclass(OnCuda)
    made = torch.empty(like.shape, dtype=like.dtype)
    made.view(torch.uint8).fill_(POISON)
    return made.as_subclass(OnCuda)


class OnCuda(torch.Tensor):
    """A tensor whose elements are read and written by work in streams only."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE
        if func is torch.empty_like:
            return _poisoned(_plain(args[0]))
        if func is torch.Tensor.contiguous and not _plain(args[0]).is_contiguous():
            return _poisoned(_plain(args[0])).copy_(args[0], non_blocking=True)
        if func is not torch.Tensor.copy_:
            return super().__torch_function__(func, types, args, kwargs)
        target, source = args
        to, of = _plain(target), _plain(source)
        later(lambda: to.copy_(of))
        both = isinstance(target, OnCuda) and isinstance(source, OnCuda)
        if not both and not kwargs.get("non_blocking", False):
            current_stream().synchronize()
        return target


def later(work: Callable[[], object]) -> None:
    """Adds to the calling thread's stream."""
    current_stream().add(work)


def late(values: torch.Tensor) -> torch.Tensor:
    """A tensor on the device, to which these elements are written late."""
    return _poisoned(values).copy_(values.clone().as_subclass(OnCuda))


def give_back(tensor: torch.Tensor) -> None:
    """Gives its memory back to the allocator, whatever still waits to read it."""
    _freed.append(_plain(tensor).view(torch.uint8))


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, once the work in the calling thread's stream is done."""
    current_stream().synchronize()
    return _plain(tensor).clone()


class Torch:
    """The module as the adapter sees it."""

    cuda = SimpleNamespace(Stream=Stream, Event=Event, stream=stream, current_stream=current_stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        made = torch.empty(*shape, **how)
        made.view(torch.uint8).fill_(POISON)
        return made
