"""Every call with torch tensors that are not in CPU memory: on the device DEVICE, or "pretend".

cpp/tests/torch_device/pretend.cpp is that device, and PRETEND the library made of it. To torch it
is an accelerator like any other that a package registers.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from members import members, results

import pccl
from pccl.reduce import pieces
from programs.peer import say, start

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


def quantized() -> None:
    """With fewer bits, each in one piece: the same bytes as of tensors in CPU memory."""
    os.environ["PCCL_SHM"] = "0"  # members that share memory send whole elements
    with pair() as comms:
        for coding in ("int8", "int4", "float8"):
            for dtype in (torch.float32, torch.bfloat16):
                x = [torch.sin(torch.arange(3000.0) * (i + 1)).to(dtype) for i in range(2)]

                def call(i: int, comm: Comm, x: Any = x, coding: str = coding) -> Any:
                    away, here = (
                        pccl.allreduce(one, "avg", quantize=coding, comm=comm)
                        for one in (there(x[i]), x[i])
                    )
                    return away, here

                for away, here in results(comms, call):
                    same(away, here)
                    assert not torch.equal(here, (x[0] + x[1]) / 2)


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
    """All other calls, with and without `out`, and with trees that mix devices."""
    with pair() as comms:
        rows = [torch.arange(6.0) + 10 * rank for rank in range(2)]
        outs = [
            {
                "b": there(torch.zeros(6)),
                "g": there(torch.zeros(2, 6)),
                "s": there(torch.zeros(3)),
                "a": there(torch.zeros(6)),
            }
            for _ in range(2)
        ]

        def call(i: int, comm: Comm) -> tuple[list[Any], list[Any]]:
            x, out = there(rows[i]), outs[i]
            work = pccl.allgather_async({"x": x}, comm=comm)
            return [
                pccl.broadcast(x, root=1, comm=comm),
                pccl.allgather(x, comm=comm),
                pccl.reduce_scatter(x, comm=comm),
                pccl.alltoall(x, comm=comm),
                work.wait()["x"],
            ], [
                pccl.broadcast(x, root=1, out=out["b"], comm=comm),
                pccl.allgather(x, out=out["g"], comm=comm),
                pccl.reduce_scatter(x, "max", out=out["s"], comm=comm),
                pccl.alltoall(x, out=out["a"], comm=comm),
            ]

        total = rows[0] + rows[1]
        for i, (made, written) in enumerate(results(comms, call)):
            part = slice(3 * i, 3 * i + 3)
            for result in (made, written):
                same(result[0], rows[1])
                same(result[1], torch.stack(rows))
                same(result[3], torch.cat([row[part] for row in rows]))
            same(made[2], total[part])
            same(made[4], torch.stack(rows))
            same(written[2], rows[1][part])
            assert all(a is b for a, b in zip(written, outs[i].values(), strict=True))
        mix_devices(comms)


def mix_devices(comms: list[Comm]) -> None:
    def call(rank: int, comm: Comm) -> list[Any]:
        tree = {
            "away": there(torch.full((2, 2), float(rank))).t(),
            "here": torch.full((4,), rank),
            "n": np.full(2, rank + 0.5),
        }
        return [
            pccl.broadcast(tree, root=1, comm=comm),
            pccl.allgather(tree, comm=comm),
            pccl.alltoall(tree, comm=comm),
            pccl.sync({**tree, "step": rank}, comm=comm),
        ]

    for sent, gathered, exchanged, synced in results(comms, call):
        same(sent["away"], torch.ones(2, 2))
        same(sent["here"], torch.ones(4, dtype=torch.int64), "cpu")
        assert sent["n"].tolist() == [1.5, 1.5]
        same(gathered["away"], torch.stack([torch.zeros(2, 2), torch.ones(2, 2)]))
        same(gathered["here"], torch.tensor([[0] * 4, [1] * 4]), "cpu")
        assert gathered["n"].tolist() == [[0.5, 0.5], [1.5, 1.5]]
        same(exchanged["away"], torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        same(exchanged["here"], torch.tensor([0, 0, 1, 1]), "cpu")
        assert exchanged["n"].tolist() == [0.5, 1.5]
        same(synced["away"], torch.full((2, 2), float(synced["step"])))
        same(synced["here"], torch.full((4,), synced["step"]), "cpu")
        assert (synced["n"] == synced["step"] + 0.5).all()


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


def described() -> None:
    """Reductions by descriptors, of which one is in place and one of a part."""
    with pair() as comms:
        sent = [there(torch.full((4, 2), 1.0 + rank)) for rank in range(2)]
        received = [there(torch.full((8,), 9.0)) for _ in range(2)]
        own = [there(torch.full((3,), 4 * rank), torch.int32) for rank in range(2)]

        def call(rank: int, comm: Comm) -> None:
            arrays = [(sent[rank], received[rank], 5), (own[rank], own[rank], 3)]
            descriptors = [
                pccl.ReduceOpDescriptor.from_torch(
                    send,
                    recv,
                    pccl.ReduceDescriptor(
                        count,
                        pccl.ReduceOp.SUM,
                        tag,
                        pccl.ReduceOperandDescriptor(pccl.DataType.from_torch_dtype(send.dtype)),
                    ),
                )
                for tag, (send, recv, count) in enumerate(arrays)
            ]
            info = comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=1)
            assert info.local_world_size == 2 and info.bytes == 4 * (5 + 3), info

        results(comms, call)
        for rank in range(2):
            same(sent[rank], torch.full((4, 2), 1.0 + rank))
            same(received[rank], torch.tensor([3.0] * 5 + [9.0] * 3))
            same(own[rank], torch.full((3,), 4, dtype=torch.int32))
        one = pccl.ReduceDescriptor(
            1, pccl.ReduceOp.SUM, 0, pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT)
        )
        moved = [(there(torch.full((1,), 1.0 + rank)), there(torch.zeros(1))) for rank in range(2)]
        kept = [pccl.ReduceOpDescriptor.from_torch(*tensors, one) for tensors in moved]
        for send, recv in moved:  # as Module.cpu does with parameters
            torch.utils.swap_tensors(send, send.cpu())
            torch.utils.swap_tensors(recv, recv.cpu())
        results(comms, lambda rank, comm: comm.all_reduce_multiple_with_retry([kept[rank]]))
        assert [recv.tolist() for _, recv in moved] == [[3.0]] * 2
        torch.utils.swap_tensors(moved[0][1], there(torch.zeros(1)))
        with raises(pccl.InvalidArgument, f"send is on cpu, but recv is on {DEVICE}"):
            comms[0].all_reduce_multiple_with_retry([kept[0]])
        with raises(pccl.InvalidArgument, f"send is on cpu, but recv is on {DEVICE}"):
            pccl.ReduceOpDescriptor.from_torch(torch.ones(1), there(torch.ones(1)), one)
        with raises(pccl.InvalidArgument, "send is not contiguous"):
            wide = there(torch.ones(1)).expand(4)
            pccl.ReduceOpDescriptor.from_torch(wide, there(torch.ones(4)), one)


def described_state_that_cannot_be_written() -> None:
    """A revision is the receiver's when its entries are."""

    def fail(*_: Any) -> None:
        raise MemoryError

    with pair() as comms, mock.patch("pccl._arrays.adopt", fail):

        def call(rank: int, comm: Comm) -> int:
            info = pccl.TensorInfo.from_torch(there(torch.full((3,), float(rank))), "weight")
            state = pccl.SharedState([info])
            state.revision = 5 - rank
            with suppress(MemoryError):
                comm.sync_shared_state(state)
            return state.revision

        assert results(comms, call) == [5, 4]


