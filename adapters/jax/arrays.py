"""JAX arrays in CPU memory, read and returned without a copy; containers registered with JAX."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pccl.adapters import Buffer, Node, Shared, as_array, place_of
from pccl.adapters.jax.traced import allreduce as allreduce_traced
from pccl.adapters.jax.traced import in_program, typed_errors
from pccl.errors import InvalidArgument, NotSupported
from pccl.types import DataType

__all__ = [
    "adopt",
    "allreduce_traced",
    "beside",
    "flatten",
    "from_buffers",
    "immutable",
    "in_program",
    "is_spread",
    "is_traced",
    "number",
    "parts",
    "recognises",
    "share",
    "to_buffers",
]


immutable = True  # no array can be written to

_WIDE = ("float64", "int64", "uint64", "complex128")  # not there without enable_x64


def is_spread(leaf: Any) -> bool:
    """Whether it is on several devices."""
    return len(leaf.devices()) > 1


def recognises(leaf: object) -> bool:
    """Whether `leaf` is an array, or a tracer that stands for one."""
    return isinstance(leaf, jax.Array)


def is_traced(leaf: object) -> bool:
    """Whether `leaf` is no array yet: JAX traces the caller's function."""
    return isinstance(leaf, jax.core.Tracer)


def _check_readable(leaf: jax.Array) -> None:
    if isinstance(leaf, jax.core.Tracer):
        sentence = "inside jit, grad or vmap only pccl.allreduce works, without out= and async"
        raise NotSupported.because("", sentence)


class _Part(NamedTuple):
    """A piece of an array that no other piece overlaps.

    Attributes:
        place: The index of its first element.
        data: Its elements.
        devices: The local devices that hold it.
    """

    place: tuple[int, ...]
    data: jax.Array
    devices: list[jax.Device]


def _parts(leaf: jax.Array) -> list[_Part]:
    """The pieces of an array that this process holds, each once, in the order of their places."""
    if len(leaf.sharding.device_set) == 1:
        return [_Part((0,) * leaf.ndim, leaf, [])]
    parts: dict[tuple[int, ...], _Part] = {}
    for shard in leaf.addressable_shards:
        place = tuple(span.start or 0 for span in shard.index)
        parts.setdefault(place, _Part(place, shard.data, [])).devices.append(shard.device)
    return [parts[place] for place in sorted(parts)]


def parts(leaf: jax.Array) -> Sequence[str]:
    """Which part of the array each of its buffers is, in words; empty if the only one is whole."""
    if not is_spread(leaf):
        return ()
    found = _parts(leaf)
    if all(part.data.shape == leaf.shape for part in found):
        return ()
    return [f"at {list(part.place)} of {list(leaf.shape)}".replace(", ", ",") for part in found]


def number(leaf: jax.Array) -> float:
    """The number in an array of one element.

    Raises:
        PCCLError: It is the result of a compiled `pccl.allreduce` that failed.
    """
    with typed_errors():
        return float(leaf)


def to_buffers(leaf: jax.Array, *, writable: bool) -> Sequence[Buffer]:
    """Read-only views of the array's memory; waits until it is computed.

    An array on a GPU or TPU is copied to CPU memory, and its result back.

    One view for each piece: an array on one device, or replicated, is one piece. A sharded array
    has a piece for each different shard that this process holds. Members must shard alike for their
    calls to match.

    Raises:
        NotSupported: Inside jit, or a dtype that is not there yet.
        InvalidArgument: It is to be written, or its dtype cannot be reduced.
        PCCLError: It is the result of a compiled `pccl.allreduce` that failed.
    """
    _check_readable(leaf)
    if writable:
        raise InvalidArgument.because("", "JAX arrays cannot be written; leave out= away")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise InvalidArgument.because("", f"dtype {leaf.dtype} cannot be reduced")
    dtype = DataType.from_numpy_dtype(leaf.dtype)
    with typed_errors():
        return [Buffer(np.asarray(part.data), dtype) for part in _parts(leaf)]


def from_buffers(like: jax.Array, buffers: Sequence[Buffer]) -> jax.Array:
    """A new array with the sharding of `like`, over the results' memory where it is aligned."""
    arrays = [array for array, _ in buffers]
    if len(like.sharding.device_set) == 1:
        # An uncommitted array may move to other devices later, and so may its result.
        return put(arrays[0], like.sharding if like.committed else None)
    on_device = {
        device: put(array, device)
        for part, array in zip(_parts(like), arrays, strict=True)
        for device in part.devices
    }
    made: jax.Array = jax.make_array_from_single_device_arrays(
        like.shape, like.sharding, [on_device[shard.device] for shard in like.addressable_shards]
    )
    return made


def put(array: npt.NDArray[Any], place: object) -> jax.Array:
    """A JAX array that shares memory aligned to 64 bytes and copies any other.

    JAX does not write into memory that it shares, not even when the array is donated.
    """
    # Without this a 64-bit array that was made under enable_x64 would come back with 32 bits, and a
    # complex128 one as complex64.
    wide = array.dtype.name in _WIDE and not jax.config.jax_enable_x64
    with jax.enable_x64(True) if wide else nullcontext():
        made: jax.Array = jax.device_put(array, place, may_alias=True)
    return made


def share(leaf: jax.Array) -> Shared:
    """The array's bytes, read-only; waits until it is computed. A sharded one is gathered.

    Raises:
        InvalidArgument: Its dtype is one of JAX's own, as a PRNG key's.
        NotSupported: Inside jit, or in part on devices of another process.
        PCCLError: It is the result of a compiled `pccl.allreduce` that failed.
    """
    _check_readable(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise InvalidArgument.because("", f"dtype {leaf.dtype} cannot be shared")
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        sentence = "an array with parts in other processes cannot be shared; share its local shards"
        raise NotSupported.because("", sentence)
    with typed_errors():
        data = np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
    return Shared(leaf.dtype.name, leaf.shape, data, False, "jax", place_of(data, written=False))


def adopt(
    kind: str, shape: tuple[int, ...], data: npt.NDArray[Any], like: jax.Array | None
) -> jax.Array:
    """A new array of these bytes, with the sharding of `like`."""
    array = as_array(kind, shape, data)
    return put(array, like.sharding if like is not None and like.committed else None)


def beside(made: jax.Array, like: jax.Array) -> jax.Array:
    """`made` on the device of `like`, if that is one."""
    if made.devices() == like.devices() or len(like.devices()) > 1:
        return made
    moved: jax.Array = jax.device_put(made, *like.devices())
    return moved


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
