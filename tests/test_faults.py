"""What peers, masters and strangers do wrong, with real processes: kills, freezes, garbage, Ctrl-C."""

import os
import random
import signal
import socket
import time

import pytest
from workers import Run, running

# Failure detection in a second instead of six; the ratio between the settings is that of the defaults.
FAST = {
    "PCCL_HEARTBEAT_INTERVAL": "0.2",
    "PCCL_HEARTBEAT_TIMEOUT": "1.5",
    "PCCL_LINK_TIMEOUT": "0.8",
    "PCCL_RECONNECT_TIMEOUT": "2",
}

# Reduces until told to stop, admitting newcomers, and checks every result against the contributors it is told.
LOOP = """
start()
say(event="in", peer=pccl.init_peer)
stop = threading.Event()
def listen():
    hear()
    stop.set()
threading.Thread(target=listen, daemon=True).start()
steps = reruns = 0
while True:
    pccl.admit()
    mine = x(COUNT)
    total, info = pccl.allreduce({"x": mine, "stop": int(stop.is_set())}, return_info=True)
    assert (total["x"] == expected(info)).all(), "wrong sum"
    assert (mine == value(pccl.init_peer)).all(), "input was written"
    inplace = x(COUNT // 2)
    _, again = pccl.allreduce(inplace, out=inplace, return_info=True)
    assert (inplace == expected(again)).all(), "wrong sum in place"
    steps += 1
    reruns += (info.attempts > 1) + (again.attempts > 1)
    if steps == 1:
        say(event="reducing", size=info.world_size)
    if total["stop"]:
        break
say(event="done", steps=steps, size=info.world_size, reruns=reruns)
hear()
"""


def loop(count: int) -> str:
    return f"COUNT = {count}\n" + LOOP


def kills() -> int:
    return int(os.environ.get("PCCL_KILLS", "50"))


@pytest.mark.timeout(600 + 4 * kills())
def test_survivors_results_are_exact_whenever_a_peer_is_killed() -> None:
    rng = random.Random(1)
    with running(**FAST) as run:
        survivors = run.peers(2, loop(100_000))
        for peer in survivors:
            peer.expect("in")
            peer.expect("reducing")
        # Newcomers start ahead of time: starting Python takes longer than everything else here.
        waiting = [run.peer(loop(100_000)) for _ in range(2)]
        for _ in range(kills()):
            victim = waiting.pop(0)
            waiting.append(run.peer(loop(100_000)))
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


def test_a_frozen_peer_is_evicted_and_hurts_nobody_when_it_wakes() -> None:
    with running(**FAST) as run:
        peers = run.peers(3, loop(20_000))
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


def test_a_short_freeze_costs_nobody_its_membership() -> None:
    with running(**FAST) as run:
        peers = run.peers(3, loop(20_000))
        for peer in peers:
            peer.expect("in")
            peer.expect("reducing")
        peers[0].signal(signal.SIGSTOP)
        time.sleep(0.5)  # shorter than the heartbeat timeout
        peers[0].signal(signal.SIGCONT)
        peers[0].tell("stop")
        for peer in peers:
            assert peer.expect("done")["size"] == 3


def test_losing_the_master_is_a_clear_error_within_the_reconnect_timeout() -> None:
    code = """
    import time
    start()
    say(event="in")
    hear()
    began = time.monotonic()
    try:
        while True:
            pccl.allreduce(x(1000))
    except pccl.MasterLost as error:
        say(event="lost", seconds=time.monotonic() - began, result=error.result.name)
    try:
        pccl.barrier()
    except pccl.MasterLost:
        say(event="again")
    """
    with running(**FAST) as run:
        peers = run.peers(2, code)
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


def test_a_master_without_memory_takes_the_run_over() -> None:
    with running(**{**FAST, "PCCL_RECONNECT_TIMEOUT": "20"}) as run:
        peers = run.peers(3, loop(20_000))
        for peer in peers:
            peer.expect("in")
            peer.expect("reducing")
        run.master.signal(signal.SIGKILL)
        run.master.ends()
        run.restart_master()
        peers[0].tell("stop")
        for peer in peers:
            assert peer.expect("done", 40)["size"] == 3


