"""A master in this process."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from pccl import _core, _settings, process
from pccl.errors import InvalidArgument, InvalidUsage

__all__ = ["MasterNode"]

_MAX_PEERS = 2**31 - 1
_MAX_MASTERS = 16
_DEPARTURE_SECONDS = 2.0  # the others agree on a departure within milliseconds
_INTERRUPT_SECONDS = 5.0  # a master that was told to stop has closed its port long before


class MasterNode:
    """A master in this process, on a thread of the engine's.

    While it runs, the process stays alive after the program has ended, until Ctrl-C (or SIGTERM).
    `with` runs it and interrupts it.

    Args:
        listen_address: "host:port" to listen on; port 0 takes a free one, see `address`.
        secret: The run's secret, as of `Communicator`. Without one anybody who reaches it may join:
            there is a warning when that is more than this machine.
        min_peers: Number of peers (of replicas, if there are any) with which a group starts,
            whatever the peers ask for. It does not apply to groups that pccl makes by itself, such
            as those of torch.distributed, whose numbers begin at 2^31.
        place: With several masters: this one's index in the list of all, and how many there are.
            The list is the same for all masters and peers, the preferred one first.

    Raises:
        InvalidArgument: The address or the secret makes no sense.
    """

    def __init__(
        self,
        listen_address: str,
        *,
        secret: str | bytes | _core.Secret | None = None,
        min_peers: int = 1,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        if not _settings.is_text(listen_address) or not listen_address:
            written = _settings.shown(listen_address)
            sentence = f"listen_address must be 'host:port', not {written}"
            raise InvalidArgument.because("MasterNode", sentence)
        self._secret = _settings.secret(secret, "MasterNode")
        self._min_peers = _settings.integer(min_peers, "min_peers", "MasterNode", 1, _MAX_PEERS)
        pair: Any = place
        if not isinstance(pair, Sequence) or len(pair) != 2:
            sentence = f"place must be (index, number of masters), not {place!r}"
            raise InvalidArgument.because("MasterNode", sentence)
        index, masters = pair
        _settings.integer(masters, "place[1]", "MasterNode", 1, _MAX_MASTERS)
        self._place = _settings.integer(index, "place[0]", "MasterNode", 0, masters - 1), masters
        self._listen_address = listen_address
        self._address = listen_address
        self._engine: _core.Master | None = None
        self._fork = process.forks

    @property
    def address(self) -> str:
        """The host:port that is bound; before `run`, the one asked for."""
        return self._address

    def run(self) -> None:
        """Listens and serves; returns at once.

        Raises:
            InvalidUsage: It runs already, or the address cannot be bound.
        """
        if self in process.masters:
            raise InvalidUsage.because("MasterNode.run", "this master runs already")
        index, masters = self._place
        engine = _core.Master(
            self._listen_address, self._secret, self._min_peers, masters=masters, index=index
        )
        engine.run()
        self._engine = engine
        self._address = engine.address()
        self._fork = process.forks
        process.masters.add(self)

    def _started(self, func: str) -> _core.Master:
        if self._engine is None:
            raise InvalidUsage.because(func, "this master was never run")
        if self._fork != process.forks:
            raise InvalidUsage.because(func, "this process was forked; its copy is no master")
        return self._engine

    def status(self) -> dict[str, Any]:
        """The status of the run, as `pccl status --json` prints it. Any thread.

        Raises:
            InvalidUsage: It does not run.
        """
        return self._started("MasterNode.status").status()

    def _see_off(self, peer: _core.Communicator) -> None:
        """Waits until the others know that this peer has left, but not for long."""
        self._started("MasterNode.departed").departed(peer, _DEPARTURE_SECONDS)

    def interrupt(self) -> None:
        """Stops it. When this returns its port is free again. May be called again."""
        engine = self._started("MasterNode.interrupt")
        engine.interrupt()
        engine.wait(_INTERRUPT_SECONDS)
        process.masters.discard(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has stopped. Ctrl-C while waiting stops it.

        Args:
            timeout: Seconds; None waits without end.

        Returns:
            Whether it has stopped.

        Raises:
            InvalidArgument: `timeout` is negative or no number.
            InvalidUsage: It was never run.
        """
        engine = self._started("MasterNode.wait")
        if timeout is not None:
            timeout = _settings.seconds(timeout, "MasterNode.wait")
        try:
            stopped = engine.wait(timeout)
        except KeyboardInterrupt:
            self.interrupt()
            raise
        if stopped:
            process.masters.discard(self)
        return stopped

    def __enter__(self) -> MasterNode:
        self.run()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.interrupt()
