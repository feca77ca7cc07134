"""Programs as authors for pypccl write them, as real processes: its names, its shapes, with joiners and kills."""

import signal
import subprocess
import sys
import tempfile
import textwrap

import pytest
from workers import Run, Worker, running

import pccl

# What all programs share. Batches depend on step and peer alone, so that a run can be computed again by one process.
COMMON = """
import hashlib, os, time
from pccl import *
from pccl import Result

def join():
    if "LATE" in os.environ:
        say(event="up")
        hear()
    comm = Communicator(os.environ["PCCL_MASTER"], 0)
    comm.connect(n_attempts=15)
    pccl.init_peer = comm._engine.peer_id()
    return comm

def digest(*arrays):
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()

PROTOTYPES = np.random.default_rng(0).standard_normal((10, 64))

def batch(step, peer, count=32):
    # Digits-like: ten noisy pictures of 64 pixels.
    rng = np.random.default_rng([step, value(peer)])
    labels = rng.integers(0, 10, count)
    return PROTOTYPES[labels] + 0.5 * rng.standard_normal((count, 64)), labels

def softmax_gradient(params, inputs, labels):
    inputs = np.hstack([inputs, np.ones((len(inputs), 1))])
    scores = inputs @ params
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(labels)), labels] -= 1
    return inputs.T @ p / len(labels)

def accuracy(params):
    inputs, labels = batch(10**6, "f" * 32, 500)
    return float(((inputs @ params[:-1] + params[-1]).argmax(1) == labels).mean())

def vanish():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def program(code: str) -> str:
    return textwrap.dedent(COMMON) + textwrap.dedent(code)


def run_of_three(run: Run, code: str) -> tuple[Worker, Worker, Worker]:
    """A member, one that will be killed, and one that comes later; they load what they need at the same time."""
    member, victim = run.peer(program(code)), run.peer(program(code), VICTIM="1")
    late = run.peer(program(code), LATE="1")
    for worker in (member, victim):
        worker.expect("in", 200)
    late.expect("up", 200)
    late.tell("go")
    late.expect("in", 60)
    return member, victim, late


DDP_NUMPY = """
class Adam:
    def __init__(self):
        self.params = np.random.default_rng(os.getpid()).standard_normal((65, 10)) * 0.01
        self.m, self.v, self.t = np.zeros((65, 10)), np.zeros((65, 10)), np.zeros(1, np.int64)

    def step(self, gradient):
        self.t += 1
        self.m += 0.1 * (gradient - self.m)
        self.v += 0.001 * (gradient**2 - self.v)
        m, v = self.m / (1 - 0.9 ** self.t[0]), self.v / (1 - 0.999 ** self.t[0])
        self.params -= 0.01 * m / (np.sqrt(v) + 1e-8)

adam, end = Adam(), np.zeros(1, np.int64)
named = {"params": adam.params, "m": adam.m, "v": adam.v, "t": adam.t, "end": end}
state = SharedState([TensorInfo.from_numpy(array, name) for name, array in named.items()])
first, contributors, lost_one = None, [], False
comm = join()
say(event="in")
local_iter = num_syncs = 0
while end[0] == 0 or state.revision < end[0]:
    if local_iter > 0 or comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1:
        if comm.are_peers_pending():
            comm.update_topology()
    local_iter += 1
    world = comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
    if state.revision == 0 and world < 3:  # the run starts with three
        time.sleep(0.01)
        continue
    info = comm.sync_shared_state(state)
    num_syncs += 1
    assert num_syncs == 1 or info.rx_bytes == 0, "members drifted"
    if first is None:
        first, start_params = state.revision, adam.params.copy()
    lost_one = lost_one or (state.revision >= 10 and world == 2)
    if world == 3 and (lost_one or first > 0) and end[0] == 0:
        end[0] = state.revision + 10  # the newcomer is in: all see it at the same revision
    gradient = softmax_gradient(adam.params, *batch(state.revision, pccl.init_peer))
    mean = np.empty_like(gradient)
    while world > 1:
        handle = comm.all_reduce_async(gradient, mean, op=ReduceOp.AVG)
        if state.revision == 10 and "VICTIM" in os.environ:
            vanish()
        is_success, status, info = handle.wait()
        world = comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        if is_success:
            contributors.append(info.contributors)
            break
        assert Result(status) is Result.RANK_CONNECTION_LOST
    else:
        mean[...] = gradient
        contributors.append((pccl.init_peer,))
    adam.step(mean)
    state.push_revision()

