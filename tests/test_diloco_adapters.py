"""DiLoCo around a torch model, and around a JAX program."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from diloco_run import Peers, comes_back_late, go, made, make, tell, went
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
    monkeypatch: pytest.MonkeyPatch, model: Any, options: Any, steps: int, schedule: Any = None
) -> tuple[Any, Callable[[], None]]:
    """A callback in a Trainer, and what that does after an inner step."""
    package = SimpleNamespace(TrainerCallback=object)
    monkeypatch.setitem(sys.modules, "transformers", package)  # it is not installed with the tests
    monkeypatch.delitem(sys.modules, "pccl.adapters.transformers", raising=False)
    callback = importlib.import_module("pccl.adapters.transformers").DiLoCoCallback(**options)
    args = SimpleNamespace(world_size=1, load_best_model_at_end=False)
    state = SimpleNamespace(max_steps=steps, global_step=0)
    control, of = SimpleNamespace(), {"optimizer": model[1], "lr_scheduler": schedule}
    callback.on_train_begin(args, state, control, model=model[0], **of)
    return callback, lambda: callback.on_step_end(args, state, control, **of)


def begin_lightning(
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    options: Any,
    steps: int,
    schedule: Any = None,
    *,
    automatic: bool = True,
    frequency: int = 1,
    batches: int = 1,
) -> tuple[Any, Callable[[], None]]:
    """The same for Lightning. `steps`: -1 with max_epochs. `batches`: of an optimizer step."""
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Callback=object))
    monkeypatch.delitem(sys.modules, "pccl.adapters.lightning", raising=False)
    callback = importlib.import_module("pccl.adapters.lightning").DiLoCoCallback(**options)
    of_steps = SimpleNamespace(interval="step", frequency=frequency, scheduler=schedule)
    of_epochs = SimpleNamespace(interval="epoch", frequency=1, scheduler=None)
    trainer = SimpleNamespace(
        world_size=1,
        max_steps=steps,
        optimizers=[model[1]],
        global_step=0,
        lr_scheduler_configs=[of_epochs] if schedule is None else [of_steps, of_epochs],
    )
    module = SimpleNamespace(
        log_dict=lambda numbers: None,
        named_parameters=model[0].named_parameters,
        automatic_optimization=automatic,
    )
    callback.on_train_start(trainer, module)

    def end_step() -> None:
        for _ in range(batches - 1):
            callback.on_train_batch_end(trainer, module, None, None, 0)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, None, 0)

    return callback, end_step


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
    assert begin(monkeypatch, model, options, 8)[0].diloco.inner_step == 0
    options = {"sync_every": 4, "comm": comm}
    assert begin(monkeypatch, model, options, 10)[0].diloco.inner_step == 0


def rates_of(
    begin: Callable[..., Any],
    comm: pccl.Communicator,
    monkeypatch: pytest.MonkeyPatch,
    *,
    steps: int = 100,
    joins_at: int = 6,
    make_schedule: Any = None,
    of: dict[str, Any] | None = None,
    **options: Any,
) -> list[float]:
    """Learning rates of a member that joins at a step, and misses 12 others later.

    That after joining, and those after each of its four steps.
    """
    torch = pytest.importorskip("torch")
    from pccl.adapters.torch import DiLoCo

    join = DiLoCo.join

    def join_a_run(self: DiLoCo) -> None:
        join(self)
        self._steps = joins_at

    monkeypatch.setattr(DiLoCo, "join", join_a_run)
    net = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(net.parameters(), 1.0)
    make_schedule = make_schedule or torch.optim.lr_scheduler.LambdaLR
    schedule = make_schedule(inner, lambda step: 1 / (1 + step))
    options = {"sync_every": 3, "comm": comm, **options}
    callback, end_step = begin(monkeypatch, (net, inner), options, steps, schedule, **(of or {}))
    rates = [inner.param_groups[0]["lr"]]
    for away in (0, 0, 12, 0):
        inner.step()
        schedule.step()
        callback.diloco._steps += away  # what the others did meanwhile
        end_step()
        rates.append(inner.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(
    ("begin", "of"),
    [(begin_transformers, {}), (begin_lightning, {}), (begin_lightning, {"batches": 4})],
)
@pytest.mark.filterwarnings("error")
def test_a_trainers_schedule_is_at_the_runs_step_on_a_newcomer_and_after_coming_back(
    begin: Callable[..., Any], of: Any, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = rates_of(begin, members(1)[0], monkeypatch, of=of)
    assert rates == pytest.approx([1 / 7, 1 / 8, 1 / 9, 1 / 22, 1 / 23])


@pytest.mark.parametrize(
    ("begin", "options"),
    [
        (begin_transformers, {"steps": 99, "round_seconds": 60.0}),
        (begin_lightning, {"steps": 99, "round_seconds": 60.0}),
        (begin_lightning, {"steps": -1}),
        (begin_lightning, {"of": {"automatic": False}}),
        (begin_lightning, {"of": {"frequency": 2}}),
    ],
)
def test_a_schedule_that_counts_a_members_own_steps_is_left_alone(
    begin: Callable[..., Any], options: Any, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = rates_of(begin, members(1)[0], monkeypatch, **options)
    assert rates == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])


@pytest.mark.parametrize("begin", [begin_transformers, begin_lightning])
def test_the_end_of_a_timed_round_does_not_step_a_schedule(
    begin: Callable[..., Any], members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"round_seconds": 1e-6, "joins_at": 0, "steps": 99}
    rates = rates_of(begin, members(1)[0], monkeypatch, **options)
    assert rates == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])


@pytest.mark.parametrize("begin", [begin_transformers, begin_lightning])
def test_a_schedule_is_not_stepped_beyond_its_end(
    begin: Callable[..., Any], members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")

    def one_cycle(inner: Any, _: Any) -> Any:  # which raises there
        return torch.optim.lr_scheduler.OneCycleLR(inner, 1.0, total_steps=14)

    comm = members(1)[0]
    rates = rates_of(begin, comm, monkeypatch, steps=10, make_schedule=one_cycle)
    assert min(rates) > 0


def test_a_schedule_that_follows_a_loss_is_left_alone() -> None:
    torch = pytest.importorskip("torch")
    from pccl.adapters.torch.diloco import Schedules

    training: Any = SimpleNamespace(inner_step=5, _plan=SimpleNamespace(round_seconds=None))
    inner = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(inner)
    Schedules(training, 0, 10).catch_up([schedule])
    assert schedule.last_epoch == 0


def test_a_transformers_trainer_logs_the_numbers_of_the_run(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(2, 1)
    model = net, torch.optim.SGD(net.parameters(), 0.1)
    (comm,) = members(1)
    options = {"sync_every": 2, "comm": comm, "exclude": ["bias"]}
    callback, end_step = begin_transformers(monkeypatch, model, options, 8)
    for _ in range(2):
        end_step()
    logs = {"loss": 1.0}
    state = SimpleNamespace(log_history=[{"loss": 1.0, "step": 2}])
    callback.on_log(None, state, None, logs=logs)
    for found in (logs, state.log_history[0]):
        assert (found["loss"], found["diloco/outer_step"], found["round/members"]) == (1.0, 1, 1)
    callback.on_log(None, SimpleNamespace(log_history=[]), None, logs={})


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


SHELLS = [
    pytest.param("torch", diloco_torch, id="torch"),
    pytest.param("jax", diloco_jax, id="jax", marks=pytest.mark.env(JAX_PLATFORMS="cpu")),
]


@pytest.mark.parametrize(("framework", "shell"), SHELLS)
def test_a_model_that_is_late_watches_and_counts_again(
    run: Run, framework: str, shell: ModuleType
) -> None:
    pytest.importorskip(framework)
    peers = Peers(run.peers(3, shell.serve))
    waits: dict[str, Any] = {"quorum": 0.6, "grace_seconds": 5.0, "rejoin": "told"}
    make(peers, shell=shell, sync_every=3, background_join=True, **waits)
    made(peers)
    tell(peers, shell.begin)
    for peer in peers:  # none is late because it compiles
        peer.expect("begun", 60)
    go(peers, 1, shell=shell)
    counts = comes_back_late(peers, shell=shell)
    assert counts[0] == 2 and counts[-1] == 3
    assert [log[-1]["size"] for log in go(peers, 2, inner=False, shell=shell)] == [3, 3, 3]


@pytest.mark.parametrize("how", ["clip", "trimmed"])
@pytest.mark.parametrize(("framework", "shell"), SHELLS)
def test_timed_rounds_of_a_model_bound_the_influence_of_a_member_that_spoils_them(
    run: Run, framework: str, shell: ModuleType, how: str
) -> None:
    pytest.importorskip(framework)
    peers = Peers(run.peers(3, shell.serve))
    timed: dict[str, Any] = {"sync_every": 100_000, "round_seconds": 0.3, "robust": how}
    make(peers[:2], 1, shell=shell, **timed)
    make(peers[2:], 3, shell=shell, spoil=1e6, **timed)
    made(peers)
    for log in go(peers, 3, shell=shell):
        assert [one["round"] for one in log] == [1, 2, 3]
        assert all(1 <= one["steps"] < 100_000 for one in log)
        assert all(peers.ids[2] in one["limited"] for one in log)


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
