"""Runs of real processes in which nobody dies: results, joining, mismatches, stuck groups, deadlines."""

import subprocess
import sys
import tempfile

import pytest
from namespaces import namespaces, running_on
from workers import running


def test_peers_get_the_exact_sum_and_the_same_bytes() -> None:
    code = """
    import hashlib
    start()
    ok = True
    digest = hashlib.sha256()
    for count in (0, 1, 3, 100, 5000, 70_000, 300_001):
        mine = x(count)
        total, info = pccl.allreduce(mine, return_info=True)
        ok = ok and (total == expected(info)).all() and info.world_size == 3
        ok = ok and (mine == value(pccl.init_peer)).all()
        noise = np.random.default_rng(value(pccl.init_peer)).standard_normal(count).astype(np.float32)
        digest.update(pccl.allreduce(noise, "avg").tobytes())
        pccl.allreduce(mine, out=mine)
        ok = ok and (mine == expected(info)).all()
    say(event="done", ok=bool(ok), digest=digest.hexdigest(), rank=pccl.rank())
    """
    with running() as run:
        answers = [peer.expect("done") for peer in run.peers(3, code)]
        assert all(answer["ok"] for answer in answers)
        assert len({answer["digest"] for answer in answers}) == 1
        assert sorted(answer["rank"] for answer in answers) == [0, 1, 2]


def test_a_tree_of_mixed_arrays_is_reduced() -> None:
    code = """
    start()
    me = value(pccl.init_peer)
    tree = {
        "a": np.full((3, 4), me, np.float64),
        "b": [np.ones(5, np.int8), me, None],
        "c": (np.full((2, 2), me, np.int64).T[::-1], np.full((), 2.5, np.float32)),
    }
    result, info = pccl.allreduce(tree, return_info=True)
    want = expected(info)
    ok = (result["a"] == want).all() and (result["b"][0] == 2).all() and result["b"][1] == want
    ok = ok and (result["c"][0] == want).all() and result["c"][1].shape == () and result["c"][1] == 5.0
    say(event="done", ok=bool(ok))
    """
    with running() as run:
        for peer in run.peers(2, code):
            assert peer.expect("done") == {"event": "done", "ok": True}


@pytest.mark.parametrize("leaves", [1_100, 100_000])
def test_a_tree_of_very_many_small_arrays_is_reduced(leaves: int) -> None:
    code = f"""
    start()
    tree = [value(pccl.init_peer)] * {leaves}
    total, info = pccl.allreduce(tree, return_info=True)
    again, _ = pccl.allreduce({{"a": x(70_000), "b": [x(3)] * ({leaves} // 100)}}, return_info=True)
    want = expected(info)
    ok = all(leaf == want for leaf in total) and (again["a"] == want).all()
    ok = ok and all((leaf == want).all() for leaf in again["b"])
    say(event="done", ok=bool(ok), size=info.world_size)
    """
    with running() as run:
        for peer in run.peers(3, code):
            assert peer.expect("done", 60) == {"event": "done", "ok": True, "size": 3}


