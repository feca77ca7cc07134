"""An address at which a test answers as one of several masters."""

from __future__ import annotations

import socket

from liars import exactly, header
from reports import (
    ACCEPT,
    ASK_PROMISE,
    JOIN,
    LOG,
    MAY_FOUND,
    NOT_SERVING,
    PROMISE,
    PROPOSE,
    REFUSED,
    REJOIN,
    WELCOME,
    control,
    listed,
    record,
    text,
    u32,
    u64,
)

EVICTED = 15  # the number of that code


class Pretended:
    """Serves one connection after the other. `masters`: how many there are, with this one."""

    def __init__(self, masters: int) -> None:
        self.masters = masters
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(60)
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._peer: socket.socket
        self._id = b""  # of the newcomer

    def _comes(self) -> None:
        self._peer = self._listener.accept()[0]
        self._peer.settimeout(60)

    def _hears(self, kind: int) -> None:
        """Passes over what comes before."""
        heard = -1
        while heard != kind:
            _, heard, length, *_ = header(self._peer)
            exactly(self._peer, length)

    def joined(self) -> tuple[bool, int]:
        """A newcomer comes: whether it may found a run, and the run that it names."""
        self._comes()
        may_found = False
        while True:
            _, kind, length, _, run, _ = header(self._peer)
            payload = exactly(self._peer, length)
            if kind == JOIN:
                self._id = payload[:16]
                return may_found, run
            may_found = may_found or kind == MAY_FOUND

    def welcome(self, term: int, run: int) -> None:
        """The newcomer waits here for another one."""
        payload = u64(1) + b"\0" + u32(1) + text("") + u32(self.masters)
        self._peer.sendall(control(WELCOME, payload, term=term, run=run))

    def admit(self, term: int, run: int) -> None:
        """The newcomer is the only member of epoch 1."""
        entry = u64(1) + b"\0" + record([self._id])
        self._peer.sendall(control(LOG, listed([entry]), term=term, run=run))

    def propose_nobody(self, term: int, run: int) -> None:
        """The member accepts an epoch without members."""
        entry = u64(2) + b"\0" + record([], epoch=2, gone=[(self._id, "all were frozen")])
        self._peer.sendall(control(PROPOSE, entry, term=term, run=run))
        self._hears(ACCEPT)

    def evict(self, term: int, run: int) -> None:
        """A member comes back, promises to follow this master, and is put out by it."""
        self._comes()
        self._hears(REJOIN)
        self._peer.sendall(control(ASK_PROMISE, term=term, run=run))
        self._hears(PROMISE)
        refused = bytes([EVICTED]) + text("all were frozen")
        self._peer.sendall(control(REFUSED, refused, term=term, run=run))

    def dismiss(self, recovers: bool) -> None:
        """It goes on to the next master. `recovers`: this one may serve soon."""
        self._peer.sendall(control(NOT_SERVING, bytes([recovers])))
        self._peer.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        self._peer.close()
