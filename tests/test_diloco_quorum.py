"""DiLoCo's rounds that do not wait for members that are late, and what those have learned."""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from diloco_run import (
    Peers,
    asked,
    came_back,
    close,
    comes_back_late,
    go,
    less,
    made,
    make,
    mean,
    outer_step,
    shown,
    tell,
    trained,
)
from programs import diloco_member as member
from programs import diloco_watching as watching
from programs.diloco_member import Model, fresh
from workers import Run, eventually

import pccl
from pccl import diloco
from pccl.diloco import Sparse
from pccl.tools import status
from pccl.training.diloco.late import Late, combined
from pccl.training.diloco.reductions import Contribution
from pccl.training.diloco.sparse import Sparsifier

GRACE = 2.0
LAST_ROUND = 2 - 1 + 4  # after which the learning of the second round counts
QUORUM: dict[str, Any] = {
    "sync_every": 3,
    "quorum": 0.75,
    "grace_seconds": GRACE,
    "rejoin": "told",
}


class Reference:
    """The run in one process. `sparse`: how members send what they have learned."""

    def __init__(self, sparse: Sparse | None = None) -> None:
        self.theta = fresh(0)
        self._velocity = {name: np.zeros_like(array) for name, array in self.theta.items()}
        self._sparse = sparse

    def learned(self, number: int) -> Model:
        return less(self.theta, trained(self.theta, number, 3))

    def round(self, parts: list[Model]) -> None:
        outer_step(self.theta, self._velocity, mean([self._sent(part) for part in parts]))

    def _sent(self, part: Model) -> Model:
        if self._sparse is None:
            return part
        arrays = list(part.values())
        sparsifier = Sparsifier(self._sparse, arrays)
        code = sparsifier.encode(arrays)
        return dict(zip(part, sparsifier.mean(code[None], [1.0]).arrays, strict=True))


# Members send all elements, and leave nothing to later rounds.
DENSE: dict[str, Any] = {"density": 1.0, "decay": 0.0}


@pytest.mark.parametrize(("tokens", "sparse"), [(None, None), (8, None), (8, DENSE)])
def test_what_a_late_member_has_learned_counts_where_it_is_let_in(
    run: Run, tokens: int | None, sparse: dict[str, Any] | None
) -> None:
    peers = Peers(run.peers(4, member.serve))
    options: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}
    if sparse is not None:
        options["sparse"] = sparse
    make(peers, seed=0, **QUORUM, **options)
    made(peers)
    go(peers, 1, tokens=tokens)
    counts = comes_back_late(peers, tokens=tokens)
    assert counts == [*[3] * (len(counts) - 2), 4, 4]
    want = Reference(None if sparse is None else Sparse(**sparse))
    want.round([want.learned(number) for number in range(4)])
    late = want.learned(3)
    for count in counts[:-1]:
        parts = [want.learned(number) for number in range(3)]
        want.round(parts if count == 3 else [*parts, late])
    want.round([want.learned(number) for number in range(4)])
    assert close(shown(peers), want.theta)


@pytest.mark.parametrize(
    "options",
    [
        {"robust": "clip"},
        {"robust": "trimmed"},
        {"sparse": {"density": 0.25}},
        {"quantize": "int8"},
    ],
)
def test_what_a_late_member_has_learned_counts_whatever_members_send(
    run: Run, options: dict[str, Any]
) -> None:
    peers = Peers(run.peers(4, member.serve))
    make(peers, seed=0, **QUORUM, **options)
    made(peers)
    go(peers, 1, tokens=8)
    counts = comes_back_late(peers, tokens=8)
    assert counts == [*[3] * (len(counts) - 2), 4, 4]
    shown(peers)  # which compares what they hold
    # Where it is let in, what it has learned when it was late counts.
    tell(peers, member.show_world_tokens)
    learned = 3 * 8 * (4 + sum(counts))
    assert [peer.expect("tokens")["tokens"] for peer in peers] == [learned] * 4


