"""Quantization: the codes themselves, and operations that send them."""

from __future__ import annotations

import math
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from programs import quantize
from workers import Program, Run, running

import pccl
from pccl import _testing
from pccl import quantize as quantization

CODES = {"bits8": 1, "bits4": 2, "float8": 3}
STEPS = {1: 255, 2: 15}
SETS = [name for name in ("baseline", "avx2", "avx512") if _testing.force_instruction_set(name)]

Floats = npt.NDArray[Any]


@pytest.fixture(autouse=True)
def best_instruction_set():
    yield
    _testing.force_instruction_set(SETS[-1])


def as_bytes(array: Floats) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def encode(
    values: Floats,
    code: int,
    zero_exact: bool = False,
    stochastic: bool = False,
    block: int = 512,
    seed: int = 0,
) -> npt.NDArray[np.uint8]:
    wide = values.dtype == np.float64
    coded = np.full(_testing.coded_size(code, block, wide, values.size), 0xEE, np.uint8)
    _testing.encode(code, zero_exact, stochastic, block, wide, as_bytes(values), seed, coded)
    return coded


def decode(coded: npt.NDArray[np.uint8], like: Floats, code: int, block: int = 512) -> Floats:
    values = np.empty_like(like)
    _testing.decode(code, block, like.dtype == np.float64, coded, as_bytes(values))
    return values


def coded(values: Floats, code: int, block: int = 512, **how: Any) -> Floats:
    return decode(encode(values, code, block=block, **how), values, code, block)


def blocks(values: Floats, block: int) -> list[Floats]:
    return [values[first : first + block] for first in range(0, values.size, block)]


def allowed(block: Floats, code: int, zero_exact: bool, stochastic: bool) -> Floats:
    """How far an element of the block may come out from where it went in."""
    info = np.finfo(block.dtype)
    finite = block[np.isfinite(block)].astype(np.longdouble)
    if finite.size == 0:
        return np.zeros(block.size, np.longdouble)
    low, high = finite.min(), finite.max()
    largest = max(abs(low), abs(high))
    special = finite.size < block.size or largest > info.max / 8
    slack = 4 * info.eps * largest + (258 if code != 3 else 450) * info.smallest_normal
    if code == 3:
        relative = np.abs(block.astype(np.longdouble)) / 16
        step = largest / 416 / 512  # of those too small for a full mantissa
        bound = np.maximum(relative, step / 2) * (2 if stochastic else 1)
        return np.where(np.isfinite(block), bound + slack + 1e-6 * largest, 0)
    if zero_exact:
        low, high = min(low, 0), max(high, 0)
    step = (high - low) / (STEPS[code] - (3 if special else 0) - (1 if zero_exact else 0))
    # float32 rounds where a value lies between two steps, too.
    return np.full(block.size, step * ((1 if stochastic else 0.5) + 1e-4) + slack)


def elements(dtype: Any) -> st.SearchStrategy[float]:
    bits = 32 if dtype == np.float32 else 64
    return st.floats(width=bits, allow_subnormal=True) | st.floats(-1, 1, width=bits)


HUGE = [
    np.array([np.finfo(np.float64).min, 0.1, 0.2, 0.3]),
    np.array([0.1, 0.2, np.finfo(np.float64).max]),
    np.array([np.finfo(np.float64).min, np.finfo(np.float64).max, np.nan]),
    np.array([-3.4028235e38, 0.503 * 3.4028235e38, 1, 0], np.float32),
    np.array([1.167e38, 2e38, 3.4028235e38], np.float32),
    np.array([-3.25e38, 0, 3.4028235e38], np.float32),
    np.array([3.0e38, 3.4028235e38], np.float32),
    np.array([-3.4028235e38, -3.4028235e38], np.float32),
]


def check_within_a_step(
    values: Floats, code: int, zero_exact: bool, stochastic: bool, block: int
) -> None:
    result = coded(values, code, block, zero_exact=zero_exact, stochastic=stochastic)
    for before, after in zip(blocks(values, block), blocks(result, block), strict=True):
        with np.errstate(over="ignore"):
            bound = allowed(before, code, zero_exact, stochastic)
        finite = np.isfinite(before)
        assert np.array_equal(before[~finite], after[~finite], equal_nan=True)
        assert np.isfinite(after[finite]).all()
        off = np.abs(after[finite].astype(np.longdouble) - before[finite].astype(np.longdouble))
        assert (off <= bound[finite]).all()


