"""Calls with tensors and arrays on a CUDA device, whose streams are busy."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from members import members, results

import pccl
from pccl.reduce import pieces
from programs.peer import say, start
from programs.torch_device import same

Comm = pccl.Communicator
COUNT = 1 << 20
BUSY = 100_000_000  # cycles: some 50 ms


def busy() -> None:
    """Keeps the current stream busy, so that what follows on it is late."""
    torch.cuda._sleep(BUSY)


def late(value: float, count: int = COUNT) -> torch.Tensor:
    """A tensor whose elements are written after that time. Before that it has others."""
    made = torch.full((count,), -1e6, device="cuda")
    torch.cuda.synchronize()
    busy()
    made.fill_(value)
    return made


def order() -> None:
    """Inputs are read after the work before the call, and written before the work after it."""
    with members(2) as comms:
        for size in (1 << 20, 32 << 20):
            pieces.PIECE_BYTES = size
            for stream in (None, torch.cuda.Stream()):
                with torch.cuda.stream(stream):
                    new_results(comms)
                    results_in_place(comms)
                    results_at_once(comms)
                    results_later(comms)
                    awaited_results(comms)
                    memory_of_busy_work(comms)


def on_this_stream(comms: list[Comm], call: Any) -> list[Any]:
    """Returns what each member returns. Each thread has the caller's stream as its current one."""
    stream = torch.cuda.current_stream()

    def with_stream(rank: int, comm: Comm) -> Any:
        with torch.cuda.stream(stream):
            return call(rank, comm)

    return results(comms, with_stream)


def new_results(comms: list[Comm]) -> None:
    def call(rank: int, comm: Comm) -> Any:
        return pccl.allreduce(late(rank + 1.0), comm=comm) * 2

    for made in on_this_stream(comms, call):
        same(made, torch.full((COUNT,), 6.0), "cuda")


def results_in_place(comms: list[Comm]) -> None:
    """Work on `out` from before the call reads its old elements."""

    def call(rank: int, comm: Comm) -> Any:
        out = torch.full((COUNT,), 7.0, device="cuda")
        x = late(rank + 1.0)
        busy()
        before = out.clone()
        pccl.allreduce(x, out=out, comm=comm)
        return before, out + 1

    for before, out in on_this_stream(comms, call):
        same(before, torch.full((COUNT,), 7.0), "cuda")
        same(out, torch.full((COUNT,), 4.0), "cuda")


def results_at_once(comms: list[Comm]) -> None:
    """The other calls."""

    def call(rank: int, comm: Comm) -> Any:
        x = late(rank + 1.0)
        root = late(rank + 1.0)
        received = torch.zeros(COUNT, device="cuda")
        comm.all_reduce(late(rank + 1.0), received, op=pccl.ReduceOp.SUM)
        return (
            pccl.allgather(x, comm=comm).sum(0),
            pccl.broadcast(root, root=1, comm=comm) + 1,
            received * 1,
            pccl.reduce_scatter(late(rank + 1.0), comm=comm).repeat(2),
            pccl.alltoall(late(rank + 1.0), comm=comm).reshape(2, -1).sum(0).repeat(2),
        )

    for sums in on_this_stream(comms, call):
        for made in sums:
            same(made, torch.full((COUNT,), 3.0), "cuda")


def results_later(comms: list[Comm]) -> None:
    def call(rank: int, comm: Comm) -> Any:
        outs = [torch.zeros(COUNT, device="cuda") for _ in range(3)]
        works = [
            pccl.allreduce_async(late(rank + k + 1.0), out=outs[k], comm=comm) for k in range(3)
        ]
        busy()
        return [work.wait() + 0 for work in works]

    for sums in on_this_stream(comms, call):
        for k, made in enumerate(sums):
            same(made, torch.full((COUNT,), 2.0 * k + 3), "cuda")


def awaited_results(comms: list[Comm]) -> None:
    def call(rank: int, comm: Comm) -> Any:
        async def wait() -> torch.Tensor:
            return await pccl.allreduce_async(late(rank + 1.0), out=late(0), comm=comm) + 0

        return asyncio.run(wait())

    for made in on_this_stream(comms, call):
        same(made, torch.full((COUNT,), 3.0), "cuda")


