from functools import partial

import jax
import jax.numpy as jnp
import optax

import pccl
import pccl.adapters.jax

params, opt_state, batch = jnp.zeros(3), {"count": jnp.zeros(())}, jnp.ones((4, 3))
gradients = {"w": jnp.ones(3)}
flat = jnp.ones(8)
if "step" not in globals():
    step = 0


def loss_of(params, batch):
    return jnp.mean((batch @ params) ** 2)
