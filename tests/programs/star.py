"""What `from pccl import *` brings."""
# ruff: noqa: B018, F403, F405

from __future__ import annotations

import sys

import pccl
import pccl._pccl
from pccl import *
from pccl._pccl import ReduceDescriptor as same
from pccl.master import main


def check_names() -> None:
    """The names that authors use are there, and no framework is loaded."""
    assert same is ReduceDescriptor and callable(main) and not cuda.is_available()
    Communicator, MasterNode, ReduceOp, Attribute, SharedStateSyncStrategy, DataType
    DistributionHint, QuantizationAlgorithm, ReduceOperandDescriptor, QuantizationOptions
    ReduceDescriptor, TensorInfo, SharedState, SharedStateSyncInfo, ReduceInfo
    ReduceOpDescriptor, AsyncReduceHandle, PCCLError
    pccl.Result, pccl.DeviceType, pccl.__version__
    assert not {"torch", "jax"} & set(sys.modules)
