"""Failures as exceptions: the class is the cause, `.result` the code of the explicit API."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar, TypeVar

__all__ = [
    "AuthenticationFailed",
    "Deadlock",
    "Evicted",
    "InternalError",
    "InvalidArgument",
    "InvalidUsage",
    "MasterLost",
    "MismatchedCall",
    "NotInitialized",
    "NotSupported",
    "PCCLError",
    "PeerLost",
    "PendingOperations",
    "Refused",
    "Result",
    "RevisionMismatch",
    "StateUnavailable",
    "Timeout",
    "TooFewPeers",
    "Unreachable",
]

_Error = TypeVar("_Error", bound="PCCLError")


class Result(IntEnum):
    """The explicit API's result codes: what a failure reports depends on the call too."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    INTERNAL_ERROR = 2
    INVALID_ARGUMENT = 3
    INVALID_USAGE = 4
    TOO_FEW_PEERS = 5
    MASTER_CONNECTION_FAILED = 6
    RANK_CONNECTION_FAILED = 7
    RANK_CONNECTION_LOST = 8
    NO_SHARED_STATE_AVAILABLE = 9
    PENDING_ASYNC_OPS = 10
    UPDATE_TOPOLOGY_FAILED = 11
    TOPOLOGY_OPTIMIZATION_FAILED = 12


# Calls whose errors name the result code in their sentence.
_EXPLICIT = frozenset(
    (
        "all_gather",
        "all_reduce",
        "all_reduce_async",
        "all_reduce_multiple_with_retry",
        "all_to_all",
        "are_peers_pending",
        "connect",
        "get_attribute",
        "optimize_topology",
        "sync_shared_state",
        "update_topology",
        "wait",
    )
)


class PCCLError(Exception):
    """Base of everything pccl raises on purpose.

    Attributes:
        result: The explicit API's code of the call that failed.
        func_name: The call that failed.
        reason: One sentence for a person.
        peer: The peer that it concerns (32 hex digits), e.g. the lost member or the odd one out;
            None for nobody.
        advice: What to do: "retry" the call, "rejoin" the run, "fix" the program, or "stop".
    """

    advice: ClassVar[str] = "stop"
    # The code where it is the same in every call; the engine passes the others.
    _usual_result: ClassVar[Result] = Result.INTERNAL_ERROR

    def __init__(
        self, result: Result | int, func_name: str, reason: str = "", *, peer: str | None = None
    ) -> None:
        self.result = Result(result)
        self.func_name = func_name
        self.reason = reason
        self.peer = peer
        super().__init__(reason or self.result.name)

    @classmethod
    def because(cls: type[_Error], func_name: str, reason: str) -> _Error:
        """An error of this class, with the result code that it has in every call."""
        return cls(cls._usual_result, func_name, reason)

    @staticmethod
    def check(result: Result | int, func_name: str) -> None:
        """Raises `PCCLError` unless `result` is SUCCESS."""
        if result != Result.SUCCESS:
            raise PCCLError(Result(result), func_name)

    def __str__(self) -> str:
        text = f"{self.func_name} failed"
        # Only the explicit API's callers know the code: in a Deadlock of `allreduce` it misleads.
        if not self.reason or self.func_name in _EXPLICIT:
            text += f" with {self.result.name}"
        if sentence := self._sentence():
            text += f": {sentence}"
        return text

    def _sentence(self) -> str:
        """The reason, as the exception's text has it."""
        return self.reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.result, self.func_name, self.reason), self.__dict__


class InvalidArgument(PCCLError, ValueError):
    """This call's own arguments cannot work. Nothing was started.

    All members get it, in one call, for weights that add up to 0 or are invalid, and for entries of
    a state that overlap.
    """

    advice = "fix"
    _usual_result = Result.INVALID_ARGUMENT


class InvalidUsage(PCCLError, RuntimeError):
    """Wrong state: not connected, closed, opened twice, or a forked copy."""

    advice = "fix"
    _usual_result = Result.INVALID_USAGE


class NotInitialized(InvalidUsage):
    """A simple-API call before `pccl.init()` or after `pccl.shutdown()`."""

    _usual_result = Result.NOT_INITIALIZED


class PendingOperations(InvalidUsage):
    """An explicit-API topology or state call while handles of this communicator are unfinished."""

    _usual_result = Result.PENDING_ASYNC_OPS


class NotSupported(PCCLError, NotImplementedError):
    """An operation, feature or known numeric dtype that is not there yet."""

    advice = "fix"
    _usual_result = Result.INVALID_ARGUMENT


