"""JAX arrays on one CPU device, read without a copy; and containers registered with JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pccl.adapters import Buffer, Node, Shared, as_array
from pccl.errors import InvalidArgument, NotSupported
from pccl.types import DataType

__all__ = ["adopt", "flatten", "from_buffers", "recognises", "share", "to_buffers"]

immutable = True  # no array can be written to


def recognises(leaf: object) -> bool:
    """Whether `leaf` is an array, or a tracer that stands for one."""
    return isinstance(leaf, jax.Array)


def _check_plain(leaf: jax.Array) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise NotSupported.because("", "calls inside jit, grad or vmap are not supported yet")
    devices = leaf.devices()
    if len(devices) != 1 or next(iter(devices)).platform != "cpu":
        sentence = "only arrays on one CPU device are supported yet; use jax.device_get"
        raise NotSupported.because("", sentence)


def to_buffers(leaf: jax.Array, *, writable: bool) -> Sequence[Buffer]:
    """One read-only view of the array's memory; waits until it is computed.

    Raises:
        NotSupported: Inside jit, not on exactly one CPU device, or a dtype that is not there yet.
        InvalidArgument: It is to be written, or its dtype cannot be reduced.
    """
    _check_plain(leaf)
    if writable:
        raise InvalidArgument.because("", "JAX arrays cannot be written; leave out= away")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise InvalidArgument.because("", f"dtype {leaf.dtype} cannot be reduced")
    dtype = DataType.from_numpy_dtype(leaf.dtype)
    return [Buffer(np.asarray(leaf), dtype)]


def from_buffers(like: jax.Array, buffers: Sequence[Buffer]) -> jax.Array:
    """A new array on the device of `like`."""
    ((array, _),) = buffers
    # Uncommitted arrays may move to other devices later: the result of one is uncommitted too.
    made: jax.Array = jax.device_put(array, like.sharding) if like.committed else jnp.asarray(array)
    return made


def share(leaf: jax.Array) -> Shared:
    """The array's bytes, read-only; waits until it is computed.

    Raises:
        InvalidArgument: Its dtype is one of JAX's own, as a PRNG key's.
        NotSupported: Inside jit, or not on exactly one CPU device.
    """
    _check_plain(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise InvalidArgument.because("", f"dtype {leaf.dtype} cannot be shared")
    data = np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
    return Shared(leaf.dtype.name, leaf.shape, data, False, "jax")


def adopt(
    kind: str, shape: tuple[int, ...], data: npt.NDArray[Any], like: jax.Array | None
) -> jax.Array:
    """A new array of these bytes, on the device of `like`."""
    array = as_array(kind, shape, data)
    if like is None:
        return jnp.asarray(array)
    return from_buffers(like, [Buffer(array, DataType.UINT8)])


def flatten(node: Any) -> Node | None:
    """One level of a container registered with JAX; None for its leaves."""
    try:
        entries, treedef = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda part: part is not node
        )
    except (TypeError, ValueError) as error:
        sentence = f"JAX cannot flatten a {type(node).__name__}: {error}"
        raise InvalidArgument.because("flatten", sentence) from error
    if len(entries) == 1 and not entries[0][0]:
        return None
    keys = ["".join(map(str, path)) for path, _ in entries]
    return Node(
        keys,
        [child for _, child in entries],
        lambda parts: jax.tree_util.tree_unflatten(treedef, parts),
    )
