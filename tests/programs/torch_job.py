"""A rank of a torch job, as its environment describes it, and a model that the ranks train."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["SIZE"])


def store() -> Any:
    """STORE is a file, or the port of a store that outlives the ranks."""
    _, size = rank_and_size()
    where = os.environ["STORE"]
    if where.isdecimal():
        return dist.TCPStore("127.0.0.1", int(where), size, is_master=False)
    return dist.FileStore(where, size)


def be_strict() -> None:
    """One thread, and warnings are errors: torch warns of what a backend lacks."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)


def begin(backend: str = "pccl", *, strict: bool = True, **options: Any) -> tuple[int, int]:
    """Joins the job. Returns rank and size. `strict`: warnings are errors, or else ignored."""
    import pccl.adapters.torch  # noqa: F401  # registers the backend

    be_strict()
    if not strict:
        warnings.simplefilter("ignore")
    rank, size = rank_and_size()
    options.setdefault("timeout", timedelta(seconds=60))
    dist.init_process_group(backend, store=store(), rank=rank, world_size=size, **options)
    return rank, size


def failure(call: Callable[..., object], *args: Any, **options: Any) -> str | None:
    try:
        call(*args, **options)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 4),
    )


def batch(step: int, part: int, parts: int) -> tuple[Any, Any]:
    """A part of the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 8, generator=generator)
    y = torch.tanh(x[:, :4] * 2 - x[:, 4:])
    return x.chunk(parts)[part], y.chunk(parts)[part]


def train(net: Any, part: int, parts: int, steps: int = 5) -> Any:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(steps):
        x, y = batch(step, part, parts)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net


def flat(net: Any) -> Any:
    from torch.distributed.tensor import DTensor

    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in full])


def alone() -> Any:
    """The weights after the same steps in one process, on whole batches."""
    return flat(train(model(), 0, 1))


def same_everywhere(tensor: Any) -> bool:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return all(torch.equal(part, tensor) for part in parts)
