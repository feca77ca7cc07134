"""Error feedback: the rounding errors of quantized arrays, added to them the next time."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pccl import quantize
from pccl.frameworks import Bytes
from pccl.types import DataType

if TYPE_CHECKING:
    from pccl import _core

Key = tuple[int | None, str]


class Residual(NamedTuple):
    """The rounding errors of an array: float32 for each element (float64 of float64)."""

    key: Key  # the calls' tag, and the array's path
    outline: str  # "float32[3,4]": an array of another outline at this path starts with nothing
    values: Bytes
    weight: float  # this member's, by which the elements were multiplied
    members: int  # whose elements were added up; 0: nothing is kept yet


class Use(NamedTuple):
    """The part of a call that residuals depend on.

    Attributes:
        tag: Of the call.
        weight: This member's; 1 if the call has no weights.
        members: Present when it is made, if their sum is divided; else 0.
    """

    tag: int | None
    weight: float = 1.0
    members: int = 0


class Taken(list["Residual | None"]):
    """The residuals that a call has taken, of each array."""


class Residuals:
    """The residuals of a communicator. *any thread*

    An operation changes them when it commits, never before.
    """

    def __init__(self) -> None:
        # Guards what follows. No blocking call holds it.
        self._lock = threading.Lock()
        self._kept: dict[Key, Residual] = {}
        # Operations that change a residual, and what is kept of it if they commit. Before they
        # start, the list from `take`: a call that Ctrl-C ends there takes it along.
        self._changes: dict[Key, tuple[_core.Operation | weakref.ref[Taken], Residual]] = {}

    @property
    def kept(self) -> dict[Key, Residual]:
        """The residuals that all operations that are over have left, by tag and path."""
        with self._lock:
            self._settle()
            return dict(self._kept)

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._kept.clear()
            self._changes.clear()

    def take(
        self, arrays: Sequence[tuple[Any, Any, int]], use: Use, names: Sequence[tuple[str, str]]
    ) -> Taken:
        """The residual of each array, for an operation that is about to start.

        `follow` must come after it, or `give_back`.

        Args:
            arrays: (send, recv, dtype code), as the engine gets them.
            use: What the call is.
            names: (path, outline) of each array.

        Returns:
            None for an array that is not quantized, and for one whose residual another operation
            is about to change: two of them would add the same errors. Also if `weight` is NaN,
            with which the call fails after the operation.
        """
        found = Taken()
        with self._lock:
            self._settle()
            for (send, _, code), (path, outline) in zip(arrays, names, strict=False):
                element, wide = quantize.FLOATING.get(DataType(code), (1, 0))
                count = send.size // element
                key = (use.tag, path)
                quantized = wide != 0 and count >= quantize.EXACT_BELOW
                if not quantized or key in self._changes or math.isnan(use.weight):
                    found.append(None)
                    continue
                kept = self._kept.get(key)
                if kept is None or kept.outline != outline:
                    values = np.zeros(count * wide, np.uint8)
                    kept = Residual(key, outline, values, use.weight, 0)
                fitting = _fitting(kept, use, f"f{wide}")
                self._changes[key] = weakref.ref(found), fitting
                found.append(fitting)
        return found

    def follow(self, operation: _core.Operation, taken: Sequence[Residual | None]) -> None:
        """Keeps what the operation leaves in `taken`, once it commits."""
        with self._lock:
            for residual in taken:
                # Forgotten meanwhile if the communicator was closed.
                if residual is not None and residual.key in self._changes:
                    self._changes[residual.key] = operation, residual
            self._settle()

    def give_back(self, taken: Sequence[Residual | None]) -> None:
        """Keeps what there was before: the operation has not started, or has failed."""
        with self._lock:
            for residual in taken:
                if residual is not None:
                    self._changes.pop(residual.key, None)

    def _settle(self) -> None:
        """Takes over what operations that are over have left, which lets go of their arrays."""
        for key, (operation, residual) in list(self._changes.items()):
            if isinstance(operation, weakref.ref):
                if operation() is None:
                    del self._changes[key]
                continue
            if not operation.done():
                continue
            del self._changes[key]
            members = operation.contributors()
            if members > 0:
                self._kept[key] = residual._replace(members=members)

    def copies(self, tag: int | None, names: Sequence[str]) -> list[Residual]:
        """The residuals at these paths now."""
        kept = self.kept
        found = [kept.get((tag, name)) for name in names]
        return [one._replace(values=one.values.copy()) for one in found if one is not None]

    def restore(self, tag: int | None, names: Sequence[str], before: Sequence[Residual]) -> None:
        """Goes back to `copies`, when results that have changed these paths do not count."""
        with self._lock:
            for name in names:
                self._changes.pop((tag, name), None)
                self._kept.pop((tag, name), None)
            self._kept.update({kept.key: kept for kept in before})


def _fitting(kept: Residual, use: Use, kind: str) -> Residual:
    """The residual for such a call: its own memory, or a smaller copy.

    The errors are in units of the products, or of their sum. In a mean of smaller weights, or of
    fewer members, the same errors would be a larger part of the result. The others' weights
    are not known yet, so they are taken to change like this member's.
    """
    factor = 1.0
    if use.weight < kept.weight:
        factor *= use.weight / kept.weight
    if use.members < kept.members and use.members > 0:
        factor *= use.members / kept.members
    if factor == 1.0:
        return kept._replace(weight=use.weight)
    values = kept.values.view(kind)
    scaled = np.multiply(values, factor, dtype=values.dtype).view(np.uint8)
    return kept._replace(values=scaled, weight=use.weight)
