"""torch tensors as arrays: layouts, dtypes, autograd and the accelerator pipeline."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from members import Members, each, in_threads, members, results
from workers import eventually

import pccl
from pccl.reduce import pieces as device_route
from pccl.reduce.pieces import cut, reduce_pieces

torch = pytest.importorskip("torch")

from pccl.adapters.torch import tensors as adapter  # noqa: E402

Peers = list[pccl.Communicator]

# One function per layout: elements -> a tensor of shape (4, 3, 6, 2) with them.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "channels-last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "strided": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "offset": lambda t: torch.cat([t[:1], t])[1:],
    "negated": lambda t: torch.complex(t, -t).conj().imag,
}


def elements(seed: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-50, 50, (4, 3, 6, 2), generator=generator).float()
    return made if dtype is None else made.to(dtype)


@pytest.mark.parametrize("shm", ["1", "0"])
def test_members_that_flush_denormals_hold_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, shm: str
) -> None:
    monkeypatch.setenv("PCCL_SHM", shm)
    tiny = [np.full(count, 1e-40, np.float32) for count in (8, 1 << 18)]

    def flushes() -> bool:
        return not (tiny[0] * np.float32(1)).any()

    def reduce(rank: int, comm: pccl.Communicator) -> None:
        torch.set_flush_denormal(rank == 0)
        for array in tiny:
            made = {
                "sum": pccl.allreduce(array, comm=comm),
                "avg": pccl.allreduce(array, "avg", comm=comm),
                "weighted": pccl.allreduce(array, "avg", weight=1, comm=comm),
            }
            work = pccl.allreduce_async(array, comm=comm)
            if rank == 1:
                eventually(work.done)  # by the thread in the background
            made["async"] = work.wait()
            assert flushes() == (rank == 0)
            torch.set_flush_denormal(False)
            for name, result in made.items():
                expected = array if name in ("avg", "weighted") else array + array
                assert result.tobytes() == expected.tobytes(), (name, array.size, rank)
            torch.set_flush_denormal(rank == 0)

    torch.set_flush_denormal(True)
    try:
        with members(2) as comms:  # their threads begin with what this one has
            results(comms, reduce)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("theirs", LAYOUTS)
@pytest.mark.parametrize("ours", LAYOUTS)
def test_members_may_have_different_layouts(pair: Peers, ours: str, theirs: str) -> None:
    tensors = [LAYOUTS[ours](elements(1)), LAYOUTS[theirs](elements(2))]
    assert torch.equal(tensors[0], elements(1)) and torch.equal(tensors[1], elements(2))
    sums = each(pair, lambda i, comm: pccl.allreduce(tensors[i], comm=comm))
    for tensor, total in zip(tensors, sums, strict=True):
        assert torch.equal(total, elements(1) + elements(2))
        if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
            assert total.stride() == tensor.stride()
    assert torch.equal(tensors[0], elements(1)) and torch.equal(tensors[1], elements(2))


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"negated"}))
def test_in_place_writes_the_tensors_own_memory(pair: Peers, layout: str) -> None:
    tensors = [LAYOUTS[layout](elements(i)) for i in range(2)]
    before = [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]
    each(pair, lambda i, comm: pccl.allreduce(tensors[i], out=tensors[i], comm=comm))
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in tensors] == before
    assert all(torch.equal(tensor, elements(0) + elements(1)) for tensor in tensors)


def test_contiguous_tensors_are_not_copied() -> None:
    for tensor in (torch.ones(3, 4), torch.ones(5, dtype=torch.bfloat16), torch.tensor(1.0)):
        ((array, dtype),) = adapter.to_buffers(tensor, writable=False)
        assert array.ctypes.data == tensor.data_ptr()
        made = adapter.from_buffers(tensor, [adapter.Buffer(array, dtype)])
        assert (made.data_ptr(), made.dtype) == (tensor.data_ptr(), tensor.dtype)


@pytest.mark.parametrize(
    "name", "bfloat16 float16 float32 float64 uint8 int8 int16 int32 int64 uint16".split()
)
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max"])
def test_dtypes_reduce_as_in_torch(pair: Peers, name: str, op: str) -> None:
    dtype = getattr(torch, name)
    signed = not name.startswith("u")
    tensors = [(elements(i) if signed else elements(i).abs()).to(dtype) for i in (3, 4)]
    wide = torch.stack([tensor.double() for tensor in tensors])
    mean = wide.mean(0) if dtype.is_floating_point else wide.mean(0).trunc()
    want = {"sum": wide.sum(0), "avg": mean, "min": wide.amin(0), "max": wide.amax(0)}[op]
    for result in each(pair, lambda i, comm: pccl.allreduce(tensors[i], op, comm=comm)):
        assert result.dtype == dtype and torch.equal(result, want.to(dtype))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "complex64", "complex128"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_rare_dtypes_reduce_as_in_torch(pair: Peers, name: str, op: str) -> None:
    dtype = getattr(torch, name)
    wide = torch.complex128 if dtype.is_complex else torch.float32
    given = [elements(i).to(wide) * (1 - 2j if dtype.is_complex else 0.25) for i in (3, 4)]
    tensors = [tensor.to(dtype) for tensor in given]
    total = tensors[0].to(wide) + tensors[1].to(wide)
    want = (total / 2 if op == "avg" else total).to(dtype)
    # One member's elements lie in another order.
    tensors[1] = tensors[1].transpose(0, 1).contiguous().transpose(0, 1)
    for result in each(pair, lambda i, comm: pccl.allreduce(tensors[i], op, comm=comm)):
        assert result.dtype == dtype and torch.equal(result.to(wide), want.to(wide))


@pytest.mark.parametrize("op", ["min", "max"])
def test_booleans_have_and_and_or(pair: Peers, op: str) -> None:
    tensors = [elements(i) > 0 for i in (3, 4)]
    want = tensors[0] & tensors[1] if op == "min" else tensors[0] | tensors[1]
    for result in each(pair, lambda i, comm: pccl.allreduce(tensors[i], op, comm=comm)):
        assert result.dtype == torch.bool and torch.equal(result, want)


def test_a_conjugate_is_read_and_not_written(pair: Peers) -> None:
    tensor = torch.full((3,), 1 + 2j).conj()
    for result in each(pair, lambda _, comm: pccl.allreduce(tensor, comm=comm)):
        assert torch.equal(result, torch.full((3,), 2 - 4j))
    with pytest.raises(pccl.InvalidArgument, match="conjugate bit"):
        pccl.allreduce(tensor, out=tensor, comm=pair[0])


def test_odd_shapes(pair: Peers) -> None:
    tree = {
        "0-d": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "wide": torch.ones(3).expand(2, 3),
        "numpy": np.ones(3),
    }
    for result in each(pair, lambda _, comm: pccl.allreduce(tree, comm=comm)):
        assert (result["0-d"].item(), result["0-d"].shape) == (5.0, ())
        assert result["empty"].shape == (0, 3)
        assert torch.equal(result["wide"], torch.full((2, 3), 2.0))
        assert isinstance(result["numpy"], np.ndarray) and (result["numpy"] == 2).all()
    assert torch.equal(tree["wide"], torch.ones(2, 3))


def test_results_have_no_graph(pair: Peers) -> None:
    weights = [torch.nn.Parameter(torch.full((3,), float(i))) for i in range(2)]
    results = each(pair, lambda i, comm: pccl.allreduce([weights[i] * 2], comm=comm)[0])
    for result in results:
        assert (type(result), result.requires_grad) == (torch.Tensor, False)
        assert torch.equal(result, torch.full((3,), 2.0))


def test_in_place_on_a_parameter_is_as_under_no_grad(pair: Peers) -> None:
    weights = [torch.nn.Parameter(torch.full((3,), float(i))) for i in range(2)]
    losses = [(weight**2).sum() for weight in weights]
    each(pair, lambda i, comm: pccl.allreduce(weights[i], out=weights[i], comm=comm))
    for weight, loss in zip(weights, losses, strict=True):
        assert weight.requires_grad and weight.is_leaf
        assert torch.equal(weight.detach(), torch.ones(3))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # its graph has the old weights


@pytest.mark.parametrize(
    "write",
    [
        lambda source, out, comm: pccl.allreduce(source, out=out, comm=comm),
        lambda source, out, comm: pccl.broadcast(source, out=out, comm=comm),
        lambda source, out, comm: pccl.alltoall(source, out=out, comm=comm),
        lambda source, out, comm: pccl.allgather(source[:2], out=out.view(2, 2), comm=comm),
        lambda source, out, comm: pccl.reduce_scatter(source.repeat(2), out=out, comm=comm),
        lambda source, out, comm: comm.all_gather(source[:2], out),
        lambda source, out, comm: comm.all_to_all(source, out),
    ],
)
def test_backward_refuses_elements_that_a_call_has_overwritten(pair: Peers, write: Any) -> None:
    weights = [torch.full((4,), 2.0, requires_grad=True) for _ in pair]
    hidden = [weight * 3 for weight in weights]
    losses = [(made * made).sum() for made in hidden]
    each(pair, lambda i, comm: write(torch.full((4,), 100.0), hidden[i], comm))
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # by the chain rule it needs the old elements


def test_a_sync_by_addresses_counts_what_it_writes(pair: Peers) -> None:
    tensors = [torch.full((4,), float(i)) for i in range(2)]

    def sync(i: int, comm: pccl.Communicator) -> None:
        way = pccl.SharedStateSyncStrategy
        state = pccl.SharedState([pccl.TensorInfo.from_torch(tensors[i], "w")])
        comm.sync_shared_state(state, way.RECEIVE_ONLY if i else way.SEND_ONLY)

    each(pair, sync)
    assert torch.equal(tensors[1], torch.zeros(4))
    assert [tensor._version for tensor in tensors] == [0, 1]


def test_the_root_of_a_broadcast_and_a_refused_call_write_nothing(pair: Peers) -> None:
    tensors = [torch.ones(4) for _ in pair]
    each(pair, lambda i, comm: comm.broadcast(tensors[i]))
    assert [tensor._version for tensor in tensors] == [0, 1]
    each(pair, lambda i, comm: pccl.broadcast(tensors[i], out=tensors[i], comm=comm))
    assert [tensor._version for tensor in tensors] == [0, 2]
    each(pair, lambda i, comm: pccl.broadcast(torch.zeros(4), out=tensors[i], comm=comm))
    assert [tensor._version for tensor in tensors] == [1, 3]
    with pytest.raises(pccl.InvalidArgument):
        pccl.broadcast(tensors[0], root=9, out=tensors[0], comm=pair[0])
    with pytest.raises(pccl.InvalidArgument):
        pair[0].all_gather(torch.ones(3), tensors[0])
    assert tensors[0]._version == 1


def test_what_cannot_be_reduced_is_named(pair: Peers) -> None:
    tensors = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }
    for name, tensor in tensors.items():
        with pytest.raises(pccl.NotSupported, match=name):
            pccl.allreduce({name: tensor}, comm=pair[0])
    for tensor, op in (
        (torch.ones(2, dtype=torch.bool), "sum"),
        (torch.ones(2, dtype=torch.complex64), "max"),
    ):
        with pytest.raises(pccl.InvalidArgument, match=f'not with "{op}"'):
            pccl.allreduce({"w": tensor}, op, comm=pair[0])


def test_an_empty_tensor_can_be_written(pair: Peers) -> None:
    # NumPy sees strides of zero, as in a broadcast array.
    empty = [torch.empty(0, 16) for _ in pair]
    results = each(pair, lambda i, comm: pccl.allreduce(empty[i], out=empty[i], comm=comm))
    assert all(result is one for result, one in zip(results, empty, strict=True))


# Contiguous, with strides that no other array of their size has.
SMALL: dict[str, Callable[[], Any]] = {
    "column of one row": lambda: torch.zeros(1, 5)[:, 0],
    "every second of one": lambda: torch.zeros(6)[::2][:1],
    "every second of none": lambda: torch.zeros(6)[::2][:0],
    "NumPy's empty": lambda: torch.from_numpy(np.zeros(0)),
    "column of bfloat16": lambda: torch.zeros(1, 5, dtype=torch.bfloat16)[:, 0],
}


@pytest.mark.parametrize("name", SMALL)
def test_small_tensors_may_have_any_strides(pair: Peers, name: str, tmp_path: Path) -> None:
    def call(rank: int, comm: pccl.Communicator) -> None:
        tensor = SMALL[name]().add_(rank + 1)
        one, two = torch.ones_like(tensor), torch.full_like(tensor, 2)
        if tensor.numel():
            assert tensor.stride() != (1,)
        assert torch.equal(pccl.allreduce(tensor, comm=comm), one + two)
        assert torch.equal(pccl.broadcast(tensor, root=1, comm=comm), two)
        assert torch.equal(pccl.allgather(tensor, comm=comm), torch.stack([one, two]))
        pccl.broadcast(one, out=tensor, comm=comm)
        assert torch.equal(pccl.sync({"w": tensor}, comm=comm)["w"], one)
        path = tmp_path / f"{rank}.safetensors"
        pccl.checkpoint.save(path, {"w": tensor}, revision=1)
        pccl.checkpoint.load(path, {"w": tensor.zero_()})
        assert torch.equal(tensor, one)

    results(pair, call)
    for tensor in (SMALL[name](), SMALL[name]().expand_as(SMALL[name]())):
        assert adapter.stage(tensor).flat.shape == (tensor.nbytes,)


@pytest.mark.parametrize("call", [pccl.broadcast, pccl.allgather, pccl.alltoall, pccl.allreduce])
@pytest.mark.parametrize(
    "shared",
    [
        torch.ones(1).expand(4),
        torch.ones(5).unfold(0, 2, 1),
        np.lib.stride_tricks.as_strided(np.ones(5), (4, 2), (8, 8)),
    ],
    ids=["expanded", "unfolded", "windows"],
)
def test_elements_of_inputs_may_share_memory(pair: Peers, call: Any, shared: Any) -> None:
    copy = torch.as_tensor(shared).clone()
    made = results(pair, lambda _, comm: call(shared, comm=comm))
    want = results(pair, lambda _, comm: call(copy, comm=comm))
    assert all(np.array_equal(a, b) for a, b in zip(made, want, strict=True))
    with pytest.raises(pccl.InvalidArgument, match="out: its elements share memory"):
        pccl.broadcast(copy, out=shared, comm=pair[0])


# The pipeline of accelerators.


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(1, 6))
def test_pieces_cover_every_byte_once_and_split_no_element(sizes: list[int], lines: int) -> None:
    limit = 64 * lines
    pieces = cut(sizes, limit)
    parts = [part for piece in pieces for part in piece]
    for array, size in enumerate(sizes):
        own = [part for part in parts if part.array == array]
        assert own[0].begin == 0 and own[-1].end == size
        assert [part.end for part in own[:-1]] == [part.begin for part in own[1:]]
        assert all(part.begin % 64 == 0 for part in own)
    assert parts == sorted(parts)
    assert all(sum(part.end - part.begin for part in piece) <= limit for piece in pieces)


class Lagging:
    """A stand-in for an accelerator. A copy happens when it, or a later one, is waited for."""

    def __init__(self) -> None:
        self.begun: list[Callable[[], None]] = []
        self.log: list[str] = []
        self.fail_at = -1  # byte offset whose fetch fails

    def pinned(self, size: int) -> Any:
        return np.zeros(size, np.uint8)

    def empty(self, flat: Any) -> Any:
        return torch.empty_like(flat)

    def fetch(self, flat: Any, begin: int, host: Any) -> Callable[[], None]:
        if begin == self.fail_at:
            raise RuntimeError("the device is gone")
        self.log.append(f"fetch {begin}")
        return self._begin(torch.from_numpy(host), flat[begin : begin + host.size])

    def store(self, flat: Any, begin: int, host: Any) -> Callable[[], None]:
        self.log.append(f"store {begin}")
        return self._begin(flat[begin : begin + host.size], torch.from_numpy(host))

    def _begin(self, target: Any, source: Any) -> Callable[[], None]:
        self.begun.append(lambda: target.copy_(source))
        count = len(self.begun)

        def wait() -> None:
            for at in range(count):
                copy, self.begun[at] = self.begun[at], lambda: None
                copy()

        return wait


def test_a_piece_comes_and_one_goes_while_one_is_reduced() -> None:
    device = Lagging()
    flat = torch.arange(200, dtype=torch.uint8)
    result = torch.zeros_like(flat)

    def reduce(number: int, parts: Any, hosts: Any) -> Any:
        device.log.append(f"reduce {number}")
        for host in hosts:
            host += 1
        return number

    infos = reduce_pieces([device], [flat], [result], cut([200], 64), reduce)
    assert infos == [0, 1, 2, 3]
    assert torch.equal(result, torch.arange(1, 201, dtype=torch.uint8))
    assert torch.equal(flat, torch.arange(200, dtype=torch.uint8))
    assert device.log == [
        *("fetch 0", "fetch 64", "reduce 0", "store 0", "fetch 128", "reduce 1", "store 64"),
        *("fetch 192", "reduce 2", "store 128", "reduce 3", "store 192"),
    ]


def test_all_copies_are_over_when_a_piece_fails() -> None:
    device = Lagging()

    def reduce(number: int, parts: Any, hosts: Any) -> Any:
        if number == 2:
            raise RuntimeError("lost")
        return number

    result = torch.zeros(300, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="lost"):
        reduce_pieces([device], [torch.ones_like(result)], [result], cut([300], 64), reduce)
    assert result[:128].all() and not result[128:].any()
    before = result.clone()
    for copy in device.begun:
        copy()
    assert torch.equal(result, before)


class OutOfOrder:
    """A stand-in with a stream for each direction, which is a thread that copies late.

    Until a copy is over, its target has bytes that are nobody's. The two streams run in any order.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams = [ThreadPoolExecutor(1) for _ in range(2)]

    def close(self) -> None:
        for stream in self._streams:
            stream.shutdown()

    def pinned(self, size: int) -> Any:
        return np.full(size, 0xEE, np.uint8)

    def empty(self, flat: Any) -> Any:
        return torch.full_like(flat, 0xEE)

    def fetch(self, flat: Any, begin: int, host: Any) -> Callable[[], None]:
        return self._copy(0, torch.from_numpy(host), flat[begin : begin + host.size])

    def store(self, flat: Any, begin: int, host: Any) -> Callable[[], None]:
        return self._copy(1, flat[begin : begin + host.size], torch.from_numpy(host))

    def _copy(self, stream: int, target: Any, source: Any) -> Callable[[], None]:
        late = self._random.choice([0, 0, 1e-4, 1e-3])
        target.fill_(0xEE)

        def copy() -> None:
            threading.Event().wait(late)
            target.copy_(source)

        return self._streams[stream].submit(copy).result


