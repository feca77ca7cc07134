"""A loop over NumPy arrays."""

from __future__ import annotations

import itertools  # noqa: F401
from typing import Any

import numpy as np
import numpy.typing as npt

import pccl

steps, rounds = 6, 4
weights, momentum = np.zeros(5), np.zeros(5)
state: dict[str, Any] = {"weights": weights, "step": 0}
model = optimizer = sampler = None
examples = np.arange(960.0)


def batch() -> npt.NDArray[np.float64]:
    return np.ones(5)


def gradients(state: dict[str, Any], batch: object = None) -> dict[str, npt.NDArray[Any]]:
    return {"weights": np.full(5, 1.0 + pccl.rank())}


def update(state: dict[str, Any], mean: dict[str, npt.NDArray[Any]]) -> None:
    state["weights"] -= 0.1 * mean["weights"]


def train_one_step(state: dict[str, Any]) -> None:
    update(state, pccl.allreduce(gradients(state), "avg"))