def memory_of_busy_work(comms: list[Comm]) -> None:
    """Results are not written to memory that work before the call still reads."""

    def call(rank: int, comm: Comm) -> Any:
        x = torch.full((COUNT,), rank + 1.0, device="cuda")
        old = torch.full((COUNT,), 9.0, device="cuda")
        busy()
        kept = old.clone()  # late; then `old` goes back to the allocator
        del old
        return pccl.allreduce(x, comm=comm), kept

    for made, kept in on_this_stream(comms, call):
        same(kept, torch.full((COUNT,), 9.0), "cuda")
        same(made, torch.full((COUNT,), 3.0), "cuda")


def reduced(comms: list[Comm], inputs: list[Any], **options: Any) -> list[Any]:
    """Returns each member's result."""
    return results(comms, lambda i, comm: pccl.allreduce(inputs[i], comm=comm, **options))


def bytes_of_all_types() -> None:
    """The results have the bytes of those in CPU memory, whole and in pieces."""
    generator = torch.Generator().manual_seed(5)
    with members(2) as comms:
        for code in pccl.DataType:
            dtype = getattr(torch, code.name.lower(), None)
            if dtype is None or dtype in (torch.uint16, torch.uint32, torch.uint64):
                continue
            count = 100_003
            raw = torch.randint(0, 256, (2, count * dtype.itemsize), generator=generator)
            if dtype == torch.bool:
                raw &= 1
            inputs = [row.to(torch.uint8).view(dtype) for row in raw]
            op = "max" if dtype == torch.bool else "sum"
            if dtype.is_floating_point or dtype.is_complex:
                wide = torch.randn(2, count, generator=generator)
                inputs = [row.to(dtype) for row in wide]
            wanted = reduced(comms, inputs, op=op)
            for size in (4096, 32 << 20):
                pieces.PIECE_BYTES = size
                made = reduced(comms, [x.cuda() for x in inputs], op=op)
                for a, b in zip(wanted, made, strict=True):
                    assert b.device.type == "cuda" and b.dtype == dtype
                    assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8)), dtype


def codes() -> None:
    """Quantized and weighted results are equal on all members, and near the exact ones."""
    pieces.PIECE_BYTES = 1 << 20
    torch.manual_seed(3)
    inputs = [torch.randn(600_000) for _ in range(2)]
    with members(2) as comms:
        several: list[dict[str, Any]] = [
            {"quantize": "int8"},
            {"quantize": "int4"},
            {"op": "avg", "weight": 2.5},
        ]
        for options in several:
            made = reduced(comms, [x.cuda() for x in inputs], **options)
            assert torch.equal(made[0], made[1])
            exact = (inputs[0] + inputs[1]).cuda() / (2 if "op" in options else 1)
            assert (made[0] - exact).abs().mean() < 0.2


def memory() -> None:
    """Calls keep no memory on the device, and pinned memory is used again."""
    with members(2) as comms:
        tensors = [torch.ones(20 << 20, device="cuda") for _ in range(2)]

        def call(rank: int, comm: Comm) -> None:
            for _ in range(5):
                pccl.allreduce(tensors[rank], comm=comm)
            pccl.allreduce_async(tensors[rank], comm=comm).wait()

        results(comms, call)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        pinned = pinned_bytes()
        assert pinned > 0
        for _ in range(8):
            results(comms, call)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        # A block is free again once torch has seen its copy's event, so some more may be in use.
        assert pinned_bytes() <= 2 * pinned, (pinned_bytes(), pinned)


