"""Programs as authors write them for pypccl.

With LATE in its environment, one waits to be told before it joins; with VICTIM, it kills itself.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl import (
    Attribute,
    Communicator,
    DataType,
    MasterNode,
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
from programs.peer import engine, hear, say, value

Array = npt.NDArray[Any]


def join() -> Communicator:
    if "LATE" in os.environ:
        say(event="up")
        hear()
    comm = Communicator(os.environ["PCCL_MASTER"], 0)
    comm.connect(n_attempts=15)
    return comm


def digest(*arrays: Array) -> str:
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()


PROTOTYPES = np.random.default_rng(0).standard_normal((10, 64))


def batch(step: int, peer: str, count: int = 32) -> tuple[Array, npt.NDArray[np.int64]]:
    """Digits-like: ten noisy pictures of 64 pixels, and their labels.

    They depend on step and peer alone, so that one process can compute a run again.
    """
    rng = np.random.default_rng([step, value(peer)])
    labels = rng.integers(0, 10, count)
    return PROTOTYPES[labels] + 0.5 * rng.standard_normal((count, 64)), labels


def softmax_gradient(params: Array, inputs: Array, labels: npt.NDArray[np.int64]) -> Array:
    inputs = np.hstack([inputs, np.ones((len(inputs), 1))])
    scores = inputs @ params
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(labels)), labels] -= 1
    gradient: Array = inputs.T @ p / len(labels)
    return gradient


def accuracy(params: Array) -> float:
    inputs, labels = batch(10**6, "f" * 32, 500)
    return float(((inputs @ params[:-1] + params[-1]).argmax(1) == labels).mean())


def vanish() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Adam:
    def __init__(self) -> None:
        self.params = np.random.default_rng(os.getpid()).standard_normal((65, 10)) * 0.01
        self.m, self.v, self.t = np.zeros((65, 10)), np.zeros((65, 10)), np.zeros(1, np.int64)

    def step(self, gradient: Array) -> None:
        self.t += 1
        self.m += 0.1 * (gradient - self.m)
        self.v += 0.001 * (gradient**2 - self.v)
        m, v = self.m / (1 - 0.9 ** self.t[0]), self.v / (1 - 0.999 ** self.t[0])
        self.params -= 0.01 * m / (np.sqrt(v) + 1e-8)


class Reduction(threading.Thread):
    """Reduces a gradient until it works. Alone, `mean` is the gradient."""

    def __init__(self, comm: Communicator, gradient: Array) -> None:
        super().__init__()
        self._comm = comm
        self.gradient, self.mean = gradient, np.empty_like(gradient)
        self.start()

    def run(self) -> None:
        while self._comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE) > 1:
            handle = self._comm.all_reduce_async(self.gradient, self.mean, op=ReduceOp.AVG, tag=1)
            success, status, info = handle.wait()
            if success:
                return
        self.mean[...] = self.gradient


def ddp_with_adam() -> None:
    adam, end = Adam(), np.zeros(1, np.int64)
    named = {"params": adam.params, "m": adam.m, "v": adam.v, "t": adam.t, "end": end}
    state = SharedState([TensorInfo.from_numpy(array, name) for name, array in named.items()])
    first: int | None = None
    contributors: list[tuple[str, ...]] = []
    lost_one = False
    comm = join()
    me = engine(comm).peer_id()
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
        gradient = softmax_gradient(adam.params, *batch(state.revision, me))
        mean = np.empty_like(gradient)
        while world > 1:
            handle = comm.all_reduce_async(gradient, mean, op=ReduceOp.AVG)
            if state.revision == 10 and "VICTIM" in os.environ:
                vanish()
            is_success, status, reduced = handle.wait()
            world = comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
            if is_success:
                contributors.append(reduced.contributors)
                break
            assert Result(status) is Result.RANK_CONNECTION_LOST
        else:
            mean[...] = gradient
            contributors.append((me,))
        adam.step(mean)
        state.push_revision()

    # The same run again, by one process.
    again = None
    if first == 0:
        again = Adam()
        again.params[...] = start_params
        for step, peers in enumerate(contributors):
            again.step(
                np.mean([softmax_gradient(again.params, *batch(step, p)) for p in peers], axis=0)
            )
    say(
        event="done",
        first=first,
        digest=digest(*named.values()),
        revision=state.revision,
        accuracy=accuracy(adam.params),
        sizes=sorted({len(peers) for peers in contributors}),
        replayed=again is None or bool(np.allclose(again.params, adam.params, atol=1e-6)),
    )


def delayed_diloco() -> None:
    """DiLoCo one outer step behind.

    The last step's pseudo-gradient travels on a thread while this step's inner steps run.
    """
    H, LR, MOMENTUM = 4, 0.5, 0.6
    outer = np.random.default_rng(os.getpid()).standard_normal((65, 10)) * 0.01
    momentum, count, end = np.zeros_like(outer), np.zeros(1, np.int64), np.zeros(1, np.int64)
    state = SharedState(
        [
            TensorInfo.from_numpy(outer, "outer"),
            TensorInfo.from_numpy(momentum, "momentum"),
            TensorInfo.from_numpy(count, "count"),
            TensorInfo.from_numpy(end, "end"),
        ]
    )

    comm = join()
    me = engine(comm).peer_id()
    say(event="in")
    local_iter, eavesdropped = 0, False
    pending: Reduction | None = None
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
            params -= 0.5 * softmax_gradient(params, *batch(int(count[0]) * H + step, me))
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
            part = (
                SharedStateSyncStrategy.RECEIVE_ONLY
                if pending is None
                else SharedStateSyncStrategy.SEND_ONLY
            )
            info = comm.sync_shared_state(state, part)
            eavesdropped = info.rx_bytes > 0
            state.push_revision()
        count += 1
        pending = Reduction(comm, gradient)
    assert pending is not None
    pending.join()
    say(
        event="done",
        digest=digest(outer, momentum, count),
        revision=state.revision,
        accuracy=accuracy(outer),
        eavesdropped=eavesdropped,
    )


def reduce_many() -> None:
    comm = join()
    me = engine(comm).peer_id()
    while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) < 3:
        comm.update_topology()
    peers = engine(comm).membership()[3]
    say(event="in", sum=sum(map(value, peers)), own=value(me))
    victim = hear() == "die"
    sends = [np.full(1 + 37 * i, value(me) + i, np.int64) for i in range(256)]
    recvs = [np.zeros_like(send) for send in sends]
    descriptors = [
        ReduceOpDescriptor.from_numpy(
            send,
            recv,
            ReduceDescriptor(
                count=send.size,
                op=ReduceOp.SUM,
                tag=i,
                operand_descriptor=ReduceOperandDescriptor(DataType.from_numpy_dtype(send.dtype)),
                quantization_options=QuantizationOptions(
                    DataType.INT64, QuantizationAlgorithm.NONE
                ),
            ),
        )
        for i, (send, recv) in enumerate(zip(sends, recvs, strict=True))
    ]
    info = comm.all_reduce_multiple_with_retry(
        descriptors[: 100 if victim else None], max_in_flight=128
    )
    if victim:
        vanish()
    uniform = all((recv == recv[0]).all() for recv in recvs)
    kept = all((send == value(me) + i).all() for i, send in enumerate(sends))
    say(
        event="done",
        uniform=bool(uniform and kept),
        sums=[int(recv[0]) for recv in recvs],
        size=info.local_world_size,
        attempts=info.attempts,
    )
    hear()


def reduce_in_shards() -> None:
    """Two replicas of two shards: a shard's peers form a group. All wait until all are there."""
    shard = int(os.environ["SHARD"])
    comm = Communicator(os.environ["PCCL_MASTER"], peer_group=shard)
    comm.connect()
    size = comm.get_attribute
    while True:
        complete = (
            size(Attribute.NUM_DISTINCT_PEER_GROUPS) == 2
            and size(Attribute.GLOBAL_WORLD_SIZE)
            == 2 * size(Attribute.LARGEST_PEER_GROUP_WORLD_SIZE)
            == 4
        )
        if complete:
            break
        comm.update_topology()
    gradient = np.full(1000, float(shard), np.float32)
    info = comm.all_reduce(gradient, gradient, op=ReduceOp.SUM, tag=3)
    say(event="done", own=bool((gradient == 2 * shard).all()), size=info.local_world_size)
    hear()


