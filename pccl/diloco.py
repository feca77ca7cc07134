"""DiLoCo; see `pccl.training.diloco`."""

from pccl.training.diloco import SGD, DiLoCo, Inner, OuterOptimizer, Robust, Sparse, preset

__all__ = ["SGD", "DiLoCo", "Inner", "OuterOptimizer", "Robust", "Sparse", "preset"]
