"""Arrays averaged between machines that join and leave whenever they like.

    import pccl

    pccl.init("10.0.0.1:48148")
    mean = pccl.allreduce(gradients, op="avg")

`Communicator` is the explicit API, with one call per phase of a run.
"""

try:
    from pccl._core import __version__
except ModuleNotFoundError as error:
    if error.name != "pccl._core":
        raise
    raise ImportError(
        "pccl's native part is missing here; this looks like its source tree. "
        "Run `pip install .` and start Python elsewhere (or `python -P -m ...`)"
    ) from error

import importlib
import sys
from typing import Any

from pccl import cuda
from pccl._changes import Subscription
from pccl.api import (
    Membership,
    Work,
    admit,
    allreduce,
    allreduce_async,
    barrier,
    drain,
    init,
    is_initialized,
    membership,
    on_membership_change,
    prepare,
    rank,
    shutdown,
    stats,
    sync,
    world_size,
)
from pccl.collective_api import allgather, allgather_async, alltoall, broadcast, reduce_scatter
from pccl.communicator import AsyncReduceHandle, Communicator, MasterNode
from pccl.departure import Drained
from pccl.errors import (
    AuthenticationFailed,
    Deadlock,
    Evicted,
    InternalError,
    InvalidArgument,
    InvalidUsage,
    MasterLost,
    MismatchedCall,
    NotInitialized,
    NotSupported,
    PCCLError,
    PeerLost,
    PendingOperations,
    Refused,
    Result,
    RevisionMismatch,
    StateUnavailable,
    Timeout,
    TooFewPeers,
    Unreachable,
)
from pccl.following import Follower, Revision, follow, publish
from pccl.quantize import Quantize
from pccl.shared_arrays import empty, from_array, full, zeros
from pccl.types import (
    Attribute,
    DataType,
    Departure,
    DeviceType,
    DistributionHint,
    MembershipChange,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    RunStats,
    Schedule,
    SharedState,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
    SyncInfo,
    TensorInfo,
    Topology,
)

__all__ = [
    "AsyncReduceHandle",
    "Attribute",
    "AuthenticationFailed",
    "Communicator",
    "DataType",
    "Deadlock",
    "Departure",
    "DeviceType",
    "DistributionHint",
    "Drained",
    "Evicted",
    "Follower",
    "InternalError",
    "InvalidArgument",
    "InvalidUsage",
    "MasterLost",
    "MasterNode",
    "Membership",
    "MembershipChange",
    "MismatchedCall",
    "NotInitialized",
    "NotSupported",
    "PCCLError",
    "PeerLost",
    "PendingOperations",
    "QuantizationAlgorithm",
    "QuantizationOptions",
    "Quantize",
    "ReduceDescriptor",
    "ReduceInfo",
    "ReduceOp",
    "ReduceOpDescriptor",
    "ReduceOperandDescriptor",
    "Refused",
    "Result",
    "Revision",
    "RevisionMismatch",
    "RunStats",
    "Schedule",
    "SharedState",
    "SharedStateSyncInfo",
    "SharedStateSyncStrategy",
    "StateUnavailable",
    "Subscription",
    "SyncInfo",
    "TensorInfo",
    "Timeout",
    "TooFewPeers",
    "Topology",
    "Unreachable",
    "Work",
    "__version__",
    "admit",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "barrier",
    "broadcast",
    "cuda",
    "drain",
    "empty",
    "follow",
    "from_array",
    "full",
    "init",
    "is_initialized",
    "membership",
    "on_membership_change",
    "prepare",
    "publish",
    "rank",
    "reduce_scatter",
    "shutdown",
    "stats",
    "sync",
    "world_size",
    "zeros",
]

# Modules that are loaded when they are first used: some need torch, JAX or safetensors.
_LAZY = ("adapters", "checkpoint", "data", "diloco")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"pccl.{name}")
    raise AttributeError(f"module 'pccl' has no attribute {name!r}")


if "torch" in sys.modules:
    from _pccl_torch import api_untraced

    api_untraced()
