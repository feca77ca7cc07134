"""`pccl.allreduce` in programs for GPUs, which call back: what peers check."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np

import pccl
from programs import jax_jit
from programs.jax_peer import jax, jnp, raised, same, typed

# The decorators are JAX's, which is not typed here.
# mypy: disallow-untyped-decorators=False


def call_back_on_cpu() -> None:
    """From now on, programs for CPU devices call back, as programs for GPUs do."""
    from jax.interpreters import mlir

    from pccl.adapters.jax import traced

    mlir.register_lowering(
        traced._primitive, traced._lower_elsewhere, platform="cpu", cacheable=False
    )


def the_program_calls_back() -> None:
    lowered = jax.jit(lambda x: pccl.allreduce(x)).lower(jnp.ones(3)).as_text()
    assert "callback" in lowered and "pccl_allreduce" not in lowered, lowered


def a_tree_is_one_call() -> None:
    jax_jit.run_a_step_of_a_tree()


def many_calls_run_in_the_order_of_their_trace() -> None:
    """Independent calls, which a compiler might run in any order."""
    rank = pccl.rank()

    @jax.jit
    def step(x: Any) -> Any:
        return [pccl.allreduce(x + i) for i in range(10)]

    for turn in range(5):
        for i, total in enumerate(step(jnp.full(1000, rank + turn))):
            same(total, np.full(1000, 1 + 2 * turn + 2 * i))


def denormals_are_kept() -> None:
    tiny = np.full(100, 1e-40, np.float32)
    for op, weight in (("max", None), ("sum", None), ("avg", 0.5)):
        eager = pccl.allreduce(tiny, op, weight=weight)
        compiled = jax.jit(lambda x, op=op, w=weight: pccl.allreduce(x, op, weight=w))(tiny)
        assert np.asarray(compiled).tobytes() == eager.tobytes() and eager.any(), op


def arrays_without_elements() -> None:
    tree = {"none": jnp.zeros((3, 0)), "scalar": jnp.float32(2)}
    made = jax.jit(lambda x: pccl.allreduce(x))(tree)
    assert made["none"].shape == (3, 0) and float(made["scalar"]) == 4


def a_program_does_not_outlive_its_communicator() -> None:
    """It must not meet another group instead."""
    with pccl.MasterNode("127.0.0.1:0") as master:
        comm = pccl.Communicator(master.address)
        comm.connect()
        reduce = jax.jit(lambda x, comm=comm: pccl.allreduce(x, comm=comm))
        found = weakref.ref(comm)
        program = reduce.lower(jnp.ones(3)).compile()
        same(program(jnp.ones(3)), np.ones(3))
        comm.close()
        typed(pccl.InvalidUsage, lambda: program(jnp.ones(3)))
        del comm, reduce
        gc.collect()
        assert found() is None
        assert "closed" in typed(pccl.InvalidUsage, lambda: program(jnp.ones(3)))


def an_error_keeps_no_array() -> None:
    """The frames of a traceback would keep the arrays of the call."""
    from pccl.adapters.jax import callback

    before = set(callback._errors)
    errors_are_typed()
    made = [error for number, error in callback._errors.items() if number not in before]
    assert made and all(error.__traceback__ is None and error.__context__ is None for error in made)


def a_weighted_mean_has_the_bytes_of_an_eager_one(dtype: str) -> None:
    rank = pccl.rank()
    x = jnp.asarray(np.arange(1000) % 50 + rank, dtype)
    eager = pccl.allreduce(x, "avg", weight=rank + 1.5)
    constant = jax.jit(lambda v: pccl.allreduce(v, "avg", weight=rank + 1.5))(x)
    given = jax.jit(lambda v, w: pccl.allreduce(v, "avg", weight=w))(x, rank + 1.5)
    for made in (constant, given):
        assert made.dtype == eager.dtype
        assert np.asarray(made).tobytes() == np.asarray(eager).tobytes()


def a_quantized_call_has_the_bytes_of_an_eager_one(kind: str) -> None:
    x = jnp.sin(jnp.arange(5000.0) + pccl.rank())
    eager = pccl.allreduce(x, "avg", quantize=kind)
    compiled = jax.jit(lambda v: pccl.allreduce(v, "avg", quantize=kind))(x)
    assert np.asarray(compiled).tobytes() == np.asarray(eager).tobytes()


def gradients_pass_through() -> None:
    rank = pccl.rank()

    def loss(w: Any, x: Any) -> Any:
        return pccl.allreduce(w * x, "avg").sum()

    x = jnp.full(3, rank + 1.0)
    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.ones(3), x)
    same(value, 4.5)
    same(gradient, x)


def errors_are_typed() -> str:
    """The members' arrays differ in shape."""

    @jax.jit
    def step(x: Any) -> Any:
        return pccl.allreduce(x)

    return typed(pccl.MismatchedCall, lambda: step(jnp.ones(3 + pccl.rank())))


def several_devices_are_refused_by_name() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharded = jax.device_put(
        jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )
    reduce = jax.jit(lambda x: pccl.allreduce(x))
    error = raised(pccl.NotSupported, lambda: reduce(sharded))
    assert "a program for 4 devices" in str(error), error
