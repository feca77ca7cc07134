"""Arrays and a tensor for the explicit API."""
# ruff: noqa: F401, F403, F405

from __future__ import annotations

import os

import numpy as np
import torch

from programs.shown.torch_loop import *

steps, weights, m = 6, np.zeros(5, np.float32), torch.zeros(3)
gradient, mean = np.ones(5, np.float32), np.zeros(5, np.float32)