def pinned_bytes() -> int:
    """Pinned memory that torch holds, in use or not."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def threads() -> None:
    """Threads with tags of their own, on streams of their own."""
    with members(2) as comms:

        def call(rank: int, comm: Comm) -> Any:
            made: list[Any] = [None] * 3

            def work(tag: int) -> None:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for step in range(5):
                        x = late(rank + 10.0 * tag + step, 1000)
                        made[tag] = pccl.allreduce(x, tag=tag + 1, comm=comm)
                    torch.cuda.current_stream().synchronize()

            working = [threading.Thread(target=work, args=(tag,)) for tag in range(3)]
            for thread in working:
                thread.start()
            for thread in working:
                thread.join()
            return made

        for sums in results(comms, call):
            for tag, made in enumerate(sums):
                same(made, torch.full((1000,), 20.0 * tag + 9), "cuda")


def jax_arrays() -> None:
    """JAX arrays on the GPU, alone and beside others."""
    import jax
    import jax.numpy as jnp

    gpu = jax.devices("gpu")[0]
    with members(2) as comms:

        def call(rank: int, comm: Comm) -> Any:
            tree = {
                "j": jax.device_put(jnp.arange(1000.0) + rank, gpu),
                "h": jax.device_put(jnp.full(7, rank + 1, jnp.bfloat16), gpu),
                "t": torch.full((5,), rank + 1.0, device="cuda"),
                "n": np.full(3, rank),
            }
            made = pccl.allreduce(tree, comm=comm)
            gathered = pccl.allgather(tree["j"], comm=comm)
            sent = pccl.broadcast(tree["j"], root=1, comm=comm)
            state = pccl.sync({"w": tree["j"] * (rank + 1)}, comm=comm)
            work = pccl.allreduce_async(tree["j"], "avg", comm=comm)
            return made, gathered, sent, state, work.wait()

        x = np.arange(1000.0, dtype=np.float32)
        for made, gathered, sent, state, mean in results(comms, call):
            for array in (made["j"], made["h"], gathered, sent, state["w"], mean):
                assert isinstance(array, jax.Array) and array.devices() == {gpu}, array
            np.testing.assert_array_equal(made["j"], 2 * x + 1)
            np.testing.assert_array_equal(made["h"].astype(np.float32), np.full(7, 3.0))
            same(made["t"], torch.full((5,), 3.0), "cuda")
            np.testing.assert_array_equal(gathered, [x, x + 1])
            np.testing.assert_array_equal(sent, x + 1)
            np.testing.assert_array_equal(state["w"], x)
            np.testing.assert_array_equal(mean, x + 0.5)


def cupy_arrays() -> None:
    """Every call with CuPy arrays, also while their stream is busy."""
    from programs import cupy_arrays

    cupy_arrays.calls()
    cupy_arrays.order()


def train() -> None:
    """A rank of DDP and of FSDP2 over the backend "pccl", on the device."""
    from programs.torch_job import begin

    rank, size = begin()
    torch.cuda.set_device(0)
    losses = {"ddp": train_ddp(rank), "fsdp": train_fsdp(rank)}
    dist.destroy_process_group()
    say(event="done", rank=rank, size=size, **losses)


def side_stream() -> None:
    """A rank whose asynchronous collectives follow the work of a stream that is not the default."""
    from programs.torch_job import begin

    rank, size = begin()
    torch.cuda.set_device(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        received = late(7.0 if rank == 0 else -1.0)
        dist.broadcast(received, 0, async_op=True).wait()
        same(received + 0, torch.full((COUNT,), 7.0), "cuda")
        columns = late(rank + 1.0).view(1024, -1).T
        dist.all_reduce(columns, async_op=True).wait()
        same(columns + 0, torch.full(columns.shape, 3.0), "cuda")
    dist.destroy_process_group()
    say(event="done", rank=rank, size=size)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 64, generator=generator).cuda()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)]
    return torch.nn.Sequential(*layers).cuda()


def run_steps(net: torch.nn.Module, rank: int) -> list[float]:
    """The sum of all ranks' losses, step by step."""
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    told = []
    for step in range(10):
        x = batch(rank, step)
        loss = (net(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        told.append(float(total))
    return told


def train_ddp(rank: int) -> list[float]:
    net = torch.nn.parallel.DistributedDataParallel(model(), device_ids=[0])
    return run_steps(net, rank)


def train_fsdp(rank: int) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    net = model()
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return run_steps(fully_shard(net, mesh=mesh), rank)


def lose_a_member() -> None:
    """Reduces until a member is gone. A sum is over the same members in all its pieces."""
    pieces.PIECE_BYTES = 1 << 20
    comm = start(min_peers=3)
    tensor = torch.full((8 << 20,), 1.0, device="cuda")
    left = None
    for step in range(10_000):
        made, info = pccl.allreduce(tensor, return_info=True, comm=comm)
        low, high = made.aminmax()
        assert low == high == len(info.contributors), (step, low, high, info)
        if step == 2:
            say(event="going")
        if len(info.contributors) == 2:
            left = step if left is None else left
            if step > left + 5:
                break
    say(event="done", members=len(info.contributors))


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    globals()[sys.argv[1]]()
