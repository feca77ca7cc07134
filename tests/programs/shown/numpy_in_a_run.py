"""A loop over NumPy arrays, in a run that it has joined."""
# ruff: noqa: F401, F403, F405

from __future__ import annotations

import pccl
from pccl.data import ElasticSampler
from programs.shown.numpy_loop import *

pccl.init()
