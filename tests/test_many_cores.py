"""PCCL_THREADS: several threads move and combine the bytes of one communicator."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import numpy as np
import pytest
from members import each, members
from programs import faults
from workers import FAST, Run

import pccl
from pccl import _testing

SECRET = "a secret of the tests, 32 bytes or more"
COUNT = 300_000  # of elements: some segments of 64 KiB each, and a rest


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("then", [1, 3])
def test_each_part_of_a_run_is_done_once(threads: int, then: int) -> None:
    runs = [*range(40), *[2] * 200, *[17] * 200]
    assert _testing.run_parts(threads, then, runs) == [[1] * count for count in runs]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_run_throws_what_a_part_has_thrown(threads: int) -> None:
    with pytest.raises(RuntimeError, match="part 8"):
        _testing.run_parts_and_fail(threads, 9, 8)


def everything(rank: int, comm: pccl.Communicator) -> list[bytes]:
    """The results of every kind of call, as bytes."""
    random = np.random.default_rng(rank)
    floats = random.standard_normal(COUNT).astype(np.float32)
    halves = floats.astype(np.float16)
    whole = random.integers(-1000, 1000, COUNT)
    inside = floats.copy()
    tree = [floats[i : i + 700] for i in range(0, 70_000, 700)]
    found: list[Any] = [
        pccl.allreduce(floats, "sum", comm=comm),
        pccl.allreduce(halves, "avg", comm=comm),
        pccl.allreduce(whole, "max", comm=comm),
        pccl.allreduce(inside, "avg", out=inside, comm=comm),
        *pccl.allreduce(tree, "avg", comm=comm),
        pccl.allreduce(floats, "avg", weight=rank + 1.0, comm=comm),
        pccl.allreduce(floats, "avg", quantize="int8", comm=comm),
        pccl.broadcast(floats, 1, comm=comm),
        pccl.allgather(floats[:50_000], comm=comm),
        pccl.reduce_scatter(whole, "sum", comm=comm),
    ]
    return [np.asarray(one).tobytes() for one in found]


@pytest.mark.parametrize(
    ("secret", "settings"),
    [
        pytest.param(None, {}, id="plain"),
        pytest.param(None, {"PCCL_STRIPES": "6", "PCCL_CHECKSUM": "always"}, id="checksums"),
        pytest.param(SECRET, {"PCCL_STRIPES": "3"}, id="encrypted"),
    ],
)
def test_results_are_those_of_one_thread(
    monkeypatch: pytest.MonkeyPatch, secret: str | None, settings: dict[str, str]
) -> None:
    for name, value in {"PCCL_SHM": "0", "PCCL_SEGMENT_BYTES": "65536", **settings}.items():
        monkeypatch.setenv(name, value)
    results = []
    for threads in ["1", "4"]:
        monkeypatch.setenv("PCCL_THREADS", threads)
        with members(3, secret=secret) as comms:
            results.append(each(comms, everything))
    alone, together = results
    assert together == alone
    for number in range(len(together[0]) - 1):  # each has a part of its own of the last one
        assert together[0][number] == together[1][number] == together[2][number]


@pytest.mark.env(PCCL_SHM="0", PCCL_STRIPES="4", **FAST)
def test_a_loss_in_the_middle_of_a_turn_harms_nobody(run: Run) -> None:
    program = partial(faults.loop, 1_000_000)
    survivors = [
        run.peer(program, PCCL_MIN_PEERS="2", PCCL_THREADS=threads) for threads in ["1", "3"]
    ]
    for peer in survivors:
        peer.expect("in")
        peer.expect("reducing")
    for _ in range(6):
        victim = run.peer(program, PCCL_THREADS="3")
        victim.expect("in")
        victim.expect("reducing")
        victim.signal(signal.SIGKILL)
        victim.ends()
    survivors[0].tell("stop")
    answers = [peer.expect("done") for peer in survivors]
    assert answers[0]["steps"] == answers[1]["steps"]
