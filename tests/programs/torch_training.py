"""Training on torch.distributed with the backend "pccl": DDP, FSDP2, DTensor and the hook."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

import pccl
from programs.peer import hear, say, start
from programs.torch_job import (
    alone,
    batch,
    be_strict,
    begin,
    failure,
    flat,
    model,
    rank_and_size,
    same_everywhere,
    store,
    train,
)

FORKED = True  # workers.start: its processes have imported torch already


def ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    rank, size = begin()
    # Small buckets, so that several are reduced during backward. Each rank begins with other
    # weights, before DDP shares them.
    net = DistributedDataParallel(model(seed=rank), bucket_cap_mb=0.002)
    trained = flat(train(net, rank, size))
    say(
        event="done",
        near=torch.allclose(trained, alone(), atol=1e-5),
        same=same_everywhere(trained),
    )
    # Without destroy_process_group, as many programs end.


class Turns(torch.nn.Module):  # type: ignore[misc]
    """A module with complex and real parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(2, 5, generator=generator, dtype=torch.complex64)
        self.turn = torch.nn.Parameter(values[0])
        self.scale = torch.nn.Parameter(values[1].real.contiguous())

    def forward(self, x: Any) -> Any:
        return (x * self.turn * self.scale).abs().pow(2).sum()


def complex_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    rank, size = begin()
    inputs = [torch.arange(5.0) * (1 + 1j * number) for number in range(size)]
    net = DistributedDataParallel(Turns(seed=rank))
    net(inputs[rank]).backward()
    alone = Turns(seed=0)
    (sum(map(alone, inputs)) / size).backward()
    pairs = list(zip(net.module.parameters(), alone.parameters(), strict=True))
    say(
        event="done",
        near=all(torch.allclose(a.grad, b.grad, atol=1e-4) for a, b in pairs),
        complex=[a.grad.is_complex() for a, _ in pairs],
    )


def fully_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = begin()
    net = model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    trained = flat(train(net, rank, size))
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    near = torch.allclose(trained, alone(), atol=1e-5)
    say(event="done", near=near, same=same_everywhere(trained), norm=norm.full_tensor().item() > 0)
    dist.destroy_process_group()


def hybrid_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = begin("gloo")
    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": "pccl", "shard": "gloo"},
    )
    backends = [dist.get_backend(mesh.get_group(name)) for name in ("replicate", "shard")]
    net = model()
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    trained = flat(train(net, rank, size))
    near = torch.allclose(trained, alone(), atol=1e-5)
    say(event="done", near=near, same=same_everywhere(trained), backends=backends)
    dist.destroy_process_group()


def dtensors() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    _, size = begin()
    wrong = []
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(12.0).reshape(4, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    if not torch.equal(sharded.full_tensor(), whole):
        wrong.append("full_tensor")
    product = sharded @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])
    if not torch.equal(product.full_tensor(), whole @ whole.T):
        wrong.append("matmul")
    if sharded.sum().full_tensor() != whole.sum():
        wrong.append("sum")
    state = {"w": sharded, "step": 7, "net": model().state_dict()}
    dcp.save(state, checkpoint_id=os.environ["FOLDER"])
    empty = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    loaded = {"w": empty, "step": 0, "net": model(1).state_dict()}
    dcp.load(loaded, checkpoint_id=os.environ["FOLDER"])
    if not torch.equal(loaded["w"].full_tensor(), whole) or loaded["step"] != 7:
        wrong.append("checkpoint")
    if not torch.equal(loaded["net"]["0.weight"], model()[0].weight):
        wrong.append("module")
    dist.destroy_process_group()
    say(event="done", wrong=wrong)


