"""torch tensors as memory that the engine reads and writes: `pccl.adapters.Adapter` for torch.

A contiguous tensor in CPU memory is reduced in place. Any other layout is packed in logical order
first, since another member's may differ. DTensors stand for their local shards. CUDA tensors go
through pinned memory. Results carry no autograd graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from _pccl_torch import other_accelerators
from pccl.adapters import Buffer, Device, Node, Place, Shared, Staged, overlaps
from pccl.adapters.torch.devices import AnyDevice, Cuda, to_cpu
from pccl.errors import InvalidArgument, NotSupported
from pccl.types import DataType

__all__ = [
    "adopt",
    "beside",
    "device_of",
    "devices_in_use",
    "elements_share_memory",
    "flatten",
    "from_buffers",
    "is_spread",
    "parts",
    "on_device",
    "recognises",
    "share",
    "stage",
    "to_buffers",
]


def recognises(leaf: object) -> bool:
    """Whether `leaf` is a tensor; parameters and DTensors are."""
    return isinstance(leaf, torch.Tensor)


# NumPy does not have these types.
_AS_INTEGERS = {
    DataType.BFLOAT16: torch.int16,
    DataType.FLOAT8_E4M3FN: torch.uint8,
    DataType.FLOAT8_E5M2: torch.uint8,
}


def _is_dtensor(leaf: torch.Tensor) -> bool:
    # By name: importing torch.distributed.tensor takes a second.
    return any(base.__name__ == "DTensor" for base in type(leaf).__mro__)


def _local(leaf: Any) -> torch.Tensor:
    """The plain tensor behind `leaf`, sharing its memory, apart from any graph."""
    if _is_dtensor(leaf):
        if any(placement.is_partial() for placement in leaf.placements):
            sentence = "a DTensor with a partial placement has no elements yet; redistribute it"
            raise InvalidArgument.because("", sentence)
        with torch.no_grad():
            leaf = leaf.to_local()
    if hasattr(leaf, "trigger_wait"):  # the result of a functional collective under way
        leaf = leaf.trigger_wait()
    plain: torch.Tensor = leaf.detach()
    return plain


def _check_dense(leaf: torch.Tensor) -> None:
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
        raise NotSupported.because("", "only dense tensors are supported yet")
    if leaf.is_meta:
        raise NotSupported.because("", "a tensor on the device meta has no elements")


def _flat_bytes(contiguous: torch.Tensor) -> torch.Tensor:
    """Its memory as flat uint8.

    Not by `view(-1)`: a contiguous tensor of at most one element may have any strides, with which
    no element of another size can be read.
    """
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def devices_in_use() -> bool:
    """Whether this process may have tensors on an accelerator."""
    return torch.cuda.is_initialized() or bool(other_accelerators())


def on_device(leaf: torch.Tensor) -> bool:
    """Whether the elements of `leaf` are on an accelerator."""
    return leaf.device.type not in ("cpu", "meta")


_ANY_DEVICE = AnyDevice()


def device_of(leaf: torch.Tensor) -> Device:
    """Moves elements between the device of `leaf` and CPU memory."""
    return Cuda.of(leaf.device) if leaf.device.type == "cuda" else _ANY_DEVICE


def elements_share_memory(leaf: torch.Tensor) -> bool:
    """Whether writing one element may write another one."""
    local = _local(leaf)
    return overlaps(local.shape, local.stride(), 1)


def beside(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`made` on the device of `like`."""
    return made.to(like.device)


def stage(leaf: torch.Tensor) -> Staged:
    """The tensor on its device.

    Raises:
        NotSupported: Not dense, or a dtype that is not there yet.
        InvalidArgument: Its dtype cannot be reduced, or it is a DTensor with a partial placement.
    """
    plain = _local(leaf)
    _check_dense(plain)
    dtype = DataType.from_torch_dtype(plain.dtype)
    flat = _flat_bytes(plain.resolve_conj().resolve_neg().contiguous())

    def unflat(results: torch.Tensor) -> torch.Tensor:
        return results.view(plain.dtype).view(plain.shape)

    def write(results: torch.Tensor) -> None:
        with torch.no_grad():
            _local(leaf).copy_(unflat(results))
        count_write(leaf)

    def restore(results: torch.Tensor) -> torch.Tensor:
        return _as_kind_of(leaf, unflat(results))

    return Staged(device_of(plain), dtype, tuple(plain.shape), flat, restore, write)


def to_buffers(leaf: torch.Tensor, *, writable: bool) -> Sequence[Buffer]:
    """One view of the tensor's memory, any strides; of a DTensor, its local shard's.

    For a tensor on an accelerator it is a copy in CPU memory, to be read only.

    Writing is like in-place writing under `torch.no_grad()`: a backward that needs the old elements
    of `leaf` raises.

    Raises:
        NotSupported: Not dense, or a dtype that is not there yet.
        InvalidArgument: Its dtype cannot be reduced, or it is a DTensor with a partial placement.
    """
    plain = _local(leaf)
    _check_dense(plain)
    dtype = DataType.from_torch_dtype(plain.dtype)
    plain = to_cpu(plain)
    if plain.is_neg() or plain.is_conj():
        if writable:
            bit = "negative" if plain.is_neg() else "conjugate"
            raise InvalidArgument.because("", f"a tensor with the {bit} bit cannot be written")
        plain = plain.resolve_conj().resolve_neg()
    if writable:
        count_write(leaf)
    if dtype in _AS_INTEGERS:
        plain = plain.view(_AS_INTEGERS[dtype])
    try:
        return [Buffer(plain.numpy(), dtype)]
    except (RuntimeError, TypeError) as error:
        raise NotSupported.because("", f"torch gives no NumPy view: {error}") from error


