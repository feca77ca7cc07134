"""Programs of torch.distributed that run alike on every backend.

Every rank of a program returns plain values, which `run` prints as JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from programs import torch_calls
from programs.torch_job import rank_and_size, store

FORKED = True  # workers.start: its processes have imported torch already

PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(call: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[call.__name__] = call
    return call


def model(features: int = 8) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(features, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 8, generator=generator)


def train(net: torch.nn.Module, steps: int = 4) -> list[float]:
    """Steps of SGD; the parameters that they end with."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
    return numbers(list(net.parameters()))


def numbers(tensors: list[torch.Tensor]) -> list[float]:
    return [round(float(x), 4) for t in tensors for x in t.detach().reshape(-1)[:50]]


def failure(call: Callable[[], Any], *classes: type[Exception]) -> Any:
    """How a call ends: whether its error is of all these classes, and whether it is late."""
    try:
        call()
    except Exception as error:
        return [all(isinstance(error, cls) for cls in classes), "imed out" in str(error)]
    return None


@program
def power_sgd() -> Any:
    net = DDP(model())
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(net)


@program
def batched_power_sgd() -> Any:
    net = DDP(model())
    state = powerSGD_hook.PowerSGDState(
        None, 1, start_powerSGD_iter=2, orthogonalization_epsilon=1e-6
    )
    net.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    return train(net)


@program
def python_hooks() -> Any:
    made = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        net = DDP(model(), bucket_cap_mb=0.001)
        net.register_comm_hook(None, hook)
        made.append(train(net))
    return made


@program
def builtin_hooks() -> Any:
    made = []
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        net = DDP(model(), bucket_cap_mb=0.001)
        net._register_builtin_comm_hook(kind)
        made.append(train(net))
    return made


@program
def join() -> Any:
    net = DDP(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with net.join(divide_by_initial_world_size=False):
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            net(batch(step)).square().mean().backward()
            optimizer.step()
    return numbers(list(net.parameters()))


@program
def fsdp1() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    made = []
    for strategy in (
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.NO_SHARD,
    ):
        net = FullyShardedDataParallel(
            model(), sharding_strategy=strategy, device_id=torch.device("cpu")
        )
        train(net)
        with FullyShardedDataParallel.summon_full_params(net):
            made.append(numbers(list(net.parameters())))
    return made


@program
def callback_starts_a_collective() -> Any:
    first, second = torch.ones(3), torch.ones(2)

    def then(_: Any) -> torch.Tensor:
        dist.all_reduce(second)
        return second

    work = dist.all_reduce(first, async_op=True)
    return numbers([first if work is None else work.get_future().then(then).wait()])


@program
def dropped_work() -> Any:
    # Only C++ holds the work.
    x = torch.ones(4)
    torch._C._distributed_c10d._register_work(x, dist.all_reduce(x, async_op=True))
    return numbers([torch.ops._c10d_functional.wait_tensor(x)])


@program
def storages_stay_resizable() -> Any:
    sizes = []
    x, y = torch.ones(4), torch.ones(4 * dist.get_world_size())
    dist.all_reduce(x)
    dist.all_gather_into_tensor(y, x)
    for tensor in (x, y):
        tensor.untyped_storage().resize_(0)
        sizes.append(tensor.untyped_storage().nbytes())
    return sizes


@program
def shapes_of_one_size() -> Any:
    """torch asks for equally many elements, not for equal shapes."""
    rank, size = rank_and_size()
    shape = (2, 2) if rank == 1 else (4,)
    everywhere, summed, at_root = (torch.arange(4.0).reshape(shape) + rank for _ in range(3))
    dist.broadcast(everywhere, 0)
    dist.all_reduce(summed)
    dist.reduce(at_root, 0)
    if rank != 0:
        at_root.zero_()
    outputs = [torch.zeros(shape) for _ in range(size)]
    dist.all_gather(outputs, torch.full(shape, float(rank)))
    own = torch.zeros(shape)
    parts = [torch.full((4,), float(number)) for number in range(size)] if rank == 0 else None
    dist.scatter(own, parts)
    return [tensor.tolist() for tensor in (everywhere, summed, at_root, *outputs, own)]


@program
def one_element_views() -> Any:
    made = []
    for size in (1, 3):
        m = torch.full((1, 4), float(dist.get_rank() + 1))
        column = m[:, size]
        dist.all_reduce(column)
        dist.broadcast(m[:, 0], 1)
        parts = [torch.zeros(1, 4)[:, 2] for _ in range(dist.get_world_size())]
        dist.all_gather(parts, column)
        made += [m, *parts]
    return numbers(made)


@program
def late_rank_at_a_barrier() -> Any:
    group = dist.new_group(timeout=datetime.timedelta(seconds=1), backend=dist.get_backend())
    store = dist.distributed_c10d._get_default_store()
    how = None
    if dist.get_rank() != 0:
        how = failure(lambda: dist.barrier(group), RuntimeError)
        store.add("waited", 1)
    else:
        while store.add("waited", 0) < dist.get_world_size() - 1:
            pass
    return None if how is None else how[0]


@program
def monitored_barrier() -> Any:
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    store = dist.distributed_c10d._get_default_store()
    found = None
    if dist.get_rank() == 1:
        while store.add("found", 0) == 0:
            pass
        return found
    try:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=1), wait_all_ranks=True)
    except RuntimeError as error:
        found = "failed to pass monitoredBarrier" in str(error) and "1" in str(error)
        if dist.get_rank() == 0:
            store.add("found", 1)
            return found
        found = "successfully reached monitoredBarrier" in str(error)
    return found