def test_level_1_reports_the_loss_with_inputs_intact_and_goes_on() -> None:
    code = """
    import os
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    comm.connect()
    size = lambda: comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE)
    while size() < 3:
        comm.update_topology()
    say(event="in")
    order = hear()
    mine = np.arange(300_000, dtype=np.float32)
    kept = mine.copy()
    if order == "reduce":
        handle = comm.all_reduce_async(mine, mine, op=pccl.ReduceOp.SUM)
    # Rounds with the master, behind which it knows that the operation was entered.
    for _ in range(300):
        comm.are_peers_pending()
    say(event="entered")
    if order == "die":
        signal.pause()
    done, status, info = handle.wait()
    error = handle.exception()
    say(event="lost", done=done, result=pccl.Result(status).name, intact=bool((mine == kept).all()),
        kind=type(error).__name__)
    comm.update_topology()
    info = comm.all_reduce(mine, mine, op=pccl.ReduceOp.SUM)
    say(event="after", ok=bool((mine == 2 * kept).all()), size=info.local_world_size)
    hear()
    """
    with running(**FAST) as run:
        peers = [run.peer(code) for _ in range(3)]
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
        b"PCCL\x02\x00\x00\x00\xff\xff\xff\xff" + b"\x00" * 20,
        b"PCCL\x63" + b"\x00" * 40,
        b"PCF1" + b"\x04" + b"\x00" * 80,
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