# The same run again, by one process.
again = None
if first == 0:
    again = Adam()
    again.params[...] = start_params
    for step, peers in enumerate(contributors):
        again.step(np.mean([softmax_gradient(again.params, *batch(step, p)) for p in peers], axis=0))
say(event="done", first=first, digest=digest(*named.values()), revision=state.revision,
    accuracy=accuracy(adam.params), sizes=sorted({len(peers) for peers in contributors}),
    replayed=again is None or bool(np.allclose(again.params, adam.params, atol=1e-6)))
"""


def test_ddp_with_adam_in_the_shared_state_numpy_only() -> None:
    with running() as run:
        members = [run.peer(program(DDP_NUMPY)) for _ in range(2)]
        victim = run.peer(program(DDP_NUMPY), VICTIM="1")
        for worker in (*members, victim):
            worker.expect("in")
        assert victim.ends() == -signal.SIGKILL
        late = run.peer(program(DDP_NUMPY))
        late.expect("in")
        answers = [worker.expect("done", 60) for worker in (*members, late)]
    assert [answer["first"] == 0 for answer in answers] == [True, True, False]
    assert len({(answer["digest"], answer["revision"]) for answer in answers}) == 1
    assert all(answer["replayed"] and answer["accuracy"] > 0.9 for answer in answers)
    assert [answer["sizes"] for answer in answers] == [[2, 3], [2, 3], [3]]


DDP_TORCH = """
import torch
torch.set_num_threads(1)
torch.manual_seed(os.getpid())

class Pictures(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(64, 32), torch.nn.Linear(32, 10)
    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))

def on_tensors(inputs, labels):
    return torch.from_numpy(inputs).float(), torch.from_numpy(labels)

model = Pictures()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for p in model.parameters():  # a step that changes nothing makes the optimizer's tensors
    p.grad = torch.zeros_like(p)
optimizer.step()
end = torch.zeros(1, dtype=torch.int64)
entries = {"end": end, **{n: p for n, p in model.named_parameters()}}
for name, p in model.named_parameters():
    entries |= {f"{name}.{key}": tensor for key, tensor in optimizer.state[p].items()}
state = SharedState([TensorInfo.from_torch(t, name=n) for n, t in entries.items()])

comm = join()
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
    syncs.append(comm.sync_shared_state(state, SharedStateSyncStrategy.ENFORCE_POPULAR).rx_bytes)
    if world == 3 and end.item() == 0:
        end += state.revision + 10
    if end.item() and "VICTIM" in os.environ:
        vanish()
    inputs, labels = on_tensors(*batch(state.revision, pccl.init_peer))
    optimizer.zero_grad(set_to_none=False)
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    while world > 1:
        try:
            info = comm.all_reduce(
                flat, flat, op=ReduceOp.AVG,
                operand_descriptor=ReduceOperandDescriptor(DataType.FLOAT, DistributionHint.NORMAL),
                quantization_options=QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX))
            assert info.local_world_size > 1
            break
        except PCCLError as error:
            world = comm.get_attribute(Attribute.LOCAL_WORLD_SIZE)
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()
    optimizer.step()
    state.revision += 1

inputs, labels = on_tensors(*batch(10**6, "f" * 32, 500))
say(event="done", digest=digest(*(t.detach().numpy() for t in entries.values())), world=world,
    revision=state.revision, accuracy=(model(inputs).argmax(1) == labels).float().mean().item(),
    later=sum(syncs[1:]), steps=int(optimizer.state[p]["step"]) - 1)
"""


@pytest.mark.timeout(400)  # importing torch three times on a busy machine
def test_ddp_with_a_torch_optimizer_quantized_and_optimized_torch_only() -> None:
    pytest.importorskip("torch")
    with running() as run:
        member, victim, late = run_of_three(run, DDP_TORCH)
        assert victim.ends(60) == -signal.SIGKILL
        answers = [worker.expect("done", 60) for worker in (member, late)]
    assert len({(answer["digest"], answer["revision"]) for answer in answers}) == 1
    for answer in answers:
        assert answer["accuracy"] > 0.9 and answer["world"] == 2 and answer["later"] == 0
        assert answer["steps"] == answer["revision"]


DILOCO = """
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
    + [TensorInfo.from_numpy(end, "end")])

