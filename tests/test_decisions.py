"""The master's decisions as pure functions: odd members, evictions, stuck calls, usable links."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pccl import _testing

MOVING, SUSPICIOUS, STUCK = range(3)

claims = st.lists(st.integers(1, 3), min_size=1, max_size=8).map(
    lambda hashes: list(enumerate(hashes))
)


# Mismatch.


@given(claims, st.integers(0, 4), st.booleans())
def test_the_odd_one_out_never_holds_the_most_claimed_signature(
    claims: list[tuple[int, int]], missing: int, waited: bool
) -> None:
    members = len(claims) + missing
    culprit = _testing.judge_mismatch(claims, members, waited)
    votes = Counter(hash_ for _, hash_ in claims)
    if len(votes) == 1:
        assert culprit is None
        return
    if culprit is None:
        assert missing
        assert not waited
        assert max(votes.values()) * 2 <= members
        return
    theirs = dict(claims)[culprit]
    assert votes[theirs] <= max(votes.values())
    assert votes[theirs] * 2 <= members or waited


def test_of_two_that_disagree_the_newer_one_is_odd() -> None:
    assert _testing.judge_mismatch([(0, 1), (1, 2)], 2, False) == 1


def test_a_majority_decides_before_all_have_entered() -> None:
    assert _testing.judge_mismatch([(0, 2), (1, 1), (2, 1), (3, 1)], 5, False) == 0
    assert _testing.judge_mismatch([(0, 2), (1, 1)], 5, False) is None
    assert _testing.judge_mismatch([(0, 2), (1, 1)], 5, True) == 1


# Links.


pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda p: p[0] != p[1]))


@given(pairs)
def test_the_peer_in_most_bad_links_goes(reports: list[tuple[int, int]]) -> None:
    members = list(range(7))
    victim = _testing.judge_links(members, reports)
    count = Counter(peer for pair in {tuple(sorted(p)) for p in reports} for peer in pair)
    if not count:
        assert victim is None
        return
    worst = max(count.values())
    assert victim == max(peer for peer, number in count.items() if number == worst)


def test_a_pair_reported_from_both_ends_counts_once() -> None:
    assert _testing.judge_links([0, 1, 2], [(0, 1), (1, 0), (0, 2)]) == 0


# Stuck.


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        ((True, [2], False, False, False), STUCK),
        ((True, [2], True, False, False), SUSPICIOUS),  # it has several threads
        ((True, [2], True, True, False), MOVING),  # one of them is outside
        ((True, [2], False, False, True), MOVING),  # bytes move
        ((True, [], False, False, False), MOVING),  # it waits in nothing
        ((False, [2], False, False, False), MOVING),  # it has news that we have not heard
        ((True, [3], False, False, False), MOVING),  # all have entered that call
        ((True, [2, 3], False, False, False), MOVING),
    ],
)
def test_a_group_is_stuck_only_when_nobody_can_move(
    second: tuple[bool, list[int], bool, bool, bool], verdict: int
) -> None:
    first = (True, [1], False, False, False)
    assert _testing.judge_stuck([first, second], {3}) == verdict
    assert _testing.judge_stuck([second, first], {3}) == verdict


def test_nobody_is_not_stuck() -> None:
    assert _testing.judge_stuck([], set()) == MOVING


# Plans.

Plan = tuple[list[int], list[str], set[tuple[int, int]]]


def plan_around(
    data: st.DataObject, world: int, hosts: list[int] | None = None
) -> tuple[Plan | None, set[tuple[int, int]]]:
    """A plan that has every rank and uses none of some unusable links; and these."""
    every = [(a, b) for b in range(world) for a in range(b)]
    unusable = set(data.draw(st.lists(st.sampled_from(every), max_size=6))) if every else set()
    plan = _testing.make_plan(world, unusable, hosts or [])
    if plan is None:
        assert unusable
    else:
        order, _, edges = plan
        assert sorted(order) == list(range(world))
        assert not edges & unusable
    return plan, unusable


@given(st.integers(1, 9), st.data())
def test_a_plan_uses_no_unusable_link(world: int, data: st.DataObject) -> None:
    plan, unusable = plan_around(data, world)
    reach_all = set(range(world)) - {rank for pair in unusable for rank in pair}
    assert plan is not None or not reach_all
    assert plan is None or ("direct" in plan[1]) == bool(reach_all)


@given(st.integers(5, 9), st.data())
def test_one_bad_link_of_many_is_always_planned_around(world: int, data: st.DataObject) -> None:
    a, b = data.draw(st.lists(st.integers(0, world - 1), min_size=2, max_size=2, unique=True))
    assume(a < b)
    assert _testing.make_plan(world, {(a, b)}) is not None


def test_who_reaches_all_owns_everything_where_there_is_no_ring() -> None:
    plan = _testing.make_plan(4, {(0, 1), (0, 2), (1, 2)})
    assert plan is not None
    assert plan[1] == ["direct", "direct"]
    assert plan[2] == {(0, 3), (1, 3), (2, 3)}


def test_two_that_do_not_reach_each_other_are_no_neighbours_and_own_nothing_directly() -> None:
    plan = _testing.make_plan(4, {(0, 1)})
    assert plan is not None
    order, kinds, edges = plan
    assert order in ([0, 2, 1, 3], [0, 3, 1, 2])
    assert kinds == ["direct", "direct", "ring"]
    assert (0, 1) not in edges


def test_a_peer_without_usable_links_has_no_ring() -> None:
    assert _testing.make_plan(4, {(0, 3), (1, 3), (2, 3)}) is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.data())
def test_a_plan_for_several_hosts_uses_the_links_of_its_schedules(
    hosts: list[int], data: st.DataObject
) -> None:
    world = len(hosts)
    plan, unusable = plan_around(data, world, hosts)
    if plan is None:
        return
    order, kinds, edges = plan
    crowded = 1 < len(set(hosts)) < world
    if not unusable:
        assert kinds == (
            ["host_direct", "host_direct", "host_ring"] if crowded else ["direct", "direct", "ring"]
        )
        # Ranks of a host side by side.
        changes = sum(hosts[a] != hosts[b] for a, b in zip(order, order[1:], strict=False))
        assert changes == len(set(hosts)) - 1
    if "host_ring" in kinds:
        used = set()
        for rank in range(world):
            for around in (False, True):
                flows, _ = _testing.by_hosts(hosts, around, rank)
                for flow in flows:
                    peers = {source for source, _ in flow["sources"]} | set(flow["final_to"])
                    used |= {(min(rank, peer), max(rank, peer)) for peer in peers}
        assert used <= edges


def test_a_bad_link_between_hosts_leaves_a_plan() -> None:
    plan = _testing.make_plan(4, {(0, 2)}, [0, 0, 1, 1])
    assert plan is not None
    assert plan[1][-1] == "ring"
    assert (0, 2) not in plan[2]


def pairs(world: int) -> set[tuple[int, int]]:
    return set(itertools.combinations(range(world), 2))


@given(st.integers(2, 7), st.integers(0, 2**32))
def test_with_its_detours_there_is_a_plan_of_as_few_as_can_be(world: int, seed: int) -> None:
    rng = random.Random(seed)
    unusable = {pair for pair in pairs(world) if rng.random() < 0.7}
    never = {pair for pair in unusable if rng.random() < 0.2}
    assume(_testing.make_plan(world, unusable) is None)
    taken = _testing.detours(world, unusable, never, 64)
    assert taken <= unusable - never
    possible = _testing.make_plan(world, never) is not None
    assert bool(taken) == possible
    if possible:
        plan = _testing.make_plan(world, unusable - taken)
        assert plan is not None and plan[2] & unusable <= taken
    # The cheapest ring of all, by trying them.
    rings = []
    for order in itertools.permutations(range(1, world)):
        ring = (0, *order)
        edges = {tuple(sorted((ring[i], ring[i - 1]))) for i in range(world)}
        if not edges & never:
            rings.append(len(edges & unusable))
    if rings:
        ring_of = _testing.make_plan(world, unusable - taken)
        assert ring_of is not None
        order = ring_of[0]
        used = {tuple(sorted((order[i], order[i - 1]))) for i in range(world)}
        assert len(used & unusable) == min(rings)


@given(st.integers(2, 9), st.integers(0, 12), st.integers(0, 2**32))
def test_whether_there_is_a_plan_is_known_without_looking_for_it(
    world: int, most: int, seed: int
) -> None:
    rng = random.Random(seed)
    unusable = {pair for pair in pairs(world) if rng.random() < rng.choice((0.3, 0.7, 1))}
    never = {pair for pair in unusable if rng.random() < 0.3}
    there_is = _testing.make_plan(world, unusable) is not None
    there_is = there_is or bool(_testing.detours(world, unusable, never, most))
    assert _testing.plannable(world, unusable, never, most) == there_is


def test_two_sites_that_cannot_connect_are_joined_where_a_ring_crosses() -> None:
    # Ranks 0, 2 and 4 are at one, 1, 3 and 5 at the other.
    unusable = {(a, b) for a, b in pairs(6) if a % 2 != b % 2}
    assert len(_testing.detours(6, unusable, set(), 64)) == 2
    # Where ranks of a site share memory each carries its part.
    hosts = [0, 1, 0, 1, 0, 1]
    taken = _testing.detours(6, unusable, set(), 64, hosts)
    plan = _testing.make_plan(6, unusable - taken, hosts)
    assert len(taken) == 3 and plan is not None and "host_ring" in plan[1]


def test_more_detours_than_there_may_be_are_none() -> None:
    assert _testing.detours(12, pairs(12), set(), 66) == pairs(12)
    assert len(_testing.detours(12, pairs(12), set(), 65)) == 12  # a ring's
    assert _testing.detours(12, pairs(12), set(), 11)  # one owner's
    assert not _testing.detours(12, pairs(12), set(), 10)