def from_buffers(like: torch.Tensor, buffers: Sequence[Buffer]) -> torch.Tensor:
    """A new tensor without graph, on the device of `like`.

    In CPU memory: the result's memory if `like` is contiguous, else its layout.
    """
    ((array, dtype),) = buffers
    made = torch.from_numpy(np.asarray(array))
    if dtype in _AS_INTEGERS:
        made = made.view(dtype.to_torch_dtype())
    return _as_kind_of(like, beside(made, _local(like)))


def is_spread(leaf: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return _is_dtensor(leaf)


def count_write(leaf: torch.Tensor) -> None:
    """Tells autograd of a write that does not go through torch: a backward that needs the old
    elements raises."""
    if not leaf.is_inference():
        torch.autograd.graph.increment_version(leaf)


def _as_kind_of(like: Any, made: torch.Tensor) -> torch.Tensor:
    """`made`, which has the elements, as the kind and layout of `like`."""
    local = _local(like)
    # An array of another shape is a part of it, or more than it.
    if not local.is_contiguous() and made.shape == local.shape:
        kept = torch.empty_like(local, memory_format=torch.preserve_format)
        made = made if kept.is_contiguous() else kept.copy_(made)
    if not _is_dtensor(like):
        return made
    wrapped: torch.Tensor = type(like).from_local(
        made,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return wrapped


def share(leaf: torch.Tensor) -> Shared:
    """The tensor's bytes; its own memory when it is contiguous and in CPU memory.

    A DTensor's bytes are those of its local shard.

    Raises:
        NotSupported: Not dense.
        InvalidArgument: It is a DTensor with a partial placement.
    """
    local = _local(leaf)
    _check_dense(local)
    plain = local
    own = plain.device.type == "cpu" and plain.is_contiguous()
    own = own and not plain.is_neg() and not plain.is_conj()
    if not own:
        plain = to_cpu(plain.resolve_neg().resolve_conj()).contiguous()
    try:
        data = _flat_bytes(plain).numpy()
    except (RuntimeError, TypeError) as error:
        raise NotSupported.because("", f"torch gives no NumPy view: {error}") from error
    kind = str(local.dtype).removeprefix("torch.")
    size = local.element_size()
    strides = tuple(size * stride for stride in local.stride())
    reading = "conjugated" * local.is_conj() + "negated" * local.is_neg()
    place = Place(local.data_ptr(), size, tuple(local.shape), strides, reading, written=True)
    return Shared(kind, tuple(local.shape), data, own, "torch", place, _part_of(leaf))


def parts(leaf: torch.Tensor) -> Sequence[str]:
    """Which part of the array its only buffer is, in words; empty if that is all of it."""
    return [_part_of(leaf)] if is_spread(leaf) and _local(leaf).shape != leaf.shape else ()


def _part_of(leaf: Any) -> str:
    """Which part of a DTensor its local shard is: "shard 0 of 2 on axis 0, replica of [4,3]".

    It is equal where the same elements are.

    Raises:
        InvalidArgument: This rank has no part of it.
    """
    if not _is_dtensor(leaf):
        return ""
    coordinate = leaf.device_mesh.get_coordinate()
    if coordinate is None:
        raise InvalidArgument.because("", "this rank is not in the mesh of the DTensor")
    axes = zip(leaf.placements, coordinate, leaf.device_mesh.shape, strict=True)
    shape = ",".join(map(str, leaf.shape))
    return ", ".join(_place_of(*axis) for axis in axes) + f" of [{shape}]"


def _place_of(placement: Any, place: int, size: int) -> str:
    if placement.is_replicate():
        return "replica"
    split = getattr(placement, "split_factor", 1)  # of FSDP2 over tensor parallelism
    strided = f", strided by {split}" if split > 1 else ""
    return f"shard {place} of {size} on axis {placement.dim}{strided}"


def adopt(
    kind: str, shape: tuple[int, ...], data: npt.NDArray[Any], like: torch.Tensor | None
) -> torch.Tensor:
    """`like` with these bytes, or a new tensor over them."""
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        raise NotSupported.because("", f"torch has no {kind}")
    if data.size == 0:
        made = torch.empty(shape, dtype=dtype, device="cpu")
    else:
        made = torch.from_numpy(data).view(dtype).reshape(shape)
    if like is None:
        return made
    _local(like).copy_(made)
    return like


def flatten(node: Any) -> Node | None:
    """torch registers no containers that pccl does not know."""
    return None