def described_state() -> None:
    """The explicit API's shared state: tensors on the device, one in CPU memory, a NumPy array."""
    with pair() as comms:
        nets = []
        for rank in range(2):
            torch.manual_seed(rank)
            nets.append(torch.nn.Linear(3, 2).to(DEVICE))
        wanted = nets[0].weight.detach().cpu().clone()

        def call(rank: int, comm: Comm) -> tuple[Any, ...]:
            half = there(torch.full((2, 5), 1.0 + rank), torch.bfloat16)
            step, noise = np.full(1, 5 - rank), there(torch.full((), float(rank)))
            weight, empty = nets[rank].weight, there(torch.zeros(0))
            infos = [
                pccl.TensorInfo.from_torch(weight, "weight"),
                pccl.TensorInfo.from_torch(half, "half"),
                pccl.TensorInfo.from_torch(empty, "empty"),
                pccl.TensorInfo.from_torch(noise, "noise", allow_content_inequality=True),
                pccl.TensorInfo.from_numpy(step, "step"),
            ]
            assert infos[0].device_type is pccl.DeviceType.from_torch_device_type(DEVICE)
            state = pccl.SharedState(infos)
            state.revision = 1 - rank
            first = comm.sync_shared_state(state)
            revision = state.revision
            state.push_revision()
            again = comm.sync_shared_state(state)
            assert again.rx_bytes == again.tx_bytes == 0
            if rank:
                assert first.rx_bytes == 4 * 6 + 2 * 10 + 8, first
            half.set_(there(torch.zeros(3), torch.bfloat16))
            with raises(pccl.InvalidUsage, "half was resized"):
                comm.sync_shared_state(state)
            return weight, infos[1]._kept is half, step, noise, revision

        for weight, kept, step, _, revision in results(comms, call):
            assert weight.device.type == DEVICE and kept and revision == 1
            same(weight.detach(), wanted)
            assert step.tolist() == [5]


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
        forms: list[dict[str, Any]] = [
            *({}, {"quantize": "int8"}, {"mode": "async"}, {"mode": "streaming"}),
            *({"compression": pccl.diloco.Sparse(density=0.5)}, {"robust": "clip"}),
            {"warm_up": 3, "mode": "async"},
        ]
        for options in forms:
            here, away = (train(comms, device, options) for device in ("cpu", DEVICE))
            for ours, theirs in zip(here[0], away[0], strict=True):
                assert theirs.device.type == DEVICE
                np.testing.assert_allclose(theirs.cpu(), ours, rtol=1e-5)
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*away, strict=True))


