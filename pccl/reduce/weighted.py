"""The weighted mean, sum(w x) / sum(w).

It is a sum of scaled arrays and of the weights, then a division on every member. The arithmetic is
the engine's, and the same in compiled programs: see `cpp/pccl/reduce/weighted.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pccl import _core, result_pool
from pccl._arrays import flat_bytes
from pccl.errors import InvalidArgument, PCCLError
from pccl.frameworks import Array, Buffer, find_adapter
from pccl.types import DataType, ReduceOp

WORDS = "weighted mean of "  # what errors call it, and part of what members compare

# Types whose products are no float64.
_PRODUCTS = {
    DataType.FLOAT8_E4M3FN: DataType.FLOAT,
    DataType.FLOAT8_E5M2: DataType.FLOAT,
    DataType.FLOAT16: DataType.FLOAT,
    DataType.BFLOAT16: DataType.FLOAT,
    DataType.FLOAT: DataType.FLOAT,
    DataType.COMPLEX64: DataType.COMPLEX64,
    DataType.COMPLEX128: DataType.COMPLEX128,
}


def check_op(op: ReduceOp, func: str) -> None:
    """Refuses weights with an op that is no mean.

    Raises:
        InvalidArgument: It is none.
    """
    if op is not ReduceOp.AVG:
        sentence = f'weight= goes with op "avg" only, not with {op.name.lower()}'
        raise InvalidArgument.because(func, sentence)


def as_number(weight: object, func: str) -> float:
    """A weight as the user passed it, valid or not.

    Raises:
        InvalidArgument: It is no number at all.
        PCCLError: It is the result of a call that failed.
    """
    if not isinstance(weight, bool | str | bytes) and getattr(weight, "ndim", 0) == 0:
        try:
            number: Callable[[Any], float] = getattr(find_adapter(weight), "number", float)
            return number(weight)
        except OverflowError:
            return float("inf")
        except PCCLError:  # some are ValueErrors, too
            raise
        except (TypeError, ValueError):
            pass
    raise no_number(type(weight).__name__, func)


def no_number(kind: str, func: str) -> InvalidArgument:
    """The error of a weight that is a `kind`."""
    return InvalidArgument.because(func, f"weight= must be {_core.WEIGHTS}, not a {kind}")


class WeightedMean:
    """One member's part in a weighted mean.

    A number that is no weight takes part as NaN. So all members get the error after the same call,
    and none waits for a member that has raised by itself.

    Args:
        inputs: The arrays; read again after the operation if this peer turns out to be alone.
        weight: This member's weight.
        func: The user's call, for errors.

    Attributes:
        sends: What is summed over the members: the scaled arrays, then the weight and a one.
        number: This member's weight; NaN: what was given is none.
        total: Sum of the members' weights, once the means are computed.
    """

    total: float

    def __init__(self, inputs: Sequence[Buffer], weight: object, func: str) -> None:
        self._func = func
        self._given = weight
        self._inputs = inputs
        # Whether an array whose mean takes the place of its sum is divided. An interrupt may end
        # `finish` between two arrays, and it is called again.
        self._divided = np.zeros(len(inputs), np.uint8)
        self.number = _core.as_weight(as_number(weight, func))
        own = Buffer(np.array([self.number, 1.0]), DataType.DOUBLE)
        self.sends = [*(_scaled(buffer, self.number) for buffer in inputs), own]

    def finish(self, sums: Sequence[Array], outs: Sequence[Array] | None) -> Sequence[Array]:
        """The means, from what the members' `sends` add up to. May be called again.

        Args:
            sums: As `sends`; used up.
            outs: Where the means go, shapes and dtypes as the inputs'. None: new arrays.

        Raises:
            InvalidArgument: The weights add up to 0, or one was invalid. `outs` are as before.
        """
        *parts, last = sums
        total, members = last.tolist()
        if not total > 0:
            raise InvalidArgument.because(self._func, self._unfit(total))
        self.total = total
        if members == 1:  # exactly the input, without the rounding of product and quotient
            means = [buffer.array.copy() for buffer in self._inputs]
        else:
            wanted = [None] * len(parts) if outs is None else outs
            divided = [self._divided[number : number + 1] for number in range(len(parts))]
            means = list(map(_mean, parts, [total] * len(parts), self._inputs, wanted, divided))
        if outs is None:
            return means
        for mean, out in zip(means, outs, strict=True):
            if mean is not out:
                out[...] = mean
        return outs

    def _unfit(self, total: float) -> str:
        if total == 0:
            return "the members' weights add up to 0"
        if np.isnan(self.number):
            return f"weight= must be {_core.WEIGHTS}, not {self._given!r}"
        return f"a member's weight is not {_core.WEIGHTS}"


def _scaled(buffer: Buffer, weight: float) -> Buffer:
    """The array times the weight, in the type in which the products are added up."""
    wide = _PRODUCTS.get(buffer.dtype, DataType.DOUBLE)
    made = result_pool.empty(buffer.array.shape, np.dtype(wide.label))
    _core.scale(int(buffer.dtype), flat_bytes(buffer.array), weight, flat_bytes(made))
    return Buffer(made, wide)


def _mean(part: Array, total: float, like: Buffer, out: Array | None, divided: Array) -> Array:
    """The quotient in the dtype of `like`: in `out` if that is contiguous."""
    dtype = like.array.dtype
    done = None
    if out is not None and out.flags.c_contiguous:
        made = out
    elif part.itemsize == dtype.itemsize:
        made, done = part.view(dtype), divided
    else:
        made = result_pool.empty(part.shape, dtype)
    _core.unscale(int(like.dtype), flat_bytes(part), total, flat_bytes(made), done)
    return made