def test_garbage_and_idle_connections_disturb_nobody() -> None:
    rng = random.Random(2)
    with running(**FAST) as run:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        peers = [
            run.peer(loop(20_000), PCCL_MIN_PEERS="2", PCCL_PORT=str(port)),
            run.peer(loop(20_000), PCCL_MIN_PEERS="2"),
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
        late = run.peer(loop(20_000))
        late.expect("in")
        assert late.expect("reducing")["size"] == 3
        late.tell("stop")
        for peer in [*peers, late]:
            assert peer.expect("done")["size"] == 3
        for stranger in kept:
            stranger.close()


# In each, the worker blocks after it said "calling".
JOIN = "c = start(min_peers=2); say(event='in'); hear(); "
AWAIT = (
    "import asyncio; w = pccl.allreduce_async(x(10)); say(event='calling'); "
    "asyncio.run(asyncio.wait_for(w, None))"
)
BLOCKING = {
    "init": "say(event='calling'); pccl.init(min_peers=9)",
    "allreduce": JOIN + "say(event='calling'); pccl.allreduce(x(10))",
    "wait": JOIN + "w = pccl.allreduce_async(x(10)); say(event='calling'); w.wait()",
    "await": JOIN + AWAIT,
    "barrier": JOIN + "say(event='calling'); pccl.barrier()",
    "admit": JOIN + "pccl.admit(); say(event='calling'); pccl.admit()",
    "update_topology": JOIN + "c.update_topology(); say(event='calling'); c.update_topology()",
    "are_peers_pending": JOIN + "say(event='calling'); c.are_peers_pending()",
    "connect": "c = pccl.Communicator(os.environ['PCCL_MASTER']); say(event='calling'); c.connect()",
    "unreachable": "c = pccl.Communicator('127.0.0.1:1'); say(event='calling'); c.connect(n_attempts=99)",
    "master": "m = pccl.MasterNode('127.0.0.1:0'); m.run(); say(event='calling'); m.wait()",
}


@pytest.mark.parametrize("call", sorted(BLOCKING))
def test_ctrl_c_ends_every_blocking_call_within_a_second(call: str) -> None:
    code = f"""
import os
try:
    {BLOCKING[call]}
    say(event="result")
except KeyboardInterrupt:
    say(event="interrupted")
"""
    other = """
start(min_peers=2)
say(event="in")
hear()
"""
    member = """
import os
c = pccl.Communicator(os.environ["PCCL_MASTER"])
c.connect()
say(event="in")
hear()
"""
    with running(**FAST) as run:
        needs_partner = BLOCKING[call].startswith(JOIN)
        if call == "connect":
            # Someone is in already and calls nothing, so connect has to wait.
            run.peer(member).expect("in")
        worker = run.peer(code)
        if needs_partner:
            partner = run.peer(other)
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


def test_a_straggler_is_evicted_when_the_operator_wants_that() -> None:
    member = """
    start(min_peers=3)
    say(event="in")
    hear()
    total, info = pccl.allreduce(x(10), return_info=True)
    assert (total == expected(info)).all()
    say(event="reduced", size=info.world_size)
    hear()
    """
    straggler = """
    start(min_peers=3)
    say(event="in")
    hear()
    try:
        pccl.allreduce(x(10))
    except pccl.Evicted as error:
        say(event="evicted", text=str(error), advice=error.advice)
    pccl.shutdown()
    start()
    say(event="in again")
    """
    with running(**FAST, PCCL_STRAGGLER_TIMEOUT="1") as run:
        members = [run.peer(member) for _ in range(2)]
        late = run.peer(straggler)
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


def test_a_program_may_end_while_its_daemon_threads_are_in_calls() -> None:
    code = """
    start(min_peers=2)
    hear()
    calls = [lambda tag=tag: pccl.allreduce(x(10), tag=str(tag)) for tag in range(7)] + [pccl.barrier]
    for call in calls:
        threading.Thread(target=call, daemon=True).start()
    say(event="end")
    """
    with running(**FAST) as run:
        ending = [run.peer(code) for _ in range(8)]
        run.peer("start(min_peers=2)\nsay(event='in')\nhear()").expect("in")
        for peer in ending:
            peer.tell("go")
            peer.expect("end")
        assert [peer.ends(10) for peer in ending] == [0] * 8


def test_ctrl_c_in_the_multi_call_leaves_no_operation_that_writes_later() -> None:
    code = """
    import os
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    comm.connect()
    while comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) < 2:
        comm.update_topology()
    say(event="in")
    order = hear()
    send, outs = np.ones(1000, np.float32), [np.zeros(1000, np.float32) for _ in range(4)]
    def what(tag):
        return pccl.ReduceDescriptor(
            count=1000, op=pccl.ReduceOp.SUM, tag=tag,
            operand_descriptor=pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT),
            quantization_options=pccl.QuantizationOptions(
                pccl.DataType.FLOAT, pccl.QuantizationAlgorithm.NONE))
    if order == "call":
        descriptors = [pccl.ReduceOpDescriptor.from_numpy(send, o, what(i)) for i, o in enumerate(outs)]
        say_when_calling(comm, len(outs))
        try:
            comm.all_reduce_multiple_with_retry(descriptors, max_in_flight=4)
        except KeyboardInterrupt:
            say(event="interrupted")
    ended = []
    for tag in range(4):
        if order == "call":
            hear()
        else:
            handle = comm.all_reduce_async(send, outs[tag], op=pccl.ReduceOp.SUM, tag=tag)
            ended.append(handle.wait()[0])
    say(event="done", ended=ended, untouched=bool(all((o == 0).all() for o in outs)))
    hear()
    """
    with running(**FAST) as run:
        caller, other = peers = [run.peer(code) for _ in range(2)]
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


def test_the_others_of_an_interrupted_call_get_an_error_and_go_on() -> None:
    code = """
    comm = start(min_peers=2)
    say(event="in")
    if hear() == "first":
        say_when_calling(comm)
    try:
        pccl.allreduce(x(10))
        say(event="result")
    except (KeyboardInterrupt, pccl.PeerLost) as error:
        say(event="failed", kind=type(error).__name__)
    total, info = pccl.allreduce(x(10), return_info=True)
    say(event="after", ok=bool((total == expected(info)).all()), size=info.world_size)
    hear()
    """
    with running(**FAST) as run:
        first, second = run.peers(2, code)
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


def test_a_peer_that_leaves_is_no_failure_of_the_others() -> None:
    code = """
    start()
    pccl.allreduce(x(10))
    say(event="in", size=pccl.world_size())
    if hear() == "leave":
        pccl.shutdown()
        say(event="left")
    else:
        total, info = pccl.allreduce(x(10), return_info=True)
        say(event="after", ok=bool((total == expected(info)).all()), size=info.world_size)
        hear()
    """
    with running() as run:
        peers = run.peers(3, code)
        for peer in peers:
            peer.expect("in")
        peers[0].tell("leave")
        peers[0].expect("left")
        assert peers[0].ends() == 0
        for peer in peers[1:]:
            peer.tell("reduce")
        for peer in peers[1:]:
            assert peer.expect("after", 5) == {"event": "after", "ok": True, "size": 2}


def test_one_master_serves_run_after_run() -> None:
    code = """
    start()
    total, info = pccl.allreduce(x(10), return_info=True)
    say(event="done", size=info.world_size, ok=bool((total == expected(info)).all()))
    """

    def once(run: Run) -> None:
        peers = run.peers(2, code)
        for peer in peers:
            assert peer.expect("done") == {"event": "done", "size": 2, "ok": True}
            assert peer.ends() == 0

    with running() as run:
        for _ in range(3):
            once(run)