def newcomers() -> None:
    """A third member comes to a DiLoCo run: while all wait, while they go on, and in timed rounds.

    The last form has a quorum, which nobody misses here.
    """
    from pccl.adapters.torch import DiLoCo

    # `last`: the round at whose end all stop. The newcomer says it when it counts. From then on no
    # round ends without it, so all see the same.
    def run(
        number: int, comm: Comm, begun: threading.Event, last: list[float], options: dict[str, Any]
    ) -> Any:
        if number == 2:
            begun.wait()
            comm._join("init", min_peers=1, attempts=5, timeout=30.0, enter=False)
        torch.manual_seed(number)
        net = torch.nn.Linear(3, 2).to(DEVICE, torch.bfloat16)
        inner = torch.optim.SGD(net.parameters(), 0.05)
        wrapped = DiLoCo(net, inner, sync_every=3, comm=comm, **options)
        if number == 2:
            last[0] = wrapped.outer_step + 3
        while wrapped.outer_step < last[0]:
            net(there(torch.ones(4, 3), torch.bfloat16) * number).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
            if wrapped.step():
                begun.set()
        assert wrapped.info is not None and len(wrapped.info.contributors) == 3
        assert all(parameter.device.type == DEVICE for parameter in net.parameters())
        return wrapped.outer_step, wrapped.parameters, list(net.parameters())

    def rejoin() -> Comm:
        raise AssertionError("nobody was put out")

    load_device()
    forms: list[dict[str, Any]] = [
        {},
        {"background_join": True, "round_seconds": 0.02},
        {"background_join": True, "quorum": 0.6, "grace_seconds": 60, "rejoin": rejoin},
    ]
    for options in forms:
        with members(2) as comms, closing(pccl.Communicator(comms[0]._address)) as late:
            shared = threading.Event(), [math.inf], options

            def call(number: int, comm: Comm, shared: Any = shared) -> Any:
                return run(number, comm, *shared)

            (rounds, outer, inner), *others = results([*comms, late], call)
            for theirs in others:
                assert theirs[0] == rounds > 3
                for name, parameter in outer.items():
                    assert torch.equal(parameter, theirs[1][name])
                for mine, yours in zip(inner, theirs[2], strict=True):
                    assert torch.equal(mine.detach().cpu(), yours.detach().cpu())


