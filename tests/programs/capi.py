"""libpccl.so through ctypes: the structs of pccl.h, written down once more, and its calls.

PCCL_C_LIBRARY is the path of the library. It is loaded with the first call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char_p,
    c_int,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

import numpy as np

RESULTS = """Success NotInitialized InternalError InvalidArgument InvalidUsage TooFewPeers MasterConnectionFailed
    RankConnectionFailed RankConnectionLost NoSharedStateAvailable PendingAsyncOps UpdateTopologyFailed
    TopologyOptimizationFailed""".split()
DTYPES = """uint8 int8 int16 uint16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64
    bool float8_e4m3fn float8_e5m2 complex64 complex128""".split()
OPS = "sum avg prod max min".split()


class InetAddress(Structure):
    _fields_ = [("protocol", c_int), ("ipv4", c_uint8 * 4), ("ipv6", c_uint8 * 16)]


class Address(Structure):
    _fields_ = [("inet", InetAddress), ("port", c_uint16)]


class CreateParams(Structure):
    _fields_ = [("master", Address), ("peer_group", c_uint32), ("pool_size", c_uint32)]


class ReduceInfo(Structure):
    _fields_ = [("local_world_size", c_uint32), ("tx_bytes", c_uint64), ("rx_bytes", c_uint64)]


class ReduceDescriptor(Structure):
    _fields_ = [
        ("count", c_size_t),
        ("op", c_int),
        ("tag", c_uint64),
        ("datatype", c_int),
        ("distribution_hint", c_int),
        ("quantized_datatype", c_int),
        ("algorithm", c_int),
    ]


class ReduceOpDescriptor(Structure):
    _fields_ = [("send", c_void_p), ("recv", c_void_p), ("what", ReduceDescriptor)]


class AsyncOp(Structure):
    _fields_ = [("comm", c_void_p), ("tag", c_uint64)]


class TensorInfo(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("data", c_void_p),
        ("count", c_size_t),
        ("datatype", c_int),
        ("device_type", c_int),
        ("loose", c_bool),
    ]


class SharedState(Structure):
    _fields_ = [("revision", c_uint64), ("count", c_size_t), ("infos", POINTER(TensorInfo))]


class SyncInfo(Structure):
    _fields_ = [("tx_bytes", c_uint64), ("rx_bytes", c_uint64)]


class BuildInfo(Structure):
    _fields_ = [("has_cuda_support", c_bool)]


@functools.cache
def _load() -> Any:
    library = ctypes.CDLL(os.environ["PCCL_C_LIBRARY"])
    pointer = c_void_p
    for name, parameters in {
        "pcclInit": [],
        "pcclCreateCommunicator": [pointer, pointer],
        "pcclGetAttribute": [pointer, c_int, pointer],
        "pcclDestroyCommunicator": [pointer],
        "pcclConnect": [pointer],
        "pcclUpdateTopology": [pointer],
        "pcclArePeersPending": [pointer, pointer],
        "pcclOptimizeTopology": [pointer],
        "pcclAllReduce": [pointer] * 5,
        "pcclAllReduceAsync": [pointer] * 5,
        "pcclAllReduceMultipleWithRetry": [pointer, c_size_t, pointer, pointer, c_int],
        "pcclAwaitAsyncReduce": [pointer, pointer],
        "pcclSynchronizeSharedState": [pointer, pointer, c_int, pointer],
        "pcclCreateMaster": [Address, pointer],
        "pcclRunMaster": [pointer],
        "pcclInterruptMaster": [pointer],
        "pcclMasterAwaitTermination": [pointer],
        "pcclDestroyMaster": [pointer],
        "pcclGetBuildInfo": [pointer],
        "pcclResolveAddress": [c_char_p, pointer],
        "pcclGetMasterAddress": [pointer, pointer],
    }.items():
        getattr(library, name).argtypes = parameters
        getattr(library, name).restype = c_int
    library.pcclGetLastError.argtypes = []
    library.pcclGetLastError.restype = c_char_p
    return library


class _Library:
    """The library, loaded when it is used first: the test's process imports this module, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_load(), name)


lib = _Library()


class Failed(Exception):
    """A call that did not return pcclSuccess: the result's name, and the thread's last error."""

    def __init__(self, result: int) -> None:
        self.result = RESULTS[result]
        self.sentence = last_error()
        super().__init__(self.sentence)


def last_error() -> str:
    text: bytes = lib.pcclGetLastError()
    return text.decode()


def check(result: int) -> None:
    if result != 0:
        raise Failed(result)


