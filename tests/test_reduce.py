"""Reduction kernels against plain NumPy, and instruction sets against each other byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import _testing

ml_dtypes = pytest.importorskip("ml_dtypes")

Array = np.ndarray[Any, np.dtype[Any]]

# By the numbers of DataType and ReduceOp.
DTYPES = [
    *map(np.dtype, ["u1", "i1", "i2", "u2", "u4", "i4", "u8", "i8", "f2"]),
    np.dtype(ml_dtypes.bfloat16),
    *map(np.dtype, ["f4", "f8", "?"]),
    np.dtype(ml_dtypes.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2),
    *map(np.dtype, ["c8", "c16"]),
]
SMALL_FLOATS = {8: "float16", 9: "bfloat16", 13: "float8_e4m3fn", 14: "float8_e5m2"}
OPS = ["sum", "avg", "prod", "max", "min"]
OPS_OF = {"b": ["max", "min"], "c": ["sum", "avg"]}  # of a kind of dtype; the others have all
COMBINE = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
INSTRUCTION_SETS = ["baseline", "avx2", "avx512"]
ALL_CASES = [
    pytest.param(d, o, id=f"{dtype.name}-{op}")
    for (d, dtype), (o, op) in itertools.product(enumerate(DTYPES), enumerate(OPS))
    if op in OPS_OF.get(dtype.kind, OPS)
]


@pytest.fixture(autouse=True)
def restore_instruction_set() -> Iterator[None]:
    chosen = _testing.instruction_set()
    yield
    assert _testing.force_instruction_set(chosen)


def available_sets() -> list[str]:
    chosen = _testing.instruction_set()
    available = [name for name in INSTRUCTION_SETS if _testing.force_instruction_set(name)]
    assert _testing.force_instruction_set(chosen)
    return available


def is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind not in "iub" and dtype.names is None


def parts(array: Array) -> Array:
    """Complex numbers as pairs of real ones."""
    return array.view(f"f{array.itemsize // 2}") if array.dtype.kind == "c" else array


# 128-bit integers, as sums of 64-bit integers under avg travel.
INT128 = np.dtype([("low", "<u8"), ("high", "<i8")])
UINT128 = np.dtype([("low", "<u8"), ("high", "<u8")])


def accumulation_dtype(dtype: np.dtype[Any], op: str) -> np.dtype[Any]:
    if op == "avg" and dtype.itemsize == 8 and not is_floating(dtype):
        return INT128 if dtype.kind == "i" else UINT128
    if is_floating(dtype):
        return np.dtype("f4") if dtype.itemsize <= 2 else dtype
    return np.dtype(dtype.kind + "8") if op == "avg" else dtype


def every(dtype: int) -> Array:
    """All values of a small float."""
    bits = 8 * DTYPES[dtype].itemsize
    return np.arange(2**bits, dtype=f"u{bits // 8}").view(DTYPES[dtype])


def misaligned(nbytes: int, offset: int) -> Array:
    """Uninitialised bytes that start `offset` bytes behind an allocation's start."""
    return np.full(nbytes + offset + 1, 0xAB, np.uint8)[offset : offset + nbytes]


def to_bytes(array: Array, offset: int = 0) -> Array:
    copy = misaligned(array.nbytes, offset)
    copy[:] = np.frombuffer(array.tobytes(), np.uint8)
    return copy


def random_array(rng: np.random.Generator, dtype: np.dtype[Any], count: int) -> Array:
    """Ordinary values mixed with arbitrary bits: NaNs with payloads, infinities, subnormals."""
    if dtype.kind == "c":
        return random_array(rng, np.dtype(f"f{dtype.itemsize // 2}"), 2 * count).view(dtype)
    most = 2 if dtype.kind == "b" else 256
    bits = rng.integers(0, most, count * dtype.itemsize, np.uint8).view(dtype)
    if not is_floating(dtype):
        return bits
    ordinary = rng.normal(0, 100, count).astype(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32).astype(dtype)
    values: Array = np.where(rng.random(count) < 0.7, ordinary, bits)
    values = np.where(rng.random(count) < 0.1, rng.choice(special, count), values)
    return values


def divide_toward_zero(values: Array, divisor: int) -> Array:
    wide = values.dtype.type
    quotient = values // wide(divisor)
    inexact = (values % wide(divisor)) != 0
    rounded: Array = quotient + ((values < 0) & inexact).astype(values.dtype)
    return rounded


def whole_numbers(values: Array) -> Any:
    """As Python ints."""
    if values.dtype.names is None:
        return values.astype(object)
    return (values["high"].astype(object) << 64) + values["low"].astype(object)


