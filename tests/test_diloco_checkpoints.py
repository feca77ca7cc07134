"""Checkpoints of DiLoCo: a run resumes from one, and refuses one of another kind."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from diloco_run import (
    MODES,
    MORE,
    Peers,
    equal,
    go,
    how,
    made,
    make,
    reference,
    shown,
    tell,
)
from programs import diloco_member as member
from programs.diloco_member import Model
from workers import Run, running

import pccl
from pccl import diloco


@pytest.mark.parametrize("mode", MORE)
def test_a_checkpoint_of_one_member_resumes_the_run_on_all(mode: str) -> None:
    options = how(mode) | {"sync_every": 4}
    inner = mode == "sync"
    with running() as run:
        peers = Peers(run.peers(2, member.serve))
        make(peers, seed=0, **options)
        made(peers)
        go(peers, 3, inner=inner)
        tell(peers[:1], member.save)
        saved = peers[0].expect("saved")["state"]
        # The checkpoint has the reduction in flight, too.
        want: Model | None = None
        if mode in MODES:
            want = reference(mode, 4, [[0, 1]] * (3 + (mode == "async")))
    with running() as run:
        peers = Peers(run.peers(2, member.serve))
        make(peers, join=False, **options)
        tell(peers[1:], partial(member.load, saved))
        for peer in peers:
            tell([peer], member.join)
        rounds = [peer.expect("made")["round"] for peer in peers]
        joined = [peer.expect("joined") for peer in peers]
        assert rounds == [0, 0] and [one["round"] for one in joined] == [3, 3]
        assert joined[0]["outer"] == joined[1]["outer"] and joined[0]["inner"] == joined[1]["inner"]
        if want is not None:
            assert equal(shown(peers), want)
        go(peers, 2, inner=inner)


def test_a_checkpoint_is_loaded_before_joining(run: Run) -> None:
    peers = Peers([run.peer(member.serve)])
    make(peers, sync_every=4)
    made(peers)
    tell(peers, member.load_too_late)
    assert "join=False" in peers[0].expect("told")["text"]
    go(peers, 1)


@pytest.mark.parametrize(
    ("saved", "loads", "words"),
    [
        ({"sync_every": 50}, {"sync_every": 100}, "sync_every=50, not 100"),
        ({"outer_momentum": 0.0}, {}, "another outer optimizer, or of one with another momentum"),
        ({"mode": "streaming", "fragments": 2}, {"mode": "streaming", "fragments": 1}, "fragments"),
        (
            {"mode": "streaming", "fragments": [["['a']"], ["['b']"]]},
            {"mode": "streaming", "fragments": [["['b']"], ["['a']"]]},
            "other fragments",
        ),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused_before_anything_is_changed(
    saved: dict[str, Any], loads: dict[str, Any], words: str
) -> None:
    def made_with(options: dict[str, Any], value: float) -> tuple[Model, Any]:
        model = {name: np.full(4, value, np.float32) for name in "ab"}
        return model, diloco.DiLoCo(model, **{"sync_every": 8, **options}, join=False)

    model, target = made_with(loads, 1.0)
    with pytest.raises(pccl.InvalidArgument, match=words):
        target.load_state_dict(made_with(saved, 2.0)[1].state_dict())
    with pytest.raises(pccl.InvalidArgument, match="no DiLoCo's state"):
        target.load_state_dict({"parameters": {}})
    assert all(np.all(array == 1) for array in [*model.values(), *target.parameters.values()])
    target.load_state_dict(made_with(loads, 3.0)[1].state_dict())
    assert all(np.all(array == 3) for array in model.values())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"a": np.zeros(4), "b": np.zeros(4, np.float32)},
            r"float32\[4\] there, float64\[4\] here",
        ),
        (
            {"a": np.zeros(5, np.float32), "b": np.zeros(4, np.float32)},
            r"\[4\] there, float32\[5\]",
        ),
        ({"a": np.zeros(4, np.float32)}, r"\['b'\] is float32\[4\] there, none here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(model: dict[str, Any], words: str) -> None:
    saved = diloco.DiLoCo(
        {name: np.zeros(4, np.float32) for name in "ab"}, sync_every=8, join=False
    )
    with pytest.raises(pccl.InvalidArgument, match=words):
        diloco.DiLoCo(model, sync_every=8, join=False).load_state_dict(saved.state_dict())
