"""Elastic data gives each example once per epoch, whatever members come, go or are killed."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs import data
from workers import Run, running

import pccl
from pccl.data import ElasticSampler, permuted

# ---- the order -----------------------------------------------------------------------------------


@given(length=st.integers(1, 700), seed=st.integers(), epoch=st.integers(0, 2**70))
def test_an_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = permuted(np.arange(length), length, seed, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(length))


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert permuted(range(8), 1000, 0, 0).tolist() == [986, 29, 633, 202, 659, 3, 948, 981]
    places = [0, 1, 10**12]
    assert permuted(places, 2**50, 7, 1).tolist() == [
        316986111086355,
        788438167765973,
        672448468549769,
    ]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = [permuted(np.arange(500), 500, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for index, one in enumerate(orders):
        for other in orders[:index]:
            assert np.count_nonzero(one == other) < 10  # one in 500 by chance


@pytest.mark.parametrize("length", [5, 64, 100])
def test_every_example_comes_to_every_place_equally_often(length: int) -> None:
    epochs = 1500
    places = np.array([0, length // 2, length - 1])
    found = np.array([permuted(places, length, 1, epoch) for epoch in range(epochs)])
    for column in found.T:
        counts = np.bincount(column, minlength=length)
        chi = float(((counts - epochs / length) ** 2).sum() / (epochs / length))
        assert chi < length - 1 + 5 * (2 * (length - 1)) ** 0.5  # five standard deviations
    if length == 100:  # neither do neighbours follow each other
        steps = np.bincount((found[:, 1] - found[:, 0]) % length, minlength=length)[1:]
        assert steps.max() < 2 * epochs / length


def test_a_part_of_a_huge_epoch_takes_no_memory_of_its_length() -> None:
    sampler = ElasticSampler(10**15, batch_size=1000)
    assert len(set(sampler.take().tolist())) == 1000


# ---- a run in a model ----------------------------------------------------------------------------


def group_of(peers: list[str], peer: str) -> pccl.Membership:
    return pccl.Membership(1, peers.index(peer), len(peers), tuple(peers), 0)


class Model:
    """Members with a sampler each, as in a run, and the examples that reductions brought in."""

    def __init__(self, length: int, batch_size: int, members: int, remainder: Any) -> None:
        self.length = length
        self.options = {"batch_size": batch_size, "remainder": remainder}
        self.members: dict[str, ElasticSampler] = {}
        self.taken: list[dict[str, list[int]]] = [{}]  # by reduction, by member; the last is open
        self.seen: Counter[int] = Counter()
        self.names = 0
        for _ in range(members):
            self.join()

    def any_sampler(self) -> ElasticSampler:
        return next(iter(self.members.values()))

    def state(self) -> dict[str, Any]:
        states = [sampler.state_dict() for sampler in self.members.values()]
        assert all(state == states[0] for state in states)
        return states[0]

    def join(self) -> None:
        newcomer = ElasticSampler(self.length, **self.options)
        if self.members:
            newcomer.load_state_dict(self.state())
        self.members[f"peer {self.names}"] = newcomer
        self.names += 1

    def lose(self, which: int) -> None:
        if len(self.members) > 1:
            del self.members[sorted(self.members)[which % len(self.members)]]

    def take(self) -> None:
        peers = sorted(self.members)
        open_phase = self.taken[-1]
        for peer, sampler in self.members.items():
            full = self.options["batch_size"]
            batch = sampler.take(full, membership=group_of(peers, peer)).tolist()
            assert len(batch) == full or self.options["remainder"] == "short" and len(batch) < full
            open_phase.setdefault(peer, []).extend(batch)
        self.state()

    def seal(self) -> None:
        for sampler in self.members.values():
            sampler.seal()
        self.taken.append({})

    def commit(self, contributors: list[str]) -> None:
        """The oldest reduction succeeds, over these."""
        phase = self.taken.pop(0)
        if not self.taken:
            self.taken.append({})
        for peer, batch in phase.items():
            if peer in contributors:
                self.seen.update(batch)
        for sampler in self.members.values():
            sampler.commit(pccl.ReduceInfo(contributors=tuple(contributors)))
        assert self.any_sampler().committed == self.seen.total()
        self.state()

    def restart(self, checkpoint: tuple[dict[str, Any], Counter[int]]) -> None:
        """All are lost; others begin where a checkpoint was made."""
        self.members.clear()
        self.join()
        self.any_sampler().load_state_dict(checkpoint[0])
        self.join()
        self.seen = checkpoint[1].copy()
        self.taken = [{}]

    def finish(self) -> int:
        """The rest of the epoch, by one member alone; returns how many epochs these were."""
        for other in sorted(self.members)[1:]:
            del self.members[other]
        sampler = self.any_sampler()
        for _ in range(len(self.taken)):
            self.commit(list(self.members))
        sampler.rollback()
        self.options["batch_size"] = 1
        while sampler.state_dict()["returned"] != "[]" or sampler.remaining < self.length:
            self.take()
            self.commit(list(self.members))
        return sampler.epoch


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("round"), st.integers(1, 4)),
        st.tuples(
            st.sampled_from(["join", "lose", "lose late", "checkpoint", "restart"]),
            st.integers(0, 9),
        ),
    ),
    max_size=25,
)


def play(model: Model, events: list[tuple[str, int]], kind: str) -> None:
    """Goes through rounds of that kind.

    "settled": every round is reduced before the next one begins. "in flight": it is reduced behind
    the next one, and newcomers come at any time. "between": newcomers come only where nothing is
    in flight, as documented, and take part in the reduction that begins there.
    """
    checkpoint = model.state(), model.seen.copy()
    waiting = 0
    under_way: list[str] | None = None  # who contributes to the reduction in flight
    for event, number in events:
        if event == "join" and kind == "between":
            waiting += 1
        elif event == "join":
            model.join()
        elif event == "checkpoint":
            checkpoint = model.state(), model.seen.copy()
        elif event == "restart":
            model.restart(checkpoint)
            under_way, waiting = None, 0
        elif event == "lose":  # before the reduction in flight has succeeded
            model.lose(number)
            if under_way is not None:
                under_way = [peer for peer in under_way if peer in model.members]
        elif event == "lose late":  # after that: what it gave counts
            model.lose(number)
        else:
            for _ in range(number):
                model.take()
            if kind == "settled":
                model.commit(sorted(model.members))
                continue
            if under_way is not None and set(under_way) & set(model.members):
                model.commit(under_way)
            elif under_way is not None:  # nobody is left to whom it could bring anything
                assert kind == "in flight"
                model.taken.pop(0)
            for _ in range(waiting):
                model.join()
            waiting = 0
            model.seal()
            under_way = sorted(model.members)


# All that took examples for the reduction in flight are lost. A newcomer that is in it goes on.
@example(
    20,
    2,
    1,
    "carry",
    [("round", 1), ("join", 0), ("round", 1), ("lose", 0), ("round", 1)],
    "between",
)
@example(
    20,
    2,
    1,
    "carry",
    [("round", 1), ("join", 0), ("round", 1), ("lose late", 0), ("round", 1)],
    "between",
)
@settings(max_examples=200)
@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    members=st.integers(1, 4),
    remainder=st.sampled_from(["carry", "short"]),
    events=EVENTS,
    kind=st.sampled_from(["settled", "in flight", "between"]),
)
def test_each_example_is_seen_once_per_epoch_whatever_happens(
    length: int,
    batch_size: int,
    members: int,
    remainder: str,
    events: list[tuple[str, int]],
    kind: str,
) -> None:
    model = Model(length, batch_size, members, remainder)
    play(model, events, kind)
    epochs = model.finish()
    assert model.seen == Counter({index: epochs for index in range(length) if epochs})


@given(length=st.integers(1, 40), batch_size=st.integers(1, 7), members=st.integers(1, 5))
def test_short_steps_end_with_the_epoch_and_are_even(
    length: int, batch_size: int, members: int
) -> None:
    model = Model(length, batch_size, members, "short")
    while model.any_sampler().epoch == 0:
        before = dict(model.any_sampler().state_dict())
        model.take()
        sizes = [len(model.taken[-1][peer]) for peer in sorted(model.members)]
        assert sum(sizes) == min(length - before["position"], batch_size * members)
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        model.commit(sorted(model.members))
    assert model.seen == Counter(range(length))


def test_what_a_lost_member_took_comes_next_and_first() -> None:
    model = Model(100, 5, 3, "carry")
    model.take()
    lost = model.taken[-1]["peer 1"]
    del model.members["peer 1"]
    assert model.any_sampler().in_flight == 15
    model.commit(["peer 0", "peer 2"])
    assert model.any_sampler().remaining == 90
    model.take()
    assert model.taken[-1]["peer 0"] == lost


def test_a_newcomer_commits_what_it_sealed_though_all_that_took_are_gone() -> None:
    model = Model(100, 5, 2, "carry")
    model.take()
    first = model.taken[-1]["peer 0"] + model.taken[-1]["peer 1"]
    model.join()
    model.seal()
    model.members = {"peer 2": model.members["peer 2"]}
    model.take()
    own = model.taken[-1]["peer 2"]
    assert not set(own) & set(first)
    model.join()
    # The reduction had succeeded before they were lost. Examples taken since belong to another one,
    # which is still open.
    model.commit(["peer 0", "peer 1", "peer 2"])
    assert model.any_sampler().in_flight == 5
    del model.members["peer 2"]
    model.commit(["peer 3"])
    model.take()
    assert model.taken[-1]["peer 3"] == own


def test_the_last_epoch_is_gone_back_to_when_its_last_step_loses_a_member() -> None:
    model = Model(20, 10, 2, "short")
    model.take()
    assert model.any_sampler().epoch == 1
    model.lose(1)
    model.commit(["peer 0"])
    assert (model.any_sampler().epoch, model.any_sampler().remaining) == (0, 10)


# ---- one process ---------------------------------------------------------------------------------


def test_alone_it_needs_no_run() -> None:
    sampler = ElasticSampler(10, batch_size=4, shuffle=False, remainder="short")
    steps = []
    while sampler.epoch < 1:
        steps.append(sampler.take().tolist())
        sampler.commit()
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sampler.committed == 10


def test_pinned_members_are_those_that_a_reduction_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = group_of(["a", "b", "c"], "b")
    monkeypatch.setattr(pccl.api, "is_initialized", lambda: True)
    monkeypatch.setattr(pccl.api, "membership", lambda _: group)
    sampler = ElasticSampler(100, batch_size=2, shuffle=False)

    def members(epoch: int, *contributors: str) -> int:
        sampler.pin(pccl.ReduceInfo(contributors=contributors, epoch=epoch))
        before = sampler.in_flight
        sampler.take()
        return (sampler.in_flight - before) // 2

    sampler.pin()
    group = replace(
        group, epoch=5, world_size=1, peers=("b",), rank=0
    )  # what nobody else knows yet
    assert members(1, "a", "b", "c") == 3
    assert members(2, "b", "c") == 2
    assert sampler.take().tolist() == [10, 11]  # the first one's part
    assert members(1, "a", "b", "c") == 2  # of an earlier membership
    with pytest.raises(pccl.InvalidArgument, match="another group"):
        members(3, "c")
    sampler.rollback()
    sampler.take()
    assert sampler.in_flight == 2


def test_rollback_takes_steps_back() -> None:
    sampler = ElasticSampler(10, batch_size=4)
    first = sampler.take().tolist()
    sampler.take()
    sampler.rollback()
    assert sampler.in_flight == 0 and sampler.take().tolist() == first


def test_what_was_in_flight_in_a_checkpoint_is_taken_again_also_alone() -> None:
    sampler = ElasticSampler(10, batch_size=4)
    sampler.take()
    sampler.commit()
    taken = [sampler.take().tolist()]
    sampler.seal()
    taken.append(sampler.take().tolist())
    other = ElasticSampler(10, batch_size=4)
    other.load_state_dict(sampler.state_dict())
    for batch in taken:
        assert other.take().tolist() == batch
        other.commit()
    assert other.committed == 12


def test_a_state_of_other_data_and_nonsense_are_refused() -> None:
    sampler = ElasticSampler(10)
    with pytest.raises(pccl.InvalidArgument, match="of 11 examples, not 10"):
        sampler.load_state_dict(ElasticSampler(11).state_dict())
    with pytest.raises(pccl.InvalidArgument, match="no sampler's state"):
        sampler.load_state_dict({**sampler.state_dict(), "returned": "x"})
    with pytest.raises(pccl.InvalidArgument, match="has batch_size=1; the state has 2"):
        sampler.load_state_dict(ElasticSampler(10, batch_size=2).state_dict())
    with pytest.raises(pccl.InvalidArgument, match="has remainder='carry'; the state has 'short'"):
        sampler.load_state_dict(ElasticSampler(10, remainder="short").state_dict())
    for wrong in ({"length": 0}, {"batch_size": 0}, {"remainder": "drop"}):
        with pytest.raises(pccl.InvalidArgument):
            ElasticSampler(**{"length": 10, **wrong})  # type: ignore[arg-type]
    with pytest.raises(pccl.InvalidArgument):
        sampler.take(0)
    with pytest.raises(pccl.InvalidUsage, match="not a member yet"):
        sampler.take(membership=pccl.Membership(0, -1, 0, (), 0))


def test_set_epoch_goes_on_in_an_epoch_and_begins_others() -> None:
    sampler = ElasticSampler(10, batch_size=4)
    sampler.take()
    sampler.commit()
    sampler.set_epoch(0)
    assert sampler.remaining == 6
    sampler.take()
    with pytest.raises(pccl.InvalidUsage, match="in flight"):
        sampler.set_epoch(3)
    sampler.commit()
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.remaining) == (3, 10)
    assert sampler.take().tolist() == permuted(range(4), 10, 0, 3).tolist()


def test_set_epoch_of_a_newcomer_leaves_the_runs_place(caplog: pytest.LogCaptureFixture) -> None:
    run = ElasticSampler(10, batch_size=4)
    run.set_epoch(3)
    run.take()
    run.commit()
    newcomer = ElasticSampler(10, batch_size=4)
    newcomer.set_epoch(0)
    assert not caplog.records
    newcomer.load_state_dict(run.state_dict())
    for epoch in range(2):  # its own loop, or that of its trainer
        newcomer.set_epoch(epoch)
    assert newcomer.state_dict() == run.state_dict()
    (record,) = caplog.records
    assert "set_epoch(0) has no effect: the sampler is in epoch 3" in record.getMessage()


@pytest.mark.parametrize("form", ["sampler", "batches"])
def test_a_torch_loader_goes_through_epochs_and_resumes_in_one(form: str) -> None:
    data = pytest.importorskip("torch.utils.data")

    def loader(sampler: ElasticSampler) -> Any:
        if form == "sampler":
            return data.DataLoader(range(22), batch_size=4, sampler=sampler)
        return data.DataLoader(range(22), batch_sampler=sampler.batches())

    sampler = ElasticSampler(22, batch_size=4)
    seen: list[int] = []
    for _ in range(2):
        for batch in loader(sampler):
            seen += batch.tolist()
            sampler.commit()
            if sampler.committed == 12:
                break
    other = ElasticSampler(22, batch_size=4)
    other.load_state_dict(sampler.state_dict())
    while other.epoch < 2:
        for batch in loader(other):
            seen += batch.tolist()
            other.commit()
    assert len(seen) == 44 and Counter(seen) == Counter(2 * list(range(22)))


def test_a_loader_is_not_given_short_steps_of_which_some_are_empty() -> None:
    sampler = ElasticSampler(22, batch_size=4, remainder="short")
    with pytest.raises(pccl.InvalidArgument, match='a loader needs remainder="carry"'):
        iter(sampler)
    with pytest.raises(pccl.InvalidArgument, match='a loader needs remainder="carry"'):
        sampler.batches()


# ---- a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 5])
def test_members_are_killed_and_come_and_each_example_is_seen_once_per_epoch(steps: int) -> None:
    with running() as run:
        peers = [
            run.peer(partial(data.count_examples, steps), PCCL_MIN_PEERS="4") for _ in range(3)
        ]
        dies = partial(data.count_examples, steps, dies_at=700)
        peers.append(run.peer(dies, PCCL_MIN_PEERS="4"))
        for peer in peers:
            peer.expect("in")
        assert peers[3].ends() == -signal.SIGKILL
        # One more is killed at whatever moment it is.
        peers[2].expect("step")
        peers[2].signal(signal.SIGKILL)
        while peers[0].next()["event"] != "waiting":
            pass
        newcomer = run.peer(partial(data.count_examples, steps, newcomer=True))
        finished = []
        for peer in (peers[0], peers[1], newcomer):
            answer = peer.next()
            while answer["event"] != "done":
                answer = peer.next()
            finished.append(answer)
    for answer in finished:
        assert answer["seen"] == [3] * 1000
        assert (answer["committed"], answer["size"]) == (3000, 3)


def test_a_newcomer_with_another_batch_size_is_told_and_the_run_goes_on(run: Run) -> None:
    member = run.peer(partial(data.meet_another, 6))
    member.expect("in")
    newcomer = run.peer(partial(data.meet_another, 8))
    newcomer.expect("in")
    reason = newcomer.expect("refused")["reason"]
    assert "this peer has batch_size=8; the state has 6" in reason
    member.expect("went on")