def loss_in_backward(hook: str | None) -> None:
    """`hook`: one of `BuiltinCommHookType`."""
    from torch.nn.parallel import DistributedDataParallel

    rank, size = begin()
    net = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    if hook is not None:
        net._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))
    x, y = batch(0, rank, size)
    torch.nn.functional.mse_loss(net(x), y).backward()
    loss = torch.nn.functional.mse_loss(net(x), y)
    say(event="ready")
    if rank == 1:
        hear()
    say(event="done", backward=failure(loss.backward), later=failure(dist.barrier))


def hook_of_which_one_dies() -> None:
    from torch.nn.parallel import DistributedDataParallel

    from pccl.adapters.torch import DDPState, ddp_hook

    start()
    rank = pccl.rank()
    be_strict()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    state = DDPState()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = 0
    begun: list[Any] = []

    # Without annotations: torch would compare them with its own types.
    def dying(state, bucket):  # type: ignore[no-untyped-def]
        # The third step's first bucket is reduced over all, its last one without this peer.
        if step == 2 and bucket.is_last():
            begun[0].wait()
            os.kill(os.getpid(), signal.SIGKILL)
        future = ddp_hook(state, bucket)
        begun[:] = state._works
        return future

    net.register_comm_hook(state, dying if rank == 2 else ddp_hook)
    counts, single = [], model()
    for step in range(4):
        x, y = batch(step, rank, 3)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        assert state.info is not None
        counts.append(len(state.info.contributors))

    # The same in one process: three parts of the batch, then two.
    of_single = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(4):
        of_single.zero_grad()
        for part in range(counts[step]):
            x, y = batch(step, part, 3)
            (torch.nn.functional.mse_loss(single(x), y) / counts[step]).backward()
        of_single.step()
    near = torch.allclose(flat(net), flat(single), atol=1e-6)
    say(
        event="done",
        counts=counts,
        reruns=state.reruns,
        near=near,
        weights=flat(net).double().sum().item(),
    )


def hook_with_a_newcomer() -> None:
    """Trains step by step, as told. Four layers of one shape, in several buckets."""
    from torch.nn.parallel import DistributedDataParallel

    from pccl.adapters.torch import DDPState, ddp_hook

    start()
    be_strict()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    net = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.0006)
    buckets: list[list[int]] = []  # of each step

    # Without annotations: torch would compare them with its own types.
    def counting(state, bucket):  # type: ignore[no-untyped-def]
        future = ddp_hook(state, bucket)
        buckets[-1].append(len(bucket.gradients()))
        return future

    state = DDPState()
    net.register_comm_hook(state, counting)
    run = {"model": net.module, "step": 0}
    counts: list[int] = []
    torch.seed()
    while True:
        say(event="ready", world=pccl.world_size())
        ended = hear() == "end"
        if pccl.admit():
            run = pccl.sync(run)
        if ended:
            break
        net.zero_grad()
        buckets.append([])
        net(torch.randn(4, 8)).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
        run["step"] += 1
        assert state.info is not None
        counts.append(len(state.info.contributors))
    digest = hashlib.sha256(flat(net).numpy().tobytes()).hexdigest()
    say(event="done", weights=digest, counts=counts, buckets=buckets)


def hook_after_a_shutdown() -> None:
    from torch.nn.parallel import DistributedDataParallel

    from pccl.adapters.torch import DDPState, ddp_hook

    start()
    be_strict()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    state = DDPState()
    net.register_comm_hook(state, ddp_hook)
    x, y = batch(0, 0, 1)
    torch.nn.functional.mse_loss(net(x), y).backward()
    pccl.shutdown()
    error = failure(torch.nn.functional.mse_loss(net(x), y).backward)
    say(event="done", error=error)


def run_shown(example: str) -> None:
    """Runs a program of the documentation. torchrun would need a port."""
    be_strict()
    rank, size = rank_and_size()
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    rendezvous._rendezvous_handlers["env"] = lambda url, **_: iter([(store(), rank, size)])
    shown: list[Any] = []
    exec(example, {"print": shown.append})
    say(event="done", gradient=shown[0].tolist())