def to_128_bits(numbers: Any, wide: np.dtype[Any]) -> Array:
    made = np.empty(numbers.size, wide)
    made["low"] = (numbers % 2**64).astype(np.uint64)
    made["high"] = (numbers // 2**64 % 2**64).astype(np.uint64).view(wide["high"])
    return made


def wide_mean(dtype: np.dtype[Any], own: Array, others: list[Array], divisor: int) -> Array:
    wide = accumulation_dtype(dtype, "avg")
    total = sum(map(whole_numbers, others), whole_numbers(own))
    if divisor == 0:
        return to_128_bits(total, wide)
    total = whole_numbers(to_128_bits(total, wide))
    quotient = abs(total) // divisor * np.where(total < 0, -1, 1).astype(object)
    return to_128_bits(quotient, wide)["low"].view(dtype)


def reference(
    dtype: np.dtype[Any], op: str, own: Array, others: list[Array], divisor: int
) -> Array:
    wide = accumulation_dtype(dtype, op)
    if wide in (INT128, UINT128):
        return wide_mean(dtype, own, others, divisor)
    if dtype.kind == "c":
        real = np.dtype(f"f{dtype.itemsize // 2}")
        return reference(real, op, parts(own), list(map(parts, others)), divisor).view(dtype)
    with np.errstate(all="ignore"):
        result = own.astype(wide)
        for other in others:
            result = COMBINE[op](result, other.astype(wide))
        if divisor == 0:
            return result
        if op == "avg":
            if is_floating(dtype):
                result = result / wide.type(divisor)
            else:
                result = divide_toward_zero(result, divisor)
        return result.astype(dtype)


def reduced(
    dtype: int,
    op: int,
    own: Array,
    others: list[tuple[Array, bool]],
    divisor: int,
    offsets: list[int] | None = None,
) -> Array:
    result_type = DTYPES[dtype] if divisor else accumulation_dtype(DTYPES[dtype], OPS[op])
    at = itertools.cycle(offsets or [0])
    out = misaligned(own.size * result_type.itemsize, next(at))
    contributions = [(to_bytes(array, next(at)), accumulated) for array, accumulated in others]
    _testing.reduce(dtype, op, to_bytes(own, next(at)), contributions, divisor, out, own.size)
    return np.frombuffer(out.tobytes(), result_type)


def assert_same_values(got: Array, expected: Array, op: str) -> None:
    """Equal bytes, but for which NaN it is and, under min and max, which zero."""
    assert got.dtype == expected.dtype
    got, expected = parts(got), parts(expected)
    if is_floating(got.dtype):
        with np.errstate(invalid="ignore"):  # signalling NaNs
            nans = np.isnan(expected)
            np.testing.assert_array_equal(np.isnan(got), nans)
        got, expected = got[~nans], expected[~nans]
        if op in ("min", "max"):
            zeros = expected == 0
            np.testing.assert_array_equal(got == 0, zeros)
            got, expected = got[~zeros], expected[~zeros]
    np.testing.assert_array_equal(to_bytes(got), to_bytes(expected))


@pytest.mark.parametrize(("dtype", "op"), ALL_CASES)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.one_of(st.integers(0, 70), st.integers(500, 1100), st.integers(2040, 4200)),
    accumulated=st.lists(st.booleans(), max_size=4),
    divisor=st.sampled_from([0, 0, 1, 2, 3, 7, 1000]),
    offsets=st.lists(st.integers(0, 17), min_size=6, max_size=6),
)
def test_every_instruction_set_gives_numpys_result(
    dtype: int,
    op: int,
    seed: int,
    count: int,
    accumulated: list[bool],
    divisor: int,
    offsets: list[int],
) -> None:
    rng = np.random.default_rng(seed)
    raw, wide = DTYPES[dtype], accumulation_dtype(DTYPES[dtype], OPS[op])
    own = random_array(rng, raw, count)
    others = [(random_array(rng, wide if w else raw, count), w) for w in accumulated]
    expected = reference(raw, OPS[op], own, [array for array, _ in others], divisor)
    results = []
    for name in available_sets():
        _testing.force_instruction_set(name)
        results.append(reduced(dtype, op, own, others, divisor, offsets))
        assert_same_values(results[-1], expected, OPS[op])
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("name", available_sets())
@pytest.mark.parametrize(("dtype", "op"), ALL_CASES)
def test_out_may_be_own(name: str, dtype: int, op: int) -> None:
    assert _testing.force_instruction_set(name)
    rng = np.random.default_rng(dtype)
    for count, others_count, offset in itertools.product([1, 17, 2777], range(4), [0, 1]):
        own = random_array(rng, DTYPES[dtype], count)
        others = [(random_array(rng, DTYPES[dtype], count), False) for _ in range(others_count)]
        expected = reduced(dtype, op, own, others, 3)
        buffer = to_bytes(own, offset)
        contributions = [(to_bytes(array), False) for array, _ in others]
        _testing.reduce(dtype, op, buffer, contributions, 3, buffer, count)
        assert buffer.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", available_sets())