def test_the_launcher_numbers_processes_by_rank() -> None:
    code = "import pccl; pccl.init(); print('rank', pccl.rank(), flush=True); pccl.barrier()"
    done = subprocess.run(
        [sys.executable, "-m", "pccl", "run", "-n", "4", "--", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tempfile.gettempdir(),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"[{i}] rank {i}" for i in range(4)]


def test_eight_peers_run_two_hundred_tagged_operations_at_once_in_any_order() -> None:
    code = """
    import random
    start()
    order = list(range(200))
    random.Random(value(pccl.init_peer)).shuffle(order)
    works = {tag: pccl.allreduce_async(x(1 + 97 * tag) + tag, tag=tag) for tag in order}
    ok = True
    for tag, work in works.items():
        total = work.wait()
        ok = ok and (total == expected(work.info) + 8 * tag).all() and work.info.world_size == 8
    say(event="done", ok=bool(ok))
    """
    with running() as run:
        for peer in run.peers(8, code):
            assert peer.expect("done", 100)["ok"]


def test_a_newcomer_waits_in_its_first_collective_call_until_the_members_admit_it() -> None:
    member = """
    start()
    say(event="in", size=pccl.world_size())
    steps = 0
    while True:
        order = hear()
        if order == "stop":
            break
        let_in = pccl.admit() if order == "admit" else None
        total, info = pccl.allreduce(x(10), return_info=True)
        say(event="step", admitted=let_in, size=info.world_size, ok=bool((total == expected(info)).all()))
    """
    newcomer = """
    start()
    say(event="in", size=pccl.world_size(), rank=pccl.rank())
    total, info = pccl.allreduce(x(10), return_info=True)
    say(event="step", size=info.world_size, ok=bool((total == expected(info)).all()))
    hear()
    """
    with running() as run:
        members = run.peers(2, member)
        for peer in members:
            assert peer.expect("in")["size"] == 2
        late = run.peer(newcomer)
        assert late.expect("in")["rank"] == -1  # init returned at once
        for peer in members:
            peer.tell("reduce")
        for peer in members:
            assert peer.expect("step") == {"event": "step", "admitted": None, "size": 2, "ok": True}
        # It is let in by the first admission point after its links are up.
        for _ in range(200):
            for peer in members:
                peer.tell("admit")
            steps = [peer.expect("step") for peer in members]
            assert all(step["ok"] for step in steps)
            assert steps[0]["admitted"] == steps[1]["admitted"]
            if steps[0]["admitted"]:
                break
        assert [step["size"] for step in steps] == [3, 3]
        assert late.expect("step") == {"event": "step", "size": 3, "ok": True}


def test_level_1_peers_join_by_update_topology_and_reduce_with_tags() -> None:
    code = """
    import os
    with pccl.Communicator(os.environ["PCCL_MASTER"]) as comm:
        say(event="connected")
        while comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) < 3:
            comm.update_topology()
        send, recv = np.full(1000, 1.0, np.float32), np.zeros(1000, np.float32)
        info = comm.all_reduce(send, recv, op=pccl.ReduceOp.SUM)
        handles = [comm.all_reduce_async(send, np.zeros_like(recv), op=pccl.ReduceOp.AVG, tag=t) for t in range(5)]
        waited = [handle.wait() for handle in handles]
        outs = [np.zeros_like(recv) for _ in range(6)]
        descriptors = [
            pccl.ReduceOpDescriptor.from_numpy(send, out, pccl.ReduceDescriptor(
                count=1000, op=pccl.ReduceOp.SUM, tag=100 + i,
                operand_descriptor=pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT),
                quantization_options=pccl.QuantizationOptions(
                    pccl.DataType.FLOAT, pccl.QuantizationAlgorithm.NONE)))
            for i, out in enumerate(outs)
        ]
        comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=4)
        ok = (recv == 3).all() and all(w[0] for w in waited) and all((out == 3).all() for out in outs)
        say(event="done", ok=bool(ok), size=info.local_world_size)
        hear()
    """
    with running() as run:
        peers = [run.peer(code) for _ in range(3)]
        for peer in peers:
            peer.expect("connected")
        for peer in peers:
            assert peer.expect("done") == {"event": "done", "ok": True, "size": 3}
        for peer in peers:
            peer.tell("end")
        assert [peer.ends() for peer in peers] == [0, 0, 0]


def test_level_1_alone_gets_too_few_peers() -> None:
    code = """
    import os
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    comm.connect(n_attempts=3)
    a = np.ones(4, np.float32)
    try:
        comm.all_reduce(a, np.zeros_like(a), op=pccl.ReduceOp.SUM)
    except pccl.TooFewPeers as error:
        say(event="done", result=error.result.name)
    """
    with running() as run:
        assert run.peer(code).expect("done")["result"] == "TOO_FEW_PEERS"


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ("x(100)", "x(101)"),
        ("x(100)", "x(100, np.float64)"),
        ("x(300_000)", "x(300_001)"),
        ("{'a': x(5)}", "{'b': x(5)}"),
        ("x(100), 'sum'", "x(100), 'max'"),
    ],
)
def test_a_mismatch_fails_on_all_members_and_names_the_odd_one(usual: str, odd: str) -> None:
    code = """
    start()
    say(event="in", peer=pccl.init_peer)
    call = hear()
    try:
        eval("pccl.allreduce(" + call + ")")
        say(event="result")
    except pccl.MismatchedCall as error:
        say(event="mismatch", peer=error.peer, text=str(error))
    total, info = pccl.allreduce(x(10), return_info=True)
    say(event="after", ok=bool((total == expected(info)).all()), size=info.world_size)
    hear()
    """
    with running() as run:
        peers = run.peers(3, code)
        ids = [peer.expect("in")["peer"] for peer in peers]
        for peer, call in zip(peers, (usual, odd, usual), strict=True):
            peer.tell(call)
        answers = [peer.expect("mismatch", 10) for peer in peers]
        assert {answer["peer"] for answer in answers} == {ids[1]}
        assert len({answer["text"] for answer in answers}) == 1
        for peer in peers:
            assert peer.expect("after") == {"event": "after", "ok": True, "size": 3}


