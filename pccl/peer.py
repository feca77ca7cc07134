"""One peer's part in a run: joining and leaving it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from pccl import _core, _masters, _settings, process
from pccl._changes import Changes
from pccl.errors import InvalidArgument, InvalidUsage, PCCLError
from pccl.master_node import MasterNode
from pccl.reduce.residuals import Residuals

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_GROUP = _core.OWN_GROUPS - 1
_MAX_STRIPES = 255
_MAX_REPLICA_NAME = 256
_MAX_RANKS = 4096
MOST_ATTEMPTS = 2**31 - 1
MOST_NOTICE = 3600.0  # seconds: of Communicator.prepare


class _Publisher(Protocol):
    """What offers this peer's state to followers, in `pccl.following`."""

    def stop(self) -> None:
        """Opens no door any more."""

    def wait(self) -> None:
        """Waits for its threads, when their companions are closed."""


class Peer(_core.Reducer):
    """What `pccl.Communicator` is below its collective calls. *any thread*"""

    def __init__(
        self,
        address: str,
        peer_group: int = 0,
        p2p_connection_pool_size: int = 0,
        *,
        port: int | None = None,
        advertise: str | Sequence[str] | None = None,
        secret: str | bytes | _core.Secret | None = None,
        replica_id: str | None = None,
        ranks_per_replica: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        func = "Communicator"
        _settings.masters(address, func)
        _core.check_settings(func)  # which are read when it connects
        self._secret = _settings.secret(secret, func)
        self._address = address
        self._group = _settings.integer(peer_group, "peer_group", func, 0, _MAX_GROUP)
        self._stripes = _settings.integer(
            p2p_connection_pool_size, "p2p_connection_pool_size", func, 0, _MAX_STRIPES
        )
        self._port = _settings.integer(
            port, "port", func, 0, 65535, variable="PCCL_PORT", default=0
        )
        self._advertise = _settings.addresses(advertise, func)
        self._replica, self._ranks = self._check_replica(replica_id, ranks_per_replica)
        self._name = _settings.name(name, func)
        self._engine: _core.Communicator | None = None
        self._joining = False
        self._candidate: _core.Communicator | None = None  # while it joins
        self._standby: MasterNode | None = None  # a master of the run in this process
        self._closed = False
        self._leaves = False  # whether the program asked it to leave, maybe before it was connected
        # Whether it was interrupted in calls that belong together, and the others go on with them.
        self._torn = False
        self._was_out = False  # whether it was out of the run, or torn, when it was closed
        self._quiet = False  # whether members that come and go are not logged
        self._companions: weakref.WeakSet[Peer] = weakref.WeakSet()
        self._publisher: _Publisher | None = None
        self._fork = process.forks
        self._residuals = Residuals()
        self._changes = Changes()
        # Guards _joining, _candidate, _engine, _companions and _publisher. No blocking call holds
        # it.
        self._lock = threading.Lock()

    def _check_replica(self, name: str | None, ranks: int | None) -> tuple[str, int]:
        func = "Communicator"
        if name is None and ranks is None:
            return "", 0
        if name is None or ranks is None:
            sentence = "replica_id and ranks_per_replica go together"
            raise InvalidArgument.because(func, sentence)
        if not _settings.is_text(name) or not 0 < len(name.encode()) <= _MAX_REPLICA_NAME:
            written = _settings.shown(name)
            sentence = f"replica_id must be text of 1 to {_MAX_REPLICA_NAME} bytes, not {written}"
            raise InvalidArgument.because(func, sentence)
        ranks = _settings.integer(ranks, "ranks_per_replica", func, 1, _MAX_RANKS)
        if self._group >= ranks:
            sentence = (
                f"peer_group is the rank in the replica, 0 to {ranks - 1} of {ranks}, "
                f"not {self._group}"
            )
            raise InvalidArgument.because(func, sentence)
        return name, ranks

    def connect(self, n_attempts: int = 5, *, timeout: float | None = None) -> None:
        """Joins the run.

        The first peer of a group returns at once, a later one when the members let it in.

        Args:
            n_attempts: How often to try to reach the master, one second apart.
            timeout: Seconds for the whole call. None waits for the members as long as they make
                progress.

        Raises:
            PCCLError: `Unreachable` after the last attempt, `Refused`, `Timeout` ...; all with the
                result MASTER_CONNECTION_FAILED.
            InvalidUsage: Connected already, or closed.
        """
        attempts = _settings.integer(n_attempts, "n_attempts", "connect", 1, MOST_ATTEMPTS)
        self._join("connect", min_peers=1, attempts=attempts, timeout=timeout, enter=True)

    def _join(
        self, func: str, *, min_peers: int, attempts: int, timeout: float | None, enter: bool
    ) -> None:
        limit = _settings.seconds(timeout, func)
        self._check_usable(func)
        with self._lock:
            if self._joining or self._is_connected():
                raise InvalidUsage.because(func, "this communicator is connected already")
            self._joining = True
        try:
            # A peer that failed to join, or was cut off, comes back as a new peer.
            engine = _core.Communicator(
                self._address,
                peer_group=self._group,
                stripes=self._stripes,
                port=self._port,
                advertise=self._advertise,
                replica=self._replica,
                ranks_per_replica=self._ranks,
                name=self._name,
                secret=self._secret,
                quiet=self._quiet,
            )
            with self._lock:
                self._changes.begin(())
                engine.on_change(self._changes.tell)  # also for callbacks that come while it joins
                self._candidate = engine
            try:
                self._check_usable(func)  # closed by another thread, meanwhile
                engine.join(min_peers=min_peers, attempts=attempts, timeout=limit, enter=enter)
            except BaseException:
                engine.close()
                raise
            self._residuals.clear()  # a newcomer starts with nothing
            self._torn = False
            if self.draining:  # the engine before was asked, and was put out before it could leave
                self._leaves = True
            with self._lock:
                self._engine, self._candidate = engine, None
                if not self._changes:
                    engine.on_change(None)  # or each call would look
            if self._leaves:  # after _engine is set: see _drain
                engine.drain()
            self._attach(engine)
            process.peers.add(self)
            if self._closed:
                self._attach(None)
                engine.close()
        finally:
            with self._lock:
                self._joining = False
                self._candidate = None

    @classmethod
    def _of_own_group(cls, group: int, address: str, **options: Any) -> Self:
        """A peer of a group that the library makes by itself, whose numbers are not for users."""
        made = cls(address, **options)
        made._group = group
        return made

    def _companion(self, group: int) -> Self:
        """A peer of one of the library's own groups in the same run, not connected yet.

        It logs no loss, and ends with this one.
        """
        made = self._of_own_group(
            group,
            self._address,
            p2p_connection_pool_size=self._stripes,
            port=0,
            advertise=self._advertise,
            secret=self._secret,
            name=self._name or None,
        )
        made._quiet = True
        with self._lock:
            self._companions.add(made)
        return made

    @property
    def draining(self) -> bool:
        """Whether this peer was asked to leave at its next admission point: see `pccl.drain`."""
        engine = self._engine
        return self._leaves or (engine is not None and engine.draining())

    def _serve(self, func: str, required: bool, timeout: float | None) -> None:
        """Runs one of the run's masters in this process, until `close`, unless none is left."""
        try:
            self._standby = _masters.standby(self._address, self._secret, func, timeout)
        except InvalidUsage:
            if required:
                raise

    def close(self) -> None:
        """Leaves the run: the others see a departure, not a loss.

        May be called again; afterwards nothing else may. Calls of other threads end with an error,
        also a `connect` that waits.
        """
        self._close("")

    def _close(self, failure: str) -> None:
        if self._is_forked():
            return
        if not self._closed:
            engine = self._engine
            self._was_out = engine is not None and (self._torn or not engine.is_open())
        self._closed = True
        self._attach(None)
        process.peers.discard(self)
        standby, self._standby = self._standby, None
        publisher, self._publisher = self._publisher, None
        try:
            if publisher is not None:
                publisher.stop()
            with self._lock:
                companions = list(self._companions)
            for companion in companions:
                companion._close(failure)
            engines = [one for one in (self._candidate, self._engine) if one is not None]
            for engine in engines:
                engine.on_change(None)
                engine.close(failure)
            if publisher is not None:
                publisher.wait()
            if standby is not None:
                for engine in engines:
                    standby._see_off(engine)  # the others would take its end for a loss
        finally:
            if standby is not None:
                standby.interrupt()
            self._residuals.clear()

    def _drain(self) -> None:
        """Asks this peer to leave at its next admission point."""
        # A handler of signals comes here in the middle of `_join`, which may hold the lock. If
        # `_join` sets _engine after it is read here, it sees _leaves.
        self._leaves = True
        engine = self._engine
        if engine is not None:
            engine.drain()

    def _expect_operation(self, seconds: float, nbytes: int, quantized: bool) -> None:
        """As `Communicator.prepare`, unless this peer has left the run."""
        engine = self._engine
        if engine is not None and seconds <= MOST_NOTICE:
            engine.expect_operation(seconds, nbytes, quantized)

    def _wait_no_longer_than(self, quorum: float, grace_seconds: float) -> None:
        """Lets the master evict members that are late in a call, from now on.

        Once this share of the members has entered a call, the others have `grace_seconds` to enter
        it, if all that have entered it allow that. A quorum of 0 waits for all.
        """
        engine = self._engine
        if engine is not None:
            # Two of three members are a quorum of 2/3.
            engine.wait_no_longer_than(int(1000 * quorum + 1e-9), round(1000 * grace_seconds))

    def _leave_at_exit(self) -> None:
        # Other ranks of the replica need not wait for a program that an exception has ended.
        error = getattr(sys, "last_type", None)
        try:
            self._close("" if error is None else f"its program ended with {error.__name__}")
        except (PCCLError, KeyboardInterrupt):
            pass  # the process ends anyway; the master notices

    def __enter__(self) -> Self:
        if not self._is_connected():
            self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close("" if kind is None else f"its program ended with {kind.__name__}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not connected" if self._engine is None else "joined"
        return f"<pccl.Communicator master={self._address} peer_group={self._group} {state}>"

    def _is_connected(self) -> bool:
        """Whether this peer is in the run."""
        engine = self._engine
        return engine is not None and engine.is_open()

    def _is_forked(self) -> bool:
        """Whether this is a forked child's copy."""
        return self._fork != process.forks

    def _check_usable(self, func: str) -> None:
        if self._is_forked():
            sentence = "this process was forked; its copy of the communicator cannot be used"
            raise InvalidUsage.because(func, sentence)
        if self._closed:
            raise InvalidUsage.because(func, "this communicator is closed; make a new one")

    def _joined(self, func: str) -> _core.Communicator:
        engine = self._engine
        # `_check_usable`, without the call: each reduction comes here.
        if engine is None or self._closed or self._fork != process.forks:
            self._check_usable(func)
            raise InvalidUsage.because(func, "not connected; call connect() first")
        return engine
