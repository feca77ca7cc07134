"""Entries become a state again: what is written in place, replaced, added and refused."""

from __future__ import annotations

import importlib.util
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from states import Keeper, Layer, Pair, RefusedError, deliver, frozen, same, share

import pccl
from pccl import _arrays

# The way back.


def tree() -> dict[str, Any]:
    return {"w": np.zeros(3), "n": [1, (2, "x")], "keeper": Keeper({"m": np.ones(2), "k": 0})}


def test_a_state_that_did_not_change_is_returned_as_it_was() -> None:
    state = tree()
    assert deliver(tree(), state) is state
    assert state["keeper"].loaded == 0


def test_arrays_are_written_in_place_and_their_containers_stay() -> None:
    state = tree()
    w = state["w"]
    other = tree()
    other["w"] += 5
    assert deliver(other, state) is state
    assert state["w"] is w and (w == 5).all()


def test_values_are_new_and_with_them_their_containers_while_the_given_ones_stay() -> None:
    state = tree()
    other = tree()
    other["n"] = [1, (3, "x")]
    result = deliver(other, state)
    assert same(result, other)
    assert same(state, tree())
    assert result is not state and result["n"] is not state["n"]
    assert result["w"] is state["w"] and result["keeper"] is state["keeper"]


@pytest.mark.parametrize(
    "make",
    [
        lambda value: np.full((4, 4), value)[::2, ::-1],
        lambda value: np.asfortranarray(np.full((2, 3), value)),
        lambda value: np.full(3, value, ">i4"),
        lambda value: np.array(value + 0.5),
        lambda value: np.array(["a" * value, "b"], "U9"),
    ],
)
def test_writable_arrays_of_any_layout_stay_the_same_objects(make: Callable[[int], Any]) -> None:
    old = make(1)
    assert deliver({"a": make(2)}, {"a": old})["a"] is old
    assert same(old, make(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda value: frozen(np.full(3, value)),
        lambda value: np.broadcast_to(np.float32(value), (2, 3)),
        lambda value: np.int16(value),
        lambda value: np.complex128(value * 1j),
        lambda value: np.bool_(value == 1),
    ],
)
def test_arrays_that_cannot_be_written_are_replaced(make: Callable[[int], Any]) -> None:
    old = make(1)
    new = deliver({"a": make(2)}, {"a": old})["a"]
    assert same(new, make(2))
    assert same(old, make(1))


def test_an_array_may_come_from_a_member_with_another_byte_order_and_layout() -> None:
    old = np.zeros((3, 2), ">f4").T
    assert deliver([np.arange(6, dtype=np.float32).reshape(2, 3)], [old])[0] is old
    assert (old == np.arange(6).reshape(2, 3)).all() and old.dtype == ">f4"


def test_a_replaced_array_has_the_byte_order_of_the_one_before() -> None:
    (new,) = deliver([np.arange(3, dtype=">i4")], [frozen(np.zeros(3, ">i4"))])
    assert new.tolist() == [0, 1, 2]
    assert new.dtype.str == ">i4"


def test_an_object_gets_its_whole_state_dict_once() -> None:
    state, other = tree(), tree()
    keeper, m = state["keeper"], state["keeper"].kept["m"]
    other["keeper"].kept["k"] = 7
    other["keeper"].kept["m"] += 1
    result = deliver(other, state)
    assert result is state or result["keeper"] is keeper
    assert keeper.loaded == 1
    assert same(keeper.kept, {"m": np.full(2, 2.0), "k": 7})
    assert keeper.kept["m"] is m


def test_an_object_whose_arrays_alone_were_written_still_gets_to_know() -> None:
    # It may have copied what its state dict shows.
    state, other = tree(), tree()
    other["keeper"].kept["m"] += 1
    deliver(other, state)
    assert state["keeper"].loaded == 1