comm = join()
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
        inputs, labels = batch(state.revision * H + step, pccl.init_peer)
        inner.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(torch.from_numpy(inputs).float()), torch.from_numpy(labels))
        loss.backward()
        inner.step()
    if end[0] and state.revision == end[0] - 4 and "VICTIM" in os.environ:
        vanish()
    pseudo = {n: torch.from_numpy(outer[n]) - p.detach() for n, p in model.named_parameters()}
    descriptors = [
        ReduceOpDescriptor.from_torch(
            send=g, recv=g,
            reduce_descriptor=ReduceDescriptor(
                count=g.numel(), op=ReduceOp.AVG, tag=tag,
                operand_descriptor=ReduceOperandDescriptor(
                    datatype=DataType.from_torch_dtype(g.dtype), distribution_hint=DistributionHint.NORMAL),
                quantization_options=QuantizationOptions(
                    quantized_datatype=DataType.FLOAT, algorithm=QuantizationAlgorithm.NONE)))
        for tag, g in enumerate(pseudo.values())]
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
say(event="done", digest=digest(*outer.values(), *momentum.values()), revision=state.revision,
    accuracy=accuracy(weights), later=sum(received[1:]), first=received[0])
"""


@pytest.mark.timeout(400)  # importing torch three times on a busy machine
def test_diloco_with_outer_momentum_numpy_and_torch() -> None:
    pytest.importorskip("torch")
    with running() as run:
        member, victim, late = run_of_three(run, DILOCO)
        assert victim.ends(60) == -signal.SIGKILL
        answers = [worker.expect("done", 60) for worker in (member, late)]
    assert len({(answer["digest"], answer["revision"]) for answer in answers}) == 1
    assert all(answer["accuracy"] > 0.9 and answer["later"] == 0 for answer in answers)
    assert answers[1]["first"] > 0


DELAYED = """
# One outer step behind: the last step's pseudo-gradient travels on a thread while this step's inner steps run.
H, LR, MOMENTUM = 4, 0.5, 0.6
outer = np.random.default_rng(os.getpid()).standard_normal((65, 10)) * 0.01
momentum, count, end = np.zeros_like(outer), np.zeros(1, np.int64), np.zeros(1, np.int64)
state = SharedState([
    TensorInfo.from_numpy(outer, "outer"), TensorInfo.from_numpy(momentum, "momentum"),
    TensorInfo.from_numpy(count, "count"), TensorInfo.from_numpy(end, "end")])

class Reduction(threading.Thread):
    def __init__(self, gradient):
        super().__init__()
        self.gradient, self.mean = gradient, np.empty_like(gradient)
        self.start()

    def run(self):
        while comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE) > 1:
            handle = comm.all_reduce_async(self.gradient, self.mean, op=ReduceOp.AVG, tag=1)
            success, status, info = handle.wait()
            if success:
                return
        self.mean[...] = self.gradient

comm = join()
say(event="in")
local_iter, pending, eavesdropped = 0, None, False
while end[0] == 0 or count[0] < end[0]:
    changed = local_iter == 0
    if local_iter > 0 or comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1:
        if comm.are_peers_pending():  # the thread may be in the middle of its reduction
            if pending is not None:
                pending.join()
            comm.update_topology()
            changed = True
    local_iter += 1
    world = comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
    if count[0] == 0 and world < 2:
        time.sleep(0.01)
        continue
    if changed or count[0] == 0:
        comm.sync_shared_state(state)
        state.push_revision()
    if world == 3 and end[0] == 0:
        end[0] = count[0] + 12
    params = outer.copy()
    for step in range(H):
        params -= 0.5 * softmax_gradient(params, *batch(int(count[0]) * H + step, pccl.init_peer))
        if end[0] and count[0] == end[0] - 6 and step == 2 and "VICTIM" in os.environ:
            vanish()
    if pending is not None:
        pending.join()
    gradient = outer - params
    if pending is not None:
        momentum *= MOMENTUM
        momentum += pending.mean
        outer -= LR * (pending.mean + MOMENTUM * momentum)
    if changed and count[0] > 0:
        part = SharedStateSyncStrategy.RECEIVE_ONLY if pending is None else SharedStateSyncStrategy.SEND_ONLY
        info = comm.sync_shared_state(state, part)
        eavesdropped = info.rx_bytes > 0
        state.push_revision()
    count += 1
    pending = Reduction(gradient)
