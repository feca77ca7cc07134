"""torchft's Manager on pccl: steps, losses, newcomers, and the one answer of should_commit."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from diloco_run import asked
from programs import torchft_member as member
from workers import FAST, Program, Run, Worker, wait_until_asleep

import pccl

torch = pytest.importorskip("torch")

from pccl.adapters.torchft import Manager, WorldSizeMode  # noqa: E402

Log = list[dict[str, Any]]


def begun(run: Run, count: int, **options: Any) -> list[Worker]:
    """So many members, numbered from 1."""
    env = {"PCCL_MIN_PEERS": str(count)}
    peers = [run.peer(partial(member.serve, n + 1, **options), **env) for n in range(count)]
    for peer in peers:
        peer.expect("in", 60)
    return peers


def newcomer(run: Run, number: int, first: Program, **options: Any) -> Worker:
    """A peer that makes this call, and waits to be let in."""
    late = run.peer(partial(member.serve, number, **options))
    late.expect("in", 60)
    late.call(first)
    asked(late)
    return late


def tell(peers: Sequence[Worker], program: Program) -> None:
    for peer in peers:
        peer.call(program)


def went(peers: Sequence[Worker]) -> list[Log]:
    """Each member's steps. They are the same on all that were in them."""
    logs: list[Log] = [peer.expect("went", 60)["log"] for peer in peers]
    check_alike(logs)
    return logs


def check_alike(logs: Sequence[Log]) -> None:
    """The last steps of all are the same."""
    shortest = min(map(len, logs))
    for attempts in zip(*(log[-shortest:] for log in logs), strict=True):
        for key in ("committed", "step", "batches", "size", "state"):
            assert len({attempt[key] for attempt in attempts}) == 1, (key, attempts)


def go(peers: Sequence[Worker], count: int, **options: Any) -> list[Log]:
    tell(peers, partial(member.go, count, **options))
    return went(peers)


def test_a_kill_costs_a_step_only_if_its_reductions_are_over_different_members(run: Run) -> None:
    peers = begun(run, 4)
    go(peers, 2)
    peers[3].call(partial(member.deviate, "die between"))
    peers[3].call(partial(member.go, 1))
    (log, *_) = go(peers[:3], 2)
    assert [attempt["committed"] for attempt in log] == [False, True]
    assert log[0]["means"] == [2.5, 4.0] and log[0]["done"] == [True, True]  # of four, and of three
    assert log[0]["error"] is None and log[1]["means"] == [2.0, 4.0]
    peers[2].call(partial(member.deviate, "die"))
    peers[2].call(partial(member.go, 1))
    (log, _) = go(peers[:2], 2)
    assert [attempt["step"] for attempt in log] == [4, 5]
    assert [attempt["means"] for attempt in log] == [[1.5, 3.0]] * 2
    assert [attempt["batches"] for attempt in log] == [13, 15]


def test_members_make_the_same_steps_and_a_newcomer_takes_part_in_its_first(run: Run) -> None:
    peers = begun(run, 2)  # with different weights
    logs = go(peers, 3)
    for log in logs:
        assert [attempt["step"] for attempt in log] == [1, 2, 3]
        assert [attempt["batches"] for attempt in log] == [2, 4, 6]
        assert all(attempt["committed"] and attempt["done"] == [True, True] for attempt in log)
        assert all(attempt["means"] == [1.5, 3.0] for attempt in log)
    assert sorted(log[0]["rank"] for log in logs) == [0, 1]
    late = newcomer(run, 4, partial(member.go, 2))
    tell(peers, partial(member.go, 2, until=3))
    logs = went([*peers, late])
    assert logs[2][0]["step"] == logs[0][-2]["step"] > 3
    assert logs[2][0]["rank"] == 2 and logs[2][0]["means"] == pytest.approx([7 / 3, 14 / 3])


def test_an_error_that_one_member_reports_drops_the_step_on_all(run: Run) -> None:
    peers = begun(run, 3)
    peers[1].call(partial(member.deviate, "report"))
    logs = go(peers, 2)
    assert [attempt["committed"] for attempt in logs[0]] == [False, True]
    assert [log[0]["error"] for log in logs] == [None, "ValueError", None]
    # Without the second reduction, in which the others wait: it leaves, and comes back.
    peers[1].call(partial(member.deviate, "report early"))
    tell(peers, partial(member.go, 2, until=3))
    logs = [peer.expect("went", 60)["log"] for peer in peers]
    assert not any(log[0]["committed"] for log in logs)
    assert all(log[-1]["committed"] and log[-1]["size"] == 3 for log in logs)
    assert len({log[-1]["state"] for log in logs}) == 1