@settings(max_examples=300)
@given(data=st.data())
def test_what_comes_out_is_within_a_step_of_what_went_in(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    values = data.draw(hnp.arrays(dtype, st.integers(1, 300), elements=elements(dtype)))
    code = data.draw(st.sampled_from(sorted(CODES.values())))
    zero_exact, stochastic = data.draw(st.booleans()), data.draw(st.booleans())
    block = data.draw(st.sampled_from([64, 128, 512]))
    check_within_a_step(values, code, zero_exact, stochastic, block)


@pytest.mark.parametrize("values", HUGE, ids=range(len(HUGE)))
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_the_largest_numbers_stay_finite_and_harm_no_other(code: int, values: Floats) -> None:
    for zero_exact in (False, True):
        for stochastic in (False, True):
            check_within_a_step(values, code, zero_exact, stochastic, 512)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize("block", [64, 192, 320, 1344, 4096])
def test_in_steps_it_is_the_same_as_at_once(block: int, code: int) -> None:
    for count in (1, 5 * block + 17, 9001):
        values = np.random.default_rng(count).normal(size=count).astype(np.float32)
        whole = encode(values, code, stochastic=True, block=block, seed=3)
        for blocks_at_once in (1, 3):
            step = blocks_at_once * block
            parts = np.full_like(whole, 0xEE)
            _testing.encode(code, False, True, block, False, as_bytes(values), 3, parts, step=step)
            assert (parts == whole).all()
            result = np.empty_like(values)
            _testing.decode(code, block, False, whole, as_bytes(result), step=step)
            assert (result == decode(whole, values, code, block)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_every_processor_makes_and_reads_the_same_codes(
    code: int, stochastic: bool, dtype: Any
) -> None:
    random = np.random.default_rng(code)
    values = (random.normal(size=5003) * np.exp(random.normal(size=5003) * 3)).astype(dtype)
    values[[70, 1400, 1401]] = np.inf, np.nan, -np.inf
    codes, results = [], []
    for name in SETS:
        assert _testing.force_instruction_set(name)
        codes.append(encode(values, code, stochastic=stochastic, seed=7))
        results.append(decode(codes[0], values, code))
    assert all((other == codes[0]).all() for other in codes)
    assert all((as_bytes(other) == as_bytes(results[0])).all() for other in results)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_one_element_that_is_not_finite_does_not_spoil_its_block(code: int) -> None:
    values = np.random.default_rng(1).normal(size=2048).astype(np.float32)
    spoilt = values.copy()
    spoilt[[3, 600, 601, 602]] = np.nan, np.inf, -np.inf, np.nan
    result = coded(spoilt, code)
    bad = ~np.isfinite(spoilt)
    assert np.array_equal(result[bad], spoilt[bad], equal_nan=True)
    worst = {1: 0.02, 2: 0.4, 3: 0.3}[code]
    assert np.abs(result[~bad] - values[~bad]).max() < worst
    untouched = slice(1024, None)  # the other blocks are as if nothing had happened
    assert np.array_equal(result[untouched], coded(values, code)[untouched])


@pytest.mark.parametrize("value", [0.0, 3.25, -7e30, 1e-42])
def test_blocks_of_equal_elements_come_back_exactly(value: float) -> None:
    values = np.full(1000, value, np.float32)
    for code in (1, 2):
        assert np.array_equal(coded(values, code), values)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_zeros_stay_zeros(code: int, stochastic: bool) -> None:
    random = np.random.default_rng(2)
    values = random.normal(3, 1, size=200_000).astype(np.float32)
    zeros = random.random(values.size) < 0.3
    values[zeros] = 0
    for seed in range(5):
        result = coded(values, code, zero_exact=True, stochastic=stochastic, seed=seed)
        assert not result[zeros].any()


def test_float8_is_the_8_bit_float_of_the_field() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = every[np.isfinite(every)]
    between = np.random.default_rng(3).uniform(-448, 448, 4096 - every.size).astype(np.float32)
    values = np.concatenate([every, between])  # one block, which 448 scales by 1
    expected = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(coded(values, CODES["float8"], 4096), expected)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_random_rounding_is_repeatable_and_right_on_average(code: int) -> None:
    values = np.random.default_rng(4).normal(size=512).astype(np.float32)
    first = coded(values, code, stochastic=True, seed=1)
    assert np.array_equal(first, coded(values, code, stochastic=True, seed=1))
    rounds = np.array([coded(values, code, stochastic=True, seed=seed) for seed in range(2000)])
    assert len(np.unique(rounds, axis=0)) > 1900
    step = (values.max() - values.min()) / {1: 255, 2: 15, 3: 32}[code]
    # Six standard errors of the mean of so many roundings, each a step wide.
    assert np.abs(rounds.mean(0) - values).max() < 6 * step / 2 / math.sqrt(2000)


def test_sizes_are_what_the_documentation_says() -> None:
    million = 1 << 20
    assert _testing.coded_size(1, 512, False, million) == million + 8 * 2048
    assert _testing.coded_size(2, 512, False, million) == million // 2 + 8 * 2048
    assert _testing.coded_size(3, 512, True, million) == million + 16 * 2048
    assert _testing.coded_size(2, 64, False, 65) == 33 + 16


# ---- whole operations ----------------------------------------------------------------------------


@pytest.fixture
def run():
    with running(PCCL_SHM="0") as made:  # on one host nothing is quantized
        yield made


def results(run: Run, count: int, program: Program, **env: str) -> list[dict[str, Any]]:
    """Returns what each peer says at the end. Programs get their number: 0, 1, ... as started."""
    env["PCCL_MIN_PEERS"] = str(count)
    peers = [run.peer(partial(program, number), **env) for number in range(count)]
    said = [peer.expect("done", timeout=60) for peer in peers]
    for peer in peers:
        assert peer.ends() == 0, peer.stderr()
    return said


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "most", "fewer"),
    [("int8", 0.03, 3.6), ("uint8", 0.03, 3.6), ("int4", 0.55, 6.5), ("float8", 0.5, 3.6)],
)
def test_the_sum_is_near_the_same_for_all_and_takes_a_part_of_the_bytes(
    run: Run, dtype: str, most: float, fewer: float, members: int
) -> None:
    said = results(run, members, partial(quantize.near, members=members, dtype=dtype))
    assert len({one["digest"] for one in said}) == 1
    assert max(one["off"] for one in said) < most
    assert min(one["ratio"] for one in said) > fewer


