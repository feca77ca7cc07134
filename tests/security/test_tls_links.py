"""Links between peers with a secret, and whole runs with one."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import tlspeer
from members import each, members
from programs import attacked
from tlsruns import JOIN, OTHER, SECRET, connect, impostor, joining, needs_openssl, served
from workers import LISTENING, complaints, running, sockets

import pccl

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
    got: list[tuple[bool, bytes]] = []
    # At the address that others try first; the peer itself is at another one, same port.
    monkeypatch.setenv("PCCL_BIND", "127.0.0.2")
    monkeypatch.setenv("PCCL_SHM", "0")
    with (
        served(impostor(got, **options)) as address,
        pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node,
    ):
        monkeypatch.setenv("PCCL_PORT", address.rpartition(":")[2])
        with pccl.Communicator(node.address, secret=SECRET) as old:
            monkeypatch.delenv("PCCL_PORT")
            with closing(pccl.Communicator(node.address, secret=SECRET)) as new:
                with joining(new, old):
                    pass
                results = each([old, new], lambda rank, comm: pccl.allreduce(rank + 1, comm=comm))
                assert results == [3, 3]
    assert got and set(got) == {(False, b"")}


def run_id(address: str) -> int:
    with connect(address) as sock:
        return tlspeer.run_id(sock, SECRET)


@needs_openssl
def test_a_link_takes_the_key_of_this_run_and_this_peer_alone() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        before = sockets(os.getpid(), LISTENING)
        with pccl.Communicator(node.address, secret=SECRET) as comm:
            assert comm._engine is not None
            me = bytes.fromhex(comm._engine.peer_id())
            (port,) = set(sockets(os.getpid(), LISTENING)) - set(before)
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


@pytest.mark.shared_memory
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
                    # Its name and numbers are right, but it proves nothing.
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


@pytest.mark.parametrize("shm", ["0", "1"])
def test_a_run_with_a_secret_reduces_syncs_and_survives_kills(shm: str) -> None:
    # Keys change all the while.
    with running(PCCL_SHM=shm, PCCL_KEY_UPDATE_RECORDS="20", PCCL_SECRET=SECRET) as run:
        stay = [run.peer(partial(attacked.train_and_sync, killed=False)) for _ in range(2)]
        run.peer(partial(attacked.train_and_sync, killed=True))
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


@pytest.mark.parametrize("cipher", ["aes", "chacha20"])
def test_between_hosts_connections_stand_in_for_each_other_as_without_a_secret(
    monkeypatch: pytest.MonkeyPatch, cipher: str
) -> None:
    # Several connections a link, of arrays that need many records; every byte is compared.
    monkeypatch.setenv("PCCL_SHM", "0")
    monkeypatch.setenv("PCCL_STRIPES", "4")
    monkeypatch.setenv("PCCL_KEY_UPDATE_RECORDS", "7")
    monkeypatch.setenv("PCCL_CIPHER", cipher)
    with members(3, secret=SECRET) as comms:
        for count in (1, 1000, 1_000_003):
            data = [np.arange(count, dtype=np.float32) * (rank + 1) for rank in range(3)]
            results = each(comms, lambda rank, comm, d=data: pccl.allreduce(d[rank], comm=comm))
            for result in results:
                np.testing.assert_array_equal(result, data[0] * 6)
