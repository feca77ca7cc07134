"""How trees are flattened, the structure that members compare, and how arrays reach the engine."""

import dataclasses
import importlib.util
import subprocess
import sys
import time
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import frameworks
from workers import command

import pccl
from pccl import _arrays, tree
from pccl.reduce.staging import Staging

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Layer:
    weight: object
    bias: object = None


@dataclasses.dataclass
class Counted:
    value: object
    calls: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.calls += 1


def flatten(value):
    return tree.flatten(value, "allreduce")


trees = st.recursive(
    st.integers() | st.floats(allow_nan=False) | st.none(),
    lambda children: (
        st.lists(children, max_size=4)
        | st.tuples(children, children)
        | st.dictionaries(st.text(max_size=3), children, max_size=4)
        | st.dictionaries(st.integers(), children, max_size=4)
        | st.builds(Point, children, children)
        | st.builds(Layer, children, children)
    ),
    max_leaves=12,
)


@given(trees)
def test_unflatten_undoes_flatten(value):
    flat = flatten(value)
    assert flat.unflatten(flat.leaves) == value
    assert len(set(flat.paths)) == len(flat.paths)


def test_dict_keys_are_sorted_and_their_order_of_insertion_is_kept():
    flat = flatten({"b": 1, "a": 2})
    assert flat.leaves == [2, 1]
    assert flat.paths == ["['a']", "['b']"]
    assert list(flat.unflatten([2, 1])) == ["b", "a"]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_dicts_of_any_kind_flatten_alike(kind):
    assert flatten(kind([(10, "x"), (9, "y")])).leaves == ["y", "x"]


def test_a_defaultdict_keeps_its_factory():
    value = defaultdict(list, a=1)
    again = flatten(value).unflatten([2])
    assert again == {"a": 2}
    assert again["new"] == []
    assert value == {"a": 1}


@pytest.mark.parametrize("keys", [("a", 1), (1.5, 2.5), (True, False), (("a",),), (None,)])
def test_other_keys_are_refused_by_path(keys):
    with pytest.raises(pccl.InvalidArgument, match=r"tree\['deep'\]\[0\] has keys of type"):
        flatten({"deep": [dict.fromkeys(keys, 1)]})


def test_string_and_int_keys_are_told_apart():
    assert flatten({"1": 0}).paths != flatten({1: 0}).paths


def test_named_tuples_and_dataclasses_flatten_by_field():
    flat = flatten(Point(1, Layer(weight=2, bias=3)))
    assert flat.paths == [".x", ".y.weight", ".y.bias"]
    assert flat.unflatten([4, 5, 6]) == Point(4, Layer(weight=5, bias=6))


def test_a_dataclass_is_rebuilt_without_running_its_constructor():
    again = flatten(Counted(1)).unflatten([2, 7])
    assert (again.value, again.calls) == (2, 7)


def test_none_is_no_leaf():
    flat = flatten([None, 1, {"a": None}])
    assert flat.leaves == [1]
    assert flat.unflatten([2]) == [None, 2, {"a": None}]


def test_a_tree_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(pccl.InvalidArgument, match="contains itself"):
        flatten(value)


def signature(value):
    flat = flatten(value)
    buffers = [_arrays.read(leaf, "f", "tree").buffers for leaf in flat.leaves]
    entries = tree.entries_of(flat.paths, buffers)
    return tree.structure(entries), tree.describe(entries)


def test_the_structure_tells_paths_dtypes_and_shapes_apart():
    values = [
        np.zeros((2, 3), "f4"),
        np.zeros((3, 2), "f4"),
        np.zeros((2, 3), "f8"),
        [np.zeros((2, 3), "f4")],
        {"a": np.zeros((2, 3), "f4")},
        {"b": np.zeros((2, 3), "f4")},
        0,
        0.0,
    ]
    assert len({signature(value)[0] for value in values}) == len(values)


def test_the_structure_is_the_same_for_all_frameworks():
    torch = pytest.importorskip("torch")
    ours = {"w": np.zeros((2, 3), "f4"), "n": np.int64(3)}
    theirs = {"n": 3, "w": torch.zeros(3, 2).T}
    assert signature(ours) == signature(theirs)


def test_a_description_is_short_however_many_arrays_there_are():
    assert signature({"w": np.zeros((2, 3), "f4")})[1] == "['w'] float32[2,3]"
    assert signature([])[1] == "no arrays"
    assert signature([0] * 1000)[1].endswith("997 more arrays, 1000 elements in all")


