"""A traced `pccl.allreduce` on a GPU: the compiled program calls back into Python.

XLA copies the operands to CPU memory and the results to the device. Programs for CPU devices need
neither copy nor callback: see `traced.py`.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir

from pccl import _core, api
from pccl.errors import InvalidUsage
from pccl.frameworks import Array, Buffer
from pccl.reduce.staging import Staging
from pccl.reduce.weighted import WeightedMean
from pccl.types import DataType, ReduceOp

# Where a call has its weight, in the primitive's attributes and those of the custom call.
NOWHERE, CONSTANT, ARGUMENT = 0, 1, 2

_FUNC = "allreduce"
_MARK = "mhlo.frontend_attributes"
_ERRORS_KEPT = 256

_lock = threading.Lock()  # guards what follows
_errors: OrderedDict[int, BaseException] = OrderedDict()  # without tracebacks
_in_flight: set[tuple[int, int]] = set()  # communicator and tag
_made = 0  # errors so far


class PeerRef:
    """A communicator as a parameter of a primitive, which does not keep it alive."""

    def __init__(self, comm: Any) -> None:
        self._found = ref(comm)
        self.number: int = comm._number

    def get(self) -> Any:
        return self._found()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PeerRef) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


def emit(context: Any, operands: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    """The results of a callback that XLA neither drops nor repeats.

    Args:
        context: JAX's, with one more result than the call has: the byte that the next call takes.
        operands: The call's, and the byte of the call before, if there is one.
        attributes: The primitive's.
    """
    results, _, _ = mlir.emit_python_callback(
        context,
        partial(_run, attributes, [aval.dtype for aval in context.avals_out]),
        None,
        list(operands),
        context.avals_in,
        context.avals_out,
        has_side_effect=True,
    )
    made = list(results)
    name = ir.StringAttr.get(str(attributes["name"]))
    made[-1].owner.attributes[_MARK] = ir.DictAttr.get({"pccl": name})
    return made


def is_callback(operation: Any) -> bool:
    """Whether `emit` made it."""
    return _MARK in operation.attributes and "pccl" in ir.DictAttr(operation.attributes[_MARK])


def find_error(number: int) -> BaseException | None:
    """A copy of the error with that number, unless many others came after it."""
    with _lock:
        found = _errors.get(number)
    return None if found is None else _without_history(found)


def _without_history(error: BaseException) -> BaseException:
    """A copy. The frames in a traceback hold the call's arrays and its communicator."""
    made = copy.copy(error)
    made.__traceback__ = made.__cause__ = made.__context__ = None
    return made


def _remember(error: BaseException) -> int:
    global _made
    with _lock:
        _made += 1
        _errors[_made] = _without_history(error)
        if len(_errors) > _ERRORS_KEPT:
            _errors.popitem(last=False)
        return _made


def _run(attributes: Mapping[str, Any], dtypes: Sequence[Any], *operands: Any) -> list[Array]:
    """Called by the program, on a thread of XLA's."""
    try:
        # XLA's threads flush denormals to zero. pccl keeps them.
        results = _core.with_default_floats(lambda: _reduce(attributes, dtypes, operands))
        return [*results, np.zeros((), np.uint8)]
    except BaseException as error:
        # XLA keeps the text alone.
        text = f"{type(error).__name__}: {error} [pccl error h{_remember(error)}]"
        raise RuntimeError(text) from error


def _communicator(peer: PeerRef | None) -> Any:
    """The call's communicator.

    Raises:
        InvalidUsage: It is closed.
        NotInitialized: The process has none.
    """
    comm = None if peer is None else peer.get()
    if comm is None and peer is not None:
        raise InvalidUsage.because(_FUNC, "the communicator of this compiled call is closed")
    return api._use(comm, _FUNC)


@contextmanager
def _only_call(number: int, tag: int, name: str) -> Iterator[None]:
    """Refuses a second call with that tag meanwhile: members would pair them by chance."""
    use = (number, tag)
    with _lock:
        if use in _in_flight:
            sentence = f"{name} is in flight already, from another thread or device"
            raise InvalidUsage.because(_FUNC, sentence)
        _in_flight.add(use)
    try:
        yield
    finally:
        with _lock:
            _in_flight.discard(use)


def _reduce(
    given: Mapping[str, Any], dtypes: Sequence[Any], operands: Sequence[Any]
) -> Sequence[Array]:
    """The operation that the custom call of `cpp/pccl/bindings/xla.cpp` makes, too."""
    weighted = int(given["weighted"])
    count = len(dtypes) - (1 if weighted == NOWHERE else 2)
    arrays = [np.asarray(operand) for operand in operands]
    inputs = [Buffer(array, DataType.from_numpy_dtype(array.dtype)) for array in arrays[:count]]
    mean = None
    if weighted != NOWHERE:
        weight = arrays[count] if weighted == ARGUMENT else given["weight"]
        mean = WeightedMean(inputs, float(weight), _FUNC)
    staging = Staging(inputs if mean is None else mean.sends)
    comm = _communicator(given["peer"])
    tag = int(given["tag"]) % 2**64
    code = int(given["code"])
    coding = (code, bool(given["zero_exact"]), bool(given["stochastic"]), int(given["block"]))
    with _only_call(comm._number, tag, given["name"]):
        comm._joined(_FUNC).start(
            staging.arrays,
            op=int(given["op"] if mean is None else ReduceOp.SUM),
            tag=tag,
            level=2,
            rerun=True,
            structure=given["structure"].encode(),
            description=f"{given['name']}: {given['arrays']}",
            timeout=None if given["timeout"] < 0 else float(given["timeout"]),
            wait=True,
            **({} if code == 0 else {"quantize": coding}),
        )
    staging.finish()
    if mean is None:
        return staging.results
    total, members = staging.results[-1].tolist()
    return [*mean.finish(staging.results, None), np.asarray(total / members, dtypes[count])]
