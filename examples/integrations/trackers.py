"""DiLoCo in TensorBoard, MLflow, W&B: pccl run -n 2 --elastic -- python trackers.py FOLDER"""

import os
import sys
from pathlib import Path

if len(sys.argv) != 2:
    sys.exit("usage: pccl run -n 2 --elastic -- python trackers.py FOLDER")
try:
    import mlflow
    import torch
    import wandb
    from torch.utils.tensorboard import SummaryWriter
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install torch mlflow tensorboard wandb", file=sys.stderr)
    sys.exit(2)

import pccl
from pccl.adapters.torch import DiLoCo

pccl.init()
folder, name = Path(sys.argv[1]).absolute(), f"member-{os.environ.get('PCCL_LOCAL_RANK', '0')}"
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
inner = torch.optim.AdamW(model.parameters(), lr=0.01)
diloco = DiLoCo(model, inner, sync_every=10)
torch.seed()  # other examples in each process
mlflow.set_tracking_uri(f"sqlite:///{folder / name}.db")
run = wandb.init(mode="offline", group="run-7", id=name, dir=folder)  # needs no account
with SummaryWriter(folder / name) as writer, mlflow.start_run(run_name=name), run:
    while diloco.outer_step < 8:
        x = torch.randn(32, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        inner.zero_grad()
        loss.backward()
        inner.step()
        if diloco.step(tokens=len(x)):
            # The steps are the run's, so a newcomer's curves begin where the others are.
            numbers, step = diloco.log_dict() | {"loss": loss.item()}, diloco.inner_step
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)
            mlflow.log_metrics(numbers, step)
            run.log(numbers, step=step)
print("loss", loss.item(), "tokens", diloco.world_tokens)
pccl.shutdown()
