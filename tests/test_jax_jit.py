"""`pccl.allreduce` in functions that JAX traces: real processes, four devices each."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from jaxpeers import Peers, answer, jax_peers, needs_jax

pytestmark = needs_jax


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with jax_peers() as made:
        yield made


def test_a_tree_is_one_call_of_the_compiled_program(peers: Peers) -> None:
    peers.both("""
        @jax.jit
        def step(tree):
            return pccl.allreduce(tree)
        tree = {"w": jnp.full((3, 4), rank + 1.0), "n": [jnp.arange(5), jnp.bfloat16(rank)]}
        text = step.lower(tree).as_text()
        assert text.count("custom_call @pccl_allreduce") == 1, text
        for _ in range(3):
            total = step(tree)
            same(total["w"], np.full((3, 4), 3.0))
            same(total["n"][0], 2 * np.arange(5))
            assert total["n"][1].dtype == "bfloat16" and float(total["n"][1]) == 1
        same(tree["w"], np.full((3, 4), rank + 1.0))
    """)


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint16"])
def test_a_compiled_call_gives_the_bytes_that_an_eager_one_gives(
    peers: Peers, dtype: str, op: str
) -> None:
    peers.both(f"""
        x = jnp.asarray(np.arange(1000) % 50 + rank, "{dtype}")
        compiled = jax.jit(lambda v: pccl.allreduce(v, "{op}"))(x)
        eager = pccl.allreduce(x, "{op}")
        assert compiled.dtype == eager.dtype == "{dtype}"
        assert np.asarray(compiled).tobytes() == np.asarray(eager).tobytes()
    """)


def test_a_donated_array_is_reduced_in_its_own_memory(peers: Peers) -> None:
    peers.both("""
        reduce = jax.jit(lambda x: pccl.allreduce(x), donate_argnums=0)
        x = jnp.full(2**18, rank + 1.0)
        x.block_until_ready()
        before = address(x)
        total = reduce(x)
        total.block_until_ready()
        assert x.is_deleted() and address(total) == before
        same(total, np.full(2**18, 3.0))
    """)


def test_an_array_that_is_not_donated_is_left_alone(peers: Peers) -> None:
    peers.both("""
        x = jnp.full(2**18, rank + 1.0)
        total, doubled = jax.jit(lambda x: (pccl.allreduce(x), 2 * x))(x)
        same(total, np.full(2**18, 3.0))
        same(doubled, np.full(2**18, 2.0 * (rank + 1)))
        same(x, np.full(2**18, rank + 1.0))
    """)


def test_a_call_whose_result_nobody_uses_is_dropped_and_the_others_keep_their_names(
    peers: Peers,
) -> None:
    peers.both("""
        @jax.jit
        def step(x):
            pccl.allreduce(jnp.sin(x))
            return pccl.allreduce(x)
        text = step.lower(jnp.ones(3)).as_text()
        assert text.count("custom_call @pccl_allreduce") == 1 and "allreduce 1 of step" in text, text
        same(step(jnp.ones(3)), np.full(3, 2.0))
    """)


def test_scan_reduces_once_each_time_round(peers: Peers) -> None:
    peers.both("""
        def body(carry, x):
            carry = pccl.allreduce(carry + x, "avg")
            return carry, pccl.allreduce(carry * (rank + 1))
        @jax.jit
        def loop(start, xs):
            return jax.lax.scan(body, start, xs)
        last, all_of = loop(jnp.float32(rank), jnp.arange(20, dtype=jnp.float32))
        carry, expected = 0.5, []
        for x in range(20):
            carry += x
            expected.append(3 * carry)
        assert float(last) == carry
        same(all_of, np.array(expected, np.float32))
    """)


def test_shard_map_reduces_each_device_with_its_like_on_other_hosts(peers: Peers) -> None:
    peers.both("""
        @jax.jit
        @jax.shard_map(mesh=MESH, in_specs=P("x"), out_specs=P("x"))
        def step(x):
            return pccl.allreduce(x)
        whole = np.arange(16, dtype=np.float32).reshape(8, 2)
        for turn in range(3):
            total = step(whole * (rank + 1) + turn)
            same(total, 3 * whole + 2 * turn)
        assert total.sharding.is_equivalent_to(NamedSharding(MESH, P("x")), 2)
    """)


MESHES = {
    "replicated": "NamedSharding(MESH, P())",
    "sharded": 'NamedSharding(MESH, P("x"))',
    "two axes": 'NamedSharding(GRID, P("a", "b"))',
    "one of two axes": 'NamedSharding(GRID, P("b"))',
    "both axes on one dimension": 'NamedSharding(GRID, P(None, ("b", "a")))',
    "explicit axes": 'NamedSharding(EXPLICIT, P("a"))',
}
GRIDS = """
        grid = np.array(jax.devices()).reshape(2, 2)
        GRID = jax.sharding.Mesh(grid, ("a", "b"))
        kinds = (jax.sharding.AxisType.Explicit,) * 2
        EXPLICIT = jax.sharding.Mesh(grid, ("a", "b"), axis_types=kinds)
