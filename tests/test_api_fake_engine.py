"""The Python layers over a fake engine with `WORLD` equal members, so that sums multiply."""

import asyncio
import gc
import importlib.util
import math
import os
import subprocess
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from members import in_threads
from programs import arrays
from workers import command, eventually

import pccl
from pccl import (
    DataType,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    _core,
    adapters,
    frameworks,
)
from pccl.errors import from_engine

WORLD = 4
INFO = SimpleNamespace(
    world_size=WORLD,
    contributors=["a", "b", "c", "d"],
    epoch=3,
    attempts=1,
    tx_bytes=10,
    rx_bytes=20,
    bytes=30,
    seconds=4.0,
    waiting_seconds=2.0,
    moving_seconds=1.0,
)


class FakeOperation:
    """Finishes when it is waited for, or at once."""

    def __init__(self, arrays, op, failure):
        self.arrays = arrays
        self.op = op
        self.failure = failure
        self.finished = threading.Event()
        self.timeouts = []

    def wait(self, timeout):
        self.timeouts.append(timeout)
        if self.failure is not None:
            raise from_engine(*self.failure)
        if not self.finished.is_set():
            for send, recv, code in self.arrays:
                dtype = DataType(code).to_numpy_dtype()
                given = send.view(dtype)
                value = {0: given * WORLD, 1: given, 2: given**WORLD}.get(self.op, given)
                # A part is the first one of all, and all parts are equal.
                recv.view(dtype)[...] = np.resize(value, recv.size // dtype.itemsize)
            self.finished.set()
        return INFO

    def done(self):
        return self.finished.is_set() or self.failure is not None


class FakeCommunicator:
    """Records calls; `failure` makes operations fail, `alone` those of the explicit API."""

    made = []

    def __init__(self, master, **options):
        self.master = master
        self.options = options
        self.open = False
        self.closed = 0
        self.calls = []
        self.operations = []
        self.failure = None
        self.alone = False
        FakeCommunicator.made.append(self)

    def join(self, **options):
        self.calls.append(("join", options))
        if self.master.startswith("nowhere"):
            raise from_engine(10, 6, "connect", "nobody listens", "", "")
        self.open = True

    def start(self, arrays, **options):
        if self.alone and options["level"] == 1:
            raise from_engine(8, 5, "all_reduce", "alone in the group", "", "")
        self.calls.append(("start", options))
        operation = FakeOperation(arrays, options["op"], self.failure)
        self.operations.append(weakref.ref(operation))
        return operation

    def reduce_tree(self, *plain):
        return None  # everything takes the general way

    start_tree = reduce_tree

    def collect(self, **plain):
        return None

    def admit(self, timeout):
        return timeout == 1

    def draining(self):
        return False

    def update_topology(self, timeout):
        self.calls.append(("update_topology", timeout))

    def barrier(self, timeout):
        self.calls.append(("barrier", timeout))

    def optimize_topology(self, timeout):
        self.calls.append(("optimize_topology", timeout))

    def peers_pending(self, timeout):
        return True

    def attribute(self, which):
        return which * 10

    def unfinished(self):
        return sum(1 for operation in self.operations if operation() and not operation().done())

    def peer_id(self):
        return "ab" * 16

    def membership(self):
        return 3, 1, WORLD, ["a", "b", "c", "d"], 7, []

    def on_change(self, callback):
        pass

    def is_open(self):
        return self.open and not self.closed

    def close(self, failure=""):
        self.closed += 1


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """The class of fake communicators, in place of the engine's."""
    for variable in [name for name in os.environ if name.startswith("PCCL_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(_core, "Communicator", FakeCommunicator)
    FakeCommunicator.made = []
    yield FakeCommunicator
    pccl.shutdown()


@pytest.fixture
def fake():
    """The fake engine below an initialised simple API."""
    pccl.init("localhost:1")
    return FakeCommunicator.made[-1]


@pytest.fixture
def comm():
    with pccl.Communicator("localhost:1") as comm:
        yield comm


def last_start(fake):
    return [options for name, options in fake.calls if name == "start"][-1]


# The simple API: joining and leaving.


def test_before_init_every_call_says_what_to_type():
    for call in (pccl.rank, pccl.world_size, pccl.membership, pccl.admit, pccl.barrier):
        with pytest.raises(pccl.NotInitialized, match=r"pccl\.init"):
            call()
    with pytest.raises(pccl.NotInitialized) as caught:
        pccl.allreduce(1)
    assert caught.value.result is pccl.Result.NOT_INITIALIZED
    pccl.shutdown()


def test_init_twice_is_refused_unless_shut_down_or_closed_between():
    comm = pccl.init("localhost:1")
    assert pccl.is_initialized()
    with pytest.raises(pccl.InvalidUsage, match="shutdown"):
        pccl.init("localhost:1")
    pccl.shutdown()
    assert not pccl.is_initialized()
    assert FakeCommunicator.made[0].closed
    with pytest.raises(pccl.InvalidUsage, match="closed"):
        pccl.allreduce(1, comm=comm)
    with pccl.init("localhost:1"):
        pass
    with pytest.raises(pccl.NotInitialized):
        pccl.rank()
    pccl.init("localhost:1")


def test_init_reads_the_environment_and_an_argument_wins(monkeypatch):
    monkeypatch.setenv("PCCL_MASTER", "there:2")
    monkeypatch.setenv("PCCL_MIN_PEERS", "3")
    monkeypatch.setenv("PCCL_PORT", "5000")
    monkeypatch.setenv("PCCL_ADVERTISE", "a:1, b:2")
    monkeypatch.setenv("PCCL_TIMEOUT", "2.5")
    pccl.init()
    fake = FakeCommunicator.made[-1]
    assert fake.master == "there:2"
    assert fake.options == {
        "peer_group": 0, "stripes": 0, "port": 5000, "advertise": ["a:1", "b:2"],
        "replica": "", "ranks_per_replica": 0, "name": "", "secret": None,
        "quiet": False,
    }  # fmt: skip
    assert fake.calls[0][1] == {"min_peers": 3, "attempts": 3, "timeout": 2.5, "enter": False}
    pccl.barrier()
    assert fake.calls[-1] == ("barrier", 2.5)
    pccl.shutdown()
    pccl.init("here:1", min_peers=2, port=6000, advertise="c", timeout=9, peer_group=4)
    fake = FakeCommunicator.made[-1]
    assert (fake.master, fake.options["port"], fake.options["advertise"]) == ("here:1", 6000, ["c"])
    assert fake.options["peer_group"] == 4
    assert fake.calls[0][1]["min_peers"] == 2
    assert fake.calls[0][1]["timeout"] == 9


@pytest.mark.parametrize(
    "call",
    [pccl.allreduce, pccl.allgather, pccl.broadcast, pccl.reduce_scatter, pccl.alltoall],
)
def test_a_call_may_wait_longer_than_the_environment_says(call, monkeypatch):
    monkeypatch.setenv("PCCL_TIMEOUT", "2.5")
    pccl.init("here:1")
    fake = FakeCommunicator.made[-1]
    for given, limit in ((None, 2.5), (9, 9), (math.inf, None)):
        call(np.ones(4), timeout=given)
        name, options = fake.calls[-1]
        assert name == "start" and options["timeout"] == pytest.approx(limit, abs=0.5)


def test_init_without_a_master_says_where_to_get_one():
    with pytest.raises(pccl.InvalidArgument, match="pccl run"):
        pccl.init()
    assert not pccl.is_initialized()


@pytest.mark.parametrize(
    "options",
    [{"min_peers": 0}, {"port": 70000}, {"peer_group": -1}, {"timeout": -1}, {"port": "80"}]
    + [{"advertise": 5}, {"min_peers": 1.5}, {"min_peers": True}, {"timeout": float("nan")}]
    + [{"replica_id": "a"}, {"ranks_per_replica": 2}, {"replica_id": "", "ranks_per_replica": 2}]
    + [{"replica_id": "a", "ranks_per_replica": 2, "peer_group": 2}],
)
def test_init_refuses_arguments_that_make_no_sense(options):
    with pytest.raises((pccl.InvalidArgument, TypeError)):
        pccl.init("localhost:1", **options)
    assert not pccl.is_initialized()


@pytest.mark.parametrize("group", [2**31, 3 * 2**30, 2**32 - 1])
def test_groups_of_the_librarys_own_are_not_for_users(group):
    for call in (pccl.init, pccl.Communicator):
        with pytest.raises(
            pccl.InvalidArgument, match=rf"peer_group .* 0\.\.2147483647, not {group}"
        ):
            call("localhost:1", peer_group=group)
    assert pccl.Communicator("localhost:1", 2**31 - 1)._group == 2**31 - 1
    assert pccl.Communicator._of_own_group(group, "localhost:1")._group == group


def test_init_that_fails_leaves_nothing_behind():
    with pytest.raises(pccl.Unreachable):
        pccl.init("nowhere:1")
    assert FakeCommunicator.made[-1].closed
    assert not pccl.is_initialized()
    pccl.init("localhost:1")


@pytest.mark.parametrize("variable", ["PCCL_SECRET", "PCCL_SECRET_FILE"])
def test_a_secret_is_never_ignored(monkeypatch, variable):
    with pytest.raises(pccl.InvalidArgument, match="secret"):
        pccl.init("localhost:1", secret="x")
    monkeypatch.setenv(variable, "x")
    for call in (pccl.init, pccl.Communicator, pccl.MasterNode):
        with pytest.raises(pccl.InvalidArgument, match=variable):
            call("localhost:1")
        with pytest.raises(pccl.InvalidArgument, match="too short"):
            call("localhost:1", secret="x")
    secret = "0123456789abcdef" * 2
    pccl.init("localhost:1", secret=secret)
    given = FakeCommunicator.made[-1].options["secret"]
    assert given is not None and secret not in repr(given)


def test_membership_is_what_the_engine_says(fake):
    expected = pccl.Membership(3, 1, 4, ("a", "b", "c", "d"), 7)
    assert pccl.membership() == expected
    assert (pccl.rank(), pccl.world_size()) == (1, 4)
    assert pccl.admit(timeout=1) is True
    assert pccl.admit() is False


# The simple API: reductions.


def test_allreduce_gives_back_structure_kinds_and_dtypes(fake):
    tree = {
        "w": np.ones((2, 3), np.float32),
        "n": [np.int16(2), 3, 0.5, None],
        "e": np.zeros((0, 2)),
    }
    result = pccl.allreduce(tree)
    assert list(result) == ["w", "n", "e"]
    np.testing.assert_array_equal(result["w"], np.full((2, 3), 4, np.float32))
    assert result["w"].dtype == np.float32
    assert result["n"] == [8, 12, 2.0, None]
    assert [type(leaf) for leaf in result["n"][:3]] == [np.int16, int, float]
    assert result["e"].shape == (0, 2)
    np.testing.assert_array_equal(tree["w"], 1)
    options = last_start(fake)
    assert (options["op"], options["tag"], options["level"], options["rerun"]) == (0, None, 2, True)
    assert b"['w']:float32:(2, 3)" in options["structure"]


def test_the_mean_of_a_python_int_is_a_float(fake):
    result = pccl.allreduce([3, np.int64(3)], "avg")
    assert [type(value) for value in result] == [float, np.int64]


def test_allreduce_tells_how_it_went_when_asked(fake):
    result, info = pccl.allreduce(1, return_info=True)
    assert result == 4
    assert info == pccl.ReduceInfo(4, 10, 20, ("a", "b", "c", "d"), 3, 1, 30, 4.0, 2.0, 1.0)
    assert info.world_size == info.local_world_size == 4


def test_out_is_written_and_returned(fake):
    tree = [np.ones(3), np.ones((4, 2)).T]
    out = [np.zeros(3), np.zeros((2, 8))[:, ::2]]
    assert pccl.allreduce(tree, out=out) is out
    assert all((array == 4).all() for array in out)
    assert pccl.allreduce(tree, out=tree) is tree
    assert all((array == 4).all() for array in tree)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"a": np.zeros(3)}, r"only out\['a'\]"),
        ({"w": np.zeros(4)}, r"out\['w'\] is float64\[4\]"),
        ({"w": np.zeros(3, "f4")}, r"out\['w'\] is float32\[3\], but must be float64\[3\]"),
        ({"w": np.broadcast_to(0.0, 3)}, r"out\['w'\]: the array is read-only"),
        ({"w": 0.0}, r"out\['w'\]: a float cannot be written"),
    ],
)
def test_an_out_that_does_not_fit_is_refused_by_path(fake, out, message):
    with pytest.raises(pccl.InvalidArgument, match=message):
        pccl.allreduce({"w": np.ones(3)}, out=out)
    assert not fake.operations


