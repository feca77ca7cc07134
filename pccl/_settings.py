"""Settings that the Python layers read from the environment, and checks of common arguments.

An argument wins over its variable. An empty variable counts as unset, except for the secret's
variables, where it is an error.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING

from pccl import _core
from pccl.errors import InvalidArgument, located

if TYPE_CHECKING:
    from typing import TypeGuard

DEFAULT_PORT = 48148
SECRET_VARIABLES = ("PCCL_SECRET", "PCCL_SECRET_FILE")
_MAX_TAG = 2**64 - 1
_MOST_SHOWN = 500  # characters of a wrong value
_NUMBER = re.compile(r"[0-9]+\.?[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_WHOLE = re.compile(r"[0-9]+")
_LEAST_SECONDS, _MOST_SECONDS = 1e-3, 1e8


def text(variable: str) -> str | None:
    """The variable's value, or None."""
    return os.environ.get(variable) or None


def shown(value: object) -> str:
    """The value as a program writes it, for a sentence."""
    try:
        written = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        return f"a value of the type {type(value).__name__} that is too long"
    return written if len(written) <= _MOST_SHOWN else f"{written[:_MOST_SHOWN]}..."


def is_text(value: object) -> TypeGuard[str]:
    """Whether the value is text that the engine can read: UTF-8 has no lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def number(given: str) -> float:
    """The number that a variable has, by the engine's rule; NaN if it has none."""
    return float(given) if _NUMBER.fullmatch(given) else math.nan


def integer(
    value: int | None,
    name: str,
    func: str,
    low: int,
    high: int,
    *,
    variable: str | None = None,
    default: int | None = None,
) -> int:
    """The argument `name`, else the variable, else the default; checked to be in low..high."""
    given: object = value
    if given is None and variable is not None:
        given, name = text(variable), variable
        if given is None and default is not None:
            return default
    try:
        if isinstance(given, str) and name == variable:
            found = int(given) if _WHOLE.fullmatch(given) else None
        else:
            found = index(given)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        found = None
    if found is None or isinstance(given, bool) or not low <= found <= high:
        sentence = f"{name} must be an integer in {low}..{high}, not {shown(given)}"
        raise InvalidArgument.because(func, sentence)
    return found


def seconds(timeout: float | None, func: str) -> float | None:
    """A call's timeout in seconds: the argument, else PCCL_TIMEOUT, else None (no deadline)."""
    if timeout is None:
        # In a tenth of the time that os.environ takes.
        return _default_seconds(func) if _core.is_set("PCCL_TIMEOUT") else None
    try:
        limit = float(timeout)
    except (TypeError, ValueError, OverflowError):
        limit = math.nan
    if math.isnan(limit) or limit < 0:
        sentence = f"a timeout is seconds in 0..1.8e308 or infinite, not {shown(timeout)}"
        raise InvalidArgument.because(func, sentence)
    return None if math.isinf(limit) else limit


def _default_seconds(func: str) -> float | None:
    """PCCL_TIMEOUT, by the engine's rule."""
    given = text("PCCL_TIMEOUT")
    if given is None or given == "none":
        return None
    limit = number(given)
    if not _LEAST_SECONDS <= limit <= _MOST_SECONDS:
        sentence = f'PCCL_TIMEOUT="{given}" is not seconds between 0.001 and 1e8, such as 2.5'
        raise InvalidArgument.because(func, sentence)
    return limit


def masters(value: str, func: str) -> list[tuple[str, int]]:
    """The hosts and ports of "host:port", or of several with commas between them.

    Raises:
        InvalidArgument: It is something else.
    """
    if not is_text(value) or not value:
        raise InvalidArgument.because(func, f"a master is 'host:port', not {shown(value)}")
    return _core.parse_masters(value, func)


def master(value: str | None, func: str) -> str | None:
    """`master=`, else PCCL_MASTER, checked; None if there is neither."""
    if value is not None:
        return value
    found = text("PCCL_MASTER")
    if found is not None:
        with located(func, "PCCL_MASTER"):
            masters(found, func)
    return found


def name(value: str | None, func: str) -> str:
    """A peer's name, checked; "" for None, for which the engine takes PCCL_NAME or its default."""
    if value is None:
        return ""
    if not is_text(value) or not _core.is_name(value):
        raise InvalidArgument.because(func, f"name must be {_core.NAMES}, not {shown(value)}")
    return value


class Deadline:
    """One timeout shared by the steps of a call.

    Attributes:
        seconds: The timeout; None without one.
    """

    def __init__(self, timeout: float | None) -> None:
        self.seconds = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Seconds left, at least 0; None without a deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def tag(value: int | None, func: str) -> int:
    """A tag: any integer that fits in 64 bits, unsigned."""
    return integer(value, "tag", func, 0, _MAX_TAG)


def addresses(value: str | Sequence[str] | None, func: str) -> list[str]:
    """`advertise=`, else PCCL_ADVERTISE: one address, several, or several separated by commas."""
    given = text("PCCL_ADVERTISE") if value is None else value
    parts = given.split(",") if isinstance(given, str) else () if given is None else given
    if not isinstance(parts, Sequence) or not all(is_text(part) for part in parts):
        sentence = f"advertise takes addresses as text, not {shown(given)}"
        raise InvalidArgument.because(func, sentence)
    found = [part.strip() for part in parts if part.strip()]
    with located(func, "PCCL_ADVERTISE" if value is None else "advertise"):
        _core.check_advertised(found, func)
    return found


def secret(value: str | bytes | _core.Secret | None, func: str) -> _core.Secret | None:
    """`secret=`, else PCCL_SECRET, else what is in the file PCCL_SECRET_FILE; None: there is none.

    Blanks around text are ignored. The value is neither stored nor shown in errors.
    """
    if value is None:
        return _core.Secret.from_environment(func)
    if isinstance(value, _core.Secret):
        return value
    given: object = value.strip().encode() if is_text(value) else value
    if not isinstance(given, (bytes, bytearray, memoryview)):
        what = "text with lone surrogates" if isinstance(given, str) else type(given).__name__
        sentence = f"secret must be text or bytes, not {what}"
        raise InvalidArgument.because(func, sentence)
    return _core.Secret.of(bytes(given), func)
