"""A run in training, the memory of its processes, and connections that misbehave."""

from __future__ import annotations

import contextlib
import functools
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import tlspeer
from programs import attacked
from reports import JOIN, control
from workers import LISTENING, Run, Worker, eventually, running, sockets

from pccl import _testing

SECRET = "correct horse battery staple, and then some more"

# A process in an attacked run takes at most this much more than before: 64 MiB for unidentified
# connections, 64 MiB for newcomers, and room for what the allocator keeps.
MEMORY_BOUND_MIB = 256


Address = tuple[str, int]


def memory_mib(pid: int, field: str = "VmHWM") -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {field} of {pid}")


def listening_port(pid: int) -> int:
    """The one TCP port that the process listens at."""
    (port,) = set(sockets(pid, LISTENING))
    return port


class Training:
    """A master and two peers that reduce over TCP, and their memory before the attacks."""

    def __init__(
        self, run: Run, envs: Sequence[dict[str, str]] = ({}, {}), secret: str | None = None
    ) -> None:
        self.run = run
        self.secret = secret
        self.peers = [run.peer(partial(attacked.train, 2), **env) for env in envs]
        self.ids = [peer.expect("in")["peer"] for peer in self.peers]
        for peer in self.peers:
            peer.expect("training")
        host, port = run.address.rsplit(":", 1)
        self.master: Address = (host, int(port))
        self.peer: Address = (
            envs[0].get("PCCL_BIND", "127.0.0.1"),
            listening_port(self.peers[0].pid),
        )
        self.ports = [self.master, self.peer]
        self.before = {worker.pid: memory_mib(worker.pid) for worker in self.processes()}

    def processes(self) -> list[Worker]:
        return [self.run.master, *self.peers]

    @functools.cached_property
    def run_id(self) -> int:
        """As the master tells who joins."""
        with contextlib.closing(self.insider(self.master)) as one:
            assert one.write(join(1))
            return int(struct.unpack_from("<Q", one.read(), 16)[0])

    def insider(self, at: Address, peer: str = "") -> Insider:
        """A connection with the secret, if there is one, to the master or to `peer`, an id."""
        if self.secret is None:
            return Insider(at, None, b"")
        if not tlspeer.available:
            pytest.skip("libssl is not found by ctypes")
        if not peer:
            return Insider(at, tlspeer.control_key(self.secret), b"pccl control")
        key = tlspeer.link_key(self.secret, self.run_id, bytes.fromhex(peer))
        return Insider(at, key, b"pccl link")

    def steps(self) -> int:
        self.peers[0].tell("count")
        return int(self.peers[0].expect("steps")["steps"])

    def goes_on(self) -> None:
        """The run makes steps, all processes live, all sums are right, and memory is bounded."""
        before = self.steps()
        eventually(
            lambda: self.steps() >= before + 3, seconds=60, said=lambda: "the run has stopped"
        )
        for worker in self.processes():
            assert worker.process.poll() is None, worker.stderr()
            more = memory_mib(worker.pid) - self.before[worker.pid]
            assert more < MEMORY_BOUND_MIB, f"{more:.0f} MiB more than before"

    def ends(self) -> None:
        self.peers[0].tell("stop")
        for peer in self.peers:
            # Nobody was lost on the way.
            assert peer.expect("done", 60)["size"] == 2
            assert "wrong" not in peer.stderr()


@contextlib.contextmanager
def training(
    secret: bool,
    open_files: int | None = None,
    peers: Sequence[dict[str, str]] = ({}, {}),
    **env: str,
) -> Iterator[Training]:
    """`open_files`: of the master. `peers`: what each has in its environment beside `env`."""
    env["PCCL_SHM"] = "0"
    if secret:
        env["PCCL_SECRET"] = SECRET
    with running(open_files, **env) as run:
        world = Training(run, peers, SECRET if secret else None)
        yield world
        world.goes_on()
        world.ends()