def resolve(text: str) -> Address:
    address = Address()
    check(lib.pcclResolveAddress(text.encode(), byref(address)))
    return address


def describe(
    array: np.ndarray[Any, Any], op: str = "sum", tag: int = 0, **more: Any
) -> ReduceDescriptor:
    """A descriptor for that array. bfloat16 arrays are of uint16: `datatype="bfloat16"`."""
    datatype = DTYPES.index(more.pop("datatype", array.dtype.name))
    return ReduceDescriptor(count=array.size, op=OPS.index(op), tag=tag, datatype=datatype, **more)


class Peer:
    """A communicator. Methods raise Failed."""

    def __init__(self, master: str | None = None, *, group: int = 0, connect: bool = True) -> None:
        check(lib.pcclInit())
        params = CreateParams(resolve(master or os.environ["PCCL_MASTER"]), group, 0)
        self.comm = c_void_p()
        check(lib.pcclCreateCommunicator(byref(params), byref(self.comm)))
        if connect:
            self.connect()

    def connect(self) -> None:
        check(lib.pcclConnect(self.comm))

    def destroy(self) -> None:
        check(lib.pcclDestroyCommunicator(self.comm))

    def update_topology(self) -> None:
        check(lib.pcclUpdateTopology(self.comm))

    def attribute(self, which: int = 2) -> int:
        value = c_int(-1)
        check(lib.pcclGetAttribute(self.comm, which, byref(value)))
        return value.value

    def gather(self, wanted: int) -> None:
        """Lets others in until the group has that many members."""
        while self.attribute() < wanted:
            self.update_topology()

    def peers_pending(self) -> bool:
        pending = c_bool()
        check(lib.pcclArePeersPending(self.comm, byref(pending)))
        return pending.value

    def optimize_topology(self) -> None:
        check(lib.pcclOptimizeTopology(self.comm))

    def reduce(
        self, send: Any, recv: Any, op: str = "sum", tag: int = 0, **more: Any
    ) -> ReduceInfo:
        info = ReduceInfo()
        what = describe(send, op, tag, **more)
        check(
            lib.pcclAllReduce(
                send.ctypes.data, recv.ctypes.data, byref(what), self.comm, byref(info)
            )
        )
        return info

    def launch(self, send: Any, recv: Any, op: str = "sum", tag: int = 0, **more: Any) -> AsyncOp:
        launched = AsyncOp()
        what = describe(send, op, tag, **more)
        check(
            lib.pcclAllReduceAsync(
                send.ctypes.data, recv.ctypes.data, byref(what), self.comm, byref(launched)
            )
        )
        return launched

    @staticmethod
    def wait(launched: AsyncOp) -> ReduceInfo:
        info = ReduceInfo()
        check(lib.pcclAwaitAsyncReduce(byref(launched), byref(info)))
        return info

    def reduce_all(self, pairs: Sequence[tuple[Any, Any]], most: int = 4) -> ReduceInfo:
        """Sums. Tags are 100, 101, ..."""
        ops = (ReduceOpDescriptor * len(pairs))(
            *(
                ReduceOpDescriptor(
                    send.ctypes.data, recv.ctypes.data, describe(send, "sum", 100 + i)
                )
                for i, (send, recv) in enumerate(pairs)
            )
        )
        info = ReduceInfo()
        check(lib.pcclAllReduceMultipleWithRetry(ops, len(pairs), self.comm, byref(info), most))
        return info

    def sync(self, state: State, strategy: int = 0) -> SyncInfo:
        info = SyncInfo()
        check(lib.pcclSynchronizeSharedState(self.comm, byref(state.c), strategy, byref(info)))
        return info


class State:
    """A shared state of NumPy arrays."""

    def __init__(self, revision: int = 0, **arrays: np.ndarray[Any, Any]) -> None:
        self.arrays = arrays
        self.infos = (TensorInfo * len(arrays))(
            *(
                TensorInfo(
                    name.encode(), a.ctypes.data, a.size, DTYPES.index(a.dtype.name), 0, False
                )
                for name, a in arrays.items()
            )
        )
        self.c = SharedState(revision, len(arrays), self.infos)


@contextmanager
def fails(result: str, *words: str) -> Iterator[None]:
    """The block must fail with that result, and a sentence that has these words."""
    try:
        yield
    except Failed as error:
        assert error.result == result, f"{error.result}: {error.sentence}"
        assert all(word in error.sentence for word in words), error.sentence
    else:
        raise AssertionError(f"it should have failed with {result}")
