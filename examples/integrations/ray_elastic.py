"""Elastic members on Ray: python ray_elastic.py

A member that dies is replaced, and the others go on. So do they when Ray has fewer machines.
"""

import sys

try:
    import ray  # noqa: F401, which the adapter needs
    import torch
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install torch ray", file=sys.stderr)
    sys.exit(2)

import pccl
from pccl.adapters.ray import ElasticTrainer
from pccl.adapters.torch import DiLoCo


def train(config):
    pccl.init()
    torch.seed()  # other examples in each process
    x = torch.randn(512, 8)
    model = torch.nn.Linear(8, 1)
    inner = torch.optim.AdamW(model.parameters(), 0.02)
    diloco = DiLoCo(model, inner, sync_every=10)  # a newcomer begins where the others are
    while diloco.inner_step < config["steps"]:
        batch = x[32 * (diloco.inner_step % 16) :][:32]
        inner.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
        inner.step()
        diloco.step()
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    return loss.item(), model.state_dict()


if __name__ == "__main__":
    trainer = ElasticTrainer(train, {"steps": 200}, members=3, min_members=2)
    for loss, weights in filter(None, trainer.fit()):
        print("loss", loss, "weights", weights["weight"].double().sum().item())
