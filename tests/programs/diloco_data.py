"""Members of a DiLoCo run that take examples from one data set.

The parameters count how often each example was seen. A mean over n members times n is what they
have counted together. n shows in the places where each member adds a one of its own.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

import pccl
from pccl.data import ElasticSampler, permuted
from pccl.diloco import DiLoCo
from pccl.training.diloco import round_clock
from programs.diloco_member import Clock
from programs.peer import hear, peer_id, say, start
from programs.shell import obey

Array = npt.NDArray[Any]
# Two fragments. In the second one nothing is learned.
TURNS: dict[str, Any] = {
    "mode": "streaming",
    "fragments": [["['counts']", "['places']"], ["['other']"]],
    "overlap": 0,
    "mixing": 0.0,
}


class Add:
    """An outer optimizer that adds what all members counted."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array]) -> None:
        if len(parameters) == 1:
            return
        counts, _ = parameters
        n = round(1 / float(np.abs(gradients[1]).max()))
        counts -= np.rint(gradients[0] * n)


class Counter:
    """A member that has the number `own`, and a DiLoCo with these options."""

    def __init__(self, own: int, **options: Any) -> None:
        self.own = own
        self.steps = 0
        self.model = {"counts": np.zeros(500, np.float32), "places": np.zeros(8, np.float32)}
        self.sampler = ElasticSampler(500, batch_size=5, seed=1, remainder="short")
        self.diloco = DiLoCo(self.model, sync_every=3, data=self.sampler, **options)

    def count(
        self,
        *,
        dies_at: int = -1,
        stalls_at: int = -1,
        is_complete: Callable[[], bool],
        stop_at: int | None = None,
    ) -> None:
        """Goes through three epochs.

        It does not go far until all members are there (`is_complete`). `dies_at`: killed in that
        inner step. `stalls_at`: takes four seconds for that one. `stop_at`: stops after that outer
        step.
        """
        met = False
        while self.sampler.epoch < 3 or self.sampler.in_flight:
            met = met or (self.sampler.committed > 300 and is_complete())
            if self.sampler.epoch < 3 and (met or self.sampler.committed <= 300):
                np.add.at(self.model["counts"], self.sampler.take(), 1)
            self.model["places"][self.own] += 1 / 3
            self.steps += 1
            if self.steps == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.steps == stalls_at:
                time.sleep(4)
            if self.diloco.step() and self.diloco.outer_step == stop_at:
                break

    def end(self) -> None:
        """Applies what is in flight, and says what was counted."""
        self.diloco.finish()
        counts = self.diloco.parameters["['counts']"].tolist()
        say(event="done", counts=counts, steps=self.steps, committed=self.sampler.committed)


def count(own: int, mode: dict[str, Any], dies_at: int = -1) -> None:
    """Counts with two others."""
    start()
    counter = Counter(own, outer_optimizer=Add, **mode)
    say(event="in")
    diloco = counter.diloco
    counter.count(
        dies_at=dies_at, is_complete=lambda: pccl.world_size() - len(diloco.observers) == 3
    )
    counter.end()


def count_or_be_late(own: int, stalls_at: int = -1) -> None:
    """Counts with two others, which do not wait for long."""
    start()
    came = 0

    def come_back() -> pccl.Communicator:
        nonlocal came
        came += 1
        return pccl.init()

    options: dict[str, Any] = {"quorum": 0.6, "grace_seconds": 1.0, "rejoin": come_back}
    counter = Counter(own, outer_optimizer=Add, **options)
    say(event="in")
    counter.count(stalls_at=stalls_at, is_complete=lambda: pccl.world_size() == 3)
    say(event="came back", times=came)
    counter.end()


def count_and_save(mode: dict[str, Any], path: str) -> None:
    """Counts alone to the fourth round, and writes a checkpoint there."""
    start()
    counter = Counter(0, outer_optimizer=Add, **mode)
    say(event="in")
    counter.count(is_complete=lambda: True, stop_at=4)
    saved = {"diloco": counter.diloco.state_dict(), "sampler": counter.sampler.state_dict()}
    Path(path).write_bytes(pickle.dumps(saved))
    counter.end()


def resume_and_count(mode: dict[str, Any], path: str) -> None:
    """Counts alone from a checkpoint to the end."""
    start()
    counter = Counter(0, outer_optimizer=Add, join=False, **mode)
    saved = pickle.loads(Path(path).read_bytes())
    counter.diloco.load_state_dict(saved["diloco"])
    counter.sampler.load_state_dict(saved["sampler"])
    counter.diloco.join()
    say(event="in")
    counter.count(is_complete=lambda: True)
    counter.end()