def test_quantize_must_be_one_of_those_there_are(fake):
    with pytest.raises(pccl.InvalidArgument, match="quantize is one of 'int8', .* not 2"):
        pccl.allreduce(1.0, "avg", quantize=2)
    assert not fake.operations


@pytest.mark.parametrize("tag", [-1, 2**64, "x", 1.0])
def test_tags_are_64_bits(fake, tag):
    with pytest.raises(pccl.InvalidArgument, match="tag"):
        pccl.allreduce(1, tag=tag)
    pccl.allreduce(1, tag=2**64 - 1)
    assert last_start(fake)["tag"] == 2**64 - 1


def test_a_failure_is_raised_at_every_wait_and_out_is_untouched(fake):
    fake.failure = (6, 3, "allreduce", "shapes differ", "ab" * 16, "")
    out = np.zeros((2, 8))[:, ::2]
    work = pccl.allreduce_async(np.ones((2, 4)), out=out)
    for _ in range(2):
        with pytest.raises(pccl.MismatchedCall):
            work.wait()
    with pytest.raises(pccl.MismatchedCall):
        _ = work.info
    assert work.done()
    assert not out.any()


def test_work_gives_the_same_object_to_all_threads(fake):
    work = pccl.allreduce_async({"w": np.ones(3)})
    assert not work.done()
    with pytest.raises(pccl.InvalidUsage, match="not finished"):
        _ = work.info
    found = in_threads([work.wait] * 4)
    assert len({id(tree) for tree in found}) == 1
    assert work.wait() is found[0]
    assert work.info.world_size == WORLD


