"""Fewer bits on the way: the codes themselves, and operations that send them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from workers import Run, running

from pccl import _testing

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

# NUMBER: 0, 1, ... as the peers were started.
START = """
comm = start()
def normals(count, seed, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=count).astype(dtype)
"""


@pytest.fixture
def run():
    with running(PCCL_SHM="0") as made:  # on one host nothing is quantized
        yield made


def results(run: Run, count: int, code: str, **env: str) -> list[dict[str, Any]]:
    """What each of the peers says at the end of `code`."""
    env["PCCL_MIN_PEERS"] = str(count)
    lines = "\n".join(line.removeprefix("    ") for line in code.strip("\n").splitlines())
    peers = [run.peer(f"NUMBER = {number}\n{START}\n{lines}", **env) for number in range(count)]
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
    code = f"""
    inputs = [normals(200_000, seed) for seed in range({members})]
    mine = inputs[NUMBER].copy()
    result, info = pccl.allreduce(mine, "avg", quantize={dtype!r}, return_info=True)
    exact, plain = pccl.allreduce(mine, "avg", return_info=True)
    assert (mine == inputs[NUMBER]).all() and result.dtype == np.float32
    pccl.allreduce(mine, "avg", out=mine, quantize={dtype!r})
    assert (mine == result).all()
    off = np.abs(result - np.mean(inputs, axis=0))
    say(event="done", bytes=result.tobytes().hex()[:400], digest=hash(result.tobytes().hex()) and
        __import__("hashlib").sha256(result.tobytes()).hexdigest(), off=float(off.max()),
        ratio=plain.tx_bytes / info.tx_bytes)
    """
    said = results(run, members, code)
    assert len({one["digest"] for one in said}) == 1
    assert max(one["off"] for one in said) < most
    assert min(one["ratio"] for one in said) > fewer


@pytest.mark.parametrize("shm", ["0", "1"])
def test_trees_dtypes_and_ops(run: Run, shm: str) -> None:
    code = """
    import hashlib
    import ml_dtypes
    tree = {
        "float64": normals(3000, NUMBER, np.float64),
        "bfloat16": normals(3000, NUMBER).astype(ml_dtypes.bfloat16),
        "float16": [normals(3000, NUMBER).astype(np.float16), normals(7, NUMBER)],
        "int32": np.arange(3000, dtype=np.int32) * (NUMBER + 1),
        "scalar": 1.25 * (NUMBER + 1),
    }
    digest = hashlib.sha256()
    for op in ("sum", "avg", "min", "max"):
        for how in ("int8", pccl.Quantize("int8", algorithm="zero_point_scale", rounding="stochastic", block=128)):
            result = pccl.allreduce(tree, op, quantize=how)
            exact = pccl.allreduce(tree, op)
            for name in ("float64", "bfloat16"):
                assert result[name].dtype == tree[name].dtype
                assert np.abs(result[name].astype(float) - exact[name].astype(float)).max() < 0.2, (op, name)
            assert np.abs(result["float16"][0].astype(float) - exact["float16"][0]).max() < 0.2
            assert (result["float16"][1] == exact["float16"][1]).all()  # too small
            assert (result["int32"] == exact["int32"]).all() and result["scalar"] == exact["scalar"]
            for leaf in (result["float64"], result["bfloat16"], result["float16"][0]):
                digest.update(leaf.tobytes())
    say(event="done", digest=digest.hexdigest())
    """
    pytest.importorskip("ml_dtypes")
    assert len({one["digest"] for one in results(run, 3, code, PCCL_SHM=shm)}) == 1


def test_in_memory_of_one_host_the_result_is_exact(run: Run) -> None:
    code = """
    x = normals(10_000, NUMBER)
    assert (pccl.allreduce(x, quantize="int4") == pccl.allreduce(x)).all()
    say(event="done")
    """
    results(run, 3, code, PCCL_SHM="1")


def test_what_is_not_finite_stays_so_and_harms_no_other(run: Run) -> None:
    code = """
    x = normals(100_000, NUMBER)
    if NUMBER == 0:
        x[[5, 50_000]] = np.nan, np.inf
    result, exact = pccl.allreduce(x, quantize="int8"), pccl.allreduce(x)
    bad = ~np.isfinite(exact)
    assert bad.sum() == 2 and np.array_equal(result[bad], exact[bad], equal_nan=True)
    assert np.abs(result[~bad] - exact[~bad]).max() < 0.15
    say(event="done")
    """
    results(run, 3, code)


def test_weighted_means_are_quantized_and_their_weights_are_not(run: Run) -> None:
    code = """
    x = np.full(5000, NUMBER + 1.0, np.float32) + normals(5000, NUMBER) / 10
    weight = 1 + 2 * NUMBER
    result = pccl.allreduce(x, "avg", weight=weight, quantize="int8")
    exact = pccl.allreduce(x, "avg", weight=weight)
    assert 0 < np.abs(result - exact).max() < 0.02
    say(event="done")
    """
    results(run, 2, code)


def test_error_feedback_gives_later_what_rounding_took(run: Run) -> None:
    code = """
    x = normals(5000, NUMBER)
    exact = pccl.allreduce(x, "avg")
    drift = {}
    for feedback in (False, True):
        how = pccl.Quantize("int4", error_feedback=feedback)
        total = np.zeros(5000)
        for step in range(64):
            total += pccl.allreduce({"x": x}, "avg", quantize=how, tag=int(feedback))["x"]
        drift[feedback] = float(np.abs(total / 64 - exact).mean())
    say(event="done", without=drift[False], with_it=drift[True])
    """
    for one in results(run, 2, code):
        assert one["with_it"] < 0.2 * one["without"], one


def test_feedback_changes_with_the_commit_only(run: Run) -> None:
    code = """
    how = pccl.Quantize("int4", error_feedback=True)
    x = normals(5000, NUMBER)
    def kept():
        return {key: left.values.tobytes() for key, left in comm._residuals.items()}
    pccl.allreduce(x, quantize=how)
    before = kept()
    assert any(any(value) for value in before.values())
    if NUMBER == 1:
        hear()
    try:
        pccl.allreduce(x, quantize=how, timeout=None if NUMBER else 0.5)
    except pccl.Timeout:  # for all
        pass
    else:
        raise AssertionError
    assert kept() == before
    say(event="timed out")
    first = pccl.allreduce(x, quantize=how)
    assert kept() != before
    pccl.allreduce(x.astype(np.float64), quantize=how)  # another dtype: nothing is kept of the old one
    [left] = comm._residuals.values()
    assert left.values.nbytes == 8 * 5000 and left.outline == "float64[5000]"
    comm.close()
    assert not comm._residuals
    say(event="done")
    """
    env = {"PCCL_MIN_PEERS": "2"}
    lines = "\n".join(line.removeprefix("    ") for line in code.strip("\n").splitlines())
    first, second = (run.peer(f"NUMBER = {n}\n{START}\n{lines}", **env) for n in range(2))
    first.expect("timed out")
    second.tell("go")
    second.expect("timed out")
    for peer in (first, second):
        peer.expect("done")
        assert peer.ends() == 0, peer.stderr()


def test_members_that_quantize_differently_are_told(run: Run) -> None:
    code = """
    x = normals(1000, NUMBER)
    for mine, text in ((None, ""), ("int4", " as int4 (min_max)")):
        try:
            pccl.allreduce(x, quantize="int8" if NUMBER else mine)
        except pccl.MismatchedCall as error:
            assert "as int8 (min_max)" in str(error) and text in str(error), error
        else:
            raise AssertionError
    say(event="done")
    """
    results(run, 2, code)


def test_the_survivors_of_a_loss_reduce_again(run: Run) -> None:
    code = """
    import hashlib
    how = pccl.Quantize("int8", rounding="stochastic")
    x = normals(100_000, NUMBER)
    pccl.allreduce(x, quantize=how)
    say(event="ready")
    if NUMBER == 2:
        hear()
    result, info = pccl.allreduce(x, quantize=how, return_info=True)
    assert info.local_world_size == 2
    exact = pccl.allreduce(x)
    assert 0 < np.abs(result - exact).max() < 0.2
    say(event="done", digest=hashlib.sha256(result.tobytes()).hexdigest())
    """
    lines = "\n".join(line.removeprefix("    ") for line in code.strip("\n").splitlines())
    peers = [run.peer(f"NUMBER = {n}\n{START}\n{lines}", PCCL_MIN_PEERS="3") for n in range(3)]
    for peer in peers:
        peer.expect("ready")
    peers[2].process.kill()
    assert len({peer.expect("done")["digest"] for peer in peers[:2]}) == 1


def test_random_rounding_is_the_same_in_the_same_program() -> None:
    code = """
    import hashlib
    how = pccl.Quantize("int8", rounding="stochastic")
    digest = hashlib.sha256()
    for step in range(3):
        digest.update(pccl.allreduce(normals(10_000, pccl.rank()), quantize=how).tobytes())
        digest.update(pccl.allreduce(normals(100, pccl.rank()), quantize=how, tag=7).tobytes())
    say(event="done", digest=digest.hexdigest())
    """
    digests = set()
    for _ in range(2):
        with running(PCCL_SHM="0") as run:
            digests.update(one["digest"] for one in results(run, 2, code))
    assert len(digests) == 1


def test_several_ranks_of_several_hosts(run: Run) -> None:
    code = """
    import hashlib
    x = normals(100_000, NUMBER)
    result, info = pccl.allreduce(x, quantize="int8", return_info=True)
    exact, plain = pccl.allreduce(x, return_info=True)
    assert 0 < np.abs(result - exact).max() < 0.15
    how = pccl.Quantize("int4", error_feedback=True)
    total = np.zeros(100_000)
    for step in range(32):
        total += pccl.allreduce(x, quantize=how)
    say(event="done", digest=hashlib.sha256(result.tobytes() + total.tobytes()).hexdigest(),
        drift=float(np.abs(total / 32 - exact).mean()), rank=pccl.rank())
    """
    lines = "\n".join(line.removeprefix("    ") for line in code.strip("\n").splitlines())
    peers = [
        run.peer(
            f"NUMBER = {n}\n{START}\n{lines}",
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
    code = """
    def refused(text, call):
        try:
            call()
        except pccl.InvalidArgument as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    x = np.ones(100, np.float32)
    refused("quantize is one of 'int8'", lambda: pccl.allreduce(x, quantize="int7"))
    refused("quantize is one of 'int8'", lambda: pccl.allreduce(x, quantize=8))
    refused("a product cannot be quantized", lambda: pccl.allreduce(x, "prod", quantize="int8"))
    feedback = pccl.Quantize(error_feedback=True)
    refused("error_feedback=True goes with", lambda: pccl.allreduce(x, "max", quantize=feedback))
    refused("dtype is one of", lambda: pccl.Quantize("int16"))
    refused("block is a multiple of 64", lambda: pccl.Quantize(block=100))
    refused("block is a multiple of 64", lambda: pccl.Quantize(block=8192))
    refused("algorithm is one of", lambda: pccl.Quantize(algorithm="best"))
    refused("rounding is one of", lambda: pccl.Quantize(rounding="up"))
    options = pccl.QuantizationOptions(pccl.DataType.INT32, pccl.QuantizationAlgorithm.MIN_MAX)
    refused("quantized_datatype is UINT8 or INT8, not INT32",
            lambda: comm.all_reduce(x, x, op="sum", quantization_options=options))
    say(event="done")
    """
    results(run, 1, code)
