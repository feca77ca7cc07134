"""Connections to the master: who gets in, and what an impostor gets.

docs/guide/security.md lists the attacks.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress

import pytest
import tlspeer
from tlsruns import JOIN, OTHER, SECRET, connect, impostor, joining, needs_openssl, refused, served

import pccl
from pccl import _testing

# ---- impostor masters


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
    got: list[tuple[bool, bytes]] = []
    with served(impostor(got, **options)) as address:
        refused(address, SECRET)
    assert got == [(False, b"")]


# ---- impostor peers


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
        {"key": tlspeer.control_key(SECRET), "groups": "P-256"},
    ],
    ids=["none", "wrong", "link", "name", "tls-1.2", "aes-256", "p-256"],
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


AES, CHACHA = "TLS_AES_128_GCM_SHA256", "TLS_CHACHA20_POLY1305_SHA256"


@needs_openssl
@pytest.mark.parametrize(
    ("ours", "theirs", "used"),
    [
        ("aes", f"{AES}:{CHACHA}", AES),
        ("aes", f"{CHACHA}:{AES}", CHACHA),
        ("chacha20", f"{AES}:{CHACHA}", CHACHA),
        ("chacha20", AES, AES),  # an older version of pccl
        ("aes", CHACHA, CHACHA),
    ],
)
def test_chacha20_is_used_where_an_end_prefers_it(
    monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str, used: str
) -> None:
    monkeypatch.setenv("PCCL_CIPHER", ours)
    key = tlspeer.control_key(SECRET)
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node, connect(node.address) as sock:
        end = tlspeer.End(sock, client=True, key=key, suite=theirs)
        assert end.shake() and end.suite() == used
        assert end.write(b"this is no Join " * 4)
        assert end.read()[:4] == b"PCCL"  # Refused
        end.free()

    # As the client, which asks for one of the two.
    suites = []

    def serve(sock: socket.socket) -> None:
        end = tlspeer.End(sock, client=False, key=key, suite=theirs)
        end.shake()
        suites.append(end.suite())
        end.free()

    with served(serve) as address, closing(pccl.Communicator(address, secret=SECRET)) as comm:
        with pytest.raises(pccl.Unreachable):  # the other end leaves
            comm.connect(n_attempts=1)
    # A server of OpenSSL without further options takes the first one of the client.
    offered = [CHACHA, AES] if ours == "chacha20" else [AES, CHACHA]
    assert suites[0] == next(suite for suite in offered if suite in theirs.split(":"))


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
    """Passes one connection after the other on to `to`, keeps what goes up, and may spoil bytes."""

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
                with joining(other, comm):
                    assert newcomers.answered.wait(10)  # the master knows it, and told the members
                    wire.mend()


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
