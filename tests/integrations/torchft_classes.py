"""torchft's own classes around our Manager, for each member: python torchft_classes.py WHICH LEAST

LEAST is `min_replica_size`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Optimizer, ProcessGroupGloo
from torchft.ddp import PureDistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import WorldSizeMode
from torchft.process_group import ManagedProcessGroup

from pccl.adapters.torchft import Manager

STEPS = 24  # of the run

torch.manual_seed(int(os.environ["PCCL_LOCAL_RANK"]))  # other weights and examples in each
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)


def load_state_dict(state: Any) -> None:
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["inner"])


def state_dict() -> Any:
    return {"model": model.state_dict(), "inner": inner.state_dict()}


manager = Manager(
    ProcessGroupGloo(),
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    min_replica_size=int(sys.argv[2]),
    use_async_quorum=False,  # DiLoCo asks for it
    world_size_mode=WorldSizeMode.DYNAMIC,
)


def loss() -> torch.Tensor:
    x = torch.randn(32, 8)
    return torch.nn.functional.mse_loss(called(x), x.sum(1, keepdim=True))


def every_step(after: Callable[[], None] = lambda: None) -> None:
    """Reduces gradients in each step."""
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        loss().backward()
        after()
        optimizer.step()


def now_and_then(wrapped: Any) -> list[torch.Tensor]:
    """Trains alone; the wrapped optimizer shares what is learned. Returns what is equal on all."""
    with wrapped:
        while manager.current_step() < STEPS:
            inner.zero_grad()
            loss().backward()
            inner.step()
    fragments = getattr(wrapped, "_fragments", [])
    outer = [tensor for part in fragments for tensor in part.original_parameters.values()]
    return outer or list(model.parameters())


def by_process_group() -> None:
    """As hooks of FSDP do: torch's own call, on a group that is the manager's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = ManagedProcessGroup(manager).register("managed")

    def reduce() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=group)

    every_step(reduce)


def diloco(parts: list[torch.nn.Module], **options: Any) -> DiLoCo:
    outer = [torch.optim.SGD(part.parameters(), 0.7, momentum=0.3) for part in parts]
    return DiLoCo(manager, parts, inner, outer, sync_every=4, **options)


called: Callable[[torch.Tensor], torch.Tensor] = model
shared = list(model.parameters())
which = sys.argv[1]
if which == "DistributedDataParallel":
    called = DistributedDataParallel(manager, model)
    every_step()
elif which == "PureDistributedDataParallel":
    called = PureDistributedDataParallel(manager, model)
    every_step()
elif which == "ManagedProcessGroup":
    by_process_group()
elif which == "LocalSGD":
    shared = now_and_then(LocalSGD(manager, model, inner, sync_every=4))
elif which == "DiLoCo":
    shared = now_and_then(diloco([model], use_bucketization=True, should_quantize=True))
elif which == "streaming DiLoCo":
    parts = [model[0], model[2]]
    shared = now_and_then(diloco(parts, fragment_sync_delay=1, fragment_update_alpha=0.25))
else:
    raise SystemExit(f"no {which}")
torch.manual_seed(7)
called = model
with torch.no_grad():
    for parameter, tensor in zip(model.parameters(), shared, strict=True):
        parameter.copy_(tensor)
weights = torch.cat([tensor.detach().flatten() for tensor in shared]).double().sum().item()
counts = f"steps {manager.current_step()} batches {manager.batches_committed()}"
print(f"loss {loss().item()} weights {weights} {counts}")
