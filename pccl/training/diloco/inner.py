"""The model that DiLoCo trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pccl import tree as trees
from pccl.frameworks import Array
from pccl.training.diloco.options import FUNC, refused


class Inner(Protocol):
    """A model's parameters, as the inner optimizer sees them.

    If inner steps run asynchronously, it also has a method `wait()`, which returns when all of them
    are over: rounds that end by their time call it before they look at the clock.

    Attributes:
        names: Of the parameters; the same on all members, in the same order.
    """

    names: Sequence[str]

    def read(self, index: int) -> Array:
        """The present elements as float32 (float64 for float64). Not written to, not kept."""

    def write(self, index: int, value: Array) -> None:
        """Sets them; `value` has the dtype and shape of `read`."""

    def rounded(self, index: int, value: Array) -> Array:
        """What `read` would return after `write(index, value)`. May be `value`."""


class NumPyTree:
    """A tree of NumPy arrays as `Inner`."""

    def __init__(self, tree: object) -> None:
        flat = trees.flatten(tree, FUNC, "parameters")
        self.names: Sequence[str] = flat.paths
        self._leaves: list[Array] = []
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            if not isinstance(leaf, np.ndarray) or leaf.dtype not in (np.float32, np.float64):
                raise refused(f"parameters{path} is no NumPy array of float32 or float64")
            if not leaf.flags.writeable:
                raise refused(f"parameters{path} cannot be written")
            self._leaves.append(leaf)

    def read(self, index: int) -> Array:
        return self._leaves[index]

    def write(self, index: int, value: Array) -> None:
        self._leaves[index][...] = value

    def rounded(self, index: int, value: Array) -> Array:
        return value
