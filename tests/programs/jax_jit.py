"""`pccl.allreduce` in functions that JAX traces: what peers check."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import pccl
from pccl import _core
from programs.jax_peer import (
    NamedSharding,
    P,
    adapter,
    address,
    communicator,
    jax,
    jnp,
    mesh,
    raised,
    same,
    typed,
)
from programs.peer import engine, say_when_calling

# The decorators are JAX's, which is not typed here.
# mypy: disallow-untyped-decorators=False


def grid(explicit: bool = False) -> Any:
    """The devices as two by two, along the axes "a" and "b"."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2 if explicit else None
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"), axis_types=kinds)


SHARDINGS: dict[str, Callable[[], Any]] = {
    "replicated": lambda: NamedSharding(mesh(), P()),
    "sharded": lambda: NamedSharding(mesh(), P("x")),
    "two axes": lambda: NamedSharding(grid(), P("a", "b")),
    "one of two axes": lambda: NamedSharding(grid(), P("b")),
    "both axes on one dimension": lambda: NamedSharding(grid(), P(None, ("b", "a"))),
    "explicit axes": lambda: NamedSharding(grid(explicit=True), P("a")),
}


def run_a_step_of_a_tree() -> tuple[Any, Any]:
    """Runs a compiled program that reduces a tree, which stays as it was; returns both."""
    rank = pccl.rank()

    @jax.jit
    def step(tree: Any) -> Any:
        return pccl.allreduce(tree)

    tree = {"w": jnp.full((3, 4), rank + 1.0), "n": [jnp.arange(5), jnp.bfloat16(rank)]}
    for _ in range(3):
        total = step(tree)
        assert total["w"].devices() == tree["w"].devices()
        same(total["w"], np.full((3, 4), 3.0))
        same(total["n"][0], 2 * np.arange(5))
        assert total["n"][1].dtype == "bfloat16" and float(total["n"][1]) == 1
    same(tree["w"], np.full((3, 4), rank + 1.0))
    return step, tree


def a_tree_is_one_call_of_the_compiled_program() -> None:
    step, tree = run_a_step_of_a_tree()
    text = step.lower(tree).as_text()
    assert text.count("custom_call @pccl_allreduce") == 1, text


def a_compiled_call_gives_the_bytes_that_an_eager_one_gives(dtype: str, op: str) -> None:
    rank = pccl.rank()
    x = jnp.asarray(np.arange(1000) % 50 + rank, dtype)
    if dtype == "complex64":
        x = x * (2 - 1j)
    compiled = jax.jit(lambda v: pccl.allreduce(v, op))(x)
    eager = pccl.allreduce(x, op)
    assert compiled.dtype == eager.dtype == dtype
    assert np.asarray(compiled).tobytes() == np.asarray(eager).tobytes()


def a_donated_array_is_reduced_in_its_own_memory() -> None:
    rank = pccl.rank()
    reduce = jax.jit(lambda x: pccl.allreduce(x), donate_argnums=0)
    x = jnp.full(2**18, rank + 1.0)
    x.block_until_ready()
    before = address(x)
    total = reduce(x)
    total.block_until_ready()
    assert x.is_deleted() and address(total) == before
    same(total, np.full(2**18, 3.0))


def an_array_that_is_not_donated_is_left_alone() -> None:
    rank = pccl.rank()
    x = jnp.full(2**18, rank + 1.0)
    total, doubled = jax.jit(lambda x: (pccl.allreduce(x), 2 * x))(x)
    same(total, np.full(2**18, 3.0))
    same(doubled, np.full(2**18, 2.0 * (rank + 1)))
    same(x, np.full(2**18, rank + 1.0))


def a_call_whose_result_nobody_uses_is_dropped_and_the_others_keep_their_names() -> None:
    @jax.jit
    def step(x: Any) -> Any:
        pccl.allreduce(jnp.sin(x))
        return pccl.allreduce(x)

    text = step.lower(jnp.ones(3)).as_text()
    assert text.count("custom_call @pccl_allreduce") == 1 and "allreduce 1 of step" in text, text
    same(step(jnp.ones(3)), np.full(3, 2.0))


