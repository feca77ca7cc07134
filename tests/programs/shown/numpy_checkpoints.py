"""A loop over NumPy arrays, with checkpoints."""
# ruff: noqa: F401, F403

from __future__ import annotations

from pccl import checkpoint
from programs.shown.numpy_loop import *
