"""The way that an all-reduce takes.

| route | takes | made of |
|---|---|---|
| plain | plain NumPy arrays and containers, unweighted, without error feedback | one native call |
| traced | any trees, in a function that JAX traces | a call of the compiled program |
| `pieces` | trees with an array on an accelerator | an operation for each piece |
| `general` | all others | one operation |

The plain route comes before a `Request`: to make one takes as long as a small reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pccl import frameworks
from pccl import quantize as quantization
from pccl.errors import NotSupported
from pccl.reduce import general, pieces
from pccl.reduce.request import Request
from pccl.types import OP_CODES, ReduceInfo, ReduceOp

if TYPE_CHECKING:
    from pccl import _core

_Route = Callable[[Request], tuple[Any, ReduceInfo | None]]


def reduce_plain(
    engine: _core.Communicator,
    tree: object,
    out: object,
    op: ReduceOp | str,
    quantize: object,
    tag: int | None,
    timeout: float | None,
) -> tuple[Any, _core.ReduceInfo] | None:
    """Reduces plain arrays without weights, and waits: the result, and how it went.

    Returns:
        None when the call is not that simple, or is wrong. Then nothing was started.
    """
    if frameworks.in_program():
        return None
    coding = None
    if quantize is not None:
        coding = _plain_coding(op, quantize)
        if coding is None:
            return None
    return engine.reduce_tree(tree, out, op, tag, timeout, coding)


def start_plain(
    engine: _core.Communicator,
    tree: object,
    out: object,
    op: ReduceOp | str,
    quantize: object,
    tag: int | None,
    timeout: float | None,
) -> tuple[_core.Operation, Any] | None:
    """The same, begun: with the result, which is complete when the operation is done."""
    if frameworks.in_program():
        return None
    coding = None
    if quantize is not None:
        coding = _plain_coding(op, quantize)
        if coding is None:
            return None
    return engine.start_tree(tree, out, op, tag, timeout, coding)


def collect_plain(
    engine: _core.Communicator,
    kind: int,
    array: object,
    out: object,
    tag: int | None,
    timeout: float | None,
    *,
    level: int = 2,
    op: ReduceOp | str = ReduceOp.SUM,
    root: int = 0,
) -> tuple[Any, _core.ReduceInfo] | None:
    """Another collective of one plain array: the result, and how it went.

    Args:
        kind: A `pccl.collectives.Kind`.
        out: As for the call. The explicit API always passes it.

    Returns:
        As `reduce_plain`.
    """
    if type(array) is not np.ndarray or frameworks.in_program():
        return None
    code = _op_code(op)
    if code is None:
        return None
    return engine.collect(
        kind=kind, level=level, array=array, out=out, op=code, root=root, tag=tag, timeout=timeout
    )


def _plain_coding(op: ReduceOp | str, quantize: object) -> quantization.Coding | None:
    """How elements are sent; None when only the general route can take the call, or refuse it."""
    how = quantization.find(quantize)
    if how is None or how.error_feedback or _op_code(op) in (None, ReduceOp.PROD):
        return None
    return quantization.coding(how)


def _op_code(op: ReduceOp | str) -> int | None:
    """The op's code, if the engine may take it as it is."""
    return OP_CODES.get(op) if type(op) is ReduceOp or type(op) is str else None


def route_of(request: Request) -> _Route:
    """The route of a call that is not plain."""
    leaves = request.flat.leaves
    if frameworks.find_tracing([*leaves, request.weight]) is not None:
        return _traced
    if frameworks.devices_in_use() and any(map(frameworks.device_adapter, leaves)):
        return pieces.allreduce
    return general.allreduce


def allreduce(request: Request) -> Any:
    """Reduces by the request's route, and waits."""
    result, info = route_of(request)(request)
    return (result, info) if request.return_info else result


def _traced(request: Request) -> tuple[Any, None]:
    """Makes the call a part of the function that the framework traces."""
    for name, given in (
        ("out=", request.out is not None),
        ("return_info=True", request.return_info),
    ):
        if given:
            sentence = f"{name} does not work inside a traced function"
            raise NotSupported.because(request.func, sentence)
    tracing = frameworks.find_tracing([*request.flat.leaves, request.weight])
    return tracing.allreduce_traced(request), None