def scan_reduces_once_each_time_round() -> None:
    rank = pccl.rank()

    def body(carry: Any, x: Any) -> Any:
        carry = pccl.allreduce(carry + x, "avg")
        return carry, pccl.allreduce(carry * (rank + 1))

    @jax.jit
    def loop(start: Any, xs: Any) -> Any:
        return jax.lax.scan(body, start, xs)

    last, all_of = loop(jnp.float32(rank), jnp.arange(20, dtype=jnp.float32))
    carry, expected = 0.5, []
    for x in range(20):
        carry += x
        expected.append(3 * carry)
    assert float(last) == carry
    same(all_of, np.array(expected, np.float32))


def shard_map_reduces_each_device_with_its_like_on_other_hosts() -> None:
    rank = pccl.rank()

    @jax.jit
    @jax.shard_map(mesh=mesh(), in_specs=P("x"), out_specs=P("x"))
    def step(x: Any) -> Any:
        return pccl.allreduce(x)

    whole = np.arange(16, dtype=np.float32).reshape(8, 2)
    for turn in range(3):
        total = step(whole * (rank + 1) + turn)
        same(total, 3 * whole + 2 * turn)
    assert total.sharding.is_equivalent_to(NamedSharding(mesh(), P("x")), 2)


def arrays_on_a_mesh_are_gathered_and_reduced_once(sharding: str) -> None:
    rank = pccl.rank()
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    x = jax.device_put(whole * (rank + 1), SHARDINGS[sharding]())
    n = jax.device_put(np.arange(4) + rank, NamedSharding(x.sharding.mesh, P()))

    @jax.jit
    def step(x: Any, n: Any) -> Any:
        total, mean = pccl.allreduce({"x": x, "n": n}), pccl.allreduce(2 * x, "avg")
        return total, mean, total["x"].sum() + mean.sum()

    for _ in range(3):
        total, mean, number = step(x, n)
        same(total["x"], 3 * whole)
        same(total["n"], 2 * np.arange(4) + 1)
        same(mean, 3 * whole)
        assert float(number) == 6 * whole.sum()
        for part in total["x"].addressable_shards:
            same(part.data, 3 * whole[part.index])


def a_mesh_of_devices_meets_a_member_with_one_device() -> None:
    rank = pccl.rank()
    x = np.arange(32, dtype=np.float32).reshape(8, 4) * (rank + 1)
    if rank == 0:
        x = jax.device_put(x, NamedSharding(mesh(), P("x")))

    @jax.jit
    def step(x: Any) -> Any:
        return pccl.allreduce(pccl.allreduce(x) / 3, "avg", weight=2.0)

    for _ in range(3):
        same(step(x), np.arange(32).reshape(8, 4))


