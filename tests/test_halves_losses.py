"""Collectives other than all-reduce, among members that are lost."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from programs import halves
from workers import Run

pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize(
    ("call", "victim", "outcome"),
    [
        ("broadcast", 2, {"event": "done", "values": [2.0], "shape": [200_000]}),
        ("broadcast", 1, {"event": "lost"}),
        ("allgather", 2, {"event": "done", "values": [1.0, 2.0], "shape": [2, 200_000]}),
        ("later", 0, {"event": "done", "values": [2.0, 3.0], "shape": [2, 200_000]}),
        ("into", 2, {"event": "lost"}),
        ("scatter", 0, {"event": "lost"}),
        ("scatter into the input", 2, {"event": "lost"}),
        ("exchange", 1, {"event": "lost"}),
        ("exchange in place", 2, {"event": "lost"}),
    ],
)
@pytest.mark.env(PCCL_MIN_PEERS="3")
def test_a_loss_is_survived_or_told(
    run: Run, call: str, victim: int, outcome: dict[str, Any]
) -> None:
    peers = [run.peer(halves.call_among_losses) for _ in range(3)]
    order = {}
    for peer in peers:
        order[peer.expect("in", 60)["rank"]] = peer
    rest = [order[rank] for rank in range(3) if rank != victim]
    for peer in rest:
        peer.tell([call, True])
    for peer in rest:
        peer.expect("calling")
    order[victim].signal(signal.SIGKILL)  # it has not called: the others wait for it
    for peer in rest:
        answer = peer.expect(outcome["event"], 60)
        assert {key: answer[key] for key in outcome} == outcome
    # And go on together.
    for peer in rest:
        peer.tell(["allgather", False])
    for peer in rest:
        assert peer.expect("done", 60)["shape"] == [2, 200_000]
    for peer in rest:
        peer.tell("stop")
        assert peer.ends() == 0


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        # The root is the second as of the calls, whom the survivors still know as that.
        ("broadcast", {"event": "done", "values": [2.0], "shape": [200_000]}),
        ("from the first", {"event": "lost"}),
        ("allgather", {"event": "done", "values": [2.0, 3.0], "shape": [2, 200_000]}),
    ],
)
@pytest.mark.env(PCCL_MIN_PEERS="3")
def test_a_loss_between_calls_does_not_change_who_is_meant(
    run: Run, call: str, outcome: dict[str, Any]
) -> None:
    peers = [run.peer(halves.call_among_losses) for _ in range(3)]
    order = {}
    for peer in peers:
        order[peer.expect("in", 60)["rank"]] = peer
    order[0].signal(signal.SIGKILL)
    order[0].ends()
    for rank in (1, 2):
        order[rank].tell([call, False])
    for rank in (1, 2):
        answer = order[rank].expect(outcome["event"], 60)
        assert {key: answer[key] for key in outcome} == outcome
    for rank in (1, 2):
        order[rank].tell(["allgather", False])
    for rank in (1, 2):
        assert order[rank].expect("done", 60)["shape"] == [2, 200_000]
