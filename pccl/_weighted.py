"""The weighted mean, sum(w x) / sum(w): a sum of scaled arrays and of the weights, then a division on every member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pccl import _memory
from pccl._arrays import Array, Buffer
from pccl.errors import InvalidArgument
from pccl.types import DataType, ReduceOp

# Other weights could make products that vanish or overflow in float32 while their sum does neither.
_LEAST, _MOST = 1e-18, 1e18
_FIT = f"0, or a number from {_LEAST:g} to {_MOST:g}"
# An integer mean this close to a whole number is that number: 3 is the mean of 3 and 3, whatever the weights.
_WHOLE, _WHOLE_RELATIVE = 1e-9, 2.0**-48

_ACCUMULATORS: dict[DataType, type[np.floating[Any]]] = {
    DataType.FLOAT16: np.float32,
    DataType.BFLOAT16: np.float32,
    DataType.FLOAT: np.float32,
}


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
        if op is not ReduceOp.AVG:
            sentence = f'weight= goes with op "avg" only, not with {op.name.lower()}'
            raise InvalidArgument.because(func, sentence)
        self._func = func
        self._given = weight
        self._inputs = inputs
        number = _number(weight, func)
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
        if np.isnan(_number(self._given, self._func)):
            return f"weight= must be {_FIT}, not {self._given!r}"
        return f"a member's weight is not {_FIT}"


def _written(values: Sequence[Array], outs: Sequence[Array]) -> Sequence[Array]:
    for value, out in zip(values, outs, strict=True):
        out[...] = value
    return outs


def _number(weight: object, func: str) -> float:
    """The weight; NaN for a number that is no weight."""
    fits = not isinstance(weight, bool | str | bytes) and getattr(weight, "ndim", 0) == 0
    try:
        number = float(weight) if fits else None  # type: ignore[arg-type]
    except OverflowError:
        number = np.inf
    except (TypeError, ValueError):
        number = None
    if number is None:
        sentence = f"weight= must be {_FIT}, not a {type(weight).__name__}"
        raise InvalidArgument.because(func, sentence)
    return number if number == 0 or _LEAST <= number <= _MOST else np.nan


def _scaled(buffer: Buffer, weight: float) -> Buffer:
    """The array times the weight, in the type in which the products are added up.

    Of a member with weight 0 nothing counts, not even its infinities and NaNs.
    """
    wide = _ACCUMULATORS.get(buffer.dtype, np.float64)
    made = _memory.empty(buffer.array.shape, np.dtype(wide))
    if weight > 0:
        with np.errstate(all="ignore"):  # as in the engine, whose overflows say nothing either
            values = _widened(buffer.array) if buffer.dtype is DataType.BFLOAT16 else buffer.array
            np.multiply(values, wide(weight), out=made, dtype=wide)
    else:
        made.fill(0)
    return Buffer(made, DataType.from_numpy_dtype(made.dtype))


def _mean(part: Array, total: float, like: Buffer, out: Array | None) -> Array:
    """The quotient in the dtype of `like`. In float64 until the last step, so that all members round alike."""
    dtype = like.array.dtype
    if out is None:
        out = part if part.dtype == dtype else _memory.empty(part.shape, dtype)
    if like.dtype is DataType.BFLOAT16:
        np.divide(part, np.float64(total), out=part, dtype=np.float64)
        out.view(np.uint16)[...] = _narrowed(part)
    elif part.dtype == np.float64 and like.dtype is not DataType.DOUBLE:
        np.divide(part, total, out=part)
        out[...] = _whole(part, dtype)
    else:
        with np.errstate(all="ignore"):
            np.divide(part, np.float64(total), out=out, dtype=np.float64, casting="same_kind")
    return out


def _whole(quotient: Array, dtype: np.dtype[Any]) -> Array:
    """Rounded toward zero, within the range of the integer type."""
    nearest = np.rint(quotient)
    near = np.abs(quotient - nearest) <= _WHOLE + np.abs(quotient) * _WHOLE_RELATIVE
    limits = np.iinfo(dtype)
    most = float(limits.max)
    if int(most) > limits.max:  # 64 bits have more digits than float64
        most = float(np.nextafter(most, 0))
    whole = np.where(near, nearest, np.trunc(quotient))
    return np.clip(whole, float(limits.min), most).astype(dtype)


def _widened(array: Array) -> Array:
    """bfloat16 as float32, without anybody's bfloat16 type."""
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrowed(array: Array) -> Array:
    """float32 as bfloat16's bits, rounded to nearest even."""
    bits = array.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype(np.uint16)
