"""A thief between peers and a relaying master: with a secret, stolen tokens are of no use."""

from __future__ import annotations

import contextlib
import functools
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import namespaces
import nat
import pytest
import tlspeer
from attackers import Recorder, connect
from programs import attacked
from reports import OPEN_RELAY, PUT_THROUGH, control
from workers import Worker

from pccl import _testing

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(nat.why_not() is not None, reason=str(nat.why_not())),
]

SECRET = "a secret of these tests, and of no other run"
OTHER = "the secret of another run, which is no better"
SETTINGS = {
    "PCCL_HEARTBEAT_INTERVAL": "0.3",
    "PCCL_HEARTBEAT_TIMEOUT": "60",  # nobody is put out while tokens are stolen
    "PCCL_LINK_TIMEOUT": "1.5",
}
ASKS_FOR_RELAY = control(OPEN_RELAY)[:6]  # up to its type
THROUGH = control(PUT_THROUGH)
ALERT, HANDSHAKE, APPLICATION_DATA = 21, 22, 23


class Thief(Recorder):
    """Passes connections to the master on, but uses the tokens in them itself."""

    def __init__(self, master: tuple[str, int], host: namespaces.Host) -> None:
        super().__init__(master, functools.partial(namespaces.inside, host))
        self.steals_from = ""  # connections from that address
        self.stolen: queue.Queue[socket.socket] = queue.Queue()  # put through to the other peer
        self._relayed: list[socket.socket] = []

    def _begin(self, here: socket.socket, first: bytes = b"") -> None:
        threading.Thread(target=self._look, args=(here,), daemon=True).start()

    def _look(self, here: socket.socket) -> None:
        with contextlib.suppress(OSError):
            first = here.recv(1 << 16)
            if not first.startswith(ASKS_FOR_RELAY):
                return super()._begin(here, first)
            if here.getpeername()[0] != self.steals_from:
                self._relayed.append(here)
                return super()._begin(here, first)
            with here:
                self._use(first)

    def dials(self) -> socket.socket:
        return self._at(lambda: connect(self._master))

    def _use(self, first: bytes) -> None:
        there = self.dials()
        there.sendall(first)
        heard = b""
        while len(heard) < len(THROUGH) and (more := there.recv(len(THROUGH) - len(heard))):
            heard += more
        if heard == THROUGH:
            self.stolen.put(there)
        else:
            there.close()  # the other end has not come in time

    def cut(self) -> None:
        """Breaks all relayed connections."""
        for relayed in self._relayed:
            with contextlib.suppress(OSError):
                relayed.shutdown(socket.SHUT_RDWR)
        self._relayed.clear()


@contextlib.contextmanager
def two_through_a_thief(**env: str) -> Iterator[tuple[Thief, list[Worker]]]:
    """Peers behind NATs 0 and 1, which reach the master and each other through the thief."""
    with (
        nat.hosts([0, 1, None]) as hosts,
        namespaces.running_on(hosts[-1], **SETTINGS, **env) as run,
    ):
        host, _, port = run.address.rpartition(":")
        thief = Thief((host, int(port)), hosts[-1])
        way = {"PCCL_MASTER": thief.address, "PCCL_MIN_PEERS": "2"}
        try:
            yield thief, [run.peer(attacked.reduce_as_told, peer, **way) for peer in hosts[:2]]
        finally:
            thief.close()


def reduced(workers: list[Worker]) -> None:
    for worker in workers:
        answer = worker.expect("reduced", 60)
        assert answer["right"] and answer["relayed"] == [[0, 1]], answer


def words(peer: socket.socket) -> bytes:
    """All that the peer says until it closes the connection, which it must."""
    peer.settimeout(20)
    said = b""
    with contextlib.suppress(ConnectionError):
        while more := peer.recv(1 << 16):
            said += more
    return said


def records(said: bytes) -> list[int]:
    """The types of the TLS records."""
    types = []
    while said:
        types.append(said[0])
        said = said[5 + int.from_bytes(said[3:5], "big") :]
    return types


