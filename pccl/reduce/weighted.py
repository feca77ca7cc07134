"""The weighted mean, sum(w x) / sum(w): a sum of scaled arrays and of the weights, then a division on every member.

The arithmetic is the engine's, and the same in compiled programs: see `pccl/reduce/weighted.h`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pccl import _core, result_pool
from pccl._arrays import Array, Buffer
from pccl.errors import InvalidArgument
from pccl.types import DataType, ReduceOp

WORDS = "weighted mean of "  # what errors call it, and part of what members compare

_IN_FLOAT32 = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT)


def check_op(op: ReduceOp, func: str) -> None:
    """Refuses weights of what is no mean.

    Raises:
        InvalidArgument: It is none.
    """
    if op is not ReduceOp.AVG:
        sentence = f'weight= goes with op "avg" only, not with {op.name.lower()}'
        raise InvalidArgument.because(func, sentence)


def as_number(weight: object, func: str) -> float:
    """A weight as the user passed it, fit or not.

    Raises:
        InvalidArgument: It is no number at all.
    """
    if not isinstance(weight, bool | str | bytes) and getattr(weight, "ndim", 0) == 0:
        try:
            return float(weight)  # type: ignore[arg-type]
        except OverflowError:
            return float("inf")
        except (TypeError, ValueError):
            pass
    raise no_number(type(weight).__name__, func)


def no_number(kind: str, func: str) -> InvalidArgument:
    """The error of a weight that is a `kind`."""
    return InvalidArgument.because(func, f"weight= must be {_core.WEIGHTS}, not a {kind}")


class WeightedMean:
    """One member's part in a weighted mean.

    A weight that is no such thing takes part as NaN. So all members get the error, after the same
    call, and none waits for one that has turned away.

    Args:
        inputs: The arrays; read again after the operation if this peer turns out to be alone.
        weight: This member's weight.
        op: Must be AVG.
        func: The user's call, for errors.

    Attributes:
        sends: What is summed over the members: the scaled arrays, then the weight and a one.

    Raises:
        InvalidArgument: Another op, or the weight is no number.
    """

    def __init__(self, inputs: Sequence[Buffer], weight: object, op: ReduceOp, func: str) -> None:
        check_op(op, func)
        self._func = func
        self._given = weight
        self._inputs = inputs
        number = _core.as_weight(as_number(weight, func))
        own = Buffer(np.array([number, 1.0]), DataType.DOUBLE)
        self.sends = [*(_scaled(buffer, number) for buffer in inputs), own]

    def finish(self, sums: Sequence[Array], outs: Sequence[Array] | None) -> Sequence[Array]:
        """The means, from what the members' `sends` add up to.

        Args:
            sums: As `sends`; used up.
            outs: Where the means go, shapes and dtypes as the inputs'. None: new arrays.

        Raises:
            InvalidArgument: The weights add up to nothing, or one was none. `outs` are as before.
        """
        *parts, last = sums
        total, members = last.tolist()
        if not total > 0:
            raise InvalidArgument.because(self._func, self._unfit(total))
        if members == 1:  # exactly the input, not what a product and a quotient make of it
            copies = [buffer.array.copy() for buffer in self._inputs]
            return copies if outs is None else _written(copies, outs)
        made: list[Array] = []
        for index, (buffer, part) in enumerate(zip(self._inputs, parts, strict=True)):
            out = None if outs is None else outs[index]
            made.append(_mean(part, total, buffer, out))
        return made

    def _unfit(self, total: float) -> str:
        if total == 0:
            return "the members' weights add up to 0"
        if np.isnan(_core.as_weight(as_number(self._given, self._func))):
            return f"weight= must be {_core.WEIGHTS}, not {self._given!r}"
        return f"a member's weight is not {_core.WEIGHTS}"


def _written(values: Sequence[Array], outs: Sequence[Array]) -> Sequence[Array]:
    for value, out in zip(values, outs, strict=True):
        out[...] = value
    return outs


def _bytes(array: Array) -> Array:
    """A C-contiguous array's own."""
    return array.reshape(-1).view(np.uint8)


def _scaled(buffer: Buffer, weight: float) -> Buffer:
    """The array times the weight, in the type in which the products are added up."""
    wide = DataType.FLOAT if buffer.dtype in _IN_FLOAT32 else DataType.DOUBLE
    made = result_pool.empty(buffer.array.shape, np.dtype(wide.label))
    values = _bytes(np.ascontiguousarray(buffer.array))
    _core.scale(int(buffer.dtype), values, weight, _bytes(made))
    return Buffer(made, wide)


def _mean(part: Array, total: float, like: Buffer, out: Array | None) -> Array:
    """The quotient in the dtype of `like`."""
    dtype = like.array.dtype
    if out is not None and out.flags.c_contiguous:
        made = out
    elif part.itemsize == dtype.itemsize:
        made = part.view(dtype)
    else:
        made = result_pool.empty(part.shape, dtype)
    _core.unscale(int(like.dtype), _bytes(part), total, _bytes(made))
    if out is None or made is out:
        return made
    out[...] = made
    return out
