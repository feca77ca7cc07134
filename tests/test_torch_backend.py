"""torch.distributed's backend "pccl": its collectives equal Gloo's; DDP, FSDP2 and DTensor run."""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch_jobs import Job, torch_job
from workers import Program, complaints, running

torch = pytest.importorskip("torch")

from programs import torch_backend, torch_training  # noqa: E402


def ends(job: Job, size: int, program: Program, **env: str) -> list[dict[str, Any]]:
    """Returns what each rank says at its end. All end well, and print nothing."""
    workers = job.start(size, program, **env)
    answers = [worker.expect("done", 90) for worker in workers]
    for worker in workers:
        assert worker.ends() == 0, worker.stderr()
        assert complaints(worker.stderr()) == ""
    return answers


def test_collectives_give_what_gloo_gives(job: Job) -> None:
    # In new interpreters, where sets have orders of their own.
    answers = ends(job, 3, torch_backend.collectives, TEST_FORKS="0")
    assert [answer["wrong"] for answer in answers] == [[], [], []]


def test_functional_collectives_and_coalescing(job: Job) -> None:
    assert [answer["wrong"] for answer in ends(job, 2, torch_backend.functional_collectives)] == [
        [],
        [],
    ]


def test_groups_of_some_ranks_keep_their_order(job: Job) -> None:
    answers = ends(job, 3, torch_backend.groups)
    assert [(answer["ok"], answer["count"]) for answer in answers] == [
        (True, 2),
        (True, 2),
        (True, 1),
    ]


def test_no_thread_outlives_the_process_group(job: Job) -> None:
    assert [answer["left"] for answer in ends(job, 3, torch_backend.list_threads_afterwards)] == [
        [],
        [],
        [],
    ]


def test_a_forked_child_leaves_its_parents_groups_alone(job: Job) -> None:
    for answer in ends(job, 2, torch_backend.fork):
        assert answer["counts"] == [0, 1] and answer["total"] == [2.0] * 3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ddp_trains_as_one_process_does(job: Job, size: int) -> None:
    for answer in ends(job, size, torch_training.ddp):
        assert answer["near"] and answer["same"]


def test_ddp_averages_gradients_of_complex_parameters(job: Job) -> None:
    for answer in ends(job, 2, torch_training.complex_ddp):
        assert answer["near"] and answer["complex"] == [True, False]


def test_fully_shard_trains_as_one_process_does(job: Job) -> None:
    for answer in ends(job, 2, torch_training.fully_sharded):
        assert answer["near"] and answer["same"] and answer["norm"]


def test_hsdp_with_gloo_inside_and_pccl_between(job: Job) -> None:
    for answer in ends(job, 4, torch_training.hybrid_sharded):
        assert answer["near"] and answer["same"] and answer["backends"] == ["pccl", "gloo"]


def test_dtensors_and_checkpoints(job: Job, tmp_path: Path) -> None:
    for answer in ends(job, 2, torch_training.dtensors, FOLDER=str(tmp_path / "checkpoint")):
        assert answer["wrong"] == []


def test_after_a_loss_every_collective_says_so(job: Job) -> None:
    workers = job.start(3, partial(torch_backend.calls_after_a_loss, 1))
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
    workers = job.start(3, partial(torch_backend.calls_after_a_loss, 0), PCCL_RECONNECT_TIMEOUT="1")
    for worker in workers:
        worker.expect("ready", 60)
    workers[0].signal(signal.SIGKILL)
    for worker in workers[1:]:
        errors = worker.expect("done", 60)["errors"]
        assert len(errors) == 4 and all(error.startswith("PeerLost") for error in errors), errors
        assert all("rank 0" in error for error in errors), errors


@pytest.mark.parametrize("hook", [None, "FP16_COMPRESS"])
def test_a_loss_in_backward_is_an_exception_of_backward(job: Job, hook: str | None) -> None:
    workers = job.start(3, partial(torch_training.loss_in_backward, hook))
    for worker in workers:
        worker.expect("ready", 60)
    workers[1].signal(signal.SIGKILL)
    for worker in (workers[0], workers[2]):
        answer = worker.expect("done", 60)
        assert "PeerLost" in answer["backward"] and "rank 1 of 3" in answer["backward"], answer
        assert answer["later"].startswith("PeerLost")
        assert worker.ends() == 0


def test_a_failed_all_reduce_of_float16_is_an_error_for_callers_in_cpp(job: Job) -> None:
    first, second = job.start(2, torch_backend.functional_calls_that_fail)
    for worker in (first, second):
        worker.expect("ready", 60)
    second.signal(signal.SIGKILL)
    answer = first.expect("done", 60)
    assert answer["total"] == [2.0] * 4
    assert answer["misfit"].startswith("MismatchedCall"), answer
    assert all(error.startswith("PeerLost") for error in answer["errors"]), answer
    assert answer["states"] == [[True, False]] * 2
    assert first.ends() == 0