def test_calls_that_do_not_match_drop_a_step_and_are_raised_in_the_second(run: Run) -> None:
    peers = begun(run, 2)
    for how in ("other sizes", "sum"):
        peers[1].call(partial(member.deviate, how))
        logs = go(peers, 2)
        assert [attempt["committed"] for attempt in logs[0]] == [False, True]
        assert [log[0]["error"] for log in logs] == ["MismatchedCall"] * 2
    for _ in range(2):
        peers[1].call(partial(member.deviate, how))
        tell(peers, partial(member.go_and_fail, 1))
    failures = [peer.expect("failed") for peer in peers]
    assert all(failure["kind"] == "MismatchedCall" for failure in failures)
    assert all("rank 1" in failure["text"] for failure in failures)
    go(peers, 1)  # and on, if the program does


def test_too_many_failures_in_a_row_are_an_error(run: Run) -> None:
    peers = begun(run, 2, max_retries=1)
    for _ in range(2):
        peers[0].call(partial(member.deviate, "report"))
        tell(peers, partial(member.go_and_fail, 1))
    failures = [peer.expect("failed") for peer in peers]
    assert [failure["kind"] for failure in failures] == ["RuntimeError"] * 2
    assert "2 steps in a row failed" in failures[0]["text"]


def test_a_step_of_too_few_members_is_not_committed_until_another_comes(run: Run) -> None:
    peers = begun(run, 2, min_replica_size=2)
    go(peers, 1)
    peers[1].call(partial(member.deviate, "die"))
    peers[1].call(partial(member.go, 1))
    (log,) = go(peers[:1], 2)
    assert not any(attempt["committed"] for attempt in log)
    late = newcomer(run, 3, partial(member.go, 1, until=2), min_replica_size=2)
    peers[0].call(partial(member.go, 1, until=2))
    logs = went([peers[0], late])
    assert logs[1][-1]["committed"] and logs[1][-1]["step"] == 2


def test_spares_contribute_nothing_and_take_the_place_of_a_lost_member(run: Run) -> None:
    peers = begun(run, 3, min_replica_size=2, mode="FIXED_WITH_SPARES")
    tell(peers, partial(member.go, 2))
    logs = [peer.expect("went", 60)["log"] for peer in peers]
    ranks = [log[0]["rank"] for log in logs]
    assert sorted(ranks, key=str) == [0, 1, None]
    spare = ranks.index(None)
    mean = sum(number for number in (1, 2, 3) if number != spare + 1) / 2
    assert all(log[-1]["means"] == [mean, 2 * mean] for log in logs)
    assert all(log[-1]["batches"] == 4 and log[-1]["size"] == 2 for log in logs)
    lost = ranks.index(0)
    left = [peer for index, peer in enumerate(peers) if index != lost]
    peers[lost].call(partial(member.deviate, "die"))
    peers[lost].call(partial(member.go, 1))
    logs = go(left, 2)
    assert [attempt["committed"] for attempt in logs[0]] == [False, True]
    mean = sum(number for number in (1, 2, 3) if number != lost + 1) / 2
    assert logs[0][1]["means"] == [mean, 2 * mean]


def test_a_step_that_takes_too_long_is_dropped_by_all(run: Run) -> None:
    peers = begun(run, 2)
    late = newcomer(run, 4, partial(member.go, 1, until=3), timeout=0.5)
    tell(peers, partial(member.go, 1, until=3))
    went([*peers, late])
    tell([peers[0], late], partial(member.go, 1))  # the newcomer gives up for all
    logs = [worker.expect("went", 60)["log"] for worker in (peers[0], late)]
    peers[1].call(partial(member.go, 1))
    logs.append(peers[1].expect("went", 60)["log"])
    assert [log[0]["error"] for log in logs] == ["Timeout"] * 3
    assert not any(log[0]["committed"] for log in logs)


@pytest.mark.env(**FAST)
def test_a_member_that_was_interrupted_or_put_out_comes_back_by_itself(run: Run) -> None:
    peers = begun(run, 3)
    go(peers, 1)
    peers[0].call(member.be_interrupted)
    peers[0].expect("calling", 60)
    wait_until_asleep(peers[0])
    peers[0].signal(signal.SIGINT)
    peers[0].expect("interrupted")
    (log, _) = go(peers[1:], 2)  # it is out, and nobody waits for it
    assert log[0]["error"] == "PeerLost"
    assert [attempt["committed"] for attempt in log] == [False, True]
    tell(peers, partial(member.go, 2, until=3))
    went(peers)
    peers[2].call(partial(member.deviate, "stop"))
    peers[2].call(partial(member.go, 2, until=3))
    try:
        (log, _) = go(peers[:2], 2)
        assert log[-1]["committed"] and log[-1]["counted"] == 2
    finally:
        peers[2].signal(signal.SIGCONT)
    tell(peers[:2], partial(member.go, 2, until=3))
    late = peers[2].expect("went", 60)["log"]
    assert (late[0]["committed"], late[0]["error"]) == (False, "Evicted")  # a step of its own
    logs = [peer.expect("went", 60)["log"] for peer in peers[:2]]
    check_alike([*logs, late[1:]])


