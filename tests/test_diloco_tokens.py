"""`world_tokens`: what all members have learned from, whoever joins or leaves."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from diloco_run import Peers, asked, go, made, make, tell, went
from members import Members, each
from programs import diloco_member as member
from workers import Run

import pccl
from pccl import diloco
from pccl.diloco import Robust

FORMS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"mode": "async"},
    "streaming": {"mode": "streaming", "fragments": 2},
    "sparse": {"compression": "sparse"},
    "clip": {"robust": Robust("clip", weight=2.0)},
    "trimmed": {"robust": Robust("trimmed", weight=2.0)},
    "sparse clip": {"compression": "sparse", "robust": Robust("clip", weight=2.0)},
}


def make_one(comm: pccl.Communicator, **options: Any) -> diloco.DiLoCo:
    model = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    return diloco.DiLoCo(model, sync_every=2, comm=comm, **options)


@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_of_all_members_are_counted(members: Members, form: str) -> None:
    def train(rank: int, comm: pccl.Communicator) -> list[float]:
        made = make_one(comm, **FORMS[form])
        for _ in range(2):
            made.step()
        told = [made.world_tokens]  # steps are no tokens
        for tokens in ((10.0, 20.0, 300.0)[rank], (0.0, 0.0, 1.0)[rank]):
            for _ in range(2):
                made.step(tokens=tokens)
        made.finish()
        saved = made.state_dict()
        fresh = make_one(comm, join=False, **FORMS[form])
        fresh.load_state_dict(saved)
        del saved["world_tokens"]
        older = make_one(comm, join=False, **FORMS[form])
        older.load_state_dict(saved)
        return [*told, made.world_tokens, fresh.world_tokens, older.world_tokens]

    # 600 weighs as much as 2 times 40 in a bounded mean.
    total = 140.0 if "weight" in str(FORMS[form]) else 660.0
    for told in each(members(3), train):
        assert told == [0.0, total + 2.0, total + 2.0, 0.0]


@pytest.mark.parametrize("form", ["sync", "async", "streaming", "sparse", "clip"])
def test_a_checkpoint_has_the_tokens_in_flight(members: Members, form: str) -> None:
    def train(_: int, comm: pccl.Communicator) -> list[float]:
        options: dict[str, Any] = dict(FORMS[form])
        if form in ("async", "streaming"):
            options["overlap"] = 1
        made = make_one(comm, **options)
        for _ in range(4):
            made.step(tokens=5)
        fresh = make_one(comm, join=False, **options)
        fresh.load_state_dict(made.state_dict())
        return [made.world_tokens, fresh.world_tokens, made.log_dict()["diloco/world_tokens"]]

    for told in each(members(2), train):
        behind = form in ("async", "streaming")
        assert told == [20.0 if behind else 40.0, 40.0, 20.0 if behind else 40.0]


@pytest.mark.parametrize("mode", ["sync", "async", "streaming"])
def test_rounds_that_end_by_time_count_what_each_has_seen(members: Members, mode: str) -> None:
    def train(rank: int, comm: pccl.Communicator) -> tuple[float, float]:
        options: dict[str, Any] = {"sync_every": 50, "round_seconds": 0.05, "mode": mode}
        made = diloco.DiLoCo({"a": np.ones(3, np.float32)}, comm=comm, **options)
        seen = 0.0
        while made.outer_step < 3:
            made.step(tokens=rank + 1)
            seen += rank + 1
        made.finish()
        return seen, made.world_tokens

    (first, total), (second, other) = each(members(2), train)
    assert total == other == first + second


@pytest.mark.parametrize("mode", ["sync", "async", "streaming"])
def test_newcomers_learn_it_and_lost_members_stay_counted(run: Run, mode: str) -> None:
    inner = mode == "sync"
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, sync_every=4, mode=mode)
    made(peers)
    logs = [go(peers, 2, tokens=10, inner=inner)[0]]
    late = Peers([run.peer(member.serve)])
    make(late, 2, sync_every=4, mode=mode)
    asked(late[0])
    tell(peers, partial(member.go, 2, until=3, tokens=10))
    made(late)
    tell(late, partial(member.go, 2, until=3, tokens=10))
    logs += [went([*peers, *late], inner=inner)[0]]
    tell(peers[1:], partial(member.go, 3, tokens=10, die=2))
    left = [peers[0], *late]
    logs += [go(left, 3, tokens=10, inner=inner)[0]]
    peers[1].ends()
    tell(left, member.finish)
    assert all(peer.expect("same")["same"] for peer in left)
    tell(left, member.show_world_tokens)
    told = [peer.expect("tokens")["tokens"] for peer in left]
    assert told[0] == told[1] > 0
    if mode == "sync":
        # The newcomer counts from its second round on.
        contributions = sum(len(one["contributors"]) for log in logs for one in log) - 1
        assert told[0] == 4 * 10 * contributions


@pytest.mark.parametrize("form", ["sync", "async", "sparse", "trimmed"])
def test_members_of_which_only_some_count_tokens_are_warned_once(
    members: Members, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(rank: int, comm: pccl.Communicator) -> None:
        made = make_one(comm, **FORMS[form])
        for _ in range(4):
            made.step(tokens=None if rank == 0 else 100)
        made.finish()

    each(members(3), train)
    assert sum("pass tokens to step" in record.getMessage() for record in caplog.records) == 3


def test_tokens_in_some_steps_of_a_round_are_refused_before_anything_happens(
    members: Members,
) -> None:
    [comm] = members(1)
    made = make_one(comm)
    made.step(tokens=3)
    with pytest.raises(pccl.InvalidArgument, match="some steps of this round"):
        made.step()
    assert made.inner_step == 1
    assert made.step(tokens=4)
    made.step()  # a new round
    assert made.world_tokens == 7
