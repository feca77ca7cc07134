"""Arrays in shared memory: like any others to NumPy, torch and JAX, and reduced where they are."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import numpy as np
import pytest
from workers import running

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


def test_memory_is_given_back_with_the_last_view():
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


def test_forked_children_see_them():
    array = pccl.zeros(10, np.int64)
    child = os.fork()
    if child == 0:
        array[3] = 7
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert array[3] == 7


# Reduces in memory, then what it is told: "shared", "private" or both in turn, by rank.
MEMBER = """
def in_memory(info, count):
    others = info.world_size - 1
    return info.tx_bytes * info.world_size < 1.5 * 8 * count * others
comm = start()
while True:
    total, info = pccl.allreduce(x(10), return_info=True)
    if info.epoch > 1:
        break
say(event="in", peer=pccl.init_peer)
kept = {}
for line in sys.stdin:
    order = json.loads(line)
    if order == "stop":
        break
    if order == "forget":
        kept.clear()
        say(event="forgotten")
        continue
    if order == "count":
        total, info = pccl.allreduce(x(10), return_info=True)
        say(event="count", mappings=open("/proc/self/maps").read().count("memfd:pccl"))
        continue
    kinds, count = order
    kind = kinds[pccl.rank() % len(kinds)]
    def make(fill):
        array = pccl.empty(count + 3, np.int64) if kind == "shared" else np.empty(count + 3, np.int64)
        array[...] = fill
        kept[id(array)] = array
        return array[3:]
    send, out = make(value(pccl.init_peer)), make(-1)
    got, info = pccl.allreduce(send, out=out, return_info=True)
    ok = got is out and (out == expected(info)).all() and (send == value(pccl.init_peer)).all()
    got, info = pccl.allreduce(send, out=send, return_info=True)
    ok = ok and got is send and (send == expected(info)).all()
    tree = {"a": make(value(pccl.init_peer)), "b": [make(2)[:7], make(3)]}
    got, info = pccl.allreduce(tree, return_info=True)
    ok = ok and (got["a"] == expected(info)).all() and (got["b"][0] == 2 * info.world_size).all()
    ok = ok and (got["b"][1] == 3 * info.world_size).all() and (tree["b"][1] == 3).all()
    say(event="done", ok=bool(ok), world=info.world_size, memory=in_memory(info, 2 * count + 7))
pccl.shutdown()
"""


@pytest.mark.parametrize("world", [2, 3])
def test_all_kinds_of_arrays_are_reduced_exactly(world):
    with running() as run:
        peers = run.peers(world, MEMBER)
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


def test_what_is_dropped_is_let_go_everywhere():
    with running() as run:
        peers = run.peers(2, MEMBER)
        for peer in peers:
            peer.expect("in")

        def counts():
            for peer in peers:
                peer.tell("count")
            return [peer.expect("count")["mappings"] for peer in peers]

        # The variables of the last order hold a few; what they hold is replaced, so this is level.
        level = None
        for turn in range(7):
            for peer in peers:
                peer.tell([["shared"], 50_000])
            for peer in peers:
                assert peer.expect("done", 60)["ok"]
            for peer in peers:
                peer.tell("forget")
                peer.expect("forgotten")
            if turn == 0:
                continue
            # Others are told at the next tick.
            now = counts()
            deadline = time.monotonic() + 20
            while level is not None and max(now) > max(level):
                assert time.monotonic() < deadline, (level, now)
                now = counts()
            level = level or now


def test_survivors_are_exact_when_an_owner_is_killed():
    with running() as run:
        peers = run.peers(3, MEMBER)
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
    code = """
    import os, sys
    import numpy as np, pccl
    first = pccl.zeros(10)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    mine = pccl.empty(10)
    mine[:] = 1 if child else 2
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0 if (mine == 2).all() else 1)
    os.read(ready[0], 1)
    os.write(go[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert (mine == 1).all(), mine
    del first, mine
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tempfile.gettempdir(), timeout=200
    )
    assert done.returncode == 0


def test_a_child_reduces_what_it_inherited():
    code = """
    old = pccl.empty(70_001, np.int64)
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        say(event="over")
        sys.exit()
    # Where the parent had the inherited array's descriptor, this one has another's.
    other = pccl.full(70_001, -1, np.int64)
    start(min_peers=2)
    while True:
        old[:] = value(pccl.init_peer)
        total, info = pccl.allreduce(old, return_info=True)
        if info.epoch > 1 or not (total == expected(info)).all():
            break
    say(event="done", ok=bool((total == expected(info)).all()))
    old[:] = value(pccl.init_peer)
    total, info = pccl.allreduce(old, return_info=True)
    say(event="done", ok=bool((total == expected(info)).all()))
    pccl.shutdown()
    os._exit(0)
    """
    with running() as run:
        for peer in (peers := [run.peer(code) for _ in range(2)]):
            assert peer.expect("done")["ok"]
        for peer in peers:
            assert peer.expect("done")["ok"]
            peer.expect("over")


def test_trees_of_hundreds_of_shared_arrays_stay_exact():
    code = """
    start(min_peers=2)
    for turn in range(12):
        fresh = turn % 3 == 0
        if turn == 0 or fresh:
            leaves = [pccl.empty(500 + 37 * i, np.int64) for i in range(400)]
        for i, leaf in enumerate(leaves):
            leaf[:] = value(pccl.init_peer) + i
        total, info = pccl.allreduce(leaves, return_info=True)
        n = info.world_size
        ok = all((t == expected(info) + n * i).all() for i, t in enumerate(total))
        if not ok:
            break
    say(event="done", ok=bool(ok))
    pccl.shutdown()
    """
    with running() as run:
        for peer in [run.peer(code) for _ in range(2)]:
            assert peer.expect("done", 60)["ok"]
