"""Members that share one data set."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np

import pccl
from pccl.data import ElasticSampler, micro_batches
from programs.peer import hear, say, start


def count_examples(takes: int, *, dies_at: int = -1, newcomer: bool = False) -> None:
    """Counts in the shared state how often each example was in a reduction's result.

    `takes`: batches per reduction. `dies_at`: killed when so many examples are committed. Members
    that are no newcomer wait, half-way, until five peers have been here.
    """
    start()
    sampler = ElasticSampler(1000, batch_size=6, seed=3, remainder="short")
    state: dict[str, Any] = {"seen": np.zeros(1000, np.int64), "sampler": sampler, "waited": False}
    known: set[str] = set()
    say(event="in")
    while True:
        state = pccl.sync(state)
        known.update(pccl.membership().peers)
        if sampler.epoch == 3:
            break
        if sampler.committed > 1500 and not state["waited"]:
            say(event="waiting")
            while not newcomer and len(known) < 5:
                state = pccl.sync(state)
                known.update(pccl.membership().peers)
            state["waited"] = True
        marks = np.zeros(1000, np.int64)
        for _ in range(takes):
            if sampler.epoch < 3:
                np.add.at(marks, sampler.take(), 1)
        if 0 <= dies_at <= sampler.committed:
            os.kill(os.getpid(), signal.SIGKILL)
        total, info = pccl.allreduce(marks, return_info=True)
        sampler.commit(info)
        state["seen"] += total
        say(event="step", members=info.world_size)
    seen = state["seen"].tolist()
    say(event="done", seen=seen, committed=sampler.committed, size=pccl.world_size())


def meet_another(batch_size: int) -> None:
    """Goes on until another member has come and gone, or says why the run refused this one."""
    start()
    sampler = ElasticSampler(100, batch_size=batch_size)
    state, met = {"sampler": sampler}, False
    say(event="in")
    try:
        while not met or pccl.world_size() == 2:
            state = pccl.sync(state)
            met = met or pccl.world_size() == 2
            sampler.take()
            _, info = pccl.allreduce(1, return_info=True)
            sampler.commit(info)
        say(event="went on")
    except pccl.InvalidArgument as error:
        say(event="refused", reason=error.reason)


def accumulate(global_batch: int) -> None:
    """Two steps, the second one without a member that the test has killed.

    The gradient of example i is i.
    """
    start()
    for event in ("step", "done"):
        pccl.admit()
        while event == "done" and pccl.world_size() == 3:
            pccl.admit()
        group = pccl.membership()
        count = micro_batches(global_batch)
        lower = (replace(group, rank=rank) for rank in range(group.rank))
        first = sum(micro_batches(global_batch, membership=other) for other in lower)
        gradient = np.arange(first, first + count, dtype=np.float64).mean()
        mean = pccl.allreduce(gradient, "avg", weight=count)
        say(event=event, rank=group.rank, count=count, mean=float(mean))
        if event == "step":
            hear()
