"""Flax NNX, optax and orbax over pccl: pccl run -n 2 --elastic -- python flax_orbax.py FOLDER

A newcomer receives the run's state. Started again, the run goes on from orbax's latest step.
"""

import sys
import zlib
from pathlib import Path

if len(sys.argv) != 2:
    sys.exit("usage: pccl run -n 2 --elastic -- python flax_orbax.py FOLDER")
try:
    import jax
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install jax flax optax orbax-checkpoint", file=sys.stderr)
    sys.exit(2)

import pccl

x, rngs = jax.random.normal(jax.random.key(1), (512, 8)), nnx.Rngs(1)
layers = nnx.Linear(8, 16, rngs=rngs), nnx.tanh, nnx.Linear(16, 1, rngs=rngs)
graph, params = nnx.split(nnx.Sequential(*layers))
loss_of = jax.jit(lambda params, x: ((nnx.merge(graph, params)(x)[:, 0] - x.sum(1)) ** 2).mean())
gradient, adam = jax.jit(jax.grad(loss_of)), optax.adam(1e-2)
state = {"step": 0, "params": params, "moments": adam.init(params)}
with ocp.CheckpointManager(Path(sys.argv[1]).absolute()) as saved:
    if saved.latest_step() is not None:
        state = saved.restore(saved.latest_step(), args=ocp.args.StandardRestore(state))
    pccl.init()
    while True:
        if pccl.admit():
            state = pccl.sync(state, revision=state["step"])
        if (step := state["step"]) == 60:
            break
        batch = x[32 * ((2 * step + pccl.rank()) % 16) :][:32]
        mean = pccl.allreduce(gradient(state["params"], batch), "avg")
        changes, moments = adam.update(mean, state["moments"])
        params = optax.apply_updates(state["params"], changes)
        state = {"step": step + 1, "params": params, "moments": moments}
        if step % 10 == 9 and pccl.rank() == 0:
            saved.save(step + 1, args=ocp.args.StandardSave(state))
weights = zlib.crc32(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(state["params"])))
print("loss", loss_of(state["params"], x).item(), "weights", weights)