def test_work_can_be_awaited(fake):
    async def main():
        return await asyncio.gather(*(pccl.allreduce_async(n) for n in range(3)))

    assert asyncio.run(main()) == [0, 4, 8]


def test_a_finished_work_lets_its_inputs_go(fake):
    array = np.ones(3)
    alive = weakref.ref(array)
    work = pccl.allreduce_async(array)
    work.wait()
    del array
    gc.collect()
    assert alive() is None
    assert work.wait().sum() == 12


def test_torch_tensors_come_back_as_tensors(fake):
    torch = pytest.importorskip("torch")
    tree = {
        "p": torch.nn.Parameter(torch.ones(2, 3)),
        "s": torch.tensor(2),
    }
    result = pccl.allreduce(tree)
    assert result["p"].tolist() == [[4.0] * 3] * 2
    assert (type(result["p"]), result["p"].requires_grad) == (torch.Tensor, False)
    assert result["s"].item() == 8
    assert pccl.allreduce(tree, out=tree) is tree
    assert tree["p"].sum().item() == 24
    with pytest.raises(pccl.NotSupported, match=r"tree\['m'\]: .*meta"):
        pccl.allreduce({"m": torch.ones(2, device="meta")})
    with pytest.raises(pccl.InvalidArgument, match=r"tree\[0\]: dtype bool"):
        pccl.allreduce([torch.ones(2, dtype=torch.bool)])


