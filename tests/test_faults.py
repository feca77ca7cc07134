"""Faults of real peers, masters and strangers: kills, freezes, garbage, Ctrl-C."""

import os
import random
import signal
import socket
import time
from functools import partial

import pytest
from programs import faults, idle
from workers import FAST, Run, free_ports

pytestmark = pytest.mark.usefixtures("transport")


def kills() -> int:
    return int(os.environ.get("PCCL_KILLS", "50"))


@pytest.mark.timeout(600 + 4 * kills())
@pytest.mark.env(**FAST)
def test_survivors_results_are_exact_whenever_a_peer_is_killed(run: Run) -> None:
    rng = random.Random(1)
    survivors = run.peers(2, partial(faults.loop, 100_000))
    for peer in survivors:
        peer.expect("in")
        peer.expect("reducing")
    # Newcomers start ahead of time: starting Python takes longer than everything else here.
    waiting = [run.peer(partial(faults.loop, 100_000)) for _ in range(2)]
    for _ in range(kills()):
        victim = waiting.pop(0)
        waiting.append(run.peer(partial(faults.loop, 100_000)))
        victim.expect("in")
        victim.expect("reducing")
        time.sleep(rng.random() * 0.03)  # the random moment
        victim.signal(signal.SIGKILL)
        victim.ends()
        run.workers.remove(victim)
        victim.destroy()
    for peer in waiting:
        peer.destroy()
    survivors[0].tell("stop")
    answers = [peer.expect("done") for peer in survivors]
    assert answers[0]["steps"] == answers[1]["steps"]


@pytest.mark.env(**FAST)
def test_a_frozen_peer_is_evicted_and_hurts_nobody_when_it_wakes(run: Run) -> None:
    peers = run.peers(3, partial(faults.loop, 20_000))
    for peer in peers:
        peer.expect("in")
        peer.expect("reducing")
    frozen, *others = peers
    frozen.signal(signal.SIGSTOP)
    time.sleep(3.0)  # longer than the heartbeat timeout: this is what is tested
    frozen.signal(signal.SIGCONT)
    assert frozen.ends() == 1
    assert "Evicted" in frozen.stderr()
    others[0].tell("stop")
    for peer in others:
        assert peer.expect("done")["size"] == 2


@pytest.mark.env(**FAST)
def test_a_short_freeze_costs_nobody_its_membership(run: Run) -> None:
    peers = run.peers(3, partial(faults.loop, 20_000))
    for peer in peers:
        peer.expect("in")
        peer.expect("reducing")
    peers[0].signal(signal.SIGSTOP)
    time.sleep(0.5)  # shorter than the heartbeat timeout
    peers[0].signal(signal.SIGCONT)
    peers[0].tell("stop")
    for peer in peers:
        assert peer.expect("done")["size"] == 3


@pytest.mark.env(**FAST)
def test_losing_the_master_is_a_clear_error_within_the_reconnect_timeout(run: Run) -> None:
    peers = run.peers(2, faults.lose_the_master)
    for peer in peers:
        peer.expect("in")
    run.master.signal(signal.SIGKILL)
    run.master.ends()
    for peer in peers:
        peer.tell("go")
    for peer in peers:
        answer = peer.expect("lost", 10)
        assert answer["seconds"] < 4.0
        peer.expect("again")
        assert peer.ends() == 0


@pytest.mark.env(**{**FAST, "PCCL_RECONNECT_TIMEOUT": "20"})
def test_a_master_without_memory_takes_the_run_over(run: Run) -> None:
    peers = run.peers(3, partial(faults.loop, 20_000))
    for peer in peers:
        peer.expect("in")
        peer.expect("reducing")
    run.master.signal(signal.SIGKILL)
    run.master.ends()
    run.restart_master()
    peers[0].tell("stop")
    for peer in peers:
        assert peer.expect("done", 40)["size"] == 3


