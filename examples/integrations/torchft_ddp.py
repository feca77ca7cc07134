"""A torchft program over pccl: pccl run -n 2 --elastic -- python torchft_ddp.py

It has the shape of torchft's train_ddp.py; only the Manager comes from another package. When a
member is killed, the others go on. A newcomer receives the model, the optimizer and the step.
"""

import os
import sys
from datetime import timedelta

try:
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torchft import DistributedDataParallel, DistributedSampler, Optimizer
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install torch torchft", file=sys.stderr)
    sys.exit(2)

from pccl.adapters.torchft import Manager

replica = int(os.environ.get("PCCL_LOCAL_RANK", "0"))  # REPLICA_GROUP_ID of torchft
torch.manual_seed(1)
x = torch.randn(512, 8)
y = x.sum(1, keepdim=True)
data = TensorDataset(x, y)
shards = {"replica_rank": replica, "num_replica_groups": 2, "group_rank": 0, "num_replicas": 1}
loader = DataLoader(data, 16, sampler=DistributedSampler(data, **shards, shuffle=False))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
manager = Manager(
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    load_state_dict=lambda s: (
        model.load_state_dict(s["model"]), inner.load_state_dict(s["optimizer"])
    ), min_replica_size=1, timeout=timedelta(seconds=60), replica_id=f"replica_{replica}",
)  # fmt: skip
ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
while manager.current_step() < 48:
    for inputs, targets in loader:
        optimizer.zero_grad()  # begins the quorum
        torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()  # if the members commit
weights = torch.cat([p.flatten() for p in model.parameters()]).double().sum().item()
print("loss", torch.nn.functional.mse_loss(model(x), y).item(), "weights", weights)
