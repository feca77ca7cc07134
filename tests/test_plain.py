"""Plain NumPy arrays are reduced in one step, all else in the general way: nobody can tell."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from members import each, members

import pccl
from pccl import _settings, process
from pccl import tree as trees
from pccl.reduce import routes
from pccl.types import OP_CODES

WORLD = 2
Pair = list[pccl.Communicator]
DTYPES = ["u1", "i1", "i2", "u2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "longlong", "intc"]
DTYPES += ["c8", "c16"]


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Called, it sends everything the general way from then on."""

    def general_only() -> None:
        monkeypatch.setattr(routes, "reduce_plain", lambda *what: None)
        monkeypatch.setattr(routes, "start_plain", lambda *what: None)
        monkeypatch.setattr(routes, "collect_plain", lambda *what, **how: None)
        monkeypatch.setattr(
            pccl.Communicator,
            "all_reduce",
            lambda self, send, recv, *, op, tag=0, timeout=None: self._all_reduce(
                send, recv, op, tag, None, None, timeout
            ),
        )

    yield general_only


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call so far was made in one step."""
    seen: list[bool] = []
    for name in ("reduce_plain", "start_plain", "collect_plain"):
        plain = getattr(routes, name)

        def watched(*what: object, plain: Any = plain, **how: object) -> object:
            found = plain(*what, **how)
            seen.append(found is not None)
            return found

        monkeypatch.setattr(routes, name, watched)
    return seen


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The explicit API's calls that took the general way."""
    seen: list[object] = []
    general = pccl.Communicator._all_reduce

    def watched(self: pccl.Communicator, *what: object) -> object:
        seen.append(what)
        return general(self, *what)  # type: ignore[arg-type]

    monkeypatch.setattr(pccl.Communicator, "_all_reduce", watched)
    return seen


def both(pair: Pair, first: Callable[..., object], second: Callable[..., object]) -> list[object]:
    """Returns what the calls return or raise when each member makes one."""
    return each(pair, lambda rank, comm: (first, second)[rank](comm))


def allreduce(array: object, *args: object, **options: object) -> Callable[..., object]:
    return lambda comm: pccl.allreduce(array, *args, comm=comm, **options)  # type: ignore[arg-type]


class Sub(np.ndarray):
    """A subclass: goes the general way."""


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 1, 3), (200, 100)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_members_that_go_different_ways_meet(
    pair: Pair, ways: list[bool], dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.full(shape, 3, dtype)
    results = both(pair, allreduce(array), allreduce(array.view(Sub)))
    assert sorted(ways) == [False, True]
    for result in results:
        assert isinstance(result, np.ndarray)
        assert result.dtype == array.dtype and result.shape == shape and result.flags.writeable
        np.testing.assert_array_equal(result, array * WORLD)


TREES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"w": np.ones((2, 3)), "b": np.ones(4, np.float32), "a'\n": np.ones(1, "u1")},
    "keys": lambda: {
        key: np.ones(2)
        for key in ("", '"', "'\"", "a\\b", "\u00e9", "\x7f", "\x1f", "\ud800", "~ ")
    },
    "ints": lambda: {10: np.ones(2), 9: np.ones(3), -1: np.ones(())},
    "nested": lambda: [{"x": (np.ones(2), [np.ones(3), np.ones((1, 2), "i2")])}, np.ones(5)],
    "none": lambda: {"a": None, "b": [np.ones(2), None]},
    "empty parts": lambda: {"a": {}, "b": [(), np.ones(2)], "c": []},
    "bfloat16": lambda: {"h": np.ones((2, 2), ml_dtypes.bfloat16), "f": np.ones(3)},
    "many": lambda: {f"leaf {i}": np.full(i + 1, i % 7, np.float32) for i in range(300)},
    "one of bfloat16": lambda: np.ones(7, ml_dtypes.bfloat16),
    "complex": lambda: [np.full(3, 1 + 2j), np.full(2, 1j, np.complex64)],
    "8-bit floats": lambda: [
        np.ones(3, ml_dtypes.float8_e4m3fn),
        np.ones(9, ml_dtypes.float8_e5m2),
    ],
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("how", ["new", "out", "in place", "async"])
def test_a_tree_comes_back_as_it_does_in_the_general_way(
    pair: Pair, ways: list[bool], general: Callable[[], None], name: str, how: str
) -> None:
    def call(comm: pccl.Communicator) -> object:
        tree = TREES[name]()
        if how == "async":
            return tree, pccl.allreduce_async(tree, comm=comm).wait()
        out = {"new": None, "out": TREES[name](), "in place": tree}[how]
        result = pccl.allreduce(tree, out=out, comm=comm)
        assert out is None or result is out
        return TREES[name](), result

    told = both(pair, call, call)
    assert ways == [True, True]
    general()
    for (tree, result), (_, expected) in zip(told, both(pair, call, call), strict=True):
        assert skeleton(result) == skeleton(expected)
        paths, leaves, *_ = trees.flatten(tree, "test")
        assert trees.flatten(result, "test").paths == paths
        for leaf, made in zip(leaves, trees.flatten(result, "test").leaves, strict=True):
            np.testing.assert_array_equal(made, np.asarray(leaf) * WORLD)
            assert made.dtype == leaf.dtype  # type: ignore[attr-defined]


