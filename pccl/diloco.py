"""DiLoCo; see `pccl.training.diloco`."""

from pccl.training.diloco import (
    SGD,
    Data,
    DiLoCo,
    Inner,
    Keywords,
    OuterOptimizer,
    Robust,
    Sparse,
    preset,
)

__all__ = [
    "SGD",
    "Data",
    "DiLoCo",
    "Inner",
    "Keywords",
    "OuterOptimizer",
    "Robust",
    "Sparse",
    "preset",
]
