"""An address at which a test answers as one of several masters."""

from __future__ import annotations

import socket

from liars import exactly, header
from reports import JOIN, MAY_FOUND, NOT_SERVING, WELCOME, control, text, u32, u64


class Pretended:
    """Serves one connection after the other. `masters`: how many there are, with this one."""

    def __init__(self, masters: int) -> None:
        self.masters = masters
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(60)
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._peer: socket.socket

    def joined(self) -> tuple[bool, int]:
        """A newcomer comes: whether it may found a run, and the run that it names."""
        self._peer = self._listener.accept()[0]
        self._peer.settimeout(60)
        may_found = False
        while True:
            _, kind, length, _, run, _ = header(self._peer)
            exactly(self._peer, length)
            if kind == JOIN:
                return may_found, run
            may_found = may_found or kind == MAY_FOUND

    def welcome(self, term: int, run: int) -> None:
        """The newcomer waits here for another one."""
        payload = u64(1) + b"\0" + u32(1) + text("") + u32(self.masters)
        self._peer.sendall(control(WELCOME, payload, term=term, run=run))

    def dismiss(self, recovers: bool) -> None:
        """It goes on to the next master. `recovers`: this one may serve soon."""
        self._peer.sendall(control(NOT_SERVING, bytes([recovers])))
        self._peer.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        self._peer.close()