@pytest.mark.parametrize("seed", range(20))
def test_pieces_wait_for_every_copy_that_they_need(seed: int) -> None:
    device = OutOfOrder(seed)
    sizes = [random.Random(seed).randrange(1, 700) for _ in range(4)]
    flats = [torch.full((size,), 16 * i, dtype=torch.uint8) for i, size in enumerate(sizes)]
    results = [device.empty(flat) for flat in flats]

    def reduce(number: int, parts: Any, hosts: Any) -> Any:
        for host in hosts:
            host += 1 + number % 7
        return number

    pieces = cut(sizes, 128)
    reduce_pieces([device] * 4, flats, results, pieces, reduce)
    for number, piece in enumerate(pieces):
        for part in piece:
            made = results[part.array][part.begin : part.end]
            assert (made == 16 * part.array + 1 + number % 7).all()
    device.close()


@pytest.mark.parametrize("seed", range(5))
def test_copies_in_any_order_give_the_same_result(
    pair: Peers, device: Lagging, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    devices = {}

    def own(leaf: Any) -> OutOfOrder:
        return devices.setdefault(threading.get_ident(), OutOfOrder(seed + len(devices)))

    monkeypatch.setattr(adapter, "device_of", own)
    tensors = [on_device(torch.arange(3000.0) * (i + 1)) for i in range(2)]
    for result in each(pair, lambda i, comm: pccl.allreduce(tensors[i], comm=comm)):
        assert torch.equal(result.as_subclass(torch.Tensor), 3 * torch.arange(3000.0))
    for made in devices.values():
        made.close()


class OnDevice(torch.Tensor):
    """Stands for a tensor on an accelerator."""


def on_device(tensor: Any) -> Any:
    return tensor.as_subclass(OnDevice)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Lagging:
    """CPU memory that counts as an accelerator's, reduced in pieces of 256 bytes."""
    stand_in = Lagging()
    monkeypatch.setattr(adapter, "devices_in_use", lambda: True)
    monkeypatch.setattr(adapter, "on_device", lambda leaf: isinstance(leaf, OnDevice))
    monkeypatch.setattr(adapter, "device_of", lambda leaf: stand_in)
    monkeypatch.setattr(device_route, "PIECE_BYTES", 256)
    return stand_in


def test_a_tree_is_reduced_wherever_its_arrays_are(
    pair: Peers, device: Lagging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "device_of", lambda leaf: Lagging())  # one per array
    trees = [
        {
            "w": on_device(LAYOUTS["channels-last"](elements(i))),
            "h": on_device(torch.full((7,), i + 1, dtype=torch.bfloat16)),
            "n": np.full(100, i, np.int64),
            "c": 3,
        }
        for i in range(2)
    ]
    results = each(pair, lambda i, comm: pccl.allreduce(trees[i], comm=comm, return_info=True))
    for result, info in results:
        assert info.local_world_size == 2 and len(info.contributors) == 2
        assert torch.equal(result["w"], elements(0) + elements(1))
        assert result["w"].is_contiguous(memory_format=torch.channels_last)
        assert result["h"].dtype == torch.bfloat16 and result["h"].eq(3).all()
        assert (result["n"] == 1).all() and result["c"] == 6
    assert torch.equal(trees[0]["w"], elements(0)), "inputs stay"


def test_in_place_on_a_device(pair: Peers, device: Lagging) -> None:
    tensors = [on_device(LAYOUTS["transposed"](elements(i))) for i in range(2)]
    before = [tensor.data_ptr() for tensor in tensors]
    results = each(
        pair, lambda i, comm: pccl.allreduce([tensors[i]], "max", out=[tensors[i]], comm=comm)
    )
    for tensor, pointer, (result,) in zip(tensors, before, results, strict=True):
        assert result is tensor and tensor.data_ptr() == pointer
        assert torch.equal(tensor, torch.maximum(elements(0), elements(1)))


def test_one_piece_meets_a_member_without_an_accelerator(pair: Peers, device: Lagging) -> None:
    ours = [on_device(torch.ones(8, 8)), np.full((8, 8), 2, np.float32)]
    first, second = each(pair, lambda i, comm: pccl.allreduce({"w": ours[i]}, comm=comm))
    assert (first["w"] == 3).all() and (second["w"] == 3).all()
    assert isinstance(second["w"], np.ndarray)


def test_several_pieces_do_not_meet_one_operation(pair: Peers, device: Lagging) -> None:
    ours = [on_device(torch.ones(100)), np.ones(100, np.float32)]
    errors = each(pair, lambda i, comm: pccl.allreduce({"w": ours[i]}, comm=comm))
    assert all(isinstance(error, pccl.MismatchedCall) for error in errors), errors
    assert all("piece 1 of 2" in str(error) for error in errors)


def test_a_loss_between_two_pieces_runs_all_of_them_again(
    members: Members, device: Lagging, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Lagging()
    failing.fail_at = 512  # its third piece
    # By thread: each peer has a device of its own, and the last one's fails.
    own = threading.local()
    monkeypatch.setattr(adapter, "device_of", lambda leaf: own.device)

    def call(number: int, comm: pccl.Communicator) -> Any:
        own.device = failing if number == 2 else Lagging()
        tensor = on_device(torch.full((300,), float(10**number)))
        try:
            return pccl.allreduce(tensor, comm=comm, return_info=True), tensor
        finally:
            if number == 2:
                comm.close()

    *survivors, lost = in_threads([partial(call, i, comm) for i, comm in enumerate(members(3))])
    assert isinstance(lost, RuntimeError) and "the device is gone" in str(lost)
    for (result, info), tensor in survivors:
        assert (result == 11).all(), "the first pieces had been reduced over three"
        assert len(info.contributors) == 2
        assert tensor.unique().numel() == 1


def one_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for each peer's thread."""
    devices: dict[int, Lagging] = {}
    monkeypatch.setattr(
        adapter, "device_of", lambda leaf: devices.setdefault(threading.get_ident(), Lagging())
    )


def mixed_tree(i: int) -> Any:
    """Arrays whose bytes lie at odd places of a piece, and one of several pieces."""
    random = np.random.default_rng(i)
    return {
        "a": on_device(torch.full((7,), i + 1, dtype=torch.bfloat16)),
        "b": on_device(torch.from_numpy(random.normal(size=301).astype(np.float32))),
        "c": on_device(torch.arange(20, dtype=torch.int16) * (i + 1)),
        "d": random.normal(size=40),
        "e": np.full(9, i, np.int64),
        "f": on_device(torch.full((11,), 0.5 + i, dtype=torch.float16)),
    }


def numpy_tree(tree: Any) -> Any:
    """The same in CPU memory."""
    return {
        name: torch.clone(leaf.as_subclass(torch.Tensor)) if isinstance(leaf, OnDevice) else leaf
        for name, leaf in tree.items()
    }


@pytest.mark.parametrize("piece", [256, 1 << 20])
def test_weighted_means_of_arrays_on_a_device_are_those_of_arrays_in_memory(
    pair: Peers, device: Lagging, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    one_device_each(monkeypatch)
    monkeypatch.setattr(device_route, "PIECE_BYTES", piece)
    weights = [0.3, 2]
    trees = [mixed_tree(i) for i in range(2)]
    wanted = each(
        pair,
        lambda i, comm: pccl.allreduce(numpy_tree(trees[i]), "avg", weight=weights[i], comm=comm),
    )
    found = each(
        pair,
        lambda i, comm: pccl.allreduce(
            trees[i], "avg", weight=torch.tensor(weights[i], dtype=torch.float64), comm=comm
        ),
    )
    in_place = [mixed_tree(i) for i in range(2)]
    written = each(
        pair,
        lambda i, comm: pccl.allreduce(
            in_place[i], "avg", out=in_place[i], weight=weights[i], comm=comm
        ),
    )
    assert written[0] is in_place[0] and written[1] is in_place[1], written
    for result in (*found, *in_place):
        for name, leaf in result.items():
            same = torch.as_tensor(leaf).view(torch.uint8), torch.as_tensor(wanted[0][name])
            assert torch.equal(same[0], same[1].view(torch.uint8)), name
    assert torch.equal(trees[1]["b"], mixed_tree(1)["b"]), "inputs stay"


def test_weights_that_are_none_leave_arrays_on_a_device_as_they_were(
    pair: Peers, device: Lagging
) -> None:
    tensors = [on_device(torch.full((300,), i + 1.0)) for i in range(2)]
    for weights in ([0, 0], [1, -1]):

        def call(i: int, comm: pccl.Communicator, weights: list[int] = weights) -> Any:
            return pccl.allreduce(tensors[i], "avg", out=tensors[i], weight=weights[i], comm=comm)

        for error in each(pair, call):
            assert isinstance(error, pccl.InvalidArgument) and "weight" in str(error), error
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [2.0]]
    with pytest.raises(pccl.InvalidArgument, match="goes with op"):
        pccl.allreduce(tensors[0], "sum", weight=1, comm=pair[0])


def test_one_weighted_piece_meets_a_member_without_an_accelerator(
    pair: Peers, device: Lagging
) -> None:
    ours = [on_device(torch.ones(8, 8)), np.full((8, 8), 2, np.float32)]
    first, second = each(
        pair,
        lambda i, comm: pccl.allreduce(
            {"w": ours[i]}, "avg", weight=i + 1, quantize="int8", comm=comm
        ),
    )
    assert np.array_equal(first["w"].numpy(), second["w"])
    assert second["w"][0, 0] == np.float32(5 / 3)


@pytest.fixture
def apart(members: Members, monkeypatch: pytest.MonkeyPatch) -> Peers:
    """Two peers as on hosts of their own: on one host nothing is quantized."""
    monkeypatch.setenv("PCCL_SHM", "0")
    return members(2)


def normals(seed: int, count: int = 3000) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=count).astype(np.float32))


