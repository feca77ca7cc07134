"""Ring orders and shares from measurements, against brute force."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import (
    LARGE,
    Net,
    Table,
    bad_edges,
    chosen,
    class_for,
    make_table,
    ring_plan,
    rings,
    tables,
)

from pccl import _testing

# Ring orders.


@settings(max_examples=60, deadline=None)
@given(tables((2, 7)))
def test_the_ring_is_as_good_as_the_best_of_all(table: Table) -> None:
    net = Net(table)
    order = _testing.best_ring(table)
    assert order is not None
    assert sorted(order) == list(range(net.n))
    assert order[0] == 0
    best = max(net.bottleneck(other) for other in rings(net.n))
    assert net.bottleneck(order) >= best / 1.06  # a step of the measurements' accuracy
    times = [_testing.predict(ring_plan(other), table, LARGE) for other in rings(net.n)]
    assert _testing.predict(ring_plan(order), table, LARGE) <= 1.1 * min(times)


def test_a_ring_of_eight_is_the_best_of_all() -> None:
    for seed in range(3):
        noise = random.Random(seed)

        def link(a: int, b: int, noise: random.Random = noise) -> tuple[int, int]:
            return noise.randint(9, 99) * 1000, noise.randint(1, 9999)

        table = make_table(8, link)
        net = Net(table)
        order = _testing.best_ring(table)
        assert order is not None
        best = max(net.bottleneck(other) for other in rings(8))
        assert net.bottleneck(order) >= best / 1.06


def test_among_equally_fast_rings_the_nearest_neighbours_win() -> None:
    # On a circle, named at random; the far way takes longer.
    names = [0, 5, 2, 7, 3, 8, 1, 6, 4, 9, 11, 10]
    for n in (5, 8, 12):
        place = {name: at for at, name in enumerate(name for name in names if name < n)}

        def distance(a: int, b: int, n: int = n, place: dict[int, int] = place) -> int:
            return min((place[a] - place[b]) % n, (place[b] - place[a]) % n)

        table = make_table(n, lambda a, b, far=distance: (50_000, 1000 * far(a, b)))
        order = _testing.best_ring(table)
        assert order is not None
        assert all(distance(a, b) == 1 for a, b in zip(order, [*order[1:], 0], strict=True))


@pytest.mark.parametrize("n", [13, 20, 40, 64])
def test_a_large_ring_is_found_and_good(n: int) -> None:
    noise = random.Random(n)
    names = list(range(n))
    noise.shuffle(names)
    place = {name: at for at, name in enumerate(names)}
    # One ring is fast; all other pairs are slower.
    table = make_table(
        n,
        lambda a, b: (60_000, 1000) if (place[a] - place[b]) % n in (1, n - 1) else (20_000, 5000),
    )
    order = _testing.best_ring(table)
    assert order is not None
    assert sorted(order) == list(range(n))
    assert _testing.best_ring(table) == order
    fast = sum((place[a] - place[b]) % n in (1, n - 1) for a, b in itertools.pairwise([*order, 0]))
    assert fast >= 0.8 * n


@settings(max_examples=80, deadline=None)
@given(tables((2, 6), bad=True))
def test_a_ring_avoids_pairs_that_could_not_connect_or_there_is_none(table: Table) -> None:
    net = Net(table)
    bad = bad_edges(table)
    order = _testing.best_ring(table)
    possible = any(net.bottleneck(other) > 0 for other in rings(net.n))
    assert (order is not None) == possible
    if order is not None:
        assert net.bottleneck(order) > 0
        around = zip(order, [*order[1:], order[0]], strict=True)
        assert not {(min(edge), max(edge)) for edge in around} & bad


def test_many_peers_of_which_some_pairs_cannot_connect_get_a_ring() -> None:
    bad = {(a, b) for a in range(30) for b in range(30) if (a + b) % 3 == 0 and a != b}
    table = make_table(30, lambda a, b: (10_000, 1000), bad=bad)
    order = _testing.best_ring(table)
    assert order is not None
    assert Net(table).bottleneck(order) > 0


# Shares.


def grid(n: int, steps: int) -> Iterator[np.ndarray]:
    for cuts in itertools.combinations(range(steps + n - 1), n - 1):
        ends = [-1, *cuts, steps + n - 1]
        yield np.array([b - a - 1 for a, b in itertools.pairwise(ends)]) / steps


@settings(max_examples=60, deadline=None)
@given(tables((2, 4), bad=True))
def test_no_shares_on_a_grid_are_better(table: Table) -> None:
    net = Net(table)
    shares = _testing.best_shares(table)
    steps = {2: 100, 3: 40, 4: 18}[net.n]
    best = min(net.direct_seconds(other) for other in grid(net.n, steps))
    if shares is None:
        assert best == math.inf
        return
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1)
    assert net.direct_seconds(np.array(shares)) <= best * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(tables((5, 12)), st.integers(0, 2**32))
def test_no_shares_at_hand_are_better(table: Table, seed: int) -> None:
    net = Net(table)
    shares = np.array(_testing.best_shares(table))
    best = net.direct_seconds(shares)
    noise = np.random.default_rng(seed)
    for _ in range(200):
        other = shares + noise.normal(0, noise.choice([0.003, 0.1]), net.n)
        other = np.maximum(other, 0)
        if other.sum() > 0:
            assert net.direct_seconds(other / other.sum()) >= best * (1 - 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(100, 100_000), min_size=3, max_size=16))
def test_where_only_the_hosts_links_bind_direct_meets_the_lower_bound(rates: list[int]) -> None:
    n = len(rates)
    table = make_table(n, lambda a, b: (min(rates[a], rates[b]), 0), lambda a: (rates[a],) * 2)
    shares = np.array(_testing.best_shares(table))
    bound = _testing.lower_bound(table, LARGE) / LARGE
    # One flow may be slower than what all carry together; then the pairs bind.
    assume(all(s + r <= bound * min(rates[a], rates[b]) * 1000
               for a, s in enumerate(shares) for b, r in enumerate(shares) if a != b))  # fmt: skip
    assert Net(table).direct_seconds(shares) == pytest.approx(bound)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16])
def test_a_slow_peer_owns_nothing(n: int) -> None:
    rate = lambda a: 15_625 if a == n - 1 else 62_500  # noqa: E731
    table = make_table(
        n, lambda a, b: (min(rate(a), rate(b)), 100_000), lambda a: (rate(a), rate(a))
    )
    plan, why, _ = chosen(table)
    _, kind, shares = class_for(plan, LARGE)
    assert kind == "direct"
    if n <= 4:
        assert shares[-1] == 0
    predicted = _testing.predict(plan, table, LARGE)
    assert predicted <= 1.15 * _testing.lower_bound(table, LARGE)
    if n == 4:
        assert predicted <= 1.15 * LARGE / 15_625_000
        assert "shares of 33/33/33/0 %" in why
        ring = _testing.best_ring(table)
        assert ring is not None
        assert _testing.predict(ring_plan(ring), table, LARGE) > 1.4 * predicted
