"""Programs of torch.distributed, mostly messages and all-to-all, to be run on two backends.

A program takes rank and size and returns JSON. `run` runs programs by name, one after the other in
one group, and says each answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from programs.peer import hear, say
from programs.torch_job import begin, failure

FORKED = True  # workers.start: its processes have imported torch already

Program = Callable[[int, int], Any]
programs: dict[str, Program] = {}


def program(function: Program) -> Program:
    programs[function.__name__] = function
    return function


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.arange(count) + 100 * rank
    return torch.complex(made.float(), -made.float()) if dtype.is_complex else made.to(dtype)


def plain(tensor: torch.Tensor) -> Any:
    """A tensor as lists, with its dtype."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return [str(tensor.dtype), tensor.detach().tolist()]


# All-to-all.


@program
def all_to_all_single(rank: int, size: int) -> Any:
    results = []
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64):
        source = numbers(rank, 6 * size, dtype).reshape(2 * size, 3)
        target = torch.zeros_like(source)
        dist.all_to_all_single(target, source)
        results.append(plain(target))
    return results


def uneven_splits(rank: int, size: int) -> tuple[list[int], list[int]]:
    """How much a rank sends and receives: none to the rank after the next, else by both ranks."""
    count = [
        [0 if (a + 2) % size == b else a + 2 * b + 1 for b in range(size)] for a in range(size)
    ]
    return count[rank], [row[rank] for row in count]


@program
def all_to_all_single_uneven(rank: int, size: int) -> Any:
    results = []
    sent, received = uneven_splits(rank, size)
    for dtype in (torch.float64, torch.complex64):
        source = numbers(rank, 2 * sum(sent), dtype).reshape(sum(sent), 2)
        target = torch.zeros(sum(received), 2, dtype=dtype)
        work = dist.all_to_all_single(target, source, received, sent, async_op=True)
        work.wait()
        results.append(plain(target))
    return results


@program
def all_to_all_single_large(rank: int, size: int) -> Any:
    source = numbers(rank, 40_000 * size, torch.int64)
    target = torch.zeros_like(source)
    dist.all_to_all_single(target, source)
    return [int(target.sum()), target[::10_000].tolist()]


@program
def all_to_all_lists(rank: int, size: int) -> Any:
    results = []
    for dtype in (torch.float32, torch.complex64):
        outputs = [torch.zeros(3, dtype=dtype) for _ in range(size)]
        dist.all_to_all(outputs, list(numbers(rank, 3 * size, dtype).split(3)))
        results.append([plain(output) for output in outputs])
    return results


@program
def all_to_all_in_subgroup(rank: int, size: int) -> Any:
    group = dist.new_group([size - 1, 0])
    if rank not in (0, size - 1):
        return None
    target = torch.zeros(4)
    dist.all_to_all_single(target, numbers(rank, 4), group=group)
    return plain(target)


@program
def all_to_all_with_gradients(rank: int, size: int) -> Any:
    sent, received = uneven_splits(rank, size)
    source = numbers(rank, sum(sent)).requires_grad_()
    target = differentiable.all_to_all_single(
        torch.zeros(sum(received)), source, received, sent, group=dist.group.WORLD
    )
    (target * numbers(rank, sum(received))).sum().backward()
    several = numbers(rank, size).requires_grad_()
    parts = differentiable.all_to_all(
        [torch.zeros(1) for _ in range(size)], list(several.split(1)), group=dist.group.WORLD
    )
    torch.cat(parts).square().sum().backward()
    assert source.grad is not None and several.grad is not None
    return [plain(target), plain(source.grad), plain(torch.cat(parts)), plain(several.grad)]


@program
def functional_all_to_all(rank: int, size: int) -> Any:
    group = dist.group.WORLD
    sent, received = uneven_splits(rank, size)
    source = numbers(rank, sum(sent)).requires_grad_()
    target = functional.all_to_all_single_autograd(source, received, sent, group)
    (target * 3).sum().backward()
    assert source.grad is not None
    even = functional.all_to_all_single(numbers(rank, size), None, None, group)
    turned = functional.permute_tensor(
        numbers(rank, 3), [(r + 1) % size for r in range(size)], group
    )
    return [plain(target), plain(source.grad), plain(even + 0), plain(turned + 0)]


# Messages.