pending.join()
say(event="done", digest=digest(outer, momentum, count), revision=state.revision,
    accuracy=accuracy(outer), eavesdropped=eavesdropped)
"""


def test_one_step_delayed_diloco_reduces_on_a_thread_while_peers_are_asked_for() -> None:
    with running() as run:
        member, victim, late = run_of_three(run, DELAYED)
        assert victim.ends(60) == -signal.SIGKILL
        answers = [worker.expect("done", 60) for worker in (member, late)]
    assert len({(answer["digest"], answer["revision"]) for answer in answers}) == 1
    assert all(answer["accuracy"] > 0.9 for answer in answers)
    assert [answer["eavesdropped"] for answer in answers] == [False, True]


MANY = """
comm = join()
while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) < 3:
    comm.update_topology()
peers = comm._engine.membership()[3]
say(event="in", sum=sum(map(value, peers)), own=value(pccl.init_peer))
victim = hear() == "die"
sends = [np.full(1 + 37 * i, value(pccl.init_peer) + i, np.int64) for i in range(256)]
recvs = [np.zeros_like(send) for send in sends]
descriptors = [
    ReduceOpDescriptor.from_numpy(send, recv, ReduceDescriptor(
        count=send.size, op=ReduceOp.SUM, tag=i,
        operand_descriptor=ReduceOperandDescriptor(DataType.from_numpy_dtype(send.dtype)),
        quantization_options=QuantizationOptions(DataType.INT64, QuantizationAlgorithm.NONE)))
    for i, (send, recv) in enumerate(zip(sends, recvs))]
info = comm.all_reduce_multiple_with_retry(descriptors[: 100 if victim else None], max_in_flight=128)
if victim:
    vanish()
uniform = all((recv == recv[0]).all() for recv in recvs)
kept = all((send == value(pccl.init_peer) + i).all() for i, send in enumerate(sends))
say(event="done", uniform=bool(uniform and kept), sums=[int(recv[0]) for recv in recvs],
    size=info.local_world_size, attempts=info.attempts)
hear()
"""


def test_128_reductions_in_flight_go_on_among_the_survivors() -> None:
    with running() as run:
        workers = [run.peer(program(MANY)) for _ in range(3)]
        ready = [worker.expect("in") for worker in workers]
        for worker, order in zip(workers, ("go", "die", "go"), strict=True):
            worker.tell(order)
        assert workers[1].ends() == -signal.SIGKILL
        answers = [worker.expect("done") for worker in (workers[0], workers[2])]
    total, lost = ready[0]["sum"], ready[1]["own"]
    want = [total + 3 * i if i < 100 else total - lost + 2 * i for i in range(256)]
    for answer in answers:
        assert answer["uniform"] and answer["size"] == 2
        assert answer["sums"] == want
        assert answer["attempts"] > 256  # 28 and more were in flight with who died


GROUPS = """
# Two replicas of two shards: a shard's peers form a group. Nobody computes before all are there.
shard = int(os.environ["SHARD"])
comm = Communicator(os.environ["PCCL_MASTER"], peer_group=shard)
comm.connect()
pccl.init_peer = comm._engine.peer_id()
size = comm.get_attribute
while True:
    complete = (size(Attribute.NUM_DISTINCT_PEER_GROUPS) == 2
                and size(Attribute.GLOBAL_WORLD_SIZE) == 2 * size(Attribute.LARGEST_PEER_GROUP_WORLD_SIZE) == 4)
    if complete:
        break
    comm.update_topology()