@pytest.mark.parametrize(("dtype", "op"), ALL_CASES)
def test_out_may_be_a_contribution(name: str, dtype: int, op: int) -> None:
    assert _testing.force_instruction_set(name)
    rng = np.random.default_rng(dtype)
    wide = accumulation_dtype(DTYPES[dtype], OPS[op])
    for count, place, final in itertools.product([1, 17, 2777], range(3), [False, True]):
        shared = DTYPES[dtype] if final else wide
        own = random_array(rng, DTYPES[dtype], count)
        others = [(random_array(rng, shared, count), not final) for _ in range(3)]
        divisor = 3 if final else 0
        expected = reduced(dtype, op, own, others, divisor)
        contributions = [(to_bytes(array), accumulated) for array, accumulated in others]
        out = contributions[place][0]
        _testing.reduce(dtype, op, to_bytes(own), contributions, divisor, out, count)
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", available_sets())
@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=SMALL_FLOATS.get)
def test_every_small_float_widens_exactly(name: str, dtype: int) -> None:
    assert _testing.force_instruction_set(name)
    own = every(dtype)
    assert_same_values(reduced(dtype, 0, own, [], 0), own.astype(np.float32), "sum")


@pytest.mark.parametrize("name", available_sets())
@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=SMALL_FLOATS.get)
def test_narrowing_rounds_to_nearest_even_around_every_midpoint(name: str, dtype: int) -> None:
    assert _testing.force_instruction_set(name)
    values = every(dtype).astype(np.float32)
    # Half of the distance to the next value, and one float to either side of it.
    half = 1 << (22 - ml_dtypes.finfo(DTYPES[dtype]).nmant)
    steps = [0, half - 1, half, half + 1]
    wide = np.concatenate([(values.view(np.uint32) + np.uint32(step)) for step in steps])
    subnormal = 2 * float(ml_dtypes.finfo(DTYPES[dtype]).smallest_normal)
    small = np.linspace(-subnormal, subnormal, 100001, dtype=np.float32)
    large = np.linspace(-1000, 1000, 100001, dtype=np.float32)  # around float8_e4m3fn's largest
    wide = np.concatenate([wide.view(np.float32), small, large])
    own = np.full(wide.size, -0.0, np.float32).astype(DTYPES[dtype])  # the identity of addition
    with np.errstate(all="ignore"):
        expected = wide.astype(DTYPES[dtype])
    assert_same_values(reduced(dtype, 0, own, [(wide, True)], 1), expected, "sum")


@pytest.mark.parametrize(("dtype", "op"), ALL_CASES)
def test_without_contributions_a_final_result_keeps_every_bit_unless_divided(
    dtype: int, op: int
) -> None:
    own = random_array(np.random.default_rng(1), DTYPES[dtype], 999)
    if OPS[op] != "avg":
        assert reduced(dtype, op, own, [], 5).tobytes() == own.tobytes()


@pytest.mark.parametrize("dtype", [*SMALL_FLOATS, 10, 11], ids=lambda code: DTYPES[code].name)
@pytest.mark.parametrize("op", range(5), ids=OPS)
def test_a_combined_nan_is_the_canonical_one(dtype: int, op: int) -> None:
    kind = DTYPES[dtype]
    own = np.full(37, -np.nan, np.float32).astype(kind)
    canonical = np.full(37, np.nan, np.float32).astype(kind)
    ones = np.ones(37, np.float32).astype(kind)
    assert reduced(dtype, op, own, [(ones, False)], 1).tobytes() == canonical.tobytes()
    assert reduced(dtype, op, ones, [(own, False)], 1).tobytes() == canonical.tobytes()


def test_integer_averages_round_toward_zero_and_do_not_overflow_the_element_type() -> None:
    own = np.array([-128, 127, -1, -2, 5], np.int8)
    other = np.array([-128, 127, 0, -1, 0], np.int8)
    got = reduced(1, 1, own, [(other, False)], 2)
    assert got.tolist() == [-128, 127, 0, -1, 2]


@pytest.mark.parametrize("name", available_sets())
@pytest.mark.parametrize("dtype", range(8), ids=lambda code: DTYPES[code].name)
def test_an_integer_mean_is_never_outside_its_inputs(name: str, dtype: int) -> None:
    assert _testing.force_instruction_set(name)
    limits = np.iinfo(DTYPES[dtype])
    own = np.array([limits.max, limits.min, limits.max, limits.min], DTYPES[dtype])
    others = np.array([limits.max, limits.min, limits.max - 3, limits.min + 3], DTYPES[dtype])
    for count in (1, 2, 7):
        got = reduced(dtype, 1, own, [(others, False)] * count, count + 1)
        # On a ring: partial sums travel.
        partial = reduced(dtype, 1, others, [(others, False)] * (count - 1), 0)
        assert got.tobytes() == reduced(dtype, 1, own, [(partial, True)], count + 1).tobytes()
        for mean, a, b in zip(got.tolist(), own.tolist(), others.tolist(), strict=True):
            assert min(a, b) <= mean <= max(a, b)


def test_an_unknown_instruction_set_is_refused() -> None:
    before = _testing.instruction_set()
    assert not _testing.force_instruction_set("avx3")
    assert _testing.instruction_set() == before