@pytest.mark.env(**FAST)
def test_explicit_reports_the_loss_with_inputs_intact_and_goes_on(run: Run) -> None:
    peers = [run.peer(faults.lose_a_peer_of_explicit) for _ in range(3)]
    for peer in peers:
        peer.expect("in")
    victim, *others = peers
    for peer in others:
        peer.tell("reduce")
    victim.tell("die")
    for peer in peers:
        peer.expect("entered")
    victim.signal(signal.SIGKILL)
    for peer in others:
        assert peer.expect("lost") == {
            "event": "lost",
            "done": False,
            "result": "RANK_CONNECTION_LOST",
            "intact": True,
            "kind": "PeerLost",
        }
        assert peer.expect("after") == {"event": "after", "ok": True, "size": 2}


def _strangers(address: tuple[str, int], rng: random.Random) -> list[socket.socket]:
    """Connections that say nothing, half a message, too much, or noise. Returns those left open."""
    kept = []
    frames = [
        b"",
        b"\x00" * 8,
        b"\x00" * 64,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PCCL",
        b"PCCL\x05\x00\x00\x00\xff\xff\xff\xff" + b"\x00" * 20,
        b"PCCL\x63" + b"\x00" * 40,
        b"PCF1" + b"\x05" + b"\x00" * 80,
        b"PCF1" + rng.randbytes(200),
        rng.randbytes(5000),
    ]
    for frame in frames:
        stranger = socket.create_connection(address, timeout=5)
        stranger.settimeout(5)
        try:
            stranger.sendall(frame)
        except OSError:
            pass  # it was thrown out already
        if rng.random() < 0.5:
            kept.append(stranger)
        else:
            stranger.close()
    return kept


@pytest.mark.env(**FAST)
def test_garbage_and_idle_connections_disturb_nobody(run: Run) -> None:
    rng = random.Random(2)
    (port,) = free_ports(1)
    peers = [
        run.peer(partial(faults.loop, 20_000), PCCL_MIN_PEERS="2", PCCL_PORT=str(port)),
        run.peer(partial(faults.loop, 20_000), PCCL_MIN_PEERS="2"),
    ]
    for peer in peers:
        peer.expect("in")
        peer.expect("reducing")
    host, master_port = run.address.rsplit(":", 1)
    kept: list[socket.socket] = []
    for address in ((host, int(master_port)), ("127.0.0.1", port)):
        for _ in range(5):
            kept += _strangers(address, rng)
        kept += [socket.create_connection(address, timeout=5) for _ in range(64)]
    # A newcomer still gets through, while all of them are there.
    late = run.peer(partial(faults.loop, 20_000))
    late.expect("in")
    assert late.expect("reducing")["size"] == 3
    late.tell("stop")
    for peer in [*peers, late]:
        assert peer.expect("done")["size"] == 3
    for stranger in kept:
        stranger.close()


@pytest.mark.parametrize(
    ("transport", "call"),
    [("tcp", call) for call in sorted(faults.ALONE)]
    + [(how, call) for how in ("shm", "tcp") for call in sorted(faults.WITH_A_PARTNER)],
    indirect=["transport"],
)
@pytest.mark.env(**FAST)
def test_ctrl_c_ends_every_blocking_call_within_a_second(run: Run, call: str) -> None:
    needs_partner = call in faults.WITH_A_PARTNER
    if call == "connect":
        # Someone is in already and calls nothing, so connect has to wait.
        run.peer(faults.idle_of_explicit).expect("in")
    worker = run.peer(partial(faults.block_in, call))
    if needs_partner:
        partner = run.peer(partial(idle.wait, min_peers=2))
        partner.expect("in")
        worker.expect("in")
        worker.tell("go")
    worker.expect("calling")
    time.sleep(0.3)  # most likely inside the call now; earlier or later is fine as well
    began = time.monotonic()
    worker.signal(signal.SIGINT)
    worker.expect("interrupted", 5)
    assert time.monotonic() - began < 2.0
    assert worker.ends(10) == 0


