"""Any tree of any leaves arrives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from states import Keeper, Layer, Pair, deliver, frozen, same

# Any tree.

DTYPES = ["?", "i1", "u2", "<i4", ">i4", "u8", "f2", "<f8", ">f4", "c8", "U3", "M8[s]"]


@dataclasses.dataclass
class ArrayOf:
    dtype: str
    shape: tuple[int, ...]
    layout: str


def _array(spec: ArrayOf, seed: int) -> Any:
    rng = np.random.default_rng([seed, len(spec.shape), *spec.shape])
    values = rng.integers(0, 100, spec.shape)
    array = np.asarray(values > 50 if spec.dtype == "?" else values).astype(spec.dtype)
    if spec.layout == "reversed" and array.ndim:
        array = array[::-1].copy()[::-1]
    elif spec.layout == "fortran":
        array = np.asfortranarray(array)
    elif spec.layout == "frozen":
        array = frozen(array)
    elif spec.layout == "scalar":
        return array.reshape(-1)[0] if array.size else array
    return array


arrays = st.builds(
    ArrayOf,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["plain", "reversed", "fortran", "frozen", "scalar"]),
)
specs = st.recursive(
    arrays | st.sampled_from([bool, int, float, str, type(None)]),
    lambda children: (
        st.dictionaries(st.text(max_size=3), children, max_size=4)
        | st.dictionaries(st.integers(), children, max_size=4)
        | st.lists(children, max_size=4)
        | st.tuples(children, children)
        | st.builds(Pair, children, children)
        | st.builds(Layer, children, children)
        | st.builds(Keeper, st.dictionaries(st.text(max_size=3), children, max_size=3))
    ),
    max_leaves=15,
)

VALUES: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers() | st.integers(-(10**40), 10**40),
    float: st.floats(),
    str: st.text(),
    type(None): st.none(),
}


def fill(spec: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """A tree of that form with any values."""
    if isinstance(spec, ArrayOf):
        return _array(spec, draw(st.integers(0, 5)))
    if isinstance(spec, type):
        return draw(VALUES[spec])
    if isinstance(spec, Keeper):
        return Keeper(fill(spec.kept, draw))
    if isinstance(spec, Layer):
        return Layer(fill(spec.weight, draw), fill(spec.bias, draw))
    if isinstance(spec, Pair):
        return Pair(fill(spec.first, draw), fill(spec.second, draw))
    if isinstance(spec, dict):
        return {key: fill(child, draw) for key, child in spec.items()}
    return type(spec)(fill(child, draw) for child in spec)


def _can_be_made(spec: Any) -> bool:
    """Whether a newcomer that lacks this can get it: it is made of entries in plain containers."""
    if isinstance(spec, ArrayOf):
        return spec.layout != "scalar"
    if isinstance(spec, type):
        return True
    if isinstance(spec, dict):
        return bool(spec) and all(map(_can_be_made, spec.values()))
    if type(spec) in (list, tuple):
        return bool(spec) and all(map(_can_be_made, spec))
    return False


def thin(spec: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """The form without some of its entries, as a newcomer may have it."""
    if isinstance(spec, Keeper):
        return Keeper(thin(spec.kept, draw))
    if isinstance(spec, Layer):
        return Layer(thin(spec.weight, draw), thin(spec.bias, draw))
    if isinstance(spec, Pair):
        return Pair(thin(spec.first, draw), thin(spec.second, draw))
    if isinstance(spec, dict):
        kept = {
            key: child
            for key, child in spec.items()
            if not _can_be_made(child) or draw(st.booleans())
        }
        return {key: thin(child, draw) for key, child in kept.items()}
    if type(spec) in (list, tuple):
        return type(spec)(thin(child, draw) for child in spec)
    return spec


@given(specs, st.data())
def test_a_receiver_with_any_values_becomes_equal_to_the_sender(
    spec: Any, data: st.DataObject
) -> None:
    sender, receiver = fill(spec, data.draw), fill(spec, data.draw)
    result = deliver(sender, receiver)
    assert same(result, sender)
    assert deliver(sender, result) is result


@given(specs, st.data())
def test_a_receiver_that_lacks_entries_becomes_equal_to_the_sender(
    spec: Any, data: st.DataObject
) -> None:
    sender, receiver = fill(spec, data.draw), fill(thin(spec, data.draw), data.draw)
    result = deliver(sender, receiver)
    assert same(result, sender)
    assert deliver(sender, result) is result
