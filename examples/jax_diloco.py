"""DiLoCo with JAX and optax: `pccl run -n 2 -- python examples/jax_diloco.py`.

The training step is jitted and knows nothing of other processes; every 20 steps all average what
they have learned. Kill a process and the others go on; start one more and it comes in at the end of
a round.
"""

import os
import sys
import zlib

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import optax
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install 'pccl-collectives[jax]' optax", file=sys.stderr)
    sys.exit(2)

import pccl
from pccl.adapters.jax import diloco

ROUNDS = int(os.environ.get("ROUNDS", "20"))
optimizer = optax.adamw(1e-2)


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


@jax.jit
def train_step(params, moments, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, moments = optimizer.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, loss


def batch_of(step, rank):
    x = np.random.default_rng([step, rank]).standard_normal((64, 8)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


pccl.init()
keys = jax.random.split(jax.random.key(0))
params = {
    "in": jax.random.normal(keys[0], (8, 32)) / 3,
    "bias": jnp.zeros(32),
    "out": jax.random.normal(keys[1], (32, 1)) / 6,
}
outer = diloco(sync_every=20)
state = outer.init(params)
params = state.params  # a newcomer's are the run's
moments = optimizer.init(params)  # each process has its own
losses = []
while state.core.outer_step < ROUNDS:
    params, moments, loss = train_step(
        params, moments, *batch_of(state.core.inner_step, pccl.rank())
    )
    losses.append(float(loss))
    params, state = outer.update(params, state, tokens=64)
    if state.core.inner_step % 20 == 0:
        print(f"round {state.core.outer_step}: loss {np.mean(losses):.4f}", flush=True)
        losses.clear()

weights = b"".join(np.asarray(params[name]).tobytes() for name in sorted(params))
print(f"ends with weights {zlib.crc32(weights):08x}")
