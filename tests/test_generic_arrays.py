"""Arrays of libraries that pccl has never heard of: by DLPack, or by the buffer protocol."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from members import each

import pccl
from pccl import _arrays


class Shown:
    """The minimum of DLPack 1.0: around NumPy's memory, without a namespace."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __dlpack__(self, **how: Any) -> Any:
        return self.values.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


class Before1(Shown):
    """DLPack before 1.0: no arguments, and no way to say whether the memory may be written."""

    def __dlpack__(self) -> Any:  # type: ignore[override]
        return self.values.__dlpack__()


class Own(Shown):
    """Takes others' memory over, as Array-API libraries do."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda given: Own(np.from_dlpack(given)))


class Converts(Shown):
    """Has `asarray`, and a `from_dlpack` that does not take everything."""

    def __array_namespace__(self) -> Any:
        def from_dlpack(given: Any) -> Any:
            raise BufferError("not that one")

        return SimpleNamespace(from_dlpack=from_dlpack, asarray=Converts)


class Copies(Shown):
    """Shows a copy when it must, and says so."""

    def __dlpack__(self, *, copy: bool | None = None, **how: Any) -> Any:
        if copy is False:
            raise BufferError("only a copy")
        return self.values.copy().__dlpack__(**how)


class Elsewhere(Shown):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # CUDA


class Copied(Elsewhere):
    """On a device that the CPU cannot see: NumPy gets a copy, as of TensorFlow's tensors there."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values.copy()


class Unified(array):  # type: ignore[type-arg]
    """As MLX's arrays on Metal: the CPU sees the device's memory, by the buffer protocol only.

    They do not change, may share memory, and have float32 where they were not told float64.
    """

    def __dlpack__(self, **how: Any) -> Any:
        raise BufferError("not on the CPU")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 8, 0  # Metal

    @property
    def dtype(self) -> str:
        return self.typecode

    def __array_namespace__(self) -> Any:
        def asarray(given: Any, dtype: str = "") -> Unified:
            kind = dtype or np.asarray(given).dtype.char.replace("d", "f")
            return Unified(kind, np.asarray(given).ravel().tolist())

        return SimpleNamespace(asarray=asarray)


class Unnumbered(Shown):
    """Names its device's type alone."""

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()[0]


class Silent(Shown):
    def __dlpack__(self, **how: Any) -> Any:
        raise BufferError("still computing")


class Stubborn(Elsewhere):
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("no implicit copies")


def c_floats(values: Any) -> Any:
    return (ctypes.c_float * len(values))(*values)


def looked_into(made: Any) -> np.ndarray:
    return made.values if isinstance(made, Shown) else np.asarray(made)


MAKERS: dict[str, tuple[Callable[[Any], Any], type]] = {
    "DLPack": (Shown, np.ndarray),
    "DLPack before 1.0": (Before1, np.ndarray),
    "namespace": (Own, Own),
    "asarray": (Converts, Converts),
    "device without its number": (Unnumbered, np.ndarray),
    "unified f": (lambda values: Unified("f", values), Unified),
    "unified d": (lambda values: Unified("d", values), Unified),
    "array.array f": (lambda values: array("f", values), array),
    "array.array q": (lambda values: array("q", map(int, values)), array),
    "bytearray": (lambda values: bytearray(map(int, values)), bytearray),
    "memoryview": (lambda values: memoryview(np.array(values)), memoryview),
    "ctypes": (c_floats, np.ndarray),
}


@pytest.mark.parametrize("name", MAKERS)
def test_inputs_are_read_where_they_are(name: str) -> None:
    made = MAKERS[name][0]([1.0, 2.0, 3.0])
    ((seen, _),) = _arrays.read(made, "f", "tree").buffers
    assert np.shares_memory(seen, looked_into(made))