def test_members_in_calls_that_cannot_meet_get_an_error_within_seconds() -> None:
    code = """
    import time
    start()
    say(event="in")
    call = hear()
    began = time.monotonic()
    try:
        pccl.barrier() if call == "barrier" else pccl.allreduce(x(10))
        say(event="result")
    except pccl.Deadlock as error:
        say(event="deadlock", seconds=time.monotonic() - began, text=str(error), waiting=str(error.waiting))
    # The other call is covered: whoever comes to it gets the error too, once.
    try:
        pccl.allreduce(x(10)) if call == "barrier" else pccl.barrier()
        say(event="result")
    except pccl.Deadlock:
        say(event="covered")
    total, info = pccl.allreduce(x(10), return_info=True)
    say(event="after", ok=bool((total == expected(info)).all()))
    hear()
    """
    with running() as run:
        peers = run.peers(2, code)
        for peer, call in zip(peers, ("barrier", "allreduce"), strict=True):
            peer.expect("in")
            peer.tell(call)
        for peer in peers:
            answer = peer.expect("deadlock", 20)
            assert answer["seconds"] < 4.0
            assert "barrier" in answer["text"] and "allreduce" in answer["text"]
        for peer in peers:
            peer.expect("covered")
            assert peer.expect("after")["ok"]


def test_a_member_that_is_slow_is_no_deadlock() -> None:
    code = """
    start()
    say(event="in")
    hear()
    total, info = pccl.allreduce(x(10), return_info=True)
    say(event="step", ok=bool((total == expected(info)).all()))
    hear()
    """
    with running() as run:
        first, second = run.peers(2, code)
        first.expect("in")
        second.expect("in")
        first.tell("go")
        with pytest.raises(AssertionError, match="said nothing"):
            first.next(4.0)
        second.tell("go")
        assert first.expect("step")["ok"] and second.expect("step")["ok"]


def test_a_deadline_ends_the_call_on_all_members_and_the_next_one_works() -> None:
    code = """
    start()
    say(event="in")
    order = hear()
    if order == "late":
        hear()
    try:
        pccl.allreduce(x(10), timeout=0.5 if order == "early" else None)
        say(event="result")
    except pccl.Timeout as error:
        say(event="timeout", result=error.result.name)
    total, info = pccl.allreduce(x(10), return_info=True)
    say(event="after", ok=bool((total == expected(info)).all()))
    hear()
    """
    with running() as run:
        early, late = run.peers(2, code)
        for peer, order in ((early, "early"), (late, "late")):
            peer.expect("in")
            peer.tell(order)
        assert early.expect("timeout", 5)["result"] == "RANK_CONNECTION_LOST"
        late.tell("go")  # only now enters the call that is over
        late.expect("timeout", 5)
        assert early.expect("after")["ok"] and late.expect("after")["ok"]


