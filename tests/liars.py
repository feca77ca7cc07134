"""A peer that tells a standby of an epoch that never was, and goes on with it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from reports import (
    ACCEPT,
    ASK_PROMISE,
    HEADER,
    HEARTBEAT,
    JOIN,
    LOG_PART,
    PROMISE,
    PROPOSE,
    REJOIN,
    REQUEST_LOG,
    control,
    heartbeat,
    join,
    listed,
    log_part,
    peer,
    record,
    u32,
    u64,
)

SELF = peer(9)


class Liar:
    """A connection to that master of the run that `served` serves. It lives as long as this."""

    def __init__(self, master: str, served: str, epoch: int) -> None:
        with contextlib.closing(_dial(served)) as newcomer:
            newcomer.sendall(control(JOIN, join(8, waiting=False)))
            *_, self.term, self.run, _ = header(newcomer)
        self.ordinal = epoch
        self.believed = threading.Event()
        self.socket = _dial(master)
        report = SELF + u32(0) + record([SELF], epoch=epoch) + u64(epoch) + SELF
        self.say(REJOIN, report)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def say(self, kind: int, payload: bytes) -> None:
        said = control(kind, payload, term=self.term, run=self.run, ordinal=self.ordinal)
        self.socket.sendall(said)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                kind, length, self.term = header(self.socket)[1:4]
                payload = exactly(self.socket, length)
                if kind == ASK_PROMISE:
                    self.say(PROMISE, listed([]))
                elif kind == REQUEST_LOG:
                    self.say(LOG_PART, log_part([], last=True))
                elif kind == PROPOSE:
                    self.ordinal = struct.unpack_from("<Q", payload)[0]
                    self.say(ACCEPT, u64(self.ordinal))
                    self.believed.set()
                elif kind == HEARTBEAT:
                    self.say(HEARTBEAT, heartbeat())

    def alive(self) -> bool:
        """Whether the master still serves it."""
        return self._thread.is_alive()

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.socket.close()


def _dial(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 60)


def exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def header(source: socket.socket) -> tuple[int, ...]:
    _, version, kind, _, *rest = HEADER.unpack(exactly(source, HEADER.size))
    return version, kind, *rest
