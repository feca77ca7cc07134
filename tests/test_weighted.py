"""The weighted mean, op="avg" with weight=, equals NumPy's for every dtype and after losses."""

from __future__ import annotations

import signal
from array import array
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from members import each, members
from programs import weighted
from workers import running

import pccl
from pccl import _core

WORLD = 3
Comms = list[pccl.Communicator]


@pytest.fixture(scope="module")
def comms() -> Iterator[Comms]:
    with members(WORLD) as comms:
        yield comms


DTYPES = [*map(np.dtype, "u1 i1 i2 u2 u4 i4 u8 i8 f2".split()), np.dtype(ml_dtypes.bfloat16)]
DTYPES += map(np.dtype, ["f4", "f8", "?"])
DTYPES += map(np.dtype, [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, "c8", "c16"])
BY_NUMBER = [
    pytest.param(i, dtype, id=dtype.name)
    for i, dtype in enumerate(DTYPES)
    if dtype.kind not in "bc"
]


def as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def product_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64 if dtype.kind in "iu" or dtype.itemsize == 8 else np.float32)


def anything(dtype: np.dtype, count: int, seed: int) -> np.ndarray:
    """Elements with any bits, but with one NaN."""
    random = np.random.default_rng(seed)
    made = random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    if dtype.kind not in "iu":
        with np.errstate(invalid="ignore"):
            made[np.isnan(made)] = np.nan
    return made


@pytest.mark.parametrize(("number", "dtype"), BY_NUMBER)
@pytest.mark.parametrize("weight", [1.0, 0.3, 1e-18, 1e18, 0.0, -1.0, np.nan])
def test_products_are_numpys(number: int, dtype: np.dtype, weight: float) -> None:
    values = anything(dtype, 5003, number)
    products = np.empty(values.size, product_dtype(dtype))
    _core.scale(number, as_bytes(values), weight, as_bytes(products))
    with np.errstate(all="ignore"):
        wanted = values.astype(products.dtype) * products.dtype.type(weight)
    if not weight > 0:
        wanted[:] = 0
    nan = np.isnan(wanted)
    assert (np.isnan(products) == nan).all()
    assert products[~nan].tobytes() == wanted[~nan].tobytes()


