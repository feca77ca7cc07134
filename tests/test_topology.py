"""Plans from measurements: ring orders, shares and choices against brute force, and as a master makes them of rows."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pccl import _testing

Table = tuple[list[tuple[int, int]], list[tuple[bool, int, int, int]]]
Plan = tuple[list[int], list[tuple[int, str, list[int]]], list[int], list[int]]
Edge = tuple[int, int]
_Row = tuple[list[tuple[int, bool, int, int]], int, int]

MIB = 1 << 20
LARGE = 256 * MIB
ANY_SIZE = 2**64 - 1
PLAN = 2  # the cause of an epoch
NO_ROW = None


def make_table(
    n: int,
    link: Callable[[int, int], tuple[int, ...]] = lambda a, b: (0, 0),
    host: Callable[[int], tuple[int, int]] = lambda a: (0, 0),
    bad: set[Edge] | None = None,
) -> Table:
    """`link`: (kilobytes per s, rtt in us[, kilobytes per s beside all others]) from a to b; `host`: (up, down)."""
    links = []
    for a, b in itertools.product(range(n), repeat=2):
        if a == b:
            links.append((False, 0, 0, 0))
        elif (a, b) in (bad or set()):
            links.append((True, 0, 0, 0))
        else:
            rate, rtt, *together = link(a, b)
            links.append((False, rate, rtt, *(together or [0])))
    return [host(a) for a in range(n)], links


def even(n: int, rate: int = 62_500, rtt: int = 100_000) -> Table:
    return make_table(n, lambda a, b: (rate, rtt), lambda a: (rate, rate))


@st.composite
def tables(draw: st.DrawFn, sizes: tuple[int, int] = (2, 6), bad: bool = False) -> Table:
    """Everything is known; all pairs may differ, both ways."""
    n = draw(st.integers(*sizes))
    seed = random.Random(draw(st.integers(0, 2**32)))
    slow = seed.choice([1, 3, 30])  # how much slower the slowest is
    rate = lambda: seed.randint(100_000 // slow, 100_000)  # noqa: E731
    edges = set()
    if bad:
        pairs = list(itertools.combinations(range(n), 2))
        edges = set(seed.sample(pairs, seed.randint(0, len(pairs) // 2)))
        edges = {pair if seed.random() < 0.5 else pair[::-1] for pair in edges}  # either way counts
    host = {a: (rate(), rate()) for a in range(n)}
    if seed.random() < 0.5:
        return make_table(
            n, lambda a, b: (min(host[a][0], host[b][1]), seed.randint(1, 9999)), host.get, edges
        )
    return make_table(n, lambda a, b: (rate(), seed.randint(1, 9999)), host.get, edges)


class Net:
    """A table as numbers, by the rules of rates.h, for tables in which all is known."""

    def __init__(self, table: Table) -> None:
        hosts, links = table
        self.n = n = len(hosts)
        self.path = np.array([1000.0 * rate for _, rate, *_ in links]).reshape(n, n)
        bad = np.array([unreachable for unreachable, *_ in links]).reshape(n, n)
        self.path[bad | bad.T] = 0
        known = np.array([1000.0 * rate for _, rate, *_ in links]).reshape(n, n)
        self.up = np.maximum([1000.0 * up for up, _ in hosts], known.max(axis=1))
        self.down = np.maximum([1000.0 * down for _, down in hosts], known.max(axis=0))
        # Ways that together are what a link at their end carries have no rates of their own.
        usable = ~(bad | bad.T) & ~np.eye(n, dtype=bool)
        shared = np.zeros((n, n), bool)
        for a in range(n):
            for link, ways in ((self.up[a], (a, usable[a])), (self.down[a], (usable[:, a], a))):
                rates = self.path[ways]
                even = len(rates) > 1 and 2 * rates.min() > rates.max()
                if even and 0.8 * link < rates.sum() < 1.25 * link:
                    shared[ways] = True
        self.path = np.where(shared, np.minimum.outer(self.up, self.down), self.path)

    def rate(self, a: int, b: int) -> float:
        return float(min(self.up[a], self.down[b], self.path[a, b]))

    def direct_seconds(self, shares: np.ndarray) -> float:
        """By byte, without delays."""
        load = (1 - shares) + (self.n - 1) * shares
        worst = max((load / self.up).max(), (load / self.down).max())
        both = shares[:, None] + shares[None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            pairs = np.where(both > 0, both / self.path, 0)
        np.fill_diagonal(pairs, 0)
        return float(max(worst, pairs.max()))

    def bottleneck(self, order: tuple[int, ...] | list[int]) -> float:
        return min(self.rate(a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True))


def bad_edges(table: Table) -> set[Edge]:
    n = len(table[0])
    return {
        (min(a, b), max(a, b))
        for a, b in itertools.product(range(n), repeat=2)
        if table[1][a * n + b][0]
    }


def ring_plan(order: list[int] | tuple[int, ...]) -> Plan:
    return list(order), [(ANY_SIZE, "ring", [1] * len(order))], [], []


def direct_plan(shares: list[int]) -> Plan:
    return list(range(len(shares))), [(ANY_SIZE, "direct", shares)], [], []


def rings(n: int) -> Iterator[tuple[int, ...]]:
    for rest in itertools.permutations(range(1, n)):
        yield (0, *rest)


def chosen(
    table: Table, unusable: set[Edge] | None = None, hosts: list[int] | None = None
) -> tuple[Plan, str, set[Edge]]:
    choice = _testing.choose_plan(table, unusable or set(), hosts or [])
    assert choice is not None
    return choice


def class_for(plan: Plan, size: int) -> tuple[int, str, list[int]]:
    return next(c for c in plan[1] if size <= c[0])


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
        table = make_table(8, lambda a, b: (noise.randint(9, 99) * 1000, noise.randint(1, 9999)))  # noqa: B023
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
        distance = lambda a, b: min((place[a] - place[b]) % n, (place[b] - place[a]) % n)  # noqa: B023, E731
        table = make_table(n, lambda a, b: (50_000, 1000 * distance(a, b)))  # noqa: B023
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


# Choices.


def test_peers_of_two_continents_named_in_turn_are_sorted() -> None:
    same = lambda a, b: a % 2 == b % 2  # noqa: E731
    table = make_table(
        8,
        lambda a, b: (60_000, 10_000) if same(a, b) else (12_000, 100_000),
        lambda a: (60_000, 60_000),
    )
    plan, _, _ = chosen(table)
    order = plan[0]
    assert sum(not same(a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True)) == 2
    for size in (64 << 10, 4 * MIB, LARGE):
        times = [_testing.predict(ring_plan(other), table, size) for other in rings(8)]
        times.append(_testing.predict(direct_plan([1] * 8), table, size))
        assert _testing.predict(plan, table, size) <= 1.1 * min(times)


def test_far_away_peers_send_small_arrays_straight_to_their_owners() -> None:
    table = even(8)
    plan, why, _ = chosen(table)
    assert class_for(plan, 64 << 10)[1] == "direct"
    # Two ways of 50 ms, and little else; a ring takes 14.
    assert _testing.predict(plan, table, 64 << 10) < 0.11
    assert "ring" in why and "64 KiB takes" in why and "times the lower bound" in why


def test_on_even_fast_links_the_plan_is_as_without_measurements() -> None:
    plan, _, _ = chosen(even(4, 1_200_000, 100))
    assert class_for(plan, LARGE)[1:] == ("ring", [1] * 4)
    assert plan[0] == [0, 1, 2, 3]


def check_plan(plan: Plan, edges: set[Edge], n: int) -> None:
    order, classes, _, regions = plan
    assert sorted(order) == list(range(n))
    limits = [max_bytes for max_bytes, _, _ in classes]
    assert limits == sorted(limits)
    assert limits[-1] == ANY_SIZE
    for _, kind, shares in classes:
        assert kind in ("ring", "direct", "host_ring", "host_direct", "regional")
        assert len(shares) == n
        assert set(shares) <= {0, 1} or sum(shares) == 1 << 16
    assert bool(regions) == any(kind == "regional" for _, kind, _ in classes)
    for max_bytes, _, _ in classes:
        for kind in (0, 1, 2):  # all_reduce, reduce_scatter, all_gather
            for rank in range(n):
                flows, shares = _testing.plan_flows(plan, max_bytes, rank, kind)
                for share, (sources, partial_to, final_from, final_to) in zip(
                    shares, flows, strict=True
                ):
                    peers = {*sources, partial_to, final_from, *final_to} - {None}
                    used = {(min(rank, p), max(rank, p)) for p in peers if p is not None}
                    assert not share or used <= edges


def play(plan: Plan, size: int) -> None:
    """An all-reduce of `size` int64 elements by the plan's flows, against NumPy."""
    n = len(plan[0])
    noise = np.random.default_rng(size)
    inputs = noise.integers(-1000, 1000, (n, size))
    parts = [_testing.plan_flows(plan, 8 * size, rank) for rank in range(n)]
    _, segments = _testing.cut([(size, 7)], 0, parts[0][1], 512 << 10)
    begin = 0
    results = np.zeros((n, size), dtype=np.int64)
    for chunk, _, _, raw_bytes, _ in segments:
        at = slice(begin, begin + raw_bytes // 8)
        begin += raw_bytes // 8
        flows = [flows[chunk] for flows, _ in parts]
        partials: dict[int, np.ndarray] = {}
        while len(partials) < n:
            ready = [
                rank for rank in range(n)
                if rank not in partials and all(s in partials for s in flows[rank][0])
            ]  # fmt: skip
            assert ready
            for rank in ready:
                partials[rank] = inputs[rank, at] + sum(partials[s] for s in flows[rank][0])
        (owner,) = [rank for rank in range(n) if flows[rank][1] is None]
        have = [owner]
        results[owner, at] = partials[owner]
        for rank in have:
            for to in flows[rank][3]:
                assert to not in have
                results[to, at] = results[rank, at]
                have.append(to)
        assert len(have) == n
    assert begin == size
    assert (results == inputs.sum(axis=0)).all()


@settings(max_examples=80, deadline=None)
@given(tables((1, 8), bad=True), st.data())
def test_every_plan_can_be_run_over_its_links(table: Table, data: st.DataObject) -> None:
    n = len(table[0])
    hosts = data.draw(st.sampled_from([[], [0] * n, [rank // 2 for rank in range(n)]]))
    plan, why, edges = chosen(table, set(), hosts)
    assert chosen(table, set(), hosts) == (plan, why, edges)
    check_plan(plan, edges, n)
    if edges & bad_edges(table):
        # There was no way round, or the pairs are of one host.
        assert not why or "no order avoids" in why
    for size in (1, 700, 70_000):
        play(plan, size)


any_shares = st.lists(st.sampled_from([0, 0, 1, 5, 999, 65_000]), min_size=1, max_size=7).filter(
    any
)


@settings(max_examples=100, deadline=None)
@given(any_shares, st.integers(0, 3000), st.booleans())
def test_uneven_and_empty_shares_reduce_to_the_sum(
    shares: list[int], size: int, by_host: bool
) -> None:
    n = len(shares)
    for kind in ("host_direct", "host_ring") if by_host else ("direct",):
        hosts = [rank * 2 // n for rank in range(n)] if by_host else []
        play((list(range(n)), [(ANY_SIZE, kind, shares)], hosts, []), size)


@settings(max_examples=60, deadline=None)
@given(tables((2, 7)), st.sampled_from([100, 64 << 10, 4 * MIB, LARGE]))
def test_a_prediction_covers_what_the_busiest_link_carries(table: Table, size: int) -> None:
    net = Net(table)
    plan, _, _ = chosen(table)
    carried: dict[Edge, float] = defaultdict(float)
    for rank in range(net.n):
        flows, shares = _testing.plan_flows(plan, size, rank)
        for share, (_, partial_to, _, final_to) in zip(shares, flows, strict=True):
            for to in [*final_to, *([] if partial_to is None else [partial_to])]:
                carried[rank, to] += size * share / sum(shares)
    out, into = np.zeros(net.n), np.zeros(net.n)
    busy = 0.0
    regional = class_for(plan, size)[1] == "regional"
    across: dict[Edge, float] = defaultdict(float)
    for (a, b), amount in carried.items():
        out[a] += amount
        into[b] += amount
        if regional and plan[3][a] != plan[3][b]:
            across[plan[3][a], plan[3][b]] += amount
        else:
            busy = max(busy, amount / net.path[a, b])
    for (one, other), amount in across.items():
        # All that pairs carry at once, or are known to carry.
        a, b = (np.flatnonzero(np.array(plan[3]) == region) for region in (one, other))
        known = sum(1000.0 * table[1][i * net.n + j][1] for i in a for j in b)
        busy = max(busy, amount / min(known, net.up[a].sum(), net.down[b].sum()))
    busy = max(busy, (out / net.up).max(), (into / net.down).max())
    predicted = _testing.predict(plan, table, size)
    assert predicted >= busy * (1 - 1e-9)
    assert predicted <= 2.1 * busy + 2 * net.n * (0.005 + 60e-6)
    assert predicted >= _testing.lower_bound(table, size) * (1 - 1e-9)


@given(tables((2, 6), bad=True), st.data())
def test_a_plan_uses_no_unusable_link_whatever_was_measured(
    table: Table, data: st.DataObject
) -> None:
    n = len(table[0])
    pairs = list(itertools.combinations(range(n), 2))
    unusable = set(data.draw(st.lists(st.sampled_from(pairs), max_size=4)))
    choice = _testing.choose_plan(table, unusable)
    assert (choice is None) == (_testing.make_plan(n, unusable) is None)
    if choice is not None:
        check_plan(choice[0], choice[2], n)
        assert not choice[2] & unusable


def test_owners_that_reach_everybody_make_up_for_pairs_that_cannot_connect() -> None:
    rate = lambda a: 20_000 if a < 2 else 60_000  # noqa: E731
    table = make_table(
        5, lambda a, b: (min(rate(a), rate(b)), 100_000), lambda a: (rate(a), rate(a)), {(0, 1)}
    )
    plan, _, edges = chosen(table)
    _, kind, shares = class_for(plan, LARGE)
    assert kind == "direct"
    assert shares[:2] == [0, 0]
    assert (0, 1) not in edges
    # Halves, where everybody owns something, go around instead.
    flows, _ = _testing.plan_flows(plan, LARGE, 0, 1)
    assert {partial_to for _, partial_to, _, _ in flows} - {None} <= {plan[0][1], plan[0][-1]}


def test_of_several_ranks_on_hosts_the_slow_host_owns_nothing() -> None:
    hosts = [0, 0, 1, 1, 2, 2]
    rate = lambda a: 15_625 if hosts[a] == 1 else 62_500  # noqa: E731
    table = make_table(
        6, lambda a, b: (min(rate(a), rate(b)), 50_000), lambda a: (rate(a), rate(a))
    )
    plan, _, edges = chosen(table, set(), hosts)
    check_plan(plan, edges, 6)
    _, kind, shares = class_for(plan, LARGE)
    assert kind == "host_direct"
    assert shares == [1 << 14, 1 << 14, 0, 0, 1 << 14, 1 << 14]
    assert _testing.predict(plan, table, LARGE) <= 1.15 * LARGE / 15_625_000


def two_sites(n: int, cross: int, rate: int = 12_500) -> Table:
    """Even ranks on one site, odd ones on the other, whose lines carry `cross` kB/s each way."""
    far = lambda a, b: a % 2 != b % 2  # noqa: E731
    pairs = (n // 2) * (n - n // 2)
    return make_table(
        n,
        lambda a, b: (0, 40_000, cross // pairs) if far(a, b) else (0, 1000, rate // n),
        lambda _: (rate, rate),
    )


def test_sites_that_share_their_lines_reduce_at_home_first() -> None:
    table = two_sites(8, 6_250)
    plan, why, edges = chosen(table)
    check_plan(plan, edges, 8)
    assert class_for(plan, LARGE)[1] == "regional"
    assert "by regions" in why
    assert plan[3] == [0, 1] * 4
    # Each site sends the array once, on as many pairs as it has hosts; `direct` would use all pairs.
    across: dict[Edge, int] = defaultdict(int)
    for rank in range(8):
        for _, partial_to, _, final_to in _testing.plan_flows(plan, LARGE, rank)[0]:
            for to in {partial_to, *final_to} - {None}:
                assert to is not None
                across[rank, to] += (rank + to) % 2
    assert sorted(across.values())[-9:] == [0, *[2] * 8]
    by_regions = _testing.predict(plan, table, LARGE)
    assert by_regions < 1.1 * LARGE / 6_250_000
    assert _testing.predict(ring_plan([0, 2, 4, 6, 1, 3, 5, 7]), table, LARGE) > 1.6 * by_regions
    assert _testing.predict(direct_plan([1] * 8), table, LARGE) > 3.5 * by_regions
    play(plan, 70_000)


def test_regions_of_hosts_of_several_ranks() -> None:
    hosts = [0, 0, 1, 1, 2, 2, 3, 3]
    regions = [0, 0, 1, 1, 0, 0, 1, 1]
    rate = 12_500
    table = make_table(
        8,
        lambda a, b: (0, 40_000, 200) if regions[a] != regions[b] else (0, 1000, 3000),
        lambda _: (rate, rate),
    )
    plan, _, edges = chosen(table, set(), hosts)
    check_plan(plan, edges, 8)
    assert class_for(plan, LARGE)[1] == "regional"
    assert plan[3] == regions
    for size in (1, 700, 70_000):
        play(plan, size)


@pytest.mark.parametrize("rtts", [(1000, 1900), (40_000, 40_000)])
def test_places_about_as_far_from_all_others_are_no_regions(rtts: tuple[int, int]) -> None:
    near, far = rtts
    table = make_table(
        6, lambda a, b: (0, near if a % 2 == b % 2 else far, 100), lambda _: (9000, 9000)
    )
    plan, why, _ = chosen(table)
    assert plan[3] == []
    assert "regions" not in why


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=8), st.integers(1, 60_000), st.data())
def test_whatever_the_regions_the_plan_reduces_over_its_links(
    regions: list[int], cross: int, data: st.DataObject
) -> None:
    n = len(regions)
    seed = random.Random(data.draw(st.integers(0, 2**32)))
    hosts = data.draw(st.sampled_from([[], [rank // 2 for rank in range(n)]]))
    regions = [regions[host * 2] for host in hosts] if hosts else regions
    table = make_table(
        n,
        lambda a, b: (
            seed.choice([0, 0, seed.randint(1, cross)]),
            seed.randint(500, 1000) if regions[a] == regions[b] else seed.randint(2000, 90_000),
            seed.randint(1, cross),
        ),
        lambda _: (seed.randint(1, 60_000), seed.randint(1, 60_000)),
        {(0, n - 1)} if seed.random() < 0.2 else set(),
    )
    plan, why, edges = chosen(table, set(), hosts)
    check_plan(plan, edges, n)
    for size in (1, 700, 70_000):
        play(plan, size)
    if not hosts and n > 2 and _testing.best_ring(table) is not None:
        assert "no ring" not in why and "no order" not in why
        assert _testing.predict(plan, table, LARGE) < math.inf


@pytest.mark.parametrize("bad", [(a, b) for a in range(0, 8, 2) for b in range(1, 8, 2)])
def test_a_pair_that_cannot_connect_leaves_the_regions(bad: Edge) -> None:
    hosts, links = two_sites(8, 6_250)
    links[bad[0] * 8 + bad[1]] = (True, 0, 0, 0)
    plan, why, edges = chosen((hosts, links))
    assert "no ring" not in why
    assert bad not in edges and bad[::-1] not in edges
    # Where the pair is one of those that speak for the sites, a ring is what is left.
    assert class_for(plan, LARGE)[1] in ("regional", "ring")
    play(plan, 70_000)


def test_a_pair_of_which_nothing_is_known_counts_as_the_others() -> None:
    hosts, links = two_sites(8, 6_250)
    plan, _, _ = chosen((hosts, links))
    links[0 * 8 + 3] = (False, 0, 40_000, 0)
    again, _, _ = chosen((hosts, links))
    assert class_for(again, LARGE) == class_for(plan, LARGE)
    times = [_testing.predict(plan, (hosts, links), LARGE)]
    times.append(_testing.predict(plan, two_sites(8, 6_250), LARGE))
    assert times[0] == pytest.approx(times[1], rel=0.02)


def test_changed_rates_are_predicted_for_the_regions_of_the_plan() -> None:
    plan, _, _ = chosen(two_sites(8, 6_250))
    now_near = make_table(8, lambda a, b: (0, 1000, 3000), lambda _: (12_500, 12_500))
    assert 0 < _testing.predict(plan, now_near, LARGE) < math.inf


def test_halves_of_two_go_from_one_to_the_other_whoever_owns_what() -> None:
    plan: Plan = [0, 1], [(ANY_SIZE, "direct", [1, 0])], [], []
    for rank in (0, 1):
        flows, _ = _testing.plan_flows(plan, LARGE, rank, 1)
        assert [(flow[0], flow[1]) for flow in flows] == (
            [([1], None), ([], 1)] if rank == 0 else [([], 0), ([0], None)]
        )


def test_alone_and_on_one_host_the_plan_is_as_ever() -> None:
    assert chosen(([(5, 5)], [(False, 0, 0, 0)]))[1] == ""
    plan, why, _ = chosen(even(3), set(), [0, 0, 0])
    assert (plan[0], why) == ([0, 1, 2], "")


@pytest.mark.parametrize("n", [2, 3])
def test_two_or_three_peers_share_equally(n: int) -> None:
    plan, _, edges = chosen(even(n))
    check_plan(plan, edges, n)
    assert class_for(plan, LARGE)[2] == [1] * n


def test_what_is_not_known_is_guessed_from_what_is() -> None:
    assert chosen(make_table(4))[1]  # a table that says nothing at all harms nothing
    # Only one member has measured: the others are taken to be like it.
    table = make_table(4, lambda a, b: (50_000, 80_000) if a == 0 else (0, 0))
    plan, _, edges = chosen(table)
    check_plan(plan, edges, 4)
    assert _testing.predict(plan, table, LARGE) == pytest.approx(
        _testing.predict(plan, even(4, 50_000, 80_000), LARGE)
    )


def test_a_small_gain_is_not_worth_another_plan() -> None:
    table = even(4, 62_500, 1000)
    fast, slow = direct_plan([1] * 4), direct_plan([11, 10, 10, 9])
    assert not _testing.worth_changing(slow, fast, table)
    assert not _testing.worth_changing(fast, fast, table)
    assert _testing.worth_changing(direct_plan([4, 1, 1, 1]), fast, table)
    assert not _testing.worth_changing(fast, direct_plan([4, 1, 1, 1]), table)


@settings(max_examples=30, deadline=None)
@given(tables((2, 8)), st.randoms())
def test_names_of_ranks_do_not_matter(table: Table, noise: random.Random) -> None:
    n = len(table[0])
    names = list(range(n))
    noise.shuffle(names)
    hosts = [table[0][names[a]] for a in range(n)]
    links = [table[1][names[a] * n + names[b]] for a in range(n) for b in range(n)]
    plan, _, _ = chosen(table)
    other, _, _ = chosen((hosts, links))
    for size in (4096, LARGE):
        one, two = (
            _testing.predict(plan, table, size), _testing.predict(other, (hosts, links), size)
        )  # fmt: skip
        assert one == pytest.approx(two, rel=0.1)


# The master.


def rows_of(table: Table, members: list[int]) -> list[_Row]:
    n = len(members)
    return [
        (
            [(to, *table[1][a * n + b][:3]) for b, to in enumerate(members) if b != a],
            *table[0][a],
        )
        for a in range(n)
    ]


SLOW_LAST = make_table(
    4,
    lambda a, b: (15_625 if 3 in (a, b) else 62_500, 100_000),
    lambda a: (15_625,) * 2 if a == 3 else (62_500,) * 2,
)


def test_a_round_without_rows_changes_nothing() -> None:
    group = _testing.Planner(3)
    before = group.record()
    empty: _Row = ([], 0, 0)
    for rows in ([NO_ROW] * 3, [empty] * 3, [NO_ROW, empty, NO_ROW]):
        group.optimize(rows)
    assert group.record()[:5] == before[:5]
    assert group.record()[5] == 9  # every member was told, three times


def test_a_plan_comes_out_of_the_rows() -> None:
    group = _testing.Planner(4)
    first = group.record()[0]
    group.optimize(rows_of(SLOW_LAST, [1, 2, 3, 4]))
    epoch, cause, plan, table, _, told = group.record()
    assert (epoch, cause, told) == (first + 1, PLAN, 4)
    assert table == SLOW_LAST
    assert plan == chosen(SLOW_LAST, set(), [0, 1, 2, 3])[0]
    assert class_for(plan, LARGE)[2][3] == 0
    assert any("plan: " in line and "lower bound" in line for line in group.lines())
    # Nothing new: no epoch.
    group.optimize(rows_of(SLOW_LAST, [1, 2, 3, 4]))
    group.optimize([NO_ROW] * 4)
    assert group.record()[0] == epoch


def test_a_rebuilt_master_plans_the_same() -> None:
    live, again = _testing.Planner(4), _testing.Planner(4)
    for group in (live, again):
        group.optimize(rows_of(SLOW_LAST, [1, 2, 3, 4]))
    again.rebuild()
    assert again.record()[:5] == live.record()[:5]
    for group in (live, again):
        group.leave(2)
    assert again.record()[:5] == live.record()[:5]
    _, _, plan, table, members, _ = live.record()
    assert members == [1, 3, 4]
    keep = [0, 2, 3]
    assert table[0] == [SLOW_LAST[0][a] for a in keep]
    assert table[1] == [SLOW_LAST[1][a * 4 + b] for a in keep for b in keep]
    assert plan == chosen(table, set(), [0, 1, 2])[0]


def test_what_a_row_does_not_say_stays_known() -> None:
    group = _testing.Planner(3)
    group.optimize(rows_of(even(3), [1, 2, 3]))
    # Of a stranger, of itself, nothing of a member, half of something, and a pair that broke.
    group.optimize([([(9, False, 7, 7), (1, False, 7, 7), (2, False, 0, 0)], 0, 0),
                    ([(3, False, 0, 33)], 0, 44), ([(1, True, 5, 5)], 0, 0)])  # fmt: skip
    hosts, links = group.record()[3]
    assert hosts == [(62_500, 62_500), (62_500, 44), (62_500, 62_500)]
    assert links[0 * 3 + 1] == (False, 62_500, 100_000, 0)
    assert links[1 * 3 + 2] == (False, 0, 33, 0)  # it was measured, and has no rate of its own
    assert links[2 * 3 + 0] == (True, 0, 0, 0)
    group.optimize([NO_ROW, NO_ROW, ([(1, False, 5, 0)], 0, 0)])
    assert group.record()[3][1][2 * 3 + 0] == (False, 5, 0, 0)


def test_what_transfers_show_changes_the_plan_only_when_it_is_worth_it() -> None:
    group = _testing.Planner(4)
    group.optimize(rows_of(even(4), [1, 2, 3, 4]))
    epoch, _, plan, table, _, _ = group.record()
    for number, row in enumerate(rows_of(even(4, 60_000), [1, 2, 3, 4]), 1):
        group.measured(number, row)
    group.tick(120)
    assert group.record()[0] == epoch
    for number, row in enumerate(rows_of(SLOW_LAST, [1, 2, 3, 4]), 1):
        group.measured(number, row)
    assert group.record()[3] == table  # until there is an epoch
    group.tick(40)
    assert group.record()[:4] == (
        epoch + 1, PLAN, chosen(SLOW_LAST, set(), [0, 1, 2, 3])[0], SLOW_LAST
    )  # fmt: skip
    assert group.record()[2] != plan
    # A loss takes what is known into its epoch, worth it or not.
    group.measured(1, ([(2, False, 62_000, 0)], 0, 0))
    group.tick(120)
    assert group.record()[0] == epoch + 1
    group.leave(4)
    assert group.record()[3][1][0 * 3 + 1] == (False, 62_000, 100_000, 0)


def test_large_groups_have_no_table() -> None:
    group = _testing.Planner(65)
    before = group.record()[:4]
    group.optimize([([(2, False, 1000, 1000)], 5, 5)] * 65)
    assert group.record()[:4] == before
