"""Members of a DiLoCo run around a JAX program, which do what the test tells them."""

from __future__ import annotations

import hashlib
from typing import Any, NoReturn

import numpy as np

from programs.diloco_member import rounds
from programs.peer import peer_id, say, start
from programs.shell import obey

outer: Any
state: Any
params: Any
target: Any


def serve() -> NoReturn:
    """Joins, and waits for calls of the functions below."""
    import pccl.adapters.jax  # noqa: F401  # takes long: before the run waits for this peer

    start()
    say(event="in", peer=peer_id())
    obey()


def make(number: int, *, dtype: str = "float32", **options: Any) -> None:
    """Makes the DiLoCo around two parameters."""
    global outer, state, params, target
    import jax
    import jax.numpy as jnp

    from pccl.adapters.jax import diloco

    key = jax.random.key(number)
    params = {"w": jax.random.normal(key, (40, 3), dtype), "b": jnp.float32(number)}
    target = jax.tree.map(lambda p: p + number, params)
    outer = diloco(**options)
    state = outer.init(params)
    params = state.params
    say(event="made", round=state.core.outer_step)


def digest(tree: Any) -> str:
    """A hash of every array of a tree."""
    import jax

    raw = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    return hashlib.sha256(raw).hexdigest()


def go(count: int, *, until: int = 0) -> None:
    """Trains through rounds, as diloco_member.rounds says."""
    import jax

    def step() -> dict[str, Any] | None:
        global params, state
        params = jax.tree.map(lambda p, t: (p - 0.1 * (p - t)).astype(p.dtype), params, target)
        params, state = outer.update(params, state, tokens=8)
        if state.core.inner_step % 3 != 0:
            return None
        return {
            "round": state.core.outer_step,
            "inner": digest(params),
            "contributors": None,
            "outer": digest(state.core.parameters),
            "dtype": str(params["w"].dtype),
        }

    say(event="went", log=rounds(count, until, lambda: state.core.info, step))