def skeleton(tree: object) -> object:
    """The containers of a tree, with their order, around what its arrays are."""
    if isinstance(tree, dict):
        return {"": list(tree), **{str(key): skeleton(value) for key, value in tree.items()}}
    if isinstance(tree, list | tuple):
        return type(tree), [skeleton(value) for value in tree]
    return None if tree is None else (type(tree), tree.dtype, tree.shape)


def first_tree() -> dict[str, Any]:
    return {"a": np.ones(2, np.float32), "b": [np.ones(3), (np.ones(1, "u1"), None)], "c": {}}


LIKE_THE_FIRST: dict[str, Callable[[], Any]] = {
    "the same": first_tree,
    "another order": lambda: dict(reversed(first_tree().items())),
    "another last key": lambda: {**first_tree(), "d": first_tree()["b"]},
    "another middle key": lambda: {"a": first_tree()["a"], "bb": first_tree()["b"], "c": {}},
    "a filled dict": lambda: first_tree() | {"c": {"w": np.ones(2)}},
    "None for a dict": lambda: first_tree() | {"c": None},
    "a list for a dict": lambda: first_tree() | {"c": []},
    "an array for a dict": lambda: first_tree() | {"c": np.ones(2)},
    "another dtype": lambda: first_tree() | {"a": np.ones(2, np.int32)},
    "another length": lambda: first_tree() | {"a": np.ones(3, np.float32)},
    "another shape": lambda: first_tree() | {"a": np.ones((1, 2), np.float32)},
    "a tuple for the list": lambda: first_tree() | {"b": tuple(first_tree()["b"])},
    "a longer list": lambda: first_tree() | {"b": [*first_tree()["b"], np.ones(1)]},
    "an array for None": lambda: first_tree() | {"b": [np.ones(3), (np.ones(1, "u1"), np.ones(4))]},
    "None for an array": lambda: first_tree() | {"a": None},
    "a dict for an array": lambda: first_tree() | {"a": {"": np.ones(2, np.float32)}},
}
SAME_STRUCTURE = {"the same", "another order", "a tuple for the list", "a list for a dict"}


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("name", LIKE_THE_FIRST)
def test_a_tree_may_be_like_one_before(
    pair: Pair, ways: list[bool], general: Callable[[], None], name: str, with_out: bool
) -> None:
    def call(comm: pccl.Communicator) -> object:
        pccl.allreduce(first_tree(), comm=comm)
        out = dict(reversed(LIKE_THE_FIRST[name]().items())) if with_out else None
        result = pccl.allreduce(LIKE_THE_FIRST[name](), out=out, comm=comm)
        assert out is None or result is out
        return result

    told = both(pair, call, call)
    assert ways == [True] * 4
    general()
    for result, expected in zip(told, both(pair, call, call), strict=True):
        assert skeleton(result) == skeleton(expected)
        for made, leaf in zip(
            *(trees.flatten(x, "").leaves for x in (result, expected)), strict=True
        ):
            np.testing.assert_array_equal(made, leaf)


