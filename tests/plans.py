"""Tables of measurements, plans made of them, and a brute-force reference."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
from hypothesis import strategies as st

from pccl import _testing

Table = tuple[list[tuple[int, int]], list[tuple[bool, int, int, int]]]
Plan = tuple[list[int], list[tuple[int, str, list[int]]], list[int], list[int]]
Edge = tuple[int, int]

MIB = 1 << 20
LARGE = 256 * MIB
ANY_SIZE = 2**64 - 1
ALL_TO_ALL = 4


def make_table(
    n: int,
    link: Callable[[int, int], tuple[int, ...]] = lambda a, b: (0, 0),
    host: Callable[[int], tuple[int, int]] = lambda a: (0, 0),
    bad: set[Edge] | None = None,
) -> Table:
    """The input of a plan.

    `link`: (kilobytes per s, rtt in us[, kilobytes per s beside all others]) from a to b.
    `host`: (up, down).
    """
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
    table: Table,
    unusable: set[Edge] | None = None,
    hosts: list[int] | None = None,
    mesh: int = 32,
) -> tuple[Plan, str, set[Edge]]:
    choice = _testing.choose_plan(table, unusable or set(), hosts or [], mesh)
    assert choice is not None
    return choice


def class_for(plan: Plan, size: int) -> tuple[int, str, list[int]]:
    return next(c for c in plan[1] if size <= c[0])


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
        for kind in (0, 1, 2, ALL_TO_ALL):  # all_reduce, reduce_scatter, all_gather
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
    play_exchange(plan, 8 * size)


def play_exchange(plan: Plan, size: int) -> None:
    """An all-to-all: contributions hold what their receivers expect, and owners get everything."""
    n = len(plan[0])
    flows = [_testing.plan_flows(plan, size, rank, ALL_TO_ALL)[0] for rank in range(n)]
    contents = [_testing.plan_contents(plan, size, rank) for rank in range(n)]
    assert len({most for _, most in contents}) == 1  # all cut alike
    for chunk in range(n):
        partials: dict[int, list[int]] = {}
        while len(partials) < n:
            ready = [
                rank for rank in range(n)
                if rank not in partials and all(s in partials for s in flows[rank][chunk][0])
            ]  # fmt: skip
            assert ready
            for rank in ready:
                chunks, most = contents[rank]
                sources, partial_to, final_from, final_to = flows[rank][chunk]
                assert (partial_to is None) == (rank == chunk)
                assert final_from is None and not final_to
                assert chunks[chunk] == [partials[source] for source in sources]
                partials[rank] = [rank, *itertools.chain(*chunks[chunk])]
                assert rank == chunk or len(partials[rank]) <= most
        assert sorted(partials[chunk]) == list(range(n))


def two_sites() -> Table:
    """Four ranks on each site, even and odd ones; the lines carry 6,250 kB/s each way."""
    far = lambda a, b: a % 2 != b % 2  # noqa: E731
    rate = 12_500
    return make_table(
        8,
        lambda a, b: (0, 40_000, 6_250 // 16) if far(a, b) else (0, 1000, rate // 8),
        lambda _: (rate, rate),
    )