@program
def messages_from_any_rank(rank: int, size: int) -> Any:
    if rank > 0:
        works = [
            dist.isend(numbers(rank, 3), 0, tag=7),
            dist.isend(torch.full((2000,), float(rank)), 0),
        ]
        for work in works:
            assert work is not None
            work.wait()
        return None
    large = torch.zeros(2000)
    sources = sorted(dist.recv(large) for _ in range(size - 1))  # before those of tag 7
    got = []
    for _ in range(size - 1):
        tensor = torch.zeros(3)
        source = dist.recv(tensor, tag=7)
        got.append([source, plain(tensor)])
    return [sources, sorted(got)]


@program
def messages_from_any_rank_and_one(rank: int, size: int) -> Any:
    # A receive from any rank takes what none before it takes.
    if rank == 0:
        exact, any_rank = torch.zeros(1), torch.zeros(1)
        works = [dist.irecv(exact, 1), dist.irecv(any_rank, None)]
        dist.send(torch.ones(1), 1)
        for work in works:
            assert work is not None
            work.wait()
        return [plain(exact), plain(any_rank)]
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.tensor([1.0]), 0)
        dist.send(torch.tensor([2.0]), 0)
    return None


@program
def receive_into_larger(rank: int, size: int) -> Any:
    results = []
    for count in (0, 3, 5, 3000):
        if rank == 0:
            dist.send(numbers(0, count), 1)
        elif rank == 1:
            target = torch.full((count + 2,), -1.0)
            dist.recv(target, 0)
            results.append(plain(target))
    return results


@program
def messages_out_of_order(rank: int, size: int) -> Any:
    if rank == 0:
        works = [dist.isend(torch.full((1500,), float(tag)), 1, tag=tag) for tag in range(5)]
        for work in works:
            assert work is not None
            work.wait()
    elif rank == 1:
        targets = [torch.zeros(1500) for _ in range(5)]
        waiting = [dist.irecv(targets[tag], 0, tag=tag) for tag in (3, 1)]
        for tag in (4, 0, 2):
            dist.recv(targets[tag], 0, tag=tag)
        for receipt in waiting:
            assert receipt is not None
            receipt.wait()
        return [plain(target[:2]) for target in targets]
    return None