def test_objects_nest() -> None:
    state = Keeper({"inner": Keeper([1, Keeper(2)])})
    inner = state.kept["inner"]
    assert deliver(Keeper({"inner": Keeper([1, Keeper(3)])}), state) is state
    assert inner.kept[1].kept == 3
    assert (state.loaded, inner.loaded, inner.kept[1].loaded) == (1, 1, 1)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": {"b": {"c": 1, "d": [1, [2]]}}}, {"a": {}}),
        ({"a": {"b": {"c": 1, "d": (1, (2,))}}}, {}),
        ({0: {"m": np.ones(3)}, 2: {"m": np.zeros(3)}}, {}),
        ({"a": [1, 2, 3]}, {"a": [1]}),
        ({"a": (1, (2, 3))}, {"a": (1, (2,))}),
        ({"a": None, "b": "x", "c": True}, {"c": False}),
        ({f"{n}": list(range(12)) for n in range(12)}, {}),
        ([np.float32(1), np.array(1.0), np.zeros((2, 0), np.int8), np.array(["x"])], []),
        (OrderedDict(b=1, a=2), OrderedDict()),
        (Keeper({"state": {0: {"step": 1}}, "groups": [{"lr": 0.1}]}), Keeper({"state": {}, "groups": [{"lr": 0.2}]})),
    ],
)  # fmt: skip
def test_entries_that_were_missing_are_added(sender: Any, receiver: Any) -> None:
    before = repr(receiver)
    result = deliver(sender, receiver)
    if isinstance(receiver, Keeper):
        assert result is receiver and receiver.loaded == 1
    else:
        assert repr(receiver) == before  # what was given is not changed
    for added, wanted in zip(share(result).entries, share(sender).entries, strict=True):
        assert added[:3] == wanted[:3]
        assert added[5].tobytes() == wanted[5].tobytes()
    assert type(result) is type(sender)
    if not isinstance(sender, list):  # NumPy scalars come as 0-d arrays where nothing was
        assert same(result, sender)


@pytest.mark.parametrize(
    ("sender", "receiver", "path", "why"),
    [
        ({"m": np.ones(2)}, {"m": {}}, "['m']", "a dict in its place"),
        (np.ones(2), {}, "the state", "a dict in its place"),
        ([1, 2], {}, "[0]", "a list, where this peer has a dict"),
        ({"m": {"x": 1}}, {"m": []}, "['m']['x']", "a dict with string keys, where this peer"),
        ({"m": {0: 1, 1: 2}}, {"m": ()}, "['m'][0]", "a dict with int keys, where this peer"),
        ({"m": Keeper({"w": 1}), "z": 1}, {"z": 1}, "['m']['w']", "an object with a state dict"),
        ({"m": {"o": Keeper(1)}}, {"m": {}}, "['m']['o']", "put one at 'o'"),
        ({"m": Layer(1, 2)}, {}, "['m'].weight", "dataclass"),
        ({"m": Pair(1, 2)}, {"m": {}}, "['m'].first", "where this peer has a dict"),
        ({"m": [Pair(1, 2)]}, {"m": []}, "['m'][0].first", "put one at 0"),
        ({"m": Keeper({"o": Keeper(1)})}, {"m": Keeper({})}, "['m']['o']", "put one at 'o'"),
        ({"a": [1, 2, 3]}, {"a": [[], 2]}, "['a'][0]", "a list in its place"),
        ({"a": [1, [], 3]}, {"a": [1]}, "['a'][2]", "before it in the list"),
        ({"a": [1, [], 3]}, {}, "['a'][2]", "before it in the list"),
    ],
)
def test_what_cannot_be_added_is_refused_before_anything_is_written(
    sender: Any, receiver: Any, path: str, why: str
) -> None:
    before = repr(receiver)
    with pytest.raises(RefusedError) as caught:
        deliver(sender, receiver)
    assert path in str(caught.value) and why in str(caught.value)
    assert repr(receiver) == before


