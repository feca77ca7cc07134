"""Data-parallel training with jax.pmap and optax: `pccl run -n 2 -- python examples/jax_pmap.py`.

Every process has four devices, here simulated on the CPU. XLA averages gradients over the devices
of a process, the first link of the optimizer's chain over the processes. Kill a process and the
others go on; start one more and it comes in at the next step. Give a folder to have the weights
saved there.
"""

import os
import sys
import zlib
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import optax
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install 'pccl-collectives[jax]' optax", file=sys.stderr)
    sys.exit(2)

import pccl
from pccl.adapters.jax import average_gradients

STEPS = int(os.environ.get("STEPS", "40"))
BATCH = 96
optimizer = optax.chain(average_gradients(), optax.adam(0.02))


def loss_of(weights, x, y):
    hidden = jnp.tanh(x @ weights["in"] + weights["bias"])
    return jnp.mean((hidden @ weights["out"] - y) ** 2)


@partial(jax.pmap, axis_name="device", in_axes=(None, 0, 0), out_axes=None)
def local_gradients(weights, x, y):
    return jax.lax.pmean(jax.value_and_grad(loss_of)(weights, x, y), "device")


def batch_of(step):
    """This process's rows of the step's batch, a part for each device; the batch is always the
    same."""
    x = np.random.default_rng(step).standard_normal((BATCH, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))
    devices = jax.local_device_count()
    rows = BATCH // (pccl.world_size() * devices) * devices  # as many for all: the mean is exact
    mine = slice(pccl.rank() * rows, (pccl.rank() + 1) * rows)
    return x[mine].reshape(devices, -1, 8), y[mine].reshape(devices, -1, 1)


def new_weights():
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(keys[0], (8, 32)) / 3,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(keys[1], (32, 1)) / 6,
    }


pccl.init()
weights = new_weights()
state = {"weights": weights, "optimizer": optimizer.init(weights), "step": 0}
while True:
    if pccl.admit():
        state = pccl.sync(state)
    if state["step"] == STEPS:
        break
    loss, gradients = local_gradients(state["weights"], *batch_of(state["step"]))
    loss = pccl.allreduce(loss, "avg")  # over all processes, as the gradients in the next line
    updates, moments = optimizer.update(gradients, state["optimizer"])
    weights = optax.apply_updates(state["weights"], updates)
    state = {"weights": weights, "optimizer": moments, "step": state["step"] + 1}
    print(f"step {state['step']}: loss {loss:.6f}, {pccl.world_size()} processes", flush=True)

weights = {name: np.asarray(value) for name, value in state["weights"].items()}
print(f"ends with weights {zlib.crc32(b''.join(w.tobytes() for w in weights.values())):08x}")
if len(sys.argv) > 1:
    # By process: another one may have left by now, and ranks have moved.
    np.savez(f"{sys.argv[1]}/weights-{os.getpid()}.npz", **weights)
