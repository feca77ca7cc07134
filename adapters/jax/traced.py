"""`pccl.allreduce` in a function that JAX traces: a call of the compiled program.

It is a custom call on CPU devices, a callback (`callback.py`) on a GPU.

XLA may run independent calls of a program in any order, and members may differ in it, so calls meet
by tags. A tag stands for the traced function's name, the call's place in its trace, and the local
device. It is the same on all members that run the same program.
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
from jax.extend.core import Primitive, Var, find_top_trace
from jax.interpreters import batching, mlir, partial_eval
from jaxlib.mlir import ir

from pccl import _core
from pccl import quantize as quantization
from pccl import tree as trees
from pccl.adapters.jax import callback
from pccl.adapters.jax.callback import ARGUMENT, CONSTANT, NOWHERE, PeerRef
from pccl.errors import InvalidArgument, NotSupported, PCCLError
from pccl.quantize import Quantize
from pccl.reduce import weighted
from pccl.reduce.request import Request
from pccl.tree import Entry
from pccl.types import DataType, ReduceOp, check_op

_TARGET = "pccl_allreduce"
_FUNC = "allreduce"
_LINEAR = (ReduceOp.SUM, ReduceOp.AVG)
_ERROR = re.compile(r"\[pccl error (h?)(\d+)\]")  # h: of a callback
_EXACT = quantization.Codes(0, False, False, Quantize.block)
# Each call has one more result, which is the next call's argument, so they run in order.
_BYTE = jax.core.ShapedArray((), np.dtype(np.uint8))
# Weights' dtypes that the custom call reads; others become float32.
_READABLE = "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float32 float64".split()

_lock = threading.Lock()  # guards what follows
_registered = False
_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # calls in a trace so far


class Call(NamedTuple):
    """One all-reduce of a traced function.

    Attributes:
        name: For errors: "allreduce 0 of step".
        tag: The user's, or one made from the name.
        op: How elements are combined.
        peer: The communicator; None for the process's.
        timeout: Seconds; None for no limit.
        quantize: How it travels; None: exact.
        nones: Paths of None in the tree.
    """

    name: str
    tag: int
    op: ReduceOp
    peer: PeerRef | None
    timeout: float | None
    quantize: Quantize | None = None
    nones: tuple[str, ...] = ()

    def backward(self) -> Call:
        """The call that combines the gradients of this one's results, exactly."""
        name = f"{self.name}, backward"
        return self._replace(name=name, tag=_tag(f"{self.tag} {name}"), quantize=None)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turns JAX's error of a compiled `pccl.allreduce` that failed into the `PCCLError` behind it.

    A context manager, and a decorator. JAX raises such an error where a result is waited for, so
    wait inside: `jax.block_until_ready(results)`.

    Raises:
        PCCLError: As `pccl.allreduce` does; JAX's error is its cause.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # JAX's JaxRuntimeError is a RuntimeError
        found = None if isinstance(error, PCCLError) else _ERROR.search(str(error))
        if found is not None:
            _raise_typed(bool(found[1]), int(found[2]), error)
        raise


def _raise_typed(of_callback: bool, number: int, cause: BaseException) -> None:
    """Raises the error with that number, if it is still known."""
    if of_callback:
        typed = callback.find_error(number)
        if typed is not None:
            raise typed from cause
        return
    try:
        _core.raise_xla_error(number)
    except Exception as typed:
        raise typed from cause


def allreduce(request: Request) -> Any:
    """Adds the call to the traced function.

    Args:
        request: Its leaves are tracers, arrays and numbers, which become arrays. The timeout is for
            each run of the call.

    Raises:
        NotSupported: Inside vmap, a dtype that is not there yet, or error feedback.
        InvalidArgument: A leaf cannot be reduced, or the weight is no number.
    """
    weight, flat = request.weight, request.flat
    if request.quantize is not None and request.quantize.error_feedback:
        sentence = (
            "error_feedback=True does not work inside a traced function: what rounding leaves "
            "out is kept outside of compiled programs"
        )
        raise NotSupported.because(_FUNC, sentence)
    _register()
    leaves = [_as_operand(leaf, where, request.op) for where, leaf in request.leaves]
    name = _name([*flat.leaves, weight], request.tag)
    call = Call(
        name,
        _tag(name) if request.tag is None else request.tag,
        request.op,
        None if request.by_default else PeerRef(request.comm),
        request.deadline.seconds,
        request.quantize,
        tuple(flat.nones),
    )
    if weight is None:
        return flat.unflatten(_differentiable(call, flat.paths)(*leaves))
    if not isinstance(weight, jax.core.Tracer):
        constant = weighted.as_number(weight, _FUNC)
        return flat.unflatten(_differentiable_mean(call, flat.paths, constant)(*leaves))
    factor = _as_weight(weight)
    leaves = [_as_varying(leaf, factor) for leaf in leaves]
    return flat.unflatten(_differentiable_mean(call, flat.paths, None)(*leaves, factor))


