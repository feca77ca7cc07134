"""Trains a linear layer in one process. The other programs here are this one with a library."""

import json
import os
import time

import torch

SHARD = int(os.environ["SHARD"])  # the part of the data that this process has
STEPS = int(os.environ["STEPS"])


def say(event: str, **what: object) -> None:
    what |= {"event": event, "shard": SHARD, "pid": os.getpid(), "at": time.monotonic()}
    print(json.dumps(what) + "\n", end="", flush=True)


def batch(step: int) -> torch.Tensor:
    """Equal rows. Every element of the gradient is 2 ** SHARD, so a mean shows its shards."""
    return torch.full((8, 512), 2.0**SHARD)


def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(512, 512, bias=False)  # 1 MiB of gradients
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    while step < STEPS:
        optimizer.zero_grad()
        loss = model(batch(step)).sum(1).mean()
        loss.backward()
        optimizer.step()
        step += 1
        gradient = model.weight.grad
        low, high = gradient.min().item(), gradient.max().item()
        say("step", step=step, low=low, high=high, weight=model.weight[0, 0].item())


say("imported")
main()
