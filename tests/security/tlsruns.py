"""Secrets, servers to talk to and refusals, for the tests of secrets and TLS."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import tlspeer

import pccl
from pccl import _testing

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


def impostor(got: list[tuple[bool, bytes]], **options: Any) -> Callable[[socket.socket], None]:
    """Shakes hands as a server with these options. `got`: whether it could, and what it read."""

    def serve(sock: socket.socket) -> None:
        end = tlspeer.End(sock, client=False, **options)
        got.append((end.shake(), end.read()))
        end.free()

    return serve


@contextmanager
def joining(newcomer: pccl.Communicator, member: pccl.Communicator) -> Iterator[None]:
    """The newcomer connects, in a thread; the member lets it in when the body is over."""
    thread = threading.Thread(target=newcomer.connect, daemon=True)
    thread.start()
    yield
    deadline = time.monotonic() + 60
    while member.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < 2:
        assert time.monotonic() < deadline
        member.update_topology(timeout=60)
    thread.join(60)


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