def _unsupported(name: str, sentence: str) -> NotSupported:
    return NotSupported.because(_FUNC, f"{name}: {sentence}")


def _register() -> None:
    global _registered
    with _lock:
        if not _registered:
            jax.ffi.register_ffi_target(_TARGET, _core.xla_handler(), platform="cpu")
            _registered = True


def _as_operand(leaf: object, where: str, op: ReduceOp) -> jax.Array:
    if isinstance(leaf, bool | str | bytes | complex) or leaf is None:
        sentence = f"{where}: a {type(leaf).__name__} is neither an array nor a number"
        raise InvalidArgument.because(_FUNC, sentence)
    try:
        array = jnp.asarray(float(leaf) if op is ReduceOp.AVG and isinstance(leaf, int) else leaf)
    except TypeError as error:
        raise InvalidArgument.because(_FUNC, f"{where}: {error}") from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise InvalidArgument.because(_FUNC, f"{where}: dtype {array.dtype} cannot be reduced")
    try:
        check_op(DataType.from_numpy_dtype(array.dtype), op, "")
    except (InvalidArgument, NotSupported) as error:
        raise type(error).because(_FUNC, f"{where}: {error.reason}") from None
    return array


def _as_weight(weight: Any) -> jax.Array:
    """A traced weight, of a type that the engine reads."""
    real = any(jnp.issubdtype(weight.dtype, kind) for kind in (np.integer, np.floating, np.bool_))
    if weight.ndim != 0 or not real:
        kind = f"traced {weight.dtype}[{','.join(map(str, weight.shape))}]"
        raise weighted.no_number(kind, _FUNC)
    made: jax.Array = weight if weight.dtype.name in _READABLE else weight.astype(np.float32)
    return made


def _varying(array: Any) -> frozenset[str]:
    """The axes of a `shard_map` along which it may differ."""
    kind = jax.typeof(array)
    found = getattr(kind, "manual_axis_type", None)
    return frozenset(getattr(kind, "vma", ()) if found is None else found.varying)


def _as_varying(array: jax.Array, like: jax.Array) -> jax.Array:
    """Marked as one that may differ wherever `like` may."""
    axes = tuple(_varying(like) - _varying(array))
    return jax.lax.pcast(array, axes, to="varying") if axes else array


def _as_cotangent(value: jax.Array, like: jax.Array) -> jax.Array:
    """`value` in the type of `like`, added up where the one `like` stands for many devices."""
    axes = tuple(_varying(value) - _varying(like))
    total = jax.lax.psum(value, axes) if axes else value
    if jnp.iscomplexobj(total) and not jnp.iscomplexobj(like):
        total = total.real
    return total.astype(like.dtype)


