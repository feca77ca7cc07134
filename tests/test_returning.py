"""Members whose control connection breaks, or whose master is restarted, while calls are open."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from programs import returning
from workers import Run, running

import pccl

CALLS = 9000
FAST = {
    "PCCL_HEARTBEAT_INTERVAL": "0.2",
    "PCCL_HEARTBEAT_TIMEOUT": "6",
    "PCCL_RECONNECT_TIMEOUT": "20",
}


class Middle:
    """Passes on what peers and their master say, until it is told to cut all connections."""

    def __init__(self, master: str) -> None:
        host, _, port = master.rpartition(":")
        self._master = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._master)
                with self._lock:
                    self._sockets += [here, there]
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for end in sockets:
            # A reset, so that nothing that was said before is still read.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


@contextlib.contextmanager
def between(master: str) -> Iterator[Middle]:
    middle = Middle(master)
    try:
        yield middle
    finally:
        middle.close()


def test_a_member_with_many_open_calls_comes_back_to_its_master() -> None:
    with running(**FAST, PCCL_SHM="0") as run, between(run.address) as middle:
        caller = run.peer(
            partial(returning.call_many, CALLS), PCCL_MIN_PEERS="2", PCCL_MASTER=middle.address
        )
        other = run.peer(partial(returning.call_many, CALLS), PCCL_MIN_PEERS="2")
        for peer in (caller, other):
            peer.expect("in")
        caller.tell("go")
        assert caller.expect("called", 60)["open"] == CALLS
        middle.cut()
        other.tell("go")
        other.expect("called", 60)
        for peer in (caller, other):
            peer.expect("done", 120)


@pytest.mark.env(**FAST, PCCL_SHM="0")
def test_members_with_many_open_calls_come_back_to_a_restarted_master(run: Run) -> None:
    caller, other = run.peers(2, partial(returning.call_many, CALLS))
    for peer in (caller, other):
        peer.expect("in")
    caller.tell("go")
    assert caller.expect("called", 60)["open"] == CALLS
    run.master.signal(signal.SIGKILL)
    run.master.ends()
    run.restart_master()
    other.tell("go")
    other.expect("called", 60)
    for peer in (caller, other):
        peer.expect("done", 120)


@pytest.mark.env(**FAST, PCCL_STRAGGLER_TIMEOUT="2", PCCL_MIN_PEERS="2")
def test_a_call_that_started_over_in_memory_is_over_for_the_master_too(run: Run) -> None:
    """It was entered over the network; then the two found out that they share memory."""
    peers = [
        run.peer(returning.call_before_memory_is_found),
        run.peer(returning.call_before_memory_is_found, LATE="1"),
    ]
    for event in ("called", "done"):
        for peer in peers:
            peer.expect(event)
    assert all("waiting for 1 peer in" not in peer.stderr() for peer in peers)


def test_a_loss_that_ended_very_many_calls_is_told_to_a_restarted_master() -> None:
    """The log that the master asks for has it as one entry, longer than a first message may be."""
    count = 43_000
    # Nobody is evicted while one member is stopped.
    patient = {**FAST, "PCCL_HEARTBEAT_TIMEOUT": "90", "PCCL_RECONNECT_TIMEOUT": "90"}
    with running(**patient, PCCL_SHM="0") as run:
        *callers, lost = run.peers(3, partial(returning.call_many_that_a_loss_ends, count))
        for peer in (*callers, lost):
            peer.expect("in")
        for peer in callers:
            peer.tell("go")
            assert peer.expect("called", 120)["open"] == count
        told, late = callers
        late.signal(signal.SIGSTOP)  # so that the entry stays in the other one's log
        lost.signal(signal.SIGKILL)
        lost.ends()
        failed = [int(pccl.Result.RANK_CONNECTION_LOST)]
        assert told.expect("ended", 120)["ends"] == failed
        run.master.signal(signal.SIGKILL)
        run.master.ends()
        run.restart_master()
        late.signal(signal.SIGCONT)
        assert late.expect("ended", 120)["ends"] == failed
        for peer in callers:
            peer.tell("go")
        for peer in callers:
            assert peer.expect("done", 60)["made"] == 2
