"""Secrets and TLS: who gets in, and what those get who must not. docs/security.md has a row for each attack."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import tlspeer
from members import each, members
from workers import complaints, running

import pccl
from pccl import _testing, master

SECRET = "correct-horse-battery-staple-0123456789"
OTHER = "another-horse-battery-staple-0123456789"
# Its envelope without a run, a term and an ordinal: what a newcomer says first.
JOIN = (lambda sample: sample[:12] + bytes(20) + sample[32:])(_testing.control_sample("join"))
PROMPTLY = 4.0  # seconds: less than any time-out of a handshake

needs_openssl = pytest.mark.skipif(not tlspeer.available, reason="libssl is not found by ctypes")


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def connect(to: str) -> socket.socket:
    sock = socket.create_connection(address(to), timeout=10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


@contextmanager
def served(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of somebody who does this with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    serve(sock)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def refused(to: str, secret: str | None) -> pccl.AuthenticationFailed:
    began = time.monotonic()
    with (
        closing(pccl.Communicator(to, secret=secret)) as comm,
        pytest.raises(pccl.AuthenticationFailed) as failure,
    ):
        comm.connect()
    assert time.monotonic() - began < PROMPTLY
    assert failure.value.result == pccl.Result.MASTER_CONNECTION_FAILED
    for text in (str(failure.value), repr(failure.value)):
        assert SECRET not in text and OTHER not in text
    return failure.value


# ---- secrets


def test_a_secret_that_could_be_guessed_is_refused() -> None:
    for make in (pccl.Communicator, pccl.MasterNode):
        for short in ("x", "abcdefgh" * 3, b"01234567" * 3, "", b""):
            with pytest.raises(pccl.InvalidArgument, match="too short.*32.*pccl secret") as failure:
                make("127.0.0.1:1", secret=short)
            assert not short or str(short) not in str(failure.value).replace("too short", "")
        with pytest.raises(pccl.InvalidArgument, match="repeats itself"):
            make("127.0.0.1:1", secret="abc" * 20)
        with pytest.raises(pccl.InvalidArgument, match="text or bytes, not int"):
            make("127.0.0.1:1", secret=5)  # type: ignore[arg-type]


def test_a_new_secret_is_good_and_another_each_time() -> None:
    made = {master.make_secret() for _ in range(10)}
    assert len(made) == 10
    for secret in made:
        pccl.MasterNode("127.0.0.1:0", secret=secret)


def test_a_secret_comes_from_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(f"  {SECRET}\n")
    monkeypatch.setenv("PCCL_SECRET_FILE", str(file))
    with pccl.MasterNode("127.0.0.1:0") as node:
        refused(node.address, OTHER)  # an argument wins over the variable
        monkeypatch.delenv("PCCL_SECRET_FILE")
        monkeypatch.setenv("PCCL_SECRET", SECRET)
        with pccl.Communicator(node.address):
            pass
        monkeypatch.setenv("PCCL_SECRET_FILE", str(file))
        with pytest.raises(pccl.InvalidArgument, match="both"):
            pccl.Communicator(node.address)
        monkeypatch.delenv("PCCL_SECRET")
        file.write_text("short")
        with pytest.raises(pccl.InvalidArgument, match="too short"):
            pccl.Communicator(node.address)
        monkeypatch.setenv("PCCL_SECRET_FILE", str(tmp_path / "none"))
        with pytest.raises(pccl.InvalidArgument, match="cannot read .*none: No such file"):
            pccl.Communicator(node.address)


def in_the_environment(argv: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs it with this in the environment, and nothing else of secrets."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PCCL_SECRET")}
    return subprocess.run(
        argv, env=kept | env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("variable", ["PCCL_SECRET", "PCCL_SECRET_FILE"])
def test_an_empty_variable_is_not_the_same_as_no_secret(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As a command makes it that should have printed the secret, and failed.
    for command in (
        ["-m", "pccl", "master", "--listen", "127.0.0.1:0"],
        ["-m", "pccl", "master", "--insecure", "--listen", "127.0.0.1:0"],
        ["-m", "pccl.master", "--listen-address", "127.0.0.1:0"],
        ["-m", "pccl", "doctor", "127.0.0.1:1"],
    ):
        done = in_the_environment([sys.executable, *command], tmp_path, **{variable: ""})
        assert done.returncode != 0 and done.stdout == "", command
        assert f"{variable} is set" in done.stderr and "Traceback" not in done.stderr
    monkeypatch.setenv(variable, "")
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:  # an argument wins
        for call in (pccl.Communicator, pccl.MasterNode, pccl.init):
            with pytest.raises(pccl.InvalidArgument, match=f"{variable} is set, but empty"):
                call(node.address)
        with pccl.Communicator(node.address, secret=SECRET):
            pass
    monkeypatch.setenv("PCCL_SECRET" if variable == "PCCL_SECRET_FILE" else "PCCL_SECRET_FILE", "x")
    with pytest.raises(pccl.InvalidArgument, match=f"{variable} is set, but empty"):
        pccl.MasterNode("127.0.0.1:0")


# ---- whom a peer believes to be its master


def test_a_wrong_secret_is_an_error_at_once() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        error = refused(node.address, OTHER)
        assert node.address in str(error) and "refuses our secret" in str(error)


def test_a_peer_without_a_secret_is_told_that_the_run_has_one() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        assert "PCCL_SECRET" in str(refused(node.address, None))


def test_who_says_it_in_pieces_is_told_as_well() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        for pieces in ((JOIN[:1], JOIN[1:]), (JOIN[:3], JOIN[3:]), (b"P", b"C", b"C", JOIN[3:])):
            with connect(node.address) as sock:
                for piece in pieces:
                    sock.sendall(piece)
                    # Until the master's system has it: most likely it is read alone, then.
                    until = time.monotonic() + 10
                    while struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0] > 0:
                        assert time.monotonic() < until
                        time.sleep(0.001)
                assert b"PCCL_SECRET" in b"".join(iter(lambda: sock.recv(4096), b""))
        with connect(node.address) as sock:
            sock.sendall(b"PC")
            sock.sendall(b"X" * 100)
            assert b"PCCL_SECRET" not in sock.recv(4096)


def test_a_peer_with_a_secret_never_talks_to_a_master_without_one() -> None:
    heard = bytearray()

    def listen(sock: socket.socket) -> None:
        sock.settimeout(10)
        heard.extend(sock.recv(65536))
        sock.sendall(_testing.control_sample("heartbeat"))

    with pccl.MasterNode("127.0.0.1:0") as node:
        assert "started without a secret" in str(refused(node.address, SECRET))
    with served(listen) as impostor:
        assert "does not speak TLS" in str(refused(impostor, SECRET))
    assert heard[:1] == b"\x16" and b"PCCL" not in heard  # a handshake, and nothing else


@needs_openssl
@pytest.mark.parametrize(
    "options",
    [
        {"certificate": True},  # the fallback: a server that has no key but a certificate
        {"certificate": True, "key": b"k" * 32},
        {"key": b"k" * 32},
        {"key": tlspeer.link_key(SECRET, 1, bytes(16)), "identity": b"pccl link"},
        {"key": tlspeer.control_key(SECRET), "version": tlspeer.TLS12, "certificate": True},
        {"key": tlspeer.control_key(SECRET), "suite": "TLS_AES_256_GCM_SHA384"},
        {"key": tlspeer.control_key(SECRET), "groups": "P-256"},
    ],
    ids=["certificate", "both", "wrong-key", "link-key", "tls-1.2", "other-suite", "other-group"],
)
def test_an_impostor_master_gets_nothing(options: dict[str, object]) -> None:
    got = []

    def serve(sock: socket.socket) -> None:
        end = tlspeer.End(sock, client=False, **options)  # type: ignore[arg-type]
        got.append((end.shake(), end.read()))
        end.free()

    with served(serve) as impostor:
        refused(impostor, SECRET)
    assert got == [(False, b"")]


# ---- whom a master believes to be a peer


@needs_openssl
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key": b"k" * 32},
        {"key": tlspeer.link_key(SECRET, 1, bytes(16)), "identity": b"pccl link"},
        {"key": tlspeer.control_key(SECRET), "identity": b"pccl link"},
        {"key": tlspeer.control_key(SECRET), "version": tlspeer.TLS12},
        {"key": tlspeer.control_key(SECRET), "suite": "TLS_AES_256_GCM_SHA384"},
        {"key": tlspeer.control_key(SECRET), "suite": "TLS_CHACHA20_POLY1305_SHA256"},
        {"key": tlspeer.control_key(SECRET), "groups": "P-256"},
    ],
    ids=["none", "wrong", "link", "name", "tls-1.2", "aes-256", "chacha20", "p-256"],
)
def test_an_impostor_peer_gets_nothing(options: dict[str, object]) -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        with connect(node.address) as sock:
            end = tlspeer.End(sock, client=True, **options)  # type: ignore[arg-type]
            assert not end.shake()
            assert end.read() == b""
            end.free()
        with pccl.Communicator(node.address, secret=SECRET):
            pass


@needs_openssl
def test_the_right_key_is_the_documents_and_no_tickets_are_given() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node, connect(node.address) as sock:
        end = tlspeer.End(sock, client=True, key=tlspeer.control_key(SECRET))
        assert end.shake()
        assert end.write(b"this is no Join " * 4)
        assert end.read()[:4] == b"PCCL"  # Refused
        assert tlspeer.NEW_SESSION_TICKET not in {kind for _, kind in end.messages}
        end.free()


@needs_openssl
def test_a_hello_retry_request_is_answered_with_the_key() -> None:
    # A client that has guessed another group is asked again; the key is then looked up twice.
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node, connect(node.address) as sock:
        end = tlspeer.End(sock, client=True, key=tlspeer.control_key(SECRET), groups="P-256:X25519")
        assert end.shake()
        assert [kind for ours, kind in end.messages if ours].count(1) == 2  # ClientHello
        end.free()


@needs_openssl
def test_early_data_is_not_accepted() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node, connect(node.address) as sock:
        end = tlspeer.End(sock, client=True, key=tlspeer.control_key(SECRET), early_data=1 << 14)
        assert end.write_early(JOIN)
        end.shake()
        assert not end.early_data_was_accepted()
        assert end.read() == b""  # no Welcome
        end.free()


def test_a_key_without_an_exchange_is_refused() -> None:
    # psk_ke: whoever learns the secret later could read what was recorded.
    key = tlspeer.control_key(SECRET)
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        for modes, share, taken in (
            (tlspeer.PSK_DHE_KE, True, True),
            (tlspeer.PSK_KE + tlspeer.PSK_DHE_KE, True, True),
            (tlspeer.PSK_KE, True, False),
            (tlspeer.PSK_KE, False, False),
        ):
            with connect(node.address) as sock:
                sock.sendall(tlspeer.client_hello(key, b"pccl control", modes, share=share))
                told = sock.recv(1 << 16)
                if taken:
                    assert (told[0], told[5]) == (22, 2)  # ServerHello
                    continue
                while more := sock.recv(1 << 16):
                    told += more
                assert told[0] == 21 and len(told) == 7, told  # an alert, and nothing else


def test_what_is_no_tls_is_closed_and_told_nothing() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\x00\x05hello"):
            with connect(node.address) as sock:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                told = b""
                while more := sock.recv(4096):
                    told += more
            assert told == b"" or (told[0] == 21 and len(told) == 7), told  # one TLS alert


def test_who_never_ends_the_handshake_is_closed() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node, connect(node.address) as sock:
        began = time.monotonic()
        sock.sendall(b"\x16\x03\x01\x02")  # the beginning of a record
        assert sock.recv(1) == b""
        assert 4 < time.monotonic() - began < 9


# ---- on the way


class Wire:
    """A way to `to`, one connection after the other, that keeps what goes up and may spoil what goes over it."""

    def __init__(self, to: str) -> None:
        self.to = to
        self.up: list[bytes] = []  # of each connection that is over
        self.count = 0
        self.answered = threading.Event()  # something came down
        # Gets what comes, and whether it goes up; returns what goes on.
        self.spoil: Callable[[bool, bytes], bytes] = lambda _up, data: data
        self._cut = False
        self._open: list[socket.socket] = []

    def cut(self) -> None:
        """Ends what is open, and what is opened from now on."""
        self._cut = True
        self._end()

    def spoil_next(self, upwards: bool) -> threading.Event:
        """Flips a bit of what goes that way next; then the event is set."""
        spoilt = threading.Event()

        def spoil(up: bool, data: bytes) -> bytes:
            if up != upwards or spoilt.is_set():
                return data
            spoilt.set()
            return data[:-1] + bytes([data[-1] ^ 1])  # of the tag

        self.spoil = spoil
        return spoilt

    def cut_next(self, upwards: bool) -> threading.Event:
        """Ends the connection in the middle of what goes that way next; then the event is set."""
        cut = threading.Event()

        def spoil(up: bool, data: bytes) -> bytes:
            if up != upwards or cut.is_set():
                return data
            cut.set()
            return data[: len(data) // 2]

        self.spoil = spoil
        return cut

    def mend(self) -> None:
        self._cut = False

    def _end(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __call__(self, sock: socket.socket) -> None:
        if self._cut:
            return
        self.count += 1
        up: list[bytes] = []
        with connect(self.to) as other:
            self._open = [sock, other]

            def pass_on(source: socket.socket, sink: socket.socket, upwards: bool) -> None:
                with suppress(OSError):
                    source.settimeout(None)
                    while data := source.recv(65536):
                        if upwards:
                            up.append(data)
                        left = self.spoil(upwards, data)
                        sink.sendall(left)
                        if len(left) < len(data):
                            break
                        if not upwards:
                            self.answered.set()
                self._end()

            back = threading.Thread(target=pass_on, args=(other, sock, False), daemon=True)
            back.start()
            pass_on(sock, other, True)
            back.join(10)
        self.up.append(b"".join(up))


def test_spoilt_records_end_that_connection_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PCCL_HEARTBEAT_INTERVAL", "0.1")
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        wire = Wire(node.address)
        with served(wire) as way, pccl.Communicator(way, secret=SECRET) as comm:
            ways = [
                (spoil, up) for spoil in (wire.spoil_next, wire.cut_next) for up in (True, False)
            ]
            for broken, (spoil, upwards) in enumerate([*ways, *ways], 1):
                assert spoil(upwards).wait(10)  # a heartbeat
                for _ in range(2):  # asks the master, on the next connection
                    comm.update_topology(timeout=10)
                assert wire.count == broken + 1


def test_a_member_that_is_back_at_the_master_hears_of_newcomers_that_came_meanwhile() -> None:
    with pccl.MasterNode("127.0.0.1:0") as node:
        wire, newcomers = Wire(node.address), Wire(node.address)
        with served(wire) as way, served(newcomers) as other_way, pccl.Communicator(way) as comm:
            wire.cut()
            with closing(pccl.Communicator(other_way)) as other:
                joining = threading.Thread(target=other.connect, daemon=True)
                joining.start()
                assert newcomers.answered.wait(10)  # the master knows it, and told the members
                wire.mend()
                deadline = time.monotonic() + 30
                while comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < 2:
                    assert time.monotonic() < deadline
                    comm.update_topology(timeout=30)
                joining.join(30)


@needs_openssl
def test_a_replayed_connection_is_no_peer() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        wire = Wire(node.address)
        with served(wire) as way, pccl.Communicator(way, secret=SECRET):
            pass
        (recorded,) = wire.up
        with connect(node.address) as sock:
            sock.sendall(recorded)
            told = b""
            while more := sock.recv(65536):
                told += more
        # A new ServerHello, with other keys: what follows it is a bad record to the master.
        with pccl.Communicator(node.address, secret=SECRET) as comm:
            assert comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) == 1


# ---- links


@needs_openssl
@pytest.mark.parametrize(
    "options",
    [
        {"certificate": True},
        {"certificate": True, "key": b"k" * 32, "identity": b"pccl link"},
        {"key": tlspeer.control_key(SECRET), "identity": b"pccl link"},
        {"key": tlspeer.link_key(SECRET, 1, bytes(16)), "identity": b"pccl link"},
    ],
    ids=["certificate", "both", "control-key", "of-another-run"],
)
def test_an_impostor_where_a_peer_should_listen_gets_nothing(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = []

    def serve(sock: socket.socket) -> None:
        end = tlspeer.End(sock, client=False, **options)  # type: ignore[arg-type]
        got.append((end.shake(), end.read()))
        end.free()

    # At the address that others try first; the peer itself is at another one, same port.
    monkeypatch.setenv("PCCL_BIND", "127.0.0.2")
    monkeypatch.setenv("PCCL_SHM", "0")
    with served(serve) as impostor, pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        monkeypatch.setenv("PCCL_PORT", impostor.rpartition(":")[2])
        with pccl.Communicator(node.address, secret=SECRET) as old:
            monkeypatch.delenv("PCCL_PORT")
            with closing(pccl.Communicator(node.address, secret=SECRET)) as new:
                joining = threading.Thread(target=new.connect, daemon=True)
                joining.start()
                until = time.monotonic() + 60
                while old.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < 2:
                    assert time.monotonic() < until
                    old.update_topology(timeout=60)
                joining.join(60)
                results = each([old, new], lambda rank, comm: pccl.allreduce(rank + 1, comm=comm))
                assert results == [3, 3]
    assert got and set(got) == {(False, b"")}


def run_id(address: str) -> int:
    with connect(address) as sock:
        return tlspeer.run_id(sock, SECRET)


def listening_port(before: set[int]) -> int:
    """The one port that this process listens on now and did not before."""
    (port,) = listening() - before
    return port


def listening() -> set[int]:
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    rows += [row.split() for row in Path("/proc/self/net/tcp6").read_text().splitlines()[1:]]
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:
            continue
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in own
    }


@needs_openssl
def test_a_link_takes_the_key_of_this_run_and_this_peer_alone() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        before = listening()
        with pccl.Communicator(node.address, secret=SECRET) as comm:
            assert comm._engine is not None
            me = bytes.fromhex(comm._engine.peer_id())
            port = listening_port(before)
            run = run_id(node.address)
            somebody = bytes(range(16))
            right = tlspeer.link_key(SECRET, run, me)
            for key, identity, lets_in in (
                (right, b"pccl link", True),
                (right, b"pccl control", False),
                (tlspeer.control_key(SECRET), b"pccl link", False),
                (tlspeer.control_key(SECRET), b"pccl control", False),
                (tlspeer.link_key(SECRET, run ^ 1, me), b"pccl link", False),  # another run's
                (tlspeer.link_key(SECRET, run, somebody), b"pccl link", False),  # reflected
                (tlspeer.link_key(OTHER, run, me), b"pccl link", False),
            ):
                with connect(f"127.0.0.1:{port}") as sock:
                    end = tlspeer.End(sock, client=True, key=key, identity=identity)
                    assert end.shake() == lets_in
                    end.free()


def test_who_is_on_this_host_gets_no_memory_without_proof() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        with pccl.Communicator(node.address, secret=SECRET) as comm:
            assert comm._engine is not None
            me = comm._engine.peer_id()
            challenges = set()
            for kind in (0, 1, 2, 3, 4, 5):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                    sock.settimeout(10)
                    sock.connect(f"\0pccl-{me}")
                    challenge = sock.recv(256)
                    challenges.add(challenge[72:])
                    # What it says of itself is all right; it proves nothing.
                    sock.send(
                        challenge[:6]
                        + struct.pack("<HQQQQ", kind, 0, 7, 0, 0)
                        + bytes(range(16))
                        + bytes.fromhex(me)
                        + bytes(16)
                    )
                    data, passed, _, _ = sock.recvmsg(256, socket.CMSG_SPACE(64))
                    assert (data, passed) == (b"", [])
            assert len(challenges) == 6


# ---- runs


LOOP = """
start(min_peers=3)
say(event="in")
for step in range(40):
    pccl.admit()
    mine = x(150_000)
    total, info = pccl.allreduce(mine, return_info=True)
    assert (total == expected(info)).all(), "wrong sum"
    if step == 20 and KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
