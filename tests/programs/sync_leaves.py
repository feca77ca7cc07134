"""States of every kind of leaf and container."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np

import pccl
from programs import sync_shell as shell
from programs.peer import say

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Layer:
    weight: object
    bias: object = None


class Schedule:
    def __init__(self, rng: np.random.Generator, seed: int) -> None:
        self.rate, self.history, self.loaded = float(seed), rng.standard_normal(9), 0

    def state_dict(self) -> Any:
        return {"rate": self.rate, "history": self.history, "warm": None}

    def load_state_dict(self, state: Any) -> None:
        self.rate, self.history, self.loaded = state["rate"], state["history"], self.loaded + 1


def numbers(rng: np.random.Generator, kind: str) -> Any:
    made = rng.integers(0, 100, (3, 5))
    return made > 50 if kind == "?" else made.astype(kind)


def make(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal((6, 8))
    frozen = rng.standard_normal(5)
    frozen.flags.writeable = False
    dtypes = "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16 M8[s] m8[ms]".split()
    kept = {
        "dtypes": [numbers(rng, kind) for kind in dtypes],
        "strided": wide[::2, ::3],
        "reversed": rng.standard_normal(9)[::-1],
        "fortran": np.asfortranarray(wide),
        "0-d": np.array(seed + 0.5),
        "empty": np.empty((3, 0)),
        "big-endian": rng.integers(0, 1000, 5).astype(">i4"),
        "text": np.array(["a" * seed, "bc"], "U9"),
    }
    rest = {
        "frozen": frozen,
        "broadcast": np.broadcast_to(np.float32(seed), (2, 3)),
        "scalars": (np.float32(seed), np.int8(seed), np.bool_(seed == 1), np.complex64(seed)),
        "int": -seed * 10**30,
        "float": -0.1 * seed,
        "bool": seed == 1,
        "str": chr(0x20AC) * seed,
        "none": None,
        "by number": {3: seed, -1: [seed, (seed, [])]},
        "ordered": OrderedDict(z=seed, a=Pair(seed, rng.standard_normal(2))),
        "layer": Layer(rng.standard_normal(3)),
        "schedule": Schedule(rng, seed),
        "nothing": {},
    }
    return kept, rest


def sync_every_kind() -> None:
    shell.sync_object(list(make(pccl.rank() + 1)))


def say_what_arrived() -> None:
    (kept, rest), (old_kept, old_rest) = shell.state, shell.given
    wanted = make(1)

    def same(a: Any, b: Any) -> bool:
        return shell.digest(a) == shell.digest(b)

    def leaves(tree: dict[str, Any]) -> list[Any]:
        return [*tree["dtypes"], *(tree[key] for key in sorted(tree) if key != "dtypes")]

    say(
        kept=same(kept, wanted[0]),
        rest=same(rest, wanted[1]),
        in_place=all(a is b for a, b in zip(leaves(kept), leaves(old_kept), strict=True)),
        foreign=kept["big-endian"].dtype.str,
        frozen=same(old_rest["frozen"], make(pccl.rank() + 1)[1]["frozen"]),
        scalars=[type(scalar).__name__ for scalar in rest["scalars"]],
        order=list(rest["ordered"]),
        types=[
            type(rest[key]).__name__
            for key in ("ordered", "layer", "schedule", "bool", "int", "str")
        ],
        pair=type(rest["ordered"]["a"]).__name__,
        schedule=rest["schedule"] is old_rest["schedule"],
        loaded=rest["schedule"].loaded,
    )


def sync_an_optimizer() -> None:
    slots = {0: {"m": shell.noise(1, 2000), "step": 3}, 2: {"m": shell.noise(2, 10), "step": 4}}
    optimizer = {"slots": slots, "betas": [0.9, (0.99, "x")]}
    shell.sync_object({"w": shell.noise(3, 10), "optimizer": optimizer, "note": "a"})
