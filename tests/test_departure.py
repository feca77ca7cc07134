"""Peers that are asked to leave: by SIGTERM, by `pccl.drain`. The others never notice a failure."""

from __future__ import annotations

import signal
import threading
import weakref
from functools import partial
from typing import Any

import pytest
from programs import departure
from workers import Program, Run, Worker, complaints, eventually, wait_for_line, wait_until_asleep

import pccl
from pccl import _core
from pccl.departure import OnSigterm

ASKED = [signal.SIGTERM, None]


def step(workers: list[Worker], world: int) -> float:
    """One step of all of them. Returns the first one's weights."""
    for worker in workers:
        worker.tell("step")
    said = [worker.expect("step") for worker in workers]
    assert [(one["world"], one["flying"]) for one in said] == [(world, world)] * len(workers)
    assert len({one["weights"] for one in said}) == 1
    return float(said[0]["weights"])


def end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.tell("end")
        worker.expect("done")
        assert worker.ends() == 0


def ask(worker: Worker, how: signal.Signals | None) -> None:
    if how is None:
        worker.tell("drain")
    else:
        worker.signal(how)


@pytest.mark.parametrize("how", ASKED, ids=["SIGTERM", "drain"])
def test_a_peer_that_is_asked_leaves_at_its_next_admission_point(
    run: Run, how: signal.Signals | None
) -> None:
    *rest, gone = workers = run.peers(3, departure.train)
    for worker in workers:
        worker.expect("ready")
    assert step(workers, 3) == 3
    wait_until_asleep(gone)
    ask(gone, how)
    for worker in workers:
        worker.tell("step")
    said = gone.expect("drained")
    assert said == {
        "event": "drained",
        "text": "this peer has left the run, as it was asked to",
        "code": 0,
        "open": False,
    }
    assert gone.ends() == 0
    for worker in rest:
        answer = worker.expect("step")
        # The call that was in flight before has all three; the step's own call has the others.
        assert (answer["flying"], answer["world"], answer["weights"]) == (3, 2, 5)
    assert step(rest, 2) == 7
    end(rest)
    for worker in rest:
        assert complaints(worker.stderr(), news=False) == ""
    assert "it left" in wait_for_line(rest[0], "lost rank")


def test_the_only_member_hands_its_state_over_before_it_leaves(run: Run) -> None:
    first = run.peer(departure.train)
    first.expect("ready")
    first.tell("step")
    assert first.expect("step")["weights"] == 1
    late = run.peer(departure.train)
    late.expect("ready")
    late.tell("step")
    wait_for_line(late, "waiting to be let in")
    wait_until_asleep(first)
    first.signal(signal.SIGTERM)
    first.tell("step")
    first.expect("drained")  # after the sync in which the newcomer got its state
    assert first.ends() == 0
    answer = late.expect("step")
    assert (answer["world"], answer["weights"]) == (1, 2)
    end([late])


def test_it_leaves_after_a_sync_too(run: Run) -> None:
    stays, gone = workers = run.peers(2, departure.share_always)
    for worker in workers:
        worker.expect("ready")
        worker.tell("step")
    for worker in workers:
        worker.expect("step")
    wait_until_asleep(gone)
    gone.signal(signal.SIGTERM)
    for worker in workers:
        worker.tell("step")
    assert gone.ends() == 0
    assert stays.expect("step")["step"] == 2
    end([stays])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_diloco_finishes_its_round_first(run: Run, mode: str) -> None:
    *rest, gone = workers = run.peers(3, partial(departure.train_in_rounds, mode))
    for worker in workers:
        worker.expect("ready")
    for _ in range(2):
        for worker in workers:
            worker.tell("round")
        for worker in workers:
            worker.expect("round")
    wait_until_asleep(gone)
    gone.signal(signal.SIGTERM)
    for worker in workers:
        worker.tell("round")
    assert gone.expect("drained")["round"] == 3
    assert gone.ends() == 0
    worlds = [worker.expect("round")["world"] for worker in rest]
    for _ in range(2):
        for worker in rest:
            worker.tell("round")
        worlds += [worker.expect("round")["world"] for worker in rest]
    # The third round has all three; its result is applied one round later in the other mode.
    three = 1 if mode == "sync" else 2
    assert worlds == [3, 3] * three + [2, 2] * (3 - three)
    end(rest)


@pytest.mark.parametrize("how", ASKED, ids=["SIGTERM", "drain"])
@pytest.mark.parametrize(
    ("program", "word"),
    [
        (partial(departure.train_in_rounds, "sync", rejoin=True), "round"),
        (departure.train_and_come_back, "step"),
    ],
    ids=["DiLoCo", "a loop"],
)
def test_one_that_is_put_out_before_it_leaves_still_leaves(
    run: Run, program: Program, word: str, how: signal.Signals | None
) -> None:
    stays, gone = workers = [
        run.peer(program, PCCL_NAME=name, PCCL_MIN_PEERS="2") for name in ("stays", "gone")
    ]
    for worker in workers:
        worker.expect("ready")
    for worker in workers:
        worker.tell(word)
    for worker in workers:
        worker.expect(word)
    wait_until_asleep(gone)
    ask(gone, how)
    _core.command(run.address, "kick", "gone")
    gone.tell(word)
    if word == "step":
        gone.expect("back")  # as a newcomer, which receives the state before it leaves
        wait_for_line(gone, "waiting to be let in")
        stays.tell(word)
        stays.expect(word)
        for worker in workers:
            worker.tell(word)
        for worker in workers:
            worker.expect(word)
    assert gone.expect("drained")
    assert gone.ends() == 0
    stays.tell(word)
    assert stays.expect(word)["world"] == 1


