"""torch.distributed's backend "pccl": its collectives against Gloo's, and programs of DDP, FSDP2 and DTensor on it."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workers import Worker, complaints, running

torch = pytest.importorskip("torch")

# What every rank starts with. RANK, SIZE and STORE come from `Job`.
PRELUDE = """
import os, warnings
from datetime import timedelta
import torch
import torch.distributed as dist
import pccl.adapters.torch

warnings.simplefilter("error")  # of torch, about what a backend lacks
warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", category=FutureWarning)
torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["SIZE"])
where = os.environ["STORE"]
if where.isdecimal():  # the port of one that outlives the ranks
    store = dist.TCPStore("127.0.0.1", int(where), size, is_master=False)
else:
    store = dist.FileStore(where, size)

def begin(backend="pccl", **options):
    options.setdefault("timeout", timedelta(seconds=60))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)

def failure(call, *args, **options):
    try:
        call(*args, **options)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None

def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )

def batch(step, part, parts):
    # The global batch of a step, and a part of it.
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 8, generator=generator)
    y = torch.tanh(x[:, :4] * 2 - x[:, 4:])
    return x.chunk(parts)[part], y.chunk(parts)[part]

def train(net, part, parts, steps=5):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(steps):
        x, y = batch(step, part, parts)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net

def flat(net):
    from torch.distributed.tensor import DTensor
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in full])

def alone():
    # The same steps in one process, on whole batches.
    return flat(train(model(), 0, 1))

