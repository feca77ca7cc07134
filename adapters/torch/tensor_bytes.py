"""Tensors of torch as arrays of the engine, and c10d's reductions as the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pccl.adapters.torch.devices import empty_on_cpu
from pccl.adapters.torch.errors import as_torch_error, not_supported
from pccl.errors import InvalidArgument, NotSupported
from pccl.types import DataType, ReduceOp

Bytes = npt.NDArray[np.uint8]


def copy_into(tensor: torch.Tensor, made: torch.Tensor) -> None:
    """Gives `tensor` the elements of `made`, on any thread."""
    # torch lets only threads in this mode write to a tensor that was made in it.
    with torch.inference_mode() if tensor.is_inference() else nullcontext():
        tensor.copy_(made)


class Array(NamedTuple):
    """A tensor's elements in CPU memory, contiguous.

    Attributes:
        data: Their bytes: the tensor's own memory where it is contiguous there, else a copy.
        tensor: The tensor.
        copy: The copy; None where there is none.
    """

    data: Bytes
    tensor: torch.Tensor
    copy: torch.Tensor | None

    def write_back(self) -> None:
        """Gives the tensor the elements of `data`."""
        if self.copy is not None:
            copy_into(self.tensor, self.copy)


class _Memory:
    """A tensor's memory for NumPy. After `Tensor.numpy()` its storage could never be resized."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # owns it
        self.__array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor in CPU memory, where they are."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    return np.asarray(_Memory(tensor))


def array_of(tensor: torch.Tensor, func: str, *, read: bool = True) -> Array:
    """A tensor for the engine. Without `read` its elements are only written.

    `func` names the call in errors.
    """
    if hasattr(tensor, "trigger_wait"):  # the result of a functional collective under way
        tensor = tensor.trigger_wait()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise not_supported(func, "backend pccl takes dense tensors only")
    if hasattr(tensor, "__tensor_flatten__"):
        sentence = "has no elements of its own; backend pccl takes the tensors that it consists of"
        raise not_supported(func, f"a {type(tensor).__name__} {sentence}")
    plain = tensor.detach()
    own = plain.device.type == "cpu" and plain.is_contiguous()
    if own and not plain.is_neg() and not plain.is_conj():
        return Array(bytes_of(plain), plain, None)
    copy = empty_on_cpu(plain)
    if read:
        copy.copy_(plain)
    return Array(bytes_of(copy), plain, copy)


def names_of(tensors: Sequence[torch.Tensor]) -> str:
    """Tensors in a few words, for error sentences."""
    return _names(tensors, [tuple(tensor.shape) for tensor in tensors])


def counts_of(tensors: Sequence[torch.Tensor]) -> str:
    """The same as if all were flat: what is equal on all ranks, whose shapes may differ."""
    return _names(tensors, [(tensor.numel(),) for tensor in tensors])


def _names(tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> str:
    shown = [
        f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
        for tensor, shape in zip(tensors[:3], shapes, strict=False)
    ]
    return ", ".join(shown) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")


class Bitwise(Enum):
    """A reduction of bits."""

    BAND = "and"
    BOR = "or"
    BXOR = "xor"

    def combine(self, bits: Bytes) -> Bytes:
        """Combines the rows of (ranks, bytes)."""
        function = {
            Bitwise.BAND: np.bitwise_and,
            Bitwise.BOR: np.bitwise_or,
            Bitwise.BXOR: np.bitwise_xor,
        }[self]
        combined: Bytes = function.reduce(bits, axis=0)
        return combined


_OPS: dict[Any, ReduceOp | Bitwise] = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVG,
    dist.ReduceOp.PRODUCT: ReduceOp.PROD,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
}
# Integers also have operations on their bits.
_INTEGER_OPS = _OPS | {
    dist.ReduceOp.BAND: Bitwise.BAND,
    dist.ReduceOp.BOR: Bitwise.BOR,
    dist.ReduceOp.BXOR: Bitwise.BXOR,
}
# bool tensors travel as bytes of 0 and 1.
_BOOL_OPS: dict[Any, ReduceOp | Bitwise] = {
    dist.ReduceOp.SUM: ReduceOp.MAX,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BOR: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.MIN,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.BAND: ReduceOp.MIN,
    dist.ReduceOp.BXOR: Bitwise.BXOR,
}

# Complex tensors travel as pairs of floats.
_COMPLEX_OPS = {op: _OPS[op] for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)}


def operation_of(op: Any, dtype: torch.dtype, func: str) -> tuple[ReduceOp | Bitwise, DataType]:
    """The engine's operation and dtype for a reduction of c10d."""
    table = _OPS if dtype.is_floating_point else _INTEGER_OPS
    if dtype == torch.bool:
        table = _BOOL_OPS
    elif dtype.is_complex:
        table = _COMPLEX_OPS
    found = next((ours for theirs, ours in table.items() if op == theirs), None)
    if found is None:
        name = getattr(op, "op", op)
        raise not_supported(func, f"backend pccl has no {name} of {dtype}")
    if dtype == torch.bool:
        return found, DataType.UINT8
    try:
        return found, DataType.from_torch_dtype(dtype.to_real() if dtype.is_complex else dtype)
    except (InvalidArgument, NotSupported) as error:
        raise as_torch_error(type(error).because(func, error.reason)) from None


def write(tensor: torch.Tensor, data: Bytes, func: str) -> None:
    """Gives a tensor of any layout and device these elements, in logical order."""
    array = array_of(tensor, func, read=False)
    array.data[:] = data
    array.write_back()