def run_with_jax(program, folder):
    """In a process of its own: the other tests run without jax."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    subprocess.run(command(program), check=True, cwd=folder)


def test_a_node_registered_with_jax_uses_jaxs_rule_when_jax_is_loaded(tmp_path):
    run_with_jax(frameworks.flatten_nodes_of_jax, tmp_path)


def test_ordered_dicts_flatten_alike_with_and_without_jax(tmp_path):
    run_with_jax(frameworks.flatten_an_ordered_dict_with_jax, tmp_path)


# Arrays on their way to the engine.


def reduce_twice(inputs, outputs=None):
    """Does with a staging what an engine with two equal members does: doubles everything."""
    staging = Staging(
        [_arrays.read(array, "f", "tree").buffers[0] for array in inputs],
        None
        if outputs is None
        else [_arrays.write(array, "f", "out").buffers[0].array for array in outputs],
    )
    sizes = set()
    for send, recv, code in staging.arrays:
        assert send.dtype == recv.dtype == np.uint8
        assert send.flags.c_contiguous
        assert recv.flags.c_contiguous
        assert send.size == recv.size
        sizes.add(send.size)
        dtype = pccl.DataType(code).to_numpy_dtype()
        recv.view(dtype)[...] = 2 * send.view(dtype)
    staging.finish()
    return staging


ARRAYS = [
    np.arange(12.0).reshape(3, 4),
    np.arange(12.0).reshape(3, 4).T,
    np.arange(12, dtype=np.int16)[::-2],
    np.array(3.0, np.float32),
    np.empty((0, 5), np.uint8),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.broadcast_to(np.float32(2), (3, 2)),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}{a.strides}")
def test_arrays_of_any_layout_come_back_whole(array):
    before = array.copy()
    (result,) = reduce_twice([array]).results
    assert result.shape == array.shape
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result, 2 * before)
    np.testing.assert_array_equal(array, before)


def test_contiguous_arrays_are_not_copied():
    send, recv = np.ones(1000), np.ones(1000)
    send.flags.writeable = False
    ((flat_send, flat_recv, _),) = reduce_twice([send], [recv]).arrays
    assert np.shares_memory(flat_send, send)
    assert np.shares_memory(flat_recv, recv)


def test_the_same_memory_is_reduced_in_place():
    array = np.arange(5.0)
    ((send, recv, _),) = reduce_twice([array], [array]).arrays
    assert send.ctypes.data == recv.ctypes.data == array.ctypes.data
    np.testing.assert_array_equal(array, 2 * np.arange(5.0))


def test_an_output_that_overlaps_its_input_in_part_gets_the_right_values():
    memory = np.arange(10.0)
    reduce_twice([memory[:8]], [memory[2:]])
    np.testing.assert_array_equal(memory[2:], 2 * np.arange(8.0))


@pytest.mark.parametrize(
    ("first", "count", "how"),
    [(2, 8, {}), (0, 10, {"in_place": False}), (3, 2, {}), (0, 4, {"gathers": True})],
)
def test_an_input_is_not_written_before_the_end(first, count, how):
    memory = np.arange(10.0)
    given = memory[: count if how else 8]
    out = memory if "gathers" in how else memory[first : first + count]
    staging = Staging([_arrays.read(given, "f", "tree").buffers[0]], [out], **how)
    ((send, recv, _),) = staging.arrays
    assert not np.shares_memory(send, recv)
    # An all-gather writes an input's own elements, to where they are.
    assert np.shares_memory(recv, memory) == ("gathers" in how)
    recv.view(np.float64)[...] = 1
    staging.finish()
    assert (out == 1).all()


def test_outputs_that_are_other_leaves_inputs_get_the_right_values():
    a, b = np.arange(4.0), np.arange(4.0) + 10
    reduce_twice([a, b], [b, a])
    np.testing.assert_array_equal(b, 2 * np.arange(4.0))
    np.testing.assert_array_equal(a, 2 * (np.arange(4.0) + 10))


def test_one_array_at_two_places_is_reduced_once_in_place():
    shared = np.arange(4.0)
    reduce_twice([shared, shared], [shared, shared])
    np.testing.assert_array_equal(shared, 2 * np.arange(4.0))


def test_outputs_that_are_not_contiguous_are_filled_at_the_end():
    memory = np.zeros((4, 4))
    reduce_twice([np.ones((4, 2))], [memory[:, ::2]])
    np.testing.assert_array_equal(memory[:, ::2], 2)
    np.testing.assert_array_equal(memory[:, 1::2], 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 6)),
        min_size=1,
        max_size=5,
    )
)
def test_overlaps_of_every_kind_never_mix_values(places):
    memory = np.arange(26.0)
    before = memory.copy()
    inputs = [memory[at : at + size] for at, _, size in places]
    staging = reduce_twice(inputs, [memory[to : to + size] for _, to, size in places])
    for (at, _, size), result in zip(places, staging.results, strict=True):
        # Outputs that overlap each other end with one's values or the other's: nothing to compare.
        if not np.shares_memory(result, memory) or len(places) == 1:
            np.testing.assert_array_equal(result, 2 * before[at : at + size])


def test_bfloat16_travels_without_ml_dtypes_being_ours():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(4, dtype=ml_dtypes.bfloat16)
    staging = reduce_twice([array])
    assert staging.arrays[0][2] == pccl.DataType.BFLOAT16
    assert staging.results[0].dtype == array.dtype


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (True, "a bool is neither"),
        (1j, "a complex is neither"),
        ("text", "a str is neither"),
        (object(), "a object is neither"),
        (2**63, "64 bits"),
        (np.zeros(2, "M8[s]"), "datetime64"),
        (np.ma.masked_array([1.0], [True]), "masked"),
    ],
)
def test_other_leaves_are_refused_by_path(leaf, message):
    with pytest.raises(pccl.InvalidArgument, match=message) as caught:
        _arrays.read(leaf, "allreduce", "tree['a'][3]")
    assert "tree['a'][3]" in caught.value.reason
    assert caught.value.func_name == "allreduce"


@pytest.mark.parametrize(
    ("leaf", "op", "message"),
    [
        (np.zeros(2, bool), "sum", 'bool is combined with "max" or "min", not with "sum"'),
        (np.bool_(True), "avg", 'not with "avg"'),
        (np.zeros(2, "c8"), "max", 'complex64 is combined with "sum" or "avg", not with "max"'),
        (np.complex128(1), "prod", "complex128"),
    ],
)
def test_leaves_that_cannot_be_combined_so_are_refused_by_path(leaf, op, message):
    with pytest.raises(pccl.InvalidArgument, match=message) as caught:
        _arrays.read(leaf, "allreduce", "tree['a']", op=pccl.ReduceOp.parse(op, ""))
    assert "tree['a']" in caught.value.reason


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.broadcast_to(1.0, 3), "read-only"),
        (np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)), "share memory"),
        (np.lib.stride_tricks.as_strided(np.zeros(4), (3, 2), (8, 8)), "share memory"),
        (1.0, "cannot be written"),
        (np.float32(1), "cannot be written"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused(leaf, message):
    with pytest.raises(pccl.InvalidArgument, match=message):
        _arrays.write(leaf, "allreduce", "out")


def test_subclasses_of_containers_come_back_as_what_they_were() -> None:
    import collections

    class Odd(list[int]):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    odd = Odd("w")
    odd += [1, 2]
    for node in (collections.Counter("aab"), collections.OrderedDict(b=1, a=2), odd, (1, 2), [3]):
        flat = tree.flatten(node, "f")
        back = flat.unflatten([leaf * 10 for leaf in flat.leaves])
        assert type(back) is type(node)
        if isinstance(node, dict):
            assert back == {key: value * 10 for key, value in node.items()}
        else:
            assert list(back) == [value * 10 for value in node]
    assert tree.flatten(odd, "f").unflatten([5, 6]).name == "w"


def test_tuples_of_c_come_back_as_their_type_or_as_tuples() -> None:
    torch = pytest.importorskip("torch")
    largest = torch.max(torch.arange(6.0).reshape(2, 3), 0)
    for node, leaves, kind in (
        (largest, list(largest), type(largest)),
        (time.localtime(0), list(range(9)), time.struct_time),
        (torch.Size([2, 3]), [4, 6], torch.Size),
        (torch.Size([2, 3]), [2.0, 3.0], tuple),
        (sys.version_info, list("abcde"), tuple),
    ):
        flat = tree.flatten({"n": node}, "f")
        assert len(flat.leaves) == len(leaves)
        back = flat.unflatten(leaves)["n"]
        assert type(back) is kind and list(back) == leaves
    zone = tree.flatten(time.localtime(0), "f").unflatten(range(9)).tm_zone
    assert zone == time.localtime(0).tm_zone