@pytest.mark.parametrize("name", sorted(set(LIKE_THE_FIRST) - SAME_STRUCTURE))
def test_a_tree_like_one_before_does_not_match_it(
    pair: Pair, general: Callable[[], None], name: str
) -> None:
    def first(comm: pccl.Communicator) -> object:
        return pccl.allreduce(first_tree(), comm=comm)

    def other(comm: pccl.Communicator) -> object:
        return pccl.allreduce(LIKE_THE_FIRST[name](), comm=comm)

    both(pair, first, first)
    plainly = both(pair, first, other)
    general()
    for error, expected in zip(plainly, both(pair, first, other), strict=True):
        assert type(error) is type(expected) is pccl.MismatchedCall
        words, others = (re.sub(r"#\d+", "#n", str(one)) for one in (error, expected))
        assert words == others


def test_trees_that_begin_alike_take_turns(pair: Pair, ways: list[bool]) -> None:
    def call(comm: pccl.Communicator) -> object:
        for turn in range(4):
            for dtype in ("f4", ml_dtypes.bfloat16, "i8"):
                tree = [{"w": np.full(2 + turn % 2, 3, dtype)}, np.ones(3, dtype)]
                result = pccl.allreduce(tree, comm=comm)
                assert skeleton(result) == skeleton(tree)
                np.testing.assert_array_equal(result[0]["w"], 3 * WORLD)
        return None

    assert both(pair, call, call) == [None, None]
    assert all(ways)


def test_an_output_of_another_structure_is_refused_for_a_known_tree(pair: Pair) -> None:
    def call(comm: pccl.Communicator) -> object:
        pccl.allreduce(first_tree(), comm=comm)
        return pccl.allreduce(first_tree() | {"c": {"w": np.ones(2)}}, out=first_tree(), comm=comm)

    for error in both(pair, call, call):
        assert isinstance(error, pccl.InvalidArgument) and "'c'" in str(error)


def test_many_different_trees_follow_each_other(pair: Pair, ways: list[bool]) -> None:
    def call(comm: pccl.Communicator) -> object:
        for number in [*range(12), *reversed(range(12))]:
            tree = {f"{number}.{i}": np.full(2 + i, number) for i in range(3)}
            result = pccl.allreduce(tree, comm=comm)
            assert list(result) == list(tree)
            for key, array in tree.items():
                np.testing.assert_array_equal(result[key], WORLD * array)
        return None

    assert both(pair, call, call) == [None, None]
    assert all(ways)


def test_an_array_that_cannot_be_written_is_refused_for_a_known_tree(pair: Pair) -> None:
    def call(comm: pccl.Communicator) -> object:
        tree = first_tree()
        pccl.allreduce(tree, out=tree, comm=comm)
        tree["a"].flags.writeable = False
        return pccl.allreduce(tree, out=tree, comm=comm)

    for error in both(pair, call, call):
        assert isinstance(error, pccl.InvalidArgument) and "['a']" in str(error)


@pytest.mark.parametrize("quantize", [None, "int4", pccl.Quantize("uint8", block=128)])
@pytest.mark.parametrize("name", TREES)
def test_a_member_may_go_the_plain_way_and_another_the_general_one(
    pair: Pair, ways: list[bool], name: str, quantize: pccl.Quantize | str | None
) -> None:
    def plain(comm: pccl.Communicator) -> object:
        return pccl.allreduce(TREES[name](), quantize=quantize, comm=comm)

    def generally(comm: pccl.Communicator) -> object:
        flat = trees.flatten(TREES[name](), "test")
        tree = flat.unflatten([x.view(Sub) for x in flat.leaves])
        return pccl.allreduce(tree, quantize=quantize, comm=comm)

    for result in both(pair, plain, generally):
        for leaf, made in zip(
            trees.flatten(TREES[name](), "test").leaves,
            trees.flatten(result, "test").leaves,
            strict=True,
        ):
            np.testing.assert_array_equal(made, np.asarray(leaf) * WORLD)
    assert sorted(ways) == [False, True]


def explicit(call: Callable[..., object], shape: Callable[[Any], Any]) -> Callable[..., Any]:
    """A call of the explicit API, which returns what it has written."""

    def made(comm: pccl.Communicator, x: Any) -> Any:
        recv = np.zeros(shape(x.shape), x.dtype).view(type(x))
        call(comm, x, recv)
        return recv

    return made


