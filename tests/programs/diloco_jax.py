"""Members of a DiLoCo run around a JAX program, which do what the test tells them."""

from __future__ import annotations

import hashlib
from typing import Any, NoReturn

import numpy as np

import pccl
from programs.diloco_member import REJOIN, multiply, rounds
from programs.peer import peer_id, say, start
from programs.shell import obey

outer: Any
state: Any
params: Any
target: Any
every: int


def serve() -> NoReturn:
    """Joins, and waits for calls of the functions below."""
    import pccl.adapters.jax  # noqa: F401  # takes long: before the run waits for this peer

    start()
    say(event="in", peer=peer_id())
    obey()


def make(
    number: int,
    *,
    dtype: str = "float32",
    rejoin: str | None = None,
    spoil: float | None = None,
    **options: Any,
) -> None:
    """Makes the DiLoCo around two parameters.

    `rejoin`: a key of REJOIN. `spoil`: this member's pseudo-gradients are multiplied by that.
    """
    global outer, state, params, target, every
    import jax
    import jax.numpy as jnp

    from pccl.adapters.jax import diloco

    key = jax.random.key(number)
    params = {"w": jax.random.normal(key, (40, 3), dtype), "b": jnp.float32(number)}
    target = jax.tree.map(lambda p: p + number, params)
    every = options["sync_every"]
    outer = diloco(rejoin=None if rejoin is None else REJOIN[rejoin], **options)
    state = outer.init(params)
    if spoil is not None:
        multiply(state.core, spoil)
    params = state.params
    say(event="made", round=state.core.outer_step)


def digest(tree: Any) -> str:
    """A hash of every array of a tree."""
    import jax

    raw = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    return hashlib.sha256(raw).hexdigest()


def go(count: int, *, until: int = 0) -> None:
    """Trains through rounds, as diloco_member.rounds says. Newcomers that watch take no part."""

    def info() -> pccl.ReduceInfo | None:
        found: pccl.ReduceInfo | None = state.core.info
        return None if state.core.observers else found

    say(event="went", log=rounds(count, until, info, step))


def step() -> dict[str, Any] | None:
    """An inner step. Returns what to log at a round's end."""
    global params, state
    import jax

    params = jax.tree.map(lambda p, t: (p - 0.1 * (p - t)).astype(p.dtype), params, target)
    params, state = outer.update(params, state, tokens=8)
    core = state.core
    if core.inner_step % every != 0:
        return None
    return {
        "round": core.outer_step,
        "inner": digest(params),
        "contributors": None if core.info is None else sorted(core.info.contributors),
        "outer": digest(core.parameters),
        "size": pccl.world_size(),
        "steps": core.round_steps,
        "limited": list(core.limited),
        "dtype": str(params["w"].dtype),
    }


def begin() -> None:
    """Makes the first inner step, which compiles. It must not be the last one of a round."""
    assert step() is None
    say(event="begun")