def following() -> None:
    """A member publishes a model on the device, and a follower loads it into one there."""
    load_device()
    with members(1) as (comm,):
        nets = [torch.nn.Linear(3, 2).to(DEVICE) for _ in range(2)]
        wanted = nets[0].weight.detach().cpu().clone()
        pccl.publish({"net": nets[0], "mean": there(torch.ones(2)), "step": 7}, 1, comm=comm)
        with torch.no_grad():
            nets[0].weight.zero_()  # what is published is a copy
        with pccl.follow(comm._address) as follower:
            found = follower.next(60)
            mean = there(torch.zeros(2))
            loaded = found.load({"net": nets[1], "mean": mean, "step": 0})
            assert loaded["net"] is nets[1] and loaded["step"] == 7
        same(nets[1].weight.detach(), wanted)
        same(mean, torch.ones(2))


def ddp() -> None:
    """DDP averages its gradients by the hook, in its first step as a whole, then by buckets."""
    from pccl.adapters.torch import DDPState, ddp_hook

    def net() -> Any:
        torch.manual_seed(0)
        layers = torch.nn.Linear(3, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2)
        return torch.nn.Sequential(*layers)

    def batch(rank: int, step: int) -> torch.Tensor:
        return torch.full((4, 3), 0.1 + rank + step)

    load_device()
    start(min_peers=2)
    dist.init_process_group("pccl", store=dist.HashStore(), rank=0, world_size=1)
    own = net().to(DEVICE)
    wrapped = torch.nn.parallel.DistributedDataParallel(own, bucket_cap_mb=1e-4)
    wrapped.register_comm_hook(DDPState(), ddp_hook)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(there(batch(pccl.rank(), step))).sum().backward()
        alone = net()
        sum(alone(batch(rank, step)).sum() / 2 for rank in range(2)).backward()
        for made, wanted in zip(own.parameters(), alone.parameters(), strict=True):
            assert made.grad is not None and made.grad.device.type == DEVICE
            torch.testing.assert_close(made.grad.cpu(), wanted.grad)
    dist.destroy_process_group()
    say(event="done")


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
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for place in ("cpu", DEVICE):
            small = torch.full((5,), rank + 1.0).to(dtype).to(place)
            dist.all_reduce(small)
            assert small.dtype == dtype and small.device.type == place
            assert small.cpu().float().tolist() == [size * (size + 1) / 2] * 5
    if DEVICE == "pretend":
        write_in_the_order_of_the_stream(rank, size)
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


def write_in_the_order_of_the_stream(rank: int, size: int) -> None:
    """A thread writes results after the work that the caller's stream has.

    A copy from the device in the call would wait for that work, and only the root makes one.
    """
    torch.accelerator.set_stream(torch.Stream(device=DEVICE))
    parts = [there(torch.full((1,), part + 1.0)) for part in range(size)]
    mine = there(torch.zeros(1))
    torch.ops.pretend.fill_late_(mine, 7.0)
    dist.scatter(mine, parts if rank == 0 else None, src=0, async_op=True).wait()
    same(mine, torch.full((1,), rank + 1.0))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