def test_torch_bfloat16_keeps_its_memory_and_dtype(fake):
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    tensor = torch.ones(6, dtype=torch.bfloat16)
    result = pccl.allreduce(tensor[::2])
    assert result.dtype == torch.bfloat16
    assert result.tolist() == [4.0] * 3
    pccl.allreduce(tensor[::2], out=tensor[::2])
    assert tensor.tolist() == [4.0, 1.0] * 3


def test_jax_arrays_come_back_as_jax_arrays(tmp_path):
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    subprocess.run(command(arrays.read_arrays_of_jax), check=True, cwd=tmp_path)


def test_another_frameworks_arrays_can_be_registered(fake, monkeypatch):
    monkeypatch.setattr(frameworks, "_registered", dict(frameworks._registered))

    class Foreign:
        def __init__(self, array):
            self.array = array

    class Adapter:
        def recognises(self, leaf):
            return isinstance(leaf, Foreign)

        def to_buffers(self, leaf, *, writable):
            return [adapters.Buffer(leaf.array, DataType.from_numpy_dtype(leaf.array.dtype))]

        def from_buffers(self, like, buffers):
            return Foreign(buffers[0].array)

        def flatten(self, node):
            return None

    Foreign.__module__ = "foreign.arrays"
    adapters.register("foreign", Adapter())
    assert pccl.allreduce([Foreign(np.ones(2))])[0].array.tolist() == [4, 4]


