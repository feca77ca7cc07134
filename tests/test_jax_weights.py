"""Weights and fewer bits in functions that JAX traces: real processes, four devices each."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator

import pytest
from jaxpeers import Peers, answer, jax_peers, needs_jax

pytestmark = needs_jax

WEIGHTED = """
import hashlib
from pccl.adapters.jax import typed_errors
def digest(tree):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
def typed(kind, call):
    def run():
        with typed_errors():
            jax.block_until_ready(call())
    return str(raised(kind, run))
world = pccl.world_size()
def normals(count, dtype="float32", seed=None):
    made = np.random.default_rng(rank if seed is None else seed).normal(size=count) * 100
    return jnp.asarray(np.clip(made, 0, 200) if dtype.startswith("u") else made, dtype)
"""


@pytest.fixture(scope="module", params=[2, 3])
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    with jax_peers(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def apart() -> Iterator[Peers]:
    """As on hosts of their own: on one host nothing is quantized."""
    with jax_peers(3, PCCL_SHM="0") as made:
        yield made


def equal(peers: Peers, *codes: str) -> None:
    """Runs it on all; `answer` has to be the same."""
    answers = peers.both(*(f"{WEIGHTED}\n{strip(code)}" for code in codes))
    assert answers[0] is not None and all(one == answers[0] for one in answers)


def strip(code: str) -> str:
    return textwrap.dedent(code)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32"],
)
def test_a_compiled_weighted_mean_has_the_bytes_of_an_eager_one(peers: Peers, dtype: str) -> None:
    equal(
        peers,
        f"""
        x = normals(1001, "{dtype}")
        weight = [0.3, 2, 1e-3][rank]
        eager = pccl.allreduce(np.asarray(x), "avg", weight=weight)
        static = jax.jit(lambda x: pccl.allreduce(x, "avg", weight=weight))(x)
        donated = jax.jit(lambda x: pccl.allreduce(x, "avg", weight=weight), donate_argnums=0)(x + 0)
        assert static.dtype == donated.dtype == "{dtype}"
        same(static, eager), same(donated, eager)
        assert digest(static) == digest(eager)
        traced = jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w))
        same(traced(x, jnp.float32(weight)), pccl.allreduce(x, "avg", weight=jnp.float32(weight)))
        same(x, normals(1001, "{dtype}"))
        answer = digest([static, traced(x, jnp.float32(weight))])
        """,
    )


def test_64_bits_are_averaged_too(peers: Peers) -> None:
    equal(
        peers,
        """
        with jax.enable_x64(True):
            tree = {"f": normals(99, "float64"), "i": normals(99, "int64") << 40, "u": normals(99, "uint64")}
            weight = jnp.float64(0.1 + rank)
            result = jax.jit(lambda tree, w: pccl.allreduce(tree, "avg", weight=w))(tree, weight)
            eager = pccl.allreduce(jax.tree.map(np.asarray, tree), "avg", weight=0.1 + rank)
            for name in tree:
                assert result[name].dtype == tree[name].dtype
                same(result[name], eager[name])
            answer = digest(result)
        """,
    )


@pytest.mark.parametrize(
    "weight",
    [
        *('jnp.asarray(rank + 1, "int8")', 'jnp.asarray(rank + 1, "uint16")', "jnp.int32(rank)"),
        *('jnp.asarray(0.3, "bfloat16")', 'jnp.asarray(0.3, "float16")', "jnp.asarray(rank == 0)"),
        *('jnp.asarray(1.5, "float8_e4m3fn")', "jnp.uint32(7)", "np.float64(0.1) * (rank + 1)"),
    ],
)
def test_a_weight_may_be_a_scalar_of_any_type(peers: Peers, weight: str) -> None:
    equal(
        peers,
        f"""
        x, w = normals(100), {weight}
        eager = pccl.allreduce(x, "avg", weight=w)
        if isinstance(w, jax.Array):
            same(jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w))(x, w), eager)
        same(jax.jit(lambda x: pccl.allreduce(x, "avg", weight=w))(x), eager)
        answer = digest(eager)
        """,
    )


def test_a_tree_and_empty_arrays_and_only_the_weight_traced(peers: Peers) -> None:
    equal(
        peers,
        """
        tree = {"w": jnp.full((3, 4), rank + 1.0), "e": jnp.zeros((0, 2)), "n": [jnp.int32(rank), 2.5]}
        call = lambda tree, w: pccl.allreduce(tree, "avg", weight=w)
        text = jax.jit(call).lower(tree, 1.0).as_text()
        assert text.count("custom_call @pccl_allreduce") == 1, text
        result = jax.jit(call)(tree, 2.0 ** rank)
        total = 2 ** world - 1
        mean = np.float32(sum((r + 1) * 2 ** r for r in range(world)) / total)
        same(result["w"], np.full((3, 4), mean))
        assert result["e"].shape == (0, 2) and float(result["n"][1]) == 2.5
        assert int(result["n"][0]) == sum(r * 2 ** r for r in range(world)) // total
        constant = jax.jit(lambda w: pccl.allreduce(np.full(5, rank + 1, np.float32), "avg", weight=w))
        same(constant(2.0 ** rank), np.full(5, mean))
        answer = digest([result, constant(2.0 ** rank)])
        """,
    )


@pytest.mark.parametrize("quantize", ["None", "'int8'"])
def test_eager_and_compiled_members_meet_by_a_tag(peers: Peers, quantize: str) -> None:
    equal(
        peers,
        f"""
        tree = {{"a": normals(500), "b": normals(30, "int32"), "h": normals(70, "bfloat16")}}
        def call(tree, w):
            return pccl.allreduce(tree, "avg", weight=w, tag=5, quantize={quantize})
        if rank == 0:
            result = call(jax.tree.map(np.asarray, tree), 1.5)  # NumPy's
        elif rank == 1:
            result = jax.jit(call)(tree, 0.25)
        else:
            result = jax.jit(lambda tree: call(tree, 2))(tree)
        answer = digest(result)
        """,
    )


def test_in_loops_shard_map_and_pmap(peers: Peers) -> None:
    peers.both(
        WEIGHTED
        + strip("""
        def body(carry, w):
            return pccl.allreduce(carry + rank, "avg", weight=w), w
        last, _ = jax.jit(lambda ws: jax.lax.scan(body, jnp.float32(0), ws))(jnp.ones(10) * (rank + 1))
        step = sum(r * (r + 1) for r in range(world)) / sum(r + 1 for r in range(world))
        np.testing.assert_allclose(last, 10 * step, rtol=1e-5)

        whole = np.arange(16, dtype=np.float32).reshape(8, 2)
        mean = lambda f: sum(f(r) * (r + 1) for r in range(world)) / sum(r + 1 for r in range(world))
        for weight in (rank + 1, jnp.float32(rank + 1)):
            @jax.jit
            @jax.shard_map(mesh=MESH, in_specs=(P("x"), P()), out_specs=(P("x"), P()))
            def constant(x, y):
                made = pccl.allreduce({"x": x, "y": y}, "avg", weight=weight)
                return made["x"], made["y"]
            x, y = constant(whole * rank, whole * rank)
            np.testing.assert_allclose(x, whole * mean(lambda r: r), rtol=1e-6)
            np.testing.assert_allclose(y, whole * mean(lambda r: r), rtol=1e-6)

        @jax.jit
        @jax.shard_map(mesh=MESH, in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
        def varying(x, y, w):
            made = pccl.allreduce({"x": x, "y": y}, "avg", weight=w[0])
            return made["x"] + made["y"]
        made = varying(whole * rank, jnp.zeros((2, 2)), jnp.arange(1.0, 5.0) * (rank + 1))
        np.testing.assert_allclose(made, whole * mean(lambda r: r), rtol=1e-6)

        each = jax.pmap(lambda x, w: pccl.allreduce(x, "avg", weight=w))
        made = each(whole.reshape(4, 4) * rank, np.arange(1, 5) * (rank + 1))
        np.testing.assert_allclose(made, whole.reshape(4, 4) * mean(lambda r: r), rtol=1e-6)
        """)
    )


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
    told = peers.both(
        WEIGHTED
        + strip(f"""
        weight = float({given}[rank])
        x = jnp.arange(4.0)
        jitted = jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w))
        said = [typed(pccl.InvalidArgument, lambda: jitted(x, weight))]
        constant = jax.jit(lambda x: pccl.allreduce(x, "avg", weight=weight))
        said.append(typed(pccl.InvalidArgument, lambda: constant(x)))
        mixed = constant if rank else lambda x: pccl.allreduce(x, "avg", weight=weight, tag=3)
        if rank:
            mixed = jax.jit(lambda x: pccl.allreduce(x, "avg", weight=weight, tag=3))
        said.append(typed(pccl.InvalidArgument, lambda: mixed(x)))
        same(x, np.arange(4.0))
        same(jitted(x, 1.0), x)
        answer = [rank, said]
        """)
    )
    assert sorted(rank for rank, _ in told) == list(range(count))
    for rank, said in told:
        assert all(words[rank] in sentence for sentence in said), said


def test_what_a_member_without_weight_passes_does_not_count(peers: Peers) -> None:
    peers.both(
        WEIGHTED
        + strip("""
        x = jnp.full(4, rank + 1.0) if rank else jnp.full(4, jnp.nan)
        made = jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w))(x, jnp.float32(rank))
        mean = sum((r + 1) * r for r in range(world)) / sum(range(world))
        np.testing.assert_allclose(made, np.full(4, mean), rtol=1e-6)
        """)
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ('"sum", weight=w', "InvalidArgument", 'goes with op "avg" only, not with sum'),
        ('"avg", weight=x', "InvalidArgument", "not a traced float32[3]"),
        ('"avg", weight=w + 1j', "InvalidArgument", "not a traced complex64[]"),
        ('"avg", weight="1"', "InvalidArgument", "not a str"),
        ('"avg", weight=True', "InvalidArgument", "not a bool"),
        ('"avg", weight=w, out=x', "NotSupported", "out="),
        ('"avg", weight=w, return_info=True', "NotSupported", "return_info="),
        ('"prod", quantize="int8"', "InvalidArgument", "a product cannot be quantized"),
        ('"avg", quantize="int7"', "InvalidArgument", "quantize is one of"),
        ('"avg", quantize=pccl.Quantize(error_feedback=True)', "NotSupported", "error_feedback"),
    ],
)
def test_what_makes_no_sense_is_refused_while_tracing(
    peers: Peers, arguments: str, kind: str, words: str
) -> None:
    peers.both(f"""
        call = jax.jit(lambda x, w: pccl.allreduce(x, {arguments}))
        error = raised(pccl.{kind}, lambda: call(jnp.ones(3), 1.0))
        assert {words!r} in str(error), error
    """)


def test_members_with_and_without_weights_or_codes_are_told(peers: Peers) -> None:
    peers.both(
        WEIGHTED
        + strip("""
        for mine in ({"weight": 1.0}, {"quantize": "int8"}, {"weight": 2.0, "quantize": "int4"}):
            call = jax.jit(lambda x: pccl.allreduce(x, "avg", tag=9, **(mine if rank == 1 else {})))
            said = typed(pccl.MismatchedCall, lambda: call(jnp.ones(3)))
            assert "weight" not in mine or "weighted mean of float32[3]" in said, said
            assert "quantize" not in mine or f" as {mine['quantize']} (min_max)" in said, said
        """)
    )


# Of each member's loss, and added up over the members, as `lax.psum` and `lax.pmean` have it.
@pytest.mark.parametrize("quantize", ["None", "'int8'"])
def test_gradients_are_those_of_a_weighted_mean_over_devices(peers: Peers, quantize: str) -> None:
    peers.both(
        WEIGHTED
        + strip(f"""
        factors = lambda member: jnp.arange(1.0, 4.0) * (member + 1)
        def ours(x, w):
            mean = pccl.allreduce({{"x": x, "n": jnp.arange(3)}}, "avg", weight=w, quantize={quantize})
            return jnp.sum(jnp.sin(mean["x"] * factors(rank)) * x) + jnp.sum(mean["n"]) * jnp.sum(x)
        def theirs(x, w):
            mean = jax.lax.psum(x * w, "m") / jax.lax.psum(w, "m")
            own = jnp.sin(mean * factors(jax.lax.axis_index("m"))) * x
            return jnp.sum(own) + 3 * jnp.sum(x)
        xs = jnp.stack([jnp.linspace(member, member + 1, 3) for member in range(world)])
        ws = jnp.asarray([0.5, 2.0, 0.1][:world])
        wanted = jax.pmap(jax.grad(theirs, (0, 1)), axis_name="m")(xs, ws)
        x, w = xs[rank], ws[rank]
        both = jax.grad(ours, (0, 1))
        for found in (both(x, w), jax.jit(both)(x, w), jax.grad(jax.jit(ours), (0, 1))(x, w)):
            np.testing.assert_allclose(found[0], wanted[0][rank], rtol=1e-4)
            np.testing.assert_allclose(found[1], wanted[1][rank], rtol=1e-4)
        static = jax.jit(jax.grad(lambda x: ours(x, float(w))))(x)
        np.testing.assert_allclose(static, wanted[0][rank], rtol=1e-4)
        counts = jnp.asarray([1, 4, 2])
        wanted = jax.pmap(jax.grad(theirs), axis_name="m")(xs, counts[:world].astype("float32"))
        np.testing.assert_allclose(jax.jit(jax.grad(ours))(x, counts[rank]), wanted[rank], rtol=1e-4)
        """)
    )


def test_gradients_agree_with_differences(peers: Peers) -> None:
    # Of the sum of all members' losses, by what only one member changes.
    peers.both(
        WEIGHTED
        + strip("""
        with jax.enable_x64(True):
            own = jnp.asarray(np.random.default_rng(rank).normal(size=5))
            def loss(x, w):
                mean = pccl.allreduce(x, "avg", weight=w)
                return jnp.sum(jnp.cos(mean * own) + mean * x)
            x, w = jnp.linspace(0, 1, 5) + rank, jnp.float64(0.7 + rank)
            to_x, to_w = jax.jit(jax.grad(loss, (0, 1)))(x, w)
            total = jax.jit(lambda x, w: pccl.allreduce(loss(x, w)))
            for member in range(world):
                mine = member == rank
                for i in range(5):
                    step = jnp.zeros(5).at[i].set(1e-5 * mine)
                    slope = float(total(x + step, w) - total(x - step, w)) / 2e-5
                    assert not mine or abs(slope - float(to_x[i])) < 1e-7, (slope, to_x)
                slope = float(total(x, w + 1e-5 * mine) - total(x, w - 1e-5 * mine)) / 2e-5
                assert not mine or abs(slope - float(to_w)) < 1e-7, (slope, to_w)
        """)
    )


def test_gradients_in_16_bits_and_under_shard_map(peers: Peers) -> None:
    peers.both(
        WEIGHTED
        + strip("""
        x = normals(8, "bfloat16")
        grad = jax.jit(jax.grad(lambda x: pccl.allreduce(x, "avg", weight=rank + 1.0).sum()))(x)
        share = world * (rank + 1) / sum(r + 1 for r in range(world))
        assert grad.dtype == "bfloat16"
        np.testing.assert_allclose(grad.astype("float32"), np.full(8, share), rtol=1e-2)

        # One weight for all devices: what each of them says of it is added up.
        def loss(x, y, w):
            @jax.shard_map(mesh=MESH, in_specs=(P("x"), P(), P()), out_specs=P())
            def total(x, y, w):
                made = pccl.allreduce([x, y], "avg", weight=w)
                return jax.lax.psum(jnp.sum(made[0] ** 2), "x") + jnp.sum(made[1] ** 2)
            return total(x, y, w)
        def plain(x, y, w):
            made = pccl.allreduce([x, y], "avg", weight=w)
            return jnp.sum(made[0] ** 2) + jnp.sum(made[1] ** 2)
        arguments = (jnp.arange(8.0) + rank, jnp.arange(3.0) * (rank + 1), jnp.float32(rank + 1))
        wanted = jax.jit(jax.grad(plain, (0, 1, 2)))(*arguments)
        found = jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments)
        for one, other in zip(found, wanted):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        """)
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "float8"])
def test_a_compiled_call_sends_fewer_bits_as_an_eager_one_does(apart: Peers, dtype: str) -> None:
    equal(
        apart,
        f"""
        x = normals(20_000)
        for op in ("sum", "avg", "min", "max"):
            jitted = jax.jit(lambda x: pccl.allreduce(x, op, quantize="{dtype}"))(x)
            eager = pccl.allreduce(x, op, quantize="{dtype}")
            assert (np.asarray(jitted) != np.asarray(pccl.allreduce(x, op))).any()
            same(jitted, eager)
        mean = jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w, quantize="{dtype}"))
        found, eager = mean(x, rank + 1.0), pccl.allreduce(x, "avg", weight=rank + 1, quantize="{dtype}")
        same(found, eager)
        assert (np.asarray(found) != np.asarray(pccl.allreduce(x, "avg", weight=rank + 1))).any()
        answer = digest([jitted, found])
        """,
    )


def test_how_codes_are_made_may_be_set(apart: Peers) -> None:
    equal(
        apart,
        """
        how = pccl.Quantize("int4", block=64, algorithm="zero_point_scale", rounding="stochastic")
        tree = {"x": normals(5000), "h": normals(3000, "bfloat16"), "n": normals(100, "int32"), "s": 1.5}
        jitted = jax.jit(lambda tree: pccl.allreduce(tree, "avg", quantize=how, tag=11))
        made = jitted(tree) if rank else pccl.allreduce(jax.tree.map(np.asarray, tree | {"s": np.float32(1.5)}),
            "avg", quantize=how, tag=11)
        exact = pccl.allreduce(tree, "avg")
        same(made["n"], exact["n"])
        assert 0 < np.abs(np.asarray(made["x"] - exact["x"])).max() < 200
        again = jitted(tree)
        assert rank == 0 or (np.asarray(again["x"]) != np.asarray(made["x"])).any()  # other numbers
        answer = digest([made, again])
        """,
    )


def test_the_gradient_of_a_quantized_call_is_that_of_an_exact_one(apart: Peers) -> None:
    apart.both(
        WEIGHTED
        + strip("""
        factors = normals(500)
        for op in ("sum", "avg"):
            loss = lambda x, how: jnp.sum(pccl.allreduce(x, op, quantize=how) * factors)
            exact, coded = (jax.jit(jax.grad(lambda x: loss(x, how)))(normals(500)) for how in (None, "int4"))
            same(exact, coded)
        raised(pccl.NotSupported, lambda: jax.grad(
            lambda x: pccl.allreduce(x, "max", quantize="int8").sum())(jnp.ones(100)))
        """)
    )


def test_alone_the_mean_is_the_input_exactly() -> None:
    with jax_peers(1) as alone:
        alone.both(
            WEIGHTED
            + strip("""
            tree = {"f": normals(1000), "h": normals(77, "float16"), "i": normals(9, "int32")}
            call = lambda tree, w: pccl.allreduce(tree, "avg", weight=w)
            for made in (jax.jit(call)(tree, 0.3), jax.jit(call, donate_argnums=0)(jax.tree.map(jnp.copy, tree), 0.3)):
                for name in tree:
                    same(made[name], tree[name])
            assert "add up to 0" in typed(pccl.InvalidArgument, lambda: jax.jit(call)(tree, 0.0))
            """)
        )


def test_survivors_of_a_killed_member_get_their_own_weighted_mean() -> None:
    with jax_peers(3) as three:
        victim = three.workers.pop(0)
        victim.tell("pccl.allreduce(jnp.ones(3)); answer = rank")
        three.tell("""
            pccl.allreduce(jnp.ones(3))
            say_when_calling(comm)
            mean = jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w), donate_argnums=0)
            answer = [rank, float(mean(jnp.full(100_000, 10.0 ** rank), rank + 1.0)[-1])]
        """)
        gone = answer(victim)
        for worker in three.workers:
            worker.expect("calling")
        victim.signal(signal.SIGKILL)
        left = [rank for rank in range(3) if rank != gone]
        mean = sum((rank + 1) * 10.0**rank for rank in left) / sum(rank + 1 for rank in left)
        told = three.answers()
        assert sorted(rank for rank, _ in told) == left
        assert len({found for _, found in told}) == 1
        assert told[0][1] == pytest.approx(mean, rel=1e-6)
