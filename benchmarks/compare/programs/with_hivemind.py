"""Trains a linear layer with hivemind's averager: peers may die and join."""

import json
import os
import time

import hivemind
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
    peers = os.environ["INITIAL_PEERS"].split()
    dht = hivemind.DHT(peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    averager = hivemind.DecentralizedAverager(
        [torch.zeros_like(p) for p in model.parameters()],
        dht,
        prefix="gradients",
        target_group_size=4,
        min_matchmaking_time=3.0,
        request_timeout=1.0,
        allreduce_timeout=10.0,
        start=True,
    )
    step = 0
    while step < STEPS:
        optimizer.zero_grad()
        loss = model(batch(step)).sum(1).mean()
        loss.backward()
        with averager.get_tensors() as tensors:
            for p, mine in zip(model.parameters(), tensors, strict=True):
                mine.copy_(p.grad)
        try:
            averager.step()
        except TimeoutError:  # a peer has died meanwhile
            continue
        with averager.get_tensors() as tensors:
            for p, mean in zip(model.parameters(), tensors, strict=True):
                p.grad.copy_(mean)
        optimizer.step()
        step += 1
        gradient = model.weight.grad
        low, high = gradient.min().item(), gradient.max().item()
        say("step", step=step, low=low, high=high, weight=model.weight[0, 0].item())


say("imported")
main()