def test_alone_everything_is_a_no_op_that_works() -> None:
    code = """
    import time
    start()
    began = time.monotonic()
    a = x(10)
    assert pccl.admit() is True and pccl.admit() is False
    assert (pccl.allreduce(a) == a).all() and pccl.allreduce(3, "avg") == 3.0
    pccl.barrier()
    assert pccl.rank() == 0 and pccl.world_size() == 1
    pccl.shutdown()
    say(event="done", seconds=time.monotonic() - began)
    """
    with running() as run:
        assert run.peer(code).expect("done")["seconds"] < 2.0


def test_peers_of_different_loopback_addresses_form_one_group() -> None:
    code = """
    start(min_peers=2)
    total, info = pccl.allreduce(x(200_000), return_info=True)
    say(event="done", ok=bool((total == expected(info)).all()), size=info.world_size)
    hear()
    """
    with running() as run:
        peers = [run.peer(code, PCCL_BIND="127.0.0.1"), run.peer(code, PCCL_BIND="127.0.0.2")]
        for peer in peers:
            assert peer.expect("done") == {"event": "done", "ok": True, "size": 2}


@pytest.mark.root
def test_a_peer_that_met_the_master_on_loopback_reduces_with_one_on_another_host() -> None:
    code = """
    start(min_peers=2)
    total, info = pccl.allreduce(x(200_000), return_info=True)
    say(event="done", ok=bool((total == expected(info)).all()), size=info.world_size)
    hear()
    """
    with namespaces(2) as hosts, running_on(hosts[0]) as run:
        peers = [
            run.peer(code, hosts[0], PCCL_MASTER="127.0.0.1:48148"),
            run.peer(code, hosts[1]),
        ]
        for peer in peers:
            assert peer.expect("done") == {"event": "done", "ok": True, "size": 2}


def test_a_dropped_work_runs_to_its_end() -> None:
    """And keeps its arrays until then, whether the engine takes them as they are or not."""
    code = """
    import gc, weakref
    start()
    hear()
    out = np.zeros(200_000, np.int64)
    held = x(200_000)
    strided = np.ones(400_000, np.int64)[::2]
    alive = weakref.ref(held)
    pccl.allreduce_async(held, out=out)
    pccl.allreduce_async([strided, 1])
    del held
    gc.collect()
    say(event="called", held=alive() is not None)
    pccl.barrier()
    total, info = pccl.allreduce(x(10), return_info=True)
    gc.collect()
    say(event="done", ok=bool((out == expected(info)).all()), held=alive() is not None)
    """
    with running() as run:
        first, second = run.peers(2, code)
        first.tell("go")
        assert first.expect("called")["held"]  # the other member has not come to it
        second.tell("go")
        second.expect("called")
        for peer in (first, second):
            assert peer.expect("done") == {"event": "done", "ok": True, "held": False}


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_other_frameworks_arrays_come_back_as_what_they_were(kind: str) -> None:
    pytest.importorskip(kind)
    code = f"""
    kind = {kind!r}
    start()
    if kind == "torch":
        import torch
        make, array = (lambda n: torch.full((n,), float(value(pccl.init_peer)), dtype=torch.float64)), torch.Tensor
    else:
        import jax, jax.numpy as jnp
        make, array = (lambda n: jnp.full((n,), value(pccl.init_peer) % 1000, jnp.int32)), jax.Array
    total, info = pccl.allreduce({{"g": make(10), "n": np.ones(3)}}, return_info=True)
    want = expected(info) if kind == "torch" else sum(value(p) % 1000 for p in info.contributors)
    ok = isinstance(total["g"], array) and bool((total["g"] == want).all()) and isinstance(total["n"], np.ndarray)
    say(event="done", ok=ok)
    """
    with running() as run:
        assert all(peer.expect("done", 60)["ok"] for peer in run.peers(2, code))
