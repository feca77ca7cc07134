"""Inner parts of the engine that tests drive directly. Not for users; absent from wheels."""

from typing import Any, TypedDict

import numpy as np

class ChunkFlow(TypedDict):
    sources: list[tuple[int, bool]]
    partial_to: int | None
    final_from: int | None
    final_to: list[int]
    owner: bool

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

def reduce(
    dtype: int,
    op: int,
    own: _Bytes,
    contributions: list[tuple[_Bytes, bool]],
    divisor: int,
    out: _Bytes,
    count: int,
) -> None: ...
def instruction_set() -> str: ...
def force_instruction_set(name: str) -> bool: ...
def ring(order: list[int], rank: int) -> tuple[list[ChunkFlow], list[int]]: ...
def direct(shares: list[int], rank: int) -> tuple[list[ChunkFlow], list[int]]: ...
def cut(
    arrays: list[tuple[int, int]], op: int, shares: list[int], segment_bytes: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int, int, int]]]: ...