@pytest.mark.parametrize("weights", [None, [0.3, 2]])
def test_fewer_bits_of_arrays_on_a_device(
    apart: Peers, device: Lagging, monkeypatch: pytest.MonkeyPatch, weights: list[float] | None
) -> None:
    one_device_each(monkeypatch)

    def mean(i: int, comm: pccl.Communicator, on: bool, how: Any = None) -> Any:
        tensor = on_device(normals(i)) if on else normals(i)
        return pccl.allreduce(tensor, "avg", weight=weights and weights[i], quantize=how, comm=comm)

    exact = each(apart, lambda i, comm: mean(i, comm, False))[0]
    for piece in (1 << 20, 4096):
        monkeypatch.setattr(device_route, "PIECE_BYTES", piece)
        first, second = each(apart, lambda i, comm: mean(i, comm, True, "int4"))
        assert torch.equal(first, second) and not torch.equal(first, exact)
        assert (first - exact).abs().max() < 1
        if piece > 12_000:
            in_memory = each(apart, lambda i, comm: mean(i, comm, False, "int4"))[0]
            assert torch.equal(first.as_subclass(torch.Tensor), in_memory)


def test_error_feedback_of_pieces_counts_when_all_of_them_do(
    apart: Peers, device: Lagging, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_device_each(monkeypatch)
    monkeypatch.setattr(device_route, "PIECE_BYTES", 4096)
    how = pccl.Quantize("int4", error_feedback=True)

    def call(i: int, comm: pccl.Communicator) -> Any:
        tensor = on_device(normals(i))
        return pccl.allreduce(tensor, "avg", quantize=how, tag=1, comm=comm)

    def kept() -> list[dict[Any, bytes]]:
        return [
            {key: left.values.tobytes() for key, left in comm._residuals.kept.items()}
            for comm in apart
        ]

    exact = (normals(0) + normals(1)) / 2
    first = each(apart, call)[0]
    results = [first, *(each(apart, call)[0] for _ in range(31))]
    drift = (sum(results) / 32 - exact).abs().mean()
    assert drift < 0.2 * (first - exact).abs().mean()
    before = kept()
    assert all(len(one) == 3 for one in before)

    fetch = Lagging.fetch

    def failing(self: Lagging, flat: Any, begin: int, host: Any) -> Any:
        if begin == 8192:
            raise RuntimeError("the device is gone")
        return fetch(self, flat, begin, host)

    monkeypatch.setattr(Lagging, "fetch", failing)
    errors = in_threads([partial(call, i, comm) for i, comm in enumerate(apart)])
    assert all(isinstance(error, RuntimeError) for error in errors), errors
    assert kept() == before, "the first piece had been reduced"


COMPILED: dict[str, Callable[..., Any]] = {
    "allreduce": lambda x, comm: pccl.allreduce(x, comm=comm),
    "tree": lambda x, comm: pccl.allreduce({"a": x}, comm=comm)["a"],
    "number": lambda x, comm: pccl.allreduce(1.0, comm=comm) * x,
    "in place": lambda x, comm: pccl.allreduce(x, out=x, comm=comm),
    "weight": lambda x, comm: pccl.allreduce(x, "avg", weight=2.0, comm=comm),
    "allreduce_async": lambda x, comm: pccl.allreduce_async(x, comm=comm).wait(),
    "broadcast": lambda x, comm: pccl.broadcast(x, comm=comm),
    "allgather": lambda x, comm: pccl.allgather(x, comm=comm)[0],
    "allgather_async": lambda x, comm: pccl.allgather_async(x, comm=comm).wait()[0],
    "reduce_scatter": lambda x, comm: pccl.reduce_scatter(x, comm=comm),
    "alltoall": lambda x, comm: pccl.alltoall(x, comm=comm),
    "sync": lambda x, comm: pccl.sync({"a": x}, comm=comm)["a"],
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_call_in_a_compiled_function_runs_outside_of_its_graphs(
    members: Members, name: str
) -> None:
    (alone,) = members(1)
    call = COMPILED[name]
    compiled = torch.compile(lambda x: call(x * 2, alone) + 1, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert alone.stats().operations == (0 if name == "sync" else 2)
    torch._dynamo.reset()
