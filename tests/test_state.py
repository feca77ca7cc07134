"""A state as named entries, and back: without an engine, whose part `deliver` plays."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pccl
from pccl import _arrays
from pccl._state import Replaced, State

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any = None


class Keeper:
    """Has a state dict, and counts how often it was loaded."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self.loaded = 0

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, kept: Any) -> None:
        self.kept = kept
        self.loaded += 1


def share(state: object) -> State:
    return State(state, "sync")


def names(state: object) -> list[str]:
    return [entry[0] for entry in share(state).entries]


class RefusedError(Exception):
    """The newcomer is put out before anything is written."""


def deliver(sender: object, receiver: object) -> Any:
    """What a sync gives a newcomer with `receiver`."""
    source, target = share(sender), share(receiver)
    own = {entry[0]: entry for entry in target.entries}
    written: dict[str, tuple[Any, Any]] = {}
    replaced: list[Replaced] = []
    for name, kind, shape, hint, _, data, _, _ in source.entries:
        assert data.dtype == np.uint8 and data.ndim == 1
        if name in own:
            _, old_kind, old_shape, _, _, old, writable, _ = own.pop(name)
            assert (kind, shape) == (old_kind, old_shape), name
            if old.tobytes() == data.tobytes():
                continue
            if writable and old.size == data.size:
                written[name] = (old, data)
                continue
        replaced.append((name, kind, shape, hint, data.copy()))
    assert not own, "the engine refuses a newcomer that has more than the others"
    refusal = target.check([(*what, data.size) for *what, data in replaced])  # type: ignore[misc]
    if refusal is not None:
        raise RefusedError(refusal)
    for old, data in written.values():
        old[...] = data
    return target.finish([*written], replaced)


def same(a: Any, b: Any) -> bool:
    """Equal in structure, types and bits, in whatever byte order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        a, b = (array.astype(array.dtype.newbyteorder("="), copy=False) for array in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Keeper):
        return same(a.kept, b.kept)
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or a != a and b != b)
    return bool(a == b)


# Entries.


def test_entries_are_named_by_the_path_to_them() -> None:
    state = {
        "b": np.zeros(2),
        "a": [1, (2.0, None)],
        "c": {3: "x", -1: True},
        "d": Pair(0, Layer(np.zeros(1))),
        "it's": 0,
        "keeper": Keeper({"inner": 1}),
        "none": {},
    }
    assert names(state) == [
        "['a'][0]",
        "['a'][1][0]",
        "['a'][1][1]",
        "['b']",
        "['c'][-1]",
        "['c'][3]",
        "['d'].first",
        "['d'].second.weight",
        "['d'].second.bias",
        '["it\'s"]',
        "['keeper']['inner']",
    ]


@pytest.mark.parametrize("state", [np.zeros(3), 1, None, "x", Keeper(5)])
def test_a_state_of_one_leaf_has_an_entry_without_a_name(state: object) -> None:
    assert names(state) == [""]


def test_an_object_is_named_as_what_its_state_dict_says() -> None:
    assert names({"m": Keeper({"w": 1})}) == names({"m": {"w": 1}})


@pytest.mark.parametrize(
    ("leaf", "kind", "shape", "size"),
    [
        (np.zeros((2, 3), np.float32), "float32", (2, 3), 24),
        (np.zeros(3, np.bool_), "bool", (3,), 3),
        (np.zeros(3, np.complex64), "complex64", (3,), 24),
        (np.zeros(3, ">i4"), "int32", (3,), 12),
        (np.zeros(()), "float64", (), 8),
        (np.zeros((4, 0)), "float64", (4, 0), 0),
        (np.zeros((4, 6))[::2, ::3], "float64", (2, 2), 32),
        (np.array(["ab", "c"]), "U2", (2,), 16),
        (np.array([b"abc"]), "S3", (1,), 3),
        (np.zeros(2, "M8[s]"), "datetime64[s]", (2,), 16),
        (np.float16(1), "float16", (), 2),
        (np.bool_(True), "bool", (), 1),
        (True, "Python bool", (), 1),
        (1, "Python int", (), 1),
        (1.5, "Python float", (), 8),
        ("\u20ac", "Python str", (), 3),
        (None, "Python None", (), 0),
    ],
)
def test_kinds_and_shapes_say_what_must_be_equal(
    leaf: object, kind: str, shape: tuple[int, ...], size: int
) -> None:
    ((_, found, found_shape, _, loose, data, _, _),) = share(leaf).entries
    assert (found, found_shape, data.size, loose) == (kind, shape, size, False)


def frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("leaf", "own"),
    [
        (np.arange(6.0).reshape(2, 3), True),
        (np.array(5.0), True),
        (frozen(np.arange(6.0)), False),
        (np.arange(6.0)[::2], False),
        (np.arange(6.0).reshape(2, 3).T, False),
        (np.arange(6, dtype=">f8"), False),
        (np.float64(2.5), False),
        (2.5, False),
        ("x", False),
    ],
)
def test_only_writable_contiguous_native_arrays_are_shared_as_they_lie(
    leaf: Any, own: bool
) -> None:
    ((*_, data, writable, _),) = share(leaf).entries
    assert writable is own
    if isinstance(leaf, np.ndarray):
        assert data.tobytes() == leaf.astype(leaf.dtype.newbyteorder("=")).tobytes()
        if own:
            assert np.shares_memory(data, leaf)


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": [0, object()]}, "['a'][1]"),
        ({"a": 1j}, "['a']"),
        ({"a": b"x"}, "['a']"),
        ({"a": {1, 2}}, "['a']"),
        ({"a": np.array([None])}, "['a']"),
        ({"a": np.zeros(2, [("x", "f4")])}, "['a']"),
        ({"a": np.ma.masked_array([1, 2])}, "['a']"),
        ({"a": {1: 0, "b": 0}}, "['a']"),
        ({"a": Keeper([object()])}, "['a'][0]"),
        (Keeper, ""),
    ],
)
def test_what_cannot_be_shared_is_named(state: object, path: str) -> None:
    with pytest.raises(pccl.InvalidArgument) as caught:
        share(state)
    assert caught.value.func_name == "sync"
    assert f"state{path}" in caught.value.reason


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(pccl.InvalidArgument, match="contains itself"):
        share(loop)


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


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_numpy_and_torch_peers_mix() -> None:
    import torch

    array, tensor = np.zeros((2, 3), np.float32), torch.zeros(2, 3)
    deliver([torch.arange(6.0).reshape(2, 3)], [array])
    deliver([array], [tensor])
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
