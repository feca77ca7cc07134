"""Members that take different numbers of examples for a reduction see each example once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pccl
from pccl.data import ElasticSampler

IDS = "abcd"


def group(peers: str, own: str, epoch: int = 1) -> pccl.Membership:
    return pccl.Membership(epoch, peers.index(own), len(peers), tuple(peers), 0)


def members(peers: str, length: int, steps: int, **options: Any) -> dict[str, ElasticSampler]:
    made = {peer: ElasticSampler(length, **options) for peer in peers}
    for sampler in made.values():
        sampler.reserve(steps)
    return made


ROUND = st.fixed_dictionaries(
    {
        "steps": st.lists(st.integers(0, 5), min_size=4, max_size=4),
        "lost": st.sampled_from(["", "a", "b", "ac", "abd"]),
        "sealed": st.booleans(),
    }
)


@settings(max_examples=150)
@given(
    length=st.integers(1, 90),
    batch_size=st.integers(1, 7),
    rounds=st.lists(ROUND, min_size=1, max_size=8),
)
def test_each_example_is_seen_once_per_epoch(
    length: int, batch_size: int, rounds: list[dict[str, Any]]
) -> None:
    samplers = members(IDS, length, 5, batch_size=batch_size, seed=3)
    seen: Counter[int] = Counter()
    for one in rounds:
        taken: dict[str, list[int]] = {peer: [] for peer in IDS}
        for peer, count in zip(IDS, one["steps"], strict=True):
            # One that takes nothing has to know what is reserved nevertheless.
            for _ in range(max(count, 1)):
                taken[peer] += samplers[peer].take(membership=group(IDS, peer)).tolist()
            assert samplers[peer].taken == len(taken[peer])
        states = [sampler.state_dict() for sampler in samplers.values()]
        assert all(state == states[0] for state in states)
        learned = {peer: len(taken[peer]) for peer in IDS if peer not in one["lost"]}
        for peer in learned:
            seen.update(taken[peer])
        for sampler in samplers.values():
            if one["sealed"]:
                sampler.seal()
                assert sampler.taken == 0
            sampler.commit(learned)
            assert (sampler.taken, sampler.in_flight) == (0, 0)
            assert sampler.committed == sum(seen.values())
    # The rest of the epochs that were begun completes them.
    last = ElasticSampler(length, batch_size=1, seed=3)
    last.load_state_dict({**samplers["a"].state_dict(), "batch_size": 1})
    end = last.state_dict()["epoch"] + 1
    while last.epoch < end:
        seen.update(last.take().tolist())
        last.commit()
    assert seen == dict.fromkeys(range(length), end)


def test_members_that_go_equally_far_leave_no_gaps() -> None:
    samplers = members("ab", 10_000, 64, batch_size=2, shuffle=False)
    counts = {"a": 40, "b": 40}
    for peer, sampler in samplers.items():
        for _ in range(20):
            sampler.take(membership=group("ab", peer))
        sampler.commit(counts)
        assert sampler.state_dict()["returned"] == "[[0, 80, 256]]"


def test_examples_that_are_used_are_near_to_each_other() -> None:
    samplers = members("ab", 10_000, 160, batch_size=1, shuffle=False)
    took = [samplers["b"].take(membership=group("ab", "b")).tolist()[0] for _ in range(25)]
    assert took == [*range(10, 20), *range(30, 40), *range(50, 55)]


def test_a_newcomer_takes_over_what_is_reserved_and_waits_for_the_commit() -> None:
    (member,) = members("a", 100, 4, batch_size=2).values()
    member.take(membership=group("a", "a"))
    newcomer = ElasticSampler(100, batch_size=2)
    newcomer.reserve(4)
    newcomer.load_state_dict(member.state_dict())
    assert newcomer.taken == 0
    with pytest.raises(pccl.InvalidUsage, match=r"reserved before this peer came: commit\(info\)"):
        newcomer.take(membership=group("ab", "b", 2))
    for sampler in (member, newcomer):
        sampler.commit({"a": 2})
    assert newcomer.state_dict() == member.state_dict()
    both = [
        sampler.take(membership=group("ab", peer, 2)).tolist()
        for peer, sampler in (("a", member), ("b", newcomer))
    ]
    assert not set(both[0]) & set(both[1])


def test_what_lost_peers_reserved_is_given_back_though_one_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (lost,) = members("x", 1000, 4, batch_size=4).values()
    lost.take(membership=group("xy", "x"))
    resumed = members("ab", 1000, 4, batch_size=4)
    for peer, sampler in resumed.items():
        sampler.load_state_dict(lost.state_dict())
        monkeypatch.setattr(sampler, "_present", lambda peer=peer: group("ab", peer))
    resumed["a"].take()
    for sampler in resumed.values():
        sampler.hold()
    taken = {peer: sampler.taken for peer, sampler in resumed.items()}
    assert taken == {"a": 4, "b": 0}
    for sampler in resumed.values():
        sampler.commit(taken)
    assert resumed["a"].state_dict() == resumed["b"].state_dict()
    assert not set(resumed["a"].take().tolist()) & set(resumed["b"].take().tolist())


def test_a_rollback_gives_back_all_that_was_reserved() -> None:
    sampler = ElasticSampler(100, batch_size=2)
    sampler.reserve(4)
    first = sampler.take().tolist()
    sampler.take()
    assert (sampler.taken, sampler.in_flight) == (4, 8)
    sampler.rollback()
    assert (sampler.taken, sampler.in_flight) == (0, 0)
    assert sampler.take().tolist() == first


def test_what_makes_no_sense_is_refused() -> None:
    sampler = ElasticSampler(100, batch_size=2)
    with pytest.raises(pccl.InvalidArgument, match="must not be negative"):
        sampler.reserve(-1)
    with pytest.raises(pccl.InvalidArgument, match='needs remainder="carry"'):
        ElasticSampler(100, remainder="short").reserve(3)
    sampler.take()
    with pytest.raises(pccl.InvalidUsage, match="in flight"):
        sampler.reserve(3)
    sampler.commit()
    sampler.reserve(3)
    for _ in range(3):
        sampler.take()
    with pytest.raises(pccl.InvalidUsage, match="6 examples are reserved for a member .* 8 are"):
        sampler.take()
    with pytest.raises(pccl.InvalidUsage, match="how many each contributor took"):
        sampler.commit()
    sampler.commit({"": 6})
    assert sampler.committed == 8
    sampler.reserve(0)
    sampler.take()
    sampler.commit()
    assert sampler.committed == 10
