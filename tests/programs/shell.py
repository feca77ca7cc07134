"""Calls by name: how the test's process says which function of this package to run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from programs.peer import hear


def call(program: str, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Calls a function, given as MODULE:FUNCTION, and returns its result."""
    module, _, function = program.partition(":")
    return getattr(importlib.import_module(module), function)(*positional, **keywords)


def obey() -> NoReturn:
    """Makes the calls that the test asks for with Worker.call, one after the other."""
    while True:
        call(*hear())
