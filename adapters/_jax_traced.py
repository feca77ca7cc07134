"""`pccl.allreduce` in a function that JAX traces: a custom call of the compiled program.

XLA may run independent calls of a program in any order, on each member in another one, so calls
meet by tags. A tag stands for the traced function's name, the place of the call among those of its
trace, and the local device: the same on all members that run the same program.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir

from pccl import _core
from pccl import tree as trees
from pccl._arrays import Buffer
from pccl.errors import InvalidArgument, NotSupported, PCCLError
from pccl.types import DataType, ReduceOp

_TARGET = "pccl_allreduce"
_FUNC = "allreduce"
_LINEAR = (ReduceOp.SUM, ReduceOp.AVG)
_ERROR = re.compile(r"\[pccl error (\d+)\]")

_lock = threading.Lock()  # guards what follows
_registered = False
_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # calls in a trace so far


class Call(NamedTuple):
    """One all-reduce of a traced function.

    Attributes:
        name: What errors call it: "allreduce 0 of step".
        tag: The user's, or one made from the name.
        op: How elements are combined.
        communicator: Its number; 0 for the process's.
        timeout: Seconds; None for no limit.
    """

    name: str
    tag: int
    op: ReduceOp
    communicator: int
    timeout: float | None

    def backward(self) -> Call:
        """The call that combines the gradients of this one's results."""
        name = f"{self.name}, backward"
        return self._replace(name=name, tag=_tag(f"{self.tag} {name}"))


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turns JAX's error of a compiled `pccl.allreduce` that failed into the `PCCLError` behind it.

    A context manager, and a decorator. JAX raises such an error where a result is waited for, so
    that has to happen inside: `jax.block_until_ready(results)`.

    Raises:
        PCCLError: As `pccl.allreduce` does; JAX's error is its cause.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # JAX's JaxRuntimeError is a RuntimeError
        found = None if isinstance(error, PCCLError) else _ERROR.search(str(error))
        if found is not None:
            try:
                _core.raise_xla_error(int(found[1]))
            except Exception as typed:
                raise typed from error
        raise


def allreduce(
    tree: object, op: ReduceOp, tag: int | None, timeout: float | None, communicator: int
) -> Any:
    """Adds the call to the traced function.

    Args:
        tree: Tracers, arrays and numbers, which become arrays; at least one tracer.
        op: How elements are combined.
        tag: The user's.
        timeout: Seconds for each run of the call.
        communicator: Its number; 0 for the process's.

    Raises:
        NotSupported: Inside vmap, or a dtype that is not there yet.
        InvalidArgument: A leaf cannot be reduced.
    """
    _register()
    flat = trees.flatten(tree, _FUNC)
    leaves = [
        _as_operand(leaf, f"tree{path}", mean=op is ReduceOp.AVG)
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    ]
    name = _name(flat.leaves, tag)
    call = Call(name, _tag(name) if tag is None else tag, op, communicator, timeout)
    return flat.unflatten(_differentiable(call, flat.paths)(*leaves))


def _register() -> None:
    global _registered
    with _lock:
        if not _registered:
            jax.ffi.register_ffi_target(_TARGET, _core.xla_handler(), platform="cpu")
            _registered = True


def _as_operand(leaf: object, where: str, *, mean: bool) -> jax.Array:
    if isinstance(leaf, bool | str | bytes | complex) or leaf is None:
        sentence = f"{where}: a {type(leaf).__name__} is neither an array nor a number"
        raise InvalidArgument.because(_FUNC, sentence)
    try:
        array = jnp.asarray(float(leaf) if mean and isinstance(leaf, int) else leaf)
    except TypeError as error:
        raise InvalidArgument.because(_FUNC, f"{where}: {error}") from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise InvalidArgument.because(_FUNC, f"{where}: dtype {array.dtype} cannot be reduced")
    try:
        DataType.from_numpy_dtype(array.dtype)
    except (InvalidArgument, NotSupported) as error:
        raise type(error).because(_FUNC, f"{where}: {error.reason}") from None
    return array