def scan_and_grad_over_arrays_on_a_mesh() -> None:
    rank = pccl.rank()
    x = jax.device_put(np.full((8, 4), rank + 1, np.float32), NamedSharding(mesh(), P("x")))

    @jax.jit
    def loop(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            carry = pccl.allreduce(carry, "avg")
            return carry + rank, carry[0, 0]

        return jax.lax.scan(body, x, length=10)

    last, firsts = loop(x)
    same(last, np.full((8, 4), 6.0 + rank))
    same(firsts, 1.5 + np.arange(10) / 2)
    same(
        jax.jit(jax.grad(lambda x: jnp.sum(pccl.allreduce(x, "avg") * (rank + 1))))(x),
        np.full((8, 4), 1.5),
    )


def a_shard_map_over_some_axes_of_its_mesh_is_refused_by_name() -> None:
    step = jax.shard_map(
        pccl.allreduce, mesh=grid(), in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
    )
    error = raised(pccl.NotSupported, lambda: jax.jit(step)(np.ones((4, 4), np.float32)))
    assert "not over b" in str(error), error


def shard_map_with_sums_over_devices_around_it() -> None:
    rank = pccl.rank()

    @jax.jit
    @jax.shard_map(mesh=mesh(), in_specs=P("x"), out_specs=P(), check_vma=False)
    def mean(x: Any) -> Any:
        share = jax.lax.psum_scatter(x[0], "x", tiled=True)
        return jax.lax.all_gather(pccl.allreduce(share, "avg"), "x", tiled=True)

    x = np.arange(32, dtype=np.float32).reshape(4, 8) + rank
    for _ in range(5):
        same(mean(x), (2 * np.arange(32).reshape(4, 8) + 1).sum(0) / 2)


def pmap_reduces_each_device_with_its_like_on_other_hosts() -> None:
    rank = pccl.rank()
    step = jax.pmap(lambda x: jax.lax.psum(pccl.allreduce(x), "d"), axis_name="d")
    x = jnp.arange(8.0).reshape(4, 2) + rank
    for _ in range(3):
        same(step(x), np.tile((2 * np.arange(8.0).reshape(4, 2) + 1).sum(0), (4, 1)))


def calls_of_many_devices_in_flight_do_not_starve_each_other() -> None:
    @jax.jit
    @jax.shard_map(mesh=mesh(), in_specs=P("x"), out_specs=P("x"))
    def step(x: Any) -> Any:
        a, b = pccl.allreduce(x @ x.T), pccl.allreduce(jnp.sin(x))
        return jnp.concatenate([a, b @ b.T])

    x = jnp.ones((1024, 256))
    first = np.asarray(step(x))
    for _ in range(10):
        same(step(x), first)


def calls_that_members_make_in_opposite_order_meet_by_their_tags(order: list[str]) -> None:
    one = jax.jit(lambda x: pccl.allreduce(x, tag=1))
    two = jax.jit(lambda x: pccl.allreduce(x, tag=2))
    results = {}

    def call(name: Any, function: Any, x: Any) -> None:
        results[name] = np.asarray(function(x))

    x, y = jnp.ones(2**16), jnp.full(2**16, 5.0)
    calls = {"one": (one, x), "two": (two, y)}
    threads = [threading.Thread(target=call, args=(name, *calls[name])) for name in order]
    threads[0].start()
    while engine(communicator()).unfinished() < 1 and threads[0].is_alive():
        threads[0].join(0.001)
    threads[1].start()
    for thread in threads:
        thread.join()
    same(results["one"], np.full(2**16, 2.0))
    same(results["two"], np.full(2**16, 10.0))


def executions_that_follow_each_other_keep_their_order() -> None:
    rank = pccl.rank()
    slow = jax.jit(lambda m: jax.lax.fori_loop(0, 20, lambda i, m: jnp.tanh(m @ m), m)[0])
    reduce = jax.jit(lambda x: pccl.allreduce(x))
    m = jnp.zeros((512, 512))
    late = slow(m) if rank == 0 else jnp.zeros(512)
    totals = [reduce(late + 1), reduce(jnp.full(512, 2.0)), reduce(jnp.full(512, 3.0))]
    for number, total in enumerate(totals, 1):
        same(total, np.full(512, 2.0 * number))


def compiled_and_eager_members_meet_by_a_tag() -> None:
    rank = pccl.rank()
    x = {"a": jnp.arange(4.0)}

    def reduce(tree: Any) -> Any:
        return pccl.allreduce(tree, tag=77)

    same((jax.jit(reduce) if rank else reduce)(x)["a"], 2 * np.arange(4.0))


def numbers_and_arrays_beside_tracers_become_arrays() -> None:
    made = jax.jit(lambda x: pccl.allreduce([x, 3, 2.5, np.ones(2)], "avg"))(jnp.ones(2))
    same(made[0], np.ones(2))
    assert float(made[1]) == 3 and float(made[2]) == 2.5
    error = raised(
        pccl.InvalidArgument,
        lambda: jax.jit(lambda x: pccl.allreduce({"x": x, "s": "text"}))(jnp.ones(2)),
    )
    assert "tree['s']" in str(error)
    error = raised(
        pccl.InvalidArgument, lambda: jax.jit(lambda x: pccl.allreduce({"x": x > 0}))(jnp.ones(2))
    )
    assert "tree['x']: dtype bool" in str(error) and 'not with "sum"' in str(error)


def a_call_without_a_tracer_is_made_whenever_the_program_runs() -> None:
    rank = pccl.rank()

    @jax.jit
    def step(x: Any) -> Any:
        members = pccl.allreduce(1)
        mean = pccl.allreduce({"m": np.full(2, rank, np.float32)}, "avg", weight=1)["m"]
        with jax.ensure_compile_time_eval():
            once = pccl.allreduce(np.ones(3))
        assert isinstance(members, jax.core.Tracer) and isinstance(once, np.ndarray)
        return x * members + mean[0], once

    for _ in range(2):
        before = pccl.stats().operations
        total, once = step(jnp.ones(3))
        same(total, np.full(3, 2.5))
        same(once, np.full(3, 2.0))
    assert pccl.stats().operations - before == 2
    # Eager transformations make no program.
    same(jax.grad(lambda x: x * pccl.allreduce(np.float32(1)))(1.0), 2)
    same(jax.vmap(lambda x: x * pccl.allreduce(1))(jnp.ones(3)), np.full(3, 2))


def complex_arrays_have_a_gradient() -> None:
    rank = pccl.rank()
    z = jnp.full(3, 1.0 + rank + 2j)

    def loss(z: jax.Array, w: Any) -> jax.Array:
        made = pccl.allreduce(z, "avg", weight=w) if w is not None else pccl.allreduce(z)
        return jnp.sum(jnp.abs(made) ** 2)

    # All members' losses are the same function of the sum, so the gradient is their number times
    # that of one, as with lax.psum: conj(2 * sum) * 2.
    same(jax.jit(jax.grad(loss))(z, None), np.full(3, 2 * np.conj(2 * (3 + 4j))))
    weight = jnp.float32(1 + rank)
    of_z, of_weight = jax.jit(jax.grad(loss, argnums=(0, 1)))(z, weight)
    mean = (1 * (1 + 2j) + 2 * (2 + 2j)) / 3
    off = np.asarray(z) - mean
    np.testing.assert_allclose(of_z, np.conj(2 * mean) * (1 + rank) / 1.5 * np.ones(3), rtol=1e-5)
    np.testing.assert_allclose(of_weight, np.sum(np.conj(2 * mean) * off).real / 1.5, rtol=1e-4)
    assert of_weight.dtype == jnp.float32


def what_a_traced_call_cannot_do_is_refused(name: str) -> None:
    calls = {
        "out=": lambda x: pccl.allreduce(x, out=x),
        "return_info=": lambda x: pccl.allreduce(x, return_info=True),
    }
    call = jax.jit(calls[name])
    assert name in str(raised(pccl.NotSupported, lambda: call(jnp.ones(2))))
    given = np.ones(2)
    for other in (
        pccl.allreduce_async,
        lambda _: pccl.allreduce_async(given),
        lambda _: pccl.allreduce_async([1, 2]),
        lambda _: pccl.allgather(given),
        lambda _: pccl.broadcast(3),
    ):
        raised(pccl.NotSupported, partial(jax.jit(other), jnp.ones(2)))


def vmap_is_refused() -> None:
    def reduce(x: Any) -> Any:
        return pccl.allreduce(x)

    x = jnp.ones((2, 3))
    for call in (jax.vmap(reduce), jax.vmap(jax.jit(reduce)), jax.jit(jax.vmap(reduce))):
        assert "vmap" in str(raised(pccl.NotSupported, partial(call, x)))


def gradients_are_those_of_psum_and_pmean(op: str) -> None:
    rank = pccl.rank()
    like = {"sum": jax.lax.psum, "avg": jax.lax.pmean}[op]

    def weight(member: Any) -> Any:
        return jnp.arange(1.0, 4.0) * (member + 1)

    def ours(x: Any) -> Any:
        return jnp.sum(jnp.sin(pccl.allreduce(x, op) * weight(rank)) * x)

    def theirs(x: Any) -> Any:
        member = jax.lax.axis_index("m")
        return jnp.sum(jnp.sin(like(x, "m") * weight(member)) * x)

    inputs = jnp.stack([jnp.linspace(0, 1, 3), jnp.linspace(1, 2, 3)])
    expected = jax.pmap(jax.grad(theirs), axis_name="m")(inputs)[rank]
    for gradient in (jax.grad(ours), jax.jit(jax.grad(ours)), jax.grad(jax.jit(ours))):
        np.testing.assert_allclose(gradient(inputs[rank]), expected, rtol=1e-5)


def gradients_pass_integers_by_and_other_ops_have_none() -> None:
    rank = pccl.rank()

    def loss(x: Any) -> Any:
        total = pccl.allreduce({"x": x, "n": jnp.arange(3)})
        return jnp.sum(total["x"] * total["n"])

    same(jax.jit(jax.grad(loss))(jnp.ones(3)), 2 * 2 * np.arange(3.0))
    raised(
        pccl.NotSupported, lambda: jax.grad(lambda x: pccl.allreduce(x, "max").sum())(jnp.ones(3))
    )
    same(jax.jit(lambda x: pccl.allreduce(x, "max"))(jnp.ones(3) * rank), np.ones(3))


def programs_that_were_traced_differently_are_told_so() -> str:
    rank = pccl.rank()

    @jax.jit
    def step(x: Any, y: Any) -> Any:
        if rank == 0:
            return pccl.allreduce(x), pccl.allreduce(y)
        return pccl.allreduce(y), pccl.allreduce(x)

    def call() -> Any:
        return jax.block_until_ready(step(jnp.ones(3), jnp.ones(4)))

    sentence = typed(pccl.MismatchedCall, call)
    raised(jax.errors.JaxRuntimeError, call)
    same(pccl.allreduce(jnp.ones(3)), np.full(3, 2.0))
    return sentence


def an_error_in_one_compiled_call_is_typed_in_the_next_eager_one() -> None:
    rank = pccl.rank()
    bad = jax.jit(lambda x: pccl.allreduce(x @ x))  # enough work for JAX not to wait for it
    total = bad(jnp.ones((256 + rank, 256 + rank)))
    raised(pccl.MismatchedCall, lambda: pccl.allreduce(total))
    raised(pccl.MismatchedCall, lambda: pccl.allreduce(np.ones(3), "avg", weight=total[0, 0]))
    same(pccl.allreduce(jnp.ones(3)), np.full(3, 2.0))


def a_call_that_stands_at_two_places_of_a_program_is_refused() -> None:
    inner = jax.jit(lambda x: pccl.allreduce(x))
    outer = jax.jit(lambda x, y: (inner(x), inner(y)))

    sentence = typed(pccl.InvalidUsage, lambda: outer(jnp.ones(3), jnp.zeros(3)))
    assert "two places" in sentence
    same(jax.jit(lambda x: inner(x) + 1)(jnp.ones(3)), np.full(3, 3.0))


def a_call_at_two_places_of_a_program_for_a_mesh_is_refused() -> None:
    """Also where the devices come to the places in different order, because of other work."""
    whole = NamedSharding(mesh(), P())
    inner = jax.jit(lambda x: pccl.allreduce(x))

    def work(x: Any) -> Any:
        for _ in range(6):
            x = jnp.tanh(x @ x)
        return x[0, 0]

    outer = jax.jit(lambda x, u, v: (inner(x + work(u)), inner(x - work(v))))
    x = jax.device_put(np.ones(100, np.float32), whole)
    u = jax.device_put(np.zeros((200, 200), np.float32), whole)
    for _ in range(20):
        assert "two places" in typed(pccl.InvalidUsage, lambda: outer(x, u, u))
    same(jax.jit(lambda x: inner(x) + 1)(x), np.full(100, 3.0))


def a_call_in_an_unrolled_loop_is_refused_with_the_reason() -> None:
    def body(carry: Any, x: Any) -> Any:
        return pccl.allreduce(carry + x, "avg"), None

    xs = jnp.ones(6)
    loop = jax.jit(lambda x: jax.lax.scan(body, x, xs, unroll=2)[0])
    assert "unroll=" in typed(pccl.InvalidUsage, lambda: loop(jnp.ones(3)))


def checkpoint_keeps_the_results_of_calls() -> None:
    """One operation of each pass, as without it; also in a scan over layers, and around one."""
    rank = pccl.rank()

    def block(x: Any, w: Any) -> Any:
        return jnp.sin(pccl.allreduce(jnp.tanh(w * x), "avg")) * w

    def layers(block: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), jnp.arange(3.0), w)[0])

        return loss

    plain = layers(block)
    w = jnp.full((4, 3), rank + 1.0)
    expected = jax.jit(jax.value_and_grad(plain))(w)
    for kept in (layers(jax.checkpoint(block)), jax.checkpoint(plain)):
        gradient = jax.jit(jax.value_and_grad(kept))
        jax.block_until_ready(gradient(w))
        before = pccl.stats().operations
        loss, slope = gradient(w)
        np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
        np.testing.assert_allclose(slope, expected[1], rtol=1e-5, atol=1e-6)
        assert pccl.stats().operations - before == 2 * 4