@contextlib.contextmanager
def many_descriptors(wanted: int) -> Iterator[int]:
    """How many this process may have inside; of those `wanted` as many as it is given."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    given = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, given), hard))
    try:
        yield max(soft, given)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=20)


class Insider:
    """A connection that passed the TLS handshake, if there is a secret, and then sends anything."""

    def __init__(self, address: Address, key: bytes | None, identity: bytes) -> None:
        self.sock = connect(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end: tlspeer.End | None = None
        if key is not None:
            self._end = tlspeer.End(self.sock, client=True, key=key, identity=identity)
            assert self._end.shake()

    def write(self, data: bytes) -> bool:
        """Whether all of it could be sent."""
        if self._end is not None:
            return self._end.write(data)
        try:
            self.sock.sendall(data)
        except OSError:
            return False
        return True

    def read(self) -> bytes:
        """Returns what has come. Empty at the end."""
        if self._end is not None:
            return self._end.read()
        try:
            return self.sock.recv(1 << 16)
        except ConnectionError:
            return b""

    def read_all(self) -> bytes:
        """Until the other end closes."""
        told = b""
        while more := self.read():
            told += more
        return told

    def close(self) -> None:
        if self._end is not None:
            self._end.free()
        self.sock.close()


def send(address: Address, data: bytes) -> bytes:
    """Sends it, and returns what comes back until the other end closes; fails when it does not."""
    with connect(address) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while more := stranger.recv(1 << 16):
                answer += more
        return answer


def here(make: Callable[[], socket.socket]) -> socket.socket:
    return make()


class Recorder:
    """Listens in front of the master, passes everything on, and keeps what peers have said.

    `at`: makes its sockets (namespaces.inside). It listens at another port of the master's host.
    """

    def __init__(
        self,
        master: Address,
        at: Callable[[Callable[[], socket.socket]], socket.socket] = here,
    ) -> None:
        self._master = master
        self._at = at
        self._listener = at(lambda: socket.create_server((master[0], 0)))
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self.streams: list[bytearray] = []
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._begin(self._listener.accept()[0])

    def _begin(self, here: socket.socket, first: bytes = b"") -> None:
        there = self._at(lambda: connect(self._master))
        there.settimeout(None)
        there.sendall(first)
        said = bytearray(first)
        self.streams.append(said)
        self._sockets += [here, there]
        for pair in ((here, there, said), (there, here, bytearray())):
            threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, to: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                to.sendall(data)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Flooder(Recorder):
    """Passes on what one peer says, and in the end says a message in its name, over and over."""

    def __init__(self, master: Address, message: bytes) -> None:
        self._message = message
        self._due = threading.Event()
        self._ended = threading.Event()
        super().__init__(master)

    def floods(self) -> None:
        """Until the master has enough."""
        self._due.set()
        assert self._ended.wait(60), "the master takes it"

    def _begin(self, here: socket.socket, first: bytes = b"") -> None:
        there = self._at(lambda: connect(self._master))
        there.settimeout(None)
        self._sockets += [here, there]
        back = (there, here, bytearray())
        threading.Thread(target=self._up, args=(here, there), daemon=True).start()
        threading.Thread(target=self._pass_on, args=back, daemon=True).start()

    def _up(self, here: socket.socket, there: socket.socket) -> None:
        said = b""
        with contextlib.suppress(OSError):
            while data := here.recv(1 << 16):
                said += data
                # Whole messages, so that there is a place between two.
                while len(said) >= 32 and len(said) >= (
                    size := 32 + int(struct.unpack_from("<I", said, 8)[0])
                ):
                    there.sendall(said[:size])
                    said = said[size:]
                while self._due.is_set() and not said:
                    there.sendall(self._message * 1000)
        if self._due.is_set():
            self._ended.set()


class Spoiler:
    """Listens at the loopback address that others try first, at the port of a peer behind it."""

    PEER = "127.0.0.2"

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.flipped = threading.Event()
        self.ended = threading.Event()  # the connection that was spoilt
        self._due: bool | None = None
        self._cuts = False
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def flip(self, upwards: bool) -> None:
        """A bit of what goes that way next."""
        self._begin(upwards, cuts=False)

    def cut(self, upwards: bool) -> None:
        """Ends the connection in the middle of what goes that way next."""
        self._begin(upwards, cuts=True)

    def _begin(self, upwards: bool, cuts: bool) -> None:
        self.flipped.clear()
        self.ended.clear()
        self._cuts = cuts
        self._due = upwards

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = connect((self.PEER, self.port))
                there.settimeout(None)
                self._sockets += [here, there]
                spoilt = threading.Event()
                for pair in ((here, there, True, spoilt), (there, here, False, spoilt)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(
        self, source: socket.socket, to: socket.socket, upwards: bool, spoilt: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._due is upwards:
                    self._due = None
                    middle = len(data) // 2
                    spoilt.set()
                    self.flipped.set()
                    if self._cuts:
                        to.sendall(data[:middle])
                        break
                    data = data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]
                to.sendall(data)
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if spoilt.is_set():
            self.ended.set()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def join(number: int, group: int = 1000) -> bytes:
    """A Join of a newcomer that does not ask to be let in."""
    sample = _testing.control_sample("join")[32:]
    start = b"\xee" * 8 + struct.pack("<Q", number) + struct.pack("<IIBB", group, 1, 0, 0)
    return control(JOIN, start + sample[len(start) :])


def frame(
    seal: Callable[[bytes], bytes],
    kind: int,
    payload: bytes,
    length: int,
    *,
    final: int = 0,
    key: bytes = bytes(25),
    attempt: int = 0,
    segment: int = 0,
) -> bytes:
    """A link frame that says `length`. `seal` fills the sum of its header."""
    header = struct.pack(
        "<IBBBBII", 0x31464350, kind, final, 0, _testing.PROTOCOL_VERSION, length, 0
    )
    header += key + struct.pack("<QIIQ", attempt, segment, 0, 0) + bytes(3) + bytes(4)
    return seal(header) + payload


def greeting(run: int, sender: str, to: str, generation: int) -> bytes:
    """The first message of a peer on a connection to another one."""
    said = struct.pack("<Q", run) + bytes.fromhex(sender) + bytes.fromhex(to)
    said += struct.pack("<QIBBI", generation, 0, 1, 0, 1000)
    return frame(_testing.link_seal, 0, said, len(said))
