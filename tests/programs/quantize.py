"""Peers that reduce with fewer bits. `number`: 0, 1, ... as they were started."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import pccl
from programs.peer import hear, say, start


def normals(count: int, seed: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).normal(size=count).astype(dtype)


def near(number: int, members: int, dtype: str) -> None:
    start()
    inputs = [normals(200_000, seed) for seed in range(members)]
    mine = inputs[number].copy()
    result, info = pccl.allreduce(mine, "avg", quantize=dtype, return_info=True)
    exact, plain = pccl.allreduce(mine, "avg", return_info=True)
    assert (mine == inputs[number]).all() and result.dtype == np.float32
    pccl.allreduce(mine, "avg", out=mine, quantize=dtype)
    assert (mine == result).all()
    off = np.abs(result - np.mean(inputs, axis=0))
    say(
        event="done",
        digest=hashlib.sha256(result.tobytes()).hexdigest(),
        off=float(off.max()),
        ratio=plain.tx_bytes / info.tx_bytes,
    )


def trees(number: int) -> None:
    import ml_dtypes

    start()
    tree: dict[str, Any] = {
        "float64": normals(3000, number, np.float64),
        "bfloat16": normals(3000, number).astype(ml_dtypes.bfloat16),
        "float16": [normals(3000, number).astype(np.float16), normals(7, number)],
        "int32": np.arange(3000, dtype=np.int32) * (number + 1),
        "scalar": 1.25 * (number + 1),
    }
    digest = hashlib.sha256()
    for op in ("sum", "avg", "min", "max"):
        for how in (
            "int8",
            pccl.Quantize("int8", algorithm="zero_point_scale", rounding="stochastic", block=128),
        ):
            result = pccl.allreduce(tree, op, quantize=how)
            exact = pccl.allreduce(tree, op)
            for name in ("float64", "bfloat16"):
                assert result[name].dtype == tree[name].dtype
                off = np.abs(result[name].astype(float) - exact[name].astype(float))
                assert off.max() < 0.2, (op, name)
            assert np.abs(result["float16"][0].astype(float) - exact["float16"][0]).max() < 0.2
            assert (result["float16"][1] == exact["float16"][1]).all()  # too small
            assert (result["int32"] == exact["int32"]).all() and result["scalar"] == exact["scalar"]
            for leaf in (result["float64"], result["bfloat16"], result["float16"][0]):
                digest.update(leaf.tobytes())
    say(event="done", digest=digest.hexdigest())


def exact_in_memory(number: int) -> None:
    start()
    while pccl.allreduce(1, return_info=True)[1].epoch < 2:
        pass  # the members have not found each other's memory yet
    mine = normals(10_000, number)
    assert (pccl.allreduce(mine, quantize="int4") == pccl.allreduce(mine)).all()
    say(event="done")


def not_finite(number: int) -> None:
    start()
    mine = normals(100_000, number)
    if number == 0:
        mine[[5, 50_000]] = np.nan, np.inf
    result, exact = pccl.allreduce(mine, quantize="int8"), pccl.allreduce(mine)
    bad = ~np.isfinite(exact)
    assert bad.sum() == 2 and np.array_equal(result[bad], exact[bad], equal_nan=True)
    assert np.abs(result[~bad] - exact[~bad]).max() < 0.15
    say(event="done")


def weighted(number: int) -> None:
    start()
    mine = np.full(5000, number + 1.0, np.float32) + normals(5000, number) / 10
    weight = 1 + 2 * number
    result = pccl.allreduce(mine, "avg", weight=weight, quantize="int8")
    exact = pccl.allreduce(mine, "avg", weight=weight)
    assert 0 < np.abs(result - exact).max() < 0.02
    say(event="done")


def drift(number: int) -> None:
    start()
    mine = normals(5000, number)
    exact = pccl.allreduce(mine, "avg")
    drifts = {}
    for feedback in (False, True):
        how = pccl.Quantize("int4", error_feedback=feedback)
        total = np.zeros(5000)
        for _ in range(64):
            total += pccl.allreduce({"x": mine}, "avg", quantize=how, tag=int(feedback))["x"]
        drifts[feedback] = float(np.abs(total / 64 - exact).mean())
    say(event="done", without=drifts[False], with_it=drifts[True])


def feedback_of_a_timeout(number: int) -> None:
    comm = start()
    how = pccl.Quantize("int4", error_feedback=True)
    mine = normals(5000, number)

    def kept() -> dict[Any, bytes]:
        return {key: left.values.tobytes() for key, left in comm._residuals.kept.items()}

    pccl.allreduce(mine, quantize=how)
    before = kept()
    assert any(any(value) for value in before.values())
    if number == 1:
        hear()
    try:
        pccl.allreduce(mine, quantize=how, timeout=None if number else 0.5)
    except pccl.Timeout:  # for all
        pass
    else:
        raise AssertionError
    assert kept() == before
    say(event="timed out")
    pccl.allreduce(mine, quantize=how)
    assert kept() != before
    # Another dtype: nothing is kept of the old one.
    pccl.allreduce(mine.astype(np.float64), quantize=how)
    [left] = comm._residuals.kept.values()
    assert left.values.nbytes == 8 * 5000 and left.outline == "float64[5000]"
    comm.close()
    assert not comm._residuals.kept
    say(event="done")


def different(number: int) -> None:
    start()
    mine = normals(1000, number)
    for coding, text in ((None, ""), ("int4", " as int4 (min_max)")):
        try:
            pccl.allreduce(mine, quantize="int8" if number else coding)
        except pccl.MismatchedCall as error:
            assert "as int8 (min_max)" in str(error) and text in str(error), error
        else:
            raise AssertionError
    say(event="done")


def loss(number: int) -> None:
    start()
    how = pccl.Quantize("int8", rounding="stochastic")
    mine = normals(100_000, number)
    pccl.allreduce(mine, quantize=how)
    say(event="ready")
    if number == 2:
        hear()
    result, info = pccl.allreduce(mine, quantize=how, return_info=True)
    assert info.local_world_size == 2
    exact = pccl.allreduce(mine)
    assert 0 < np.abs(result - exact).max() < 0.2
    say(event="done", digest=hashlib.sha256(result.tobytes()).hexdigest())


def random_rounding(number: int) -> None:
    start()
    how = pccl.Quantize("int8", rounding="stochastic")
    digest = hashlib.sha256()
    for _ in range(3):
        digest.update(pccl.allreduce(normals(10_000, pccl.rank()), quantize=how).tobytes())
        digest.update(pccl.allreduce(normals(100, pccl.rank()), quantize=how, tag=7).tobytes())
    say(event="done", digest=digest.hexdigest())


def several_hosts(number: int) -> None:
    start()
    mine = normals(100_000, number)
    result, info = pccl.allreduce(mine, quantize="int8", return_info=True)
    exact, plain = pccl.allreduce(mine, return_info=True)
    assert 0 < np.abs(result - exact).max() < 0.15
    how = pccl.Quantize("int4", error_feedback=True)
    total = np.zeros(100_000)
    for _ in range(32):
        total += pccl.allreduce(mine, quantize=how)
    say(
        event="done",
        digest=hashlib.sha256(result.tobytes() + total.tobytes()).hexdigest(),
        drift=float(np.abs(total / 32 - exact).mean()),
        rank=pccl.rank(),
    )


def refusals(number: int) -> None:
    comm = start()

    def refused(text: str, call: Callable[[], object]) -> None:
        try:
            call()
        except pccl.InvalidArgument as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)

    mine = np.ones(100, np.float32)
    refused("quantize is one of 'int8'", lambda: pccl.allreduce(mine, quantize="int7"))
    number_of_bits: Any = 8
    refused("quantize is one of 'int8'", lambda: pccl.allreduce(mine, quantize=number_of_bits))
    refused("a product cannot be quantized", lambda: pccl.allreduce(mine, "prod", quantize="int8"))
    feedback = pccl.Quantize(error_feedback=True)
    refused("error_feedback=True goes with", lambda: pccl.allreduce(mine, "max", quantize=feedback))
    refused("dtype is one of", lambda: pccl.Quantize("int16"))
    refused("block is a multiple of 64", lambda: pccl.Quantize(block=100))
    refused("block is a multiple of 64", lambda: pccl.Quantize(block=8192))
    refused("algorithm is one of", lambda: pccl.Quantize(algorithm="best"))
    refused("rounding is one of", lambda: pccl.Quantize(rounding="up"))
    options = pccl.QuantizationOptions(pccl.DataType.INT32, pccl.QuantizationAlgorithm.MIN_MAX)
    refused(
        "quantized_datatype is UINT8 or INT8, not INT32",
        lambda: comm.all_reduce(mine, mine, op="sum", quantization_options=options),
    )
    say(event="done")
