"""A run that strangers attack goes on, every sum is right, and memory stays bounded.

Each attack is a row of docs/guide/security.md.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import tlspeer
from attackers import (
    Flooder,
    Insider,
    Recorder,
    Spoiler,
    Training,
    connect,
    frame,
    greeting,
    join,
    listening_port,
    many_descriptors,
    memory_mib,
    send,
    training,
)
from programs import attacked
from reports import JOIN, control, rejoin, seal, text

from pccl import _testing

# Whether the run has a secret: what strangers get is the same, or less.
MODES = ["plain", "secret"]

HANDSHAKE_S = 5
DATA, STATE = 4, 9  # kinds of frames
REJOIN, LEAVE, HEARTBEAT = 1, 9, 10  # and of messages
VALID = struct.pack("<Q", 0x646E656C6C697770)  # behind what they carry
CONNECTIONS = 10_000


@pytest.fixture(scope="module", params=MODES)
def world(request: pytest.FixtureRequest) -> Iterator[Training]:
    with training(secret=request.param == "secret") as world:
        yield world


FOREIGN = {
    "nothing": b"",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 40,
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(600),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(100),
    "half a magic": b"PC",
}


def test_garbage_on_every_port(world: Training) -> None:
    rng = random.Random(1)
    for address in world.ports:
        for data in FOREIGN.values():
            send(address, data)
        for _ in range(30):
            send(address, rng.randbytes(rng.randrange(1, 4000)))
        send(address, rng.randbytes(2 << 20))
    world.goes_on()


def test_oversize_everything(world: Training) -> None:
    huge = 0xFFFFFFFF
    # A group, a minimum, and a list of addresses with four billion entries; then such strings.
    start = b"\x01" * 16 + struct.pack("<IIBB", 0, 1, 1, 0)
    for data in (
        control(JOIN, b"", length=huge),
        control(JOIN, b"", length=(1 << 20) + 1),
        control(1, bytes((1 << 20) + 4096), length=1 << 20),
        control(JOIN, start + struct.pack("<I", huge)),
        control(JOIN, start + struct.pack("<II", 1, huge)),
        control(
            0, start + struct.pack("<I", 200) + (struct.pack("<I", 40) + b"a" * 40 + b"\0\0") * 200
        ),
        control(5, struct.pack("<I", huge)),
        control(255, b""),
    ):
        answer = send(world.master, data)
        assert not answer or b"PCCL" in answer[:4]
    for kind in range(15):
        for length in (0, 1, 4097, 1 << 27, (1 << 27) + 1, huge):
            send(world.peer, frame(_testing.link_seal, kind, b"x" * 64, length))
    world.goes_on()


def _recorded(world: Training) -> bytes:
    """All bytes that a peer has sent to the master."""
    recorder = Recorder(world.master)
    try:
        late = world.run.peer(partial(attacked.come_and_go_when_told, recorder.address))
        late.expect("in")
        late.tell("go")
        late.expect("out")
        assert recorder.streams
        return bytes(recorder.streams[0])
    finally:
        recorder.close()


def test_replayed_truncated_and_spoilt_streams(world: Training) -> None:
    said = _recorded(world)
    assert len(said) > 200
    rng = random.Random(2)
    for address in world.ports:
        send(address, said)
        send(address, said * 20)
        for _ in range(20):
            send(address, said[: rng.randrange(len(said))])
        for _ in range(40):
            spoilt = bytearray(said)
            for _ in range(rng.randrange(1, 4)):
                spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
            send(address, bytes(spoilt))
    world.goes_on()


def test_one_byte_a_second_is_not_enough_to_stay(world: Training) -> None:
    # The beginnings of an honest Join, and of an honest frame.
    beginnings = {
        world.master: control(JOIN, b"\x01" * 200),
        world.peer: frame(_testing.link_seal, 0, b"\x01" * 61, 61),
    }
    strangers: dict[socket.socket, bytes] = {}
    for address, beginning in beginnings.items():
        for done in (0, 1, 4, 31, 40, 80):  # in the magic, the header, behind it
            stranger = connect(address)
            stranger.sendall(beginning[:done])
            strangers[stranger] = beginning[done:]
    began = time.monotonic()
    while strangers:
        passed = time.monotonic() - began
        assert passed < HANDSHAKE_S + 15, f"{len(strangers)} of them are still there"
        closed, _, _ = select.select(list(strangers), [], [], 1)
        for stranger in closed:
            try:
                if stranger.recv(4096):
                    continue  # why it is refused
            except ConnectionError:
                pass
            del strangers[stranger]
            stranger.close()
        for stranger, rest in strangers.items():
            try:
                stranger.sendall(rest[:1])
            except OSError:
                continue
            strangers[stranger] = rest[1:] or b"x"
    world.goes_on()


def test_a_peer_with_rare_heartbeats_closes_who_says_nothing_in_time() -> None:
    rare = {"PCCL_HEARTBEAT_INTERVAL": "100", "PCCL_HEARTBEAT_TIMEOUT": "400"}
    with training(secret=False, **rare) as world, connect(world.peer) as stranger:
        stranger.settimeout(HANDSHAKE_S + 10)
        assert stranger.recv(1) == b""


def test_one_byte_a_second_is_not_enough_to_stay_for_who_knows_the_secret(world: Training) -> None:
    """They stop in the ClientHello; or send nothing after the handshake, or a Join byte by byte."""
    to = world.ids[0]
    strangers: dict[socket.socket, Callable[[int], object]] = {}
    with contextlib.ExitStack() as stack:
        if world.secret is not None:
            hellos = {
                world.master: tlspeer.client_hello(
                    tlspeer.control_key(world.secret), b"pccl control", tlspeer.PSK_DHE_KE
                ),
                world.peer: tlspeer.client_hello(
                    tlspeer.link_key(world.secret, world.run_id, bytes.fromhex(to)),
                    b"pccl link",
                    tlspeer.PSK_DHE_KE,
                ),
            }
            for address, said in hellos.items():
                for done in (0, 3, 5, 9, 60):  # in the record's header, the message's, behind it
                    stranger = stack.enter_context(connect(address))
                    stranger.sendall(said[:done])
                    strangers[stranger] = lambda second, to=stranger, rest=said[done:]: to.sendall(
                        rest[second : second + 1]
                    )
        for address, peer, said in (
            (world.master, "", join(2)),
            (world.peer, to, greeting(world.run_id, world.ids[1], to, 1)),
        ):
            for done in (0, 1, 33):
                insider = stack.enter_context(contextlib.closing(world.insider(address, peer)))
                assert done == 0 or insider.write(said[:done])
                strangers[insider.sock] = lambda second, by=insider, rest=said[done:]: by.write(
                    rest[second : second + 1]
                )
            silent = stack.enter_context(contextlib.closing(world.insider(address, peer)))
            strangers[silent.sock] = lambda second: None
        began = time.monotonic()
        for second in itertools.count():
            passed = time.monotonic() - began
            assert passed < HANDSHAKE_S + 15, f"{len(strangers)} of them are still there"
            until = time.monotonic() + 1
            while strangers and (left := until - time.monotonic()) > 0:
                closed, _, _ = select.select(list(strangers), [], [], left)
                for stranger in closed:
                    with contextlib.suppress(ConnectionError):
                        if os.read(stranger.fileno(), 4096):
                            continue  # why it is refused
                    del strangers[stranger]
            if not strangers:
                break
            for dribble in strangers.values():
                with contextlib.suppress(OSError):
                    dribble(second)
    world.goes_on()


def test_half_handshakes_take_little_memory(world: Training) -> None:
    """A ClientHello that is announced to be long, and honest ones that do not end."""
    announced = bytes.fromhex("160301010001") + (131_000).to_bytes(3, "big") + bytes(99)
    cut_in_two = bytes.fromhex("1603010001011603010003") + (131_000).to_bytes(3, "big") + bytes(99)
    honest = tlspeer.client_hello(b"k" * 32, b"pccl control", tlspeer.PSK_DHE_KE)[:-1]
    for address, worker in zip(world.ports, (world.run.master, world.peers[0]), strict=True):
        for long in (announced, cut_in_two):
            began = time.monotonic()
            for _ in range(50):
                with connect(address) as stranger, contextlib.suppress(ConnectionError):
                    stranger.sendall(long)
                    while stranger.recv(4096):  # why it is refused
                        pass
            assert time.monotonic() - began < 5 * HANDSHAKE_S, "it waits for the rest"
        before = memory_mib(worker.pid, "VmRSS")
        with contextlib.ExitStack() as stack:
            strangers = []
            for number in range(1024):
                source = (f"127.0.1.{number % 8 + 1}", 0)
                stranger = socket.create_connection(address, 20, source)
                strangers.append(stack.enter_context(stranger))
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(honest)
            world.goes_on()
            assert memory_mib(worker.pid, "VmRSS") - before < 80
    world.goes_on()


def test_newcomers_cannot_fill_the_master(world: Training) -> None:
    """An identified newcomer may not send more than an unidentified connection."""
    with contextlib.ExitStack() as stack:

        def newcomer(number: int) -> Insider:
            made = stack.enter_context(contextlib.closing(world.insider(world.master)))
            assert made.write(join(number)) and made.read()[:4] == b"PCCL"
            return made

        one = newcomer(100)
        assert one.write(control(4, b"", length=(1 << 20) + 1))
        assert b"over the limit of 1048576" in one.read_all()
        begun = control(4, bytes((1 << 20) - 1), length=1 << 20)
        newcomers = [newcomer(number) for number in range(101, 401)]
        for one in newcomers:
            one.write(begun)
        world.goes_on()


def test_newcomers_cannot_use_up_the_masters_descriptors() -> None:
    with training(secret=False, open_files=128) as world, contextlib.ExitStack() as stack:
        beat = control(HEARTBEAT, b"", run=world.run_id)
        newcomers: list[Insider] = []
        done = threading.Event()

        def live() -> None:
            while not done.wait(0.5):
                for one in list(newcomers):
                    one.write(beat)

        alive = threading.Thread(target=live)
        alive.start()
        try:
            for number in range(200):
                one = stack.enter_context(contextlib.closing(world.insider(world.master)))
                assert one.write(join(number)) and one.read()[:4] == b"PCCL"
                newcomers.append(one)
            late = world.run.peer(attacked.come_and_go)
            late.expect("in", 20)
            world.goes_on()
        finally:
            done.set()
            alive.join()


def test_nobody_comes_back_in_the_place_of_a_member(world: Training) -> None:
    victim, other = (bytes.fromhex(peer) for peer in world.ids)
    for ticket in (None, other, seal(victim)):
        with contextlib.closing(world.insider(world.master)) as impostor:
            says = rejoin(victim, 0, ticket=ticket, others=[other], applied=0)
            impostor.write(control(REJOIN, says, run=world.run_id))
            impostor.write(control(LEAVE, text("")))
            assert b"the run went on without this peer" in impostor.read_all()
    world.goes_on()


def test_reports_of_who_comes_back_stay_within_their_bound() -> None:
    """Each of a group of its own says that it is a member of, with a record of 1 MiB."""
    # No report is given up while the others come.
    with (
        training(secret=True, PCCL_RECONNECT_TIMEOUT="100") as world,
        contextlib.ExitStack() as stack,
    ):
        insiders = []
        for number in range(160):
            one = stack.enter_context(contextlib.closing(world.insider(world.master)))
            me, others = os.urandom(16), [os.urandom(16) for _ in range(3100)]
            says = rejoin(me, 5000 + number, others=others, hosts=["x" * 240])
            assert (1 << 20) * 0.9 < len(says) < 1 << 20
            one.write(control(REJOIN, says, run=world.run_id))
            insiders.append(one)
        # No room for the last one. The first one waits for the others of its group.
        assert insiders[-1].read_all() == b""
        assert not select.select([insiders[0].sock], [], [], 0)[0]
        world.goes_on()


def test_a_member_that_floods_the_master_is_out_and_the_others_go_on() -> None:
    with training(secret=False) as world:
        flooder = Flooder(world.master, control(HEARTBEAT, b"", run=world.run_id))
        with contextlib.closing(flooder):
            late = world.run.peer(partial(attacked.train, 1), PCCL_MASTER=flooder.address)
            late.expect("in")
            late.expect("training")
            flooder.floods()
            world.goes_on()
            assert late.ends(60) != 0
            assert "Evicted" in late.stderr()


def test_a_member_that_says_hello_as_another_one_does_not_stop_the_run() -> None:
    """It takes that link over, says what no peer may, and goes: the real one gets it back."""
    with training(secret=True, PCCL_MEASURE_AFTER="1000", PCCL_HEARTBEAT_TIMEOUT="20") as world:
        taken = []
        for target, victim in ((0, 1), (1, 0)):
            to, sender = world.ids[target], world.ids[victim]
            address = ("127.0.0.1", listening_port(world.peers[target].pid))
            with contextlib.closing(world.insider(address, to)) as insider:
                assert insider.write(greeting(world.run_id, sender, to, (1 << 64) - 1))
                answer = insider.read()
                taken.append(answer != b"")
                for kind, segment, attempt, final in itertools.product(
                    (DATA, STATE), (0, 1, 0xFFFFFFFF), (1, 2, 1 << 40), (0, 1)
                ):
                    key = struct.pack("<QBQQ", attempt, 0, 0, 1 << 40)
                    impossible = frame(
                        _testing.link_seal,
                        kind,
                        b"\xff" * 64 + VALID,
                        64,
                        final=final,
                        key=key,
                        attempt=attempt,
                        segment=segment,
                    )
                    if not insider.write(impossible):
                        break
            world.goes_on()
        # Only in the name of who is newer: of two, that one says hello.
        assert sorted(taken) == [False, True]


@pytest.mark.parametrize("which", ["master", "peer"])
def test_ten_thousand_connections(world: Training, which: str) -> None:
    address = world.master if which == "master" else world.peer
    with many_descriptors(CONNECTIONS + 200) as given:
        if given < CONNECTIONS + 200:
            pytest.skip(f"this process may have {given} descriptors only")
        strangers = []
        for _ in range(CONNECTIONS):
            strangers.append(connect(address))
        before = world.steps()
        # While they are there, a newcomer comes in, and is reduced with.
        late = world.run.peer(attacked.come_and_reduce)
        assert late.expect("size", 60)["size"] == 3
        late.expect("out", 60)
        assert world.steps() > before
        for stranger in strangers:
            stranger.close()
    world.goes_on()


def test_handshakes_of_nobody_on_a_peers_port(world: Training) -> None:
    """Well-formed hellos from another run, to another peer and from strangers; and early data."""
    me, target = b"\x07" * 16, bytes.fromhex(world.ids[0])
    hellos = [
        struct.pack("<Q", run)
        + sender
        + to
        + struct.pack("<QIBBI", generation, stripe, keeps, memory, 1000)
        for run in (0, 1)
        for sender in (me, bytes.fromhex(world.ids[1]), target)
        for to in (target, me)
        for generation, stripe, keeps, memory in (
            (1, 0, 1, 0),
            (1 << 63, 0, 0, 1),
            (0, 1 << 31, 1, 1),
        )
    ]
    for hello in hellos:
        head = frame(_testing.link_seal, 0, hello, len(hello))
        send(world.peer, head)
        send(world.peer, head + frame(_testing.link_seal, 4, bytes(4096), 4096) * 4)
    for kind in range(3, 15):
        send(world.peer, frame(_testing.link_seal, kind, bytes(64), 64))
    # More than may wait for the epoch that names them.
    parked = [connect(world.peer) for _ in range(200)]
    for number, stranger in enumerate(parked):
        hello = struct.pack("<Q", 0) + number.to_bytes(16, "big") + target
        hello += struct.pack("<QIBBI", 1, 0, 1, 0, 1000)
        stranger.sendall(frame(_testing.link_seal, 0, hello, len(hello)))
    world.goes_on()
    for stranger in parked:
        stranger.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_master_without_descriptors_serves_those_that_it_has(mode: str) -> None:
    with training(secret=mode == "secret", open_files=64) as world:
        strangers = [connect(world.master) for _ in range(300)]
        world.goes_on()
        late = world.run.peer(attacked.come_and_go)
        late.expect("in", 60)
        for stranger in strangers:
            stranger.close()
        # It says so, and not for each of them.
        assert world.run.master.stderr().count("\n") < 40


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a compiler")


def built(source: str, folder: Path) -> str:
    """A library for LD_PRELOAD, from a C file of this folder."""
    library = folder / "preload.so"
    file = str(Path(__file__).with_name(source))
    command = ["cc", "-shared", "-fPIC", "-o", str(library), file, "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return str(library)


@needs_compiler
@pytest.mark.parametrize("secret", [False, True], ids=["plain", "secret"])
def test_connections_that_cannot_be_looked_after_cost_nobody_else(
    secret: bool, tmp_path: Path
) -> None:
    flag = tmp_path / "refuse"
    env = {"LD_PRELOAD": built("refuse_epoll.c", tmp_path), "TEST_REFUSE": str(flag)}
    with training(secret, **env) as world:
        flag.touch()
        for address in world.ports:
            for _ in range(20):
                with connect(address) as stranger, contextlib.suppress(ConnectionError):
                    assert stranger.recv(1) == b""  # closed, and not by us
        world.goes_on()
        for worker in (world.run.master, world.peers[0]):
            lines = worker.stderr().count("a new connection was closed")
            assert 1 <= lines <= 10
        flag.unlink()
        late = world.run.peer(attacked.come_and_go)
        late.expect("in", 60)


@needs_compiler
def test_bits_flipped_and_records_cut_between_peers_end_that_connection_and_no_sum_is_wrong(
    tmp_path: Path,
) -> None:
    ways = [Spoiler(), Spoiler()]  # whoever dials comes through one of them
    envs = [{"PCCL_BIND": Spoiler.PEER, "PCCL_PORT": str(way.port)} for way in ways]
    try:
        with training(
            secret=True, peers=envs, LD_PRELOAD=built("detour_connect.c", tmp_path)
        ) as world:
            for cuts, upwards in itertools.product((False, True), (True, False, True)):
                for way in ways:
                    way.cut(upwards) if cuts else way.flip(upwards)
                until = time.monotonic() + 60
                while not any(way.flipped.is_set() and way.ended.is_set() for way in ways):
                    assert time.monotonic() < until, "nothing passes there, or it stays"
                    world.steps()
                world.goes_on()
    finally:
        for way in ways:
            way.close()
