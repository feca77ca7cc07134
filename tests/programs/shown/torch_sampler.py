"""A torch model and elastic data, in a run that it has joined."""
# ruff: noqa: F401, F403, F405

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import pccl
from pccl.data import ElasticSampler
from programs.shown.torch_loop import *

pccl.init()
epochs, data = 2, TensorDataset(torch.randn(640, 3), torch.randn(640, 1))
sampler = ElasticSampler(640, batch_size=32)
state = {"model": model, "sampler": sampler}


def gradients(model: Any) -> list[Any]:
    return [p.detach() for p in model.parameters()]