def stacked(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (WORLD, *shape)


def halved(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] // WORLD, *shape[1:])


def copied(comm: pccl.Communicator, x: Any) -> Any:
    array = x.copy()
    assert pccl.broadcast(array, 1, out=array, comm=comm) is array
    return array


def copied_explicitly(comm: pccl.Communicator, x: Any) -> Any:
    array = x.copy()
    assert comm.broadcast(array, root=1).world_size == WORLD
    return array


# Calls of arrays that are alike on both members but for their values.
COLLECTIVES: dict[str, Callable[[pccl.Communicator, Any], Any]] = {
    "broadcast": lambda comm, x: pccl.broadcast(x, 1, comm=comm),
    "broadcast to out": lambda comm, x: pccl.broadcast(x, 1, out=np.zeros_like(x), comm=comm),
    "broadcast in place": copied,
    "explicit broadcast": copied_explicitly,
    "allgather": lambda comm, x: pccl.allgather(x, comm=comm),
    "allgather with info": lambda comm, x: pccl.allgather(x, comm=comm, return_info=True)[0],
    "allgather to out": lambda comm, x: pccl.allgather(
        x, out=np.zeros(stacked(x.shape), x.dtype), comm=comm
    ),
    "explicit allgather": explicit(lambda comm, x, to: comm.all_gather(x, to), stacked),
    "reduce_scatter": lambda comm, x: pccl.reduce_scatter(x, "max", comm=comm),
    "reduce_scatter to out": lambda comm, x: pccl.reduce_scatter(
        x, "max", out=np.zeros(halved(x.shape), x.dtype), comm=comm
    ),
    "explicit reduce_scatter": explicit(
        lambda comm, x, to: comm.reduce_scatter(x, to, op="max"), halved
    ),
    "alltoall": lambda comm, x: pccl.alltoall(x, comm=comm),
    "alltoall to out": lambda comm, x: pccl.alltoall(x, out=np.zeros_like(x), comm=comm),
    "explicit alltoall": explicit(lambda comm, x, to: comm.all_to_all(x, to), lambda shape: shape),
}


@pytest.mark.parametrize("shape", [(2,), (6, 5), (200, 100)])
@pytest.mark.parametrize("dtype", ["f4", "u1", "?", "bfloat16", "i8"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_members_that_go_different_ways_meet(
    pair: Pair, ways: list[bool], name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    arrays = [(np.arange(np.prod(shape)) % (7 + n) - 3).reshape(shape) for n in range(WORLD)]
    arrays = [np.abs(array).astype(kind) for array in arrays]
    for views in ((np.ndarray, np.ndarray), (np.ndarray, Sub), (Sub, np.ndarray)):
        ways.clear()
        given = [array.view(view) for array, view in zip(arrays, views, strict=True)]
        calls = [
            lambda comm, x=x: (pccl.rank(comm=comm), COLLECTIVES[name](comm, x)) for x in given
        ]
        told: list[Any] = both(pair, *calls)
        assert sorted(ways) == sorted(view is np.ndarray for view in views)
        by_rank = [arrays[index] for index in np.argsort([rank for rank, _ in told])]
        for rank, made in told:
            half = shape[0] // WORLD
            part = slice(half * rank, half * (rank + 1))
            if "scatter" in name:
                wanted = np.maximum(*by_rank)[part]
            elif "alltoall" in name:
                wanted = np.concatenate([array[part] for array in by_rank])
            else:
                wanted = np.stack(by_rank) if "gather" in name else by_rank[1]
            assert made.dtype == kind
            np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: pccl.broadcast(np.ones(3), 2, comm=comm),
        lambda comm: pccl.broadcast(np.ones(3), out=np.ones(4), comm=comm),
        lambda comm: pccl.allgather(np.ones(3), out=np.ones((3, 2)), comm=comm),
        lambda comm: pccl.allgather(np.ones(3), out=np.ones((2, 3), np.float32), comm=comm),
        lambda comm: pccl.reduce_scatter(np.ones(3), comm=comm),
        lambda comm: pccl.reduce_scatter(np.ones(()), comm=comm),
        lambda comm: pccl.reduce_scatter(np.ones(4), "and", comm=comm),
        lambda comm: pccl.alltoall(np.ones(3), comm=comm),
        lambda comm: pccl.alltoall(np.ones(4), out=np.ones(4, np.float32), comm=comm),
        lambda comm: comm.all_to_all(np.ones(3), np.ones(3)),
        lambda comm: comm.all_to_all(np.ones(4), np.ones(2)),
        lambda comm: comm.broadcast(np.ones(3), root=-1),
        lambda comm: comm.all_gather(np.ones(3), np.ones(7)),
        lambda comm: comm.reduce_scatter(np.ones(3), np.ones(2), op="sum"),
        lambda comm: comm.reduce_scatter(np.ones(4, bool), np.ones(2, bool), op="sum"),
    ],
)
def test_wrong_collectives_are_refused_by_the_general_way(
    pair: Pair, ways: list[bool], call: Callable[[pccl.Communicator], object]
) -> None:
    assert [type(error) for error in both(pair, call, call)] == [pccl.InvalidArgument] * 2
    assert not any(ways)


def test_parts_that_overlap_are_left_to_the_general_way(pair: Pair, ways: list[bool]) -> None:
    def call(comm: pccl.Communicator) -> object:
        rank, memory = pccl.rank(comm=comm), np.zeros((WORLD, 4))
        memory[rank] = rank + 1
        pccl.allgather(memory[rank], out=memory, comm=comm)
        pccl.reduce_scatter(memory, out=memory[1:], comm=comm)
        return rank, memory

    for rank, memory in both(pair, call, call):  # type: ignore[misc]
        np.testing.assert_array_equal(memory, [[1] * 4, [2 * (rank + 1)] * 4])
    assert ways == [False] * 4


def test_outputs_that_overlap_are_left_to_the_general_way(pair: Pair, ways: list[bool]) -> None:
    def call(comm: pccl.Communicator) -> object:
        memory = np.zeros(12)
        memory[:4] = 1
        # The second output is the first input: in place only crosswise.
        tree = {"a": memory[:4], "b": np.full(4, 2.0)}
        pccl.allreduce(tree, out={"a": memory[4:8], "b": memory[:4]}, comm=comm)
        return memory

    for memory in both(pair, call, call):
        np.testing.assert_array_equal(memory, [4] * 4 + [2] * 4 + [0] * 4)  # type: ignore[arg-type]
    assert ways == [False, False]


@pytest.mark.parametrize("op", sorted(map(str, OP_CODES)))
def test_every_op_is_what_it_is_in_the_general_way(
    pair: Pair, ways: list[bool], general: Callable[[], None], op: str
) -> None:
    how = op if not op.isdigit() else pccl.ReduceOp(int(op))
    calls = [allreduce(np.arange(-4, 5) * (index + 1), how, return_info=True) for index in range(2)]
    told = both(pair, *calls)
    assert ways == [True, True]
    general()
    for (result, info), (expected, other) in zip(told, both(pair, *calls), strict=True):
        np.testing.assert_array_equal(result, expected)
        assert type(info) is type(other) and info.contributors == other.contributors
        assert (info.local_world_size, info.epoch, info.attempts) == (WORLD, other.epoch, 1)


def strided(count: int) -> np.ndarray:
    return np.arange(2.0 * count)[::2]


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        strided(6),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.broadcast_to(np.float32(2), (3, 5)),
        np.zeros(0),
        np.zeros((0, 4), np.int32),
        np.arange(4.0).view(Sub),
        np.arange(5.0)[::-1],
        np.frombuffer(b"\0" + np.arange(6.0).tobytes(), np.uint8)[1:].view(np.float64),
        read_only(np.arange(3.0)),
    ],
    ids=lambda array: f"{type(array).__name__}-{array.shape}-{array.strides}",
)
def test_arrays_of_any_layout_are_reduced_alike(
    pair: Pair, general: Callable[[], None], array: np.ndarray
) -> None:
    before = array.copy()
    told = both(pair, allreduce(array), allreduce(array))
    general()
    for result, expected in zip(told, both(pair, allreduce(array), allreduce(array)), strict=True):
        assert type(result) is type(expected)
        assert isinstance(result, np.ndarray) and isinstance(expected, np.ndarray)
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(result, array * WORLD)
    np.testing.assert_array_equal(array, before)


