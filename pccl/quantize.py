"""How arrays travel in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pccl.errors import InvalidArgument
from pccl.types import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceOp

# Bytes of an element, and of what rounding left out of it.
FLOATING = {
    DataType.FLOAT16: (2, 4),
    DataType.BFLOAT16: (2, 4),
    DataType.FLOAT: (4, 4),
    DataType.DOUBLE: (8, 8),
}
EXACT_BELOW = 64  # elements; the engine sends smaller arrays as they are
_MIN_BLOCK, _MAX_BLOCK = 64, 4096
_CODES = {"int8": 1, "uint8": 1, "int4": 2, "float8": 3}  # as the engine numbers them
_ALGORITHMS = {
    "min_max": QuantizationAlgorithm.MIN_MAX,
    "zero_point_scale": QuantizationAlgorithm.ZERO_POINT_SCALE,
}
_ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Quantize:
    """How `pccl.allreduce` sends floating-point elements between hosts: as codes, block by block.

    An element is rounded when it leaves its member, and the sum when it leaves its owner: twice,
    however many members there are, and once more where a plan reduces by regions. All members end
    with the same bytes. Blocks do not cross the parts in which arrays are sent, so where they lie
    depends on the group.

    Attributes:
        dtype: "int8" and "uint8": 256 steps a block. "int4": 16. "float8": the 8-bit floats with
            4 bits of exponent and 3 of mantissa (e4m3), scaled to the block: a relative precision
            of 6 % down to a 28,000th of the block's largest element.
        block: Elements that share a range: a multiple of 64, from 64 to 4096. More save bytes (each
            range takes 8, of float64 16), fewer follow the array more closely.
        algorithm: "min_max": a block's steps go from its least to its largest element.
            "zero_point_scale": zero is always one of the steps, so zeros stay zeros. It has no
            effect on float8, where zero is always a step.
        rounding: "nearest": to the next step, half a step off at most. "stochastic": up or down at
            random, in proportion, at most a step off; the mean over many calls is exact. The random
            numbers come from the call's number and the element's place, never from the clock.
        error_feedback: Keep what rounding left out, and add it to the same elements the next time
            (Seide et al., Interspeech 2014). Kept for each tag and path in the tree until the
            communicator closes, as float32 (float64 for float64); changed where the operation
            commits, dropped when shape or dtype change. Where a mean has a smaller weight of this
            member or fewer members than the one before, it is scaled down to them; a fall of the
            others' weights alone is not known in time. While an operation with the same tag and
            path is under way, a second one has none. A newcomer starts with nothing kept. Only with
            "sum" and "avg".
    """

    dtype: str = "int8"
    block: int = 512
    algorithm: str = "min_max"
    rounding: str = "nearest"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, _CODES),
            ("algorithm", self.algorithm, _ALGORITHMS),
            ("rounding", self.rounding, _ROUNDINGS),
        ):
            if not isinstance(value, str) or value not in known:
                names = ", ".join(map(repr, known))
                raise InvalidArgument.because(
                    "Quantize", f"{name} is one of {names}, not {value!r}"
                )
            # A subclass may compare equal and have other words.
            object.__setattr__(self, name, str.__str__(value))
        block = self.block
        if isinstance(block, bool) or not isinstance(block, int) or block % _MIN_BLOCK != 0:
            block = 0
        if not _MIN_BLOCK <= block <= _MAX_BLOCK:
            sentence = f"block is a multiple of 64 from 64 to 4096, not {self.block!r}"
            raise InvalidArgument.because("Quantize", sentence)
        object.__setattr__(self, "block", int(block))
        object.__setattr__(self, "error_feedback", bool(self.error_feedback))


class Codes(NamedTuple):
    """A `Quantize` as the engine is told it."""

    code: int
    zero_exact: bool
    stochastic: bool
    block: int


class Coding(NamedTuple):
    """`Codes`, and the words that members compare. The engine's fast path takes both."""

    codes: Codes
    words: str


def find(value: object) -> Quantize | None:
    """The value of a user's `quantize=`; None if it is neither a `Quantize` nor a dtype of one."""
    if isinstance(value, str) and value in _CODES:
        return _named(value)
    return value if isinstance(value, Quantize) else None


@lru_cache
def _named(dtype: str) -> Quantize:
    return Quantize(dtype)


def parse(value: object, func: str) -> Quantize:
    """The value of a user's `quantize=`.

    Raises:
        InvalidArgument: It is neither a `Quantize` nor the name of its dtype.
    """
    found = find(value)
    if found is not None:
        return found
    names = ", ".join(map(repr, _CODES))
    raise InvalidArgument.because(func, f"quantize is one of {names}, or a Quantize, not {value!r}")


def from_options(options: QuantizationOptions | None, func: str) -> Quantize | None:
    """The value of a user's `quantization_options=`; None: exact.

    Raises:
        InvalidArgument: An unknown algorithm, or codes that pccl does not have.
    """
    if options is None or options.algorithm == QuantizationAlgorithm.NONE:
        return None
    try:
        algorithm = QuantizationAlgorithm(options.algorithm)
        dtype = DataType(options.quantized_datatype)
    except ValueError as error:
        raise InvalidArgument.because(func, f"quantization_options: {error}") from None
    if dtype.label not in _CODES:
        sentence = f"quantization_options: quantized_datatype is UINT8 or INT8, not {dtype.name}"
        raise InvalidArgument.because(func, sentence)
    return Quantize(dtype.label, algorithm=algorithm.name.lower())


@lru_cache(maxsize=256)
def coding(how: Quantize) -> Coding:
    """The `Coding` of a `Quantize`."""
    return Coding(codes(how), words(how))


def codes(how: Quantize) -> Codes:
    """The `Codes` of a `Quantize`."""
    zero_exact = how.algorithm == "zero_point_scale"
    return Codes(_CODES[how.dtype], zero_exact, how.rounding == "stochastic", how.block)


def words(how: Quantize) -> str:
    """For errors, and to compare: ` as int8 (min_max)`."""
    more = "" if how.block == Quantize.block else f", blocks of {how.block}"
    if how.rounding != "nearest":
        more += f", {how.rounding}"
    return f" as {how.dtype} ({how.algorithm}{more})"


def check_op(how: Quantize, op: ReduceOp, func: str) -> None:
    """Refuses what cannot be quantized.

    Raises:
        InvalidArgument: A product; or error feedback with another op than "sum" and "avg".
    """
    if op is ReduceOp.PROD:
        sentence = (
            'a product cannot be quantized: errors would multiply; op "prod" needs quantize=None'
        )
        raise InvalidArgument.because(func, sentence)
    if how.error_feedback and op not in (ReduceOp.SUM, ReduceOp.AVG):
        sentence = f'error_feedback=True goes with "sum" and "avg", not with "{op.name.lower()}"'
        raise InvalidArgument.because(func, sentence)
