"""Ranks of torch.distributed with the backend "pccl": collectives, groups, messages, losses."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from programs.peer import hear, say
from programs.torch_job import (
    begin,
    failure,
)

FORKED = True  # workers.start: its processes have imported torch already


def collectives() -> None:
    rank, size = begin()
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")

    def own(dtype: Any, shape: Any = (6, 5), by: Any = rank) -> Any:
        made = torch.arange(torch.Size(shape).numel()).reshape(shape) % 7 + by + 1
        return made.to(dtype)

    def both(call: Any) -> Any:
        # The tensors that a collective was given and made, on each backend.
        return call(ours), call(gloo)

    wrong = []

    def check(name: Any, call: Any) -> None:
        got, want = both(call)
        same = len(got) == len(want) and all(
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and torch.equal(a, b)
            for a, b in zip(got, want, strict=True)
        )
        if not same:
            wrong.append(name)

    def reduced(op: Any, dtype: Any, layout: Any = lambda t: t) -> Any:
        def call(group: Any) -> Any:
            tensor = layout(own(dtype))
            dist.all_reduce(tensor, op, group=group)
            return [tensor]

        return call

    ops = dist.ReduceOp
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    ):
        for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX):
            check(f"all_reduce {op} {dtype}", reduced(op, dtype))
    check("all_reduce bfloat16", reduced(ops.SUM, torch.bfloat16))

    def complex_layout(t: Any) -> Any:
        return torch.complex(t, -t)

    check("all_reduce complex", reduced(ops.SUM, torch.float32, complex_layout))
    check("all_reduce 0-d", reduced(ops.SUM, torch.float32, lambda t: t[0, 0].clone()))
    check("all_reduce empty", reduced(ops.SUM, torch.float32, lambda t: t[:0].clone()))

    def to_all(dtype: Any, layout: Any = lambda t: t) -> Any:
        def call(group: Any) -> Any:
            tensor = layout(own(dtype))
            dist.broadcast(tensor, 1, group=group)
            return [tensor]

        return call

    for dtype in (torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.complex64):
        check(f"broadcast {dtype}", to_all(dtype))

    def gathered(group: Any) -> Any:
        outputs = [torch.empty(6, 5) for _ in range(size)]
        dist.all_gather(outputs, own(torch.float32), group=group)
        return outputs

    check("all_gather", gathered)

    def gathered_into(group: Any) -> Any:
        output = torch.empty(6 * size, 5)
        dist.all_gather_into_tensor(output, own(torch.float32), group=group)
        return [output]

    check("all_gather_into_tensor", gathered_into)

    def gathered_in_place(group: Any) -> Any:
        output = torch.empty(6 * size, 5)
        mine = output[6 * rank : 6 * rank + 6]
        mine.copy_(own(torch.float32))
        dist.all_gather_into_tensor(output, mine, group=group)
        return [output]

    check("all_gather_into_tensor of its own part", gathered_in_place)

    def gathered_at(group: Any) -> Any:
        outputs = [torch.empty(6, 5) for _ in range(size)] if rank == 1 else None
        dist.gather(own(torch.float32), outputs, 1, group=group)
        return outputs or []

    check("gather", gathered_at)

    def scattered(group: Any) -> Any:
        output = torch.empty(6, 5)
        parts = [own(torch.float32, by=10 * i) for i in range(size)] if rank == 2 else None
        dist.scatter(output, parts, 2, group=group)
        return [output]

    check("scatter", scattered)

    def reduced_at(group: Any) -> Any:
        tensor = own(torch.float32)
        dist.reduce(tensor, 2, group=group)
        return [tensor] if rank == 2 else []

    check("reduce", reduced_at)

    def reduce_scattered(group: Any) -> Any:
        output, whole = torch.empty(2, 5), own(torch.float32)
        dist.reduce_scatter_tensor(output, whole, group=group)
        return [output, whole]

    check("reduce_scatter_tensor", reduce_scattered)

    # What Gloo has not.
    tensor = own(torch.float32)
    dist.all_reduce(tensor, ops.AVG)
    if not torch.equal(tensor, own(torch.float32, by=1)):
        wrong.append("avg")
    parts = [own(torch.float32, by=10 * i + rank) for i in range(size)]
    output = torch.empty(6, 5)
    dist.reduce_scatter(output, parts, ops.SUM)
    if not torch.equal(output, sum(own(torch.float32, by=10 * rank + i) for i in range(size))):
        wrong.append("reduce_scatter")
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, ops.MAX)
    if flags.tolist() != [True, True, False]:
        wrong.append("bool")
    tensor = own(torch.float32).T
    before = tensor.stride()
    dist.all_reduce(tensor)
    if (
        not torch.equal(tensor, sum(own(torch.float32, by=i) for i in range(size)).T)
        or tensor.stride() != before
    ):
        wrong.append("transposed")
    tensors = [own(torch.float32), own(torch.float32, (3,)), own(torch.float32, (0, 2))]
    dist.all_reduce_coalesced(tensors)
    if not torch.equal(tensors[1], sum(own(torch.float32, (3,), by=i) for i in range(size))):
        wrong.append("coalesced")
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
    last = torch.ones(5)
    dist.all_reduce(last)  # synchronous, after them
    if not all(work.is_completed() for work in works) or not torch.equal(
        last, torch.full((5,), float(size))
    ):
        wrong.append("order")
    dist.barrier()
    dist.destroy_process_group()
    say(event="done", wrong=wrong)


def functional_collectives() -> None:
    import torch.distributed._functional_collectives as functional
    from torch.distributed.distributed_c10d import _coalescing_manager

    rank, _ = begin()
    group, wrong = dist.group.WORLD, []

    def check(name: Any, got: Any, want: Any) -> None:
        if not torch.equal(torch.as_tensor(got), torch.as_tensor(want)):
            wrong.append(name)

    x = torch.arange(4.0) + rank
    check("all_reduce", functional.all_reduce(x, "sum", group), 2 * torch.arange(4.0) + 1)
    both = torch.cat([torch.arange(4.0), torch.arange(4.0) + 1])
    check("all_gather", functional.all_gather_tensor(x, 0, group), both)
    part = (2 * torch.arange(4.0) + 1).chunk(2)[rank]
    check("reduce_scatter", functional.reduce_scatter_tensor(x, "sum", 0, group), part)
    check("broadcast", functional.broadcast(x, 1, group), torch.arange(4.0) + 1)
    several = functional.all_reduce_coalesced([x, 2 * x], "avg", group)
    check(
        "coalesced",
        torch.cat(several),
        torch.cat([torch.arange(4.0) + 0.5, 2 * torch.arange(4.0) + 1]),
    )
    several = functional.all_gather_into_tensor_coalesced([x, x.long()], group)
    check("gathered", several[0], both)
    check("gathered", several[1], both.long())
    several = functional.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group)
    check("scattered", several[0], part)
    check("scattered", several[1], part)
    a, b = torch.ones(3), torch.ones(2)
    with _coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    check("manager", a.sum() + b.sum(), torch.tensor(10.0))
    lacks = {
        "BXOR": failure(dist.all_reduce, torch.ones(1), dist.ReduceOp.BXOR),
    }
    for name, error in lacks.items():
        if error is None or not error.startswith("NotSupported") or name not in error:
            wrong.append((name, error))
    dist.destroy_process_group()
    say(event="done", wrong=wrong)


def groups() -> None:
    rank, _ = begin()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 0]), dist.new_group([1])]

    def members(group: Any) -> Any:
        if dist.get_rank(group) < 0:
            return None
        parts = [torch.zeros(1) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, torch.tensor([float(rank)]), group=group)
        return [int(part) for part in parts], dist.get_process_group_ranks(group)

    found = [members(group) for group in pairs]
    ok = all(each is None or each[0] == each[1] for each in found)
    dist.destroy_process_group(pairs[0])
    dist.barrier()
    dist.destroy_process_group()
    say(event="done", ok=ok, count=sum(each is not None for each in found))


def close_many_groups() -> None:
    """Rank 0, which runs the master, closes a group, later four more; the other one stays."""
    from pccl.adapters.torch import rendezvous

    rendezvous._FAREWELL = 3.0
    rank, _ = begin()
    made = [dist.new_group([0, 1]) for _ in range(4)]
    for group in made:
        dist.barrier(group)
    began = time.monotonic()
    if rank == 0:
        dist.destroy_process_group(made.pop())
    first = time.monotonic() - began
    dist.barrier()
    if rank == 1:
        say(event="ready")
        hear()
    began = time.monotonic()
    dist.destroy_process_group()
    say(event="done", first=first, seconds=time.monotonic() - began)


def list_threads_afterwards() -> None:
    rank, _ = begin()

    class Slow:
        # To let go of a tensor takes a while, as it may on a busy machine.
        def __del__(self) -> None:
            threading.Event().wait(0.3)

    def slow() -> Any:
        made = torch.ones(3)
        made.slow = Slow()
        return made

    if rank == 0:
        never = dist.irecv(torch.empty(3), 1)  # noqa: F841  # waits until the end
    dist.all_reduce(slow(), async_op=True).wait()
    if rank == 1:
        dist.isend(slow(), 2).wait()
    if rank == 2:
        dist.irecv(slow(), 1).wait()
    dist.destroy_process_group()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pccl")]
    say(event="done", left=left)


def fork() -> None:
    from pccl.adapters.torch import process_group

    begin()
    dist.barrier()
    groups = process_group._open
    child = os.fork()
    if child == 0:
        os._exit(len(groups))  # how many it would leave at its end
    counts = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(groups)]
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()
    say(event="done", counts=counts, total=total.tolist())


def mismatches() -> None:
    rank, _ = begin()
    other = {0: lambda: dist.all_reduce(torch.ones(4)), 1: lambda: dist.all_reduce(torch.ones(5))}[
        rank
    ]
    first = failure(other)
    kinds = {
        0: lambda: dist.broadcast(torch.ones(4), 0),
        1: lambda: dist.all_reduce(torch.ones(4)),
    }[rank]
    second = failure(kinds)
    again = torch.ones(4)
    dist.all_reduce(again)
    dist.destroy_process_group()
    say(event="done", first=first, second=second, again=again.tolist())


def reduce_once() -> None:
    begin()
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    say(event="done", total=x.tolist())


def reduce_when_told() -> None:
    say(event="begins")
    hear()
    rank, _ = begin()
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
    say(event="done", total=x.tolist())
    hear()
    dist.destroy_process_group()


def calls_after_a_loss(lost: int) -> None:
    rank, size = begin()
    data = torch.ones(1 << 16)
    dist.all_reduce(data)
    say(event="ready")
    if rank == lost:
        hear()  # killed here
    errors = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1000)),
        lambda: dist.all_gather([torch.empty(2) for _ in range(size)], torch.ones(2)),
        lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        lambda: dist.barrier(),
    ):
        errors.append(failure(call))
    say(event="done", errors=errors)


def functional_calls_that_fail() -> None:
    """All-reduces of float16 by C++ that do not fit, and one after a loss."""
    import functools

    import torch.distributed._functional_collectives as functional

    rank, _ = begin()
    group = dist.group.WORLD
    reduce = functools.partial(type(group).allreduce, group)  # unlike a call in Python

    def called_in_cpp(count: int) -> Any:
        return functional.all_reduce(torch.ones(count, dtype=torch.float16), "sum", group) + 0

    total = called_in_cpp(4).tolist()
    misfit = failure(called_in_cpp, 4 + rank)
    say(event="ready")
    if rank == 1:
        hear()  # killed here
    works = [reduce([torch.ones(2, dtype=torch.float16)]) for _ in range(2)]
    errors = [failure(called_in_cpp, 4), *(failure(work.wait) for work in works)]
    states = [(work.is_completed(), work.is_success()) for work in works]
    dist.destroy_process_group()
    say(event="done", total=total, misfit=misfit, errors=errors, states=states)