@program
def messages_around(rank: int, size: int) -> Any:
    got = torch.zeros(50_000, dtype=torch.int64)
    ops = [
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
        dist.P2POp(dist.isend, numbers(rank, 50_000, torch.int64), (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [int(got.sum()), got[:3].tolist()]


@program
def messages_beside_collectives(rank: int, size: int) -> Any:
    # The message waits for its receiver through two collectives.
    target, got = torch.zeros(size), torch.zeros(3)
    work = dist.isend(numbers(rank, 3), (rank + 1) % size)
    dist.all_to_all_single(target, numbers(rank, size))
    dist.all_reduce(target)
    dist.recv(got, (rank - 1) % size)
    assert work is not None
    work.wait()
    return [plain(target), plain(got)]


@program
def objects_by_message(rank: int, size: int) -> Any:
    if rank == 0:
        dist.send_object_list([{"a": 1}, "b"], 1)
    elif rank == 1:
        found = [None, None]
        source = dist.recv_object_list(found, 0)
        return [source, found]
    return None


@program
def ranks_that_sent(rank: int, size: int) -> Any:
    got = torch.zeros(3)
    receipt = dist.irecv(got, (rank - 1) % size)
    sent = dist.isend(numbers(rank, 3), (rank + 1) % size)
    assert receipt is not None and sent is not None
    for work in (receipt, sent):
        work.wait()
    try:
        sent.source_rank()
    except RuntimeError:
        return [plain(got), receipt.source_rank(), "nothing received"]
    return "the sender has a source"


# Other collectives.


@program
def short_forms(rank: int, size: int) -> Any:
    """The group's own methods, with tensors, ranks and ops."""
    group: Any = dist.group.WORLD
    # One tensor for each call: Gloo runs two calls at once.
    most, root, other_root, total, own = (numbers(rank, 4) for _ in range(5))
    lists = [[torch.zeros(4) for _ in range(size)] for _ in range(2)]
    scattered, reduced = torch.zeros(4), torch.zeros(4)
    parts = [numbers(rank + part, 4) for part in range(size)]
    works = [
        group.allreduce(most, dist.ReduceOp.MAX),
        group.allreduce([own]),
        group.broadcast(root, 1),
        group.broadcast(other_root, root=0, timeout=timedelta(seconds=50)),
        group.reduce(total, 1, dist.ReduceOp.SUM),
        group.allgather(lists[0], numbers(rank, 4)),
        group.gather(lists[1] if rank == 1 else [], numbers(rank, 4), 1),
        group.scatter(scattered, parts if rank == 1 else [], 1),
        group.reduce_scatter(reduced, parts, op=dist.ReduceOp.MAX),
        group.barrier(timedelta(seconds=50)),
    ]
    for work in works:
        work.wait()
    tensors = [most, own, root, other_root, scattered, reduced, *lists[0], *lists[1]]
    return [plain(tensor) for tensor in (tensors if rank != 1 else [*tensors, total])]


@program
def wrong_arguments(rank: int, size: int) -> Any:
    """Refused before anything is sent. `except RuntimeError` is what Gloo's users write."""
    one = torch.zeros(2)
    found = []
    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather([torch.zeros(3)] * size, one),
        lambda: dist.all_to_all([one] * (size - 1), [one] * size),
        lambda: dist.all_to_all_single(torch.zeros(size), torch.zeros(size + 1)),
    ]
    for call in calls:
        try:
            call()
        except RuntimeError:
            found.append("refused")
    return found


@program
def all_gather_coalesced(rank: int, size: int) -> Any:
    inputs = [numbers(rank, 4).reshape(2, 2), numbers(rank, 1), numbers(rank, 3)]
    outputs = [[torch.zeros_like(tensor) for tensor in inputs] for _ in range(size)]
    dist.all_gather_coalesced(outputs, inputs)
    waits = [[torch.zeros_like(tensor) for tensor in inputs] for _ in range(size)]
    dist.all_gather_coalesced(waits, inputs, async_op=True).wait()
    return [[plain(tensor) for tensor in [*a, *b]] for a, b in zip(outputs, waits, strict=True)]


@program
def sparse_all_reduce_of_other_shapes(rank: int, size: int) -> Any:
    """Equally many elements are not enough: indices are those of a shape."""
    shape = (2, 6) if rank == 0 else (6, 2)
    tensor = torch.sparse_coo_tensor(torch.tensor([[1], [1]]), torch.ones(1), shape)
    try:
        dist.all_reduce(tensor)
    except RuntimeError:
        return ["refused"]
    return plain(tensor.to_dense())


@program
def sparse_all_reduce(rank: int, size: int) -> Any:
    results = []
    places = [
        torch.tensor([[rank, 0, rank], [1, 2, 1]]),  # one twice
        torch.zeros(2, 0, dtype=torch.int64) if rank == 0 else torch.tensor([[rank], [rank]]),
        torch.zeros(2, 0, dtype=torch.int64),
    ]
    for indices in places:
        values = numbers(rank, indices.shape[1]) + 1
        tensor = torch.sparse_coo_tensor(indices, values, (size + 1, 3 + size))
        dist.all_reduce(tensor)
        results.append(plain(tensor.to_dense()))
    rows = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1, 2), (size, 2))
    dist.all_reduce(rows)  # with a dense part, as gradients of embeddings
    return [*results, plain(rows.to_dense())]


@program
def bitwise(rank: int, size: int) -> Any:
    results = []
    ops = dist.ReduceOp
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        for op in (ops.BAND, ops.BOR, ops.BXOR):
            tensor = (torch.arange(1, 8) * (rank + 3)).to(dtype)
            dist.all_reduce(tensor, op)
            results.append(plain(tensor))
            tensor = (torch.arange(1, 8) * (rank + 3)).to(dtype)
            dist.reduce(tensor, 1, op)
            results.append(plain(tensor) if rank == 1 else None)
    return results


@program
def sequence_numbers(rank: int, size: int) -> Any:
    group = dist.new_group()
    counts = [group._get_sequence_number_for_group()]
    dist.all_reduce(torch.ones(1), group=group)
    counts.append(group._get_sequence_number_for_group())
    dist.all_to_all_single(torch.zeros(size), torch.ones(size), group=group)
    dist.barrier(group)
    counts.append(group._get_sequence_number_for_group())
    return counts


@program
def options(rank: int, size: int) -> Any:
    group = dist.new_group([1, 0], timeout=timedelta(seconds=33))
    if rank > 1:
        return None
    found = group._get_backend(torch.device("cpu")).options
    return [found._timeout.total_seconds(), list(found.global_ranks_in_group)]