# The explicit API.


def test_all_reduce_writes_recv_and_tells_about_it(comm):
    send, recv = np.ones((2, 3), np.int8), np.zeros(6, np.int8)
    info = comm.all_reduce(send, recv, op=ReduceOp.SUM)
    assert recv.tolist() == [4] * 6
    assert (info.local_world_size, info.tx_bytes, info.rx_bytes) == (4, 10, 20)
    options = last_start(FakeCommunicator.made[-1])
    assert (options["tag"], options["level"], options["rerun"]) == (0, 1, False)
    assert options["structure"] == b""


@pytest.mark.parametrize(
    ("send", "recv", "message"),
    [
        (np.ones(3), np.ones(4), "3 elements"),
        (np.ones(3), np.ones(3, "f4"), "float32"),
        (np.ones(3), np.broadcast_to(1.0, 3), "recv: the array is read-only"),
        (np.ones(3, bool), np.ones(3, bool), "send: dtype bool"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(comm, send, recv, message):
    with pytest.raises(ValueError, match=message) as caught:
        comm.all_reduce(send, recv, op=ReduceOp.SUM)
    assert caught.value.result is pccl.Result.INVALID_ARGUMENT


def test_a_handle_never_raises_and_keeps_its_answer(comm):
    handle = comm.all_reduce_async(np.ones(2), np.empty(2), op="avg")
    assert not handle.done()
    assert handle.wait() == handle.wait() == (True, 0, handle._work.info)
    assert handle.exception() is None
    fake = FakeCommunicator.made[-1]
    fake.failure = (9, 8, "wait", "peer lost", "", "")
    handle = comm.all_reduce_async(np.ones(2), np.empty(2), op="avg")
    assert handle.wait() == (False, 8, pccl.ReduceInfo())
    assert isinstance(handle.exception(), pccl.PeerLost)


@pytest.mark.parametrize("how", ["handle", "await"])
def test_a_failed_call_is_freed_when_the_program_drops_it(comm, how):
    FakeCommunicator.made[-1].failure = (9, 8, "wait", "peer lost", "", "")

    async def fails(work):
        with pytest.raises(pccl.PeerLost):
            await work

    gc.disable()
    try:
        if how == "handle":
            made = comm.all_reduce_async(np.ones(2), np.empty(2), op="avg")
            assert not made.wait()[0]
        else:
            made = pccl.allreduce_async(np.ones(2), comm=comm)
            asyncio.run(fails(made))
        there = weakref.ref(made)
        del made
        eventually(lambda: there() is None)
    finally:
        gc.enable()


def test_alone_reductions_fail_at_launch(comm):
    FakeCommunicator.made[-1].alone = True
    with pytest.raises(pccl.TooFewPeers):
        comm.all_reduce_async(np.ones(2), np.empty(2), op=ReduceOp.SUM)
    with pytest.raises(pccl.PCCLError) as caught:
        comm.all_reduce_multiple_with_retry([make_descriptor(np.ones(2), 0)])
    assert caught.value.result is pccl.Result.TOO_FEW_PEERS


def make_descriptor(array, tag, recv=None):
    dtype = DataType.from_numpy_dtype(array.dtype)
    what = ReduceDescriptor(array.size, ReduceOp.SUM, tag, ReduceOperandDescriptor(dtype))
    return ReduceOpDescriptor.from_numpy(array, array if recv is None else recv, what)


def test_many_reductions_keep_to_their_number_in_flight(comm, monkeypatch):
    fake = FakeCommunicator.made[-1]
    most = 0
    start = fake.start

    def counting(arrays, **options):
        nonlocal most
        operation = start(arrays, **options)
        most = max(most, sum(1 for o in fake.operations if o() and not o().done()))
        return operation

    monkeypatch.setattr(fake, "start", counting)
    arrays = [np.full(n, 1.0) for n in range(8)]
    info = comm.all_reduce_multiple_with_retry(
        [make_descriptor(array, tag) for tag, array in enumerate(arrays)], max_in_flight=3
    )
    assert most == 3
    assert all((array == 4).all() for array in arrays)
    assert (info.tx_bytes, info.rx_bytes, info.local_world_size) == (80, 160, 4)
    assert last_start(fake)["rerun"] is True
    assert last_start(fake)["tag"] == 7


def test_descriptors_with_raw_addresses_are_reduced(comm):
    send, recv = np.ones(3, np.float32), np.zeros(3, np.float32)
    what = ReduceDescriptor(3, ReduceOp.SUM, 5, ReduceOperandDescriptor(DataType.FLOAT))
    descriptor = ReduceOpDescriptor(send.ctypes.data, recv.ctypes.data, what)
    comm.all_reduce_multiple_with_retry([descriptor], max_in_flight=128)
    assert recv.tolist() == [4.0] * 3


def test_quantization_options_reach_the_engine_and_what_members_must_agree_on(comm):
    options = pccl.QuantizationOptions(DataType.UINT8, pccl.QuantizationAlgorithm.MIN_MAX)
    fake = FakeCommunicator.made[-1]
    recv = np.zeros(2, np.float32)

    def check(code, words):
        assert last_start(fake).get("quantize") == code
        assert last_start(fake)["structure"] == words.encode()
        assert last_start(fake)["description"].endswith(words)

    comm.all_reduce(np.ones(2, np.float32), recv, op="sum", quantization_options=options)
    check((1, False, False, 512), " as uint8 (min_max)")
    options = pccl.QuantizationOptions(DataType.INT8, pccl.QuantizationAlgorithm.ZERO_POINT_SCALE)
    handle = comm.all_reduce_async(recv, recv, op="sum", quantization_options=options)
    assert handle.wait()[0] and recv.tolist() == [16.0, 16.0]
    check((1, True, False, 512), " as int8 (zero_point_scale)")
    what = ReduceDescriptor(2, ReduceOp.SUM, 1, ReduceOperandDescriptor(DataType.FLOAT), options)
    comm.all_reduce_multiple_with_retry([ReduceOpDescriptor.from_numpy(recv, recv, what)])
    assert recv.tolist() == [64.0, 64.0]
    check((1, True, False, 512), " as int8 (zero_point_scale)")
    comm.all_reduce(recv, recv, op="sum", quantization_options=pccl.QuantizationOptions(
        algorithm=pccl.QuantizationAlgorithm.NONE))  # fmt: skip
    check(None, "")


@pytest.mark.parametrize(("algorithm", "dtype"), [(7, 0), (1, 99), (1, 5)])
def test_quantization_options_that_mean_nothing_are_refused(comm, algorithm, dtype):
    options = pccl.QuantizationOptions(dtype, algorithm)
    with pytest.raises(pccl.InvalidArgument, match="quantization_options"):
        comm.all_reduce(np.ones(1), np.ones(1), op="sum", quantization_options=options)
    assert not FakeCommunicator.made[-1].operations


def test_optimize_topology_waits_for_no_handles_and_names_its_failures(comm, monkeypatch):
    fake = FakeCommunicator.made[-1]
    assert comm.optimize_topology(timeout=3) is None
    assert fake.calls[-1] == ("optimize_topology", 3.0)
    handle = comm.all_reduce_async(np.ones(1), np.ones(1), op="sum")
    with pytest.raises(pccl.PendingOperations, match="1 operation of") as caught:
        comm.optimize_topology()
    assert caught.value.result is pccl.Result.PENDING_ASYNC_OPS
    handle.wait()
    for cause, told, result in (
        (12, 8, "TOPOLOGY_OPTIMIZATION_FAILED"),
        (9, 8, "RANK_CONNECTION_LOST"),
    ):

        def fails(timeout, cause=cause, told=told):
            raise from_engine(cause, told, "optimize_topology", "why", "", "")

        monkeypatch.setattr(fake, "optimize_topology", fails)
        with pytest.raises(pccl.PCCLError, match="optimize_topology failed") as caught:
            comm.optimize_topology()
        assert caught.value.result.name == result


def test_connecting_follows_the_rules_of_its_states(engine):
    comm = pccl.Communicator("localhost:1", 3, 2)
    for call in (comm.update_topology, comm.optimize_topology):
        with pytest.raises(pccl.InvalidUsage, match="connect"):
            call()
    comm.connect(15)
    fake = engine.made[-1]
    assert fake.options["stripes"] == 2
    assert fake.calls[0][1] == {"min_peers": 1, "attempts": 15, "timeout": None, "enter": True}
    with pytest.raises(pccl.InvalidUsage, match="already"):
        comm.connect()
    fake.open = False  # evicted, say
    comm.connect()
    assert comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) == 20
    assert comm.are_peers_pending() is True
    comm.close()
    comm.close()
    with pytest.raises(pccl.InvalidUsage, match="closed"):
        comm.connect()


def test_connecting_to_nobody_reports_the_master():
    comm = pccl.Communicator("nowhere:1")
    for _ in range(2):
        with pytest.raises(pccl.PCCLError) as caught:
            comm.connect(n_attempts=1)
        assert caught.value.result is pccl.Result.MASTER_CONNECTION_FAILED


def test_a_forked_child_is_inert(fake):
    work = pccl.allreduce_async(np.ones(1))
    comm = pccl.api._default
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answers = []
        for call in (pccl.rank, pccl.barrier, work.wait, comm.update_topology):
            try:
                call()
                answers.append("returned")
            except pccl.InvalidUsage as error:
                answers.append("forked" if "forked" in str(error) else str(error))
        answers.append(str(pccl.is_initialized()))
        pccl.shutdown()
        answers.append(str(fake.closed))
        os.write(writing, ",".join(answers).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        assert answers.read() == "forked,forked,forked,forked,False,0"
    os.waitpid(child, 0)
    assert work.wait().tolist() == [4.0]