state = pccl.sync({"w": x(300_000)})
say(event="done", size=info.world_size, w=int(state["w"][7]))
hear()
"""


@pytest.mark.parametrize("shm", ["0", "1"])
def test_a_run_with_a_secret_reduces_syncs_and_survives_kills(shm: str) -> None:
    # Keys change all the while.
    with running(PCCL_SHM=shm, PCCL_KEY_UPDATE_RECORDS="20", PCCL_SECRET=SECRET) as run:
        stay = [run.peer("KILLED = False\n" + LOOP) for _ in range(2)]
        run.peer("KILLED = True\n" + LOOP)
        for peer in stay:
            peer.expect("in")
        told = [peer.expect("done") for peer in stay]
        assert [one["size"] for one in told] == [2, 2]
        assert told[0]["w"] == told[1]["w"]
        for peer in stay:
            assert not complaints(peer.stderr(), news=False), peer.stderr()


@needs_openssl
def test_keys_are_changed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_KEY_UPDATE_RECORDS", "1")
    monkeypatch.setenv("PCCL_HEARTBEAT_INTERVAL", "0.1")
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node, connect(node.address) as sock:
        end = tlspeer.End(sock, client=True, key=tlspeer.control_key(SECRET))
        assert end.shake() and end.write(JOIN)
        while [kind for ours, kind in end.messages if not ours].count(tlspeer.KEY_UPDATE) < 3:
            assert end.read()
        end.free()


def test_between_hosts_connections_stand_in_for_each_other_as_without_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Several connections a link, of arrays that need many records; every byte is compared.
    monkeypatch.setenv("PCCL_SHM", "0")
    monkeypatch.setenv("PCCL_STRIPES", "4")
    monkeypatch.setenv("PCCL_KEY_UPDATE_RECORDS", "7")
    with members(3, secret=SECRET) as comms:
        for count in (1, 1000, 1_000_003):
            data = [np.arange(count, dtype=np.float32) * (rank + 1) for rank in range(3)]
            results = each(comms, lambda rank, comm, d=data: pccl.allreduce(d[rank], comm=comm))
            for result in results:
                np.testing.assert_array_equal(result, data[0] * 6)


# ---- the command line, and what is said where


def test_the_line_that_a_master_prints_is_all_that_a_peer_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pccl", "master", "--listen", "127.0.0.1:0"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PCCL_SECRET")}
    for extra in ([], ["--secret-file", str(tmp_path / "made")]):
        process = subprocess.Popen(
            [*command, *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=env | {"PCCL_LOG_LEVEL": "TRACE"},
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("listening on 127.0.0.1:")
            line = process.stdout.readline().split()
            assert line[:2] == ["join", "with:"]
            given = dict(word.split("=", 1) for word in line[2:] if "=" in word)
            done = subprocess.run(
                [sys.executable, "-c", "import pccl; pccl.init(); print(pccl.world_size())"],
                env=env | given | {"PCCL_LOG_LEVEL": "TRACE"},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.stdout == "1\n", done.stderr
            secret = given.get("PCCL_SECRET") or (tmp_path / "made").read_text().strip()
            arguments = Path(f"/proc/{process.pid}/cmdline").read_text()
            process.terminate()
            _, said = process.communicate(timeout=30)
            for text in (arguments, said, done.stderr):
                assert secret not in text
        finally:
            process.kill()
            process.communicate()
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600


def test_a_secret_file_is_the_same_to_masters_and_peers(tmp_path: Path) -> None:
    # No UTF-8, and a line end that reading as text would change.
    file = tmp_path / "secret"
    file.write_bytes(b" \xff\xfe\r\n" + bytes(range(128, 160)) + b"\r\n0123\r\n ")
    command = [sys.executable, "-m", "pccl", "master", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--secret-file", str(file)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        at = process.stdout.readline().removeprefix("listening on ").strip()
        code = "import pccl; pccl.init(); print(pccl.world_size())"
        done = in_the_environment(
            [sys.executable, "-c", code], tmp_path, PCCL_MASTER=at, PCCL_SECRET_FILE=str(file)
        )
        assert done.stdout == "1\n", done.stderr
    finally:
        process.kill()
        process.communicate()


def test_a_secret_file_that_cannot_be_made_or_read_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pccl", "master", "--listen", "127.0.0.1:0", "--secret-file"]
    (tmp_path / "short").write_text("short")
    for path, words in (
        (tmp_path / "no" / "secret", "cannot make .*no/secret: No such file"),
        (tmp_path, f"cannot read {tmp_path}: Is a directory"),
        (tmp_path / "short", "secret in .*short is too short: 5 bytes"),
    ):
        done = in_the_environment([*command, str(path)], tmp_path)
        assert done.returncode == 1 and done.stdout == ""
        assert re.search(words, done.stderr) and done.stderr.count("\n") == 1, done.stderr


def test_a_master_without_a_secret_warns_beyond_loopback(tmp_path: Path) -> None:
    for listen, warns in (("127.0.0.1:0", False), ("0.0.0.0:0", True)):
        code = f"import pccl\nwith pccl.MasterNode('{listen}'): pass"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0
        assert ("no secret" in done.stderr) == warns
        assert done.stderr.count("\n") == int(warns)


def test_insecure_and_a_secret_at_once_are_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pccl", "master", "--insecure", "--listen", "127.0.0.1:0"],
        env=os.environ | {"PCCL_SECRET": SECRET},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "PCCL_SECRET is set" in done.stderr
    assert SECRET not in done.stderr


def test_ranks_of_pccl_run_have_a_secret_of_their_own(tmp_path: Path) -> None:
    code = "import os, pccl; pccl.init(); print(len(os.environ['PCCL_SECRET']), pccl.allreduce(1))"
    done = subprocess.run(
        [sys.executable, "-m", "pccl", "run", "-n", "2", "--", sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(done.stdout.split("\n")) == ["", "[0] 43 2", "[1] 43 2"], done.stderr
