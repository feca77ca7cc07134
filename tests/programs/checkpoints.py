"""A run that resumes from checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors

import pccl
from pccl import checkpoint
from pccl.data import ElasticSampler
from programs.peer import hear, say, start


def save_without_end(folder: str) -> None:
    """Stops in the middle of a save, and says where that writes."""

    def stop(_: object, path: Path, __: object) -> None:
        say(event="saves", folder=path.parent.name)
        hear()

    vars(safetensors)["serialize_file"] = stop
    checkpoint.save(Path(folder) / "9.safetensors", {"w": np.ones(3)}, revision=9)


def train() -> None:
    """Resumes from the folder that it is told, and trains to the step that it is told then."""
    start()
    folder = hear()
    sampler = ElasticSampler(1000, batch_size=4, seed=5)
    state: dict[str, Any]
    state = {"w": np.zeros(3, np.int64), "step": 0, "sampler": sampler, "seen": ""}
    revision: int | None
    state, revision = checkpoint.resume(folder, state)
    say(event="ready", step=state["step"], revision=revision)
    steps = hear()
    while state["step"] < steps:
        state, info = pccl.sync(state, revision=revision, return_info=True)
        revision = None
        batch = state["sampler"].take()
        total, reduced = pccl.allreduce(batch.sum(), return_info=True)
        state["sampler"].commit(reduced)
        state["w"] += total
        state["step"] += 1
        state["seen"] = state["seen"] + f" {total}"
        if state["step"] % 2 == 1:
            path = Path(folder) / f"{info.revision + 1}.safetensors"
            checkpoint.save(path, state, revision=info.revision + 1, keep=2)
    say(
        event="trained",
        w=int(state["w"][0]),
        step=state["step"],
        seen=state["seen"],
        sampler=state["sampler"].state_dict(),
    )
