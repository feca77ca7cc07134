"""Checkpoints of the shared state; see `pccl.training.checkpoint`."""

from pccl.training.checkpoint import SUFFIX, CheckpointError, latest, load, resume, save

__all__ = ["SUFFIX", "CheckpointError", "latest", "load", "resume", "save"]
