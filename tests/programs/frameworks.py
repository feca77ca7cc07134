"""Behaviour that depends on the libraries that a process has loaded."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pccl
from pccl import tree


def flatten_nodes_of_jax() -> None:
    import jax

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        weight: Any
        name: str = dataclasses.field(metadata={"static": True})

    class Pair:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def tree_flatten(self) -> tuple[Any, None]:
            return self.parts, None

        @classmethod
        def tree_unflatten(cls, aux: None, parts: Any) -> Pair:
            return cls(*parts)

    jax.tree_util.register_pytree_node_class(Pair)
    flat = tree.flatten({"m": Model([1, None], "net"), "p": Pair(2, (3,))}, "f")
    assert flat.leaves == [1, 2, 3], flat
    assert flat.paths[0] == "['m'].weight[0]", flat
    again = flat.unflatten([4, 5, 6])
    assert again["m"] == Model([4, None], "net")
    assert again["p"].parts == (5, (6,))


def flatten_an_ordered_dict_with_jax() -> None:
    import jax  # noqa: F401

    flat = tree.flatten(collections.OrderedDict(b=1, a=2), "f")
    assert flat.leaves == [2, 1]


def name_a_missing_dtype() -> None:
    """NumPy knows bfloat16 only where ml_dtypes was loaded."""
    try:
        pccl.DataType.BFLOAT16.to_numpy_dtype()
    except pccl.NotSupported as error:
        assert "ml_dtypes" in str(error)
    else:
        raise SystemExit("no error")
