"""Replicas with FSDP2 inside, pccl between them. On each of two machines, with a NAME of its own:
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 THIS_FILE NAME

FSDP2 shards model and AdamW inside a replica. pccl averages each shard's gradient with the other
replica's. A replica that is lost is started again, and receives its shards and the step.
"""

import sys

if len(sys.argv) != 2:
    sys.exit("usage: torchrun --nproc-per-node 2 --max-restarts 3 fsdp_replicas.py NAME")
try:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install 'pccl-collectives[torch]'", file=sys.stderr)
    sys.exit(2)

import pccl

dist.init_process_group("gloo")  # this replica's own; "nccl" on GPUs
size, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(1)
x, step = torch.randn(512, 8), 0
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
mesh = dist.init_device_mesh("cpu", (size,))  # "cuda" on GPUs
for layer in [*model, model]:
    fully_shard(layer, mesh=mesh)
adam = torch.optim.AdamW(model.parameters(), 0.03)
with pccl.init(peer_group=rank, replica_id=sys.argv[1], ranks_per_replica=size):
    while step < 60:
        if pccl.admit():
            state = [step, *get_state_dict(model, adam)]
            step, weights, moments = pccl.sync(state, revision=step)
            set_state_dict(model, adam, model_state_dict=weights, optim_state_dict=moments)
        adam.zero_grad()
        batch = x[32 * (((2 * step + pccl.rank()) * size + rank) % 16) :][:32]  # 2 replicas
        torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
        gradients = [p.grad for p in model.parameters()]
        pccl.allreduce(gradients, "avg", out=gradients)
        adam.step()
        step += 1
    print("loss", torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item())
    dist.barrier()