@pytest.mark.parametrize("name", MAKERS)
def test_results_come_back_as_their_own_kind_where_they_can(
    pair: list[pccl.Communicator], name: str
) -> None:
    make, kind = MAKERS[name]

    def call(rank: int, comm: pccl.Communicator) -> Any:
        mine = make([rank + 1, rank + 2, rank + 3])
        total = pccl.allreduce({"x": mine}, comm=comm)["x"]
        return looked_into(mine).tolist(), total

    told = each(pair, call)
    for rank, (mine, total) in enumerate(told):
        assert mine == [rank + 1, rank + 2, rank + 3]
        assert type(total) is kind
        assert looked_into(total).tolist() == [3, 5, 7]
        assert looked_into(total).dtype == looked_into(make([0])).dtype
        if isinstance(total, array):
            assert total.typecode == make([0]).typecode
        if isinstance(total, array | bytearray):
            total.append(1)  # nobody holds on to it


@pytest.mark.parametrize(
    ("call", "want"),
    [
        (pccl.broadcast, [1, 2, 3, 4]),
        (pccl.allgather, [1, 2, 3, 4, 11, 12, 13, 14]),
        (
            lambda mine, comm: pccl.allgather_async(mine, comm=comm).wait(),
            [1, 2, 3, 4, 11, 12, 13, 14],
        ),
        (pccl.reduce_scatter, [12, 14]),
        (pccl.alltoall, [1, 2, 11, 12]),
    ],
    ids=["broadcast", "allgather", "allgather_async", "reduce_scatter", "alltoall"],
)
@pytest.mark.parametrize("name", MAKERS)
def test_all_collectives_keep_their_kind(
    pair: list[pccl.Communicator], name: str, call: Any, want: list[int]
) -> None:
    make, kind = MAKERS[name]
    told = each(pair, lambda rank, comm: call(make(np.arange(1.0, 5) + 10 * rank), comm=comm))
    assert type(told[0]) is type(told[1]) is kind
    assert looked_into(told[0]).dtype == looked_into(make([0.0])).dtype
    # array.array and bytearray have one axis.
    assert looked_into(told[0]).ravel().tolist() == want


READ_ONLY = {"DLPack before 1.0", "unified f", "unified d"}


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in READ_ONLY])
def test_outputs_are_written_where_they_are(pair: list[pccl.Communicator], name: str) -> None:
    make, _ = MAKERS[name]

    def call(rank: int, comm: pccl.Communicator) -> Any:
        mine, out = make([rank + 1, rank + 2, rank + 3]), make([0, 0, 0])
        assert pccl.allreduce(mine, out=out, comm=comm) is out
        assert pccl.allreduce(mine, "max", out=mine, comm=comm) is mine
        return looked_into(out).tolist(), looked_into(mine).tolist()

    assert each(pair, call) == [([3, 5, 7], [2, 3, 4])] * 2

    def collect(rank: int, comm: pccl.Communicator) -> Any:
        mine, out = make([rank + 1, rank + 2]), make([0, 0])
        assert pccl.broadcast(mine, root=1, out=out, comm=comm) is out
        told = looked_into(out).tolist()
        assert pccl.alltoall(mine, out=out, comm=comm) is out
        assert pccl.reduce_scatter(make([1, 2, 3, 4]), out=mine, comm=comm) is mine
        return told, looked_into(out).tolist(), looked_into(mine).tolist()

    assert each(pair, collect) == [([2, 3], [1, 2], [2, 4]), ([2, 3], [2, 3], [6, 8])]


def test_an_output_may_have_strides(pair: list[pccl.Communicator]) -> None:
    def call(rank: int, comm: pccl.Communicator) -> Any:
        out = np.zeros((3, 2)).T
        pccl.allgather(np.arange(3.0) + rank, out=memoryview(out), comm=comm)
        return out.tolist()

    assert each(pair, call) == [[[0, 1, 2], [1, 2, 3]]] * 2