def quotients(sums: np.ndarray, total: float, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        exact = sums.astype(np.float64) / total
        if dtype.itemsize == 1 and dtype.kind not in "iu" or dtype == ml_dtypes.bfloat16:
            made = exact.astype(np.float32).astype(dtype)
            made[np.isnan(made)] = np.nan
            return made
        if dtype.kind not in "iu":
            return exact.astype(dtype)
        nearest = np.rint(exact)
        near = np.abs(exact - nearest) <= 1e-9 + np.abs(exact) * 2.0**-48
    limits = np.iinfo(dtype)
    most = np.nextafter(2.0**limits.bits / 2, 0) if limits.min else np.nextafter(2.0**64, 0)
    most = min(float(limits.max), most)
    return np.clip(np.where(near, nearest, np.trunc(exact)), float(limits.min), most).astype(dtype)


@pytest.mark.parametrize(("number", "dtype"), BY_NUMBER)
@pytest.mark.parametrize("total", [1.0, 3.0, 0.1 + 0.2 + 0.7, 1e-18, 7e17])
def test_quotients_are_numpys(number: int, dtype: np.dtype, total: float) -> None:
    random = np.random.default_rng(number)
    wide = product_dtype(dtype)
    halfway = random.integers(-70_000, 70_000, 5003) + random.choice(
        [0, 0.5, 1e-9, 2e-9, 0.25], 5003
    )
    with np.errstate(all="ignore"):
        kinds = [
            anything(dtype, 5003, number).astype(np.float64) * total,
            halfway * total,
            random.standard_normal(5003) * 10.0 ** random.uniform(-12, 8, 5003),
            anything(wide, 5003, number),
        ]
        kinds = [kind.astype(wide) for kind in kinds]
    for sums in kinds:
        if dtype.kind in "iu":
            sums[np.isnan(sums)] = 0
        means = np.empty(sums.size, dtype)
        wanted = quotients(sums, total, dtype)
        _core.unscale(number, as_bytes(sums), total, as_bytes(means))
        assert as_bytes(means).tobytes() == as_bytes(wanted).tobytes()
        if wide.itemsize == dtype.itemsize:
            _core.unscale(number, as_bytes(sums), total, as_bytes(sums))
            assert as_bytes(sums).tobytes() == as_bytes(wanted).tobytes()


@pytest.mark.parametrize(("number", "part"), [(15, 10), (16, 11)], ids=["complex64", "complex128"])
def test_complex_numbers_are_weighted_part_by_part(number: int, part: int) -> None:
    values = anything(DTYPES[part], 5004, number)
    made = [[np.empty_like(values) for _ in range(2)] for _ in range(2)]
    for products, means, code in zip(*made, (number, part), strict=True):
        _core.scale(code, as_bytes(values), 0.3, as_bytes(products))
        _core.unscale(code, as_bytes(products), 1.7, as_bytes(means))
    for complex_ones, real_ones in made:
        assert complex_ones.tobytes() == real_ones.tobytes()
    assert np.isfinite(made[0][0]).sum() > 4000


def test_memory_needs_no_alignment_and_has_to_fit() -> None:
    memory = np.zeros(65, np.uint8)
    memory[1:] = np.arange(16, dtype=np.float32).view(np.uint8)
    _core.scale(10, memory[1:], 2.0, memory[1:])
    assert memory[1:].view(np.float32).tolist() == list(range(0, 32, 2))
    for dtype, bytes_ in ((10, 60), (9, 64), (17, 64), (11, 61)):
        with pytest.raises(ValueError, match="different sizes"):
            _core.scale(dtype, memory[1:], 2.0, np.zeros(bytes_, np.uint8))


def mean_of(values: list[Any], weights: list[float]) -> np.ndarray:
    wide = [
        np.asarray(value).astype(np.float64) * w for value, w in zip(values, weights, strict=True)
    ]
    return sum(wide) / sum(weights)


FLOATS = {np.float16: 1e-3, ml_dtypes.bfloat16: 8e-3, np.float32: 1e-6, np.float64: 1e-14}


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (70_001,)])
def test_floats_are_numpys_weighted_mean_and_equal_on_all(
    comms: Comms, dtype: Any, shape: tuple[int, ...]
) -> None:
    values = [
        np.asarray(np.random.default_rng(rank).standard_normal(shape)).astype(dtype)
        for rank in range(WORLD)
    ]
    weights = [0.5, 3.0, 1e-3]
    before = [value.copy() for value in values]
    results = each(
        comms,
        lambda rank, comm: pccl.allreduce(values[rank], "avg", weight=weights[rank], comm=comm),
    )
    wanted = mean_of(values, weights)
    scale = max(float(np.abs(np.asarray(value).astype(np.float64)).max()) for value in values)
    for result in results:
        assert isinstance(result, np.ndarray) and result.dtype == dtype and result.shape == shape
        assert result.tobytes() == results[0].tobytes()
        np.testing.assert_allclose(
            result.astype(np.float64), wanted, rtol=FLOATS[dtype], atol=FLOATS[dtype] * scale
        )
    for value, kept in zip(values, before, strict=True):
        assert value.tobytes() == kept.tobytes()


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_integers_round_toward_zero_within_their_range(comms: Comms, dtype: str) -> None:
    limits = np.iinfo(dtype)
    below = 0 if dtype.startswith("u") else -8
    ends = [int(limits.min), int(limits.max), 3]
    rows = [np.array([*ends, *more], dtype) for more in ((below, 100), (1, 101), (1, 0))]
    weights = [0.1, 0.2, 0.7]
    results = each(
        comms, lambda rank, comm: pccl.allreduce(rows[rank], "avg", weight=weights[rank], comm=comm)
    )
    for result in results:
        assert result.dtype == dtype and result.tobytes() == results[0].tobytes()
        lowest, highest, three, small, large = result.tolist()
        if limits.bits < 64:
            assert (lowest, highest) == (limits.min, limits.max)
        else:  # float64 has 53 bits
            assert abs(lowest - limits.min) <= 2048 and 0 <= limits.max - highest <= 4096
        assert three == 3  # whatever the sum of 0.3, 0.6 and 2.1 is in binary
        assert small == 0  # of 0.9, or of 0.1 below nothing
        assert large == 30  # of 30.2


def test_a_tree_is_one_operation_and_comes_back_as_it_was(comms: Comms) -> None:
    def tree(rank: int) -> Any:
        return {
            "w": np.full((2, 3), rank, np.float32),
            "n": [rank, float(rank), None, np.int16(rank * 10)],
            "a": array("f", [rank, 1]),
            "e": np.zeros((0, 4)),
            "t": np.arange(6.0).reshape(2, 3).T * rank,
        }

    weights = [1, np.float32(2), np.array(5)]
    told = each(
        comms,
        lambda rank, comm: pccl.allreduce(
            tree(rank), "mean", weight=weights[rank], comm=comm, return_info=True
        ),
    )
    mean = (0 * 1 + 1 * 2 + 2 * 5) / 8
    for result, info in told:
        assert info.attempts == 1 and info.world_size == WORLD and info.total_weight == 8
        np.testing.assert_array_equal(result["w"], np.full((2, 3), mean, np.float32))
        assert result["n"] == [mean, mean, None, int(10 * mean)]
        assert [type(leaf) for leaf in result["n"][:2]] == [float, float]
        assert type(result["n"][3]) is np.int16
        assert result["a"] == array("f", [mean, 1])
        assert result["e"].shape == (0, 4)
        np.testing.assert_allclose(result["t"], np.arange(6.0).reshape(2, 3).T * mean)