gradient = np.full(1000, float(shard), np.float32)
info = comm.all_reduce(gradient, gradient, op=ReduceOp.SUM, tag=3)
say(event="done", own=bool((gradient == 2 * shard).all()), size=info.local_world_size)
hear()
"""


def test_peers_of_a_shard_wait_until_all_shards_are_complete() -> None:
    with running() as run:
        workers = [run.peer(program(GROUPS), SHARD=str(i % 2)) for i in range(4)]
        for worker in workers:
            assert worker.expect("done") == {"event": "done", "own": True, "size": 2}


MASTER = """
from pccl import MasterNode

def main():
    master = MasterNode(listen_address="127.0.0.1:0")
    master.run()
    say(event="listening", address=master.address)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_master_script_that_returns_from_main_serves_until_it_is_told(
    ending: signal.Signals,
) -> None:
    pair = program(
        """
        comm = join()
        while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) < 2:
            comm.update_topology()
        total = np.zeros(10)
        comm.all_reduce(np.ones(10), total, op=ReduceOp.SUM)
        say(event="done", total=total.tolist())
        hear()
        """
    )
    master = Worker(MASTER)
    workers = [master]
    try:
        address = master.expect("listening")["address"]
        workers += [Worker(pair, PCCL_MASTER=address) for _ in range(2)]
        for worker in workers[1:]:
            assert worker.expect("done")["total"] == [2.0] * 10
        assert master.process.poll() is None
        master.signal(ending)
        assert master.ends(20) in (0, 1, -ending, 130)
    finally:
        for worker in workers:
            worker.destroy()


def test_masters_come_and_go_on_one_port_and_a_peer_may_be_there_first() -> None:
    with pccl.MasterNode(listen_address="127.0.0.1:0") as master:
        address = master.address
    peer = Worker(program("say(event='up'); join(); say(event='in'); hear()"), PCCL_MASTER=address)
    try:
        peer.expect("up")  # and finds nobody
        for _ in range(5):
            master = pccl.MasterNode(listen_address=address)
            master.run()
            master.interrupt()
            del master
        with pccl.MasterNode(listen_address=address):
            peer.expect("in", 20)
    finally:
        peer.destroy()


def test_nobody_there_is_an_exception_after_the_last_attempt() -> None:
    with pccl.MasterNode(listen_address="127.0.0.1:0") as master:
        address = master.address
    comm = pccl.Communicator(address, 0)
    with pytest.raises(Exception, match="MASTER_CONNECTION_FAILED"):
        comm.connect(2)


def test_calls_that_cannot_work_report_the_codes_authors_know() -> None:
    code = """
    def code(call):
        try:
            call()
        except PCCLError as error:
            return error.result.name
        return "SUCCESS"

    a, b = np.ones(4, np.float32), np.zeros(4, np.float32)
    what = ReduceDescriptor(4, ReduceOp.SUM, 0, ReduceOperandDescriptor(DataType.FLOAT), QuantizationOptions())
    one = [ReduceOpDescriptor.from_numpy(a, b, what)]
    state = SharedState([TensorInfo.from_numpy(a, "a")])
    comm = Communicator(os.environ["PCCL_MASTER"])
    codes = []
    for call in (
        comm.update_topology, comm.are_peers_pending, comm.optimize_topology,
        lambda: comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE),
        lambda: comm.all_reduce(a, b, op=ReduceOp.SUM),
    ):
        codes.append(code(call))
    comm.connect()
    if "FIRST" in os.environ:  # alone
        for call in (
            lambda: comm.all_reduce(a, b, op=ReduceOp.SUM),
            lambda: comm.all_reduce_async(a, b, op=ReduceOp.SUM),
            lambda: comm.all_reduce_multiple_with_retry(one),
            comm.optimize_topology, comm.connect,
        ):
            codes.append(code(call))
        say(event="alone", codes=codes)
        codes = []
    while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) < 2:
        comm.update_topology()
    say(event="two")
    hear()
    handle = comm.all_reduce_async(a, b, op=ReduceOp.SUM, tag=7)
    if "FIRST" in os.environ:  # the other one has not called yet
        for call in (
            comm.update_topology, lambda: comm.sync_shared_state(state), comm.optimize_topology,
            lambda: comm.all_reduce_multiple_with_retry(one, max_in_flight=0),
            lambda: comm.all_reduce(a, b[:3], op=ReduceOp.SUM),
        ):
            codes.append(code(call))
        say(event="pending", codes=codes)
    waited = handle.wait()
    say(event="done", kinds=[type(part).__name__ for part in waited], again=waited == handle.wait(),
        sum=b.tolist(), result=Result(waited[1]).name)
    comm.optimize_topology()
    say(event="end")
    """
    with running() as run:
        first = run.peer(program(code), FIRST="1")
        assert first.expect("alone")["codes"] == (
            ["INVALID_USAGE"] * 5 + ["TOO_FEW_PEERS"] * 3 + ["SUCCESS", "INVALID_USAGE"]
        )
        second = run.peer(program(code))
        for worker in (first, second):
            worker.expect("two")
        first.tell("go")
        assert first.expect("pending")["codes"] == (
            ["PENDING_ASYNC_OPS"] * 3 + ["INVALID_ARGUMENT"] * 2
        )
        second.tell("go")
        for worker in (first, second):
            assert worker.expect("done") == {
                "event": "done",
                "kinds": ["bool", "int", "ReduceInfo"],
                "again": True,
                "sum": [2.0] * 4,
                "result": "SUCCESS",
            }
            worker.expect("end")


