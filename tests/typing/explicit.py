"""Types of the explicit API as type checkers see them. Never run: tools/typecheck.sh reads it."""

import numpy as np
from typing_extensions import assert_type

from pccl import (
    AsyncReduceHandle,
    Attribute,
    Communicator,
    DataType,
    MasterNode,
    PCCLError,
    PeerLost,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    SharedState,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
    TensorInfo,
)


def peer() -> None:
    array = np.ones(3, np.float32)
    quantized = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)
    with Communicator("localhost:1", 0, 4) as comm:
        assert_type(comm, Communicator)
        comm.connect(15)
        assert_type(comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE), int)
        assert_type(comm.are_peers_pending(), bool)
        comm.update_topology()
        comm.optimize_topology(timeout=10)
        info = comm.all_reduce(array, array, op=ReduceOp.SUM, quantization_options=quantized)
        assert_type(info, ReduceInfo)
        assert_type(info.local_world_size + info.world_size, int)
        handle = comm.all_reduce_async(array, array, op="avg", tag=3)
        assert_type(handle, AsyncReduceHandle)
        assert_type(handle.wait(), tuple[bool, int, ReduceInfo])
        assert_type(handle.exception(), PCCLError | None)
        what = ReduceDescriptor(
            3, ReduceOp.SUM, 0, ReduceOperandDescriptor(DataType.FLOAT), quantized
        )
        descriptors = [ReduceOpDescriptor.from_numpy(array, array, what)]
        assert_type(comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=128), ReduceInfo)
        state = SharedState([TensorInfo.from_numpy(array, "w")])
        assert_type(state.revision, int)
        synced = comm.sync_shared_state(state, SharedStateSyncStrategy.SEND_ONLY)
        assert_type(synced, SharedStateSyncInfo)
        comm.all_reduce(array, array)  # type: ignore[call-arg]
        comm.all_reduce(array, array, op=3.5)  # type: ignore[arg-type]


def master() -> None:
    with MasterNode("127.0.0.1:0") as node:
        assert_type(node.address, str)
        assert_type(node.wait(3), bool)


def failures() -> None:
    try:
        Communicator("localhost:1").connect()
    except PeerLost as error:
        assert_type(error.result, Result)
        assert_type(error.peer, str | None)
        assert_type(error.advice, str)