@program
def sharded_tensor(rank: int, size: int) -> Any:
    from torch.distributed._shard import shard_parameter, sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    def spec(dim: int) -> Any:
        return ChunkShardingSpec(dim=dim, placements=[f"rank:{r}/cpu" for r in range(size)])

    made = sharded_tensor.rand(spec(0), 2 * size, 3 * size)
    shards = [shard.tensor for shard in made.local_shards()]
    for shard in shards:
        shard.copy_(numbers(rank, shard.numel()).reshape(shard.shape))
    whole = torch.zeros(2 * size, 3 * size) if rank == 0 else None
    made.gather(0, whole)
    made.reshard(spec(1))
    moved = [plain(shard.tensor) for shard in made.local_shards()]
    linear = torch.nn.Linear(4, 2 * size)
    torch.nn.init.constant_(linear.weight, 1.0)
    shard_parameter(linear, "weight", spec(0))
    shown = [plain(shard.tensor) for shard in linear.weight.local_shards()]
    return [None if whole is None else plain(whole), moved, shown, str(made.device)]


# Programs that Gloo cannot run.


@program
def all_to_all_lists_uneven(rank: int, size: int) -> Any:
    sent, received = uneven_splits(rank, size)
    outputs = [torch.zeros(n) for n in received]
    dist.all_to_all(outputs, list(numbers(rank, sum(sent)).split(sent)))
    return [plain(output) for output in outputs]


@program
def reduce_scatter_of_complex(rank: int, size: int) -> Any:
    single = torch.zeros(2, dtype=torch.complex64)
    dist.reduce_scatter_tensor(single, numbers(rank, 2 * size, torch.complex64))
    listed = torch.zeros(2, dtype=torch.complex64)
    parts = list(numbers(rank, 2 * size, torch.complex64).split(2))
    dist.reduce_scatter(listed, parts)
    return [plain(single), plain(listed)]


@program
def reduce_scatter_uneven(rank: int, size: int) -> Any:
    sizes = [r + 1 for r in range(size)]
    parts = list(numbers(rank, sum(sizes)).split(sizes))
    output = torch.zeros(sizes[rank])
    dist.reduce_scatter(output, parts)
    bits = torch.zeros(1, dtype=torch.int32)
    dist.reduce_scatter(
        bits, [torch.tensor([r + rank], dtype=torch.int32) for r in range(size)], dist.ReduceOp.BXOR
    )
    return [plain(output), plain(bits)]


@program
def bools_beside_numbers(rank: int, size: int) -> Any:
    """Calls that need several operations of the engine."""
    group: Any = dist.group.WORLD
    totals = [numbers(rank, 2), torch.arange(size) == rank, numbers(rank, 1, torch.int32)]
    group.allreduce_coalesced(totals).wait()
    parts = [torch.zeros(1, dtype=torch.bool), torch.zeros(1)]
    inputs = [torch.arange(size) == rank, numbers(rank, size)]
    group.reduce_scatter_single_coalesced(parts, inputs).wait()
    return [plain(tensor) for tensor in (*totals, *parts)]


GLOO_LACKS = {
    all_to_all_lists_uneven,
    reduce_scatter_of_complex,
    reduce_scatter_uneven,
    bools_beside_numbers,
}


# Programs that end with an error.


def lost_before_the_first_message() -> None:
    """The last rank is killed before any message; the others send to it and receive by it."""
    rank, size = begin(timeout=timedelta(seconds=600))
    dist.all_reduce(torch.ones(1))
    say(event="ready")
    if rank == size - 1:
        hear()
    failures = [
        failure(lambda: dist.send(torch.ones(3), size - 1)),
        failure(lambda: dist.recv(torch.ones(3), size - 1)),
        failure(lambda: dist.all_to_all_single(torch.zeros(size), torch.ones(size))),
    ]
    if rank > 0:
        dist.send(torch.ones(3), 0)  # the others still reach each other
    else:
        for _ in range(size - 2):
            dist.recv(torch.ones(3))
    say(event="done", failures=failures)
    hear()


def lost_while_waiting(lost: int, first: bool) -> None:
    """A rank is killed while another one waits for its first message, or for one more."""
    rank, _ = begin(timeout=timedelta(seconds=600))
    dist.barrier()
    if rank == lost:
        if not first:
            dist.send(torch.ones(3), 2)
        say(event="ready")
        hear()
    if rank == 2:
        if not first:
            dist.recv(torch.ones(3), lost)
        work = dist.irecv(torch.ones(3), lost)
        assert work is not None
        say(event="ready")
        say(event="done", failures=[failure(work.wait)])
    else:
        say(event="ready")
        say(event="done", failures=[])
        hear()


def lost_within_all_to_all() -> None:
    """A rank dies when its parts are on their way."""
    import signal

    from pccl.adapters.torch import messages as p2p

    rank, size = begin(timeout=timedelta(seconds=600))
    dist.all_to_all_single(torch.zeros(size), torch.ones(size))
    say(event="ready")
    if rank == 1:

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        p2p.Messages.exchange = die  # type: ignore[method-assign]
    whole = torch.ones(100_000 * size)
    failures = [
        failure(lambda: dist.all_to_all_single(torch.zeros_like(whole), whole)),
        failure(dist.barrier),
    ]
    say(event="done", failures=failures)
    hear()  # the end of this rank would be one more loss for the others