def same_everywhere(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return all(torch.equal(part, tensor) for part in parts)
"""


class Job:
    """Ranks of one torch job, each a real process, gone at the end of the test."""

    def __init__(self, store: Path | int) -> None:
        self._store = store
        self.workers: list[Worker] = []

    def start(self, size: int, code: str, **env: str) -> list[Worker]:
        self.workers = [
            Worker(
                PRELUDE + textwrap.dedent(code),
                RANK=str(rank),
                SIZE=str(size),
                STORE=str(self._store),
                GLOO_SOCKET_IFNAME="lo",
                **env,
            )
            for rank in range(size)
        ]
        return self.workers

    def run(self, size: int, code: str, **env: str) -> list[dict[str, Any]]:
        """What each rank says at its end; all end well, and print nothing."""
        workers = self.start(size, code, **env)
        answers = [worker.expect("done", 90) for worker in workers]
        for worker in workers:
            assert worker.ends() == 0, worker.stderr()
            assert complaints(worker.stderr()) == ""
        return answers


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "store")
    yield made
    for worker in made.workers:
        worker.destroy()


def test_collectives_give_what_gloo_gives(job: Job) -> None:
    code = """
    begin()
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")

    def own(dtype, shape=(6, 5), by=rank):
        made = torch.arange(torch.Size(shape).numel()).reshape(shape) % 7 + by + 1
        return made.to(dtype)

    def both(call):
        # What a collective leaves in the tensors that it is given and makes.
        return call(ours), call(gloo)

    wrong = []
    def check(name, call):
        got, want = both(call)
        same = len(got) == len(want) and all(
            a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
            for a, b in zip(got, want)
        )
        if not same:
            wrong.append(name)

    def reduced(op, dtype, layout=lambda t: t):
        def call(group):
            tensor = layout(own(dtype))
            dist.all_reduce(tensor, op, group=group)
            return [tensor]
        return call

    ops = dist.ReduceOp
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64):
        for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX):
            check(f"all_reduce {op} {dtype}", reduced(op, dtype))
    check("all_reduce bfloat16", reduced(ops.SUM, torch.bfloat16))
    complex_layout = lambda t: torch.complex(t, -t)
    check("all_reduce complex", reduced(ops.SUM, torch.float32, complex_layout))
    check("all_reduce 0-d", reduced(ops.SUM, torch.float32, lambda t: t[0, 0].clone()))
    check("all_reduce empty", reduced(ops.SUM, torch.float32, lambda t: t[:0].clone()))

    def to_all(dtype, layout=lambda t: t):
        def call(group):
            tensor = layout(own(dtype))
            dist.broadcast(tensor, 1, group=group)
            return [tensor]
        return call

    for dtype in (torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.complex64):
        check(f"broadcast {dtype}", to_all(dtype))

    def gathered(group):
        outputs = [torch.empty(6, 5) for _ in range(size)]
        dist.all_gather(outputs, own(torch.float32), group=group)
        return outputs
    check("all_gather", gathered)

    def gathered_into(group):
        output = torch.empty(6 * size, 5)
        dist.all_gather_into_tensor(output, own(torch.float32), group=group)
        return [output]
    check("all_gather_into_tensor", gathered_into)

    def gathered_in_place(group):
        output = torch.empty(6 * size, 5)
        mine = output[6 * rank : 6 * rank + 6]
        mine.copy_(own(torch.float32))
        dist.all_gather_into_tensor(output, mine, group=group)
        return [output]
    check("all_gather_into_tensor of its own part", gathered_in_place)

    def gathered_at(group):
        outputs = [torch.empty(6, 5) for _ in range(size)] if rank == 1 else None
        dist.gather(own(torch.float32), outputs, 1, group=group)
        return outputs or []
    check("gather", gathered_at)

    def scattered(group):
        output = torch.empty(6, 5)
        parts = [own(torch.float32, by=10 * i) for i in range(size)] if rank == 2 else None
        dist.scatter(output, parts, 2, group=group)
        return [output]
    check("scatter", scattered)

    def reduced_at(group):
        tensor = own(torch.float32)
        dist.reduce(tensor, 2, group=group)
        return [tensor] if rank == 2 else []
    check("reduce", reduced_at)

    def reduce_scattered(group):
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
    if not torch.equal(tensor, sum(own(torch.float32, by=i) for i in range(size)).T) or tensor.stride() != before:
        wrong.append("transposed")
    tensors = [own(torch.float32), own(torch.float32, (3,)), own(torch.float32, (0, 2))]
    dist.all_reduce_coalesced(tensors)
    if not torch.equal(tensors[1], sum(own(torch.float32, (3,), by=i) for i in range(size))):
        wrong.append("coalesced")
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
    last = torch.ones(5)
    dist.all_reduce(last)  # synchronous, after them
    if not all(work.is_completed() for work in works) or not torch.equal(last, torch.full((5,), float(size))):
        wrong.append("order")
    dist.barrier()
    dist.destroy_process_group()
    say(event="done", wrong=wrong)
    """
    assert [answer["wrong"] for answer in job.run(3, code)] == [[], [], []]


def test_functional_collectives_and_coalescing(job: Job) -> None:
    code = """
    import torch.distributed._functional_collectives as functional
    from torch.distributed.distributed_c10d import _coalescing_manager
    begin()
    group, wrong = dist.group.WORLD, []
    def check(name, got, want):
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
    check("coalesced", torch.cat(several), torch.cat([torch.arange(4.0) + 0.5, 2 * torch.arange(4.0) + 1]))
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
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    sent = [f"from {rank}", rank]
    dist.broadcast_object_list(sent, 1)
    got = [None]
    dist.scatter_object_list(got, ["a", "b"] if rank == 0 else None, 0)
    if objects != [{"rank": 0}, {"rank": 1}] or sent != ["from 1", 1] or got != ["ab"[rank]]:
        wrong.append("objects")
    lacks = {
        "BXOR": failure(dist.all_reduce, torch.ones(1), dist.ReduceOp.BXOR),
    }
    for name, error in lacks.items():
        if error is None or not error.startswith("NotSupported") or name not in error:
            wrong.append((name, error))
    dist.destroy_process_group()
    say(event="done", wrong=wrong)
    """
    assert [answer["wrong"] for answer in job.run(2, code)] == [[], []]


def test_groups_of_some_ranks_keep_their_order(job: Job) -> None:
    code = """
    begin()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 0]), dist.new_group([1])]
    def members(group):
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
    """
    answers = job.run(3, code)
    assert [(answer["ok"], answer["count"]) for answer in answers] == [
        (True, 2),
        (True, 2),
        (True, 1),
    ]


def test_messages_in_both_directions_and_out_of_order(job: Job) -> None:
    code = """
    begin()
    peer, wrong = 1 - rank, []
    if rank < 2:
        own, other = torch.arange(5.0) + rank, torch.empty(5)
        ops = [dist.P2POp(dist.irecv, other, peer), dist.P2POp(dist.isend, own, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if not torch.equal(other, torch.arange(5.0) + peer):
            wrong.append("both")
        if rank == 0:
            works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in (1, 2)]
        else:
            late, early = torch.empty(3), torch.empty(3)
            works = [dist.irecv(late, 0, tag=2), dist.irecv(early, 0, tag=1)]
        for work in works:
            work.wait()
        if rank == 1 and (late[0], early[0]) != (2, 1):
            wrong.append("tags")
    dist.barrier()
    if rank == 2:
        dist.send_object_list(["an object"], 1)
    elif rank == 1:
        got = [None]
        dist.recv_object_list(got, 2)
        if got != ["an object"]:
            wrong.append("object")
    dist.barrier()
    dist.destroy_process_group()
    say(event="done", wrong=wrong)
    """
    assert [answer["wrong"] for answer in job.run(3, code)] == [[], [], []]


def test_no_thread_outlives_the_process_group(job: Job) -> None:
    code = """
    import threading
    begin()

    class Slow:
        # To let go of a tensor takes a while, as it may on a busy machine.
        def __del__(self):
            threading.Event().wait(0.3)

    def slow():
        made = torch.ones(3)
        made.slow = Slow()
        return made

    if rank == 0:
        never = dist.irecv(torch.empty(3), 1)
    dist.all_reduce(slow(), async_op=True).wait()
    if rank == 1:
        dist.isend(slow(), 2).wait()
    if rank == 2:
        dist.irecv(slow(), 1).wait()
    dist.destroy_process_group()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pccl")]
    say(event="done", left=left)
    """
    assert [answer["left"] for answer in job.run(3, code)] == [[], [], []]


def test_a_forked_child_leaves_its_parents_groups_alone(job: Job) -> None:
    code = """
    begin()
    dist.barrier()
    groups = pccl.adapters.torch.process_group._open
    child = os.fork()
    if child == 0:
        os._exit(len(groups))  # how many it would leave at its end
    counts = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(groups)]
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()
    say(event="done", counts=counts, total=total.tolist())
    """
    for answer in job.run(2, code):
        assert answer["counts"] == [0, 1] and answer["total"] == [2.0] * 3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ddp_trains_as_one_process_does(job: Job, size: int) -> None:
    code = """
    from torch.nn.parallel import DistributedDataParallel
    begin()
    # Small buckets, so that several are reduced during backward; other weights on each rank before DDP shares them.
    net = DistributedDataParallel(model(seed=rank), bucket_cap_mb=0.002)
    trained = flat(train(net, rank, size))
    say(event="done", near=torch.allclose(trained, alone(), atol=1e-5), same=same_everywhere(trained))
    # Without destroy_process_group, as many programs end.
    """
    for answer in job.run(size, code):
        assert answer["near"] and answer["same"]


def test_fully_shard_trains_as_one_process_does(job: Job) -> None:
    code = """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    begin()
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
    """
    for answer in job.run(2, code):
        assert answer["near"] and answer["same"] and answer["norm"]


def test_hsdp_with_gloo_inside_and_pccl_between(job: Job) -> None:
    code = """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    begin("gloo")
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "shard"), backend_override={"replicate": "pccl", "shard": "gloo"}
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
    """
    for answer in job.run(4, code):
        assert answer["near"] and answer["same"] and answer["backends"] == ["pccl", "gloo"]


def test_dtensors_and_checkpoints(job: Job, tmp_path: Path) -> None:
    code = """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    begin()
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
    """
    for answer in job.run(2, code, FOLDER=str(tmp_path / "checkpoint")):
        assert answer["wrong"] == []


LOSS = """
begin()
data = torch.ones(1 << 16)
dist.all_reduce(data)
say(event="ready")
if rank == {lost}:
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
"""


def test_after_a_loss_every_collective_says_so(job: Job) -> None:
    workers = job.start(3, LOSS.format(lost=1))
    for worker in workers:
        worker.expect("ready", 60)
    workers[1].signal(signal.SIGKILL)
    for worker in (workers[0], workers[2]):
        errors = worker.expect("done", 60)["errors"]
        assert len(errors) == 4 and all(error.startswith("PeerLost") for error in errors), errors
        assert all("rank 1 of 3 is gone" in error for error in errors), errors
    for worker in (workers[0], workers[2]):
        assert worker.ends() == 0


def test_the_end_of_the_rank_that_runs_the_master_is_a_loss(job: Job) -> None:
    workers = job.start(3, LOSS.format(lost=0), PCCL_RECONNECT_TIMEOUT="1")
    for worker in workers:
        worker.expect("ready", 60)
    workers[0].signal(signal.SIGKILL)
    for worker in workers[1:]:
        errors = worker.expect("done", 60)["errors"]
        assert len(errors) == 4 and all(error.startswith("PeerLost") for error in errors), errors
        assert all("rank 0" in error for error in errors), errors


def test_a_loss_in_backward_is_an_exception_of_backward(job: Job) -> None:
    code = """
    from torch.nn.parallel import DistributedDataParallel
    begin()
    net = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    x, y = batch(0, rank, size)
    torch.nn.functional.mse_loss(net(x), y).backward()
    loss = torch.nn.functional.mse_loss(net(x), y)
    say(event="ready")
    if rank == 1:
        hear()
    say(event="done", backward=failure(loss.backward), later=failure(dist.barrier))
    """
    workers = job.start(3, code)
    for worker in workers:
        worker.expect("ready", 60)
    workers[1].signal(signal.SIGKILL)
    for worker in (workers[0], workers[2]):
        answer = worker.expect("done", 60)
        assert "PeerLost" in answer["backward"] and "rank 1 of 3" in answer["backward"], answer
        assert answer["later"].startswith("PeerLost")
        assert worker.ends() == 0


def test_members_that_call_different_things_are_told(job: Job) -> None:
    code = """
    begin()
    other = {0: lambda: dist.all_reduce(torch.ones(4)), 1: lambda: dist.all_reduce(torch.ones(5))}[rank]
    first = failure(other)
    kinds = {0: lambda: dist.broadcast(torch.ones(4), 0), 1: lambda: dist.all_reduce(torch.ones(4))}[rank]
    second = failure(kinds)
    again = torch.ones(4)
    dist.all_reduce(again)
    dist.destroy_process_group()
    say(event="done", first=first, second=second, again=again.tolist())
    """
    for answer in job.run(2, code):
        assert re.search(
            r"^MismatchedCall: .*float32\[4\].*float32\[5\]|float32\[5\].*float32\[4\]",
            answer["first"],
        )
        assert answer["second"].startswith("MismatchedCall") and "broadcast" in answer["second"]
        assert answer["again"] == [2.0] * 4


def test_a_master_of_ones_own_serves_several_jobs(tmp_path: Path) -> None:
    code = """
    begin()
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    say(event="done", total=x.tolist())
    """
    with running() as run:
        jobs = [Job(tmp_path / name) for name in "ab"]
        workers = [worker for job in jobs for worker in job.start(2, code, PCCL_MASTER=run.address)]
        try:
            for worker in workers:
                assert worker.expect("done", 60)["total"] == [2.0] * 3
                assert worker.ends() == 0
        finally:
            for worker in workers:
                worker.destroy()


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_ranks_that_are_started_again_with_the_store_they_had(where: str) -> None:
    # As torchrun does. What the killed ranks have left in it leads to a master that is gone, or to a dead group.
    code = """
    say(event="begins")
    hear()
    begin()
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
    say(event="done", total=x.tolist())
    hear()
    dist.destroy_process_group()
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job(store.port)
    with running() as run:
        env = {"PCCL_MASTER": run.address} if where == "outside" else {}
        for ends in (False, True):
            workers = job.start(3, code, **env)
            try:
                for worker in workers:
                    worker.expect("begins", 60)
                # Rank 0 comes last: the others find what was there before.
                for worker in reversed(workers):
                    worker.tell("go")
                for worker in workers:
                    assert worker.expect("done", 60)["total"] == [3.0] * 3
                for worker in workers if ends else []:
                    worker.tell("end")
                    assert worker.ends() == 0, worker.stderr()
            finally:
                for worker in workers:
                    worker.destroy()


