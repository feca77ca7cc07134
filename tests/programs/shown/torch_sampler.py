"""A torch model and elastic data, in a run that it has joined."""
# ruff: noqa: F401, F403, F405

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import pccl
from pccl.data import ElasticSampler
from programs.shown.torch_loop import *

pccl.init()
examples = np.random.default_rng(0).standard_normal((640, 3)).astype(np.float32)
sampler = ElasticSampler(len(examples), batch_size=32)
state = {"weights": np.zeros(3, np.float32), "sampler": sampler}


def gradients(model: Any) -> list[Any]:
    return [p.detach() for p in model.parameters()]