class MismatchedCall(PCCLError):
    """Members called with different shapes, dtypes, op or tree; `.peer` is the odd one out."""

    advice = "fix"
    _usual_result = Result.INVALID_ARGUMENT


class Deadlock(PCCLError):
    """All members wait in calls that cannot meet.

    Attributes:
        waiting: Who waits in what, one line per member.
    """

    advice = "fix"
    waiting: tuple[str, ...] = ()

    def _sentence(self) -> str:
        # The engine's sentence ends with the members that wait; they follow line by line.
        return self.reason.removesuffix(": " + "; ".join(self.waiting))

    def __str__(self) -> str:
        return "\n  ".join((super().__str__(), *self.waiting))


class TooFewPeers(PCCLError):
    """An explicit-API reduction by a peer that is alone in its group."""

    advice = "retry"
    _usual_result = Result.TOO_FEW_PEERS


class PeerLost(PCCLError):
    """A member was lost or interrupted during the operation. Inputs are as before the call."""

    advice = "retry"
    _usual_result = Result.RANK_CONNECTION_LOST


class Unreachable(PCCLError):
    """No path to a member, to the master while connecting, or to any holder of the state."""

    advice = "rejoin"
    _usual_result = Result.RANK_CONNECTION_FAILED


class Timeout(PCCLError, TimeoutError):
    """A deadline has passed: this peer's, or another member's in the same call."""

    advice = "retry"


class MasterLost(PCCLError):
    """No master could be reached within the reconnect window."""

    advice = "rejoin"


class Refused(PCCLError):
    """The master refused the join: version, limits or group."""

    advice = "fix"
    _usual_result = Result.MASTER_CONNECTION_FAILED


class AuthenticationFailed(Refused):
    """The run's secret is missing or wrong."""


class Evicted(PCCLError):
    """The master removed this peer; `.reason` says why."""

    advice = "rejoin"

    def _sentence(self) -> str:
        # The reason is what the other members read in their logs: "not heard for 6 s".
        return f"this peer is out of the run: {self.reason}" if self.reason else ""


class RevisionMismatch(Evicted):
    """The offered revision of the shared state is ahead of the group's."""

    advice = "fix"
    _usual_result = Result.INVALID_USAGE


class StateUnavailable(PCCLError):
    """No holder of the shared state is left, or nobody offered it."""

    advice = "stop"
    _usual_result = Result.NO_SHARED_STATE_AVAILABLE


class InternalError(PCCLError):
    """A broken invariant of pccl itself: a bug worth reporting."""

    advice = "stop"


class located:
    """A context in which `InvalidArgument` and `NotSupported` get the user's call and the array.

    The code inside knows neither the call nor the array's path.
    """

    def __init__(self, func: str, where: str) -> None:
        self._func = func
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InvalidArgument | NotSupported):
            sentence = f"{self._where}: {error.reason}"
            raise type(error).because(self._func, sentence) from error.__cause__


# The engine's codes (cpp/pccl/base/error.h) and their classes.
_CLASS_OF_CAUSE: dict[int, type[PCCLError]] = {
    1: InvalidArgument,
    2: InvalidUsage,
    3: NotInitialized,
    4: PendingOperations,
    5: NotSupported,
    6: MismatchedCall,
    7: Deadlock,
    8: TooFewPeers,
    9: PeerLost,
    10: Unreachable,
    11: Timeout,
    12: MasterLost,
    13: Refused,
    14: AuthenticationFailed,
    15: Evicted,
    16: RevisionMismatch,
    17: StateUnavailable,
    18: InternalError,
}
_INTERRUPTED = 19


def from_engine(
    cause: int, result: int, func_name: str, reason: str, peer: str, waiting: str
) -> BaseException:
    """The exception for a failure that the engine reports. Called by the bindings, which raise it.

    Args:
        cause: The engine's code (`pccl::Code`). Its `interrupted` becomes KeyboardInterrupt.
        result: The explicit API's code of that call (`Result`).
        func_name: The call.
        reason: One sentence.
        peer: Whom it concerns, 32 hex digits, or "".
        waiting: Deadlock only: who waits in what, lines separated by newlines.
    """
    if cause == _INTERRUPTED:
        return KeyboardInterrupt()
    cls = _CLASS_OF_CAUSE.get(cause)
    if cls is None:
        return InternalError.because(func_name, f"unknown cause {cause} from the engine: {reason}")
    error = cls(result, func_name, reason, peer=peer or None)
    if isinstance(error, Deadlock):
        error.waiting = tuple(waiting.splitlines())
    return error