def test_one_that_joins_again_after_the_signal_leaves_in_time(run: Run) -> None:
    worker = run.peer(departure.join_again_and_wait, PCCL_DRAIN_SECONDS="1", PCCL_MIN_PEERS="1")
    worker.expect("ready")
    wait_until_asleep(worker)
    worker.signal(signal.SIGTERM)
    worker.tell("go")
    assert worker.ends() == -signal.SIGTERM


@pytest.mark.parametrize("how", ASKED, ids=["SIGTERM", "drain"])
def test_a_status_tells_schedulers_that_the_work_is_not_done(
    run: Run, how: signal.Signals | None
) -> None:
    stays, gone = workers = run.peers(2, departure.train, PCCL_SIGTERM_STATUS="75")
    for worker in workers:
        worker.expect("ready")
    step(workers, 2)
    wait_until_asleep(gone)
    ask(gone, how)
    for worker in workers:
        worker.tell("step")
    status = 0 if how is None else 75
    assert gone.expect("drained")["code"] == status
    assert gone.ends() == status
    stays.expect("step")
    end([stays])
    wrong = run.peer(departure.train, PCCL_SIGTERM_STATUS="-1")
    assert wrong.ends() == 1
    assert "PCCL_SIGTERM_STATUS must be an integer in 0..255" in wrong.stderr()


def test_a_peer_without_an_admission_point_leaves_when_its_time_is_over(run: Run) -> None:
    others = run.peers(2, departure.reduce_without_end, PCCL_DRAIN_SECONDS="0.5")
    for worker in others:
        worker.expect("ready")
        assert worker.expect("world")["world"] == 2
    gone, stays = others
    gone.signal(signal.SIGTERM)
    assert gone.ends() == -signal.SIGTERM
    assert stays.expect("world")["world"] == 1
    assert "told to end (SIGTERM)" in wait_for_line(stays, "lost rank")


def test_a_second_signal_ends_it_at_once(run: Run) -> None:
    peer = run.peer(departure.wait_without_end, PCCL_DRAIN_SECONDS="1000")
    peer.expect("ready")
    wait_until_asleep(peer)
    peer.signal(signal.SIGTERM)
    wait_until_asleep(peer)
    peer.signal(signal.SIGTERM)
    assert peer.ends() == -signal.SIGTERM


def test_the_variable_gives_the_signal_its_usual_meaning(run: Run) -> None:
    peer = run.peer(departure.wait_without_end, PCCL_DRAIN_SECONDS="0")
    peer.expect("ready")
    peer.signal(signal.SIGTERM)
    assert peer.ends() == -signal.SIGTERM
    wrong = run.peer(departure.wait_without_end, PCCL_DRAIN_SECONDS="soon")
    assert wrong.ends() == 1
    assert "PCCL_DRAIN_SECONDS is a number of seconds" in wrong.stderr()


def test_a_program_keeps_its_own_handler(run: Run) -> None:
    peer = run.peer(departure.have_a_handler)
    peer.expect("ready")
    wait_until_asleep(peer)
    peer.signal(signal.SIGTERM)
    peer.expect("own")
    peer.expect("done")
    assert peer.ends() == 0


@pytest.mark.parametrize("program", [departure.shut_down_and_wait, departure.close_and_wait])
def test_the_signal_ends_a_program_that_has_left(run: Run, program: object) -> None:
    peer = run.peer(program)  # type: ignore[arg-type]
    assert peer.expect("ready").get("usual", True)
    wait_until_asleep(peer)
    peer.signal(signal.SIGTERM)
    assert peer.ends() == -signal.SIGTERM


def test_the_signal_ends_a_forked_child(run: Run) -> None:
    peer = run.peer(departure.fork_and_wait)
    assert peer.expect("ended")["by"] == signal.SIGTERM
    assert peer.ends() == 0


def test_one_that_is_asked_while_it_connects_is_asked_to_leave() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        first, second = (pccl.Communicator(master.address) for _ in range(2))
        first.connect()
        entering = threading.Thread(target=second.connect)
        entering.start()
        eventually(first.are_peers_pending)
        pccl.drain(second)
        while pccl.world_size(first) == 1:
            first.update_topology()
        entering.join()
        assert second.draining
        for comm in (second, first):
            comm.close()


@pytest.mark.parametrize("kicked", [False, True], ids=["before", "between"])
def test_one_that_is_asked_before_it_connects_is_asked_to_leave(kicked: bool) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        comm = pccl.Communicator(master.address, name="comm")
        if kicked:
            comm.connect()
            _core.command(master.address, "kick", "comm")
            eventually(lambda: not comm._is_connected())
        pccl.drain(comm)
        assert comm.draining
        comm.connect()
        assert pccl.admit(comm=comm)  # it is new itself
        with pytest.raises(pccl.Drained):
            pccl.admit(comm=comm)


def test_the_time_to_leave_keeps_no_communicator() -> None:
    class Asked:
        _closed = False

        def _is_forked(self) -> bool:
            return False

        def _drain(self) -> None:
            pass

    asked: Any = Asked()
    known = weakref.ref(asked)
    handler = OnSigterm(asked, 1e6, 0)
    handler(signal.SIGTERM, None)  # starts a thread that waits
    del asked
    assert known() is None
    handler._hurry.release()
