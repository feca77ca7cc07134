"""DiLoCo with elastic data learns from each example once, whatever members do."""

from __future__ import annotations

import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diloco_run import Peers, tell
from members import Members, in_threads
from programs import diloco_data as data
from workers import FAST, Run, running

import pccl
from pccl.data import ElasticSampler


def test_a_newcomer_whose_sampler_does_not_fit_leaves_and_the_others_go_on(
    members: Members,
) -> None:
    def diloco(comm: pccl.Communicator, batch_size: int, **options: Any) -> pccl.diloco.DiLoCo:
        sampler = ElasticSampler(1000, batch_size=batch_size, comm=comm)
        parameters = {"w": np.zeros(4, np.float32)}
        return pccl.diloco.DiLoCo(parameters, sync_every=2, data=sampler, comm=comm, **options)

    (comm,) = members(1)
    first = diloco(comm, 4)
    other = pccl.Communicator(comm._address)
    other._join("init", min_peers=1, attempts=3, timeout=30, enter=False)
    refused = threading.Event()

    def train() -> None:
        while not refused.is_set():
            first.step()
        for _ in range(4):
            first.step()

    def come() -> None:
        with pytest.raises(pccl.InvalidArgument, match="batch_size"):
            diloco(other, 8)
        assert other._closed
        refused.set()

    assert in_threads([train, come]) == [None, None]
    assert pccl.world_size(comm) == 1


KEPT: list[dict[str, Any]] = [{}, {"mode": "async"}, {"mode": "async", "overlap": 3}]


@pytest.mark.parametrize(
    "mode",
    [
        *KEPT,
        {"mode": "streaming", "fragments": 1, "overlap": 1},
        {"background_join": True},
        {"mode": "async", "overlap": 3, "background_join": True},
    ],
)
def test_members_are_killed_and_come_and_each_example_is_learned_from_once(
    run: Run, mode: dict[str, Any]
) -> None:
    peers = [run.peer(partial(data.count, own, mode), PCCL_MIN_PEERS="3") for own in range(2)]
    peers.append(run.peer(partial(data.count, 2, mode, dies_at=7), PCCL_MIN_PEERS="3"))
    for peer in peers:
        peer.expect("in", 60)
    assert peers[2].ends() == -signal.SIGKILL
    late = run.peer(partial(data.count, 3, mode))
    late.expect("in", 60)
    ends = [peer.expect("done", 60) for peer in (*peers[:2], late)]
    assert [end["committed"] for end in ends] == [1500] * 3
    assert ends[0]["counts"] == ends[1]["counts"] == ends[2]["counts"]
    # In "streaming" a share of a member's own parameters counts once more, by its definition.
    assert mode.get("mode") == "streaming" or ends[0]["counts"] == [3] * 500


@pytest.mark.parametrize("mode", KEPT)
def test_a_run_that_resumes_from_a_checkpoint_learns_from_each_example_once(
    mode: dict[str, Any], tmp_path: Path
) -> None:
    for program in (data.count_and_save, data.resume_and_count):
        with running() as run:
            peer = run.peer(partial(program, mode, str(tmp_path / "checkpoint")))
            peer.expect("in", 60)
            counts = peer.expect("done", 60)["counts"]
    assert counts == [3] * 500


def test_a_loss_that_one_member_sees_early_divides_data_alike(run: Run) -> None:
    # Two reductions are under way, and the second one loses a member. One member waits for it
    # alone, for a checkpoint, before all apply the first one.
    peers = Peers(run.peers(3, data.serve))
    # The first fragment's left at 8, and is applied at 14; the second's leaves at 12.
    tell(peers, partial(data.go, 11))
    for peer in peers:
        peer.expect("went", 60)
    tell(peers, data.wait_for_the_first)
    for peer in peers:
        peer.expect("first", 60)
    tell(peers[:2], partial(data.go, 12))
    assert [peer.expect("went", 60)["flying"] for peer in peers[:2]] == [2, 2]
    peers[2].signal(signal.SIGKILL)
    tell(peers[:1], data.save)
    assert peers[0].expect("saved", 60)["members"] == 2
    for step in (15, 17):
        tell(peers[:2], partial(data.go, step))
        ends = [peer.expect("went", 60) for peer in peers[:2]]
        assert ends[0]["place"] == ends[1]["place"]
        assert not set(ends[0]["taken"]) & set(ends[1]["taken"])
    tell(peers[:2], partial(data.go, 20))
    tell(peers[:2], data.show_members)
    for peer in peers[:2]:
        peer.expect("went", 60)
        assert peer.expect("later", 60)["members"] == 2


@pytest.mark.env(**FAST)
def test_data_follows_a_member_that_comes_back_with_another_communicator(run: Run) -> None:
    peers = [run.peer(partial(data.count_with_own_communicators, own)) for own in range(3)]
    for peer in peers:
        peer.expect("in", 60)
    peers[0].expect("3 members", 60)
    peers[2].signal(signal.SIGSTOP)
    try:
        peers[0].expect("2 members", 60)
    finally:
        peers[2].signal(signal.SIGCONT)
    for peer in peers:
        peer.tell("go on")
    for peer in peers:
        assert peer.expect("done", 60)["counts"] == [3] * 500
    assert peers[2].expect("came back")["times"] == 2


def test_the_others_learn_from_the_examples_of_a_member_that_is_late(run: Run) -> None:
    peers = [
        run.peer(partial(data.count_or_be_late, own, 7 if own == 2 else -1), PCCL_MIN_PEERS="3")
        for own in range(3)
    ]
    for peer in peers:
        peer.expect("in", 60)
    times = [peer.expect("came back", 60)["times"] for peer in peers]
    assert times[2] >= 1  # others may be late, too, on a busy machine
    assert all(peer.expect("done", 60)["counts"] == [3] * 500 for peer in peers)


def test_after_the_end_data_is_for_whoever_is_there(run: Run) -> None:
    peers = [
        run.peer(partial(data.go_on_alone_after_the_end, own), PCCL_MIN_PEERS="2")
        for own in range(2)
    ]
    for peer in peers:
        peer.expect("in", 60)
        end = peer.expect("done", 60)
        assert (end["taken"], end["committed"], end["left"]) == (5, 65, 0)
