"""JAX arrays, eagerly: values, kinds, shardings, and that nothing is copied on the way."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from jaxpeers import Peers, jax_peers, needs_jax
from programs import jax_eager

pytestmark = needs_jax


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with jax_peers() as made:
        yield made


def test_a_tree_of_jax_arrays_comes_back_as_one(peers: Peers) -> None:
    peers.both(jax_eager.a_tree_of_jax_arrays_comes_back_as_one)


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8"])
def test_dtypes_combine_as_numpys_do(peers: Peers, dtype: str, op: str) -> None:
    peers.both(partial(jax_eager.dtypes_combine_as_numpys_do, dtype, op))


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        *(("bool", op) for op in ("min", "max")),
        *(("complex64", op) for op in ("sum", "avg")),
        *((f"float8_{kind}", op) for kind in ("e4m3fn", "e5m2") for op in ("sum", "avg", "max")),
    ],
)
def test_rare_dtypes_combine_as_numpys_do(peers: Peers, dtype: str, op: str) -> None:
    peers.both(partial(jax_eager.dtypes_combine_as_numpys_do, dtype, op))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_an_array_without_axes_stays_one(peers: Peers, dtype: str) -> None:
    peers.both(partial(jax_eager.an_array_without_axes_stays_one, dtype))


def test_64_bit_arrays_keep_their_bits_also_where_jax_would_take_them(peers: Peers) -> None:
    peers.both(jax_eager.arrays_of_64_bits_keep_them_also_where_jax_would_not)


@pytest.mark.parametrize("dtype", ["float8_e4m3b11fnuz", "int4"])
def test_small_dtypes_that_are_not_there_are_refused_by_name(peers: Peers, dtype: str) -> None:
    peers.both(partial(jax_eager.small_dtypes_that_are_not_there_are_refused_by_name, dtype))


def test_other_arrays_are_refused(peers: Peers) -> None:
    peers.both(jax_eager.other_arrays_are_refused)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_nothing_is_copied_on_the_way_in_or_out(peers: Peers, dtype: str) -> None:
    # 1 MiB: results from 256 KiB on are aligned to 64 bytes, as JAX wants memory that it shares.
    peers.both(partial(jax_eager.nothing_is_copied_on_the_way_in_or_out, dtype))


def test_a_donated_result_is_not_written_into_nor_its_memory_used_again_too_early(
    peers: Peers,
) -> None:
    peers.both(jax_eager.a_donated_result_is_not_written_into_nor_its_memory_used_again_too_early)


def test_where_an_array_may_move_its_result_may_too(peers: Peers) -> None:
    peers.both(jax_eager.where_an_array_may_move_its_result_may_too)


@pytest.mark.parametrize("name", ["replicated", "by row", "by column"])
@pytest.mark.parametrize("rows", [8, 1024])  # copied, and shared with the result
def test_a_sharded_array_is_reduced_shard_by_shard_and_stays_sharded(
    peers: Peers, name: str, rows: int
) -> None:
    peers.both(
        partial(jax_eager.a_sharded_array_is_reduced_shard_by_shard_and_stays_sharded, name, rows)
    )


def test_an_array_sharded_over_one_axis_of_a_mesh_goes_once(peers: Peers) -> None:
    peers.both(jax_eager.an_array_sharded_over_one_axis_of_a_mesh_goes_once)


def test_members_that_order_their_devices_differently_mean_the_same_parts(peers: Peers) -> None:
    peers.both(jax_eager.members_that_order_their_devices_differently_mean_the_same_parts)


def test_members_that_shard_differently_are_told(peers: Peers) -> None:
    peers.both(jax_eager.members_that_shard_differently_are_told)


def test_donated_replicas_of_a_result_do_not_share_what_they_become(peers: Peers) -> None:
    peers.both(jax_eager.donated_replicas_of_a_result_do_not_share_what_they_become)


def test_sync_gives_sharded_arrays_back_as_they_were(peers: Peers) -> None:
    peers.both(jax_eager.sync_gives_sharded_arrays_back_as_they_were)


def test_an_asynchronous_call_returns_jax_arrays(peers: Peers) -> None:
    peers.both(jax_eager.an_asynchronous_call_returns_jax_arrays)
