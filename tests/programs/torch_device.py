"""Every call with torch tensors that are not in CPU memory: on the device DEVICE, or "pretend".

cpp/tests/torch_device/pretend.cpp is that device, and PRETEND the library made of it. To torch it
is an accelerator like any other that a package registers.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from members import members, results

import pccl
from pccl.reduce import pieces
from programs.peer import say

FORKED = True  # workers.start: its processes have imported torch already

Comm = pccl.Communicator
DEVICE = os.environ.get("DEVICE", "pretend")


def load_device() -> None:
    """Makes the device known to torch."""
    torch.set_num_threads(1)
    if DEVICE != "pretend":
        return
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch.ops.load_library(os.environ["PRETEND"])
    module: Any = types.ModuleType(f"torch.{DEVICE}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module(DEVICE, module)


@contextmanager
def pair() -> Iterator[list[Comm]]:
    """Two members in this process."""
    load_device()
    with members(2) as comms:
        yield comms


def there(value: Any, dtype: Any = None) -> Any:
    """A tensor on the device."""
    return torch.as_tensor(value, dtype=dtype).to(DEVICE)


@contextmanager
def raises(kind: type[Exception], words: str) -> Iterator[None]:
    """Refuses code that does not raise such an error with these words."""
    try:
        yield
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def same(made: Any, wanted: Any, device: str = DEVICE) -> None:
    """Refuses other elements, another dtype or another device."""
    assert made.device.type == device, made.device
    wanted = torch.as_tensor(wanted)
    assert made.dtype == wanted.dtype and torch.equal(made.cpu(), wanted), (made.cpu(), wanted)


def allreduce() -> None:
    """In one piece, in several, written to `out`, and weighted."""
    with pair() as comms:
        for size in (256, 32 << 20):
            pieces.PIECE_BYTES = size
            reduce_a_tree(comms)
            reduce_in_place(comms)
            reduce_weighted(comms)


def reduce_a_tree(comms: list[Comm]) -> None:
    def call(rank: int, comm: Comm) -> Any:
        tree = {
            "w": there(torch.arange(300.0).reshape(20, 15).t() + rank),
            "h": there(torch.full((7,), rank + 1), torch.bfloat16),
            "z": there(torch.full((70,), 1 + 2j * rank)),
            "zz": there(torch.full((71,), 1 + 2j * rank, dtype=torch.complex128)),
            "f8": there(torch.full((9,), rank + 1.0), torch.float32).to(torch.float8_e5m2),
            "n": np.full(100, rank),
            "c": torch.full((3,), rank),
        }
        return pccl.allreduce(tree, comm=comm)

    for made in results(comms, call):
        same(made["w"], 2 * torch.arange(300.0).reshape(20, 15).t() + 1)
        same(made["h"], torch.full((7,), 3, dtype=torch.bfloat16))
        same(made["z"], torch.full((70,), 2 + 2j))
        same(made["zz"], torch.full((71,), 2 + 2j, dtype=torch.complex128))
        same(made["f8"].to(torch.float32), torch.full((9,), 3.0))
        same(made["c"], torch.ones(3, dtype=torch.int64), "cpu")
        assert (made["n"] == 1).all()


def reduce_in_place(comms: list[Comm]) -> None:
    tensors = [there(torch.full((4, 50), 1.0 + rank)) for rank in range(2)]
    before = [tensor.data_ptr() for tensor in tensors]
    out = results(comms, lambda i, comm: pccl.allreduce(tensors[i], out=tensors[i], comm=comm))
    for made, tensor, address in zip(out, tensors, before, strict=True):
        assert made is tensor and tensor.data_ptr() == address
        same(tensor, torch.full((4, 50), 3.0))


def reduce_weighted(comms: list[Comm]) -> None:
    def call(rank: int, comm: Comm) -> Any:
        x = there(torch.full((100,), float(rank)))
        return pccl.allreduce(x, "avg", weight=1 + 2 * rank, comm=comm)

    for made in results(comms, call):
        same(made, torch.full((100,), 0.75))


def allreduce_async() -> None:
    """Starts calls, and waits for them in another order."""
    with pair() as comms:
        tensors = [[there(torch.full((1000,), 10.0**k + i)) for k in range(3)] for i in range(2)]
        outs = [there(torch.zeros(1000)) for _ in range(2)]

        def call(i: int, comm: Comm) -> list[Any]:
            works = [pccl.allreduce_async(tensor, comm=comm) for tensor in tensors[i]]
            works.append(pccl.allreduce_async(tensors[i][0].cpu(), comm=comm))
            into = pccl.allreduce_async({"x": tensors[i][1]}, out={"x": outs[i]}, comm=comm)
            assert into.wait()["x"] is outs[i]
            return [work.wait() for work in reversed(works)][::-1]

        for comm in comms:
            with raises(pccl.InvalidArgument, "out['x']: its elements share memory"):
                wide = there(torch.zeros(1)).expand(1000)
                pccl.allreduce_async({"x": tensors[0][0]}, out={"x": wide}, comm=comm)
            with raises(pccl.InvalidArgument, "out: its elements share memory"):
                pccl.allreduce(tensors[0][0], out=wide, comm=comm)
        for made, out in zip(results(comms, call), outs, strict=True):
            for k in range(3):
                same(made[k], torch.full((1000,), 2 * 10.0**k + 1))
            same(made[3], torch.full((1000,), 3.0), "cpu")
            same(out, torch.full((1000,), 21.0))


def collectives() -> None:
    """Calls `broadcast`, `allgather` and `reduce_scatter`, with and without `out`."""
    with pair() as comms:
        rows = [torch.arange(6.0) + 10 * rank for rank in range(2)]
        outs = [
            {"b": there(torch.zeros(6)), "g": there(torch.zeros(2, 6)), "s": there(torch.zeros(3))}
            for _ in range(2)
        ]

        def call(i: int, comm: Comm) -> tuple[list[Any], list[Any]]:
            x, out = there(rows[i]), outs[i]
            return [
                pccl.broadcast(x, root=1, comm=comm),
                pccl.allgather(x, comm=comm),
                pccl.reduce_scatter(x, comm=comm),
            ], [
                pccl.broadcast(x, root=1, out=out["b"], comm=comm),
                pccl.allgather(x, out=out["g"], comm=comm),
                pccl.reduce_scatter(x, "max", out=out["s"], comm=comm),
            ]

        total = rows[0] + rows[1]
        for i, (made, written) in enumerate(results(comms, call)):
            part = slice(3 * i, 3 * i + 3)
            for result in (made, written):
                same(result[0], rows[1])
                same(result[1], torch.stack(rows))
            same(made[2], total[part])
            same(written[2], rows[1][part])
            assert all(a is b for a, b in zip(written, outs[i].values(), strict=True))


def explicit() -> None:
    """Calls the explicit API."""
    with pair() as comms:
        outs = [there(torch.zeros(4)) for _ in range(2)]
        sent = [there(torch.full((3, 2), float(i))).t() for i in range(2)]
        gathered = [there(torch.zeros(2, 2, 3)) for _ in range(2)]

        def call(i: int, comm: Comm) -> None:
            comm.all_reduce(there(torch.ones(4)), outs[i], op=pccl.ReduceOp.SUM)
            comm.broadcast(sent[i], root=1)
            comm.all_gather(sent[i], gathered[i])
            with raises(pccl.InvalidArgument, "recv: its elements share memory"):
                wide = there(torch.zeros(1)).expand(4)
                comm.all_reduce(there(torch.ones(4)), wide, op=pccl.ReduceOp.SUM)

        results(comms, call)
        for out, told, all_of_them in zip(outs, sent, gathered, strict=True):
            same(out, torch.full((4,), 2.0))
            same(told, torch.ones(2, 3))
            same(all_of_them, torch.ones(2, 2, 3))


def shared_state() -> None:
    """A model and its optimizer go from one member to the other, and to a file and back."""
    with pair() as comms:
        models = []
        for rank in range(2):
            torch.manual_seed(rank)
            net = torch.nn.Linear(30, 20).to(DEVICE)
            optimizer = torch.optim.AdamW(net.parameters())
            net(torch.ones(2, 30, device=DEVICE)).sum().backward()
            optimizer.step()
            models.append({"model": net, "optimizer": optimizer, "step": 7 * (1 - rank)})
        wanted = models[0]["model"].weight.detach().cpu().clone()
        states = results(comms, lambda i, comm: pccl.sync(models[i], comm=comm))
        for state, given in zip(states, models, strict=True):
            assert state["model"] is given["model"] and state["step"] == 7
            same(state["model"].weight.detach(), wanted)
            moments = state["optimizer"].state[state["model"].weight]["exp_avg"]
            assert moments.device.type == DEVICE
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            pccl.checkpoint.save(path, models[0], revision=3)
            with torch.no_grad():
                models[1]["model"].weight.zero_()
            pccl.checkpoint.load(path, models[1])
            same(models[1]["model"].weight.detach(), wanted)


def diloco() -> None:
    """Trains as a model in CPU memory does."""
    from pccl.adapters.torch import DiLoCo

    def train(comms: list[Comm], device: str, options: dict[str, Any]) -> list[Any]:
        def call(rank: int, comm: Comm) -> Any:
            net = nets[rank]
            inner = torch.optim.SGD(net.parameters(), 0.1)
            wrapped = DiLoCo(net, inner, sync_every=2, comm=comm, **options)
            for step in range(8):
                x = torch.linspace(-1, 1 + rank + step, 12).reshape(4, 3).to(device)
                net(x).pow(2).sum().backward()
                inner.step()
                inner.zero_grad()
                wrapped.step()
            wrapped.finish()
            return [parameter.detach() for parameter in net.parameters()]

        nets = []
        for _ in range(2):
            torch.manual_seed(1)
            nets.append(torch.nn.Linear(3, 2).to(device))
        return results(comms, call)

    with pair() as comms:
        for options in ({}, {"quantize": "int8"}, {"mode": "async"}, {"mode": "streaming"}):
            here, away = (train(comms, device, options) for device in ("cpu", DEVICE))
            for ours, theirs in zip(here[0], away[0], strict=True):
                assert theirs.device.type == DEVICE
                np.testing.assert_allclose(theirs.cpu(), ours, rtol=1e-5)
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*away, strict=True))


def ddp_hook() -> None:
    """Averages the gradients of DDP."""
    from pccl.adapters.torch import DDPState, ddp_hook

    load_device()
    with members(2) as comms:
        state = [DDPState(comm) for comm in comms]
        trees = [{"parameters 0": there(torch.full((9,), float(i)))} for i in range(2)]

        class Bucket:
            """The part of a GradBucket that the hook asks for."""

            def __init__(self, rank: int) -> None:
                self._tensor = trees[rank]["parameters 0"]

            def parameters(self) -> list[Any]:
                return [self._tensor]

            def gradients(self) -> list[Any]:
                return [self._tensor]

            def buffer(self) -> Any:
                return self._tensor

            def is_last(self) -> bool:
                return True

        buckets: list[Any] = [Bucket(rank) for rank in range(2)]
        for _ in range(2):  # the first step is reduced as a whole
            for made in results(comms, lambda i, _: ddp_hook(state[i], buckets[i]).wait()):
                same(made, torch.full((9,), 0.5))


def backend() -> None:
    """A rank of a torch job whose tensors are on the device: collectives, messages, DDP."""
    load_device()
    from programs.torch_job import begin

    rank, size = begin()
    x = there(torch.arange(4.0) + rank)
    dist.all_reduce(x)
    same(x, size * torch.arange(4.0) + sum(range(size)))
    gathered = [there(torch.zeros(2)) for _ in range(size)]
    dist.all_gather(gathered, there(torch.full((2,), float(rank))))
    for index, made in enumerate(gathered):
        same(made, torch.full((2,), float(index)))
    part = there(torch.zeros(3))
    dist.reduce_scatter_tensor(part, there(torch.arange(3.0 * size)))
    same(part, size * torch.arange(3.0 * size)[3 * rank : 3 * rank + 3])
    swapped = there(torch.zeros(size))
    dist.all_to_all_single(swapped, there(torch.full((size,), float(rank))))
    same(swapped, torch.arange(float(size)))
    message = there(torch.zeros(5))
    if rank == 0:
        dist.send(there(torch.ones(5)), 1)
    elif rank == 1:
        dist.recv(message, 0)
        same(message, torch.ones(5))
    torch.manual_seed(rank)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2).to(DEVICE))
    net(there(torch.full((4, 3), float(rank)))).sum().backward()
    same(net.module.weight.grad, torch.full((2, 3), 4 * (size - 1) / 2))
    dist.destroy_process_group()
    say(event="done")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