def test_what_a_late_member_has_learned_counts_once_it_has_watched(run: Run) -> None:
    peers = Peers(run.peers(4, member.serve))
    make(peers, seed=0, verify_every=0, background_join=True, **QUORUM)
    made(peers)
    go(peers, 1)
    late, others = peers[-1:], peers[:-1]
    go(others, 1)
    tell(late, partial(watching.come_back_and_go, 3))
    late[0].expect("back", 90)
    asked(late[0])
    tell(others, partial(watching.go_until_newcomers_count, 3, pace=0.1))
    counts = late[0].expect("counts", 90)["round"]
    assert came_back(peers)[-1]["round"] == counts + 3
    want = Reference()
    want.round([want.learned(number) for number in range(4)])
    kept = want.learned(3)
    for done in range(1, counts + 3):
        parts = [want.learned(number) for number in range(3)]
        if done >= counts:
            parts.append(want.learned(3))
        if done == counts <= LAST_ROUND:
            parts.append(kept)
        want.round(parts)
    assert close(shown(peers), want.theta)


@pytest.mark.parametrize("mode", ["async", "streaming"])
def test_members_agree_in_every_mode(run: Run, mode: str) -> None:
    peers = Peers(run.peers(4, member.serve))
    make(peers, mode=mode, **QUORUM)
    made(peers)
    go(peers, 1, inner=False)
    # The end of the next round tells who was in one that nobody waits for.
    assert comes_back_late(peers, missed=2)[-1] == 4
    shown(peers)


def test_a_member_that_is_late_again_while_it_comes_back_goes_on_trying(run: Run) -> None:
    peers = Peers(run.peers(4, member.serve))
    make(peers, **QUORUM)
    made(peers)
    go(peers, 1)
    late, others = peers[-1:], peers[:-1]
    go(others, 1)
    tell(late, partial(member.go, 1, until=4))
    late[0].expect("back", 90)
    asked(late[0])
    late[0].signal(signal.SIGSTOP)
    try:
        go(others, 3)  # they let it in, or it is not ready; then they go on without it
    finally:
        late[0].signal(signal.SIGCONT)
    tell(others, partial(member.go, 1, until=4))
    assert len(came_back(peers)[-1]["contributors"]) == 4


def test_members_that_begin_wait_for_one_that_begins_late(run: Run) -> None:
    peers = Peers(run.peers(4, member.serve))
    make(peers[:3], seed=0, **QUORUM)

    def waited() -> float:
        time.sleep(0.2)  # the master answers some questions a second
        (group,) = status.ask_any(run.address)[1]["groups"]
        return max((call["seconds"] for call in group["calls"]), default=0.0)

    eventually(lambda: waited() > GRACE + 1)
    make(peers[3:], 3, seed=0, **QUORUM)
    made(peers)
    assert go(peers, 1)[0][0]["size"] == 4


REFUSED: dict[str, dict[str, Any]] = {
    "above 0.5": {"quorum": 0.5},
    "at most 1": {"quorum": 1.5},
    "quorum is a number": {"quorum": "most"},
    "grace_seconds is from 0": {"grace_seconds": -1},
    "grace_seconds is a number": {"grace_seconds": True},
    "grace_seconds needs a quorum": {"quorum": None},
    "needs rejoin": {"rejoin": None},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_makes_no_sense_is_refused(words: str) -> None:
    options = {"sync_every": 3, "quorum": 0.75, "grace_seconds": 1, "rejoin": pccl.init}
    with pytest.raises(pccl.InvalidArgument, match=words):
        diloco.DiLoCo({"w": np.zeros(3, np.float32)}, join=False, **{**options, **REFUSED[words]})


def part(weight: float, *values: float, tokens: bool = False) -> Contribution:
    return Contribution(weight, [np.float32([value]) for value in values], tokens)


def test_parts_are_combined_by_their_weights() -> None:
    found = combined([part(1, 8, 2), part(3, 4, 6, tokens=True), part(0)])
    assert found is not None
    assert (found.weight, found.tokens) == (4, True)
    assert [array.tolist() for array in found.gradients] == [[5.0], [5.0]]
    assert combined([part(0), Contribution()]) is None
    assert combined([]) is None


@pytest.mark.parametrize(("steps", "counts"), [(29, False), (30, True), (42, True), (43, False)])
def test_what_was_learned_long_ago_does_not_count(steps: int, counts: bool) -> None:
    assert Late(30, part(1, 1)).counts(steps, sync_every=3) == counts
