"""Peers that a cluster's scheduler starts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

import pccl


def step_until(stop: str) -> None:
    """Steps until that file is there, and prints its process, and how many members a step has."""
    print("process", os.getpid(), flush=True)
    pccl.init()
    state = {"step": 0}
    while True:
        if pccl.admit():
            state = pccl.sync(state)
        seen = pccl.allreduce(np.array([float(Path(stop).exists()), -1.0]), "max")
        state["step"] += 1
        print("step", state["step"], "of", pccl.world_size(), flush=True)
        if seen[0] > 0:
            return
        time.sleep(0.05)  # the computation of a real program
