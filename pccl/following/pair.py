"""A connection between two processes of one run: a group of two."""

from __future__ import annotations

from pccl.communicator import Communicator
from pccl.errors import Refused
from pccl.frameworks import Array

_JOIN_SECONDS = 60.0  # for both ends to come


class Pair:
    """One of its two ends. *one thread* but for `close`

    Args:
        comm: This end, not connected yet.
        func: Names errors.
        timeout: Seconds for each message. Default: PCCL_TIMEOUT, else no limit.
    """

    def __init__(self, comm: Communicator, func: str, *, timeout: float | None = None) -> None:
        self._comm = comm
        self._func = func
        self._timeout = timeout
        self._own = 0

    def join(self, timeout: float | None = _JOIN_SECONDS) -> None:
        """Waits for the other end.

        Raises:
            Refused: Two others are connected already. They let nobody in.
        """
        self._comm._join(self._func, min_peers=2, attempts=5, timeout=timeout, enter=False)
        self._own = self._comm._joined(self._func).membership()[1]
        if self._own < 0:
            raise Refused.because(self._func, "two others have met in this group")

    def send(self, data: Array) -> None:
        self._comm.broadcast(data, root=self._own, timeout=self._timeout)

    def receive(self, data: Array) -> None:
        self._comm.broadcast(data, root=1 - self._own, timeout=self._timeout)

    def close(self) -> None:
        """Ends the other thread's call, if there is one, with an error."""
        self._comm.close()
