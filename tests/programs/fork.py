"""Peers that fork."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import pccl


def have_children_that_exit() -> None:
    """Forks between reductions. Each child goes through the whole exit of Python."""
    pccl.init(min_peers=2)
    children = []
    for number in range(20):
        assert pccl.allreduce(np.ones(1000), "sum")[0] == 2.0
        child = os.fork()
        if child == 0:
            if number % 2:
                raise RuntimeError("the child fails")
            sys.exit(7)  # runs exit handlers, collects garbage, ends the interpreter
        children.append(child)
        assert pccl.allreduce(np.ones(1000), "sum")[0] == 2.0
    for number, child in enumerate(children):
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (1 if number % 2 else 7)
        assert pccl.allreduce(np.ones(1000), "sum")[0] == 2.0
    assert pccl.world_size() == 2


def die_before_the_child() -> None:
    """Is killed while its child lives on, until the test closes the standard input."""
    pccl.init(min_peers=2)
    pccl.allreduce(np.ones(10))
    child = os.fork()
    if child == 0:
        os.read(0, 1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
