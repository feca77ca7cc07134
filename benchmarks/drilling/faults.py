"""The faults of the drill. Each is made, and ended; `run.wait_until_well` follows."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from drilling.run import FOLDER, Failed, Member, Run

_FREEZE_SECONDS = 1.0  # short of every timeout
_NOISE = """\
import os, socket, sys
for port in sys.argv[2].split(","):
    for _ in range(40):
        with socket.create_connection((sys.argv[1], int(port)), 5) as s:
            try:
                s.sendall(os.urandom(20_000))
                s.recv(100)
            except OSError:
                pass
"""


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: What happens, for the table.
        make: Makes it, and ends it if it is not for good. Returns how many train afterwards.
        shows: A regular expression: what the status must say while it lasts. None: the master does
            not hear of this fault.
        needs_lab: It is a fault of a network.
        in_short: It is in the short form.
        masters: Whether the run has one or several. None: it does not matter.
        errors: What members other than the victim may be told, as class names.
        victims: Members whose pauses do not count.
        seconds: Time until all must be well.
        pause: The longest time between two steps of a member over TCP, in seconds. None: any.
    """

    name: str
    make: Callable[[Run], int]
    shows: str | None
    needs_lab: bool = False
    in_short: bool = False
    masters: Literal["one", "several"] | None = None
    errors: tuple[str, ...] = ()
    victims: tuple[str, ...] = ("peer1",)
    seconds: float = 40.0
    pause: float | None = None


# The heartbeat timeout of the drill, two round trips and half a second.
_FAILOVER_SECONDS = 2.0 + 2 * 0.002 + 0.5


def _all(run: Run) -> int:
    return len(run.living())


def _others_go_on(run: Run, lost: Sequence[Member], begun: float) -> None:
    """Waits until each of the others has made a step without these."""
    rest = [member for member in run.living() if member not in lost]
    run.wait(
        "the others go on without " + " and ".join(member.name for member in lost),
        lambda: all(m.steps[-1].at > begun and m.steps[-1].world == len(rest) for m in rest),
    )


def _learns_that_it_is_out(run: Run, peer: Member, begun: float) -> None:
    run.wait("it learns that it is out", lambda: bool(peer.events(begun, "error")))


def killed(run: Run) -> int:
    run.members["peer1"].signal(signal.SIGKILL)
    run.members["peer1"].process.wait()
    return _all(run)


def two_killed(run: Run) -> int:
    for name in ("peer1", "peer2"):
        run.members[name].signal(signal.SIGKILL)
    for name in ("peer1", "peer2"):
        run.members[name].process.wait()
    return _all(run)


def all_but_one_killed(run: Run) -> int:
    for member in list(run.members.values())[1:]:
        member.signal(signal.SIGKILL)
    for member in list(run.members.values())[1:]:
        member.process.wait()
    return 1