def frozen(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    "make",
    [
        lambda: memoryview(bytes(3)),
        lambda: Shown(frozen(np.zeros(3, np.uint8))),
        lambda: Copies(np.zeros(3, np.uint8)),
        lambda: Copied(np.zeros(3, np.uint8)),
        lambda: Unified("B", [0, 0, 0]),
    ],
    ids=["memoryview", "DLPack", "copies", "on a device", "unified"],
)
def test_what_must_not_be_written_is_read_and_not_written(
    pair: list[pccl.Communicator], make: Callable[[], Any]
) -> None:
    totals = each(pair, lambda rank, comm: looked_into(pccl.allreduce(make(), comm=comm)).tolist())
    assert totals == [[0, 0, 0]] * 2
    target = make()
    with pytest.raises(pccl.InvalidArgument, match=r"^allreduce failed.*out\['x'\]: "):
        pccl.allreduce({"x": np.ones(3, np.uint8)}, out={"x": target}, comm=pair[0])
    with pytest.raises(pccl.InvalidArgument, match=r"out\['x'\]: the array is read-only"):
        pccl.broadcast({"x": np.ones(3, np.uint8)}, out={"x": target}, comm=pair[0])
    assert looked_into(target).tolist() == [0, 0, 0]


def test_dlpack_before_1_cannot_say_that_it_may_be_written_and_so_is_not(
    pair: list[pccl.Communicator],
) -> None:
    with pytest.raises(pccl.InvalidArgument, match="out: the array is read-only"):
        pccl.allreduce(np.ones(3), out=Before1(np.zeros(3)), comm=pair[0])


