"""DiLoCo over NumPy arrays."""
# ruff: noqa: F401, F403, F405

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

import pccl
from pccl.diloco import DiLoCo
from programs.shown.numpy_loop import *

pccl.init()
w, b, batches = np.zeros(5), np.zeros(3), itertools.repeat(batch())


def train(w: npt.NDArray[Any], b: npt.NDArray[Any], batch: npt.NDArray[Any]) -> None:
    w += 0.1 * batch