def a_program_raises_that_its_communicator_is_closed() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        comm = pccl.Communicator(master.address)
        comm.connect()
        reduce = jax.jit(lambda x: pccl.allreduce(x, comm=comm))
        same(reduce(jnp.ones(3)), np.ones(3))
        comm.close()
        assert "closed" in typed(pccl.InvalidUsage, lambda: reduce(jnp.ones(3)))


def a_compiled_call_uses_the_communicator_it_was_given_or_the_latest_of_init() -> None:
    default = jax.jit(lambda x: pccl.allreduce(x))
    given = jax.jit(lambda x: pccl.allreduce(x, comm=communicator()))
    for reduce in (default, given):
        same(reduce(jnp.ones(3)), np.full(3, 2.0))


def a_program_compiled_before_goes_on_after_a_new_init() -> None:
    reduce = jax.jit(lambda x: pccl.allreduce(x))
    same(reduce(jnp.ones(3)), np.ones(3))
    pccl.shutdown()
    with adapter.typed_errors():
        raised(pccl.NotInitialized, lambda: pccl.allreduce(jnp.ones(3)))

    typed(pccl.NotInitialized, lambda: reduce(jnp.ones(3)))
    pccl.init()
    same(reduce(jnp.full(3, 5.0)), np.full(3, 5.0))