def _tag(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _name(leaves: Sequence[object], tag: int | None) -> str:
    """The call's name, the same on all members: function, and number of the call in its trace."""
    trace = next((found for leaf in leaves if (found := _trace_of(leaf)) is not None), None)
    if trace is None:
        return "allreduce under grad"  # op by op: there is no program, only its order of calls
    with _lock:
        number = _calls.get(trace, 0)
        _calls[trace] = number + 1
    function = trace.frame.debug_info.func_name
    return f"allreduce {number} of {function}" + ("" if tag is None else f" (tag {tag})")


def _trace_of(leaf: object) -> Any:
    """The trace that makes a program, however many transformations are between it and `leaf`."""
    trace = getattr(leaf, "_trace", None)
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def _differentiable(call: Call, paths: Sequence[str]) -> Callable[..., list[jax.Array]]:
    """The call as a function of its arrays, with the gradient that `lax.psum` and `pmean` have."""

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def reduce(*arrays: jax.Array) -> list[jax.Array]:
        return _bind(call, paths, arrays)

    def forward(*arrays: jax.Array) -> tuple[list[jax.Array], None]:
        return _bind(call, paths, arrays), None

    def backward(_: None, cotangents: list[Any]) -> tuple[Any, ...]:
        if call.op not in _LINEAR:
            sentence = f"{call.name}: only sum and avg have a gradient, not {call.op.name.lower()}"
            raise NotSupported.because(_FUNC, sentence)
        real = [i for i, value in enumerate(cotangents) if value.dtype != jax.dtypes.float0]
        named = [paths[i] for i in real]
        combined = _differentiable(call.backward(), named)(*(cotangents[i] for i in real))
        made = list(cotangents)
        for i, value in zip(real, combined, strict=True):
            made[i] = value
        return tuple(made)

    reduce.defvjp(forward, backward)
    return cast(Callable[..., list[jax.Array]], reduce)


def _bind(call: Call, paths: Sequence[str], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    buffers = [[Buffer(array, DataType.from_numpy_dtype(array.dtype))] for array in arrays]
    made: list[jax.Array] = _primitive.bind(
        *arrays,
        name=call.name,
        arrays=trees.describe(paths, buffers),
        structure=trees.structure(paths, buffers).decode(),
        tag=np.uint64(call.tag).astype(np.int64),
        op=np.int64(call.op),
        communicator=np.int64(call.communicator),
        timeout=np.float64(-1 if call.timeout is None else call.timeout),
    )
    return made


def _lower(context: Any, *operands: Any, **attributes: Any) -> Any:
    """A custom call that XLA neither drops nor repeats, and whose results take its arguments' memory.

    One more result, a byte, is the last argument of the next call: so calls run in the order of
    their trace, which members share, also where XLA runs one thing at a time.
    """
    before = _latest_ticket()
    byte = jax.core.ShapedArray((), np.dtype(np.uint8))
    rule = jax.ffi.ffi_lowering(
        _TARGET,
        has_side_effect=True,
        operand_output_aliases={i: i for i in range(len(operands))},
    )
    extended = context.replace(
        avals_in=[*context.avals_in, *[byte] * len(before)],
        avals_out=[*context.avals_out, byte],
    )
    return list(rule(extended, *operands, *before, **attributes))[: len(operands)]


def _latest_ticket() -> list[Any]:
    """The last result of the block's latest call, if there is one."""
    for operation in reversed(list(ir.InsertionPoint.current.block.operations)):
        target = operation.operation.attributes
        if operation.operation.name == "stablehlo.custom_call" and (
            ir.StringAttr(target["call_target_name"]).value == _TARGET
        ):
            return [list(operation.operation.results)[-1]]
    return []


def _refuse_device(context: Any, *operands: Any, name: str, **attributes: Any) -> Any:
    sentence = f"{name}: only programs for CPU devices are supported yet"
    raise NotSupported.because(_FUNC, sentence)


def _refuse_vmap(operands: object, axes: object, *, name: str, **attributes: object) -> Any:
    sentence = f"{name}: pccl.allreduce inside vmap; call it outside, on the whole batch"
    raise NotSupported.because(_FUNC, sentence)


@partial(jax.jit, static_argnames="attributes")
def _run_alone(*operands: jax.Array, attributes: tuple[tuple[str, Any], ...]) -> Any:
    return _primitive.bind(*operands, **dict(attributes))


_primitive = Primitive(_TARGET)
_primitive.multiple_results = True
_primitive.def_abstract_eval(lambda *avals, **_: [aval.strip_weak_type() for aval in avals])
_primitive.def_impl(
    lambda *arrays, **attributes: _run_alone(*arrays, attributes=tuple(attributes.items()))
)
mlir.register_lowering(_primitive, _lower, platform="cpu", cacheable=False)
mlir.register_lowering(_primitive, _refuse_device)
batching.primitive_batchers[_primitive] = _refuse_vmap
