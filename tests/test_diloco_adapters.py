"""DiLoCo around a torch model, and around a JAX program."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from diloco_run import Peers, go, made, make, tell, went
from programs import diloco_jax, diloco_torch
from programs.diloco_member import fresh
from workers import Run

from pccl import diloco


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sync"},
        {"mode": "async"},
        {"mode": "async", "overlap": 2, "dtype": "bfloat16"},
        {"mode": "streaming", "fragments": 2, "overlap": 1},
        {"mode": "sync", "dtype": "bfloat16"},
        {"mode": "sync", "outer_optimizer": "adam"},
        {"mode": "async", "outer_optimizer": "adam"},
        {"mode": "streaming", "fragments": 2, "outer_optimizer": "sgd"},
    ],
)
def test_torch_models_are_trained_and_newcomers_get_the_outer_optimizers_state(
    run: Run, options: dict[str, Any]
) -> None:
    pytest.importorskip("torch")
    shell = diloco_torch
    peers = Peers(run.peers(2, shell.serve))
    make(peers, shell=shell, sync_every=5, **options)
    made(peers)
    inner = options["mode"] == "sync"
    first = go(peers, 3, inner=inner, shell=shell)
    late = Peers([run.peer(shell.serve)])
    make(late, 2, shell=shell, sync_every=5, **options)
    tell([*peers, *late], partial(shell.go, 8, until=3))
    made(late)
    logs = went([*peers, *late], inner=inner)
    # How many rounds that are depends on when the newcomer is in, so there is no loss to come to.
    assert all(np.isfinite(entry["loss"]) for log in [*first, *logs] for entry in log)


def test_an_outer_sgd_of_torch_does_what_ours_does() -> None:
    torch = pytest.importorskip("torch")
    parameters = [np.array(array) for array in fresh(1).values()]
    tensors = [torch.from_numpy(array.copy()) for array in parameters]
    for nesterov in (True, False):
        ours = diloco.SGD(parameters, 0.7, 0.9, nesterov)
        theirs = torch.optim.SGD(tensors, 0.7, 0.9, nesterov=nesterov)
        for seed in range(5):
            gradients = list(fresh(seed).values())
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = torch.from_numpy(gradient.copy())
            ours.step(parameters, gradients)
            theirs.step()
        for array, tensor in zip(parameters, tensors, strict=True):
            assert np.allclose(array, tensor.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.env(JAX_PLATFORMS="cpu")
def test_jax_parameters_are_replaced_and_a_newcomer_gets_the_runs(run: Run) -> None:
    pytest.importorskip("jax")
    shell = diloco_jax
    variants: list[dict[str, Any]] = [
        {"dtype": "float32", "mode": "sync"},
        {"dtype": "bfloat16", "mode": "async", "overlap": 2},
    ]
    for options in variants:
        peers = Peers(run.peers(2, shell.serve))
        make(peers, shell=shell, sync_every=3, **options)
        made(peers)
        inner = options["mode"] == "sync"
        go(peers, 2, inner=inner, shell=shell)
        late = Peers([run.peer(shell.serve)])
        make(late, 2, shell=shell, sync_every=3, **options)
        tell([*peers, *late], partial(shell.go, 2, until=3))
        made(late)
        assert went([*peers, *late], inner=inner)[2][-1]["dtype"] == options["dtype"]
        for worker in [*peers, *late]:
            worker.destroy()