@pytest.mark.parametrize("how", ["in place", "out", "strided out", "async", "async in place"])
def test_results_go_where_they_are_wanted(comms: Comms, how: str) -> None:
    def call(rank: int, comm: pccl.Communicator) -> Any:
        mine = [np.full(9, rank + 1.0), np.full(4, rank + 1, np.int32)]
        outs = {
            "in place": mine,
            "async in place": mine,
            "out": [np.zeros(9), np.zeros(4, np.int32)],
            "strided out": [np.zeros(18)[::2], np.zeros(12, np.int32)[1::3]],
        }
        out = outs.get(how)
        if how.startswith("async"):
            work = pccl.allreduce_async(mine, "avg", out=out, weight=rank, comm=comm)
            result = work.wait()
            assert work.wait() is result and work.info.world_size == WORLD
        else:
            result = pccl.allreduce(mine, "avg", out=out, weight=rank, comm=comm)
        assert out is None or result is out
        return [leaf.tolist() for leaf in result]

    mean = (2 * 1 + 3 * 2) / 3
    assert each(comms, call) == [[[mean] * 9, [int(mean)] * 4]] * WORLD


def test_a_wait_after_an_interrupted_one_divides_nothing_twice(
    comms: Comms, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {dtype: np.full(3, 4, dtype) for dtype in ("f4", "f8", "f2", "i8")}
    works = each(comms, lambda _, comm: pccl.allreduce_async(tree, "avg", weight=2.0, comm=comm))
    unscale, calls = _core.unscale, 0

    def interrupted(*arguments: Any) -> None:
        nonlocal calls
        unscale(*arguments)
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(_core, "unscale", interrupted)
    with pytest.raises(KeyboardInterrupt):
        works[0].wait()
    for work in works:
        means = work.wait()
        assert all((means[dtype] == 4).all() for dtype in tree)


def test_other_frameworks_arrays_are_averaged_too(comms: Comms) -> None:
    torch = pytest.importorskip("torch")

    def call(rank: int, comm: pccl.Communicator) -> Any:
        tree = {
            "h": torch.full((5,), rank + 1.0, dtype=torch.bfloat16),
            "f": torch.nn.Parameter(torch.full((2, 2), rank + 1.0)),
            "numpy": np.full(3, rank + 1.0, np.float16),
        }
        return pccl.allreduce(tree, "avg", weight=torch.tensor(float(rank)), comm=comm)

    for result in each(comms, call):
        assert result["h"].dtype == torch.bfloat16
        assert result["h"].tolist() == [float(torch.tensor(8 / 3).bfloat16())] * 5
        np.testing.assert_allclose(result["f"].numpy(), np.full((2, 2), 8 / 3), rtol=1e-6)
        assert result["numpy"].tolist() == [float(np.float16(8 / 3))] * 3


def test_jax_arrays_are_averaged_too(comms: Comms) -> None:
    jax = pytest.importorskip("jax")

    def call(rank: int, comm: pccl.Communicator) -> Any:
        tree = {"w": jax.numpy.full((2, 3), rank + 1.0), "h": jax.numpy.ones(5, "bfloat16") * rank}
        return pccl.allreduce(tree, "avg", weight=jax.numpy.float32(rank), comm=comm)

    for result in each(comms, call):
        assert all(isinstance(leaf, jax.Array) for leaf in result.values())
        np.testing.assert_allclose(result["w"], np.full((2, 3), 8 / 3), rtol=1e-6)
        assert result["h"].dtype == "bfloat16"
        assert result["h"].tolist() == [float(ml_dtypes.bfloat16(5 / 3))] * 5


def test_bfloat16_rounds_to_nearest_and_keeps_what_is_no_number(comms: Comms) -> None:
    pool = np.arange(0, 2**16, 7, dtype=np.uint16).view(ml_dtypes.bfloat16)
    ones = each(comms, lambda rank, comm: pccl.allreduce(pool, "avg", weight=1, comm=comm))
    for result in ones:
        finite = np.abs(pool.astype(np.float32)) < 1e38
        np.testing.assert_array_equal(result[finite], pool[finite])
        wide = [np.isnan(array.astype(np.float32)) for array in (result, pool)]
        np.testing.assert_array_equal(*wide)
        assert result.tobytes() == ones[0].tobytes()


def test_what_a_member_without_weight_passes_does_not_count(comms: Comms) -> None:
    def call(rank: int, comm: pccl.Communicator) -> Any:
        mine = np.full(4, rank + 1.0) if rank else np.full(4, np.nan)
        return pccl.allreduce(mine, "avg", weight=rank, comm=comm).tolist()

    assert each(comms, call) == [[8 / 3] * 4] * WORLD


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((0, 0, 0), ["add up to 0"] * 3),
        ((1, -1, 1), ["a member's weight", "not -1", "a member's weight"]),
        ((1, 2, float("nan")), ["a member's weight", "a member's weight", "not nan"]),
        ((float("inf"), 2, 1), ["not inf", "a member's weight", "a member's weight"]),
        ((1, 2, 1e-30), ["a member's weight", "a member's weight", "not 1e-30"]),
        ((10**400, 2, 1), ["not 1000", "a member's weight", "a member's weight"]),
    ],
)
def test_weights_that_are_none_are_an_error_on_all_members_and_nothing_is_changed(
    comms: Comms, weights: tuple[float, ...], words: list[str]
) -> None:
    def call(rank: int, comm: pccl.Communicator) -> Any:
        mine = np.arange(5.0)
        work = pccl.allreduce_async(mine, "avg", out=mine, weight=weights[rank], comm=comm)
        errors = []
        for _ in range(2):
            with pytest.raises(pccl.InvalidArgument) as caught:
                work.wait()
            errors.append(str(caught.value))
        assert mine.tolist() == [0, 1, 2, 3, 4] and errors[0] == errors[1] and work.done()
        return errors[0]

    for error, word in zip(each(comms, call), words, strict=True):
        assert word in error
    after = each(comms, lambda rank, comm: pccl.allreduce(1, comm=comm))
    assert after == [WORLD] * WORLD


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": "sum", "weight": 1}, 'goes with op "avg" only, not with sum'),
        ({"op": "max", "weight": 1.0}, 'goes with op "avg" only'),
        ({"op": "avg", "weight": "1"}, "not a str"),
        ({"op": "avg", "weight": True}, "not a bool"),
        ({"op": "avg", "weight": [1]}, "not a list"),
        ({"op": "avg", "weight": np.ones(1)}, "not a ndarray"),
        ({"op": "avg", "weight": 1j}, "not a complex"),
    ],
)
def test_what_can_be_no_weight_is_refused_before_anything_starts(
    comms: Comms, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(pccl.InvalidArgument, match=words):
        pccl.allreduce(np.ones(3), comm=comms[0], **options)


def test_members_with_and_without_weights_are_told(comms: Comms) -> None:
    def call(rank: int, comm: pccl.Communicator) -> Any:
        return pccl.allreduce(np.ones(3), "avg", weight=None if rank == 1 else 2.0, comm=comm)

    errors = each(comms, call)
    for error in errors:
        assert isinstance(error, pccl.MismatchedCall), error
        assert "weighted mean of float64[3]" in str(error)
        assert error.peer == errors[0].peer
    # A sum of the very arrays that a weighted mean makes of its own is another call, too.
    alike = {0: (np.ones(3), "avg", 1.0), 1: ([np.ones(3), np.ones(2)], "sum", None)}

    def other(rank: int, comm: pccl.Communicator) -> Any:
        tree, op, weight = alike[rank % 2]
        return pccl.allreduce(tree, op, weight=weight, comm=comm)

    assert all(isinstance(error, pccl.MismatchedCall) for error in each(comms, other))


def test_alone_the_mean_is_the_input_exactly() -> None:
    with members(1) as (comm,):
        value = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
        result = pccl.allreduce(value, "avg", weight=0.3, comm=comm)
        assert result.tobytes() == value.tobytes() and result is not value
        assert pccl.allreduce(value, "avg", out=value, weight=7, comm=comm) is value
        assert pccl.allreduce([3, np.int64(2**62 + 1)], "avg", weight=0.1, comm=comm) == [
            3.0,
            2**62 + 1,
        ]
        with pytest.raises(pccl.InvalidArgument, match="add up to 0"):
            pccl.allreduce(value, "avg", weight=0, comm=comm)


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_survivors_of_a_killed_member_get_their_own_weighted_mean(shared_memory: str) -> None:
    with running(PCCL_SHM=shared_memory, PCCL_HEARTBEAT_TIMEOUT="2") as run:
        workers = run.peers(3, weighted.start_three)
        for worker in workers:
            worker.expect("in")
        workers[1].tell("die")
        workers[1].expect("started")
        survivors = [workers[0], workers[2]]
        for worker in survivors:
            worker.tell("go")
            worker.expect("waiting")
        workers[1].signal(signal.SIGKILL)
        answers = [worker.expect("done") for worker in survivors]
    assert answers[0] == answers[1]
    assert answers[0]["ok"] and answers[0]["sizes"][2] == 2  # the one that the victim never began
