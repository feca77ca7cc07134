"""Peers of the explicit API that share arrays by name, and sync as told."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import numpy.typing as npt

import pccl
from programs.peer import engine, say
from programs.shell import obey
from programs.sync_shell import build, digest, failed, noise

Arrays = dict[str, npt.NDArray[Any]]

comm: pccl.Communicator  # made by serve
state: pccl.SharedState  # made by share_arrays
arrays: Arrays = {}
_handle: Any = None
_parameter: Any = None


def serve(members: int) -> None:
    """Joins a group of that size at least."""
    global comm
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    join(members)
    obey()


def join(members: int) -> None:
    comm.connect()
    grow(members)
    _, rank, *_ = engine(comm).membership()
    say(event="in", rank=rank, peer=engine(comm).peer_id())


def grow(members: int) -> None:
    while comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) < members:
        comm.update_topology()


def my_rank() -> int:
    return int(engine(comm).membership()[1])


def share_arrays(own: Arrays, revision: int = 0, loose: tuple[str, ...] = ()) -> None:
    global state, arrays
    infos = [
        pccl.TensorInfo.from_numpy(array, name, allow_content_inequality=name in loose)
        for name, array in own.items()
    ]
    state = pccl.SharedState(infos)
    state.revision = revision
    arrays = own


def share(spec: dict[str, Any], revision: int = 0, loose: list[str] | None = None) -> None:
    """`loose`: names of arrays that may differ."""
    share_arrays(build(spec), revision, tuple(loose or ()))


def sync(strategy: str = "ENFORCE_POPULAR") -> None:
    try:
        info = comm.sync_shared_state(state, pccl.SharedStateSyncStrategy[strategy])
    except (pccl.PCCLError, KeyboardInterrupt) as error:
        return failed(error)
    size = comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE)
    say(
        event="synced",
        digest=digest(arrays),
        tx=info.tx_bytes,
        rx=info.rx_bytes,
        revision=state.revision,
        size=size,
    )


def share_and_sync(
    spec: dict[str, Any],
    strategy: str = "ENFORCE_POPULAR",
    revision: int = 0,
    loose: list[str] | None = None,
) -> None:
    share(spec, revision, loose)
    sync(strategy)


def push_and_sync(strategy: str = "ENFORCE_POPULAR") -> None:
    state.push_revision()
    sync(strategy)


def add(name: str, amount: int) -> None:
    arrays[name] += np.asarray(amount, arrays[name].dtype)


def put(name: str, index: int, value: float) -> None:
    arrays[name][index] = value


def set_writeable(name: str, writeable: bool) -> None:
    arrays[name].flags.writeable = writeable


def say_whether_all(name: str, value: float) -> None:
    say(same=bool((arrays[name] == value).all()))


def reduce() -> None:
    comm.all_reduce(np.ones(10), np.zeros(10), op="sum")


def begin_reduction() -> None:
    global _handle
    _handle = comm.all_reduce_async(np.ones(10), np.zeros(10), op="sum")


def end_reduction() -> None:
    assert _handle.wait()[0]


def share_memory(form: str) -> None:
    """Two arrays in one memory: the same, its copy, or parts that overlap by one or no element."""
    memory = np.zeros(9)
    first, second = {
        "tied": (memory, memory),
        "apart": (memory, memory.copy()),
        "overlapping": (memory[:5], memory[4:]),
        "side by side": (memory[:5], memory[5:]),
    }[form]
    share_arrays({"v": first, "w": second})


def place(dtype: npt.DTypeLike, count: int, offset: int) -> npt.NDArray[Any]:
    """An array at that offset from aligned memory. On each member, every byte is another one."""
    kind = np.dtype(dtype)
    memory = bytearray(count * kind.itemsize + offset)
    array: npt.NDArray[Any] = np.ndarray(count, kind, memory, offset)
    array.view(np.uint8)[...] = noise(count, count * kind.itemsize) + np.uint8(pccl.rank(comm))
    return array


def share_every_data_type() -> None:
    import ml_dtypes  # noqa: F401  # for bfloat16

    own: Arrays = {}
    for dtype in pccl.DataType:
        for count in (1, 7, (1 << 20) // dtype.size + 1):
            for offset in (0, 1, 13):
                made = place(dtype.to_numpy_dtype(), count, offset)
                own[f"{dtype.name} {count} {offset}"] = made
    own["empty"] = np.empty(0, np.int16)
    share_arrays(own)
    sync()


def share_a_parameter_with_new_memory() -> None:
    """A tensor whose old memory is unmapped between its description and the sync."""
    global _parameter
    import torch

    first = my_rank() == 0
    _parameter = torch.nn.Parameter(torch.full((1 << 22,), 1.0 if first else 2.0))
    share_arrays({"none": np.zeros(0)})
    state.tensor_infos.append(pccl.TensorInfo.from_torch(_parameter, "p"))
    state.tensor_infos.append(pccl.TensorInfo.from_torch(torch.empty(0), "e"))
    _parameter.data = torch.full((1 << 22,), 5.0 if first else 6.0)
    sync()


def say_parameter() -> None:
    say(p=[float(_parameter.min()), float(_parameter.max())])


def resize_parameter() -> None:
    import torch

    _parameter.data = torch.zeros(3)
    state.push_revision()


def share_what_nobody_else_holds() -> None:
    """The description alone holds its array."""
    global state, arrays
    made = np.full(1 << 20, my_rank(), np.int8)
    state = pccl.SharedState([pccl.TensorInfo.from_numpy(made, "w")])
    state.revision = 1
    arrays = {}
    del made
    gc.collect()
    noise(1, 1 << 22)


def share_an_array_twice() -> None:
    share_arrays({"a": np.zeros(1)})
    state.tensor_infos *= 2
    sync()
