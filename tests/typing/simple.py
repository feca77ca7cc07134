"""Types of the simple API as type checkers see them. Never run: tools/typecheck.sh reads it."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import pccl
from pccl import Membership, ReduceInfo, ReduceOp, SyncInfo, Work

Floats = npt.NDArray[np.float32]


class Gradients(NamedTuple):
    weights: Floats
    bias: Floats


class ForeignArray:
    """Any framework's: what comes in is what goes out."""


def allreduce(
    array: Floats,
    tree: dict[str, Floats],
    gradients: Gradients,
    foreign: ForeignArray,
    mixed: list[Floats | float],
    scalar: np.int32,
    flag: bool,
) -> None:
    assert_type(pccl.allreduce(array), Floats)
    assert_type(pccl.allreduce(tree, "avg"), dict[str, Floats])
    assert_type(pccl.allreduce(gradients, op=ReduceOp.AVG, timeout=3), Gradients)
    assert_type(pccl.allreduce(foreign, "max", tag=7), ForeignArray)
    assert_type(pccl.allreduce(mixed), list[Floats | float])
    assert_type(pccl.allreduce(scalar, "avg"), np.int32)
    # The mean of an int is a float, its sum an int.
    assert_type(pccl.allreduce(3), int)
    assert_type(pccl.allreduce(3, "avg"), float)
    assert_type(pccl.allreduce(3, ReduceOp.AVG), float)
    assert_type(pccl.allreduce(3, "mean", return_info=True), tuple[float, ReduceInfo])
    assert_type(pccl.allreduce(array, return_info=True), tuple[Floats, ReduceInfo])
    assert_type(pccl.allreduce(array, return_info=False), Floats)
    pccl.allreduce(array, return_info=flag)
    # The array to write to comes back, whatever the input is.
    assert_type(pccl.allreduce(array, out=array), Floats)
    assert_type(pccl.allreduce(foreign, out=array), Floats)
    assert_type(
        pccl.allreduce(tree, out=tree, return_info=True), tuple[dict[str, Floats], ReduceInfo]
    )
    assert_type(pccl.allreduce(array, "avg", weight=3), Floats)
    assert_type(pccl.allreduce(array, "avg", weight=np.float32(0.5)), Floats)
    assert_type(pccl.allreduce(array, out=None), Floats)

    pccl.allreduce(array, "avg", weight="3")  # type: ignore[call-overload]
    pccl.allreduce(array, 3.5)  # type: ignore[call-overload]
    pccl.allreduce(array, return_info="yes")  # type: ignore[call-overload]
    pccl.allreduce()  # type: ignore[call-overload]


async def allreduce_async(array: Floats, tree: list[Floats]) -> None:
    work = pccl.allreduce_async(tree)
    assert_type(work, Work[list[Floats]])
    assert_type(work.wait(), list[Floats])
    assert_type(work.wait(timeout=2), list[Floats])
    assert_type(await work, list[Floats])
    assert_type(work.done(), bool)
    assert_type(work.info, ReduceInfo)
    assert_type(pccl.allreduce_async(3, "avg").wait(), float)
    assert_type(pccl.allreduce_async(3).wait(), int)
    assert_type(pccl.allreduce_async(tree, out=array), Work[Floats])
    general: Work[object] = work  # a reader of any result takes it
    general.wait()
    work.wait().append("text")  # type: ignore[arg-type]


def sync(state: dict[str, Floats], foreign: ForeignArray, flag: bool) -> None:
    assert_type(pccl.sync(state), dict[str, Floats])
    assert_type(pccl.sync(foreign, progress=False), ForeignArray)
    assert_type(pccl.sync(state, return_info=True), tuple[dict[str, Floats], SyncInfo])
    pccl.sync(state, return_info=flag)
    pccl.sync(state, progress=lambda done, wanted: print(done / wanted))
    pccl.sync(state, progress=print)


def membership() -> None:
    comm = pccl.init("localhost:1", min_peers=2, advertise=["a", "b:2"])
    assert_type(comm, pccl.Communicator)
    assert_type(pccl.membership(comm), Membership)
    assert_type(pccl.membership().peers, tuple[str, ...])
    assert_type(pccl.rank() + pccl.world_size(), int)
    assert_type(pccl.admit(timeout=1.5), bool)
    pccl.init(48148)  # type: ignore[arg-type]


def shared_arrays(array: Floats, dtype: str, anything: Any) -> None:
    assert_type(pccl.empty(3), Floats)
    assert_type(pccl.zeros((3, 4), np.int64), npt.NDArray[np.int64])
    assert_type(pccl.zeros(4, np.dtype(np.int8)), npt.NDArray[np.int8])
    assert_type(pccl.full(4, 1, dtype), npt.NDArray[Any])
    assert_type(pccl.full(4, 1), Floats)
    assert_type(pccl.from_array(array), Floats)
    assert_type(pccl.from_array([1, 2]), npt.NDArray[Any])