def reduce_in_pair() -> None:
    comm = join()
    while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) < 2:
        comm.update_topology()
    total = np.zeros(10)
    comm.all_reduce(np.ones(10), total, op=ReduceOp.SUM)
    say(event="done", total=total.tolist())
    hear()


def join_late() -> None:
    say(event="up")
    join()
    say(event="in")
    hear()


def run_master() -> None:
    """Returns while its master serves."""
    master = MasterNode(listen_address="127.0.0.1:0")
    master.run()
    say(event="listening", address=master.address)


def report_codes() -> None:
    def code(call: Callable[[], object]) -> str:
        try:
            call()
        except PCCLError as error:
            return error.result.name
        return "SUCCESS"

    a, b = np.ones(4, np.float32), np.zeros(4, np.float32)
    what = ReduceDescriptor(
        4, ReduceOp.SUM, 0, ReduceOperandDescriptor(DataType.FLOAT), QuantizationOptions()
    )
    one = [ReduceOpDescriptor.from_numpy(a, b, what)]
    state = SharedState([TensorInfo.from_numpy(a, "a")])
    comm = Communicator(os.environ["PCCL_MASTER"])
    calls: list[Callable[[], object]] = [
        comm.update_topology,
        comm.are_peers_pending,
        comm.optimize_topology,
        lambda: comm.get_attribute(Attribute.GLOBAL_WORLD_SIZE),
        lambda: comm.all_reduce(a, b, op=ReduceOp.SUM),
    ]
    codes = [code(call) for call in calls]
    comm.connect()
    if "FIRST" in os.environ:  # alone
        calls = [
            lambda: comm.all_reduce(a, b, op=ReduceOp.SUM),
            lambda: comm.all_reduce_async(a, b, op=ReduceOp.SUM),
            lambda: comm.all_reduce_multiple_with_retry(one),
            comm.optimize_topology,
            comm.connect,
        ]
        say(event="alone", codes=codes + [code(call) for call in calls])
    while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) < 2:
        comm.update_topology()
    say(event="two")
    hear()
    handle = comm.all_reduce_async(a, b, op=ReduceOp.SUM, tag=7)
    if "FIRST" in os.environ:  # the other one has not called yet
        calls = [
            comm.update_topology,
            lambda: comm.sync_shared_state(state),
            comm.optimize_topology,
            lambda: comm.all_reduce_multiple_with_retry(one, max_in_flight=0),
            lambda: comm.all_reduce(a, b[:3], op=ReduceOp.SUM),
        ]
        say(event="pending", codes=[code(call) for call in calls])
    waited = handle.wait()
    say(
        event="done",
        kinds=[type(part).__name__ for part in waited],
        again=waited == handle.wait(),
        sum=b.tolist(),
        result=Result(waited[1]).name,
    )
    comm.optimize_topology()
    say(event="end")


def retry_for_ever() -> None:
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


def quantize_as_told() -> None:
    comm = join()
    while comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) < 2:
        comm.update_topology()
    say(event="in")
    options = {"none": None, "minmax": QuantizationOptions()}[hear()]
    a = np.ones(1000, np.float32)
    try:
        comm.all_reduce(a, a, op=ReduceOp.SUM, quantization_options=options)
    except PCCLError as error:
        say(
            event="told",
            kind=type(error).__name__,
            named="uint8 (min_max)" in str(error),
            kept=bool((a == 1).all()),
        )
    hear()
