"""Groups too large for a link between every two members reduce by regions what is not large."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import (
    ANY_SIZE,
    LARGE,
    MIB,
    Edge,
    check_plan,
    chosen,
    class_for,
    even,
    make_table,
    play,
)

from pccl import _testing

KIB = 1 << 10
# The classes of a plan for more hosts than `mesh`.
KINDS = ["regional", "regional", "ring"]


def links_of(edges: set[Edge]) -> Counter[int]:
    return Counter(itertools.chain.from_iterable(edges))


@pytest.mark.parametrize("world", [33, 40, 64])
def test_members_of_a_large_group_have_few_links_and_short_ways(world: int) -> None:
    made = _testing.plain_plan(world)
    assert made is not None
    plan, edges = made
    check_plan(plan, edges, world)
    assert [kind for _, kind, _ in plan[1]] == KINDS
    assert [size for size, _, _ in plan[1]] == [16 * KIB, 64 * KIB * world, ANY_SIZE]
    regions = Counter(plan[3])
    assert max(regions.values()) - min(regions.values()) <= 1
    # Its region, its counterparts in the others, and two neighbours in the ring.
    assert max(links_of(edges).values()) <= max(regions.values()) + 2 * len(regions) + 2
    for size in (1, 100, 70_000):
        play(plan, size)


def test_a_group_of_256_has_at_most_as_many_links_as_the_largest_mesh() -> None:
    made = _testing.plain_plan(256)
    assert made is not None
    plan, edges = made
    assert set(Counter(plan[3]).values()) == {16}
    assert max(links_of(edges).values()) <= 32
    # The owner of small arrays hears its region and one member of each other region.
    sources = _testing.plan_flows(plan, 1024, 0)[0][0][0]
    assert len(sources) == 15 + 15


def test_a_group_of_up_to_32_is_as_ever() -> None:
    made = _testing.plain_plan(32)
    assert made is not None
    assert [kind for _, kind, _ in made[0][1]] == ["direct", "direct", "ring"]
    assert made[0][3] == []


def test_hosts_count_once_however_many_ranks_they_have() -> None:
    hosts = [rank // 2 for rank in range(66)]
    made = _testing.plain_plan(66, hosts=hosts)
    assert made is not None
    plan, edges = made
    check_plan(plan, edges, 66)
    assert [kind for _, kind, _ in plan[1]] == ["regional", "regional", "host_ring"]
    assert all(plan[3][rank] == plan[3][rank + 1] for rank in range(0, 66, 2))
    play(plan, 70_000)
    made = _testing.plain_plan(64, hosts=hosts[:64])
    assert made is not None and made[0][3] == []


@settings(max_examples=150, deadline=None)
@given(st.integers(4, 12), st.integers(2, 5), st.booleans(), st.data())
def test_whatever_cannot_connect_the_plan_does_without(
    world: int, mesh: int, crowded: bool, data: st.DataObject
) -> None:
    hosts = [rank // 2 for rank in range(world)] if crowded else []
    seed = random.Random(data.draw(st.integers(0, 2**32)))
    pairs = list(itertools.combinations(range(world), 2))
    unusable = set(seed.sample(pairs, seed.choice([0, 1, 2, len(pairs) // 3])))
    made = _testing.plain_plan(world, unusable, hosts, mesh)
    if made is None:
        return
    plan, edges = made
    assert not edges & unusable
    check_plan(plan, edges, world)
    if not unusable and len(set(hosts) or range(world)) > mesh:
        assert [kind for _, kind, _ in plan[1]][:2] == KINDS[:2]
    for size in (1, 700, 70_000):
        play(plan, size)


def test_one_pair_that_cannot_connect_moves_the_borders() -> None:
    made = _testing.plain_plan(40)
    assert made is not None
    used = made[1] - {(rank, rank + 1) for rank in range(39)} - {(0, 39)}
    found = 0
    for pair in sorted(used):
        made = _testing.plain_plan(40, {pair})
        assert made is not None and pair not in made[1]
        # Else only a single owner is left, whose tree has fewer links.
        assert made[0][1][0][1] == "regional"
        found += len(made[0][1]) == 3
    assert found > len(used) * 0.9


def test_what_is_measured_of_a_large_group_may_say_otherwise() -> None:
    # Far and alike: few hops for what is small, rings for the rest.
    plan, why, edges = chosen(even(40))
    check_plan(plan, edges, 40)
    assert "by regions, rank 0 owns all" in why and "by regions, equal shares" in why
    assert class_for(plan, KIB)[1] == class_for(plan, MIB)[1] == "regional"
    assert sum(class_for(plan, KIB)[2]) == 1
    for size in (1, 700, 70_000):
        play(plan, size)


def test_regions_that_are_there_are_taken() -> None:
    near = [rank % 4 for rank in range(36)]
    table = make_table(
        36,
        lambda a, b: (0, 1000, 3000) if near[a] == near[b] else (0, 60_000, 300),
        lambda _: (12_500, 12_500),
    )
    plan, _, edges = chosen(table)
    check_plan(plan, edges, 36)
    assert plan[3] == near
    play(plan, 700)


def test_regions_of_a_few_hosts_among_many_are_no_mesh() -> None:
    # Two hosts are near each other, so that each other host would be a region of its own.
    table = make_table(
        40, lambda a, b: (0, 200 if {a, b} == {0, 1} else 50_000, 3000), lambda _: (12_500, 12_500)
    )
    plan, _, edges = chosen(table)
    check_plan(plan, edges, 40)
    assert max(Counter(plan[3]).values()) == 7
    assert max(links_of(edges).values()) <= 3 * 7


def test_what_is_known_of_some_links_is_enough_for_a_plan() -> None:
    # The links of the plan without measurements, as a group that large measures them.
    made = _testing.plain_plan(40)
    assert made is not None
    known = made[1]
    table = make_table(
        40,
        lambda a, b: (9_000, 60_000 + 10 * a) if (min(a, b), max(a, b)) in known else (0, 0),
        lambda _: (9_000, 9_000),
    )
    plan, _, edges = chosen(table)
    check_plan(plan, edges, 40)
    assert class_for(plan, KIB)[1] == class_for(plan, 300 * KIB)[1] == "regional"
    assert max(links_of(edges).values()) <= 3 * 7
    play(plan, 700)


def test_where_borders_cannot_move_a_single_owner_is_left() -> None:
    # A host that reaches few others: it cannot be an owner.
    bad = {(rank, 39) for rank in range(5, 36)}
    table = make_table(40, lambda a, b: (9_000, 60_000), lambda _: (9_000, 9_000), bad)
    for plan, edges in (_testing.plain_plan(40, bad), chosen(table)[::2]):
        assert not edges & bad
        check_plan(plan, edges, 40)
        kind, shares = class_for(plan, KIB)[1:]
        assert (kind, sum(shares)) == ("regional", 1)
        assert class_for(plan, LARGE)[1] == "ring"
        play(plan, 700)


def test_members_of_an_exchange_hold_the_elements_of_a_region_at_most() -> None:
    made = _testing.plain_plan(64)
    assert made is not None
    assert _testing.plan_contents(made[0], LARGE, 5)[1] == 8


def test_quantized_arrays_of_any_size_take_few_hops_and_have_all_owners() -> None:
    for plan in (chosen(even(40))[0], (_testing.plain_plan(40) or ((),))[0]):
        for size in (KIB, LARGE):
            kind, shares = _testing.coded_class(plan, size)
            assert kind == "regional"
            assert size == KIB or min(shares) > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 10), st.booleans(), st.data())
def test_every_measured_plan_can_be_run_over_its_links(
    world: int, crowded: bool, data: st.DataObject
) -> None:
    hosts = [rank // 2 for rank in range(world)] if crowded else []
    seed = random.Random(data.draw(st.integers(0, 2**32)))
    pairs = list(itertools.combinations(range(world), 2))
    bad = set(seed.sample(pairs, seed.choice([0, 0, 1, len(pairs) // 4])))
    table = make_table(
        world,
        lambda a, b: (seed.randint(1, 60_000), seed.randint(500, 90_000), seed.randint(1, 60_000)),
        lambda _: (seed.randint(1, 60_000), seed.randint(1, 60_000)),
        bad,
    )
    unusable = set(seed.sample(pairs, seed.choice([0, 1])))
    choice = _testing.choose_plan(table, unusable, hosts, 3)
    if choice is None:
        return
    plan, _, edges = choice
    assert not edges & unusable
    check_plan(plan, edges, world)
    if not bad | unusable and len(set(hosts) or range(world)) > 3:
        assert class_for(plan, 1)[1] == "regional"
    for size in (1, 700, 70_000):
        play(plan, size)
