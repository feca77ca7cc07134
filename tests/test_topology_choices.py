"""Which schedule a plan takes for which sizes, and what it predicts."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import (
    ANY_SIZE,
    LARGE,
    MIB,
    Edge,
    Net,
    Plan,
    Table,
    bad_edges,
    check_plan,
    chosen,
    class_for,
    direct_plan,
    even,
    make_table,
    play,
    ring_plan,
    rings,
    tables,
    two_sites,
)

from pccl import _testing

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


def test_changed_rates_are_predicted_for_the_regions_of_the_plan() -> None:
    plan, _, _ = chosen(two_sites())
    now_near = make_table(8, lambda a, b: (0, 1000, 3000), lambda _: (12_500, 12_500))
    assert 0 < _testing.predict(plan, now_near, LARGE) < math.inf
    # The lines are those between the plan's regions, whatever the delays are now: a used pair has
    # the capacity of all 16 to itself.
    now_alike = make_table(
        8, lambda a, b: (390 if a % 2 != b % 2 else 0, 1000, 390), lambda _: (12_500, 12_500)
    )
    assert _testing.predict(plan, now_alike, LARGE) < 1.2 * LARGE / (16 * 390_000)


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