def half_are_killed(run: Run) -> int:
    """As many as a majority of the last membership can lose at once."""
    members = list(run.members.values())
    gone = members[len(members) - (len(members) - 1) // 2 :]
    for member in gone:
        member.signal(signal.SIGKILL)
    for member in gone:
        member.process.wait()
    return _all(run)


def stopped_for_a_second(run: Run) -> int:
    run.members["peer1"].signal(signal.SIGSTOP)
    time.sleep(_FREEZE_SECONDS)
    run.members["peer1"].signal(signal.SIGCONT)
    return _all(run)


def frozen_until_it_is_out(run: Run) -> int:
    begun = time.monotonic()
    peer = run.members["peer1"]
    peer.signal(signal.SIGSTOP)
    try:
        _others_go_on(run, [peer], begun)
    finally:
        peer.signal(signal.SIGCONT)
    _learns_that_it_is_out(run, peer, begun)
    return _all(run)


def told_to_end(run: Run) -> int:
    run.members["peer1"].signal(signal.SIGTERM)
    if (status := run.members["peer1"].process.wait(30)) != 0:
        raise Failed(f"the peer that was told to end has status {status}")
    return _all(run)


def interrupted(run: Run) -> int:
    run.members["peer1"].signal(signal.SIGINT)
    run.members["peer1"].process.wait(30)
    return _all(run)


def never_calls(run: Run) -> int:
    begun = time.monotonic()
    peer = run.members["peer1"]
    peer.tell("mute")
    _others_go_on(run, [peer], begun)
    peer.tell("speak")
    _learns_that_it_is_out(run, peer, begun)
    return _all(run)


def calls_with_another_shape(run: Run) -> int:
    return _wrong_call(run, "mismatch", "MismatchedCall")


def calls_something_else(run: Run) -> int:
    return _wrong_call(run, "elsewhere", "Deadlock")


def _wrong_call(run: Run, word: str, kind: str) -> int:
    begun = time.monotonic()
    run.members["peer1"].tell(word)
    run.wait(
        f"all are told {kind}",
        lambda: all(
            any(one["kind"] == kind for one in member.events(begun, "error"))
            for member in run.living()
        ),
    )
    return _all(run)


def _newcomer(run: Run, **env: str) -> None:
    run.start_peer("late", run.spare, **env)


def a_newcomer_joins_and_leaves(run: Run) -> int:
    begun = time.monotonic()
    world = _all(run) + 1
    _newcomer(run)
    run.wait_until_well(begun, world, 40)
    run.members["late"].signal(signal.SIGTERM)
    run.members["late"].process.wait(30)
    return _all(run)


def a_newcomer_is_killed_as_it_comes(run: Run) -> int:
    _newcomer(run)
    late = run.members["late"]
    run.wait("it has joined", lambda: bool(late.events(0, "joined")))
    time.sleep(0.2)  # while it connects, or receives the state
    late.signal(signal.SIGKILL)
    late.process.wait()
    return _all(run)


def a_newcomer_has_another_secret(run: Run) -> int:
    _newcomer(run, PCCL_SECRET=run.secret[::-1])
    late = run.members["late"]
    late.process.wait(30)
    if "AuthenticationFailed" not in late.errors.read_text():
        raise Failed(f"it was not told that its secret is wrong: {late.errors}")
    return _all(run)


def garbage_arrives(run: Run) -> int:
    port = run.addresses[0].rpartition(":")[2]
    command = [sys.executable, "-c", _NOISE, run.host(0), port]
    if run.lab:
        command = run.lab.command(run.spare, command)
    subprocess.run(command, check=True, timeout=60)
    return _all(run)


def the_master_is_killed_and_restarted(run: Run) -> int:
    run.master().kill()
    run.master().wait()
    time.sleep(1.0)
    run.start_master()
    return _all(run)


def the_master_is_stopped(run: Run) -> int:
    master = run.master(run.serving)
    master.send_signal(signal.SIGSTOP)
    time.sleep(_FREEZE_SECONDS)
    master.send_signal(signal.SIGCONT)
    return _all(run)


def _another_serves(run: Run, index: int) -> None:
    run.wait("another master serves", lambda: run.serving != index)


def the_serving_master_is_killed(run: Run) -> int:
    index = run.serving
    run.master(index).kill()
    run.master(index).wait()
    _another_serves(run, index)
    run.start_master(index)  # it is a standby now
    return _all(run)


def the_serving_master_is_frozen(run: Run) -> int:
    index = run.serving
    run.master(index).send_signal(signal.SIGSTOP)
    try:
        _another_serves(run, index)
    finally:
        run.master(index).send_signal(signal.SIGCONT)
    return _all(run)


def the_serving_master_is_cut_off(run: Run) -> int:
    assert run.lab is not None
    index = run.serving
    others = [place for place in run.places if place != index]
    for place in others:
        run.lab.cut(index, place)
    try:
        _another_serves(run, index)
        run.wait_until_well(time.monotonic(), _all(run), 40)
    finally:
        for place in others:
            run.lab.heal(index, place)
    return _all(run)


def a_standby_is_killed(run: Run) -> int:
    index = (run.serving + 1) % len(run.masters)
    run.master(index).kill()
    run.master(index).wait()
    run.start_master(index)
    return _all(run)


def a_line_is_cut(run: Run) -> int:
    assert run.lab is not None
    begun = time.monotonic()
    ends = run.members["peer0"].place, run.members["peer1"].place
    run.lab.cut(*ends)
    run.wait_until_well(begun + 0.5, _all(run), 40)
    run.lab.heal(*ends)
    return _all(run)


def a_peer_is_cut_off(run: Run) -> int:
    assert run.lab is not None
    begun = time.monotonic()
    peer = run.members["peer1"]
    others = [place for place in run.places if place != peer.place]
    for place in others:
        run.lab.cut(peer.place, place)
    try:
        _others_go_on(run, [peer], begun)
    finally:
        for place in others:
            run.lab.heal(peer.place, place)
    _learns_that_it_is_out(run, peer, begun)
    return _all(run)


def the_run_is_cut_in_two(run: Run) -> int:
    """Less than half of the peers, and a standby, see nobody else until they are told so."""
    assert run.lab is not None
    begun = time.monotonic()
    peers = list(run.members.values())
    few = peers[1 : 1 + (len(peers) - 1) // 2]
    standby = next(place for place in range(len(run.masters)) if place != run.serving)
    there = {standby, *(peer.place for peer in few)}
    lines = [(a, b) for a in there for b in run.places if b not in there]
    for line in lines:
        run.lab.cut(*line)
    try:
        _others_go_on(run, few, begun)
        run.wait(
            "they are told that they have no master",
            lambda: all(
                any(one["kind"] == "MasterLost" for one in peer.events(begun, "error"))
                for peer in few
            ),
        )
        if any(step.at > begun and step.world <= len(few) for m in few for step in m.steps):
            raise Failed("the smaller side made steps of its own")
    finally:
        for line in lines:
            run.lab.heal(*line)
    return _all(run)


def a_line_is_slow(run: Run) -> int:
    assert run.lab is not None
    slow = run.members["peer1"].place
    run.lab.rate(slow, 5, 5)
    begun = time.monotonic()
    run.wait_until_well(begun, _all(run), 60)
    run.lab.rate(slow, 200, 200)
    return _all(run)


def a_line_is_lossy(run: Run) -> int:
    assert run.lab is not None
    lossy = run.members["peer1"].place
    others = [place for place in run.places if place != lossy]
    for place in others:
        run.lab.set_loss(lossy, place, 0.05)
        run.lab.set_loss(place, lossy, 0.05)
    begun = time.monotonic()
    run.wait_until_well(begun, _all(run), 60)
    for place in others:
        run.lab.set_loss(lossy, place, 0)
        run.lab.set_loss(place, lossy, 0)
    return _all(run)


def connections_are_reset(run: Run) -> int:
    assert run.lab is not None
    one = run.members["peer1"].place
    for place in range(one + 1, run.spare):
        run.lab.reset(one, place, 4)
    return _all(run)


def the_disk_is_full(run: Run) -> int:
    begun = time.monotonic()
    peer = run.members["peer1"]
    peer.tell("save")
    run.wait("it is told that the file is too large", lambda: bool(peer.events(begun, "not saved")))
    (said,) = peer.events(begun, "not saved")
    if [name for name in said["left"] if name.startswith("peer1.safetensors")]:
        raise Failed(f"a part of a checkpoint was left: {said['left']}")
    return _all(run)


def the_clock_jumps(run: Run) -> int:
    begun = time.monotonic()
    library = run.folder / "clock.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Failed("needs a C compiler")
    source = str(FOLDER / "clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    world = _all(run) + 1
    _newcomer(run, LD_PRELOAD=str(library))
    run.wait_until_well(begun, world, 40)
    late = run.members["late"]
    for _ in range(2):  # back by a day, and to rights
        jumped = time.monotonic()
        late.signal(signal.SIGUSR2)
        run.wait_until_well(jumped, world, 40)
    late.signal(signal.SIGTERM)
    late.process.wait(30)
    return _all(run)


def kicked_by_the_operator(run: Run) -> int:
    begun = time.monotonic()
    peer = run.members["peer1"]
    run.command("kick", "peer1")
    _learns_that_it_is_out(run, peer, begun)
    return _all(run)


def drained_by_the_operator(run: Run) -> int:
    run.command("drain", "peer1")
    if (status := run.members["peer1"].process.wait(30)) != 0:
        raise Failed(f"the drained peer has status {status}")
    return _all(run)


def admission_is_paused(run: Run) -> int:
    world = _all(run)
    run.command("pause-admission")
    begun = time.monotonic()
    _newcomer(run)
    run.wait("it has joined", lambda: bool(run.members["late"].events(begun, "joined")))
    waiting = time.monotonic()
    time.sleep(1.0)
    if any(step.at > waiting and step.world > world for step in run.members["peer0"].steps):
        raise Failed("a newcomer was let in while admission was paused")
    run.command("resume-admission")
    run.wait_until_well(time.monotonic(), world + 1, 40)
    run.members["late"].signal(signal.SIGTERM)
    run.members["late"].process.wait(30)
    return _all(run)


def the_machine_is_busy(run: Run) -> int:
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 2))
    ]
    begun = time.monotonic()
    try:
        run.wait_until_well(begun, _all(run), 60)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return _all(run)


