"""Arrays of libraries that the test's process does not load."""

from __future__ import annotations

from collections.abc import Callable

import pccl
from pccl import _arrays


def _refused(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert "tree" in str(error)
    else:
        raise AssertionError("not refused")


def read_arrays_of_jax() -> None:
    """Reads an array of JAX and makes another one of the result; what cannot be read is refused."""
    import jax
    import jax.numpy as jnp

    x = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    leaf = _arrays.read(x, "f", "tree")
    (buffer,) = leaf.buffers
    assert buffer.dtype is pccl.DataType.BFLOAT16 and buffer.array.shape == (2, 3)
    result = leaf.restore([buffer.array.copy()])
    assert isinstance(result, jax.Array) and result.dtype == x.dtype
    assert (result == x).all() and result.devices() == x.devices()
    _refused(pccl.InvalidArgument, lambda: _arrays.write(x, "f", "tree"))
    _refused(pccl.InvalidArgument, lambda: _arrays.read(x > 1, "f", "tree", op=pccl.ReduceOp.SUM))
    _refused(pccl.InvalidArgument, lambda: _arrays.read(jax.random.key(0), "f", "tree"))
    _refused(pccl.NotSupported, lambda: jax.jit(lambda y: _arrays.read(y, "f", "tree"))(x))
