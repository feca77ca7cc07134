"""Other frameworks' arrays.

NumPy needs no adapter; those of torch, JAX and CuPy are imported when the first such array arrives.
"""

import importlib
from typing import Any

from pccl._arrays import as_array, overlaps, place_of
from pccl.frameworks import (
    Adapter,
    Array,
    Buffer,
    Device,
    Node,
    Place,
    Shared,
    Staged,
    register,
)

__all__ = [
    "Adapter",
    "Array",
    "Buffer",
    "Device",
    "Node",
    "Place",
    "Shared",
    "Staged",
    "as_array",
    "overlaps",
    "place_of",
    "register",
]


def __getattr__(name: str) -> Any:
    if name in ("cupy", "generic", "jax", "lightning", "ray", "torch", "torchft", "transformers"):
        return importlib.import_module(f"pccl.adapters.{name}")
    raise AttributeError(f"module 'pccl.adapters' has no attribute {name!r}")
