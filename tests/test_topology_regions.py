"""Sites that share a line: regions of the plan."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import (
    ANY_SIZE,
    LARGE,
    Edge,
    Plan,
    check_plan,
    chosen,
    class_for,
    direct_plan,
    make_table,
    play,
    ring_plan,
    two_sites,
)

from pccl import _testing


def test_sites_that_share_their_lines_reduce_at_home_first() -> None:
    table = two_sites()
    plan, why, edges = chosen(table)
    check_plan(plan, edges, 8)
    assert class_for(plan, LARGE)[1] == "regional"
    assert "by regions" in why
    assert plan[3] == [0, 1] * 4
    # Each site sends the array once, on as many pairs as it has hosts; `direct` uses all pairs.
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


def test_an_exchange_of_crowded_hosts_goes_straight_between_hosts_where_it_can() -> None:
    hosts = [0, 0, 1, 1, 2, 2, 3, 3]
    regions = [0, 0, 1, 1, 0, 0, 1, 1]
    table = make_table(
        8,
        lambda a, b: (0, 40_000, 200) if regions[a] != regions[b] else (0, 1000, 3000),
        lambda _: (12_500, 12_500),
    )
    plan, _, _ = chosen(table, set(), hosts)
    kinds = [kind for _, kind, _ in plan[1]]
    assert "host_direct" in kinds and "regional" in kinds
    small = plan[1][kinds.index("host_direct")][0]
    flows = _testing.plan_flows(plan, small, 0, 4)[0]
    # Rank 0 sends rank 6 straight what its host has for it. By regions it would go through rank 4.
    assert flows[6][1] == 6


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
    hosts, links = two_sites()
    links[bad[0] * 8 + bad[1]] = (True, 0, 0, 0)
    plan, why, edges = chosen((hosts, links))
    assert "no ring" not in why
    assert bad not in edges and bad[::-1] not in edges
    # Where the pair is one of those that speak for the sites, a ring is what is left.
    assert class_for(plan, LARGE)[1] in ("regional", "ring")
    play(plan, 70_000)


def test_a_pair_of_which_nothing_is_known_counts_as_the_others() -> None:
    hosts, links = two_sites()
    plan, _, _ = chosen((hosts, links))
    links[0 * 8 + 3] = (False, 0, 40_000, 0)
    again, _, _ = chosen((hosts, links))
    assert class_for(again, LARGE) == class_for(plan, LARGE)
    times = [_testing.predict(plan, (hosts, links), LARGE)]
    times.append(_testing.predict(plan, two_sites(), LARGE))
    assert times[0] == pytest.approx(times[1], rel=0.02)


def test_without_regions_every_host_is_one() -> None:
    # No master makes such a plan. A member that is sent one runs it.
    plan: Plan = list(range(5)), [(ANY_SIZE, "regional", [1] * 5)], [], []
    assert _testing.plan_contents(plan, LARGE, 2)[1] == 1
    play(plan, 700)