REFUSED = {
    "no tree": (None, {}),
    "None for the op": (np.ones(3), {"op": None}),
    "bool": (np.ones(3, bool), {}),
    "complex": (np.ones(3, complex), {"op": "max"}),
    "object": (np.array([1, "a"], object), {}),
    "large object": (np.zeros(100_000, object), {}),
    "large text": (np.zeros(100_000, "U2"), {}),
    "large record": (np.zeros(100_000, [("a", object)]), {}),
    "large time": (np.zeros(100_000, "M8[s]"), {}),
    "text": (np.array(["a", "b"]), {}),
    "bytes": (np.array([b"a"]), {}),
    "char": (np.array([b"a"], "c"), {}),
    "void": (np.zeros(2, "V1"), {}),
    "record": (np.zeros(2, [("a", "i4")]), {}),
    "time": (np.zeros(2, "M8[s]"), {}),
    "span": (np.zeros(2, "m8[s]"), {}),
    "long double": (np.zeros(2, np.longdouble), {}),
    "swapped": (np.ones(3, np.dtype("f4").newbyteorder()), {}),
    "masked": (np.ma.masked_array([1.0, 2.0], [True, False]), {}),
    "out read-only": (np.ones(3), {"out": read_only(np.ones(3))}),
    "out of another shape": (np.ones(4), {"out": np.ones((2, 2))}),
    "out of another size": (np.ones(4), {"out": np.ones(3)}),
    "out of another type": (np.ones(4), {"out": np.ones(4, np.float32)}),
    "out of another sign": (np.ones(4, np.int32), {"out": np.ones(4, np.uint32)}),
    "out swapped": (np.ones(4), {"out": np.ones(4, np.dtype("f8").newbyteorder())}),
    "out broadcast": (np.ones((0, 4)), {"out": np.broadcast_to(np.ones(()), (0, 4))}),
    "out no array": (np.ones(4), {"out": [1.0]}),
    "out a tree": (np.ones(4), {"out": [np.ones(4)]}),
    "no op": (np.ones(4), {"op": "median"}),
    "op no text": (np.ones(4), {"op": []}),
    "op out of range": (np.ones(4), {"op": 9}),
    "tag": (np.ones(4), {"tag": -1}),
    "large tag": (np.ones(4), {"tag": 2**64}),
    "bool tag": (np.ones(4), {"tag": True}),
    "tag text": (np.ones(4), {"tag": "1"}),
    "timeout": (np.ones(4), {"timeout": -1}),
    "weight": (np.ones(4), {"weight": 1.0}),
    "quantize": (np.ones(4), {"quantize": "int7"}),
    "quantize a product": (np.ones(4), {"quantize": "int8", "op": "prod"}),
    "quantize no text": (np.ones(4), {"quantize": 8}),
    "comm": (np.ones(4), {"comm": 3}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_in_the_same_words(
    pair: Pair, general: Callable[[], None], case: str
) -> None:
    array, options = REFUSED[case]

    def refused() -> list[str]:
        told = []
        calls: list[Callable[[], object]] = [
            lambda: pccl.allreduce(array, **{"comm": pair[0], **options})
        ]
        if options.keys() <= {"out", "tag", "op", "timeout"} and case != "out of another shape":
            given = {"op": "sum", **options}
            target = given.pop("out", np.empty_like(array))
            calls.append(lambda: pair[0].all_reduce(array, target, **given))
        for call in calls:
            with pytest.raises(pccl.PCCLError) as caught:
                call()
            told.append(f"{type(caught.value)} {caught.value.result} {caught.value}")
        return told

    plainly = refused()
    general()
    assert refused() == plainly


def test_explicit_wants_a_tag(pair: Pair) -> None:
    for tag in (None, True, "1"):
        with pytest.raises(pccl.InvalidArgument, match="tag must be an integer"):
            pair[0].all_reduce(np.ones(3), np.ones(3), op="sum", tag=tag)  # type: ignore[arg-type]


def test_outputs_that_overlap_the_input_get_the_right_values(pair: Pair, ways: list[bool]) -> None:
    for begin in (0, 1, 5, 10):  # in place, overlapping, side by side

        def call(comm: pccl.Communicator, begin: int = begin) -> object:
            memory = np.arange(20.0)
            out = memory[begin : begin + 10]
            assert pccl.allreduce(memory[:10], out=out, comm=comm) is out
            return out

        for out in both(pair, call, call):
            np.testing.assert_array_equal(out, np.arange(10.0) * WORLD)  # type: ignore[arg-type]
    assert ways == [True] * 2 + [False] * 4 + [True] * 2


def test_explicit_takes_arrays_of_one_size_in_any_shape(
    pair: Pair, long_ways: list[object]
) -> None:
    def call(comm: pccl.Communicator) -> object:
        recv = np.zeros((2, 3), np.float32)
        info = comm.all_reduce(np.ones(6, np.float32), recv, op="sum", tag=2**64 - 1)
        assert info == pccl.ReduceInfo(
            **{name: getattr(info, name) for name in pccl.ReduceInfo.__dataclass_fields__}
        )
        assert info.local_world_size == info.world_size == len(info.contributors) == WORLD
        return recv

    for recv in both(pair, call, call):
        np.testing.assert_array_equal(recv, np.full((2, 3), 2, np.float32))
    assert not long_ways


def test_explicit_is_native_only_when_nothing_is_special(
    pair: Pair, long_ways: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(options: dict[str, object]) -> Callable[[pccl.Communicator], object]:
        send, recv = np.ones(3, np.float32), np.zeros(3, np.float32)
        return lambda comm: comm.all_reduce(send, recv, **{"op": "sum", **options})

    def long_way(options: dict[str, object]) -> bool:
        before = len(long_ways)
        for info in both(pair, call(options), call(options)):
            assert isinstance(info, pccl.ReduceInfo) and info.world_size == WORLD
        return len(long_ways) - before == WORLD

    short: list[dict[str, object]] = [
        {},
        {"op": pccl.ReduceOp.MAX},
        {"op": "mean"},
        {"timeout": 20.0},
        {"timeout": 20},
    ]
    for options in short:
        assert not long_way(options) and not long_ways
    descriptor = pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT, pccl.DistributionHint.NONE)
    for options in ({"operand_descriptor": descriptor}, {"op": 0}, {"op": "SUM"}):
        assert long_way(options)
    monkeypatch.setenv("PCCL_TIMEOUT", "30")
    assert long_way({})


def test_explicit_tells_what_is_wrong_as_the_general_way_does() -> None:
    send, recv = np.ones(3, np.float32), np.zeros(3, np.float32)
    with pccl.MasterNode("127.0.0.1:0") as master:
        comm = pccl.Communicator(master.address)
        with pytest.raises(pccl.InvalidUsage, match="all_reduce.*not connected"):
            comm.all_reduce(send, recv, op="sum")
        comm.connect()
        with pytest.raises(pccl.TooFewPeers) as alone:
            comm.all_reduce(send, recv, op="sum")
        assert alone.value.result is pccl.Result.TOO_FEW_PEERS
        for wrong in (
            {"op": "most"},
            {"op": pccl.DataType.FLOAT},
            {"op": "sum", "tag": -1},
            {"op": "sum", "timeout": -1.0},
            {"op": "sum", "timeout": float("nan")},
        ):
            with pytest.raises(pccl.InvalidArgument):
                comm.all_reduce(send, recv, **wrong)  # type: ignore[arg-type]
        for to in (np.zeros(4, np.float32), np.zeros(3, np.float64), "recv"):
            with pytest.raises(pccl.InvalidArgument):
                comm.all_reduce(send, to, op="sum")
        with pytest.raises(TypeError):
            comm.all_reduce(send, recv, "sum")  # type: ignore[call-arg, misc]
        comm.close()
        with pytest.raises(pccl.InvalidUsage, match="closed"):
            comm.all_reduce(send, recv, op="sum")


def explicitly(array: np.ndarray[Any, Any]) -> Callable[[pccl.Communicator], object]:
    return lambda comm: comm.all_reduce(array, np.empty_like(array), op="sum")


A, B = np.ones((3, 4), np.float32), np.ones((3, 5), np.float32)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (allreduce(A), allreduce(B)),
        (explicitly(A), explicitly(B)),
        (allreduce(A, quantize="int8"), allreduce(A, quantize="int4")),
        (allreduce({"a": A, "n": None}, quantize="int8"), allreduce({"a": A, "n": None})),
    ],
    ids=["shape", "explicit", "codes", "exact"],
)
def test_members_that_disagree_are_told_in_the_same_words(
    pair: Pair,
    general: Callable[[], None],
    first: Callable[..., object],
    second: Callable[..., object],
) -> None:
    plainly = both(pair, first, second)
    general()
    for error, expected in zip(plainly, both(pair, first, second), strict=True):
        assert type(error) is type(expected) is pccl.MismatchedCall
        words, others = (re.sub(r"#\d+", "#n", str(one)) for one in (error, expected))
        assert words == others and "float32[3,4]" in words
        assert error.peer == expected.peer and error.result == expected.result


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("PCCL_SHM", "0")  # on one host nothing is quantized
    with members(WORLD) as comms:
        yield comms


