"""An ordinary DDP program, on handwritten digits, over pccl: only the backend's name is another.

torchrun --nproc-per-node 2 examples/torch_ddp.py
"""

import argparse
import os
import sys

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install 'pccl-collectives[torch,demo]'", file=sys.stderr)
    sys.exit(2)

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--backend", default="pccl")
parser.add_argument("--init-method", default="env://", help="as for torch.distributed")
args = parser.parse_args()

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(args.backend, args.init_method, rank=rank, world_size=world_size)

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train, test = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)

torch.manual_seed(rank)  # DDP gives all of them the weights of rank 0
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * world_size)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {total.item() / world_size:.3f}")

with torch.no_grad():
    correct = (model(test[0]).argmax(1) == test[1]).float().mean().item()
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item()
print(f"rank {rank}: accuracy {correct:.3f}, weights {weights.hex()}")
dist.destroy_process_group()
