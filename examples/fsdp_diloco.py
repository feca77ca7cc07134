"""FSDP2 inside a replica, DiLoCo between replicas, on handwritten digits.

    pccl master --listen 0.0.0.0:48148        # somewhere; prints a secret for PCCL_SECRET
    export PCCL_MASTER=that.host:48148 PCCL_SECRET=... PCCL_MIN_PEERS=2   # on each machine
    # Without this, torchrun restarts ranks with the store of the dead ones.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fsdp_diloco.py

Each machine is a replica. Its ranks hold the model in shards, which FSDP2 puts together over Gloo
(NCCL on GPUs); every 20 steps each rank averages what its shard has learned with the same rank of
the other replicas. Kill a process and its replica is out; the others go on, and torchrun starts the
replica again, which comes in once all its ranks wait. When all are lost, start again with the same
`--checkpoints`. docs/guide/fsdp.md says how.
"""

import argparse
import socket
import sys
import zlib
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install 'pccl-collectives[torch,demo]'", file=sys.stderr)
    sys.exit(2)

import pccl
from pccl import checkpoint
from pccl.adapters.torch import DiLoCo
from pccl.data import ElasticSampler

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--replica", default=socket.gethostname(), help="a name of its own for each")
parser.add_argument("--checkpoints", type=Path, help="folder on this machine")
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")  # inside this replica only
rank, ranks = dist.get_rank(), dist.get_world_size()
pccl.init(peer_group=rank, replica_id=args.replica, ranks_per_replica=ranks)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
mesh = init_device_mesh("cpu", (ranks,))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
inner = torch.optim.AdamW(model.parameters(), 1e-3)

images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images))  # the same everywhere
x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
x, y, held_out = x[:1500], y[:1500], (x[1500:], y[1500:])

# Divides the digits among the replicas. Only rank 0's counts: groups may see a loss at different
# steps.
sampler = ElasticSampler(len(x), batch_size=32 * ranks)
data = sampler if rank == 0 else None
diloco = DiLoCo(model, inner, sync_every=20, data=data, join=False)  # of this rank's shards
state = {"diloco": diloco, "sampler": sampler} if rank == 0 else {"diloco": diloco}


def take() -> torch.Tensor:
    """This rank's part of the replica's next digits."""
    taken = torch.from_numpy(sampler.take()) if rank == 0 else torch.empty(32 * ranks).long()
    dist.broadcast(taken, 0)
    return taken[rank::ranks]


def file(round_: int) -> Path:
    return args.checkpoints / f"rank{rank}" / f"{round_}.safetensors"


if args.checkpoints:
    found = checkpoint.latest(file(0).parent)
    newest = torch.tensor(int(found.stem) if found else 0)
    dist.all_reduce(newest, dist.ReduceOp.MIN)  # the round that all ranks have saved
    if newest > 0:
        checkpoint.load(file(int(newest)), state)
diloco.join()
print(f"replica {args.replica} rank {rank}: begins at round {diloco.outer_step}", flush=True)

while diloco.outer_step < args.rounds:
    batch = take()
    loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    inner.step()
    inner.zero_grad()
    if not diloco.step(tokens=len(batch)):
        continue
    if args.checkpoints and diloco.outer_step % 5 == 0:
        checkpoint.save(file(diloco.outer_step), state, revision=diloco.outer_step, keep=2)
    if rank == 0 and pccl.rank() == 0:
        print(
            f"round {diloco.outer_step}: loss {loss.item():.3f}, {pccl.world_size()} replicas, "
            f"{sampler.committed} digits",
            flush=True,
        )

with torch.no_grad():
    correct = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
shards = b"".join(p.detach().to_local().numpy().tobytes() for p in model.parameters())
dist.barrier()
pccl.shutdown()
print(
    f"replica {args.replica} rank {rank}: accuracy {correct:.3f}, shards {zlib.crc32(shards):08x}",
    flush=True,
)
dist.destroy_process_group()
