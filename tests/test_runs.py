"""Runs of real processes in which nobody dies.

Results, joining, mismatches, members that cannot meet, deadlines.
"""

import subprocess
import sys
import tempfile
from functools import partial

import pytest
from namespaces import Lab, running_on
from programs import runs
from workers import Run

pytestmark = pytest.mark.usefixtures("transport")


def test_peers_get_the_exact_sum_and_the_same_bytes(run: Run) -> None:
    answers = [peer.expect("done") for peer in run.peers(3, runs.sum_exactly)]
    assert all(answer["ok"] for answer in answers)
    assert len({answer["digest"] for answer in answers}) == 1
    assert sorted(answer["rank"] for answer in answers) == [0, 1, 2]


def test_a_tree_of_mixed_arrays_is_reduced(run: Run) -> None:
    for peer in run.peers(2, runs.reduce_a_mixed_tree):
        assert peer.expect("done") == {"event": "done", "ok": True}


@pytest.mark.parametrize("leaves", [1_100, 100_000])
def test_a_tree_of_very_many_small_arrays_is_reduced(run: Run, leaves: int) -> None:
    for peer in run.peers(3, partial(runs.reduce_many_leaves, leaves)):
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


def test_eight_peers_run_two_hundred_tagged_operations_at_once_in_any_order(run: Run) -> None:
    for peer in run.peers(8, runs.tagged_operations_in_any_order):
        assert peer.expect("done", 100)["ok"]


def test_a_newcomer_waits_in_its_first_collective_call_until_the_members_admit_it(
    run: Run,
) -> None:
    members = run.peers(2, runs.reduce_or_admit)
    for peer in members:
        assert peer.expect("in")["size"] == 2
    late = run.peer(runs.reduce_without_admit)
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


def test_explicit_peers_join_by_update_topology_and_reduce_with_tags(run: Run) -> None:
    peers = [run.peer(runs.explicit_by_tags) for _ in range(3)]
    for peer in peers:
        peer.expect("connected")
    for peer in peers:
        assert peer.expect("done") == {"event": "done", "ok": True, "size": 3}
    for peer in peers:
        peer.tell("end")
    assert [peer.ends() for peer in peers] == [0, 0, 0]


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ("hundred", "one more"),
        ("hundred", "floats"),
        ("large", "larger"),
        ("tree of a", "tree of b"),
        ("hundred", "maximum"),
    ],
)
def test_a_mismatch_fails_on_all_members_and_names_the_odd_one(
    run: Run, usual: str, odd: str
) -> None:
    peers = run.peers(3, runs.mismatch)
    ids = [peer.expect("in")["peer"] for peer in peers]
    for peer, call in zip(peers, (usual, odd, usual), strict=True):
        peer.tell(call)
    answers = [peer.expect("mismatch", 10) for peer in peers]
    assert {answer["peer"] for answer in answers} == {ids[1]}
    assert len({answer["text"] for answer in answers}) == 1
    for peer in peers:
        assert peer.expect("after") == {"event": "after", "ok": True, "size": 3}


def test_members_in_calls_that_cannot_meet_get_an_error_within_seconds(run: Run) -> None:
    peers = run.peers(2, runs.deadlock)
    for peer, call in zip(peers, ("barrier", "ten"), strict=True):
        peer.expect("in")
        peer.tell(call)
    for peer in peers:
        answer = peer.expect("deadlock", 20)
        assert answer["seconds"] < 4.0
        assert "barrier" in answer["text"] and "allreduce" in answer["text"]
    for peer in peers:
        peer.expect("covered")
        assert peer.expect("after")["ok"]


def test_a_member_that_is_slow_is_no_deadlock(run: Run) -> None:
    first, second = run.peers(2, runs.reduce_when_told)
    first.expect("in")
    second.expect("in")
    first.tell("go")
    with pytest.raises(AssertionError, match="said nothing"):
        first.next(4.0)
    second.tell("go")
    assert first.expect("step")["ok"] and second.expect("step")["ok"]


def test_a_deadline_ends_the_call_on_all_members_and_the_next_one_works(run: Run) -> None:
    early, late = run.peers(2, runs.deadline)
    for peer, order in ((early, "early"), (late, "late")):
        peer.expect("in")
        peer.tell(order)
    assert early.expect("timeout", 5)["result"] == "RANK_CONNECTION_LOST"
    late.tell("go")  # only now enters the call that is over
    late.expect("timeout", 5)
    assert early.expect("after")["ok"] and late.expect("after")["ok"]


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_alone_everything_is_a_no_op_that_works(run: Run) -> None:
    assert run.peer(runs.alone).expect("done")["seconds"] < 2.0


def test_peers_of_different_loopback_addresses_form_one_group(run: Run) -> None:
    for peer in [run.peer(runs.reduce_in_pair, PCCL_BIND=f"127.0.0.{i}") for i in (1, 2)]:
        assert peer.expect("done") == {"event": "done", "ok": True, "size": 2}


@pytest.mark.root
@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_a_peer_that_met_the_master_on_loopback_reduces_with_one_on_another_host(lab: Lab) -> None:
    hosts = lab(2)
    with running_on(hosts[0]) as run:
        peers = [
            run.peer(runs.reduce_in_pair, hosts[0], PCCL_MASTER="127.0.0.1:48148"),
            run.peer(runs.reduce_in_pair, hosts[1]),
        ]
        for peer in peers:
            assert peer.expect("done") == {"event": "done", "ok": True, "size": 2}


def test_a_dropped_work_runs_to_its_end(run: Run) -> None:
    """And keeps its arrays until then, whether the engine takes them as they are or not."""
    first, second = run.peers(2, runs.drop_work)
    first.tell("go")
    assert first.expect("called")["held"]  # the other member has not come to it
    second.tell("go")
    second.expect("called")
    for peer in (first, second):
        assert peer.expect("done") == {"event": "done", "ok": True, "held": False}
