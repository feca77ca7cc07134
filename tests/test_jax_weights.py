"""Weights and fewer bits in functions that JAX traces: real processes, four devices each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from jaxpeers import Peers, jax_peers, lose_one, needs_jax
from programs import jax_weights
from workers import Program

pytestmark = needs_jax


@pytest.fixture(scope="module", params=[2, 3])
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    with jax_peers(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def apart() -> Iterator[Peers]:
    """As on hosts of their own: on one host nothing is quantized."""
    with jax_peers(3, PCCL_SHM="0") as made:
        yield made


def equal(peers: Peers, program: Program) -> None:
    """Calls it on all. Their answers have to be the same."""
    answers = peers.both(program)
    assert answers[0] is not None and all(one == answers[0] for one in answers)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32"],
)
def test_a_compiled_weighted_mean_has_the_bytes_of_an_eager_one(peers: Peers, dtype: str) -> None:
    equal(
        peers,
        partial(jax_weights.a_compiled_weighted_mean_has_the_bytes_of_an_eager_one, dtype),
    )


def test_64_bits_are_averaged_too(peers: Peers) -> None:
    equal(
        peers,
        jax_weights.numbers_of_64_bits_are_averaged_too,
    )


@pytest.mark.parametrize("weight", jax_weights.SCALARS)
def test_a_weight_may_be_a_scalar_of_any_type(peers: Peers, weight: str) -> None:
    equal(
        peers,
        partial(jax_weights.a_weight_may_be_a_scalar_of_any_type, weight),
    )


def test_a_tree_and_empty_arrays_and_only_the_weight_traced(peers: Peers) -> None:
    equal(
        peers,
        jax_weights.a_tree_and_empty_arrays_and_only_the_weight_traced,
    )


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_eager_and_compiled_members_meet_by_a_tag(peers: Peers, quantize: str | None) -> None:
    equal(
        peers,
        partial(jax_weights.eager_and_compiled_members_meet_by_a_tag, quantize),
    )


def test_in_loops_shard_map_and_pmap(peers: Peers) -> None:
    peers.both(jax_weights.in_loops_shard_map_and_pmap)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((0.0, 0.0, 0.0), ["add up to 0"] * 3),
        ((1.0, -1.0, 1.0), ["a member's weight", "not -1", "a member's weight"]),
        ((float("nan"), 2.0, 1.0), ["not nan", "a member's weight", "a member's weight"]),
        ((1.0, float("inf"), 0.0), ["a member's weight", "not inf", "a member's weight"]),
        ((1e-30, 2.0, 1.0), ["not 1e-30", "a member's weight", "a member's weight"]),
    ],
)
def test_weights_that_are_none_are_an_error_on_all_members(
    peers: Peers, weights: tuple[float, ...], words: list[str]
) -> None:
    count = len(peers.workers)
    given = [str(weight) for weight in weights]
    told = peers.both(partial(jax_weights.weights_that_are_none_are_an_error_on_all_members, given))
    assert sorted(rank for rank, _ in told) == list(range(count))
    for rank, said in told:
        assert all(words[rank] in sentence for sentence in said), said


def test_what_a_member_without_weight_passes_does_not_count(peers: Peers) -> None:
    peers.both(jax_weights.what_a_member_without_weight_passes_does_not_count)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("a weighted sum", "InvalidArgument", 'goes with op "avg" only, not with sum'),
        ("a vector as a weight", "InvalidArgument", "not a traced float32[3]"),
        ("a complex weight", "InvalidArgument", "not a traced complex64[]"),
        ("a weight in text", "InvalidArgument", "not a str"),
        ("a weight of True", "InvalidArgument", "not a bool"),
        ("out=", "NotSupported", "out="),
        ("return_info=", "NotSupported", "return_info="),
        ("a quantized product", "InvalidArgument", "a product cannot be quantized"),
        ("an unknown code", "InvalidArgument", "quantize is one of"),
        ("error feedback", "NotSupported", "error_feedback"),
    ],
)
def test_what_makes_no_sense_is_refused_while_tracing(
    peers: Peers, name: str, kind: str, words: str
) -> None:
    peers.both(partial(jax_weights.what_makes_no_sense_is_refused_while_tracing, name, kind, words))


def test_members_with_and_without_weights_or_codes_are_told(peers: Peers) -> None:
    peers.both(jax_weights.members_with_and_without_weights_or_codes_are_told)


# Gradients of each member's loss, added up over the members, as `lax.psum` and `lax.pmean` do.
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_gradients_are_those_of_a_weighted_mean_over_devices(
    peers: Peers, quantize: str | None
) -> None:
    peers.both(partial(jax_weights.gradients_are_those_of_a_weighted_mean_over_devices, quantize))


def test_gradients_agree_with_differences(peers: Peers) -> None:
    # Differences of the sum of all members' losses, for a change on one member.
    peers.both(jax_weights.gradients_agree_with_differences)


def test_gradients_in_16_bits_and_under_shard_map(peers: Peers) -> None:
    peers.both(jax_weights.gradients_in_16_bits_and_under_shard_map)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "float8"])
def test_a_compiled_call_sends_fewer_bits_as_an_eager_one_does(apart: Peers, dtype: str) -> None:
    equal(
        apart,
        partial(jax_weights.a_compiled_call_sends_fewer_bits_as_an_eager_one_does, dtype),
    )


def test_how_codes_are_made_may_be_set(apart: Peers) -> None:
    equal(
        apart,
        jax_weights.how_codes_are_made_may_be_set,
    )


def test_the_gradient_of_a_quantized_call_is_that_of_an_exact_one(apart: Peers) -> None:
    apart.both(jax_weights.the_gradient_of_a_quantized_call_is_that_of_an_exact_one)


def test_alone_the_mean_is_the_input_exactly() -> None:
    with jax_peers(1) as alone:
        alone.both(jax_weights.alone_the_mean_is_the_input_exactly)


def test_survivors_of_a_killed_member_get_their_own_weighted_mean() -> None:
    with jax_peers(3) as three:
        gone, told = lose_one(
            three, jax_weights.survivors_of_a_killed_member_get_their_own_weighted_mean
        )
        left = [rank for rank in range(3) if rank != gone]
        mean = sum((rank + 1) * 10.0**rank for rank in left) / sum(rank + 1 for rank in left)
        assert sorted(rank for rank, _ in told) == left
        assert len({found for _, found in told}) == 1
        assert told[0][1] == pytest.approx(mean, rel=1e-6)
