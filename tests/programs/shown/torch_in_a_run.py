"""A torch model to train, in a run that it has joined."""
# ruff: noqa: F401, F403, F405

from __future__ import annotations

from typing import Any

import torch

import pccl
from pccl.adapters.torch import DiLoCo
from programs.shown.torch_loop import *

pccl.init()


def make_model() -> Any:
    return torch.nn.Linear(3, 1)