@pytest.mark.parametrize(
    ("leaf", "error", "words"),
    [
        (b"123", pccl.InvalidArgument, "a bytes is neither"),
        (Elsewhere([1.0]), pccl.NotSupported, "device type 2 of DLPack; copy it to the CPU first"),
        (Stubborn([1.0]), pccl.NotSupported, r"CPU first \(no implicit copies\)"),
        (Silent([1.0]), pccl.InvalidArgument, "still computing"),
        (array("u", "abc"), (pccl.InvalidArgument, pccl.NotSupported), r"\[0\]"),
        (memoryview(np.ones(3, bool)), pccl.InvalidArgument, "bool"),
        (memoryview(np.ones(3, "M8[s]").view("S8")), pccl.InvalidArgument, "dtype bytes64"),
        ((ctypes.c_float.__ctype_be__ * 2)(), pccl.NotSupported, "byte order"),
        (Shown, pccl.InvalidArgument, "neither"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_reduced_is_refused_by_path(
    pair: list[pccl.Communicator], leaf: object, error: Any, words: str
) -> None:
    with pytest.raises(error, match=r"tree\[0\]: .*") as caught:
        pccl.allreduce([leaf], comm=pair[0])
    assert re.search(words, str(caught.value))


def test_elements_that_numpy_does_not_know_are_refused(pair: list[pccl.Communicator]) -> None:
    torch = pytest.importorskip("torch")

    class Shows:
        def __dlpack__(self, **how: Any) -> Any:
            return torch.ones(3, dtype=torch.bfloat16).__dlpack__(**how)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    with pytest.raises(pccl.NotSupported, match="NumPy cannot look into it"):
        pccl.allreduce([Shows()], comm=pair[0])


def test_a_released_memoryview_is_refused(pair: list[pccl.Communicator]) -> None:
    view = memoryview(bytearray(3))
    view.release()
    with pytest.raises(pccl.InvalidArgument, match="released"):
        pccl.allreduce([view], comm=pair[0])


@pytest.mark.parametrize(
    "values",
    [
        np.arange(12.0)[::3],
        np.arange(12.0).reshape(3, 4).T,
        np.arange(5.0)[::-1],
        np.ones((0, 3)),
        np.float32(2),
    ],
    ids=lambda values: f"{np.shape(values)}",
)
def test_any_layout_is_reduced(pair: list[pccl.Communicator], values: Any) -> None:
    for total in each(pair, lambda rank, comm: pccl.allreduce(Own(values), comm=comm)):
        assert isinstance(total, Own)
        np.testing.assert_array_equal(total.values, values * 2)


def test_members_may_use_different_kinds(pair: list[pccl.Communicator]) -> None:
    kinds: list[Callable[[Any], Any]] = [Own, lambda values: array("d", values)]
    totals = each(pair, lambda rank, comm: pccl.allreduce([kinds[rank]([1.0, 2.0])], comm=comm)[0])
    assert [type(total) for total in totals] == [Own, array]
    assert [looked_into(total).tolist() for total in totals] == [[2.0, 4.0]] * 2


def test_an_array_that_is_a_dataclass_is_an_array(pair: list[pccl.Communicator]) -> None:
    @dataclasses.dataclass
    class Tensor:
        values: np.ndarray

        def __dlpack__(self, **how: Any) -> Any:
            return self.values.__dlpack__(**how)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    for total in each(pair, lambda rank, comm: pccl.allreduce(Tensor(np.ones(3)), comm=comm)):
        assert isinstance(total, np.ndarray) and total.tolist() == [2, 2, 2]


def test_they_are_shared_state(pair: list[pccl.Communicator]) -> None:
    def call(rank: int, comm: pccl.Communicator) -> Any:
        state = {
            "floats": array("d", [rank + 1.5, 2]),
            "bytes": bytearray([rank, rank]),
            "own": Own(np.full(3, rank)),
            "fixed": Own(frozen(np.full(3, rank))),
            "unified": Unified("d", [rank]),
            "flags": memoryview(np.array([rank == 0, True])),
        }
        synced = pccl.sync(state, comm=comm)
        in_place = [synced[name] is state[name] for name in state]
        kinds = {name: type(value).__name__ for name, value in synced.items()}
        return (
            in_place,
            kinds,
            {name: looked_into(value).tolist() for name, value in synced.items()},
        )

    first, second = each(pair, call)
    assert first[1:] == second[1:]
    assert first[1]["fixed"] == "Own" and first[1]["floats"] == "array"
    assert first[1]["unified"] == "Unified"
    origin = first[2]["bytes"][0]  # whose state counted
    assert first[2]["floats"] == [origin + 1.5, 2] and first[2]["own"] == [origin] * 3
    assert first[2]["flags"] == [origin == 0, True]
    received = (first, second)[1 - origin]
    assert received[0] == [True, True, True, False, False, True]


def test_explicit_takes_them(pair: list[pccl.Communicator]) -> None:
    def call(rank: int, comm: pccl.Communicator) -> Any:
        recv = array("f", [0, 0])
        comm.all_reduce(Shown(np.full(2, rank + 1, np.float32)), recv, op=pccl.ReduceOp.SUM)
        return recv.tolist()

    assert each(pair, call) == [[3.0, 3.0]] * 2


def test_array_api_strict_keeps_to_the_standard_and_gets_its_kind_back(
    pair: list[pccl.Communicator],
) -> None:
    xp = pytest.importorskip("array_api_strict")

    def call(rank: int, comm: pccl.Communicator) -> Any:
        mine = xp.reshape(xp.arange(6, dtype=xp.float32) * (rank + 1), (2, 3))
        total = pccl.allreduce(mine, comm=comm)
        assert type(total) is type(mine) and total.dtype == xp.float32
        assert pccl.allreduce(mine, "avg", out=mine, comm=comm) is mine
        return np.asarray(total).tolist(), np.asarray(mine).tolist()

    wanted = np.arange(6.0).reshape(2, 3)
    assert each(pair, call) == [((wanted * 3).tolist(), (wanted * 1.5).tolist())] * 2


def test_a_shared_memory_is_not_written_by_a_sync(pair: list[pccl.Communicator]) -> None:
    mine = [Unified("f", [rank]) for rank in range(2)]
    for made in each(pair, lambda rank, comm: pccl.sync([mine[rank]], comm=comm)):
        assert isinstance(made[0], Unified) and made[0].tolist() == [0]
    assert [one.tolist() for one in mine] == [[0], [1]]


@pytest.fixture(scope="module")
def real() -> Callable[[str], Any]:
    """Finds a package that the tests do not install, and that CI may lack."""

    def find(name: str) -> Any:
        return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)

    return find


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int64", "uint8"])
def test_mlx_arrays_are_reduced_and_come_back(
    pair: list[pccl.Communicator], real: Callable[[str], Any], dtype: str
) -> None:
    mx = real("mlx.core")

    def call(rank: int, comm: pccl.Communicator) -> Any:
        mine = mx.array(np.arange(6).reshape(2, 3), dtype=getattr(mx, dtype)) * (rank + 1)
        work = pccl.allreduce_async({"x": mine}, comm=comm)
        made = [
            pccl.allreduce([mine.T], comm=comm)[0].T,
            work.wait()["x"],
            pccl.broadcast({"x": mine}, root=1, comm=comm)["x"],
            pccl.allgather(mine, comm=comm)[1],
            pccl.reduce_scatter(mine, comm=comm),
            pccl.sync({"x": mine, "step": rank}, comm=comm)["x"],
            mine,
        ]
        assert all(type(one) is mx.array and one.dtype == mine.dtype for one in made)
        return [np.asarray(one).tolist() for one in made]

    x = np.arange(6).reshape(2, 3)
    for rank, told in enumerate(each(pair, call)):
        total = 3 * x
        synced = x * told[5][0][1]  # whose state counted
        want = [total, total, 2 * x, 2 * x, total[rank : rank + 1], synced, x * (rank + 1)]
        assert told == [one.tolist() for one in want]


def test_mlx_arrays_are_not_written_and_some_are_refused(
    pair: list[pccl.Communicator], real: Callable[[str], Any]
) -> None:
    mx = real("mlx.core")
    target = mx.zeros(3)
    mx.eval(target)
    alike = target.reshape(3)  # shares its memory
    for call in (pccl.allreduce, pccl.broadcast):
        with pytest.raises(pccl.InvalidArgument, match="out: the array is read-only"):
            call(np.ones(3, np.float32), out=target, comm=pair[0])
    assert alike.tolist() == [0, 0, 0]
    with pytest.raises(pccl.NotSupported, match=r"tree\['b'\]: NumPy cannot look into it"):
        pccl.allreduce({"b": mx.ones(3, dtype=mx.bfloat16)}, comm=pair[0])
    with pytest.raises(pccl.InvalidArgument, match=r"dtype bool is combined with"):
        pccl.allreduce(mx.array([True]), comm=pair[0])


def test_tensorflow_tensors_are_reduced_to_numpy_arrays(
    pair: list[pccl.Communicator], real: Callable[[str], Any]
) -> None:
    tf = real("tensorflow")

    def call(rank: int, comm: pccl.Communicator) -> Any:
        mine = tf.reshape(tf.range(6, dtype=tf.float32), (2, 3)) * (rank + 1)
        work = pccl.allreduce_async({"x": mine}, comm=comm)
        half = tf.constant([1.5, 2], tf.bfloat16) * (rank + 1)
        made = [
            pccl.allreduce([mine], comm=comm)[0],
            work.wait()["x"],
            pccl.broadcast(mine, root=1, comm=comm),
            pccl.allgather(mine, comm=comm)[1],
            pccl.sync({"x": mine}, comm=comm)["x"],
            pccl.allreduce(half, comm=comm),
        ]
        assert all(type(one) is np.ndarray for one in (*made[:4], made[5])), made
        return [np.asarray(one).astype(np.float32).tolist() for one in made]

    x = np.arange(6.0).reshape(2, 3)
    for told in each(pair, call):
        synced = x * told[4][0][1]
        want = [3 * x, 3 * x, 2 * x, 2 * x, synced, np.array([4.5, 6])]
        assert told == [one.tolist() for one in want]
    with pytest.raises(pccl.InvalidArgument, match="out: the array is read-only"):
        pccl.allreduce(np.ones(3), out=tf.zeros(3, tf.float64), comm=pair[0])
    with pytest.raises(pccl.InvalidArgument, match=r"pass numpy\.asarray of it"):
        pccl.allreduce(tf.Variable([1.0]), comm=pair[0])


class Variable:
    """Becomes an array only by a copy, as TensorFlow's variables do."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.ones(3)


def test_what_becomes_an_array_by_a_copy_is_told_how(pair: list[pccl.Communicator]) -> None:
    calls = (pccl.allreduce, pccl.broadcast, pccl.allgather, pccl.reduce_scatter, pccl.alltoall)
    for call in (*calls, pccl.sync):
        with pytest.raises(pccl.InvalidArgument, match=r"pass numpy\.asarray of it"):
            call({"w": Variable()}, comm=pair[0])
