"""State with arrays of torch and JAX."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from states import deliver, share

import pccl

# Frameworks.


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_torch_tensors_are_written_in_place_whatever_their_dtype_and_layout() -> None:
    import torch

    def make(value: int) -> dict[str, Any]:
        return {
            "plain": torch.full((2, 3), float(value)),
            "strided": torch.full((4, 4), value)[::2, ::3],
            "turned": torch.arange(6.0).reshape(2, 3).T * value,
            "conj": torch.full((2,), value * (1 + 2j)).conj(),
            "parameter": torch.nn.Parameter(torch.full((3,), value / 2)),
            "0-d": torch.tensor(value),
            "empty": torch.empty(0, 2),
            "kinds": [
                torch.arange(4).mul(value).to(kind)
                for kind in (
                    torch.bfloat16,
                    torch.float16,
                    torch.bool,
                    torch.uint8,
                    torch.complex128,
                )
            ],
        }

    kinds = {name: kind for name, kind, *_ in share(make(1)).entries}
    assert kinds["['plain']"] == "float32"
    assert kinds["['kinds'][0]"] == "bfloat16"
    state = make(1)
    assert deliver(make(2), state) is state
    wanted = make(2)
    for key in wanted:
        pairs = (
            [(state[key], wanted[key])]
            if key != "kinds"
            else zip(state[key], wanted[key], strict=True)
        )
        assert all(torch.equal(a, b) for a, b in pairs), key
    assert state["parameter"].requires_grad
    # Where nothing was, the sender's framework's arrays appear.
    added = deliver({"a": torch.arange(3, dtype=torch.bfloat16)}, {})["a"]
    assert torch.equal(added, torch.arange(3, dtype=torch.bfloat16))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_tensor_whose_elements_share_memory_is_refused() -> None:
    import torch

    for tensor in (torch.zeros(1).expand(4), torch.zeros(6).unfold(0, 3, 1)):
        with pytest.raises(pccl.InvalidArgument, match="share memory"):
            share({"a": tensor})
    for tensor in (torch.zeros(1, 3).expand(1, 3), torch.zeros(4, 4)[::2, ::3].T):
        assert deliver([torch.ones(tensor.shape)], [tensor])[0] is tensor
        assert (tensor == 1).all()


def test_a_state_may_have_tuples_of_c() -> None:
    torch = pytest.importorskip("torch")

    def made(value: float) -> Any:
        largest = torch.max(torch.full((2, 2), value), 0)
        return {"n": np.full(2, value), "m": [largest], "s": torch.Size([int(value)])}

    told = deliver(made(3), made(1))
    assert type(told["m"][0]) is type(made(3)["m"][0])
    assert told["m"][0].values.tolist() == [3, 3] and told["n"].tolist() == [3, 3]
    assert type(told["s"]) is torch.Size and told["s"] == (3,)
    assert deliver(torch.Size([1, 2]), torch.Size([1])) == (1, 2)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_numpy_and_torch_peers_mix() -> None:
    import torch

    array, tensor = np.zeros((2, 3), np.float32), torch.zeros(2, 3)
    deliver([torch.arange(6.0).reshape(2, 3)], [array])
    before = tensor._version
    deliver([array], [tensor])
    assert tensor._version > before  # a backward that needs the old elements raises
    assert (array == np.arange(6).reshape(2, 3)).all()
    assert torch.equal(tensor, torch.arange(6.0).reshape(2, 3))


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_jax_arrays_are_replaced() -> None:
    import jax
    import jax.numpy as jnp

    def make(value: int) -> dict[str, Any]:
        kinds = (jnp.float32, jnp.bfloat16, jnp.bool_, jnp.complex64)
        return {
            "kinds": [jnp.full((2, 3), value).astype(kind) for kind in kinds],
            "none": jnp.zeros((0, 2)),
        }

    assert [kind for _, kind, *_ in share(make(1)).entries] == [
        "float32",
        "bfloat16",
        "bool",
        "complex64",
        "float32",
    ]
    state = make(1)
    result = deliver(make(2), state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))
    assert all(map(lambda a, b: (a == b).all(), jax.tree.leaves(result), jax.tree.leaves(make(2))))
    assert all(map(lambda a, b: (a == b).all(), jax.tree.leaves(state), jax.tree.leaves(make(1))))
    assert result["none"] is state["none"]
    added = deliver({"a": jnp.ones(3, jnp.bfloat16)}, {})["a"]
    assert isinstance(added, jax.Array) and (added == 1).all()


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_containers_registered_with_jax_keep_their_type() -> None:
    import jax

    @jax.tree_util.register_pytree_with_keys_class
    class Box:
        def __init__(self, value: Any) -> None:
            self.value = value

        def tree_flatten_with_keys(self) -> Any:
            return [(jax.tree_util.GetAttrKey("value"), self.value)], None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> Any:
            return cls(*children)

    result = deliver({"box": Box(5)}, {"box": Box(1)})
    assert isinstance(result["box"], Box) and result["box"].value == 5