@program
def models_that_differ() -> Any:
    try:
        DDP(model(8 + dist.get_rank()))
    except RuntimeError as error:
        return "appears not to match" in str(error) or "verif" in str(error)
    return None


@program
def profiler() -> Any:
    x = torch.ones(3)
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(x)
        dist.broadcast(torch.ones(2, 2), 0)
        dist.all_gather([torch.empty(3) for _ in range(dist.get_world_size())], x)
        dist.barrier()
        dist.all_reduce(torch.ones(5), async_op=True).wait()
    name = dist.get_backend()
    events = [e for e in profile.events() if e.name.startswith(f"{name}:")]
    found = [[e.name.partition(":")[2], str(e.input_shapes)] for e in events]
    return sorted(found)


@program
def compiled_ddp() -> Any:
    return train(torch.compile(DDP(model()), backend="eager"))


@program
def compiled_collectives() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        z = y + 1
        dist.broadcast(z, 0)
        dist.barrier()
        work = dist.all_reduce(z, async_op=True)
        work.wait()
        dist.reduce(z, 0)
        if rank == 0:
            dist.send(z, 1)
        elif rank == 1:
            dist.recv(z, 0)
        return z + size

    return numbers([torch.compile(body, backend="eager")(torch.full((2,), rank + 1.0))])


@program
def every_public_call() -> Any:
    return torch_calls.all_of_them()


def die_in_call(number: int) -> None:
    """Kills this process when it makes its collective of that number, counted over all groups."""
    from pccl.adapters.torch import process_group

    made = 0
    run = process_group.ProcessGroup._run

    def dying(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal made
        made += 1
        if made == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, *given, **named)

    process_group.ProcessGroup._run = dying  # type: ignore[method-assign]


def run(name: str, backend: str) -> None:
    """Runs one program in the group that RANK, SIZE and STORE describe."""
    if backend == "pccl":
        import pccl.adapters.torch  # noqa: F401  # registers it

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, size = rank_and_size()
    dist.init_process_group(
        backend, store=store(), rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    if "DIES_IN_CALL" in os.environ:
        die_in_call(int(os.environ["DIES_IN_CALL"]))
    print(json.dumps(PROGRAMS[name]()), flush=True)
    dist.destroy_process_group()
