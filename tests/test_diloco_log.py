"""`log_dict` of the forms of DiLoCo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from members import Members, each

import pccl
from pccl import diloco


def numpy_form(comm: pccl.Communicator) -> tuple[Any, Callable[[], object]]:
    made = diloco.DiLoCo({"w": np.ones(3, np.float32)}, sync_every=2, mode="sync", comm=comm)
    return made, made.step


def torch_form(comm: pccl.Communicator) -> tuple[Any, Callable[[], object]]:
    torch = pytest.importorskip("torch")
    from pccl.adapters.torch.diloco import DiLoCo

    model = torch.nn.Linear(3, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    made = DiLoCo(model, inner, sync_every=2, mode="sync", comm=comm)
    return made, made.step


def jax_form(comm: pccl.Communicator) -> tuple[Any, Callable[[], object]]:
    jax = pytest.importorskip("jax")
    from pccl.adapters.jax import diloco as make

    outer = make(sync_every=2, mode="sync", comm=comm)
    state = outer.init({"w": jax.numpy.ones(3)})
    return state, lambda: outer.update(state.params, state)


@pytest.mark.parametrize("form", [numpy_form, torch_form, jax_form])
def test_log_dict_is_flat_and_has_only_numbers(
    members: Members, form: Callable[[pccl.Communicator], tuple[Any, Callable[[], object]]]
) -> None:
    if form is not numpy_form:
        pytest.importorskip("jax" if form is jax_form else "torch")

    def train(rank: int, comm: pccl.Communicator) -> list[dict[str, Any]]:
        made, step = form(comm)
        logs = [made.log_dict()]
        for _ in range(4):
            step()
        return [*logs, made.log_dict()]

    for told in each(members(2), train):
        assert isinstance(told, list), told
        before, after = told
        for log in told:
            assert all(type(value) in (int, float) for value in log.values())
        assert not [key for key in before if key.startswith("round/")]
        assert (before["diloco/outer_step"], before["diloco/tx_bytes"]) == (0, 0)
        assert (after["diloco/outer_step"], after["diloco/inner_step"]) == (2, 4)
        assert after["diloco/tx_bytes"] > 0 and after["diloco/in_flight"] == 0
        assert (after["round/members"], after["round/attempts"]) == (2, 1)
        assert after["round/bytes"] >= 12
        assert after["round/seconds"] >= after["round/waiting_seconds"] >= 0
