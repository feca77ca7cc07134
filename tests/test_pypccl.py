"""Programs as authors write them for pypccl, whose names pccl has too, with joiners and kills."""

import signal
import subprocess
import tempfile

import pytest
from programs import pypccl, pypccl_torch, star
from workers import Program, Run, Worker, command, running

import pccl


def run_of_three(run: Run, program: Program) -> tuple[Worker, Worker, Worker]:
    """A member, one that will be killed, and one that comes later. They load at the same time."""
    member, victim = run.peer(program), run.peer(program, VICTIM="1")
    late = run.peer(program, LATE="1")
    for worker in (member, victim):
        worker.expect("in", 200)
    late.expect("up", 200)
    late.tell("go")
    late.expect("in", 60)
    return member, victim, late


def test_ddp_with_adam_in_the_shared_state_numpy_only() -> None:
    with running() as run:
        members = [run.peer(pypccl.ddp_with_adam) for _ in range(2)]
        victim = run.peer(pypccl.ddp_with_adam, VICTIM="1")
        for worker in (*members, victim):
            worker.expect("in")
        assert victim.ends() == -signal.SIGKILL
        late = run.peer(pypccl.ddp_with_adam)
        late.expect("in")
        answers = [worker.expect("done", 60) for worker in (*members, late)]
    assert [answer["first"] == 0 for answer in answers] == [True, True, False]
    assert len({(answer["digest"], answer["revision"]) for answer in answers}) == 1
    assert all(answer["replayed"] and answer["accuracy"] > 0.9 for answer in answers)
    assert [answer["sizes"] for answer in answers] == [[2, 3], [2, 3], [3]]


@pytest.mark.timeout(400)  # importing torch three times on a busy machine
def test_ddp_with_a_torch_optimizer_quantized_and_optimized_torch_only() -> None:
    pytest.importorskip("torch")
    with running() as run:
        member, victim, late = run_of_three(run, pypccl_torch.ddp_with_torch)
        assert victim.ends(60) == -signal.SIGKILL
        answers = [worker.expect("done", 60) for worker in (member, late)]
    assert len({(answer["digest"], answer["revision"]) for answer in answers}) == 1
    for answer in answers:
        assert answer["accuracy"] > 0.9 and answer["world"] == 2 and answer["later"] == 0
        assert answer["steps"] == answer["revision"]


@pytest.mark.timeout(400)  # importing torch three times on a busy machine
def test_diloco_with_outer_momentum_numpy_and_torch() -> None:
    pytest.importorskip("torch")
    with running() as run:
        member, victim, late = run_of_three(run, pypccl_torch.diloco)
        assert victim.ends(60) == -signal.SIGKILL
        answers = [worker.expect("done", 60) for worker in (member, late)]
    assert len({(answer["digest"], answer["revision"]) for answer in answers}) == 1
    assert all(answer["accuracy"] > 0.9 and answer["later"] == 0 for answer in answers)
    assert answers[1]["first"] > 0


def test_one_step_delayed_diloco_reduces_on_a_thread_while_peers_are_asked_for() -> None:
    with running() as run:
        member, victim, late = run_of_three(run, pypccl.delayed_diloco)
        assert victim.ends(60) == -signal.SIGKILL
        answers = [worker.expect("done", 60) for worker in (member, late)]
    assert len({(answer["digest"], answer["revision"]) for answer in answers}) == 1
    assert all(answer["accuracy"] > 0.9 for answer in answers)
    assert [answer["eavesdropped"] for answer in answers] == [False, True]


def test_128_reductions_in_flight_go_on_among_the_survivors() -> None:
    with running() as run:
        workers = [run.peer(pypccl.reduce_many) for _ in range(3)]
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


def test_peers_of_a_shard_wait_until_all_shards_are_complete() -> None:
    with running() as run:
        workers = [run.peer(pypccl.reduce_in_shards, SHARD=str(i % 2)) for i in range(4)]
        for worker in workers:
            assert worker.expect("done") == {"event": "done", "own": True, "size": 2}


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_master_script_that_returns_from_main_serves_until_it_is_told(
    ending: signal.Signals,
) -> None:
    master = Worker(pypccl.run_master)
    workers = [master]
    try:
        address = master.expect("listening")["address"]
        workers += [Worker(pypccl.reduce_in_pair, PCCL_MASTER=address) for _ in range(2)]
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
    peer = Worker(pypccl.join_late, PCCL_MASTER=address)
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
    with running() as run:
        first = run.peer(pypccl.report_codes, FIRST="1")
        assert first.expect("alone")["codes"] == (
            ["INVALID_USAGE"] * 5 + ["TOO_FEW_PEERS"] * 3 + ["SUCCESS", "INVALID_USAGE"]
        )
        second = run.peer(pypccl.report_codes)
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
    with running(PCCL_RECONNECT_TIMEOUT="1", PCCL_SHM="0") as run:
        workers = [run.peer(pypccl.retry_for_ever) for _ in range(2)]
        for worker in workers:
            worker.expect("in")
            worker.tell("go")
        run.master.signal(signal.SIGKILL)
        for worker in workers:
            over = worker.expect("over")
            assert over["kind"] in ("MasterLost", "InvalidUsage") and over["failures"] <= 1


def test_members_that_quantize_differently_are_told() -> None:
    with running() as run:
        workers = [run.peer(pypccl.quantize_as_told) for _ in range(2)]
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
    done = subprocess.run(
        command(star.check_names), cwd=tempfile.gettempdir(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
