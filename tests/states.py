"""State as a sender and a receiver have it, without an engine: `deliver` plays its part."""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple
from typing import Any

import numpy as np

from pccl._state import Replaced, State

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any = None


class Keeper:
    """Has a state dict, and counts how often it was loaded."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self.loaded = 0

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, kept: Any) -> None:
        self.kept = kept
        self.loaded += 1


def share(state: object) -> State:
    return State(state, "sync")


class RefusedError(Exception):
    """The newcomer is put out before anything is written."""


def deliver(sender: object, receiver: object) -> Any:
    """The state of a newcomer with `receiver` after a sync."""
    source, target = share(sender), share(receiver)
    own = {entry[0]: entry for entry in target.entries}
    written: dict[str, tuple[Any, Any]] = {}
    replaced: list[Replaced] = []
    for name, kind, shape, hint, _, data, _, _ in source.entries:
        assert data.dtype == np.uint8 and data.ndim == 1
        if name in own:
            _, old_kind, old_shape, _, _, old, writable, _ = own.pop(name)
            assert (kind, shape) == (old_kind, old_shape), name
            if old.tobytes() == data.tobytes():
                continue
            if writable and old.size == data.size:
                written[name] = (old, data)
                continue
        replaced.append((name, kind, shape, hint, data.copy()))
    assert not own, "the engine refuses a newcomer that has more than the others"
    refusal = target.check([(*what, data.size) for *what, data in replaced])  # type: ignore[misc]
    if refusal is not None:
        raise RefusedError(refusal)
    for old, data in written.values():
        old[...] = data
    return target.finish([*written], replaced)


def same(a: Any, b: Any) -> bool:
    """Equal in structure, types and bits, in whatever byte order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        a, b = (array.astype(array.dtype.newbyteorder("="), copy=False) for array in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Keeper):
        return same(a.kept, b.kept)
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or a != a and b != b)
    return bool(a == b)


def frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array