def test_members_with_states_of_their_own_keep_them_when_a_newcomer_comes(run: Run) -> None:
    peers = begun(run, 2)
    go(peers, 1)
    for value, peer in enumerate(peers, 5):
        peer.call(partial(member.train_alone, float(value)))
    late = newcomer(run, 3, partial(member.sync_alone, 3))
    tell(peers, partial(member.sync_alone, 3))
    answers = [peer.expect("synced", 60) for peer in (*peers, late)]
    assert [answer["found"][-1] for answer in answers[:2]] == [5.0, 6.0]
    assert answers[2]["found"] in ([5.0], [6.0])  # of the member of longest standing
    assert len({answer["step"] for answer in answers}) == 1


def test_a_run_begins_with_the_checkpoint_of_most_steps(run: Run) -> None:
    peers = begun(run, 2)
    peers[1].call(partial(member.load, 7))
    logs = go(peers, 1)
    assert all((log[0]["step"], log[0]["batches"]) == (8, 16) for log in logs)
    late = run.peer(partial(member.serve, 3))
    late.expect("in", 60)
    late.call(partial(member.load, 100))
    late.call(partial(member.go_and_fail, 1))
    asked(late)
    go(peers, 2)
    assert late.expect("failed")["kind"] == "RevisionMismatch"


def test_futures_of_others_report_their_errors(run: Run) -> None:
    (peer,) = begun(run, 1)
    peer.call(partial(member.wrap, False))
    assert peer.expect("wrapped") == {"event": "wrapped", "value": 1.0, "error": "None", "ok": True}
    peer.call(partial(member.wrap, True))
    answer = peer.expect("wrapped")
    assert answer["value"] == 0.0 and "lost" in answer["error"] and not answer["ok"]
    peer.call(member.leave)
    assert peer.expect("left")["joined"] is False


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A master; this process is not in its run."""
    with pccl.MasterNode("127.0.0.1:0") as master:
        monkeypatch.setenv("PCCL_MASTER", master.address)
        yield
        pccl.shutdown()


def test_misuse_is_told(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="no argument 'lighthouse'"):
        Manager(lighthouse="here")
    with pytest.raises(pccl.NotSupported, match="a replica is one process"):
        Manager(world_size=2)
    with pytest.raises(pccl.NotSupported, match="checkpoint_transport"):
        Manager(checkpoint_transport=object())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pccl.NotSupported, match="WORLD_SIZE"):
        Manager()
    assert not pccl.is_initialized()
    manager = Manager(world_size=1)
    assert (manager.num_participants(), manager.participating_rank()) == (0, None)
    tensor = torch.ones(2)
    for call in (manager.should_commit, lambda: manager.allreduce(tensor), manager.wait_quorum):
        with pytest.raises(pccl.InvalidUsage, match="start_quorum"):
            call()
    with pytest.raises(pccl.InvalidUsage, match="no state"):
        manager.start_quorum()
    manager.set_state_dict_fns(lambda state: None, lambda: {"x": 1})
    with pytest.raises(pccl.InvalidUsage, match="registered already"):
        manager.set_state_dict_fns(lambda state: None, dict)
    manager.start_quorum()
    with pytest.raises(pccl.NotSupported, match="BAND"):
        manager.allreduce(
            torch.ones(2, dtype=torch.int32), reduce_op=torch.distributed.ReduceOp.BAND
        )
    with pytest.raises(pccl.NotSupported, match="timeout"):
        manager.wrap_future(torch.futures.Future(), None, timedelta(seconds=1))
    assert manager.allreduce(tensor).wait() and manager.should_commit()
    assert manager.current_step() == 1


def test_spares_would_count_in_other_ops_than_means_and_sums(alone: None) -> None:
    manager = Manager(world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
    manager.set_state_dict_fns(lambda state: None, lambda: {"x": 1})
    manager.start_quorum()
    for op in ("PRODUCT", "MIN", "MAX"):
        with pytest.raises(pccl.NotSupported, match="with spares"):
            manager.allreduce(torch.ones(2), reduce_op=getattr(torch.distributed.ReduceOp, op))
    assert manager.allreduce(torch.ones(2), reduce_op=torch.distributed.ReduceOp.SUM).wait()
    assert manager.should_commit()


def test_arguments_without_effect_are_named(alone: None, caplog: pytest.LogCaptureFixture) -> None:
    Manager(lighthouse_addr="http://there:29510", store_addr="there", rank=0, hostname="me")
    assert "hostname, lighthouse_addr, rank, store_addr" in caplog.text
    assert "PCCL_MASTER" in caplog.text


def test_a_future_is_complete_after_its_work_and_runs_its_callbacks(alone: None) -> None:
    manager = Manager(load_state_dict=lambda state: None, state_dict=lambda: {"x": 1})
    manager.start_quorum()
    tensor = torch.full((3,), 4.0, requires_grad=True).clone()  # as LocalSGD gives it
    work = manager.allreduce(tensor)
    called: list[Any] = []
    after = work.get_future().then(lambda done: called.append(done.value()))
    assert work.wait() and called[0] is tensor
    after.wait()
    assert work.get_future()._fut.wait() is tensor
    assert manager.should_commit()
