"""JAX parameters to train, in a run that it has joined."""

from __future__ import annotations

from typing import Any

import jax  # noqa: F401
import jax.numpy as jnp

import pccl
import pccl.adapters.jax

pccl.init()
rounds, moments = 4, None
params: dict[str, Any] = {"w": jnp.zeros(3)}
batches = iter(lambda: jnp.ones(3), None)


def train_step(params: dict[str, Any], moments: Any, batch: Any) -> tuple[dict[str, Any], Any]:
    return {"w": params["w"] + 0.1 * batch}, moments
