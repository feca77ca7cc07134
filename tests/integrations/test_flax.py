"""Flax NNX, optax and orbax: newcomers, and a restart from orbax's latest step."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from launches import RUNNER, example, losses, members, run

nnx = pytest.importorskip("flax.nnx")
pytest.importorskip("orbax.checkpoint")

STEPS, KILLED = 60, 35
ON_CPUS = {"JAX_PLATFORMS": "cpu"}


def reference(alone: set[int]) -> float:
    """The loss when one process takes the steps; those `alone` without the batch of rank 1."""
    import jax
    import jax.numpy as jnp
    import optax

    x, rngs = jax.random.normal(jax.random.key(1), (512, 8)), nnx.Rngs(1)
    layers = nnx.Linear(8, 16, rngs=rngs), nnx.tanh, nnx.Linear(16, 1, rngs=rngs)
    graph, params = nnx.split(nnx.Sequential(*layers))
    adam = optax.adam(1e-2)
    moments = adam.init(params)

    @jax.jit
    def loss_of(params, x):  # type: ignore[no-untyped-def]
        return jnp.mean((nnx.merge(graph, params)(x)[:, 0] - x.sum(1)) ** 2)

    for step in range(STEPS):
        first = 64 * step % 512
        batch = x[first : first + (32 if step in alone else 64)]
        changes, moments = adam.update(jax.grad(loss_of)(params, batch), moments)
        params = optax.apply_updates(params, changes)
    return float(loss_of(params, x))


def weights(output: str) -> set[str]:
    """The two members' weights, as a hash."""
    found = re.findall(r"^\[\d\] loss \S+ weights (\d+)$", output, re.MULTILINE)
    assert len(found) == 2, output
    return set(found)


def test_a_run_that_is_started_again_ends_as_one_that_was_never_killed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = members(example("flax_orbax"), "steps", folder=tmp_path / "whole", **ON_CPUS)
    assert losses(whole) == pytest.approx([reference(set())] * 2, rel=1e-3)
    # Without --elastic a kill ends the run.
    launcher = ["-m", "pccl", "run", "-n", "2", "--", sys.executable, str(RUNNER)]
    program = [*launcher, example("flax_orbax"), "steps"]
    run(program, tmp_path, fails=True, DIES_AT=str(KILLED), **ON_CPUS)
    assert sorted(map(int, os.listdir(tmp_path / "steps"))) == [10, 20, 30]
    (tmp_path / "died").unlink()
    again = run(program, tmp_path, **ON_CPUS)
    assert weights(again) == weights(whole) and len(weights(whole)) == 1
    assert losses(again) == losses(whole)


def test_a_killed_member_comes_back_with_the_state_of_the_run(tmp_path: Path) -> None:
    program = example("flax_orbax"), "steps"
    output = members(*program, folder=tmp_path, restarts=1, DIES_AT=str(KILLED), **ON_CPUS)
    assert "was ended by SIGKILL; starting it again" in output
    assert len(weights(output)) == 1
    assert losses(output) == pytest.approx([reference({KILLED - 1})] * 2, rel=1e-3)
