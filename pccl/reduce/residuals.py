"""Error feedback: the rounding errors of quantized arrays, added to them the next time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pccl import quantize
from pccl.frameworks import Bytes
from pccl.types import DataType

Key = tuple[int | None, str]


class Residual(NamedTuple):
    """The rounding errors of an array: float32 for each element (float64 of float64)."""

    key: Key  # the calls' tag, and the array's path
    outline: str  # "float32[3,4]": an array of another outline at this path starts with nothing
    values: Bytes


class Residuals:
    """The residuals of a communicator. *any thread*

    Attributes:
        kept: By tag and path. Guarded by a lock, which no blocking call holds.
    """

    def __init__(self) -> None:
        self.kept: dict[Key, Residual] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self.kept.clear()

    def of(
        self,
        arrays: Sequence[tuple[Any, Any, int]],
        tag: int | None,
        names: Sequence[tuple[str, str]],
    ) -> list[Bytes | None]:
        """The memory for the residual of each array; None for an array that is not quantized.

        Args:
            arrays: (send, recv, dtype code), as the engine gets them.
            tag: Of the call.
            names: (path, outline) of each array.
        """
        found: list[Bytes | None] = []
        with self._lock:
            for (send, _, code), (path, outline) in zip(arrays, names, strict=False):
                element, residual = quantize.FLOATING.get(DataType(code), (1, 0))
                count = send.size // element
                if residual == 0 or count < quantize.EXACT_BELOW:
                    found.append(None)
                    continue
                key = (tag, path)
                kept = self.kept.get(key)
                if kept is None or kept.outline != outline:
                    kept = Residual(key, outline, np.zeros(count * residual, np.uint8))
                    self.kept[key] = kept
                found.append(kept.values)
        return found

    def copies(self, tag: int | None, names: Sequence[str]) -> list[Residual]:
        """The residuals at these paths now."""
        with self._lock:
            found = [self.kept.get((tag, name)) for name in names]
        return [kept._replace(values=kept.values.copy()) for kept in found if kept is not None]

    def restore(self, tag: int | None, names: Sequence[str], before: Sequence[Residual]) -> None:
        """Goes back to `copies`, when results that have changed these paths do not count."""
        with self._lock:
            for name in names:
                self.kept.pop((tag, name), None)
            self.kept.update({kept.key: kept for kept in before})
