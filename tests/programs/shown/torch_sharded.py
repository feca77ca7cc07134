"""A torch model to shard; this process is a replica of its own."""
# ruff: noqa: F403, F405

from __future__ import annotations

import os
from typing import Any

import torch

from programs.shown.torch_loop import *

os.environ["REPLICA"] = str(os.getpid())


def make_optimizer(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.05)
