"""`pccl.allreduce` in functions that JAX traces: real processes, four devices each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from jaxpeers import Peers, jax_peers, lose_one, needs_jax
from programs import jax_jit

pytestmark = needs_jax


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with jax_peers() as made:
        yield made


def test_a_tree_is_one_call_of_the_compiled_program(peers: Peers) -> None:
    peers.both(jax_jit.a_tree_is_one_call_of_the_compiled_program)


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint16"])
def test_a_compiled_call_gives_the_bytes_that_an_eager_one_gives(
    peers: Peers, dtype: str, op: str
) -> None:
    peers.both(partial(jax_jit.a_compiled_call_gives_the_bytes_that_an_eager_one_gives, dtype, op))


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        *(("bool", op) for op in ("min", "max")),
        *(("complex64", op) for op in ("sum", "avg")),
        *((f"float8_{kind}", op) for kind in ("e4m3fn", "e5m2") for op in ("sum", "prod")),
    ],
)
def test_a_compiled_call_takes_rare_dtypes(peers: Peers, dtype: str, op: str) -> None:
    peers.both(partial(jax_jit.a_compiled_call_gives_the_bytes_that_an_eager_one_gives, dtype, op))


def test_complex_arrays_have_a_gradient(peers: Peers) -> None:
    peers.both(jax_jit.complex_arrays_have_a_gradient)


def test_a_donated_array_is_reduced_in_its_own_memory(peers: Peers) -> None:
    peers.both(jax_jit.a_donated_array_is_reduced_in_its_own_memory)


def test_an_array_that_is_not_donated_is_left_alone(peers: Peers) -> None:
    peers.both(jax_jit.an_array_that_is_not_donated_is_left_alone)


def test_a_call_whose_result_nobody_uses_is_dropped_and_the_others_keep_their_names(
    peers: Peers,
) -> None:
    peers.both(jax_jit.a_call_whose_result_nobody_uses_is_dropped_and_the_others_keep_their_names)


def test_scan_reduces_once_each_time_round(peers: Peers) -> None:
    peers.both(jax_jit.scan_reduces_once_each_time_round)


def test_shard_map_reduces_each_device_with_its_like_on_other_hosts(peers: Peers) -> None:
    peers.both(jax_jit.shard_map_reduces_each_device_with_its_like_on_other_hosts)


@pytest.mark.parametrize("sharding", jax_jit.SHARDINGS)
def test_arrays_on_a_mesh_are_gathered_and_reduced_once(peers: Peers, sharding: str) -> None:
    peers.both(partial(jax_jit.arrays_on_a_mesh_are_gathered_and_reduced_once, sharding))


def test_a_mesh_of_devices_meets_a_member_with_one_device(peers: Peers) -> None:
    peers.both(jax_jit.a_mesh_of_devices_meets_a_member_with_one_device)


def test_scan_and_grad_over_arrays_on_a_mesh(peers: Peers) -> None:
    peers.both(jax_jit.scan_and_grad_over_arrays_on_a_mesh)


def test_a_shard_map_over_some_axes_of_its_mesh_is_refused_by_name(peers: Peers) -> None:
    peers.both(jax_jit.a_shard_map_over_some_axes_of_its_mesh_is_refused_by_name)


def test_shard_map_with_sums_over_devices_around_it(peers: Peers) -> None:
    peers.both(jax_jit.shard_map_with_sums_over_devices_around_it)


def test_pmap_reduces_each_device_with_its_like_on_other_hosts(peers: Peers) -> None:
    peers.both(jax_jit.pmap_reduces_each_device_with_its_like_on_other_hosts)


def test_calls_of_many_devices_in_flight_do_not_starve_each_other(peers: Peers) -> None:
    # Eight calls of each member at once on two cores, each followed by more work.
    peers.both(jax_jit.calls_of_many_devices_in_flight_do_not_starve_each_other)


def test_calls_that_members_make_in_opposite_order_meet_by_their_tags(peers: Peers) -> None:
    # Two threads of each member; the second starts once the first's call has begun.
    peers.both(
        partial(
            jax_jit.calls_that_members_make_in_opposite_order_meet_by_their_tags, ["one", "two"]
        ),
        partial(
            jax_jit.calls_that_members_make_in_opposite_order_meet_by_their_tags, ["two", "one"]
        ),
    )


def test_executions_that_follow_each_other_keep_their_order(peers: Peers) -> None:
    # Dispatched without waiting; the first one's input is late on one member only.
    peers.both(jax_jit.executions_that_follow_each_other_keep_their_order)


def test_compiled_and_eager_members_meet_by_a_tag(peers: Peers) -> None:
    peers.both(jax_jit.compiled_and_eager_members_meet_by_a_tag)


def test_numbers_and_arrays_beside_tracers_become_arrays(peers: Peers) -> None:
    peers.both(jax_jit.numbers_and_arrays_beside_tracers_become_arrays)


def test_a_call_without_a_tracer_is_made_whenever_the_program_runs(peers: Peers) -> None:
    peers.both(jax_jit.a_call_without_a_tracer_is_made_whenever_the_program_runs)


@pytest.mark.parametrize("name", ["out=", "return_info="])
def test_what_a_traced_call_cannot_do_is_refused(peers: Peers, name: str) -> None:
    peers.both(partial(jax_jit.what_a_traced_call_cannot_do_is_refused, name))


def test_vmap_is_refused(peers: Peers) -> None:
    peers.both(jax_jit.vmap_is_refused)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_gradients_are_those_of_psum_and_pmean(peers: Peers, op: str) -> None:
    # Two members of four devices each, against the same two as an axis of one host's devices.
    peers.both(partial(jax_jit.gradients_are_those_of_psum_and_pmean, op))


def test_gradients_pass_integers_by_and_other_ops_have_none(peers: Peers) -> None:
    peers.both(jax_jit.gradients_pass_integers_by_and_other_ops_have_none)


def test_programs_that_were_traced_differently_are_told_so(peers: Peers) -> None:
    told = peers.both(jax_jit.programs_that_were_traced_differently_are_told_so)
    for sentence in told:
        assert "allreduce 0 of step, device 0" in sentence, sentence
        assert "float32[3]" in sentence and "float32[4]" in sentence, sentence


def test_an_error_in_one_compiled_call_is_typed_in_the_next_eager_one(peers: Peers) -> None:
    peers.both(jax_jit.an_error_in_one_compiled_call_is_typed_in_the_next_eager_one)


def test_a_call_that_stands_at_two_places_of_a_program_is_refused(peers: Peers) -> None:
    # Both have one tag, and XLA may run them in another order on each member.
    peers.both(jax_jit.a_call_that_stands_at_two_places_of_a_program_is_refused)


def test_a_call_at_two_places_of_a_program_for_a_mesh_is_refused(peers: Peers) -> None:
    peers.both(jax_jit.a_call_at_two_places_of_a_program_for_a_mesh_is_refused)


def test_a_call_in_an_unrolled_loop_is_refused_with_the_reason(peers: Peers) -> None:
    peers.both(jax_jit.a_call_in_an_unrolled_loop_is_refused_with_the_reason)


def test_checkpoint_keeps_the_results_of_calls(peers: Peers) -> None:
    peers.both(jax_jit.checkpoint_keeps_the_results_of_calls)


def test_a_program_raises_that_its_communicator_is_closed(peers: Peers) -> None:
    peers.both(jax_jit.a_program_raises_that_its_communicator_is_closed)


def test_a_compiled_call_uses_the_communicator_it_was_given_or_the_latest_of_init(
    peers: Peers,
) -> None:
    peers.both(jax_jit.a_compiled_call_uses_the_communicator_it_was_given_or_the_latest_of_init)


def test_calls_are_forgotten_with_their_communicator(peers: Peers) -> None:
    peers.both(jax_jit.calls_are_forgotten_with_their_communicator)


def test_a_program_compiled_before_goes_on_after_a_new_init() -> None:
    with jax_peers(1) as alone:
        alone.both(jax_jit.a_program_compiled_before_goes_on_after_a_new_init)


def test_survivors_finish_a_compiled_call_when_a_member_is_killed() -> None:
    with jax_peers(3) as three:
        gone, told = lose_one(
            three, jax_jit.survivors_finish_a_compiled_call_when_a_member_is_killed
        )
        assert sorted(rank for rank, _, _ in told) == sorted({0, 1, 2} - {gone})
        assert {total for _, total, _ in told} == {3.0 - gone} and {n for *_, n in told} == {2.0}


def test_a_timeout_under_jit_is_typed() -> None:
    with jax_peers(2) as two:
        two.tell(
            jax_jit.a_timeout_under_jit_is_typed,
            jax_jit.call_nothing,
        )
        first, second = two.answers()
        assert first == "RANK_CONNECTION_LOST" and second == "did not call"


def test_average_gradients_is_a_link_of_an_optimizers_chain(peers: Peers) -> None:
    pytest.importorskip("optax", reason="needs optax")
    peers.both(jax_jit.average_gradients_is_a_link_of_an_optimizers_chain)