def count_unevenly(
    own: int,
    mode: dict[str, Any],
    pace: float,
    *,
    members: int = 3,
    dies_at: int = -1,
    takes_from: int = 0,
    path: str = "",
    saves_at: int = -1,
) -> None:
    """Counts with others in rounds of six seconds, with an inner step in `pace` seconds.

    It says what it counted, and what it should have by the sampler's place. `dies_at`: killed in
    that inner step. `takes_from`: takes no examples in earlier rounds. `path`: of a checkpoint,
    which it writes after round `saves_at`, and where it ends, or from where it goes on.
    """
    start()
    clock = Clock(pace)
    round_clock.now = clock
    model = {"counts": np.zeros(500, np.float32), "places": np.zeros(8, np.float32)}
    if mode.get("mode") == "streaming":
        model["other"] = np.zeros(3, np.float32)
    sampler = ElasticSampler(500, batch_size=5, seed=1)
    options = {"sync_every": 6, "round_seconds": 6, "outer_optimizer": Add, **mode}
    diloco = DiLoCo(model, data=sampler, join=not path, **options)
    if path:
        if saves_at < 0:
            saved = pickle.loads(Path(path).read_bytes())
            diloco.load_state_dict(saved["diloco"])
            sampler.load_state_dict(saved["sampler"])
        diloco.join()
    say(event="in")
    steps = begun = received = 0
    met, ended = False, True
    # Only a round's end comes at the same place for all.
    while not (ended and met and sampler.committed >= 1500):
        counting = pccl.world_size() - len(diloco.observers)
        met = met or (sampler.committed > 300 and counting == members)
        if (met or sampler.committed <= 300) and diloco.outer_step >= takes_from:
            np.add.at(model["counts"], sampler.take(), 1)
        # One in a round: all members weigh the same, and `Add` can tell how many there were.
        model["places"][own] += steps == begun
        clock.step()
        steps += 1
        if steps == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        ended = diloco.step(tokens=steps == begun + 1)
        if ended:
            begun = steps
            received += 0 if diloco.sync_info is None else diloco.sync_info.rx_bytes
        if ended and diloco.outer_step == saves_at:
            kept = {"diloco": diloco.state_dict(), "sampler": sampler.state_dict()}
            Path(path).write_bytes(pickle.dumps(kept))
            return
    rounds = diloco.log_dict()["diloco/round_steps"]
    diloco.finish()
    counts = diloco.parameters["['counts']"].astype(int).tolist()
    say(
        event="done",
        counts=counts,
        due=_due(sampler),
        steps=rounds,
        committed=sampler.committed,
        received=received,
    )


def _due(sampler: ElasticSampler) -> list[int]:
    """How often each example was seen by all members together, if nothing is in flight."""
    state = sampler.state_dict()
    assert sampler.in_flight == 0
    due = np.full(sampler.length, state["epoch"])
    due[permuted(range(state["position"]), sampler.length, 1, state["epoch"])] += 1
    for epoch, first, last in json.loads(state["returned"]):
        due[permuted(range(first, last), sampler.length, 1, epoch)] -= 1
    counts: list[int] = due.tolist()
    return counts


def count_with_own_communicators(own: int) -> None:
    """Counts with two others, through a communicator that is not the process's.

    It goes on when it is told to. Member 0 says when there are three members, and then two. Each
    says at the end how many communicators it has had.
    """
    made: list[pccl.Communicator] = []
    told, pause = threading.Event(), threading.Event()

    def fresh() -> pccl.Communicator:
        comm = pccl.Communicator(os.environ["PCCL_MASTER"])
        comm.connect()
        made.append(comm)
        return comm

    def listen() -> None:
        hear()
        told.set()

    def look() -> None:
        for count in (3, 2):
            while pccl.world_size(made[-1]) != count:
                pause.wait(0.01)
            say(event=f"{count} members")

    fresh()
    threading.Thread(target=listen, daemon=True).start()
    counter = Counter(own, outer_optimizer=Add, comm=made[0], rejoin=fresh)  # the sampler follows
    say(event="in")
    if own == 0:
        threading.Thread(target=look, daemon=True).start()
    counter.count(is_complete=lambda: told.is_set() and pccl.world_size(made[-1]) == 3)
    counter.end()
    say(event="came back", times=len(made))


def go_on_alone_after_the_end(own: int) -> None:
    """Takes examples in two rounds with another member, leaves, and takes more alone."""
    start()
    counter = Counter(own)
    sampler = counter.sampler
    say(event="in")
    for _ in range(6):
        sampler.take()
        counter.diloco.step()
    counter.diloco.finish()
    pccl.shutdown()
    alone = sampler.take()
    sampler.commit()
    say(event="done", taken=len(alone), committed=sampler.committed, left=sampler.in_flight)


# A member that goes step by step, with two fragments whose reductions overlap.

sampler: ElasticSampler
diloco: DiLoCo


def serve() -> NoReturn:
    """Joins, and waits for calls of the functions below."""
    global sampler, diloco
    start()
    model = {name: np.zeros(4, np.float32) for name in "ab"}
    sampler = ElasticSampler(10_000, batch_size=5)
    diloco = DiLoCo(model, sync_every=8, mode="streaming", fragments=2, overlap=6, data=sampler)
    say(event="in", peer=peer_id())
    obey()


def go(until: int) -> None:
    """Takes inner steps up to that one."""
    while diloco.inner_step < until:
        taken = sampler.take()
        diloco.step()
    place, flying = sampler.state_dict(), len(diloco._flying)
    say(event="went", taken=taken.tolist(), place=place, flying=flying)


def wait_for_the_first() -> None:
    """Waits for the first fragment's reduction."""
    work = diloco._flying[0].work
    assert work is not None
    work.wait()
    say(event="first")


def save() -> None:
    """Makes a checkpoint, for which it waits for all reductions."""
    diloco.state_dict()
    say(event="saved", members=pccl.world_size())


def show_members() -> None:
    """Says among how many members the examples are divided now."""
    say(event="later", members=len(sampler._phases[-1][-1].peers))
