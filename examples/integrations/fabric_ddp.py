"""Lightning Fabric's DDP over pccl: torchrun --nproc-per-node 2 --max-restarts 1 fabric_ddp.py

When a rank is killed, torchrun starts all ranks again, and they load the latest checkpoint.
"""

import os
import sys

try:
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install torch lightning", file=sys.stderr)
    sys.exit(2)

backend, folder = [*sys.argv[1:], "pccl", "fabric_ddp"][:2]

size, strategy = int(os.environ["LOCAL_WORLD_SIZE"]), DDPStrategy(process_group_backend=backend)
fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy)
fabric.launch()
fabric.seed_everything(1)
x = torch.randn(512, 8)
y = x.sum(1, keepdim=True)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), 32))
model = torch.nn.Linear(8, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.05))
state = {"model": model, "optimizer": optimizer, "epoch": 0}
if os.path.exists(folder):
    fabric.load(folder, state)
while state["epoch"] < 4:
    for inputs, targets in loader:
        optimizer.zero_grad()
        fabric.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
    state["epoch"] += 1
    fabric.save(folder, state)
print("loss", torch.nn.functional.mse_loss(model(x), y).item())