_NOBODY = ()

FAULTS = [
    Fault("a peer is killed", killed, r"peer1 is out", in_short=True),
    Fault("two peers are killed at once", two_killed, r"peer2 is out", victims=("peer1", "peer2")),
    Fault("all peers but one are killed", all_but_one_killed, r"1 member\b", masters="one"),
    Fault(
        "less than half of the peers are killed",
        half_are_killed,
        r"is out",
        masters="several",
        victims=tuple(f"peer{number}" for number in range(1, 100)),
    ),
    Fault(
        "a peer is stopped for a second",
        stopped_for_a_second,
        r"wait.*peer1|peer1 is silent",
        victims=_NOBODY,
    ),
    Fault("a peer is frozen until it is out", frozen_until_it_is_out, r"not heard", in_short=True),
    Fault("a peer gets SIGTERM", told_to_end, r"peer1 is out: it left", in_short=True),
    Fault("a peer gets Ctrl-C", interrupted, r"peer1 is out", errors=("PeerLost",)),
    Fault("a peer makes no call", never_calls, r"wait.*peer1", in_short=True),
    Fault(
        "a peer calls with another shape",
        calls_with_another_shape,
        None,
        in_short=True,
        errors=("MismatchedCall",),
        victims=_NOBODY,
    ),
    Fault(
        "a peer calls something else",
        calls_something_else,
        r"wait",
        errors=("Deadlock",),
        victims=_NOBODY,
    ),
    Fault("a newcomer joins and leaves", a_newcomer_joins_and_leaves, r"late", victims=_NOBODY),
    Fault(
        "a newcomer is killed as it comes",
        a_newcomer_is_killed_as_it_comes,
        r"late",
        victims=_NOBODY,
    ),
    Fault(
        "a newcomer has another secret",
        a_newcomer_has_another_secret,
        None,
        in_short=True,
        victims=_NOBODY,
    ),
    Fault("noise at the master's port", garbage_arrives, None, victims=_NOBODY),
    Fault(
        "the master is killed and restarted",
        the_master_is_killed_and_restarted,
        r"restarts 1|no answer",
        in_short=True,
        masters="one",
        victims=_NOBODY,
    ),
    Fault(
        "the master is stopped for a second",
        the_master_is_stopped,
        r"answer took",
        victims=_NOBODY,
        pause=_FREEZE_SECONDS + 0.5,
    ),
    Fault(
        "the master that serves is killed",
        the_serving_master_is_killed,
        r"taken over",
        in_short=True,
        masters="several",
        victims=_NOBODY,
        pause=_FAILOVER_SECONDS,
    ),
    Fault(
        "the master that serves is frozen",
        the_serving_master_is_frozen,
        r"taken over",
        masters="several",
        victims=_NOBODY,
        pause=_FAILOVER_SECONDS,
    ),
    Fault(
        "the master that serves is cut off",
        the_serving_master_is_cut_off,
        r"taken over",
        needs_lab=True,
        masters="several",
        victims=_NOBODY,
        pause=_FAILOVER_SECONDS,
    ),
    Fault(
        "a standby is killed",
        a_standby_is_killed,
        r"does not answer",
        masters="several",
        victims=_NOBODY,
    ),
    Fault("the line of two peers is cut", a_line_is_cut, r"peer", needs_lab=True, victims=_NOBODY),
    Fault("a peer is cut off", a_peer_is_cut_off, r"peer1 is out", needs_lab=True, in_short=True),
    Fault(
        "the run is cut in two",
        the_run_is_cut_in_two,
        r"is out",
        needs_lab=True,
        masters="several",
        victims=tuple(f"peer{number}" for number in range(1, 100)),
    ),
    Fault("a peer's line is slow", a_line_is_slow, None, needs_lab=True, victims=_NOBODY),
    Fault("a peer's line loses 5 %", a_line_is_lossy, None, needs_lab=True, victims=_NOBODY),
    Fault("connections are reset", connections_are_reset, None, needs_lab=True, victims=_NOBODY),
    Fault("a peer's disk is full", the_disk_is_full, None, victims=_NOBODY),
    Fault("a peer's clock jumps by a day", the_clock_jumps, r"late", victims=_NOBODY),
    Fault(
        "the operator kicks a peer",
        kicked_by_the_operator,
        r"kicked by the operator",
        in_short=True,
    ),
    Fault("the operator drains a peer", drained_by_the_operator, r"the operator asks .*peer1"),
    Fault("the operator pauses admission", admission_is_paused, r"late", victims=_NOBODY),
    Fault("the machine is busy", the_machine_is_busy, None, victims=_NOBODY),
]