def test_members_that_call_different_things_are_told(job: Job) -> None:
    for answer in ends(job, 2, torch_backend.mismatches):
        assert re.search(
            r"^MismatchedCall: .*float32\[4\].*float32\[5\]|float32\[5\].*float32\[4\]",
            answer["first"],
        )
        assert answer["second"].startswith("MismatchedCall") and "broadcast" in answer["second"]
        assert answer["again"] == [2.0] * 4


def test_a_master_of_ones_own_serves_several_jobs(tmp_path: Path) -> None:
    with (
        running() as run,
        torch_job(tmp_path / "a") as one,
        torch_job(tmp_path / "b") as other,
    ):
        for job in (one, other):
            job.start(2, torch_backend.reduce_once, PCCL_MASTER=run.address)
        for worker in one.workers + other.workers:
            assert worker.expect("done", 60)["total"] == [2.0] * 3
            assert worker.ends() == 0


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_ranks_that_are_started_again_with_the_store_they_had(where: str) -> None:
    # torchrun does this. The killed ranks have left in the store the address of a master that is
    # gone, or a dead group.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with running() as run:
        env = {"PCCL_MASTER": run.address} if where == "outside" else {}
        for again in (False, True):
            with torch_job(store.port) as job:
                workers = job.start(3, torch_backend.reduce_when_told, **env)
                for worker in workers:
                    worker.expect("begins", 60)
                # Rank 0 comes last: the others find what was there before.
                for worker in reversed(workers):
                    worker.tell("go")
                for worker in workers:
                    assert worker.expect("done", 60)["total"] == [3.0] * 3
                if again:
                    for worker in workers:  # rank 0 would wait for the others
                        worker.tell("end")
                    for worker in workers:
                        assert worker.ends() == 0, worker.stderr()


def test_the_rank_that_runs_the_master_waits_once_for_those_that_stay(job: Job) -> None:
    first, last = job.start(2, torch_backend.close_many_groups)
    last.expect("ready", 60)
    answer = first.expect("done", 60)
    assert answer["first"] < 2  # others use the master, too
    assert 2.5 < answer["seconds"] < 8  # not 3 s for each of the four groups
    last.tell("go")
    last.expect("done", 60)
    assert [first.ends(), last.ends()] == [0, 0]


def test_the_ddp_hook_goes_on_without_a_lost_peer() -> None:
    with running(GLOO_SOCKET_IFNAME="lo") as run:
        peers = run.peers(3, torch_training.hook_of_which_one_dies)
        answers = []
        for peer in peers:
            try:
                answers.append(peer.expect("done", 60))
            except AssertionError as error:
                assert " ended: -9" in str(error), error
    assert [answer["counts"] for answer in answers] == [[3, 3, 2, 2]] * 2
    assert [answer["reruns"] for answer in answers] == [1, 1]
    assert all(answer["near"] for answer in answers)
    assert answers[0]["weights"] == answers[1]["weights"]


def test_the_ddp_hook_takes_in_a_newcomer_though_its_buckets_differ_at_first() -> None:
    with running(GLOO_SOCKET_IFNAME="lo") as run:
        members = run.peers(2, torch_training.hook_with_a_newcomer)

        def step(what: str = "step") -> int:
            """All members make a step. Returns the world's size after it."""
            for member in members:
                member.tell(what)
            worlds = [member.expect("ready", 60)["world"] for member in members]
            return int(worlds[0])

        for member in members:
            member.expect("ready", 60)
        for _ in range(3):
            assert step() == 2
        late = run.peer(torch_training.hook_with_a_newcomer)
        late.expect("ready", 60)
        late.tell("step")
        while step() == 2:
            pass
        late.expect("ready", 60)
        members.append(late)
        for _ in range(3):
            assert step() == 3
        for member in members:
            member.tell("end")
        answers = [member.expect("done", 60) for member in members]
    assert len({answer["weights"] for answer in answers}) == 1
    assert answers[2]["counts"] == [3] * 4
    ordered, rebuilt = answers[2]["buckets"][:2]
    assert ordered != rebuilt  # or this test would show nothing
    assert all(answer["buckets"][-1] == rebuilt for answer in answers)


def test_a_hook_that_cannot_go_on_raises_in_backward() -> None:
    with running(GLOO_SOCKET_IFNAME="lo") as run:
        (peer,) = run.peers(1, torch_training.hook_after_a_shutdown)
        assert "NotInitialized" in peer.expect("done", 60)["error"]
        assert peer.ends() == 0


def test_the_example_in_the_readme_runs(job: Job) -> None:
    page = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(# ddp\.py.*?)^```", page, re.DOTALL | re.MULTILINE)
    for answer in ends(job, 2, partial(torch_training.run_shown, example)):
        assert answer["gradient"] == [[12.0] * 4]  # 8 rows of ones on rank 0, of twos on rank 1
