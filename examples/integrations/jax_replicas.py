"""Replicas of JAX processes, pccl between them: python jax_replicas.py NAME COORDINATOR SIZE RANK

Inside a replica jax.distributed shards the weights over the processes. pccl averages each shard's
gradient with the same shard of the other replicas. They go on when a replica is lost.
"""

import sys
import zlib

if len(sys.argv) != 5:
    sys.exit("usage: python jax_replicas.py NAME COORDINATOR SIZE RANK")
try:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install 'pccl-collectives[jax]'", file=sys.stderr)
    sys.exit(2)

import pccl

name, coordinator, size, rank = *sys.argv[1:3], *map(int, sys.argv[3:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, size, rank, heartbeat_timeout_seconds=10)
sharded = NamedSharding(Mesh(jax.devices(), "shard"), PartitionSpec("shard"))


def loss_of(weights, seed):
    x = jax.random.normal(jax.random.key(seed), (32, 8))
    return jnp.mean((x @ weights - x.sum(1)) ** 2)


gradient = jax.jit(jax.grad(loss_of), out_shardings=sharded)
descend = jax.jit(lambda weights, mean: weights - 0.05 * mean, out_shardings=sharded)
step, shard = 0, jnp.zeros(8 // size)
seed = 1000 * (zlib.crc32(name.encode()) % 1000)  # the same in the replica, others elsewhere
with pccl.init(peer_group=rank, replica_id=name, ranks_per_replica=size):
    while step < 60:
        if pccl.admit():
            step, shard = pccl.sync([step, shard])
        weights = jax.make_array_from_process_local_data(sharded, shard)
        mean = pccl.allreduce(gradient(weights, seed + step), "avg")
        weights = descend(weights, mean)
        step, shard = step + 1, weights.addressable_data(0)
    print("loss", jax.jit(loss_of)(weights, 1).item())
