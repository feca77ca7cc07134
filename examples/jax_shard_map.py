"""Data-parallel training with jax.shard_map: `pccl run -n 2 -- python examples/jax_shard_map.py`.

Every process has four devices, here simulated on the CPU. The whole step is one compiled program:
XLA adds gradients up inside a process, pccl between processes. Kill a process and the others go on;
start one more and it comes in at the next step. Give a folder to have the weights saved there.
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
    from jax.flatten_util import ravel_pytree
    from jax.sharding import PartitionSpec as P
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install 'pccl-collectives[jax]'", file=sys.stderr)
    sys.exit(2)

import pccl
from pccl.adapters.jax import typed_errors

STEPS = int(os.environ.get("STEPS", "40"))
BATCH, RATE, MOMENTUM = 96, 0.05, 0.9
mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("device",))


def loss_of(weights, x, y):
    hidden = jnp.tanh(x @ weights["in"] + weights["bias"])
    return jnp.mean((hidden @ weights["out"] - y) ** 2)


def mean_over_all(tree):
    """The mean over all devices of all processes. Each device sends its share, so nothing goes
    twice."""
    flat, unravel = ravel_pytree(tree)
    devices = jax.lax.axis_size("device")
    padded = jnp.pad(flat, (0, -flat.size % devices))
    share = jax.lax.psum_scatter(padded, "device", tiled=True) / devices
    share = pccl.allreduce(share, "avg")
    return unravel(jax.lax.all_gather(share, "device", tiled=True)[: flat.size])


@partial(jax.jit, donate_argnums=0)
@partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P("device"), P("device")),
    out_specs=P(),
    check_vma=False,
)
def train_step(model, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(model["weights"], x, y)
    loss, gradients = mean_over_all((loss, gradients))
    speed = jax.tree.map(lambda v, g: MOMENTUM * v - RATE * g, model["speed"], gradients)
    weights = jax.tree.map(jnp.add, model["weights"], speed)
    return {"weights": weights, "speed": speed}, loss


def batch_of(step):
    """This process's rows of the step's batch, which is the same however many processes share
    it."""
    x = np.random.default_rng(step).standard_normal((BATCH, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))
    devices = jax.local_device_count()
    rows = BATCH // (pccl.world_size() * devices) * devices  # as many for all: the mean is exact
    mine = slice(pccl.rank() * rows, (pccl.rank() + 1) * rows)
    return x[mine], y[mine]


def new_model():
    keys = jax.random.split(jax.random.key(0))
    weights = {
        "in": jax.random.normal(keys[0], (8, 32)) / 3,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(keys[1], (32, 1)) / 6,
    }
    return {"weights": weights, "speed": jax.tree.map(jnp.zeros_like, weights)}


pccl.init()
state = {"model": new_model(), "step": 0}
while True:
    if pccl.admit():
        state = pccl.sync(state)
    if state["step"] == STEPS:
        break
    with typed_errors():
        model, loss = train_step(state["model"], *batch_of(state["step"]))
        loss = float(loss)  # waits for the step, so that its errors are raised here
    state = {"model": model, "step": state["step"] + 1}
    print(f"step {state['step']}: loss {loss:.6f}, {pccl.world_size()} processes", flush=True)

weights = {name: np.asarray(value) for name, value in state["model"]["weights"].items()}
print(f"ends with weights {zlib.crc32(b''.join(w.tobytes() for w in weights.values())):08x}")
if len(sys.argv) > 1:
    # By process: another one may have left by now, and ranks have moved.
    np.savez(f"{sys.argv[1]}/weights-{os.getpid()}.npz", **weights)