def test_what_is_nested_too_deeply_to_be_made_is_refused() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = {"a": deep}
    assert same(deliver({"d": deep, "z": 1}, {"d": deep, "z": 0}), {"d": deep, "z": 1})
    with pytest.raises(RefusedError, match="too deeply"):
        deliver({"d": deep, "z": 1}, {"z": 1})


def test_a_plain_container_and_an_object_may_stand_for_each_other() -> None:
    assert deliver({"m": Keeper({"a": 1, "b": 2})}, {"m": {"a": 0}}) == {"m": {"a": 1, "b": 2}}
    mine = {"m": Keeper({"a": 0})}
    assert deliver({"m": {"a": 1, "b": 2}}, mine) is mine
    assert mine["m"].kept == {"a": 1, "b": 2}


def offer(kind: str, shape: Any, size: int, hint: str = '["",["d","x"]]') -> str | None:
    return share({}).check([("['x']", kind, shape, hint, size)])


def test_an_array_that_cannot_be_made_here_is_refused() -> None:
    assert offer("float32", (2, 3), 24) is None
    assert "24 bytes" in (offer("float32", (2, 2), 24) or "")
    assert "ml_dtypes" in (offer("float128x", (2,), 8) or "")
    assert offer("object", (1,), 8) is not None
    assert offer("i4,i4", (1,), 8) is not None
    assert "knows no" in (offer("Python set", (), 8) or "")
    mine = share({"x": np.zeros(2)})
    assert "8 bytes" in (mine.check([("['x']", "float64", (2,), "", 8)]) or "")


@pytest.mark.parametrize(
    "hint",
    ["", "{}", "7", "[]", '["",["d"]]', '["",["q","x"]]', '["",["d",5]]', '["",["l","x"]]', '[1,["d","x"]]'],
)  # fmt: skip
def test_a_way_that_makes_no_sense_is_refused(hint: str) -> None:
    assert offer("float32", (), 4, hint) is not None


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_64_bits_arrive_also_where_jax_makes_arrays_of_32() -> None:
    import jax

    with jax.enable_x64(False):
        hint = '["jax",["d","x"]]'
        assert offer("float64", (2,), 16, hint) is None
        made = _arrays.adopt("jax", "float64", (2,), np.arange(2.0).view(np.uint8))
        assert isinstance(made, jax.Array) and made.dtype == "float64"
        assert np.asarray(made).tolist() == [0.0, 1.0]


def test_untyped_bytes_are_an_array_like_any_other() -> None:
    old = np.zeros(2, "V8")
    new = np.arange(2.0).view("V8")
    assert deliver([new], [old])[0] is old
    assert same(old, new)
    assert same(deliver([new], [])[0], new)
    assert same(deliver([new], [frozen(np.zeros(2, "V8"))])[0], new)


@pytest.mark.parametrize(
    "view",
    [
        lambda: np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,)),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(5), (2, 4), (8, 8)),
        lambda: np.lib.stride_tricks.sliding_window_view(np.zeros(5), 3, writeable=True),
    ],
)
def test_an_array_whose_elements_share_memory_cannot_be_written_and_is_refused(view: Any) -> None:
    with pytest.raises(pccl.InvalidArgument, match="share memory"):
        share({"a": view()})


INTS = [0, -1, -(2**63), 2**64, 10**100]
FLOATS = [0.0, -0.0, math.inf, math.nan, 5e-324]
TEXTS = ["", "\0", "\ud800", "\U0001f600"]


@pytest.mark.parametrize("value", [*INTS, *FLOATS, *TEXTS, True, False], ids=ascii)
def test_values_arrive_exactly(value: Any) -> None:
    assert same(deliver({"a": value}, {"a": type(value)(1)})["a"], value)
    assert same(deliver({"a": value}, {})["a"], value)


def test_ints_may_have_more_digits_than_python_likes_to_print() -> None:
    assert deliver([10**5000 + 1], [0]) == [10**5000 + 1]
