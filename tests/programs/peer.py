"""The tools of a program that is a peer: its input, the sum to expect, and lines to its test."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

import pccl
from pccl import _core

_peer_id = ""  # set by start()


def say(**what: object) -> None:
    """Writes a line to the test, which reads it with Worker.next or Worker.expect."""
    print(json.dumps(what), flush=True)


def hear() -> Any:
    """Returns what the test said next with Worker.tell."""
    return json.loads(sys.stdin.readline())


def engine(comm: pccl.Communicator) -> _core.Communicator:
    """The engine of a communicator that has joined."""
    assert comm._engine is not None
    return comm._engine


def start(**options: Any) -> pccl.Communicator:
    """Joins the run, and keeps this peer's id for `peer_id` and `x`."""
    global _peer_id
    comm = pccl.init(**options)
    _peer_id = engine(comm).peer_id()
    return comm


def peer_id() -> str:
    """The id that this peer had when it started last."""
    return _peer_id


def value(peer: str) -> int:
    """The number that stands for a peer, made from its id."""
    return int(peer[:6], 16)


def x(count: int = 1000, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
    """This peer's input: its number in every element. Sums over any set of peers are exact."""
    return np.full(count, value(_peer_id), dtype)


def expected(info: pccl.ReduceInfo) -> int:
    """Each element of the sum of the inputs of those that contributed."""
    return sum(value(peer) for peer in info.contributors)


def float_sum(tag: int) -> pccl.ReduceDescriptor:
    """Describes a plain sum of 1000 float32."""
    return pccl.ReduceDescriptor(
        count=1000,
        op=pccl.ReduceOp.SUM,
        tag=tag,
        operand_descriptor=pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT),
        quantization_options=pccl.QuantizationOptions(
            pccl.DataType.FLOAT, pccl.QuantizationAlgorithm.NONE
        ),
    )


def say_when_calling(comm: pccl.Communicator, operations: int = 1) -> None:
    """Says "calling" once this peer has that many operations, so that a signal meets them."""
    pause = threading.Event()

    def watch() -> None:
        while engine(comm).unfinished() < operations:
            pause.wait(0.001)
        say(event="calling")

    threading.Thread(target=watch, daemon=True).start()
