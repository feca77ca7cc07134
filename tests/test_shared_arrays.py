"""Arrays in shared memory: like any others to NumPy, torch and JAX, and reduced where they are."""

import gc
import os
import signal
import subprocess
import tempfile

import numpy as np
import pytest
from programs import shared_arrays
from workers import command, eventually

import pccl


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return maps.read().count("memfd:pccl")


@pytest.mark.parametrize("shape", [5, (5,), (3, 4), (2, 3, 300_000), (), 0, (4, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, "float64", np.complex64, np.bool_])
def test_they_are_ordinary_arrays(shape, dtype):
    for make, value in ((pccl.empty, None), (pccl.zeros, 0), (pccl.full, 1)):
        arguments = (shape, value, dtype) if make is pccl.full else (shape, dtype)
        array = make(*arguments)
        like = np.empty(shape, dtype)
        assert type(array) is np.ndarray
        assert (array.shape, array.dtype) == (like.shape, like.dtype)
        assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
        assert array.size == 0 or array.ctypes.data % 64 == 0
        if value is not None:
            assert (array == value).all()
        array[...] = 1
        assert (array == 1).all()


def test_arrays_do_not_overlap():
    arrays = [pccl.full(1 + i * 13 % 700, i, np.int32) for i in range(2000)]
    for i, array in enumerate(arrays):
        assert (array == i).all()


def test_bad_requests_are_named():
    with pytest.raises(pccl.InvalidArgument, match="negative"):
        pccl.empty((3, -1))
    with pytest.raises(pccl.InvalidArgument, match="Python objects"):
        pccl.empty(3, object)
    with pytest.raises(MemoryError):
        pccl.empty(1 << 60)


@pytest.mark.shared_memory
def test_memory_is_given_back_with_the_last_view():
    gc.collect()  # arrays of other tests
    before = mappings()
    array = pccl.zeros(1 << 20)
    view = array[17:900].reshape(1, -1)
    assert mappings() > before
    del array
    gc.collect()
    assert mappings() > before
    view[...] = 1
    del view
    gc.collect()
    assert mappings() == before


def test_a_copy_has_shape_dtype_and_elements():
    source = np.arange(12, dtype=np.int16).reshape(3, 4).T
    copy = pccl.from_array(source)
    assert copy.dtype == source.dtype and (copy == source).all() and copy.flags.c_contiguous
    copy[0, 0] = 99
    assert source[0, 0] == 0


def test_torch_uses_the_same_memory():
    torch = pytest.importorskip("torch")
    array = pccl.zeros((3, 5))
    tensor = torch.from_numpy(array)
    tensor.add_(2)
    assert (array == 2).all()
    assert (pccl.from_array(tensor) == 2).all()


def test_a_copy_may_be_of_any_frameworks_array():
    torch = pytest.importorskip("torch")
    values = torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (values.conj(), torch.nn.Parameter(values), values.expand(3, 2)):
        copy = pccl.from_array(tensor)
        assert np.array_equal(copy, tensor.detach().resolve_conj().numpy())
    pytest.importorskip("ml_dtypes")
    copy = pccl.from_array(torch.full((3,), 2, dtype=torch.bfloat16))
    assert (copy.dtype.name, copy.astype(int).tolist()) == ("bfloat16", [2, 2, 2])
    with pytest.raises(pccl.NotSupported, match="from_array failed: array: only dense"):
        pccl.from_array(torch.eye(2).to_sparse())


@pytest.mark.parametrize("dtype", ["U3", "S2", "V4", "M8[s]", "m8[s]", [("a", "i4"), ("b", "U2")]])
def test_zeros_are_those_of_numpy(dtype):
    made, like = pccl.zeros((2, 3), dtype), np.zeros((2, 3), dtype)
    assert made.tobytes() == like.tobytes() and made.dtype == like.dtype


def test_forked_children_see_them():
    array = pccl.zeros(10, np.int64)
    child = os.fork()
    if child == 0:
        array[3] = 7
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert array[3] == 7


@pytest.mark.shared_memory
@pytest.mark.parametrize("world", [2, 3])
def test_all_kinds_of_arrays_are_reduced_exactly(run, world):
    peers = run.peers(world, shared_arrays.reduce_as_told)
    for peer in peers:
        peer.expect("in")
    for kinds in (["shared"], ["private"], ["shared", "private"]):
        for count in (1, 600, 5000, 70_001, 1_000_003):
            for peer in peers:
                peer.tell([kinds, count])
            for peer in peers:
                answer = peer.expect("done", 60)
                assert answer["ok"] and answer["world"] == world, (kinds, count)
                assert answer["memory"], (kinds, count)


@pytest.mark.shared_memory
def test_what_is_dropped_is_let_go_everywhere(run):
    peers = run.peers(2, shared_arrays.reduce_as_told)
    for peer in peers:
        peer.expect("in")

    def counts():
        for peer in peers:
            peer.tell("count")
        return [peer.expect("count")["mappings"] for peer in peers]

    def reduce_and_forget():
        for peer in peers:
            peer.tell([["shared"], 50_000])
        for peer in peers:
            assert peer.expect("done", 60)["ok"]
        for peer in peers:
            peer.tell("forget")
            peer.expect("forgotten")

    # The variables of the last order hold a few; what they hold is replaced, so this is level.
    for _ in range(2):
        reduce_and_forget()
    level = max(counts())
    for _ in range(5):
        reduce_and_forget()
        # Others are told at the next tick.
        eventually(lambda: max(counts()) <= level, said=lambda: (level, counts()))


@pytest.mark.shared_memory
def test_survivors_are_exact_when_an_owner_is_killed(run):
    peers = run.peers(3, shared_arrays.reduce_as_told)
    for peer in peers:
        peer.expect("in")
    for count in (100_000, 400_001):
        for peer in peers:
            peer.tell([["shared"], count])
        for peer in peers:
            assert peer.expect("done", 60)["ok"]
    for peer in peers:
        peer.tell([["shared"], 3_000_001])
    peers[1].signal(signal.SIGKILL)
    for peer in (peers[0], peers[2]):
        assert peer.expect("done", 60)["ok"]


def test_parent_and_child_do_not_get_the_same_memory():
    done = subprocess.run(
        command(shared_arrays.fork_between_two_arrays), cwd=tempfile.gettempdir(), timeout=200
    )
    assert done.returncode == 0


@pytest.mark.shared_memory
def test_a_child_reduces_what_it_inherited(run):
    for peer in (peers := [run.peer(shared_arrays.reduce_in_a_child) for _ in range(2)]):
        assert peer.expect("done")["ok"]
    for peer in peers:
        assert peer.expect("done")["ok"]
        peer.expect("over")


@pytest.mark.shared_memory
def test_one_that_cannot_map_arrays_keeps_nobody_from_memory(run):
    peers = run.peers(3, shared_arrays.reduce_with_little_room)
    for peer in peers:
        answer = peer.expect("done", 100)
        # The call in which it finds out.
        assert answer["ok"] and answer["elsewhere"] in ([], [0]), answer
        peer.ends()
        assert peer.stderr().count("cannot map memory of") == (answer["rank"] == 1)


def test_trees_of_hundreds_of_shared_arrays_stay_exact(run):
    for peer in [run.peer(shared_arrays.trees_of_hundreds) for _ in range(2)]:
        assert peer.expect("done", 60)["ok"]
