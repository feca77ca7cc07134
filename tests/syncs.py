"""Peers that sync a shared state as the tests tell them, and say what each sync did."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from programs import sync_explicit, sync_shell
from workers import Program, Run, Worker

MIB = 1 << 20

Answer = dict[str, Any]


class Peers(list[Worker]):
    """Peers in rank order, their ids, and their names by default."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        answers = [worker.expect("in", 60) for worker in workers]
        order = sorted(range(len(workers)), key=lambda index: answers[index]["rank"])
        super().__init__(workers[index] for index in order)
        self.ids: list[str] = [answers[index]["peer"] for index in order]
        self.names = [f"{socket.gethostname()}-{worker.pid}" for worker in self]


def members(run: Run, count: int) -> Peers:
    return Peers(run.peers(count, sync_shell.serve))


def newcomer(run: Run, count: int = 1) -> Peers:
    """Peers that wait to be let in."""
    return Peers([run.peer(sync_shell.serve) for _ in range(count)])


def members_1(run: Run, count: int) -> Peers:
    """The explicit API: all of them let each other in."""
    return Peers([run.peer(partial(sync_explicit.serve, count)) for _ in range(count)])


def newcomer_1(run: Run, others: Peers) -> Peers:
    """The explicit API: the others have let it in."""
    late = run.peer(partial(sync_explicit.serve, 1))
    tell(others, partial(sync_explicit.grow, len(others) + 1))
    return Peers([late])


# Descriptions of arrays and objects in a state, which sync_shell.build makes.


def noise(seed: int, count: int) -> dict[str, Any]:
    return {"made": ["noise", seed, count]}


def full(shape: int | list[int], value: float, dtype: str = "int64") -> dict[str, Any]:
    return {"made": ["full", shape, value, dtype]}


def shared(count: int, value: float) -> dict[str, Any]:
    return {"made": ["shared", count, value]}


def zeros(shape: int | list[int], dtype: str = "float64") -> dict[str, Any]:
    return full(shape, 0, dtype)


def ones(shape: int | list[int], dtype: str = "float64") -> dict[str, Any]:
    return full(shape, 1, dtype)


def arange(count: int) -> dict[str, Any]:
    return {"made": ["arange", count]}


def keeper(kept: Any) -> dict[str, Any]:
    """An object with that state dict."""
    return {"made": ["keeper", kept]}


def hold(state: Any) -> Program:
    """Takes a new state, and does not sync it yet."""
    return partial(sync_shell.hold, state)


def sync(*state: Any, **options: Any) -> Program:
    """Syncs a new state, or without one what the peer holds."""
    return partial(sync_shell.sync, *state, **options)


def add(*path: Any, amount: int = 1) -> Program:
    """Adds to an entry of the state, or to all elements of an array."""
    return partial(sync_shell.add, path, amount)


def flip(*path: Any) -> Program:
    """Flips a bit of an element of an array in the state."""
    return partial(sync_shell.flip, path)


def put(*path: Any, value: float) -> Program:
    """Sets an entry of the state, or an element of an array."""
    return partial(sync_shell.put, path, value)


def whether_equal(state: Any) -> Program:
    return partial(sync_shell.say_whether_equal, state)


# Calls of peers, and their answers.


def tell(peers: Sequence[Worker], *programs: Program) -> None:
    for peer in peers:
        for program in programs:
            peer.call(program)


def do(peers: Sequence[Worker], program: Program) -> list[Answer]:
    """Returns what each says of the same call."""
    tell(peers, program)
    return [peer.next() for peer in peers]


def agreed(
    peers: Sequence[Worker], *, timeout: float = 30.0, all_live: bool = True
) -> list[Answer]:
    """Returns what each says of its sync. All have the same state; what came has been sent."""
    answers = [peer.expect("synced", timeout) for peer in peers]
    for key in ("digest", "revision", "size", "epoch", "diverged", "peers"):
        assert all(answer.get(key) == answers[0].get(key) for answer in answers), (key, answers)
    if all_live:
        assert sum(answer["tx"] for answer in answers) == sum(moved(answers))
    return answers


def synced(peers: Sequence[Worker], *programs: Program) -> list[Answer]:
    tell(peers, *programs)
    return agreed(peers)


def moved(answers: Sequence[Answer]) -> list[int]:
    """Bytes that each received."""
    return [answer["rx"] for answer in answers]


def failed(answer: Answer, kind: str, result: str = "INVALID_USAGE") -> Answer:
    found = (answer["event"], answer.get("kind"), answer.get("result"))
    assert found == ("failed", kind, result), answer
    return answer


def interrupted(answer: Answer) -> None:
    assert (answer["event"], answer.get("kind")) == ("failed", "KeyboardInterrupt"), answer


def meanwhile(late: Worker, peers: Sequence[Worker], *, served: bool = False) -> Answer:
    """Returns what `late` says in the end. The peers go on syncing until then, in step.

    Args:
        late: A newcomer.
        peers: The members.
        served: It may receive something before it is put out.
    """
    for _ in range(2000):
        tell(peers, sync())
        assert moved(agreed(peers, all_live=not served)) == [0] * len(peers)
        try:
            return late.next(0.005)
        except AssertionError as error:
            if "said nothing" not in str(error):
                raise
    raise AssertionError("late said nothing")
