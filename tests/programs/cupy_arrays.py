"""Every call with CuPy arrays: on a GPU, or with the stand-in of `pretend_cupy`."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
from members import members, results

import pccl
from pccl.reduce import pieces
from programs import pretend_cupy

cupy: Any = None  # the module, once `load` was called
COUNT = 1 << 20
BUSY = 100_000_000  # cycles: some 50 ms


def load() -> None:
    """The real one where DEVICE says so."""
    global cupy
    if os.environ.get("DEVICE", "pretend") == "pretend":
        pretend_cupy.install()
    cupy = importlib.import_module("cupy")


def same(made: Any, wanted: Any) -> None:
    """Refuses other elements, another dtype or NumPy's memory."""
    assert isinstance(made, cupy.ndarray), type(made)
    wanted = np.asarray(wanted)
    assert made.dtype == wanted.dtype, made.dtype
    np.testing.assert_array_equal(made.get(), wanted)


def calls() -> None:
    """Every call, in one piece and in several."""
    load()
    with members(2) as comms:
        for size in (256, 32 << 20):
            pieces.PIECE_BYTES = size
            reduce_a_tree(comms)
            reduce_into(comms)
            reduce_otherwise(comms)
        others(comms)
        share_states(comms)


def reduce_a_tree(comms: list[pccl.Communicator]) -> None:
    def call(rank: int, comm: pccl.Communicator) -> Any:
        x = np.arange(300, dtype=np.float32).reshape(20, 15)
        tree = {
            "t": cupy.asarray(x).T if rank else cupy.asarray(np.ascontiguousarray(x.T)),
            "h": cupy.asarray(np.full(7, rank + 1, np.float16)),
            "z": cupy.asarray(np.full(70, 1 + 2j * rank, np.complex64)),
            "i": cupy.asarray(np.full((2, 3), rank + 1)),
            "0": cupy.asarray(np.float64(rank + 1)),
            "e": cupy.asarray(np.zeros((0, 3), np.float32)),
            "n": np.full(100, rank),
        }
        return pccl.allreduce(tree, comm=comm)

    for made in results(comms, call):
        same(made["t"], 2 * np.arange(300, dtype=np.float32).reshape(20, 15).T)
        same(made["h"], np.full(7, 3, np.float16))
        same(made["z"], np.full(70, 2 + 2j, np.complex64))
        same(made["i"], np.full((2, 3), 3))
        same(made["0"], np.float64(3))
        same(made["e"], np.zeros((0, 3), np.float32))
        assert (made["n"] == 1).all()


def reduce_into(comms: list[pccl.Communicator]) -> None:
    """`out`: in place, strided, of a call that returns early; and one that cannot be written."""

    def call(rank: int, comm: pccl.Communicator) -> Any:
        x = cupy.asarray(np.arange(120, dtype=np.float32).reshape(12, 10) + rank)
        assert pccl.allreduce(x, out=x, comm=comm) is x
        strided = cupy.asarray(np.zeros((10, 12), np.float32)).T
        pccl.allreduce(x, "avg", out=strided, comm=comm)
        later = cupy.asarray(np.zeros((12, 10), np.float32))
        pccl.allreduce_async(x, out=later, comm=comm).wait()
        one = cupy.broadcast_to(x[:1], (12, 10))
        for written in (
            lambda: pccl.allreduce(x, out=one, comm=comm),
            lambda: pccl.broadcast(x, root=1, out=one, comm=comm),
            lambda: pccl.sync({"w": one}, comm=comm),
        ):
            try:
                written()
            except pccl.InvalidArgument as error:
                assert "share memory" in str(error), error
            else:
                raise AssertionError("an array that was broadcast was written")
        return x, strided, later

    want = 2 * np.arange(120, dtype=np.float32).reshape(12, 10) + 1
    for x, strided, later in results(comms, call):
        same(x, want)
        same(strided, want)
        same(later, 2 * want)


def reduce_otherwise(comms: list[pccl.Communicator]) -> None:
    """Weighted, and with fewer bits."""

    def call(rank: int, comm: pccl.Communicator) -> Any:
        x = cupy.asarray(np.full(1000, rank + 1, np.float32))
        return (
            pccl.allreduce(x, "avg", weight=3 - 2 * rank, comm=comm),
            pccl.allreduce(x, "avg", quantize="int8", comm=comm),
        )

    for weighted, coded in results(comms, call):
        same(weighted, np.full(1000, 1.25, np.float32))
        np.testing.assert_allclose(coded.get(), 1.5, rtol=0.01)


def others(comms: list[pccl.Communicator]) -> None:
    def call(rank: int, comm: pccl.Communicator) -> Any:
        x = cupy.asarray(np.arange(100, dtype=np.float32) + rank)
        return (
            pccl.allgather(x, comm=comm),
            pccl.broadcast(x, root=1, comm=comm),
            pccl.reduce_scatter(x, comm=comm),
            pccl.allreduce_async(x, "avg", comm=comm).wait(),
            pccl.alltoall(x, comm=comm),
        )

    x = np.arange(100, dtype=np.float32)
    for rank, (gathered, sent, part, mean, exchanged) in enumerate(results(comms, call)):
        same(gathered, [x, x + 1])
        same(sent, x + 1)
        own = slice(50 * rank, 50 * rank + 50)
        same(part, (2 * x + 1)[own])
        same(exchanged, np.concatenate([x[own], (x + 1)[own]]))
        same(mean, x + np.float32(0.5))


def share_states(comms: list[pccl.Communicator]) -> None:
    """Members agree on a state; those without one get new arrays, or have theirs written."""

    def call(rank: int, comm: pccl.Communicator) -> Any:
        state = {"w": cupy.asarray(np.full((3, 4), rank + 1, np.float32)), "step": 7}
        made = pccl.sync(state, comm=comm)
        return made["w"], state["w"]

    for made, mine in results(comms, call):
        same(made, np.full((3, 4), 1, np.float32))
        assert made is mine


def order() -> None:
    """On a GPU: inputs are read after earlier work, and results are there for later work."""
    load()
    source = """extern "C" __global__ void busy(long long cycles) {
        long long begin = clock64();
        while (clock64() - begin < cycles);
    }"""
    busy = cupy.RawKernel(source, "busy")

    def late(value: float) -> Any:
        made = cupy.full(COUNT, -1e6, cupy.float32)
        cupy.cuda.get_current_stream().synchronize()
        busy((1,), (1,), (cupy.int64(BUSY),))
        made.fill(value)
        return made

    def call(rank: int, comm: pccl.Communicator) -> Any:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x, out = late(rank + 1.0), late(7.0)
            busy((1,), (1,), (cupy.int64(BUSY),))
            before = out.copy()
            pccl.allreduce(x, out=out, comm=comm)
            after = out + 1
            gathered = pccl.allgather(late(rank + 1.0), comm=comm).sum(0)
            mean = pccl.allreduce(late(rank + 1.0), "avg", comm=comm) * 2
            stream.synchronize()
        return before, after, gathered, mean

    with members(2) as comms:
        for size in (1 << 20, 32 << 20):
            pieces.PIECE_BYTES = size
            for before, after, gathered, mean in results(comms, call):
                same(before, np.full(COUNT, 7, np.float32))
                same(after, np.full(COUNT, 4, np.float32))
                same(gathered, np.full(COUNT, 3, np.float32))
                same(mean, np.full(COUNT, 3, np.float32))
