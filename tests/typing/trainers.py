"""Types of DiLoCo's options as type checkers see them. Never run: tools/typecheck.sh reads it."""

from typing import Any

import numpy as np
from typing_extensions import assert_type

import pccl.diloco
from pccl.adapters import jax, lightning, torch, transformers


def options(model: Any, inner: Any, make_outer: Any) -> None:
    core: pccl.diloco.Keywords = {"sync_every": 50, "quantize": "int8", "robust": None}
    more: torch.DiLoCoKeywords = {
        "sync_every": 50,
        "exclude": ["bias"],
        "outer_optimizer": make_outer,
    }
    computed = pccl.diloco.preset(members=8, parameters=1e8, megabits=100, step_seconds=1, rounds=9)
    assert_type(computed, pccl.diloco.Keywords)

    pccl.diloco.DiLoCo({"w": np.zeros(3)}, **core)
    pccl.diloco.DiLoCo({"w": np.zeros(3)}, **computed, outer_optimizer=pccl.diloco.SGD)
    jax.diloco(**core)
    jax.diloco(**computed, outer_optimizer=pccl.diloco.SGD)
    torch.DiLoCo(model, inner, **core)
    torch.DiLoCo(model, [inner, inner], **more)
    torch.DiLoCo(model, inner, **computed, exclude={"bias"}, outer_optimizer=make_outer)
    for callback in (lightning.DiLoCoCallback, transformers.DiLoCoCallback):
        callback(**core)
        callback(**more)
        callback(**computed, exclude=("bias",), outer_optimizer=make_outer)
    transformers.DiLoCoCallback(sync_every=50, exclude=["bias"], outer_optimizer=None)

    pccl.diloco.DiLoCo({"w": np.zeros(3)}, sync_every=50, exclude=["w"])  # type: ignore[call-arg]
    lightning.DiLoCoCallback(sync_every=50, excluded=["bias"])  # type: ignore[call-arg]
    lightning.DiLoCoCallback(exclude=["bias"])  # type: ignore[call-arg]
    torch.DiLoCo(model, inner, sync_every="50")  # type: ignore[arg-type]
