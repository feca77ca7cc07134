"""DiLoCo around a torch model, and around a JAX program."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from diloco_run import Peers, go, made, make, tell, went
from members import Members, each
from programs import diloco_jax, diloco_torch
from programs.diloco_member import fresh
from workers import Run

import pccl
from pccl import diloco


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sync"},
        {"mode": "async", "overlap": 2, "dtype": "bfloat16"},
        {"mode": "sync", "compression": "sparse", "dtype": "bfloat16"},
        {"mode": "async", "outer_optimizer": "adam"},
        {"mode": "streaming", "fragments": 2, "overlap": 1, "outer_optimizer": "sgd"},
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


def begin_transformers(
    monkeypatch: pytest.MonkeyPatch, model: Any, options: Any, steps: int
) -> Any:
    package = SimpleNamespace(TrainerCallback=object)
    monkeypatch.setitem(sys.modules, "transformers", package)  # it is not installed with the tests
    monkeypatch.delitem(sys.modules, "pccl.adapters.transformers", raising=False)
    callback = importlib.import_module("pccl.adapters.transformers").DiLoCoCallback(**options)
    args = SimpleNamespace(world_size=1, load_best_model_at_end=False)
    state = SimpleNamespace(max_steps=steps)
    callback.on_train_begin(args, state, None, model=model[0], optimizer=model[1])
    return callback


def begin_lightning(monkeypatch: pytest.MonkeyPatch, model: Any, options: Any, steps: int) -> Any:
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Callback=object))
    monkeypatch.delitem(sys.modules, "pccl.adapters.lightning", raising=False)
    callback = importlib.import_module("pccl.adapters.lightning").DiLoCoCallback(**options)
    optimizers = [model[1]]
    trainer = SimpleNamespace(world_size=1, max_steps=steps, optimizers=optimizers, global_step=0)
    callback.on_train_start(trainer, model[0])
    return callback


@pytest.mark.parametrize("begin", [begin_transformers, begin_lightning])
def test_trainers_that_would_end_in_the_middle_of_a_timed_round_are_refused(
    begin: Callable[..., Any], members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(2, 1)
    model = net, torch.optim.SGD(net.parameters(), 0.1)
    (comm,) = members(1)
    options = {"sync_every": 4, "round_seconds": 60.0, "comm": comm}
    with pytest.raises(pccl.InvalidArgument, match="max_steps, 10, must be a multiple .* 4"):
        begin(monkeypatch, model, options, 10)
    assert begin(monkeypatch, model, options, 8).diloco.inner_step == 0
    assert begin(monkeypatch, model, {"sync_every": 4, "comm": comm}, 10).diloco.inner_step == 0


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_outer_sgd_computes_alike_whatever_kind_of_numbers_it_gets(dtype: Any) -> None:
    ends = set()
    for lr, momentum in [(0.7, 0.9), (np.float64(0.7), np.float64(0.9))]:
        random = np.random.default_rng(0)
        parameters = [random.standard_normal(shape).astype(dtype) for shape in ((), (500,))]
        sgd = diloco.SGD(parameters, lr, momentum)
        for _ in range(5):
            sgd.step(
                parameters, [random.standard_normal(p.shape).astype(dtype) for p in parameters]
            )
        ends.add(b"".join(array.tobytes() for array in parameters))
    assert len(ends) == 1


@pytest.mark.env(JAX_PLATFORMS="cpu")
def test_jax_parameters_are_replaced_and_a_newcomer_gets_the_runs(run: Run) -> None:
    pytest.importorskip("jax")
    shell = diloco_jax
    variants: list[dict[str, Any]] = [
        {"dtype": "float32", "mode": "sync"},
        {"dtype": "bfloat16", "mode": "async", "overlap": 2, "compression": "sparse"},
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


def test_jax_parameters_of_float64_stay_so(members: Members) -> None:
    jax = pytest.importorskip("jax")
    from pccl.adapters.jax import diloco

    with jax.enable_x64(True):
        params = {"w": jax.numpy.arange(3, dtype="float64")}
    (comm,) = members(1)
    state = diloco(sync_every=2, comm=comm).init(params)
    assert state.params["w"].dtype == "float64"
    assert state.params["w"].tolist() == [0, 1, 2]


def test_jax_parameters_that_do_not_fit_are_refused_at_once(members: Members) -> None:
    jax = pytest.importorskip("jax")
    from pccl.adapters.jax import diloco

    jnp = jax.numpy
    (comm,) = members(1)
    outer = diloco(sync_every=2, comm=comm)
    state = outer.init({"w": jnp.ones(3)})
    for wrong in (np.ones(3, np.float32), jnp.ones(3, int), jnp.ones(4), 1.0):
        with pytest.raises(pccl.InvalidArgument, match=r"params\['w'\]"):
            outer.update({"w": wrong}, state)
    for step in range(2):
        params, state = outer.update({"w": jnp.full(3, 2.0 + step)}, state)
    assert state.core.outer_step == 1 and params["w"].shape == (3,)


def test_several_inner_optimizers_train_parts_of_a_model(members: Members) -> None:
    torch = pytest.importorskip("torch")
    from pccl.adapters.torch import DiLoCo

    def train(rank: int, comm: pccl.Communicator) -> tuple[list[bytes], bytes]:
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        with torch.no_grad():
            for number, parameter in enumerate(net.parameters()):
                parameter.fill_(0.1 * (number + 1) + rank)
        inner = [
            torch.optim.SGD([net[0].weight, net[1].weight], 0.01),
            torch.optim.AdamW([net[0].bias, net[1].bias], 0.01),
        ]
        wrapped = DiLoCo(net, inner, sync_every=2, exclude=["1.bias"], comm=comm)
        for step in range(4):
            net(torch.full((5, 4), 1.0 + rank + step)).pow(2).mean().backward()
            for optimizer in inner:
                optimizer.step()
                optimizer.zero_grad()
            wrapped.step()
        shared = [parameter.detach().numpy().tobytes() for parameter in net.parameters()]
        return shared[:3], shared[3]

    (ours, our_own), (theirs, their_own) = each(members(2), train)
    assert ours == theirs and our_own != their_own


@pytest.mark.parametrize(
    ("held", "exclude", "words"),
    [
        (["weight"], (), "no inner optimizer has bias: pass all optimizers in a list"),
        ([], (), "no inner optimizer has weight and 1 more"),
        (["weight", "bias"], ("scale",), "exclude names 'scale', which is no parameter"),
        (["weight", "bias", "other"], (), "parameters that are not the model's"),
    ],
)
def test_parameters_that_nobody_would_train_together_are_named(
    held: list[str], exclude: tuple[str, ...], words: str
) -> None:
    torch = pytest.importorskip("torch")
    from pccl.adapters.torch import DiLoCo

    net = torch.nn.Linear(2, 2)
    parts = {**dict(net.named_parameters()), "other": torch.nn.Parameter(torch.zeros(2))}
    inner = [torch.optim.SGD([parts[name]], 0.1) for name in held]
    with pytest.raises(pccl.InvalidArgument, match=words):
        DiLoCo(net, inner, exclude=exclude, sync_every=2)
    if held == ["weight"]:
        net.bias.requires_grad_(False)
        from pccl.adapters.torch.diloco import _shared

        kept = _shared(net, inner, set())
        assert [name for name, _ in kept] == ["weight"]