"""


@pytest.mark.parametrize("sharding", MESHES.values(), ids=MESHES)
def test_arrays_on_a_mesh_are_gathered_and_reduced_once(peers: Peers, sharding: str) -> None:
    peers.both(f"""{GRIDS}
        whole = np.arange(64, dtype=np.float32).reshape(8, 8)
        x = jax.device_put(whole * (rank + 1), {sharding})
        n = jax.device_put(np.arange(4) + rank, NamedSharding(x.sharding.mesh, P()))

        @jax.jit
        def step(x, n):
            total, mean = pccl.allreduce(dict(x=x, n=n)), pccl.allreduce(2 * x, "avg")
            return total, mean, total["x"].sum() + mean.sum()

        for _ in range(3):
            (total, mean, number) = step(x, n)
            same(total["x"], 3 * whole)
            same(total["n"], 2 * np.arange(4) + 1)
            same(mean, 3 * whole)
            assert float(number) == 6 * whole.sum()
            for part in total["x"].addressable_shards:
                same(part.data, 3 * whole[part.index])
    """)


def test_a_mesh_of_devices_meets_a_member_with_one_device(peers: Peers) -> None:
    peers.both("""
        x = np.arange(32, dtype=np.float32).reshape(8, 4) * (rank + 1)
        if rank == 0:
            x = jax.device_put(x, NamedSharding(MESH, P("x")))

        @jax.jit
        def step(x):
            return pccl.allreduce(pccl.allreduce(x) / 3, "avg", weight=2.0)

        for _ in range(3):
            same(step(x), np.arange(32).reshape(8, 4))
    """)


def test_scan_and_grad_over_arrays_on_a_mesh(peers: Peers) -> None:
    peers.both("""
        x = jax.device_put(np.full((8, 4), rank + 1, np.float32), NamedSharding(MESH, P("x")))

        @jax.jit
        def loop(x):
            def body(carry, _):
                carry = pccl.allreduce(carry, "avg")
                return carry + rank, carry[0, 0]
            return jax.lax.scan(body, x, length=10)

        last, firsts = loop(x)
        same(last, np.full((8, 4), 6.0 + rank))
        same(firsts, 1.5 + np.arange(10) / 2)
        same(jax.jit(jax.grad(lambda x: (pccl.allreduce(x, "avg") * (rank + 1)).sum()))(x),
             np.full((8, 4), 1.5))
    """)


def test_a_shard_map_over_some_axes_of_its_mesh_is_refused_by_name(peers: Peers) -> None:
    peers.both(f"""{GRIDS}
        step = jax.shard_map(pccl.allreduce, mesh=GRID, in_specs=P("a"), out_specs=P("a"),
                             axis_names={{"a"}})
        error = raised(pccl.NotSupported, lambda: jax.jit(step)(np.ones((4, 4), np.float32)))
        assert "not over b" in str(error), error
    """)


def test_shard_map_with_sums_over_devices_around_it(peers: Peers) -> None:
    peers.both("""
        @jax.jit
        @jax.shard_map(mesh=MESH, in_specs=P("x"), out_specs=P(), check_vma=False)
        def mean(x):
            share = jax.lax.psum_scatter(x[0], "x", tiled=True)
            return jax.lax.all_gather(pccl.allreduce(share, "avg"), "x", tiled=True)
        x = np.arange(32, dtype=np.float32).reshape(4, 8) + rank
        for _ in range(5):
            same(mean(x), (2 * np.arange(32).reshape(4, 8) + 1).sum(0) / 2)
    """)


def test_pmap_reduces_each_device_with_its_like_on_other_hosts(peers: Peers) -> None:
    peers.both("""
        step = jax.pmap(lambda x: jax.lax.psum(pccl.allreduce(x), "d"), axis_name="d")
        x = jnp.arange(8.0).reshape(4, 2) + rank
        for _ in range(3):
            same(step(x), np.tile((2 * np.arange(8.0).reshape(4, 2) + 1).sum(0), (4, 1)))
    """)


def test_calls_of_many_devices_in_flight_do_not_starve_each_other(peers: Peers) -> None:
    # Eight calls of each member at once on two cores, each followed by more work.
    peers.both("""
        @jax.jit
        @jax.shard_map(mesh=MESH, in_specs=P("x"), out_specs=P("x"))
        def step(x):
            a, b = pccl.allreduce(x @ x.T), pccl.allreduce(jnp.sin(x))
            return jnp.concatenate([a, b @ b.T])
        x = jnp.ones((1024, 256))
        first = np.asarray(step(x))
        for _ in range(10):
            same(step(x), first)
    """)


def test_calls_that_members_make_in_opposite_order_meet_by_their_tags(peers: Peers) -> None:
    # Two threads of each member; the second starts once the first's call has begun.
    code = """
        one = jax.jit(lambda x: pccl.allreduce(x, tag=1))
        two = jax.jit(lambda x: pccl.allreduce(x, tag=2))
        results = {}
        def call(name, function, x):
            results[name] = np.asarray(function(x))
        order = ORDER
        x, y = jnp.ones(2**16), jnp.full(2**16, 5.0)
        calls = {"one": (one, x), "two": (two, y)}
        threads = [threading.Thread(target=call, args=(name, *calls[name])) for name in order]
        threads[0].start()
        while comm._engine.unfinished() < 1 and threads[0].is_alive():
            threads[0].join(0.001)
        threads[1].start()
        for thread in threads:
            thread.join()
        same(results["one"], np.full(2**16, 2.0))
        same(results["two"], np.full(2**16, 10.0))
    """
    peers.both(code.replace("ORDER", '["one", "two"]'), code.replace("ORDER", '["two", "one"]'))


def test_executions_that_follow_each_other_keep_their_order(peers: Peers) -> None:
    # Dispatched without waiting; the first one's input is late on one member only.
    peers.both("""
        slow = jax.jit(lambda m: jax.lax.fori_loop(0, 20, lambda i, m: jnp.tanh(m @ m), m)[0])
        reduce = jax.jit(lambda x: pccl.allreduce(x))
        m = jnp.zeros((512, 512))
        late = slow(m) if rank == 0 else jnp.zeros(512)
        totals = [reduce(late + 1), reduce(jnp.full(512, 2.0)), reduce(jnp.full(512, 3.0))]
        for number, total in enumerate(totals, 1):
            same(total, np.full(512, 2.0 * number))
    """)


def test_compiled_and_eager_members_meet_by_a_tag(peers: Peers) -> None:
    peers.both("""
        x = {"a": jnp.arange(4.0)}
        reduce = lambda tree: pccl.allreduce(tree, tag=77)
        same((jax.jit(reduce) if rank else reduce)(x)["a"], 2 * np.arange(4.0))
    """)


def test_numbers_and_arrays_beside_tracers_become_arrays(peers: Peers) -> None:
    peers.both("""
        made = jax.jit(lambda x: pccl.allreduce([x, 3, 2.5, np.ones(2)], "avg"))(jnp.ones(2))
        same(made[0], np.ones(2))
        assert float(made[1]) == 3 and float(made[2]) == 2.5
        error = raised(pccl.InvalidArgument, lambda: jax.jit(
            lambda x: pccl.allreduce({"x": x, "s": "text"}))(jnp.ones(2)))
        assert "tree['s']" in str(error)
        error = raised(pccl.InvalidArgument, lambda: jax.jit(
            lambda x: pccl.allreduce({"x": x > 0}))(jnp.ones(2)))
        assert "tree['x']" in str(error) and "bool" in str(error)
    """)


@pytest.mark.parametrize(
    ("argument", "name"), [("out=x", "out="), ("return_info=True", "return_info=")]
)
def test_what_a_traced_call_cannot_do_is_refused(peers: Peers, argument: str, name: str) -> None:
    peers.both(f"""
        call = jax.jit(lambda x: pccl.allreduce(x, {argument}))
        assert "{name}" in str(raised(pccl.NotSupported, lambda: call(jnp.ones(2))))
        raised(pccl.NotSupported, lambda: jax.jit(lambda x: pccl.allreduce_async(x))(jnp.ones(2)))
    """)


def test_vmap_is_refused(peers: Peers) -> None:
    peers.both("""
        reduce = lambda x: pccl.allreduce(x)
        for call in (jax.vmap(reduce), jax.vmap(jax.jit(reduce)), jax.jit(jax.vmap(reduce))):
            assert "vmap" in str(raised(pccl.NotSupported, lambda: call(jnp.ones((2, 3)))))
    """)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_gradients_are_those_of_psum_and_pmean(peers: Peers, op: str) -> None:
    # Two members of four devices each, against the same two as an axis of one host's devices.
    peers.both(f"""
        like = {{"sum": jax.lax.psum, "avg": jax.lax.pmean}}["{op}"]
        weight = lambda member: jnp.arange(1.0, 4.0) * (member + 1)
        ours = lambda x: jnp.sum(jnp.sin(pccl.allreduce(x, "{op}") * weight(rank)) * x)
        def theirs(x):
            member = jax.lax.axis_index("m")
            return jnp.sum(jnp.sin(like(x, "m") * weight(member)) * x)
        inputs = jnp.stack([jnp.linspace(0, 1, 3), jnp.linspace(1, 2, 3)])
        expected = jax.pmap(jax.grad(theirs), axis_name="m")(inputs)[rank]
        for gradient in (jax.grad(ours), jax.jit(jax.grad(ours)), jax.grad(jax.jit(ours))):
            np.testing.assert_allclose(gradient(inputs[rank]), expected, rtol=1e-5)
    """)


def test_gradients_pass_integers_by_and_other_ops_have_none(peers: Peers) -> None:
    peers.both("""
        def loss(x):
            total = pccl.allreduce({"x": x, "n": jnp.arange(3)})
            return jnp.sum(total["x"] * total["n"])
        same(jax.jit(jax.grad(loss))(jnp.ones(3)), 2 * 2 * np.arange(3.0))
        raised(pccl.NotSupported, lambda: jax.grad(lambda x: pccl.allreduce(x, "max").sum())(jnp.ones(3)))
        same(jax.jit(lambda x: pccl.allreduce(x, "max"))(jnp.ones(3) * rank), np.ones(3))
    """)


def test_programs_that_were_traced_differently_are_told_so(peers: Peers) -> None:
    told = peers.both("""
        from pccl.adapters.jax import typed_errors
        @jax.jit
        def step(x, y):
            if rank == 0:
                return pccl.allreduce(x), pccl.allreduce(y)
            return pccl.allreduce(y), pccl.allreduce(x)
        def call():
            with typed_errors():
                jax.block_until_ready(step(jnp.ones(3), jnp.ones(4)))
        answer = str(raised(pccl.MismatchedCall, call))
        raised(jax.errors.JaxRuntimeError, lambda: jax.block_until_ready(step(jnp.ones(3), jnp.ones(4))))
        same(pccl.allreduce(jnp.ones(3)), np.full(3, 2.0))
    """)
    for sentence in told:
        assert "allreduce 0 of step, device 0" in sentence, sentence
        assert "float32[3]" in sentence and "float32[4]" in sentence, sentence


def test_an_error_in_one_compiled_call_is_typed_in_the_next_eager_one(peers: Peers) -> None:
    peers.both("""
        bad = jax.jit(lambda x: pccl.allreduce(x @ x))  # enough work for JAX not to wait for it
        total = bad(jnp.ones((256 + rank, 256 + rank)))
        raised(pccl.MismatchedCall, lambda: pccl.allreduce(total))
        same(pccl.allreduce(jnp.ones(3)), np.full(3, 2.0))
    """)


def test_a_call_that_stands_at_two_places_of_a_program_is_refused(peers: Peers) -> None:
    # Both have one tag, and XLA may run them in another order on each member.
    peers.both("""
        from pccl.adapters.jax import typed_errors
        inner = jax.jit(lambda x: pccl.allreduce(x))
        outer = jax.jit(lambda x, y: (inner(x), inner(y)))
        def call():
            with typed_errors():
                jax.block_until_ready(outer(jnp.ones(3), jnp.zeros(3)))
        assert "two places" in str(raised(pccl.InvalidUsage, call))
        same(jax.jit(lambda x: inner(x) + 1)(jnp.ones(3)), np.full(3, 3.0))
    """)


def test_a_compiled_call_uses_the_communicator_it_was_given_or_the_latest_of_init(
    peers: Peers,
) -> None:
    peers.both("""
        default = jax.jit(lambda x: pccl.allreduce(x))
        given = jax.jit(lambda x: pccl.allreduce(x, comm=comm))
        for reduce in (default, given):
            same(reduce(jnp.ones(3)), np.full(3, 2.0))
    """)


def test_a_program_compiled_before_goes_on_after_a_new_init() -> None:
    with jax_peers(1) as alone:
        alone.both("""
            from pccl.adapters.jax import typed_errors
            reduce = jax.jit(lambda x: pccl.allreduce(x))
            same(reduce(jnp.ones(3)), np.ones(3))
            pccl.shutdown()
            with typed_errors():
                raised(pccl.NotInitialized, lambda: pccl.allreduce(jnp.ones(3)))
            def call():
                with typed_errors():
                    jax.block_until_ready(reduce(jnp.ones(3)))
            raised(pccl.NotInitialized, call)
            pccl.init()
            same(reduce(jnp.full(3, 5.0)), np.full(3, 5.0))
        """)


def test_survivors_finish_a_compiled_call_when_a_member_is_killed() -> None:
    with jax_peers(3) as three:
        victim = three.workers.pop(0)
        victim.tell("pccl.allreduce(jnp.ones(3)); answer = rank")
        three.tell("""
            pccl.allreduce(jnp.ones(3))
            say_when_calling(comm)
            total, n = jax.jit(lambda x: pccl.allreduce([x, jnp.ones(1)]))(jnp.full(1000, rank))
            answer = [rank, float(total[0]), float(n[0])]
        """)
        gone = answer(victim)
        for worker in three.workers:
            worker.expect("calling")
        victim.signal(signal.SIGKILL)
        told = three.answers()
        assert sorted(rank for rank, _, _ in told) == sorted({0, 1, 2} - {gone})
        assert {total for _, total, _ in told} == {3.0 - gone} and {n for *_, n in told} == {2.0}


def test_a_timeout_under_jit_is_typed() -> None:
    with jax_peers(2) as two:
        two.tell(
            """
            from pccl.adapters.jax import typed_errors
            def call():
                with typed_errors():
                    jax.block_until_ready(jax.jit(lambda x: pccl.allreduce(x, timeout=0.5))(jnp.ones(3)))
            answer = raised(pccl.Timeout, call).result.name
            """,
            "answer = 'did not call'",
        )
        first, second = two.answers()
        assert first == "RANK_CONNECTION_LOST" and second == "did not call"


def test_average_gradients_is_a_link_of_an_optimizers_chain(peers: Peers) -> None:
    pytest.importorskip("optax", reason="needs optax")
    peers.both("""
        import optax
        from pccl.adapters.jax import average_gradients
        weights = {"w": jnp.ones(3), "b": jnp.float32(0)}
        optimizer = optax.chain(average_gradients(), optax.sgd(0.5))
        state = optimizer.init(weights)
        gradients = {"w": jnp.full(3, rank + 1.0), "b": jnp.float32(rank)}
        for update in (optimizer.update, jax.jit(optimizer.update)):
            updates, _ = update(gradients, state, weights)
            same(updates["w"], np.full(3, -0.75))
            assert float(updates["b"]) == -0.25
    """)
