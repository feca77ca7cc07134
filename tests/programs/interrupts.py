"""Ctrl-C at every line of a call."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import pccl
from programs.peer import engine, hear, say

PACKAGE = os.path.dirname(str(pccl.__file__))
STRIDED = np.arange(200.0, dtype=np.float32)[::2]
CALLS: dict[str, Callable[..., object]] = {
    "strided": lambda **how: pccl.allreduce([STRIDED], **how),
    "in place": lambda **how: pccl.allreduce([STRIDED], out=[STRIDED], **how),
    "weighted": lambda **how: pccl.allreduce(np.ones(100, np.float32), "avg", weight=2, **how),
    "quantized": lambda **how: pccl.allreduce(
        np.ones(100, np.float32), quantize=pccl.Quantize("int8", error_feedback=True), **how
    ),
    "number": lambda **how: pccl.allreduce(3, **how),
    "broadcast": lambda **how: pccl.broadcast(np.ones(3), **how),
    "allgather": lambda **how: pccl.allgather(np.ones(3), **how),
    "reduce_scatter": lambda **how: pccl.reduce_scatter(np.ones(4), **how),
    "alltoall": lambda **how: pccl.alltoall(np.ones(4), **how),
}
EXPLICIT = "the explicit API"


class Interrupts:
    """A trace function that raises at the line of that number, counted in pccl's own files."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Interrupts | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # At its end a `with` is a line again, where no signal is handled and no lock let go.
        if event == "line" and not line.lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def sweep() -> None:
    """Makes each call that it is told, interrupted at its first line of Python, then its second...

    The last line is that at which the call blocks, for the other member makes no call. Its timeout
    ends it there.
    """
    comm = pccl.init()
    calls = CALLS | {
        EXPLICIT: lambda **how: comm.all_reduce(STRIDED, np.zeros(100, np.float32), op="sum", **how)
    }
    say(event="in", rank=pccl.rank())
    name = hear()
    at = 0
    while name is not None:
        at += 1
        try:
            sys.settrace(Interrupts(at))
            calls[name](tag=at, timeout=0.3)
            how = "done"
        except KeyboardInterrupt:
            how = "interrupted"
        except pccl.Timeout:
            how = "timeout"
        finally:
            sys.settrace(None)
        unfinished = engine(comm).unfinished()
        if how != "interrupted" or unfinished:
            say(event=how, unfinished=unfinished, lines=at)
            name, at = hear(), 0
    hear()
