"""Copies of a state that are sent in pieces."""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pccl._state import Offered, Replaced, State
from pccl.errors import InvalidArgument
from pccl.frameworks import Array


class Snapshot:
    """A copy of a state. *any thread*

    Attributes:
        listed: Of each entry: name, kind, shape, how to make it where it is missing, bytes.
    """

    def __init__(self, state: Any, func: str) -> None:
        entries = State(state, func).entries
        self._parts = [np.array(entry[5]) for entry in entries]
        self._ends = list(itertools.accumulate(part.size for part in self._parts))
        self.listed: list[Any] = [
            [name, kind, list(shape), hint, part.size]
            for (name, kind, shape, hint, *_), part in zip(entries, self._parts, strict=True)
        ]

    @property
    def size(self) -> int:
        """Bytes of all entries."""
        return self._ends[-1] if self._ends else 0

    @property
    def manifest(self) -> Array:
        """Its entries, for `restore`."""
        return np.array(bytearray(json.dumps(self.listed).encode()))

    def read(self, first: int, length: int) -> Array:
        """Bytes of all entries, one after the other. REQUIRES: so many are there."""
        made = np.empty(length, np.uint8)
        done = 0
        index = bisect.bisect_right(self._ends, first)
        while done < length:
            part = self._parts[index]
            begin = first + done - (self._ends[index] - part.size)
            count = min(length - done, part.size - begin)
            made[done : done + count] = part[begin : begin + count]
            done += count
            index += 1
        return made

    def packed(self) -> Array:
        """All of it, for `unpack`."""
        manifest = self.manifest
        size = np.array([manifest.size], np.int64).view(np.uint8)
        return np.concatenate([size, manifest, *self._parts])


def unpack(state: Any, packed: Array, func: str) -> Any:
    """`restore` from what `Snapshot.packed` has made. Bytes after it do not count."""
    size = int(packed[:8].view(np.int64)[0])
    return restore(state, listed(packed[8 : 8 + size]), packed[8 + size :], func)


def listed(manifest: Array) -> list[Any]:
    """The entries in a manifest."""
    return list(json.loads(manifest.tobytes()))


def restore(state: Any, entries: Sequence[Any], data: Array, func: str) -> Any:
    """`state` with what a snapshot has. Arrays are written in place, and objects load it.

    Raises:
        InvalidArgument: This state has no place for it. Nothing is changed then.
    """
    offered: list[Offered] = [
        (name, kind, tuple(shape), hint, size) for name, kind, shape, hint, size in entries
    ]
    shared = State(state, func)
    reason = shared.check(offered)
    if reason is not None:
        raise InvalidArgument.because(func, reason)
    own = {entry[0]: entry for entry in shared.entries}
    written: list[str] = []
    replaced: list[Replaced] = []
    first = 0
    for name, kind, shape, hint, size in offered:
        part = data[first : first + size]
        first += size
        mine = own.get(name)
        if mine is not None and mine[6] and mine[7] is None:
            mine[5][...] = part
            written.append(name)
        else:
            replaced.append((name, kind, shape, hint, np.array(part)))
    return shared.finish(written, replaced)