HOOK = (
    PRELUDE[: PRELUDE.index("rank, size =")]
    + PRELUDE[PRELUDE.index("def failure") :]
    + """
from torch.nn.parallel import DistributedDataParallel
from pccl.adapters.torch import DDPState, ddp_hook
start()
rank = pccl.rank()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = DistributedDataParallel(model(), bucket_cap_mb=0.002)
state = DDPState()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
)


def test_the_ddp_hook_goes_on_without_a_lost_peer() -> None:
    code = (
        HOOK
        + """
step, begun = 0, []
def dying(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # The third step's first bucket is reduced over all, its last one without this peer.
    if step == 2 and bucket.is_last():
        begun[0].wait()
        os.kill(os.getpid(), signal.SIGKILL)
    future = ddp_hook(state, bucket)
    begun[:] = [work for _, _, work in state._buckets]
    return future

net.register_comm_hook(state, dying if rank == 2 else ddp_hook)
counts, alone = [], model()
for step in range(4):
    x, y = batch(step, rank, 3)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
    counts.append(len(state.info.contributors))

# The same in one process: three parts of the batch, then two.
single = torch.optim.SGD(alone.parameters(), lr=0.1)
for step in range(4):
    single.zero_grad()
    for part in range(counts[step]):
        x, y = batch(step, part, 3)
        (torch.nn.functional.mse_loss(alone(x), y) / counts[step]).backward()
    single.step()
near = torch.allclose(flat(net), flat(alone), atol=1e-6)
say(event="done", counts=counts, reruns=state.reruns, near=near, weights=flat(net).double().sum().item())
"""
    )
    with running(GLOO_SOCKET_IFNAME="lo") as run:
        peers = run.peers(3, code)
        answers = []
        for peer in peers:
            try:
                answers.append(peer.expect("done", 60))
            except AssertionError as error:
                assert "worker ended: -9" in str(error), error
    assert [answer["counts"] for answer in answers] == [[3, 3, 2, 2]] * 2
    assert [answer["reruns"] for answer in answers] == [1, 1]
    assert all(answer["near"] for answer in answers)
    assert answers[0]["weights"] == answers[1]["weights"]


def test_a_hook_that_cannot_go_on_raises_in_backward() -> None:
    code = (
        HOOK
        + """
net.register_comm_hook(state, ddp_hook)
x, y = batch(0, 0, 1)
torch.nn.functional.mse_loss(net(x), y).backward()
pccl.shutdown()
error = failure(torch.nn.functional.mse_loss(net(x), y).backward)
say(event="done", error=error)
"""
    )
    with running(GLOO_SOCKET_IFNAME="lo") as run:
        (peer,) = run.peers(1, code)
        assert "NotInitialized" in peer.expect("done", 60)["error"]
        assert peer.ends() == 0


def test_the_example_in_the_readme_runs(job: Job) -> None:
    page = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(# ddp\.py.*?)^```", page, re.DOTALL | re.MULTILINE)
    code = f"""
# Instead of torchrun, which needs a port.
rendezvous = sys.modules["torch.distributed.rendezvous"]
rendezvous._rendezvous_handlers["env"] = lambda url, **_: iter([(store, rank, size)])
shown = []
exec({example!r}, {{"print": shown.append}})
say(event="done", gradient=shown[0].tolist())
"""
    for answer in job.run(2, code):
        assert answer["gradient"] == [[12.0] * 4]  # 8 rows of ones on rank 0, of twos on rank 1
