"""JAX arrays that are reduced eagerly: what two peers check."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np

import pccl
from pccl.reduce import general, staging
from programs.jax_peer import (
    NamedSharding,
    P,
    adapter,
    address,
    jax,
    jnp,
    mesh,
    raised,
    same,
)


def a_tree_of_jax_arrays_comes_back_as_one() -> None:
    rank = pccl.rank()
    tree = {"w": jnp.full((3, 4), rank + 1.0), "deep": [jnp.arange(5), (jnp.float32(rank),)]}
    total = pccl.allreduce(tree)
    assert jax.tree.structure(total) == jax.tree.structure(tree)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(total))
    assert [x.dtype for x in jax.tree.leaves(total)] == [x.dtype for x in jax.tree.leaves(tree)]
    same(total["w"], np.full((3, 4), 3.0))
    same(total["deep"][0], 2 * np.arange(5))
    same(total["deep"][1][0], 1)
    same(tree["w"], np.full((3, 4), rank + 1.0))
    assert isinstance(pccl.allreduce([jnp.ones(3), np.ones(3)])[1], np.ndarray)


def dtypes_combine_as_numpys_do(dtype: str, op: str) -> None:
    rank = pccl.rank()
    given: list[Any] = [np.arange(7) % 3 + 1 + other for other in range(2)]
    if dtype == "bool":
        given = [np.arange(7) % (other + 2) == 0 for other in range(2)]
    if dtype == "complex64":
        given = [array * (1 - 2j) for array in given]
    made = pccl.allreduce(jnp.asarray(given[rank], dtype), op)
    expected = {
        "sum": lambda: sum(given),
        "prod": lambda: given[0] * given[1],
        "min": lambda: np.minimum(*given),
        "max": lambda: np.maximum(*given),
        "avg": lambda: sum(given) / 2,
    }[op]()
    assert made.dtype == dtype and made.shape == (7,)
    plain = "complex64" if dtype == "complex64" else "float32"
    same(made.astype(plain), np.asarray(expected).astype(made.dtype).astype(plain))


def an_array_without_axes_stays_one(dtype: str) -> None:
    rank = pccl.rank()
    made = pccl.allreduce(jnp.asarray(rank + 1, dtype))
    assert made.shape == () and made.dtype == dtype and int(made) == 3


def arrays_of_64_bits_keep_them_also_where_jax_would_not() -> None:
    with jax.enable_x64(True):
        wide = jnp.asarray([1 + 2**-40, 3.0])
    made = pccl.allreduce(wide)
    assert wide.dtype == made.dtype == "float64"
    assert np.asarray(made)[0] == 2 + 2**-39


def small_dtypes_that_are_not_there_are_refused_by_name(dtype: str) -> None:
    odd = jnp.zeros(3, dtype)
    error = raised(pccl.NotSupported, lambda: pccl.allreduce([odd]))
    assert "tree[0]" in str(error) and dtype in str(error), error


def other_arrays_are_refused() -> None:
    for odd in (jnp.zeros(2, bool), jax.random.key(0)):
        raised(pccl.InvalidArgument, partial(pccl.allreduce, odd))
    x = jnp.ones(3)
    assert "out=" in str(raised(pccl.InvalidArgument, lambda: pccl.allreduce(x, out=x)))
    same(x, np.ones(3))


def nothing_is_copied_on_the_way_in_or_out(dtype: str) -> None:
    rank = pccl.rank()
    seen: list[tuple[int, int]] = []
    module: Any = general

    class Watched(staging.Staging):
        def __init__(self, sends: Any, recvs: Any = None, **options: bool) -> None:
            super().__init__(sends, recvs, **options)
            seen.extend((s.ctypes.data, r.ctypes.data) for s, r, _ in self.arrays)

    module.Staging = Watched
    try:
        x = jnp.full(2**20 // jnp.dtype(dtype).itemsize, rank + 1, dtype)
        total = pccl.allreduce(x)
    finally:
        module.Staging = staging.Staging
    assert seen == [(address(x), address(total))], (seen, address(x), address(total))
    same(total.astype("float32"), np.full(x.shape, 3.0))
    same(x.astype("float32"), np.full(x.shape, rank + 1.0))


def a_donated_result_is_not_written_into_nor_its_memory_used_again_too_early() -> None:
    grow = jax.jit(lambda v: v + 1, donate_argnums=0)
    kept = []
    for step in range(8):
        total = pccl.allreduce(jnp.full(2**18, float(step)))
        view = np.asarray(total)
        more = grow(total)
        kept.append((step, view, more))
        del total, more
        gc.collect()
    for step, view, more in kept:
        same(view, np.full(2**18, 2.0 * step))
        same(more, np.full(2**18, 2.0 * step + 1))


def where_an_array_may_move_its_result_may_too() -> None:
    free = jnp.ones(4)
    bound = jax.device_put(jnp.ones(4), jax.devices()[2])
    assert not pccl.allreduce(free).committed
    total = pccl.allreduce(bound)
    assert total.committed and total.sharding == bound.sharding
    same(total, 2 * np.ones(4))


def a_sharded_array_is_reduced_shard_by_shard_and_stays_sharded(name: str, rows: int) -> None:
    rank = pccl.rank()
    partition, parts = {
        "replicated": ((), 1),
        "by row": (("x",), 4),
        "by column": ((None, "x"), 4),
    }[name]
    whole = np.arange(rows * 512, dtype=np.float32).reshape(rows, 512) + rank
    x = jax.device_put(whole, NamedSharding(mesh(), P(*partition)))
    held = {address(shard.data) for shard in x.addressable_shards}
    buffers = adapter.to_buffers(x, writable=False)
    assert len(buffers) == parts
    assert all(b.array.ctypes.data in held and not b.array.flags.writeable for b in buffers)
    total = pccl.allreduce({"x": x})["x"]
    assert total.sharding == x.sharding and len(total.addressable_shards) == 4
    same(total, 2 * whole + (1 - 2 * rank))
    for shard in total.addressable_shards:
        same(shard.data, (2 * whole + (1 - 2 * rank))[shard.index])


def an_array_sharded_over_one_axis_of_a_mesh_goes_once() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    whole = np.arange(16, dtype=np.float32).reshape(4, 4)
    x = jax.device_put(whole, NamedSharding(mesh, P("b")))
    assert [b.array.shape for b in adapter.to_buffers(x, writable=False)] == [(2, 4)] * 2
    total, info = pccl.allreduce(x, return_info=True)
    assert total.sharding == x.sharding
    same(total, 2 * whole)


def members_that_order_their_devices_differently_mean_the_same_parts() -> None:
    rank = pccl.rank()
    devices = jax.devices()[::-1] if rank else jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
    same(pccl.allreduce(x), 2 * np.arange(8.0))


def members_that_shard_differently_are_told() -> None:
    rank = pccl.rank()
    x = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh(), P("x") if rank else P()))
    error = raised(pccl.MismatchedCall, lambda: pccl.allreduce(x))
    assert "float32[1,4]" in str(error) and "float32[4,4]" in str(error), error
    # Different arrays, or different places, whose parts have one shape.
    grid = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    for shape, parts in (
        (((8, 2), (4, 4)), (P("a"), P(None, "a"))),
        (((4, 4), (4, 4)), (P("a"), P("b"))),
    ):
        x = jax.device_put(np.ones(shape[rank], np.float32), NamedSharding(grid, parts[rank]))
        if shape[0] != shape[1]:
            error = raised(pccl.MismatchedCall, partial(pccl.allreduce, {"w": x}))
            assert "['w'] at [0,0] of [8,2] float32[4,2]" in str(error), error
        else:
            same(pccl.allreduce(x), np.full((4, 4), 2.0))  # the devices' order does not matter


def donated_replicas_of_a_result_do_not_share_what_they_become() -> None:
    x = jax.device_put(np.ones(2**18, np.float32), NamedSharding(mesh(), P()))
    total = pccl.allreduce(x)
    grow = jax.jit(lambda v: v + 1, donate_argnums=0)
    more = grow(total)
    for shard in more.addressable_shards:
        same(shard.data, np.full(2**18, 3.0))


def sync_gives_sharded_arrays_back_as_they_were() -> None:
    rank = pccl.rank()
    sharding = NamedSharding(mesh(), P("x"))
    state = {
        "w": jax.device_put(np.full(8, rank, np.float32), sharding),
        "r": jax.device_put(np.full(2**18, rank, np.float32), NamedSharding(mesh(), P())),
    }
    shardings = [leaf.sharding for leaf in jax.tree.leaves(state)]
    state = pccl.sync(state)
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == shardings
    same(state["w"], np.zeros(8))
    same(state["r"], np.zeros(2**18))


def an_asynchronous_call_returns_jax_arrays() -> None:
    work = pccl.allreduce_async([jnp.ones(3), jnp.ones(2**18)])
    first, second = work.wait()
    assert isinstance(first, jax.Array)
    same(first, 2 * np.ones(3))
    same(second, 2 * np.ones(2**18))