def mismatches() -> None:
    """Calls that do not fit, and that nothing is broken after them."""
    rank, size = begin()
    splits = [1] * (size - 1) + [2 if rank == 0 else 1]
    failures = [
        failure(
            lambda: dist.all_to_all_single(
                torch.zeros(size), torch.ones(sum(splits)), [1] * size, splits
            )
        ),
        failure(lambda: dist.all_to_all_single(torch.zeros(size + 1), torch.ones(size + 1))),
        failure(
            lambda: dist.all_to_all_single(
                torch.zeros(size, dtype=(dtype := [torch.int32, torch.int64][rank % 2])),
                torch.ones(size, dtype=dtype),
            )
        ),
        failure(lambda: dist.all_gather_coalesced([[torch.zeros(2)]], [torch.ones(2)])),
    ]
    if rank == 0:
        dist.send(torch.ones(4), 1)
        dist.send(torch.ones(2000), 1)
    elif rank == 1:
        failures += [
            failure(lambda: dist.recv(torch.zeros(3), 0)),
            failure(lambda: dist.recv(torch.zeros(3), 0)),
        ]
    total = torch.zeros(size)
    dist.all_to_all_single(total, torch.ones(size))
    if rank == 0:
        dist.send(torch.ones(4), 1)
    elif rank == 1:
        dist.recv(torch.zeros(4), 0)
    dist.destroy_process_group()
    say(event="done", failures=failures, total=total.tolist())


def no_thread_can_be_started() -> None:
    """Messages fail while there are no threads, and pass again after."""
    import threading

    rank, size = begin()
    peer = 1 - rank
    start = threading.Thread.start

    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = none  # type: ignore[method-assign]
    failures = [
        failure(lambda: dist.isend(torch.ones(2), peer)),
        failure(lambda: dist.irecv(torch.ones(2), peer)),
        failure(lambda: dist.all_to_all_single(torch.zeros(size), torch.ones(size))),
    ]
    threading.Thread.start = start  # type: ignore[method-assign]
    got, total = torch.zeros(2), torch.zeros(size)
    works = [dist.isend(torch.full((2,), float(rank)), peer), dist.irecv(got, peer)]
    for work in works:
        assert work is not None
        work.wait()
    threading.Thread.start = none  # type: ignore[method-assign]
    dist.all_to_all_single(total, torch.full((size,), float(rank)))
    threading.Thread.start = start  # type: ignore[method-assign]
    dist.destroy_process_group()
    say(event="done", failures=failures, got=got.tolist(), total=total.tolist())


def messages_that_nobody_receives() -> None:
    """Both ranks wait longer than the engine lets members wait for each other, and to the end."""
    rank, _ = begin()
    peer = 1 - rank
    got = torch.zeros(2)
    work = dist.irecv(got, peer)  # on both sides
    assert work is not None
    say(event="waits")
    hear()
    dist.send(torch.ones(2), peer)
    work.wait()
    dist.barrier()
    group: Any = dist.group.WORLD
    failures = []
    for call in (
        lambda: dist.send(torch.ones(2), peer, tag=9),
        lambda: dist.recv(torch.ones(2), peer, tag=8),
        lambda: dist.recv(torch.ones(2), tag=8),
    ):
        group.set_timeout(timedelta(seconds=3))
        failures.append(failure(call))
        group.set_timeout(timedelta(seconds=60))
        dist.barrier()
    dist.destroy_process_group()
    say(event="done", failures=failures, got=got.tolist())


def first_message_without_a_store() -> None:
    """The store of the job is gone before the first message."""
    rank, _ = begin()
    dist.all_reduce(torch.ones(1))
    say(event="ready")
    hear()
    call = dist.send if rank == 0 else dist.recv
    say(event="done", failures=[failure(call, torch.ones(3), 1 - rank)])
    hear()  # the end of this rank would be a loss for the other
    dist.destroy_process_group()


def run(backend: str, names: list[str]) -> None:
    rank, size = begin(backend, strict=False)  # Gloo warns
    for name in names:
        try:
            answer = programs[name](rank, size)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        say(event=name, answer=answer)
        dist.barrier()
    say(event="done")
    hear()  # a rank of Gloo fails in its last barrier if another one has ended by then
    dist.destroy_process_group()