def test_a_retry_loop_ends_when_the_master_is_gone() -> None:
    code = """
    comm = join()
    while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) < 2:
        comm.update_topology()
    say(event="in")
    hear()
    gradient, mean, failures = np.ones(1000), np.zeros(1000), 0
    try:
        while True:  # every step reduces until it works, as the documentation of pypccl has it
            while comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE) > 1:
                handle = comm.all_reduce_async(gradient, mean, op=ReduceOp.AVG)
                success, status, info = handle.wait()
                if success:
                    break
                failures += 1
                assert Result(status) is Result.RANK_CONNECTION_LOST and (gradient == 1).all()
            else:
                raise SystemExit("alone all of a sudden")
    except PCCLError as error:
        say(event="over", kind=type(error).__name__, failures=failures)
    """
    with running(PCCL_RECONNECT_TIMEOUT="1", PCCL_SHM="0") as run:
        workers = [run.peer(program(code)) for _ in range(2)]
        for worker in workers:
            worker.expect("in")
            worker.tell("go")
        run.master.signal(signal.SIGKILL)
        for worker in workers:
            over = worker.expect("over")
            assert over["kind"] in ("MasterLost", "InvalidUsage") and over["failures"] <= 1


def test_members_that_quantize_differently_are_told() -> None:
    code = """
    comm = join()
    while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) < 2:
        comm.update_topology()
    say(event="in")
    options = {"none": None, "minmax": QuantizationOptions()}[hear()]
    a = np.ones(1000, np.float32)
    try:
        comm.all_reduce(a, a, op=ReduceOp.SUM, quantization_options=options)
    except PCCLError as error:
        say(event="told", kind=type(error).__name__, named="uint8 (min_max)" in str(error), kept=bool((a == 1).all()))
    hear()
    """
    with running() as run:
        workers = [run.peer(program(code)) for _ in range(2)]
        for worker, how in zip(workers, ("none", "minmax"), strict=True):
            worker.expect("in")
            worker.tell(how)
        for worker in workers:
            assert worker.expect("told") == {
                "event": "told",
                "kind": "MismatchedCall",
                "named": True,
                "kept": True,
            }


def test_a_star_import_brings_the_names_authors_use_and_loads_no_framework() -> None:
    code = (
        "import sys\n"
        "from pccl import *\n"
        "import pccl, pccl._pccl\n"
        "from pccl._pccl import ReduceDescriptor as same\n"
        "from pccl.master import main\n"
        "assert same is ReduceDescriptor and callable(main) and not cuda.is_available()\n"
        "Communicator, MasterNode, ReduceOp, Attribute, SharedStateSyncStrategy, DataType\n"
        "DistributionHint, QuantizationAlgorithm, ReduceOperandDescriptor, QuantizationOptions\n"
        "ReduceDescriptor, TensorInfo, SharedState, SharedStateSyncInfo, ReduceInfo\n"
        "ReduceOpDescriptor, AsyncReduceHandle, PCCLError\n"
        "pccl.Result, pccl.DeviceType, pccl.__version__\n"
        "assert not {'torch', 'jax'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tempfile.gettempdir(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
