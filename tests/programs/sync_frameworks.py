"""States of torch and JAX."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np

import pccl
from programs import sync_shell as shell
from programs.peer import say

_kept: list[Any] = []  # parameters of this peer's model before it was synced
_tensors: list[Any] = []


def make_torch_quick() -> None:
    """Keeps optimizers from importing the compiler, which takes longer than the whole test."""
    import torch

    stand_in: Any = types.ModuleType("torch._dynamo")
    stand_in.disable = lambda function, *_, **__: function
    stand_in.graph_break = lambda *_, **__: None
    torch._dynamo = sys.modules["torch._dynamo"] = stand_in


def train(seed: int, rate: float, steps: int) -> None:
    """Makes a model with an optimizer, and trains it."""
    import torch

    make_torch_quick()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 1)
    )
    adam = torch.optim.Adam(model.parameters(), lr=rate, amsgrad=True)
    shell.state = {"model": model, "adam": adam, "step": 0}
    _kept[:] = model.parameters()
    for _ in range(steps):
        step()


def step() -> None:
    import torch

    rows = torch.linspace(-1, 1, 40).reshape(4, 10)
    shell.state["adam"].zero_grad()
    (shell.state["model"](rows) ** 2).sum().backward()
    shell.state["adam"].step()
    shell.state["step"] += 1


def say_what_arrived() -> None:
    now, before = shell.state, shell.given
    parameters = list(now["model"].parameters())
    optimized = now["adam"].param_groups[0]["params"]
    say(
        objects=now["model"] is before["model"] and now["adam"] is before["adam"],
        parameters=all(a is b for a, b in zip(parameters, _kept, strict=True)),
        optimized=all(a is b for a, b in zip(optimized, _kept, strict=True)),
        grads=all(parameter.requires_grad for parameter in parameters),
        rate=now["adam"].param_groups[0]["lr"],
        slots=len(now["adam"].state),
        step=now["step"],
    )


def hold_tensors(newcomer: bool) -> None:
    """Tensors of several dtypes and layouts, and an array that is a tensor on the newcomer."""
    import torch

    kinds = (torch.bfloat16, torch.bool, torch.complex64, torch.int8)
    if newcomer:
        _tensors[:] = [torch.zeros(5).to(kind) for kind in kinds]
        mixed, views = torch.zeros(2, 3), torch.zeros(3, 2).T
    else:
        _tensors[:] = [torch.arange(5).to(kind) for kind in kinds]
        mixed, views = np.arange(6, dtype=np.float32).reshape(2, 3), torch.arange(6.0).reshape(2, 3)
    shell.state = {"mixed": mixed, "views": views, "tensors": list(_tensors)}


def sync_tensors() -> None:
    import torch

    given = shell.state
    state, info = pccl.sync(given, return_info=True)
    wanted = torch.arange(6.0).reshape(2, 3)
    arrived = [
        bool((tensor == torch.arange(5).to(tensor.dtype)).all()) for tensor in state["tensors"]
    ]
    kept = all(a is b for a, b in zip(state["tensors"], _tensors, strict=True))
    say(
        mixed=bool((torch.as_tensor(state["mixed"]) == wanted).all()),
        views=bool((state["views"] == wanted).all()),
        tensors=arrived,
        in_place=state["views"] is given["views"] and kept,
        rx=info.rx_bytes,
    )


def tie_weights() -> None:
    """Makes a model two of whose layers have the same weights."""
    import torch

    class Tied(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    torch.manual_seed(pccl.rank())
    shell.state = {"model": Tied()}


def say_whether_tied() -> None:
    model = shell.state["model"]
    say(tied=model.head.weight is model.embed.weight)


def sync_with_a_view(transposed: bool) -> None:
    """The view has a part of the weights, or all of them in another order."""
    weight = shell.state["model"].embed.weight
    view = weight.data.T if transposed else weight[:3]
    shell.sync_tree({"model": shell.state["model"], "view": view})


def jax_arrays(seed: int) -> dict[str, Any]:
    import jax.numpy as jnp

    kinds = (jnp.float32, jnp.bfloat16, jnp.bool_, jnp.complex64, jnp.int8)
    arrays = [jnp.arange(seed, seed + 6).reshape(2, 3).astype(kind) for kind in kinds]
    return {"arrays": arrays, "same": jnp.ones(4), "n": np.full(3, seed)}


def sync_jax_arrays(seed: int, until: int | None = None) -> None:
    shell.sync_object(jax_arrays(seed), until=until)


def say_which_jax_arrays(old_seed: int, new_seed: int) -> None:
    import jax

    state, given = shell.state, shell.given
    old, new = jax_arrays(old_seed)["arrays"], jax_arrays(new_seed)["arrays"]
    say(
        arrays=all(
            bool((a == b).all()) and a.dtype == b.dtype
            for a, b in zip(state["arrays"], new, strict=True)
        ),
        given=all(bool((a == b).all()) for a, b in zip(given["arrays"], old, strict=True)),
        kinds=all(isinstance(array, jax.Array) for array in state["arrays"]),
        kept=state["same"] is given["same"] and state["n"] is given["n"],
        computes=float((state["arrays"][0] + 1).sum()),
    )