def _tag(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _name(leaves: Sequence[object], tag: int | None) -> str:
    """The call's name, the same on all members: function, and number of the call in its trace."""
    traces = (_program_of(getattr(leaf, "_trace", None)) for leaf in leaves)
    trace = next((found for found in traces if found is not None), None)
    trace = _program_of(find_top_trace(())) if trace is None else trace
    if trace is None:
        return "allreduce under grad"  # op by op: there is no program, only its order of calls
    with _lock:
        number = _calls.get(trace, 0)
        _calls[trace] = number + 1
    function = trace.frame.debug_info.func_name
    return f"allreduce {number} of {function}" + ("" if tag is None else f" (tag {tag})")


def _program_of(trace: Any) -> Any:
    """The trace that makes a program, however many transformations `trace` is inside of it."""
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def in_program() -> bool:
    """Whether JAX traces the caller's function to make a program of it.

    Not so in an eager `grad` or `vmap`, nor under `jax.ensure_compile_time_eval`. Cheap outside of
    traced functions.
    """
    if _program_of(find_top_trace(())) is None:
        return False
    return isinstance(jnp.zeros((), np.uint8), jax.core.Tracer)


def _differentiable(call: Call, paths: Sequence[str]) -> Callable[..., list[jax.Array]]:
    """The call as a function of its arrays, with the gradient that `lax.psum` and `pmean` have."""

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def reduce(*arrays: jax.Array) -> list[jax.Array]:
        return _bind(call, paths, arrays)

    def forward(*arrays: jax.Array) -> tuple[list[jax.Array], None]:
        return _bind(call, paths, arrays), None

    def backward(_: None, cotangents: list[Any]) -> tuple[Any, ...]:
        if call.op not in _LINEAR:
            sentence = f"only sum and avg have a gradient, not {call.op.name.lower()}"
            raise _unsupported(call.name, sentence)
        combined = _combined(call, paths, cotangents)
        return tuple(combined.get(i, value) for i, value in enumerate(cotangents))

    reduce.defvjp(forward, backward)
    return cast(Callable[..., list[jax.Array]], reduce)


def _combined(call: Call, paths: Sequence[str], cotangents: list[Any]) -> dict[int, jax.Array]:
    """All members' cotangents, combined, by index. Results without a gradient have none."""
    real = [i for i, value in enumerate(cotangents) if value.dtype != jax.dtypes.float0]
    reduce = _differentiable(call.backward(), [paths[i] for i in real])
    return dict(zip(real, reduce(*(cotangents[i] for i in real)), strict=True))


def _differentiable_mean(
    call: Call, paths: Sequence[str], constant: float | None
) -> Callable[..., list[jax.Array]]:
    """A weighted mean as a function of its arrays and, if it is no constant, of its weight.

    Let y = sum(w x) / sum(w) over the members, m the mean of their cotangents of y, and v their
    mean weight. The cotangent of a member's x is m w / v, as `pmean` has it for equal weights. That
    of its w is the sum over all elements of m (x - y) / v.
    """

    def split(arguments: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Any]:
        return (arguments, constant) if constant is not None else (arguments[:-1], arguments[-1])

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def reduce(*arguments: jax.Array) -> list[jax.Array]:
        return _bind(call, paths, *split(arguments))[:-1]

    def forward(*arguments: jax.Array) -> tuple[list[jax.Array], Any]:
        *means, mean_weight = _bind(call, paths, *split(arguments))
        return means, (arguments, means, mean_weight)

    def backward(kept: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        arguments, means, mean_weight = kept
        arrays, weight = split(arguments)
        wanted = constant is None and jnp.issubdtype(weight.dtype, np.inexact)
        made: list[Any] = list(cotangents)
        of_weight: Any = None
        for i, value in _combined(call, paths, cotangents).items():
            # JAX promotes no 8-bit floats.
            small = jnp.issubdtype(value.dtype, np.floating) and value.dtype.itemsize == 1
            kind = mean_weight.dtype
            kind = kind if small else jnp.promote_types(value.dtype, kind)
            wide = value.astype(kind) / mean_weight
            made[i] = _as_cotangent(wide * weight, arrays[i])
            if wanted:
                off = arrays[i].astype(wide.dtype) - means[i].astype(wide.dtype)
                part = _as_cotangent(jnp.sum(wide * off), weight)
                of_weight = part if of_weight is None else of_weight + part
        return tuple(made) if constant is not None else (*made, of_weight)

    reduce.defvjp(forward, backward)
    return cast(Callable[..., list[jax.Array]], reduce)


def _bind(
    call: Call,
    paths: Sequence[str],
    arrays: Sequence[jax.Array],
    weight: float | jax.Array | None = None,
) -> list[jax.Array]:
    """The results. A weighted mean has one more, the members' mean weight."""
    entries = [
        Entry(path, DataType.from_numpy_dtype(array.dtype).label, array.shape)
        for path, array in zip(paths, arrays, strict=True)
    ]
    constant = weight if isinstance(weight, float) else None
    where = NOWHERE if weight is None else ARGUMENT if constant is None else CONSTANT
    kind = "" if weight is None else weighted.WORDS
    travels = "" if call.quantize is None else quantization.words(call.quantize)
    codes = _EXACT if call.quantize is None else quantization.codes(call.quantize)
    made: list[jax.Array] = _primitive.bind(
        *arrays,
        *([weight] if where == ARGUMENT else []),
        name=call.name,
        arrays=kind + trees.describe(entries, call.nones) + travels,
        structure=kind + travels + trees.structure(entries, call.nones).decode(),
        tag=np.uint64(call.tag).astype(np.int64),
        op=np.int64(call.op),
        peer=call.peer,
        timeout=np.float64(-1 if call.timeout is None else call.timeout),
        weighted=np.int64(where),
        weight=np.float64(0 if constant is None else constant),
        code=np.int64(codes.code),
        zero_exact=np.int64(codes.zero_exact),
        stochastic=np.int64(codes.stochastic),
        block=np.int64(codes.block),
        gathered=np.int64(0),
    )
    return made


def _lower(context: Any, *operands: Any, gathered: np.int64, **attributes: Any) -> Any:
    """A custom call on one device, on each of a `shard_map`, or once for all that share a program.

    In the third case XLA divides the program among `gathered` devices, which it cannot do with a
    call that has side effects. So a `shard_map` over all devices is put around the call: it gathers
    the operands, every device calls with all of them, and the engine makes one call of these.
    """
    if gathered:
        return _custom_call(context, operands, (), gathered=gathered, **attributes)
    axes = context.module_context.axis_context
    manual = getattr(axes, "manual_axes", None)
    if manual is not None and manual != frozenset(axes.mesh.axis_names):
        free = ", ".join(str(name) for name in axes.mesh.axis_names if name not in manual)
        sentence = f"a shard_map over some axes of its mesh only, not over {free}"
        raise _unsupported(attributes["name"], f"{sentence}; give shard_map all axes")
    devices = getattr(axes, "num_devices", 1)
    before = _latest_ticket()
    if manual is not None or devices == 1:
        return _custom_call(context, operands, before, gathered=gathered, **attributes)[:-1]
    if jax.process_count() > 1:
        sentence = "arrays sharded over devices of several processes"
        raise _unsupported(attributes["name"], sentence)

    def call(*given: jax.Array) -> Any:
        ticket = given[len(operands) :] or (jnp.zeros((), np.uint8),)
        return tuple(
            _primitive.bind(
                *given[: len(operands)], *ticket, gathered=np.int64(devices), **attributes
            )
        )

    everywhere = jax.sharding.PartitionSpec()
    mesh = jax.sharding.AbstractMesh((devices,), ("pccl",))
    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    # Without the shardings of explicit axes: those are of another mesh.
    inside = context.replace(
        avals_in=[*map(_plain, context.avals_in), *[_BYTE] * len(before)],
        avals_out=[*map(_plain, context.avals_out), _BYTE],
    )
    return mlir.lower_fun(mapped, multiple_results=True)(inside, *operands, *before)[:-1]


def _plain(aval: Any) -> Any:
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def _custom_call(
    context: Any,
    operands: Sequence[Any],
    before: Sequence[Any],
    *,
    weighted: np.int64,
    gathered: np.int64,
    peer: PeerRef | None,
    **attributes: Any,
) -> list[Any]:
    """A custom call that XLA neither drops nor repeats. Results take the arguments' memory.

    The results of a weighted mean do not: the engine makes the products in their memory, and a
    member that turns out to be alone needs its input again.

    One more result, a byte, is the last argument of the next call, so calls run in the order of
    their trace, which members share, also where XLA runs one thing at a time.
    """
    if not gathered:  # else the byte is an argument and a result already
        context = context.replace(
            avals_in=[*context.avals_in, *[_BYTE] * len(before)],
            avals_out=[*context.avals_out, _BYTE],
        )
    rule = jax.ffi.ffi_lowering(
        _TARGET,
        has_side_effect=True,
        operand_output_aliases={i: i for i in range(0 if weighted else len(operands))},
    )
    number = np.int64(0 if peer is None else peer.number)
    given = {"weighted": weighted, "gathered": gathered, "communicator": number, **attributes}
    return list(rule(context, *operands, *before, **given))


def _latest_ticket() -> list[Any]:
    """The last result of the block's latest call, if there is one."""
    for operation in reversed(list(ir.InsertionPoint.current.block.operations)):
        found = operation.operation
        if _is_call(found) or _surrounds_call(found) or callback.is_callback(found):
            return [list(operation.operation.results)[-1]]
    return []


def _is_call(operation: Any) -> bool:
    return operation.name == "stablehlo.custom_call" and bool(
        ir.StringAttr(operation.attributes["call_target_name"]).value == _TARGET
    )


def _surrounds_call(operation: Any) -> bool:
    """Whether `_lower` made it around a call, unlike a `shard_map` of the user's with a call."""
    return operation.name == "sdy.manual_computation" and any(
        _is_call(inner.operation)
        and ir.IntegerAttr(
            ir.DictAttr(inner.operation.attributes["mhlo.backend_config"])["gathered"]
        ).value
        for inner in operation.regions[0].blocks[0].operations
    )


def _lower_elsewhere(context: Any, *operands: Any, **attributes: Any) -> Any:
    """A callback, on the one device that the program is for."""
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    devices = getattr(axes, "num_devices", 1) if mesh is None else mesh.size
    if devices != 1:
        sentence = f"a program for {devices} devices; on a GPU it may be for one"
        raise _unsupported(attributes["name"], sentence)
    others = set(context.module_context.platforms) - {"cpu", "cuda", "rocm"}
    if others:
        sentence = f"programs for {', '.join(sorted(others))} devices are not supported yet"
        raise _unsupported(attributes["name"], sentence)
    before = _latest_ticket()
    inside = context.replace(
        avals_in=[*context.avals_in, *[_BYTE] * len(before)],
        avals_out=[*context.avals_out, _BYTE],
    )
    return callback.emit(inside, [*operands, *before], attributes)[:-1]


def _refuse_vmap(operands: object, axes: object, *, name: str, **attributes: object) -> Any:
    raise _unsupported(name, "pccl.allreduce inside vmap; call it outside, on the whole batch")


def _results(*avals: Any, weighted: np.int64, gathered: np.int64, **attributes: Any) -> list[Any]:
    if gathered:
        *operands, ticket = avals
        made = _results(*operands, weighted=weighted, gathered=np.int64(0), **attributes)
        return [*made, ticket]
    arrays = [aval.strip_weak_type() for aval in avals]
    if weighted == NOWHERE:
        return arrays
    number = np.dtype(np.float64 if jax.config.jax_enable_x64 else np.float32)
    if weighted == CONSTANT:
        return [*arrays, jax.core.ShapedArray((), number)]
    return [*arrays[:-1], arrays[-1].update(dtype=number)]


def _keep_results(
    _: object, unknown: Sequence[bool], computed: Sequence[bool], equation: Any
) -> tuple[Any, ...]:
    """JAX's rule of what `jax.checkpoint` computes again: no call, but its results are kept.

    A second call would be another operation, at another place of the program.
    """
    count = len(equation.outvars)
    if not any(unknown):
        return equation, None, [False] * count, [False] * count, []
    pairs = zip(equation.invars, computed, strict=True)
    needed = [var for var, here in pairs if isinstance(var, Var) and not here]
    return None, equation, [True] * count, [True] * count, needed


@partial(jax.jit, static_argnames="attributes")
def _run_alone(*operands: jax.Array, attributes: tuple[tuple[str, Any], ...]) -> Any:
    return _primitive.bind(*operands, **dict(attributes))


_primitive = Primitive(_TARGET)
_primitive.multiple_results = True
_primitive.def_abstract_eval(_results)
_primitive.def_impl(
    lambda *arrays, **attributes: _run_alone(*arrays, attributes=tuple(attributes.items()))
)
mlir.register_lowering(_primitive, _lower, platform="cpu", cacheable=False)
mlir.register_lowering(_primitive, _lower_elsewhere, cacheable=False)
batching.primitive_batchers[_primitive] = _refuse_vmap
partial_eval.partial_eval_jaxpr_custom_rules[_primitive] = _keep_results
