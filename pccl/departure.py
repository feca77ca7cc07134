"""How a peer leaves a run that goes on: at its next admission point, or when its time is over."""

from __future__ import annotations

import _thread
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from pccl import _settings
from pccl.errors import InvalidArgument

if TYPE_CHECKING:
    from pccl.communicator import Communicator

__all__ = ["Drained"]

_DEFAULT_SECONDS = 25.0  # Kubernetes kills 30 s after SIGTERM
_TOLD = "its program was told to end (SIGTERM)"


class Drained(SystemExit):
    """This peer has left the run at an admission point, as it was asked to.

    Nobody else is held up: the others go on without it. The communicator is closed. Not caught,
    this ends the program with status 0; catch it to save something first. `except Exception` does
    not catch it. If SIGTERM asked and PCCL_SIGTERM_STATUS is set, that is the status.
    """

    def __init__(self, status: int = 0) -> None:
        super().__init__(status)

    def __str__(self) -> str:
        return "this peer has left the run, as it was asked to"


def leave_if_asked(comm: Communicator, func: str, timeout: float | None) -> None:
    """Leaves the run if this peer is to, after its own operations.

    Raises:
        Drained: It has left.
    """
    engine = comm._joined(func)
    if engine.draining():
        engine.settle(timeout)
        leave(comm)


def leave(comm: Communicator) -> NoReturn:
    """Closes the communicator of a peer that was asked to leave.

    Raises:
        Drained: Always.
    """
    handler = signal.getsignal(signal.SIGTERM)
    status = 0
    if isinstance(handler, OnSigterm) and handler.comm is comm and handler.pending:
        status = handler.status
        handler.pending = False
    comm.close()
    raise Drained(status)


class OnSigterm:
    """What SIGTERM means while a communicator is this process's default one.

    The first signal asks this peer to leave at its next admission point. The second one, or the end
    of PCCL_DRAIN_SECONDS, makes it leave at once, and then ends the process as SIGTERM does without
    a handler. Python runs handlers in the main thread only, between two of its bytecodes. So a
    thread keeps the time, and is started without the locks of `threading`, which the main thread
    may hold.

    A peer may be evicted between the signal and its next admission point. If its program joins
    again, the signal is for the new communicator, which has PCCL_DRAIN_SECONDS, too.

    Neither the handler nor the thread keeps the communicator: it may be gone before its time is
    over, and an engine that is left when the process ends would count as leaked.

    Attributes:
        status: Exit status of the program after it has left.
        pending: Whether the signal came, and this peer has not left at an admission point since.
    """

    def __init__(self, comm: Communicator, seconds: float, status: int) -> None:
        self._comm = weakref.ref(comm)
        self.status = status
        self._seconds = seconds
        self._hurry = _thread.allocate_lock()  # released by the second signal
        self._signals = 0
        self.pending = False

    @property
    def comm(self) -> Communicator | None:
        """The communicator; None: it is gone."""
        return self._comm()

    def __call__(self, number: int, frame: Any) -> None:
        comm = self.comm
        # It has left: what the program still does is its own. A forked child was never in the run.
        if comm is None or comm._closed or comm._is_forked():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._signals += 1
        if self._signals == 1:
            self.pending = True
            self._hurry.acquire()
            # First: the next call may wait.
            _thread.start_new_thread(self._end_in_time, (self._comm,))
            comm._drain()
        elif self._signals == 2:
            self._hurry.release()

    def follow(self, comm: Communicator) -> None:
        """The program has joined again before this peer had left as the signal asked."""
        self._comm = weakref.ref(comm)
        _thread.start_new_thread(self._end_in_time, (self._comm,))
        comm._drain()

    def _end_in_time(self, known: weakref.ref[Communicator]) -> None:
        if self._hurry.acquire(timeout=self._seconds):
            self._hurry.release()  # for the threads of other communicators
        comm = known()
        engine = None if comm is None or comm._closed else comm._engine
        if engine is not None:
            engine.end_process(_TOLD, signal.SIGTERM)


def drain_seconds(func: str) -> float:
    """PCCL_DRAIN_SECONDS, checked; 0: pccl does not handle SIGTERM."""
    given = _settings.text("PCCL_DRAIN_SECONDS")
    if given is None:
        return _DEFAULT_SECONDS
    seconds = _settings.number(given)
    if not 0 <= seconds <= 1e6:
        sentence = f"PCCL_DRAIN_SECONDS is a number of seconds from 0 to 1e6, not {given!r}"
        raise InvalidArgument.because(func, sentence)
    return seconds


def sigterm_status(func: str) -> int:
    """PCCL_SIGTERM_STATUS, checked."""
    variable = "PCCL_SIGTERM_STATUS"
    return _settings.integer(None, "status", func, 0, 255, variable=variable, default=0)


def watch(comm: Communicator, seconds: float, status: int) -> None:
    """Handles SIGTERM for this communicator, unless the program does or another thread calls."""
    if seconds > 0 and _is_ours():
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(handler, OnSigterm) and handler.pending:
            handler.follow(comm)
        else:
            signal.signal(signal.SIGTERM, OnSigterm(comm, seconds, status))


def unwatch() -> None:
    """Gives SIGTERM its usual meaning back, unless one came that is not obeyed yet: see `watch`."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, OnSigterm) and not handler.pending and _is_ours():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_ours() -> bool:
    """Whether pccl may set the handler: only the main thread can, and programs have their own."""
    handler = signal.getsignal(signal.SIGTERM)
    free = handler == signal.SIG_DFL or isinstance(handler, OnSigterm)
    return free and threading.current_thread() is threading.main_thread()
