"""Programs as programs.pypccl, with torch."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from pccl import (
    Attribute,
    DataType,
    DistributionHint,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    SharedState,
    SharedStateSyncStrategy,
    TensorInfo,
)
from programs.peer import engine, say
from programs.pypccl import accuracy, batch, digest, join, vanish

FORKED = True  # workers.start: its processes have imported torch already


def ddp_with_torch() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())

    class Pictures(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(64, 32), torch.nn.Linear(32, 10)

        def forward(self, x: Any) -> Any:
            return self.outer(torch.relu(self.inner(x)))

    def on_tensors(inputs: Any, labels: Any) -> Any:
        return torch.from_numpy(inputs).float(), torch.from_numpy(labels)

    model = Pictures()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for p in model.parameters():  # a step that changes nothing makes the optimizer's tensors
        p.grad = torch.zeros_like(p)
    optimizer.step()
    end = torch.zeros(1, dtype=torch.int64)
    entries = {"end": end, **dict(model.named_parameters())}
    for name, p in model.named_parameters():
        entries |= {f"{name}.{key}": tensor for key, tensor in optimizer.state[p].items()}
    state = SharedState([TensorInfo.from_torch(t, name=n) for n, t in entries.items()])

    comm = join()
    me = engine(comm).peer_id()
    say(event="in")
    local_iter, syncs = 0, []
    while end.item() == 0 or state.revision < end.item():
        if local_iter > 0:
            comm.update_topology()
            if comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) > 1:
                comm.optimize_topology()
        elif comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) > 1:
            comm.optimize_topology()  # where the members are, after letting us in
        local_iter += 1
        world = comm.get_attribute(Attribute.LOCAL_WORLD_SIZE)
        if state.revision == 0 and world < 2:
            time.sleep(0.01)
            continue
        syncs.append(
            comm.sync_shared_state(state, SharedStateSyncStrategy.ENFORCE_POPULAR).rx_bytes
        )
        if world == 3 and end.item() == 0:
            end += state.revision + 10
        if end.item() and "VICTIM" in os.environ:
            vanish()
        inputs, labels = on_tensors(*batch(state.revision, me))
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        while world > 1:
            try:
                info = comm.all_reduce(
                    flat,
                    flat,
                    op=ReduceOp.AVG,
                    operand_descriptor=ReduceOperandDescriptor(
                        DataType.FLOAT, DistributionHint.NORMAL
                    ),
                    quantization_options=QuantizationOptions(
                        DataType.UINT8, QuantizationAlgorithm.MIN_MAX
                    ),
                )
                assert info.local_world_size > 1
                break
            except PCCLError:
                world = comm.get_attribute(Attribute.LOCAL_WORLD_SIZE)
        offset = 0
        for p in model.parameters():
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        optimizer.step()
        state.revision += 1

    inputs, labels = on_tensors(*batch(10**6, "f" * 32, 500))
    say(
        event="done",
        digest=digest(*(t.detach().numpy() for t in entries.values())),
        world=world,
        revision=state.revision,
        accuracy=(model(inputs).argmax(1) == labels).float().mean().item(),
        later=sum(syncs[1:]),
        steps=int(optimizer.state[p]["step"]) - 1,
    )


def diloco() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    H, LR, MOMENTUM = 5, 0.7, 0.9

    model = torch.nn.Linear(64, 10)
    inner = torch.optim.AdamW(model.parameters(), lr=0.005)
    # Outer weights and momentum are NumPy arrays on the side; what travels are torch tensors.
    outer = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    momentum = {n: np.zeros_like(w) for n, w in outer.items()}
    end = np.zeros(1, np.int64)
    state = SharedState(
        [TensorInfo.from_numpy(w, n) for n, w in outer.items()]
        + [TensorInfo.from_numpy(m, f"{n}.momentum") for n, m in momentum.items()]
        + [TensorInfo.from_numpy(end, "end")]
    )

    comm = join()
    me = engine(comm).peer_id()
    say(event="in")
    local_iter, received = 0, []
    while end[0] == 0 or state.revision < end[0]:
        world = comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        if local_iter > 0 or world == 1:
            comm.update_topology()
        local_iter += 1
        world = comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        if state.revision == 0 and world < 2:
            time.sleep(0.01)
            continue
        received.append(comm.sync_shared_state(state).rx_bytes)
        if world == 3 and end[0] == 0:
            end[0] = state.revision + 8
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(torch.from_numpy(outer[n]))
        for step in range(H):
            inputs, labels = batch(state.revision * H + step, me)
            inner.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                model(torch.from_numpy(inputs).float()), torch.from_numpy(labels)
            )
            loss.backward()
            inner.step()
        if end[0] and state.revision == end[0] - 4 and "VICTIM" in os.environ:
            vanish()
        pseudo = {n: torch.from_numpy(outer[n]) - p.detach() for n, p in model.named_parameters()}
        descriptors = [
            ReduceOpDescriptor.from_torch(
                send=g,
                recv=g,
                reduce_descriptor=ReduceDescriptor(
                    count=g.numel(),
                    op=ReduceOp.AVG,
                    tag=tag,
                    operand_descriptor=ReduceOperandDescriptor(
                        datatype=DataType.from_torch_dtype(g.dtype),
                        distribution_hint=DistributionHint.NORMAL,
                    ),
                    quantization_options=QuantizationOptions(
                        quantized_datatype=DataType.FLOAT, algorithm=QuantizationAlgorithm.NONE
                    ),
                ),
            )
            for tag, g in enumerate(pseudo.values())
        ]
        try:
            comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=8)
        except PCCLError as error:
            assert error.result is Result.TOO_FEW_PEERS  # all others left: on with our own
        for n, g in pseudo.items():  # Nesterov
            momentum[n] *= MOMENTUM
            momentum[n] += g.numpy()
            outer[n] -= LR * (g.numpy() + MOMENTUM * momentum[n])
        state.revision += 1
    weights = np.vstack([outer["weight"].T, outer["bias"]]).astype(np.float64)
    say(
        event="done",
        digest=digest(*outer.values(), *momentum.values()),
        revision=state.revision,
        accuracy=accuracy(weights),
        later=sum(received[1:]),
        first=received[0],
    )
