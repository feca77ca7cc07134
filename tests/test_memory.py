"""Memory of results is used again, and never while somebody holds a part of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from pccl import _core, result_pool

LARGE = result_pool.POOLED
F4 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[result_pool._Pool]:
    pool = result_pool._Pool()
    monkeypatch.setattr(result_pool, "_pool", pool)
    yield pool


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.parametrize(
    "shape", [(), (0,), (3, 4), (LARGE // 4,), (LARGE // 8, 1, 2), (LARGE + 1,)]
)
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "i8"])
def test_results_are_ordinary_arrays(shape: tuple[int, ...], dtype: str) -> None:
    made = result_pool.empty(shape, np.dtype(dtype))
    assert type(made) is np.ndarray and made.dtype == dtype and made.shape == shape
    assert made.flags.c_contiguous and made.flags.writeable and made.flags.aligned
    if made.nbytes >= LARGE:
        assert address(made) % 64 == 0
    made[...] = 7
    assert (made == 7).all() and (made.copy() == 7).all()


def test_memory_that_nobody_holds_is_used_again() -> None:
    first = result_pool.empty((LARGE,), F4)
    before = address(first)
    second = result_pool.empty((LARGE,), F4)
    assert not np.shares_memory(first, second)
    del first
    assert address(result_pool.empty((2, LARGE // 2), F4)) == before


def test_a_view_keeps_the_memory_of_a_result() -> None:
    whole = result_pool.empty((LARGE, 2), F4)
    views = [whole[1:], whole.view(np.uint8)[::2], memoryview(whole.reshape(-1)), whole.T]
    before = address(whole)
    del whole
    while views:
        gc.collect()
        assert address(result_pool.empty((LARGE, 2), F4)) != before
        views.pop()
    assert address(result_pool.empty((LARGE, 2), F4)) == before


def test_no_more_is_kept_than_the_limit(
    pool: result_pool._Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_pool, "_KEPT", 10 * LARGE)
    for size in (1, 2, 3):
        held = [result_pool.empty((size * LARGE,), np.dtype(np.uint8)) for _ in range(4)]
        held.clear()
    # The oldest went first.
    assert {size // LARGE: len(blocks) for size, blocks in pool._free.items()} == {3: 3}
    assert pool._kept == 9 * LARGE
    del held
    result_pool.empty((11 * LARGE,), np.dtype(np.uint8))
    assert pool._kept == 0 and not pool._free


def test_a_result_may_be_dropped_in_the_middle_of_the_pools_work(pool: result_pool._Pool) -> None:
    made = result_pool.empty((LARGE,), F4)
    with pool._lock:
        del made
        result_pool.empty((LARGE,), F4)
    assert pool._kept == 0


def test_the_engine_keeps_the_memory_that_was_used_last() -> None:
    from pccl._testing import kept_bytes

    mib = 1 << 20
    # The second size has no room beside the first, the third has none at all.
    assert kept_bytes(4 * mib, [3 * mib, 2 * mib, 5 * mib]) == [3 * mib, 2 * mib, 2 * mib]
    assert kept_bytes(4 * mib, [mib, mib, 2 * mib, mib]) == [mib, mib, 3 * mib, 3 * mib]


@pytest.mark.skipif(not _core.shares_memory(), reason="the code for other systems has no such call")
def test_memory_is_touched_ahead_while_somebody_wants_it() -> None:
    from pccl._testing import touch_ahead

    mib = 1 << 20
    sizes = [8 * mib, 4 * mib, 12 * mib]
    assert touch_ahead(sizes, True) == [(0.0, 1.0)] * 3
    # Blocks that nobody else owns go back to their pool.
    assert len(touch_ahead(sizes, False)) == 3
