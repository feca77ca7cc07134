"""Tells members of a DiLoCo run what to do, and computes the right results in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from programs import diloco_member as member
from programs.diloco_member import SHAPES, Model, fresh, train
from workers import ESTABLISHED, Program, Worker, eventually, sockets, wait_until_asleep

Answer = dict[str, Any]

MODES = ["sync", "async"]
MORE = [*MODES, "overlapped", "streaming"]


def how(mode: str) -> dict[str, Any]:
    """A mode's arguments. In "overlapped" a mean is applied in the middle of a round."""
    return {"mode": "async", "overlap": 2} if mode == "overlapped" else {"mode": mode}


class Peers(list[Worker]):
    """Workers and their peer ids."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(workers)
        self.ids = [worker.expect("in", 60)["peer"] for worker in workers]


def tell(peers: Sequence[Worker], program: Program) -> None:
    """Has each of these call a function of its program's module."""
    for peer in peers:
        peer.call(program)


def make(
    peers: Sequence[Worker], first: int = 0, *, shell: ModuleType = member, **options: Any
) -> None:
    """Has each make its DiLoCo. Their numbers count from `first`."""
    for number, peer in enumerate(peers, first):
        peer.call(partial(shell.make, number, **options))


def made(peers: Sequence[Worker]) -> list[Answer]:
    return [peer.expect("made", 60) for peer in peers]


def went(peers: Sequence[Worker], *, inner: bool = True) -> list[list[Answer]]:
    """Each one's rounds; what members hold after the same round is the same."""
    logs: list[list[Answer]] = [peer.expect("went", 60)["log"] for peer in peers]
    held: dict[int, Answer] = {}
    for log in logs:
        for one in log:
            same = held.setdefault(one["round"], one)
            for key in ("outer", "inner") if inner else ("outer",):
                assert one[key] == same[key], (key, logs)
            # A newcomer knows nothing of what the others applied before its first.
            if one["contributors"] and same["contributors"]:
                assert one["contributors"] == same["contributors"], logs
    return logs


def go(
    peers: Sequence[Worker],
    count: int,
    *,
    inner: bool = True,
    shell: ModuleType = member,
    **options: Any,
) -> list[list[Answer]]:
    """Has these go through `count` rounds, and returns each one's."""
    tell(peers, partial(shell.go, count, **options))
    return went(peers, inner=inner)


def came_back(peers: Sequence[Worker]) -> list[Answer]:
    """The rounds of the first one; members hold the same after the same round.

    One that was put out, and has come back, begins its log anew.
    """
    logs = []
    for peer in peers:
        while (answer := peer.next(90))["event"] == "back":
            pass
        assert answer["event"] == "went", peer.stderr()
        logs.append(answer["log"])
    held: dict[int, str] = {}
    for one in (one for log in logs for one in log):
        assert held.setdefault(one["round"], one["outer"]) == one["outer"], logs
    return logs[0]


def comes_back_late(
    peers: Peers, missed: int = 1, *, shell: ModuleType = member, **options: Any
) -> list[int]:
    """The last one misses rounds, comes to the end of its own, and is back in a later one.

    Returns the numbers of members that contributed to each round since it was late.
    """
    late, others = peers[-1:], peers[:-1]
    log = go(others, missed, inner=False, shell=shell, **options)[0]
    assert log[-1]["size"] == len(others)
    tell(late, partial(shell.go, 1, until=len(peers), **options))
    late[0].expect("back", 90)
    asked(late[0])
    tell(others, partial(shell.go, 1, until=len(peers), **options))
    log += came_back(peers)
    return [len(one["contributors"]) for one in log]


def shown(peers: Sequence[Worker]) -> Model:
    tell(peers, member.show)
    answers = [peer.expect("shown") for peer in peers]
    assert all(answer == answers[0] for answer in answers)
    return {name: np.array(answers[0][name], np.float32) for name in SHAPES}


def asked(worker: Worker) -> None:
    """Returns when a newcomer waits to be let in: it has a link to a member and sleeps."""
    eventually(  # connections to the master, and to a member
        lambda: len(sockets(worker.pid, ESTABLISHED)) >= 2, seconds=60, said=worker.stderr
    )
    wait_until_asleep(worker)


def outer_step(theta: Model, velocity: Model, gradients: Model) -> None:
    lr, momentum = np.float32(0.7), np.float32(0.9)
    for name, gradient in gradients.items():
        velocity[name] = np.asarray(momentum * velocity[name] + gradient)
        theta[name] = np.asarray(theta[name] - lr * (gradient + momentum * velocity[name]))


def mean(gradients: Sequence[Model], weights: Sequence[float] | None = None) -> Model:
    scale = [np.float32(weight) for weight in weights or [1.0] * len(gradients)]
    return {
        name: np.asarray(
            sum(w * g[name] for w, g in zip(scale, gradients, strict=True)) / sum(scale)
        )
        for name in gradients[0]
    }


def trained(theta: Model, number: int, steps: int) -> Model:
    """A member's parameters after so many inner steps from `theta`."""
    model = {name: array.copy() for name, array in theta.items()}
    for _ in range(steps):
        train(model, number)
    return model


def less(theta: Model, model: Model) -> Model:
    return {name: np.asarray(theta[name] - model[name]) for name in theta}


def reference(
    mode: str,
    every: int,
    reductions: Sequence[Sequence[int]],
    weights: Sequence[float] | None = None,
) -> Model:
    """The outer parameters after these reductions: which members' pseudo-gradients counted in each.

    In "async" the last one is still in flight.
    """
    theta = fresh(0)
    velocity = {name: np.zeros_like(array) for name, array in theta.items()}
    flying: Model | None = None
    own: dict[int, Model] = {}  # where members are, if not at the outer parameters
    for members in reductions:
        begun = {number: own.get(number, theta) for number in members}
        ends = {number: trained(model, number, every) for number, model in begun.items()}
        gradients = {number: less(begun[number], ends[number]) for number in members}
        result = mean(list(gradients.values()), weights) if members else None
        if mode == "async":
            result, flying = flying, result
            own = ends
        if result is not None:
            outer_step(theta, velocity, result)
            if mode == "async":
                own = {number: less(theta, gradient) for number, gradient in gradients.items()}
    return theta


def equal(found: Model, want: Model) -> bool:
    return all(found[name].tobytes() == want[name].tobytes() for name in want)


def close(found: Model, want: Model) -> bool:
    return all(np.allclose(found[name], want[name], rtol=1e-5, atol=1e-6) for name in want)
