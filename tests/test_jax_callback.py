"""`pccl.allreduce` in JAX programs for other devices than CPUs: they call back into Python.

All run with programs for CPU devices that call back, too. `pytest -m gpu` runs those of a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
from jaxpeers import Peers, jax_peers, lose_one, needs_jax
from programs import jax_callback, jax_jit

pytestmark = needs_jax


def environment(platform: str) -> dict[str, str]:
    if platform == "cpu":
        return {}
    return {"JAX_PLATFORMS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def has_gpu() -> bool:
    """Whether JAX finds a GPU; asked in another process, for this one never loads JAX."""
    code = "import jax; jax.devices('gpu')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request: pytest.FixtureRequest) -> str:
    if request.param == "gpu" and not has_gpu():
        pytest.skip("needs a GPU that JAX knows")
    return str(request.param)


def ready(peers: Peers, platform: str) -> Peers:
    if platform == "cpu":
        peers.both(jax_callback.call_back_on_cpu)
    return peers


@pytest.fixture(scope="module")
def peers(platform: str) -> Iterator[Peers]:
    with jax_peers(2, **environment(platform)) as made:
        yield ready(made, platform)


@pytest.mark.parametrize(
    "program",
    [
        jax_callback.the_program_calls_back,
        jax_callback.a_tree_is_one_call,
        jax_callback.many_calls_run_in_the_order_of_their_trace,
        jax_callback.denormals_are_kept,
        jax_callback.arrays_without_elements,
        jax_callback.a_program_does_not_outlive_its_communicator,
        jax_callback.an_error_keeps_no_array,
        jax_callback.gradients_pass_through,
        jax_jit.an_array_that_is_not_donated_is_left_alone,
        jax_jit.scan_reduces_once_each_time_round,
        jax_jit.executions_that_follow_each_other_keep_their_order,
        jax_jit.compiled_and_eager_members_meet_by_a_tag,
        jax_jit.numbers_and_arrays_beside_tracers_become_arrays,
        jax_jit.complex_arrays_have_a_gradient,
        jax_jit.vmap_is_refused,
        jax_jit.gradients_pass_integers_by_and_other_ops_have_none,
        jax_jit.a_compiled_call_uses_the_communicator_it_was_given_or_the_latest_of_init,
    ],
    ids=lambda program: program.__name__,
)
def test_a_callback_does_what_a_custom_call_does(peers: Peers, program: object) -> None:
    peers.both(program)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_callback_gives_the_bytes_of_an_eager_call(peers: Peers, dtype: str, op: str) -> None:
    peers.both(partial(jax_jit.a_compiled_call_gives_the_bytes_that_an_eager_one_gives, dtype, op))


@pytest.mark.parametrize(
    ("dtype", "op"), [("bool", "max"), ("complex64", "avg"), ("float8_e4m3fn", "sum")]
)
def test_a_callback_takes_rare_dtypes(peers: Peers, dtype: str, op: str) -> None:
    peers.both(partial(jax_jit.a_compiled_call_gives_the_bytes_that_an_eager_one_gives, dtype, op))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_callback_weighs(peers: Peers, dtype: str) -> None:
    peers.both(partial(jax_callback.a_weighted_mean_has_the_bytes_of_an_eager_one, dtype))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_callback_sends_codes(peers: Peers, kind: str) -> None:
    peers.both(partial(jax_callback.a_quantized_call_has_the_bytes_of_an_eager_one, kind))


def test_errors_of_a_callback_are_typed(peers: Peers) -> None:
    for sentence in peers.both(jax_callback.errors_are_typed):
        assert "allreduce 0 of step" in sentence, sentence
        assert "float32[3]" in sentence and "float32[4]" in sentence, sentence


def test_a_program_for_several_devices_is_refused_by_name(peers: Peers, platform: str) -> None:
    if platform != "cpu":
        pytest.skip("runs on the stand-in, which has four devices")
    peers.both(jax_callback.several_devices_are_refused_by_name)


def test_survivors_finish_a_callback_when_a_member_is_killed(platform: str) -> None:
    with jax_peers(3, **environment(platform)) as three:
        ready(three, platform)
        gone, told = lose_one(
            three, jax_jit.survivors_finish_a_compiled_call_when_a_member_is_killed
        )
        assert sorted(rank for rank, _, _ in told) == sorted({0, 1, 2} - {gone})
        assert {total for _, total, _ in told} == {3.0 - gone} and {n for *_, n in told} == {2.0}
