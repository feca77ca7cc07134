"""torch tensors in CPU memory: reduced in place in their own memory, results share NumPy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pccl.adapters import Buffer, Node, Shared, overlaps
from pccl.errors import InvalidArgument, NotSupported
from pccl.types import DataType

__all__ = ["adopt", "flatten", "from_buffers", "recognises", "share", "to_buffers"]


def recognises(leaf: object) -> bool:
    """Whether `leaf` is a tensor; parameters are."""
    return isinstance(leaf, torch.Tensor)


def _check_plain(leaf: torch.Tensor) -> None:
    if any(base.__name__ == "DTensor" for base in type(leaf).__mro__):
        raise NotSupported.because("", "DTensor is not supported yet; pass its local tensor")
    if leaf.device.type != "cpu":
        raise NotSupported.because(
            "", f"a tensor on {leaf.device} is not supported yet; use .cpu()"
        )
    if leaf.layout != torch.strided or leaf.is_quantized:
        raise NotSupported.because("", "only dense tensors are supported yet")


def to_buffers(leaf: torch.Tensor, *, writable: bool) -> Sequence[Buffer]:
    """One view of the tensor's memory, any strides. The autograd graph is not involved.

    Raises:
        NotSupported: Not a plain dense tensor in CPU memory, or a dtype that is not there yet.
        InvalidArgument: Its dtype cannot be reduced.
    """
    _check_plain(leaf)
    dtype = DataType.from_torch_dtype(leaf.dtype)
    plain = leaf.detach()
    if plain.is_neg():
        if writable:
            raise InvalidArgument.because("", "a tensor with the negative bit cannot be written")
        plain = plain.resolve_neg()
    if dtype is DataType.BFLOAT16:
        plain = plain.view(torch.int16)  # NumPy has no bfloat16
    try:
        return [Buffer(plain.numpy(), dtype)]
    except (RuntimeError, TypeError) as error:
        raise NotSupported.because("", f"torch gives no NumPy view: {error}") from error


def from_buffers(like: torch.Tensor, buffers: Sequence[Buffer]) -> torch.Tensor:
    """A new tensor without gradient over the result's memory."""
    ((array, dtype),) = buffers
    made = torch.from_numpy(np.asarray(array))
    return made.view(torch.bfloat16) if dtype is DataType.BFLOAT16 else made


def share(leaf: torch.Tensor) -> Shared:
    """The tensor's bytes; its own memory when it is contiguous.

    Raises:
        NotSupported: Not a plain dense tensor in CPU memory.
        InvalidArgument: Its elements share memory, so that it cannot be written.
    """
    _check_plain(leaf)
    if overlaps(leaf.shape, leaf.stride(), 1):
        raise InvalidArgument.because("", "its elements share memory (expanded?); pass a clone")
    plain = leaf.detach()
    own = plain.is_contiguous() and not plain.is_neg() and not plain.is_conj()
    if not own:
        plain = plain.resolve_neg().resolve_conj().contiguous()
    try:
        data = plain.reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:
        raise NotSupported.because("", f"torch gives no NumPy view: {error}") from error
    kind = str(leaf.dtype).removeprefix("torch.")
    return Shared(kind, tuple(leaf.shape), data, own, "torch")


def adopt(
    kind: str, shape: tuple[int, ...], data: npt.NDArray[Any], like: torch.Tensor | None
) -> torch.Tensor:
    """`like` with these bytes, or a new tensor over them."""
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        raise NotSupported.because("", f"torch has no {kind}")
    if data.size == 0:
        made = torch.empty(shape, dtype=dtype)
    else:
        made = torch.from_numpy(data).view(dtype).reshape(shape)
    if like is None:
        return made
    like.detach().copy_(made)
    return like


def flatten(node: Any) -> Node | None:
    """torch registers no containers that pccl does not know."""
    return None