CODINGS = {
    "name": "int8",
    "float8": "float8",
    "block": pccl.Quantize("int4", block=128),
    "zero": pccl.Quantize("int4", algorithm="zero_point_scale"),
    "random": pccl.Quantize("int4", rounding="stochastic"),
}


@pytest.mark.parametrize("name", CODINGS)
def test_codes_are_the_same_on_both_ways(
    apart: Pair, ways: list[bool], general: Callable[[], None], name: str
) -> None:
    tree = {"a": np.random.default_rng(0).normal(size=5000).astype(np.float32), "n": None}
    views = {"a": tree["a"].view(Sub), "n": None}

    def call(tree: dict[str, Any]) -> Callable[[pccl.Communicator], Any]:
        return lambda comm: pccl.allreduce(tree, quantize=CODINGS[name], comm=comm)["a"]

    plainly = both(apart, call(tree), call(tree))
    mixed = both(apart, call(tree), call(views))
    assert ways[:2] == [True, True] and sorted(ways[2:]) == [False, True]
    general()
    generally = both(apart, call(tree), call(tree))
    for one, other in (plainly, mixed, generally):
        np.testing.assert_array_equal(one, other)  # type: ignore[arg-type]
        assert 1e-4 < np.abs(one - tree["a"] * WORLD).max() < 2  # type: ignore[operator]
    if name != "random":  # its numbers depend on the call
        np.testing.assert_array_equal(plainly, mixed)  # type: ignore[arg-type]
        np.testing.assert_array_equal(plainly, generally)  # type: ignore[arg-type]


