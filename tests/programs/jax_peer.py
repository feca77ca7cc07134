"""A peer with JAX, which calls the functions that its test names."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import pccl
from programs.peer import say, start
from programs.shell import call


class _Later:
    """A module that is loaded when it is first used. The process of the tests does not load JAX."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


Kind = type[BaseException] | tuple[type[BaseException], ...]

jax: Any = _Later("jax")
jnp: Any = _Later("jax.numpy")
adapter: Any = _Later("pccl.adapters.jax")

_comm: pccl.Communicator | None = None


def serve() -> None:
    """Joins, then makes the calls of Worker.call, and says what each returned."""
    global _comm
    import pccl.adapters.jax  # noqa: F401

    _comm = start()
    jax.devices()
    say(event="ready")
    for line in sys.stdin:
        try:
            say(event="answer", answer=call(*json.loads(line)))
        except BaseException:
            say(event="failed", answer=traceback.format_exc())


def communicator() -> pccl.Communicator:
    """The one that `serve` made."""
    assert _comm is not None
    return _comm


def P(*parts: Any) -> Any:
    return jax.sharding.PartitionSpec(*parts)


def mesh() -> Any:
    """All devices, along the axis "x"."""
    return jax.sharding.Mesh(np.array(jax.devices()), ("x",))


def NamedSharding(mesh: Any, partition: Any) -> Any:
    return jax.sharding.NamedSharding(mesh, partition)


def address(array: Any) -> int:
    return int(array.unsafe_buffer_pointer())


def same(array: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(array), np.asarray(expected))


def raised(kind: Kind, call: Callable[[], object]) -> Any:
    """The error of that kind which the call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")


def typed(kind: Kind, call: Callable[[], object]) -> str:
    """The text of the typed error which a compiled call ends with."""

    def run() -> None:
        with adapter.typed_errors():
            jax.block_until_ready(call())

    return str(raised(kind, run))
