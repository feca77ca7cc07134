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

from pccl import _core
from pccl.errors import InvalidArgument, located

DEFAULT_PORT = 48148
SECRET_VARIABLES = ("PCCL_SECRET", "PCCL_SECRET_FILE")
_MAX_TAG = 2**64 - 1
_NUMBER = re.compile(r"[0-9]+\.?[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_LEAST_SECONDS, _MOST_SECONDS = 1e-3, 1e8


def text(variable: str) -> str | None:
    """The variable's value, or None."""
    return os.environ.get(variable) or None


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
            number: int | None = int(given)
        else:
            number = index(given)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        number = None
    if number is None or isinstance(given, bool) or not low <= number <= high:
        sentence = f"{name} must be an integer in {low}..{high}, not {given!r}"
        raise InvalidArgument.because(func, sentence)
    return number


def seconds(timeout: float | None, func: str) -> float | None:
    """A call's timeout in seconds: the argument, else PCCL_TIMEOUT, else None (no deadline)."""
    if timeout is None:
        # In a tenth of the time that os.environ takes.
        return _default_seconds(func) if _core.is_set("PCCL_TIMEOUT") else None
    try:
        number = float(timeout)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number) or number < 0:
        sentence = f"a timeout is a number of seconds of at least 0, not {timeout!r}"
        raise InvalidArgument.because(func, sentence)
    return None if math.isinf(number) else number


def _default_seconds(func: str) -> float | None:
    """PCCL_TIMEOUT, by the engine's rule."""
    given = text("PCCL_TIMEOUT")
    if given is None or given == "none":
        return None
    number = float(given) if _NUMBER.fullmatch(given) else math.nan
    if not _LEAST_SECONDS <= number <= _MOST_SECONDS:
        sentence = f'PCCL_TIMEOUT="{given}" is not seconds between 0.001 and 1e8, such as 2.5'
        raise InvalidArgument.because(func, sentence)
    return number


def master(value: str | None, func: str) -> str | None:
    """`master=`, else PCCL_MASTER, checked; None if there is neither."""
    if value is not None:
        return value
    found = text("PCCL_MASTER")
    if found is not None:
        with located(func, "PCCL_MASTER"):
            _core.parse_masters(found, func)
    return found


def name(value: str | None, func: str) -> str:
    """A peer's name, checked; "" for None, for which the engine takes PCCL_NAME or its default."""
    if value is None:
        return ""
    if not isinstance(value, str) or not _core.is_name(value):
        raise InvalidArgument.because(func, f"name must be {_core.NAMES}, not {value!r}")
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
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise InvalidArgument.because(func, f"advertise takes addresses as text, not {given!r}")
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
    given: object = value.strip().encode() if isinstance(value, str) else value
    if not isinstance(given, (bytes, bytearray, memoryview)):
        sentence = f"secret must be text or bytes, not {type(given).__name__}"
        raise InvalidArgument.because(func, sentence)
    return _core.Secret.of(bytes(given), func)