def test_error_feedback_goes_the_general_way(pair: Pair, ways: list[bool]) -> None:
    feedback = pccl.Quantize("int8", error_feedback=True)
    array = np.linspace(0, 1, 300, dtype=np.float32)
    begun = both(pair, *[lambda comm: pccl.allreduce_async(array, quantize="int8", comm=comm)] * 2)
    for work in begun:
        work.wait()  # type: ignore[attr-defined]
    assert ways == [True, True]
    both(pair, *[allreduce(array, quantize=feedback)] * 2)
    assert ways[2:] == [False, False]


def test_a_call_that_nobody_meets_ends_at_its_deadline(
    pair: Pair, ways: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.ones(3)
    monkeypatch.setenv("PCCL_TIMEOUT", "0.3")
    for options in ({}, {"timeout": 0.2}):
        begin = time.monotonic()
        alone = both(
            pair,
            lambda comm, options=options: pccl.allreduce(array, comm=comm, **options),
            lambda comm: None,
        )
        assert isinstance(alone[0], pccl.Timeout) and "allreduce failed" in str(alone[0])
        assert time.monotonic() - begin < 5
        told = both(pair, lambda comm: None, allreduce(array))
        assert isinstance(told[1], pccl.Timeout)
    assert not any(ways)  # none came back
    monkeypatch.setenv("PCCL_TIMEOUT", "")
    assert _settings.seconds(None, "f") is None
    for result in both(pair, allreduce(array), allreduce(array)):
        np.testing.assert_array_equal(result, array * WORLD)  # type: ignore[arg-type]


def test_a_closed_or_forked_communicator_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        comm = pccl.Communicator(master.address)
        array = np.ones(3)
        with pytest.raises(pccl.InvalidUsage, match="not connected"):
            pccl.allreduce(array, comm=comm)
        comm.connect()
        np.testing.assert_array_equal(pccl.allreduce(array, comm=comm), array)
        with pytest.raises(pccl.TooFewPeers, match="all_reduce"):
            comm.all_reduce(array, array, op="sum")
        with monkeypatch.context() as forked:
            forked.setattr(process, "forks", process.forks + 1)
            with pytest.raises(pccl.InvalidUsage, match="forked"):
                pccl.allreduce(array, comm=comm)
        comm.close()
        with pytest.raises(pccl.InvalidUsage, match="closed"):
            pccl.allreduce(array, comm=comm)
