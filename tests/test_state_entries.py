"""A state as named entries: names, kinds and shapes, and what cannot be shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from states import Keeper, Layer, Pair, frozen, share

import pccl


def names(state: object) -> list[str]:
    return [entry[0] for entry in share(state).entries]


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