def calls_are_forgotten_with_their_communicator() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        before = _core.xla_tags()
        comm = pccl.Communicator(master.address)
        comm.connect()
        step = jax.jit(lambda x: pccl.allreduce(x, comm=comm))
        assert step(jnp.ones(3)).tolist() == [1, 1, 1]
        assert _core.xla_tags() == before + 1
        comm.close()
        assert _core.xla_tags() == before


def survivors_finish_a_compiled_call_when_a_member_is_killed() -> list[float]:
    rank = pccl.rank()
    pccl.allreduce(jnp.ones(3))
    say_when_calling(communicator())
    total, n = jax.jit(lambda x: pccl.allreduce([x, jnp.ones(1)]))(jnp.full(1000, rank))
    return [rank, float(total[0]), float(n[0])]


def a_timeout_under_jit_is_typed() -> Any:
    def call() -> None:
        with adapter.typed_errors():
            jax.block_until_ready(jax.jit(lambda x: pccl.allreduce(x, timeout=0.5))(jnp.ones(3)))

    return raised(pccl.Timeout, call).result.name


def average_gradients_is_a_link_of_an_optimizers_chain() -> None:
    rank = pccl.rank()
    import optax

    weights = {"w": jnp.ones(3), "b": jnp.float32(0)}
    optimizer = optax.chain(adapter.average_gradients(), optax.sgd(0.5))
    state = optimizer.init(weights)
    gradients = {"w": jnp.full(3, rank + 1.0), "b": jnp.float32(rank)}
    for update in (optimizer.update, jax.jit(optimizer.update)):
        updates, _ = update(gradients, state, weights)
        same(updates["w"], np.full(3, -0.75))
        assert float(updates["b"]) == -0.25


def reduce_once() -> int:
    rank = pccl.rank()
    pccl.allreduce(jnp.ones(3))
    return rank


def call_nothing() -> str:
    return "did not call"
