from pathlib import Path

import numpy as np
import torch

import pccl
from pccl import checkpoint

Path("run").mkdir(exist_ok=True)
weights, momentum, gradient, mean = (np.zeros(3, np.float32) for _ in range(4))
m = torch.zeros(3)
model = torch.nn.Linear(3, 1)
steps, state = 1000, {"step": 0}


def batch():
    return None


def gradients(state, batch):
    return np.ones(3, np.float32)


def update(state, mean):
    state["weights"] -= 0.1 * mean
    state["step"] = max(state["step"], 990)  # few steps are enough here


def train_one_step(state):
    state["step"] = 999  # one more, and a checkpoint is due