@pytest.mark.parametrize("shm", ["0", "1"])
def test_trees_dtypes_and_ops(run: Run, shm: str) -> None:
    pytest.importorskip("ml_dtypes")
    assert len({one["digest"] for one in results(run, 3, quantize.trees, PCCL_SHM=shm)}) == 1


@pytest.mark.shared_memory
def test_in_memory_of_one_host_the_result_is_exact(run: Run) -> None:
    results(run, 3, quantize.exact_in_memory, PCCL_SHM="1")


def test_what_is_not_finite_stays_so_and_harms_no_other(run: Run) -> None:
    results(run, 3, quantize.not_finite)


def test_weighted_means_are_quantized_and_their_weights_are_not(run: Run) -> None:
    results(run, 2, quantize.weighted)


def test_error_feedback_gives_later_what_rounding_took(run: Run) -> None:
    for one in results(run, 2, quantize.drift):
        assert one["with_it"] < 0.2 * one["without"], one


def test_feedback_changes_with_the_commit_only(run: Run) -> None:
    env = {"PCCL_MIN_PEERS": "2"}
    first, second = (run.peer(partial(quantize.feedback_of_a_timeout, n), **env) for n in range(2))
    first.expect("timed out")
    second.tell("go")
    second.expect("timed out")
    for peer in (first, second):
        peer.expect("done")
        assert peer.ends() == 0, peer.stderr()


def test_members_that_quantize_differently_are_told(run: Run) -> None:
    results(run, 2, quantize.different)


def test_the_survivors_of_a_loss_reduce_again(run: Run) -> None:
    peers = [run.peer(partial(quantize.loss, n), PCCL_MIN_PEERS="3") for n in range(3)]
    for peer in peers:
        peer.expect("ready")
    peers[2].process.kill()
    assert len({peer.expect("done")["digest"] for peer in peers[:2]}) == 1


def test_random_rounding_is_the_same_in_the_same_program() -> None:
    digests = set()
    for _ in range(2):
        with running(PCCL_SHM="0") as run:
            digests.update(one["digest"] for one in results(run, 2, quantize.random_rounding))
    assert len(digests) == 1


def test_several_ranks_of_several_hosts(run: Run) -> None:
    peers = [
        run.peer(
            partial(quantize.several_hosts, n),
            PCCL_MIN_PEERS="5",
            PCCL_SHM="1",
            PCCL_HOST_ID=f"host {n % 2}",
        )
        for n in range(5)
    ]
    said = [peer.expect("done", timeout=60) for peer in peers]
    assert len({one["digest"] for one in said}) == 1
    assert max(one["drift"] for one in said) < 0.1
    for peer in peers:
        assert peer.ends() == 0, peer.stderr()


def test_what_makes_no_sense_is_refused_with_a_sentence(run: Run) -> None:
    results(run, 1, quantize.refusals)


class Name(str, Enum):
    """Its members are equal to texts, and have other words."""

    INT8 = "int8"


def test_an_option_of_a_subclass_is_the_plain_value() -> None:
    size = type("Size", (int,), {})(128)
    given = pccl.Quantize(Name.INT8, size, error_feedback=np.False_)  # type: ignore[arg-type]
    plain = pccl.Quantize("int8", block=128)
    assert given == plain and repr(given) == repr(plain)
    words = " as int8 (min_max, blocks of 128)"
    assert quantization.words(given) == quantization.words(plain) == words
    assert {type(value) for value in vars(given).values()} == {str, int, bool}