Attack = Callable[[socket.socket], None]


def speaks_in_the_clear(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.sendall(_testing.link_sample() * 10)
    assert set(records(words(peer))) <= {HANDSHAKE, ALERT}


def sends_it_back(peer: socket.socket) -> None:
    peer.settimeout(20)
    said = b""
    with contextlib.suppress(ConnectionError):
        while more := peer.recv(1 << 16):
            said += more
            with contextlib.suppress(OSError):
                peer.sendall(more)
    assert set(records(said)) <= {HANDSHAKE, ALERT}


def shakes(client: bool, key: bytes | None, right: bool = False) -> Attack:
    """Without a key: with a certificate. `right`: it is let in."""

    def attack(peer: socket.socket) -> None:
        about = {"identity": b"pccl link", "certificate": key is None}
        end = tlspeer.End(peer, client=client, key=key, **about)
        try:
            assert end.shake() == right
            assert right or end.read() == b""
        finally:
            end.free()

    return attack


@pytest.mark.skipif(not tlspeer.available, reason="libssl is not found by ctypes")
def test_a_stolen_token_without_the_secret_ends_in_the_handshake() -> None:
    with two_through_a_thief(PCCL_SECRET=SECRET) as (thief, workers):
        joined = [worker.expect("in", 60) for worker in workers]
        ranks = [each["rank"] for each in joined]
        with thief.dials() as sock:
            run = tlspeer.run_id(sock, SECRET)
        # The newer one of the two says hello, and is the client.
        listener = bytes.fromhex(joined[ranks.index(0)]["peer"])
        key, wrong = (tlspeer.link_key(secret, run, listener) for secret in (SECRET, OTHER))
        dialled = [speaks_in_the_clear, sends_it_back]
        dialled += [shakes(False, wrong), shakes(False, None), shakes(False, key, right=True)]
        dialling = [speaks_in_the_clear, shakes(True, wrong), shakes(True, key, right=True)]
        for worker in workers:
            worker.tell(1000)
        reduced(workers)
        older = nat.address_of_nat(ranks.index(0))
        newer = nat.address_of_nat(ranks.index(1))
        thief.steals_from = older
        thief.cut()
        for worker in workers:
            worker.tell(200_000)  # they are in it while others come in each other's place
        for owner, attacks in ((older, dialled), (newer, dialling)):
            thief.steals_from = owner
            for attack in attacks:
                while not thief.stolen.empty():
                    thief.stolen.get().close()  # its other end may have given up
                with thief.stolen.get(timeout=30) as peer:
                    attack(peer)
        thief.steals_from = ""
        reduced(workers)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "with a secret"])
def test_what_the_master_relays_is_ciphertext_where_there_is_a_secret(secret: str | None) -> None:
    with two_through_a_thief(**({"PCCL_SECRET": secret} if secret else {})) as (thief, workers):
        patterns = [worker.expect("in", 60)["pattern"] for worker in workers]
        for worker in workers:
            worker.tell(100_000)
        reduced(workers)
        relayed = [bytes(said) for said in thief.streams if said.startswith(ASKS_FOR_RELAY)]
        others = [bytes(said) for said in thief.streams if not said.startswith(ASKS_FOR_RELAY)]
    assert sum(map(len, relayed)) > 2 * 8 * 50_000  # each sends half of its array, and of the sum
    elements = [struct.pack("<4q", *[number] * 4) for number in (*patterns, sum(patterns))]
    for pattern in elements:
        assert any(pattern in said for said in relayed) == (secret is None)
        assert not any(pattern in said for said in others)
    for said in relayed if secret else []:
        token = said[len(THROUGH) : len(THROUGH) + 16]
        assert said.startswith(ASKS_FOR_RELAY) and len(token) == 16
        # The rest is TLS, except for bytes that were on their way at its end.
        assert said[len(THROUGH) + 16] in (HANDSHAKE, APPLICATION_DATA)
