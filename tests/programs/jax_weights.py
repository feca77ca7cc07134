"""Weights and fewer bits in functions that JAX traces: what peers check."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import pccl
from programs.jax_peer import (
    P,
    communicator,
    jax,
    jnp,
    mesh,
    raised,
    same,
    typed,
)
from programs.peer import say_when_calling

# The decorators are JAX's, which is not typed here.
# mypy: disallow-untyped-decorators=False


def digest(tree: Any) -> str:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def normals(count: int, dtype: str = "float32") -> Any:
    """Numbers that differ from rank to rank."""
    made = np.random.default_rng(pccl.rank()).normal(size=count) * 100
    return jnp.asarray(np.clip(made, 0, 200) if dtype.startswith("u") else made, dtype)


# Weights by name; each is made in the peer of that rank.
SCALARS: dict[str, Callable[[int], Any]] = {
    "int8": lambda rank: jnp.asarray(rank + 1, "int8"),
    "uint16": lambda rank: jnp.asarray(rank + 1, "uint16"),
    "int32": lambda rank: jnp.int32(rank),
    "bfloat16": lambda rank: jnp.asarray(0.3, "bfloat16"),
    "float16": lambda rank: jnp.asarray(0.3, "float16"),
    "bool": lambda rank: jnp.asarray(rank == 0),
    "float8": lambda rank: jnp.asarray(1.5, "float8_e4m3fn"),
    "uint32": lambda rank: jnp.uint32(7),
    "NumPy's float64": lambda rank: np.float64(0.1) * (rank + 1),
}


TEXT: Any = "1"

# Calls that are refused while they are traced. x is float32[3], w a number.
REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "a weighted sum": lambda x, w: pccl.allreduce(x, "sum", weight=w),
    "a vector as a weight": lambda x, w: pccl.allreduce(x, "avg", weight=x),
    "a complex weight": lambda x, w: pccl.allreduce(x, "avg", weight=w + 1j),
    "a weight in text": lambda x, w: pccl.allreduce(x, "avg", weight=TEXT),
    "a weight of True": lambda x, w: pccl.allreduce(x, "avg", weight=True),
    "out=": lambda x, w: pccl.allreduce(x, "avg", weight=w, out=x),
    "return_info=": lambda x, w: pccl.allreduce(x, "avg", weight=w, return_info=True),
    "a quantized product": lambda x, w: pccl.allreduce(x, "prod", quantize="int8"),
    "an unknown code": lambda x, w: pccl.allreduce(x, "avg", quantize="int7"),
    "error feedback": lambda x, w: pccl.allreduce(
        x, "avg", quantize=pccl.Quantize(error_feedback=True)
    ),
}


def a_compiled_weighted_mean_has_the_bytes_of_an_eager_one(dtype: str) -> str:
    rank = pccl.rank()
    x = normals(1001, dtype)
    weight = [0.3, 2, 1e-3][rank]
    eager = pccl.allreduce(np.asarray(x), "avg", weight=weight)
    static = jax.jit(lambda x: pccl.allreduce(x, "avg", weight=weight))(x)
    donated = jax.jit(lambda x: pccl.allreduce(x, "avg", weight=weight), donate_argnums=0)(x + 0)
    assert static.dtype == donated.dtype == dtype
    same(static, eager)
    same(donated, eager)
    assert digest(static) == digest(eager)
    traced = jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w))
    same(traced(x, jnp.float32(weight)), pccl.allreduce(x, "avg", weight=jnp.float32(weight)))
    same(x, normals(1001, dtype))
    return digest([static, traced(x, jnp.float32(weight))])


def numbers_of_64_bits_are_averaged_too() -> str:
    rank = pccl.rank()
    with jax.enable_x64(True):
        tree = {
            "f": normals(99, "float64"),
            "i": normals(99, "int64") << 40,
            "u": normals(99, "uint64"),
        }
        weight = jnp.float64(0.1 + rank)
        result = jax.jit(lambda tree, w: pccl.allreduce(tree, "avg", weight=w))(tree, weight)
        eager = pccl.allreduce(jax.tree.map(np.asarray, tree), "avg", weight=0.1 + rank)
        for name in tree:
            assert result[name].dtype == tree[name].dtype
            same(result[name], eager[name])
        return digest(result)


def a_weight_may_be_a_scalar_of_any_type(weight: str) -> Any:
    rank = pccl.rank()
    x, w = normals(100), SCALARS[weight](rank)
    eager = pccl.allreduce(x, "avg", weight=w)
    if isinstance(w, jax.Array):
        same(jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w))(x, w), eager)
    same(jax.jit(lambda x: pccl.allreduce(x, "avg", weight=w))(x), eager)
    return digest(eager)


def a_tree_and_empty_arrays_and_only_the_weight_traced() -> Any:
    rank = pccl.rank()
    world = pccl.world_size()
    tree = {"w": jnp.full((3, 4), rank + 1.0), "e": jnp.zeros((0, 2)), "n": [jnp.int32(rank), 2.5]}

    def call(tree: Any, w: Any) -> Any:
        return pccl.allreduce(tree, "avg", weight=w)

    text = jax.jit(call).lower(tree, 1.0).as_text()
    assert text.count("custom_call @pccl_allreduce") == 1, text
    result = jax.jit(call)(tree, 2.0**rank)
    total = 2**world - 1
    mean = np.float32(sum((r + 1) * 2**r for r in range(world)) / total)
    same(result["w"], np.full((3, 4), mean))
    assert result["e"].shape == (0, 2) and float(result["n"][1]) == 2.5
    assert int(result["n"][0]) == sum(r * 2**r for r in range(world)) // total
    constant = jax.jit(lambda w: pccl.allreduce(np.full(5, rank + 1, np.float32), "avg", weight=w))
    same(constant(2.0**rank), np.full(5, mean))
    return digest([result, constant(2.0**rank)])


def eager_and_compiled_members_meet_by_a_tag(quantize: str | None) -> Any:
    rank = pccl.rank()
    tree = {"a": normals(500), "b": normals(30, "int32"), "h": normals(70, "bfloat16")}

    def call(tree: Any, w: Any) -> Any:
        return pccl.allreduce(tree, "avg", weight=w, tag=5, quantize=quantize)

    if rank == 0:
        result = call(jax.tree.map(np.asarray, tree), 1.5)  # NumPy's
    elif rank == 1:
        result = jax.jit(call)(tree, 0.25)
    else:
        result = jax.jit(lambda tree: call(tree, 2))(tree)
    return digest(result)


def in_loops_shard_map_and_pmap() -> None:
    rank = pccl.rank()
    world = pccl.world_size()

    def body(carry: Any, w: Any) -> Any:
        return pccl.allreduce(carry + rank, "avg", weight=w), w

    last, _ = jax.jit(lambda ws: jax.lax.scan(body, jnp.float32(0), ws))(jnp.ones(10) * (rank + 1))
    step = sum(r * (r + 1) for r in range(world)) / sum(r + 1 for r in range(world))
    np.testing.assert_allclose(last, 10 * step, rtol=1e-5)

    whole = np.arange(16, dtype=np.float32).reshape(8, 2)

    def mean(f: Any) -> Any:
        return sum(f(r) * (r + 1) for r in range(world)) / sum(r + 1 for r in range(world))

    def constant(weight: Any, x: Any, y: Any) -> Any:
        made = pccl.allreduce({"x": x, "y": y}, "avg", weight=weight)
        return made["x"], made["y"]

    for weight in (rank + 1, jnp.float32(rank + 1)):
        of_weight = partial(constant, weight)
        specs = (P("x"), P())
        mapped = jax.shard_map(of_weight, mesh=mesh(), in_specs=specs, out_specs=specs)
        x, y = jax.jit(mapped)(whole * rank, whole * rank)
        np.testing.assert_allclose(x, whole * mean(lambda r: r), rtol=1e-6)
        np.testing.assert_allclose(y, whole * mean(lambda r: r), rtol=1e-6)

    @jax.jit
    @jax.shard_map(mesh=mesh(), in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
    def varying(x: Any, y: Any, w: Any) -> Any:
        made = pccl.allreduce({"x": x, "y": y}, "avg", weight=w[0])
        return made["x"] + made["y"]

    made = varying(whole * rank, jnp.zeros((2, 2)), jnp.arange(1.0, 5.0) * (rank + 1))
    np.testing.assert_allclose(made, whole * mean(lambda r: r), rtol=1e-6)

    each = jax.pmap(lambda x, w: pccl.allreduce(x, "avg", weight=w))
    made = each(whole.reshape(4, 4) * rank, np.arange(1, 5) * (rank + 1))
    np.testing.assert_allclose(made, whole.reshape(4, 4) * mean(lambda r: r), rtol=1e-6)


def weights_that_are_none_are_an_error_on_all_members(weights: list[str]) -> Any:
    rank = pccl.rank()
    weight = float(weights[rank])
    x = jnp.arange(4.0)
    jitted = jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w))
    said = [typed(pccl.InvalidArgument, lambda: jitted(x, weight))]
    constant = jax.jit(lambda x: pccl.allreduce(x, "avg", weight=weight))
    said.append(typed(pccl.InvalidArgument, lambda: constant(x)))

    def mixed(x: Any) -> Any:
        return pccl.allreduce(x, "avg", weight=weight, tag=3)

    if rank:
        mixed = jax.jit(mixed)
    said.append(typed(pccl.InvalidArgument, lambda: mixed(x)))
    same(x, np.arange(4.0))
    same(jitted(x, 1.0), x)
    return [rank, said]


def what_a_member_without_weight_passes_does_not_count() -> None:
    rank = pccl.rank()
    world = pccl.world_size()
    x = jnp.full(4, rank + 1.0) if rank else jnp.full(4, jnp.nan)
    made = jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w))(x, jnp.float32(rank))
    mean = sum((r + 1) * r for r in range(world)) / sum(range(world))
    np.testing.assert_allclose(made, np.full(4, mean), rtol=1e-6)


def what_makes_no_sense_is_refused_while_tracing(name: str, kind: str, words: str) -> None:
    call = jax.jit(REFUSED[name])
    error = raised(getattr(pccl, kind), lambda: call(jnp.ones(3), 1.0))
    assert words in str(error), error


def members_with_and_without_weights_or_codes_are_told() -> None:
    rank = pccl.rank()
    keywords: list[dict[str, Any]] = [
        {"weight": 1.0},
        {"quantize": "int8"},
        {"weight": 2.0, "quantize": "int4"},
    ]
    for mine in keywords:
        call = jax.jit(partial(pccl.allreduce, op="avg", tag=9, **(mine if rank == 1 else {})))
        said = typed(pccl.MismatchedCall, partial(call, jnp.ones(3)))
        assert "weight" not in mine or "weighted mean of float32[3]" in said, said
        assert "quantize" not in mine or f" as {mine['quantize']} (min_max)" in said, said


def gradients_are_those_of_a_weighted_mean_over_devices(quantize: str | None) -> None:
    rank = pccl.rank()
    world = pccl.world_size()

    def factors(member: Any) -> Any:
        return jnp.arange(1.0, 4.0) * (member + 1)

    def ours(x: Any, w: Any) -> Any:
        mean = pccl.allreduce({"x": x, "n": jnp.arange(3)}, "avg", weight=w, quantize=quantize)
        return jnp.sum(jnp.sin(mean["x"] * factors(rank)) * x) + jnp.sum(mean["n"]) * jnp.sum(x)

    def theirs(x: Any, w: Any) -> Any:
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


def gradients_agree_with_differences() -> None:
    rank = pccl.rank()
    world = pccl.world_size()
    with jax.enable_x64(True):
        own = jnp.asarray(np.random.default_rng(rank).normal(size=5))

        def loss(x: Any, w: Any) -> Any:
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


def gradients_in_16_bits_and_under_shard_map() -> None:
    rank = pccl.rank()
    world = pccl.world_size()
    x = normals(8, "bfloat16")
    grad = jax.jit(jax.grad(lambda x: jnp.sum(pccl.allreduce(x, "avg", weight=rank + 1.0))))(x)
    share = world * (rank + 1) / sum(r + 1 for r in range(world))
    assert grad.dtype == "bfloat16"
    np.testing.assert_allclose(grad.astype("float32"), np.full(8, share), rtol=1e-2)

    # One weight for all devices: what each of them says of it is added up.
    def loss(x: Any, y: Any, w: Any) -> Any:
        @jax.shard_map(mesh=mesh(), in_specs=(P("x"), P(), P()), out_specs=P())
        def total(x: Any, y: Any, w: Any) -> Any:
            made = pccl.allreduce([x, y], "avg", weight=w)
            return jax.lax.psum(jnp.sum(made[0] ** 2), "x") + jnp.sum(made[1] ** 2)

        return total(x, y, w)

    def plain(x: Any, y: Any, w: Any) -> Any:
        made = pccl.allreduce([x, y], "avg", weight=w)
        return jnp.sum(made[0] ** 2) + jnp.sum(made[1] ** 2)

    arguments = (jnp.arange(8.0) + rank, jnp.arange(3.0) * (rank + 1), jnp.float32(rank + 1))
    wanted = jax.jit(jax.grad(plain, (0, 1, 2)))(*arguments)
    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def a_compiled_call_sends_fewer_bits_as_an_eager_one_does(dtype: str) -> Any:
    rank = pccl.rank()
    x = normals(20_000)
    for op in ("sum", "avg", "min", "max"):
        jitted = jax.jit(partial(pccl.allreduce, op=op, quantize=dtype))(x)
        eager = pccl.allreduce(x, op, quantize=dtype)
        assert (np.asarray(jitted) != np.asarray(pccl.allreduce(x, op))).any()
        same(jitted, eager)
    mean = jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w, quantize=dtype))
    found, eager = mean(x, rank + 1.0), pccl.allreduce(x, "avg", weight=rank + 1, quantize=dtype)
    same(found, eager)
    assert (np.asarray(found) != np.asarray(pccl.allreduce(x, "avg", weight=rank + 1))).any()
    return digest([jitted, found])


def how_codes_are_made_may_be_set() -> Any:
    rank = pccl.rank()
    how = pccl.Quantize("int4", block=64, algorithm="zero_point_scale", rounding="stochastic")
    tree = {
        "x": normals(5000),
        "h": normals(3000, "bfloat16"),
        "n": normals(100, "int32"),
        "s": 1.5,
    }
    jitted = jax.jit(lambda tree: pccl.allreduce(tree, "avg", quantize=how, tag=11))
    if rank:
        made = jitted(tree)
    else:
        arrays = jax.tree.map(np.asarray, tree | {"s": np.float32(1.5)})
        made = pccl.allreduce(arrays, "avg", quantize=how, tag=11)
    exact = pccl.allreduce(tree, "avg")
    same(made["n"], exact["n"])
    assert 0 < np.abs(np.asarray(made["x"] - exact["x"])).max() < 200
    again = jitted(tree)
    assert rank == 0 or (np.asarray(again["x"]) != np.asarray(made["x"])).any()  # other numbers
    return digest([made, again])


def the_gradient_of_a_quantized_call_is_that_of_an_exact_one() -> None:
    factors = normals(500)

    def loss(op: str, how: str | None, x: Any) -> Any:
        return jnp.sum(pccl.allreduce(x, op, quantize=how) * factors)

    for op in ("sum", "avg"):
        exact, coded = (
            jax.jit(jax.grad(partial(loss, op, how)))(normals(500)) for how in (None, "int4")
        )
        same(exact, coded)
    raised(
        pccl.NotSupported,
        lambda: jax.grad(lambda x: pccl.allreduce(x, "max", quantize="int8").sum())(jnp.ones(100)),
    )


def alone_the_mean_is_the_input_exactly() -> None:
    tree = {"f": normals(1000), "h": normals(77, "float16"), "i": normals(9, "int32")}

    def call(tree: Any, w: Any) -> Any:
        return pccl.allreduce(tree, "avg", weight=w)

    for made in (
        jax.jit(call)(tree, 0.3),
        jax.jit(call, donate_argnums=0)(jax.tree.map(jnp.copy, tree), 0.3),
    ):
        for name in tree:
            same(made[name], tree[name])
    assert "add up to 0" in typed(pccl.InvalidArgument, lambda: jax.jit(call)(tree, 0.0))


def survivors_of_a_killed_member_get_their_own_weighted_mean() -> Any:
    rank = pccl.rank()
    pccl.allreduce(jnp.ones(3))
    say_when_calling(communicator())
    mean = jax.jit(lambda x, w: pccl.allreduce(x, "avg", weight=w), donate_argnums=0)
    return [rank, float(mean(jnp.full(100_000, 10.0**rank), rank + 1.0)[-1])]
