"""Copies between accelerators and CPU memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from _pccl_torch import other_accelerators

# Pinned memory stays with the process, so larger tensors do without.
_PINNED = 1 << 30


def empty_on_cpu(like: torch.Tensor) -> torch.Tensor:
    """Contiguous CPU memory for the elements of `like`; for those of a CUDA tensor, pinned memory.

    torch keeps pinned memory for the next call. Copies to and from memory that is new to the
    process take several times as long.
    """
    pinned = like.device.type == "cuda" and like.nbytes <= _PINNED
    # A program may have another default device.
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in CPU memory: itself if it is there."""
    return tensor if tensor.device.type == "cpu" else empty_on_cpu(tensor).copy_(tensor)


def from_cpu(elements: torch.Tensor, to: torch.Tensor) -> None:
    """Gives `to`, on any device, these elements, rounded to its dtype."""
    # Rounded here, so that an accelerator gets its own dtype, and by pinned memory.
    to.copy_(elements if to.device.type == "cpu" else empty_on_cpu(to).copy_(elements))


class AnyDevice:
    """A device of any kind: MPS, XPU, one registered by another package.

    Copies are over when they return: torch orders a copy to or from unpinned memory after the work
    on the device's current stream, and waits for it.
    """

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        return np.empty(size, np.uint8)

    def empty(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(flat)

    def fetch(
        self, flat: torch.Tensor, begin: int, host: npt.NDArray[np.uint8]
    ) -> Callable[[], None]:
        torch.from_numpy(host).copy_(flat[begin : begin + host.size])
        return _done

    def store(
        self, flat: torch.Tensor, begin: int, host: npt.NDArray[np.uint8]
    ) -> Callable[[], None]:
        flat[begin : begin + host.size].copy_(torch.from_numpy(host))
        return _done


def _done() -> None:
    pass


class Cuda:
    """A CUDA device, or one of ROCm, which torch calls so.

    Copies run on a stream of their own, after the caller's stream.
    """

    _made: dict[torch.device, Cuda] = {}

    @classmethod
    def of(cls, device: torch.device) -> Cuda:
        if device not in cls._made:
            cls._made[device] = cls(device)
        return cls._made[device]

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Puts the thread's work on the copies' stream, and waits for it at the end."""
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def wait_for_caller(self) -> None:
        """The copies' stream goes on after all that the calling thread's stream has now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        pinned = size <= _PINNED
        memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        made: npt.NDArray[np.uint8] = memory.numpy()
        return made

    def empty(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(flat)

    def fetch(
        self, flat: torch.Tensor, begin: int, host: npt.NDArray[np.uint8]
    ) -> Callable[[], None]:
        return self._copy(torch.from_numpy(host), flat[begin : begin + host.size])

    def store(
        self, flat: torch.Tensor, begin: int, host: npt.NDArray[np.uint8]
    ) -> Callable[[], None]:
        return self._copy(flat[begin : begin + host.size], torch.from_numpy(host))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        # Also for new memory: the allocator may have taken it from work that still runs.
        self.wait_for_caller()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait


class _CallersStream:
    """The calling thread's stream on a device that is not CUDA's, for work of another thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.accelerator.current_stream(device)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Puts the thread's work on that stream, and waits for it at the end."""
        accelerator = torch.accelerator
        with ExitStack() as restored:
            restored.callback(accelerator.set_device_index, accelerator.current_device_index())
            before = accelerator.current_stream(self._stream.device)
            restored.callback(accelerator.set_stream, before)
            accelerator.set_stream(self._stream)  # and its device
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # the first error says more
                    self._wait()
                raise
            self._wait()

    def _wait(self) -> None:
        self._stream.record_event().synchronize()


@cache
def _has_events(device: torch.device) -> bool:
    """Whether streams of the device have events. Not all of those that packages register do."""
    try:
        torch.accelerator.current_stream(device).record_event()
    except RuntimeError:  # "backend doesn't support events"
        return False
    return True


def _order(device: torch.device) -> Cuda | _CallersStream | None:
    """The way that work of another thread follows that of the calling one on this device."""
    if device.type == "cuda":
        found = Cuda.of(device)
        found.wait_for_caller()
        return found
    # By name, since torch.accelerator is new. It is for one type of device.
    known = hasattr(getattr(torch, "accelerator", None), "set_device_index")
    known = known and device.type in other_accelerators() and _has_events(device)
    return _CallersStream(device) if known else None


def after_caller(
    tensors: Sequence[torch.Tensor],
) -> Callable[[], AbstractContextManager[None]]:
    """For another thread, whose work on these tensors is to follow the calling thread's.

    The calling thread's streams are its own; by itself, another thread's work on a device would not
    wait for them. The result makes a context for that thread: its work on these tensors' devices
    begins after what the caller has begun until now, and is over at the context's end. Devices that
    torch.accelerator does not know, or whose streams have no events, are left out; each of their
    copies waits for the thread's own stream only.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    found = [order for order in map(_order, devices) if order is not None]
    if not found:
        return nullcontext

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            for order in found:
                stack.enter_context(order.copies())
            yield

    return entered