@pytest.mark.env(**FAST, PCCL_STRAGGLER_TIMEOUT="1")
def test_a_straggler_is_evicted_when_the_operator_wants_that(run: Run) -> None:
    members = [run.peer(faults.reduce_with_a_straggler) for _ in range(2)]
    late = run.peer(faults.straggle)
    for peer in [*members, late]:
        peer.expect("in")
    for peer in members:
        peer.tell("go")
    for peer in members:
        assert peer.expect("reduced")["size"] == 2
    late.tell("go")
    told = late.expect("evicted")
    assert "waited too long for it in collective #0" in told["text"]
    assert told["advice"] == "rejoin"
    late.expect("in again")


@pytest.mark.parametrize("call", ["barrier", "allreduce"])
@pytest.mark.env(**FAST)
def test_a_program_may_end_while_its_daemon_threads_are_in_calls(run: Run, call: str) -> None:
    program = partial(faults.end_with_daemon_threads_in, call)
    ending = [run.peer(program) for _ in range(8)]
    for peer in [*ending, run.peer(partial(idle.wait, min_peers=2))]:
        peer.expect("in")
    for peer in ending:
        peer.tell("go")
        peer.expect("end")
    for peer in ending:
        assert peer.ends(10) == 0, peer.stderr()


@pytest.mark.parametrize(
    "where",
    [
        "the memory of a result",
        "the end of a result",
        "the end of a result that was refused",
        "the number of a thread",
        "an error",
    ],
)
@pytest.mark.env(**FAST)
def test_a_program_may_end_while_a_daemon_thread_runs_python_code_for_the_engine(
    run: Run, where: str
) -> None:
    ending = run.peer(partial(faults.end_with_a_daemon_thread_in_python_code, where))
    for peer in [ending, run.peer(partial(idle.wait, min_peers=2))]:
        peer.expect("in")
    ending.tell("go")
    ending.expect("end")
    assert ending.ends(10) == 0, ending.stderr()


@pytest.mark.env(**FAST)
def test_ctrl_c_in_the_multi_call_leaves_no_operation_that_writes_later(run: Run) -> None:
    caller, other = peers = [run.peer(faults.interrupt_the_multi_call) for _ in range(2)]
    for peer in peers:
        peer.expect("in")
    caller.tell("call")
    caller.expect("calling")
    caller.signal(signal.SIGINT)
    caller.expect("interrupted", 10)
    other.tell("late")
    assert other.expect("done")["ended"] == [False] * 4
    for _ in range(4):
        caller.tell("go")
    assert caller.expect("done")["untouched"]


@pytest.mark.env(**FAST)
def test_the_others_of_an_interrupted_call_get_an_error_and_go_on(run: Run) -> None:
    first, second = run.peers(2, faults.reduce_or_fail_then_reduce)
    first.expect("in")
    second.expect("in")
    first.tell("first")
    first.expect("calling")
    first.signal(signal.SIGINT)
    assert first.expect("failed")["kind"] == "KeyboardInterrupt"
    second.tell("go")
    assert second.expect("failed")["kind"] == "PeerLost"
    for peer in (first, second):
        assert peer.expect("after") == {"event": "after", "ok": True, "size": 2}


def test_a_peer_that_leaves_is_no_failure_of_the_others(run: Run) -> None:
    peers = run.peers(3, faults.leave_or_reduce)
    for peer in peers:
        peer.expect("in")
    peers[0].tell("leave")
    peers[0].expect("left")
    assert peers[0].ends() == 0
    for peer in peers[1:]:
        peer.tell("reduce")
    for peer in peers[1:]:
        assert peer.expect("after", 5) == {"event": "after", "ok": True, "size": 2}


def test_one_master_serves_run_after_run(run: Run) -> None:

    def once(run: Run) -> None:
        peers = run.peers(2, faults.reduce_once)
        for peer in peers:
            assert peer.expect("done") == {"event": "done", "size": 2, "ok": True}
            assert peer.ends() == 0

    for _ in range(3):
        once(run)
