"""Accelerate's DDP over pccl: torchrun --nproc-per-node 2 --max-restarts 1 accelerate_ddp.py

When a rank is killed, torchrun starts all ranks again, and they load the latest checkpoint.
"""

import os
import sys

try:
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install torch accelerate", file=sys.stderr)
    sys.exit(2)

backend, folder = [*sys.argv[1:], "pccl", "accelerate_ddp"][:2]

dist.init_process_group(backend)  # before Accelerator, which knows Gloo and MPI only on CPUs
accelerator = Accelerator(cpu=True)
set_seed(1)
x = torch.randn(512, 8)
y = x.sum(1, keepdim=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
loader = DataLoader(TensorDataset(x, y), 32)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
epoch = 0
while os.path.exists(f"{folder}/{epoch}"):
    accelerator.load_state(f"{folder}/{epoch}")
    epoch += 1
while epoch < 4:
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
    accelerator.save_state(f"{folder}/{epoch}")
    epoch += 1
print("loss", torch.nn.functional.mse_loss(model(x), y).item())
dist.destroy_process_group()
