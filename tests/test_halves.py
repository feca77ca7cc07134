"""Broadcast, all-gather and reduce-scatter, in both APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from groups import KINDS, SIZES, Comm, dtype, each, own
from members import in_threads

import pccl


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_is_what_the_root_has(group: list[Comm], kind: str, count: int) -> None:
    for root in range(len(group)):
        wanted = own(root, count, kind)
        for how in ("new", "out", "in place"):

            def call(comm: Comm, rank: int, root: int = root, how: str = how) -> Any:
                mine = own(rank, count, kind)
                out = {"new": None, "out": np.zeros(count, dtype(kind)), "in place": mine}[how]
                result = pccl.broadcast(mine, root, out=out, comm=comm)
                assert out is None or result is out
                if how != "in place":
                    assert (mine == own(rank, count, kind)).all()
                return result

            for result in each(group, call):
                assert result.dtype == wanted.dtype and result.shape == wanted.shape
                assert result.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_allgather_stacks_in_rank_order(group: list[Comm], kind: str, count: int) -> None:
    wanted = np.stack([own(rank, count, kind) for rank in range(len(group))])

    def call(comm: Comm, rank: int) -> Any:
        return pccl.allgather(own(rank, count, kind), comm=comm)

    def into(comm: Comm, rank: int) -> Any:
        out = np.zeros((len(group), count), dtype(kind))
        out[rank] = own(rank, count, kind)
        assert pccl.allgather(out[rank], out=out, comm=comm) is out  # in place
        return out

    for result in each(group, call) + each(group, into):
        assert result.dtype == wanted.dtype
        assert result.tobytes() == wanted.tobytes()


def test_allgather_says_whose_rows_there_are(group: list[Comm]) -> None:
    ids = [comm._engine.peer_id() for comm in group]  # type: ignore[union-attr]
    for made, info in each(group, lambda c, r: pccl.allgather(r, comm=c, return_info=True)):
        assert made.tolist() == list(range(len(group)))
        assert list(info.contributors) == ids and info.local_world_size == len(group)


def test_allgathers_proceed_while_python_computes(group: list[Comm]) -> None:
    world = len(group)

    def call(comm: Comm, rank: int) -> None:
        out = np.zeros((world, 70_000))
        inputs = [{"x": own(rank, 1000 * k), "n": rank + k} for k in range(5)]
        works = [pccl.allgather_async(tree, comm=comm) for tree in inputs]
        into = pccl.allgather_async(np.full(70_000, float(rank)), out=out, tag=7, comm=comm)
        for k, work in reversed(list(enumerate(works))):
            made = work.wait()
            assert made is work.wait() and work.done()
            assert (made["x"] == [own(r, 1000 * k) for r in range(world)]).all()
            assert made["n"].tolist() == [r + k for r in range(world)]
            assert work.info.local_world_size == world
        assert into.wait() is out and (out == np.arange(world)[:, None]).all()

    each(group, call)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("kind", ["f4", "i8", "bfloat16"])
def test_reduce_scatter_is_a_part_of_the_all_reduce(
    group: list[Comm], kind: str, count: int, op: str
) -> None:
    world = len(group)

    def call(comm: Comm, rank: int) -> Any:
        mine = (own(rank, world * count, "i4") % 3).astype(dtype(kind)).reshape(world, count)
        before = mine.copy()
        whole = pccl.allreduce(mine, op, comm=comm)
        part = pccl.reduce_scatter(mine, op, comm=comm)
        out = np.empty((1, count), dtype(kind))
        assert pccl.reduce_scatter(mine, op, out=out, comm=comm) is out
        in_place = mine.copy()
        pccl.reduce_scatter(in_place, op, out=in_place[rank : rank + 1], comm=comm)
        assert (mine == before).all()
        for made in (part, out, in_place[rank : rank + 1]):
            assert made.shape == (1, count) and made.dtype == mine.dtype
            np.testing.assert_array_equal(made, whole[rank : rank + 1])
        return True

    assert all(each(group, call))


@pytest.mark.parametrize("rows", [1, 40_000])
def test_bytes_are_counted(group: list[Comm], rows: int) -> None:
    n, size = len(group), rows * 8

    def call(comm: Comm, rank: int) -> Any:
        x, moved = np.zeros(rows), []
        if n == 1:  # the explicit API refuses to be alone
            return [pccl.allgather(x, comm=comm, return_info=True)[1].bytes]
        array = x.copy()
        for info in (
            comm.all_gather(x, np.zeros(n * rows)),
            comm.reduce_scatter(np.zeros(n * rows), x, op="sum"),
            comm.broadcast(array, root=0),
        ):
            moved.append((info.tx_bytes, info.rx_bytes))
        return moved

    told = each(group, call)
    if n == 1:
        assert told == [[size]]
        return
    others = (n - 1) * size
    for moved in told:
        assert moved[:2] == [(others, others)] * 2
    # Over the network, members may pass a broadcast on.
    sent, received = ([info[i] for *_, info in told] for i in range(2))
    assert received == [0] + [size] * (n - 1) and sum(sent) == others


def test_trees_keep_their_kinds(group: list[Comm]) -> None:
    world = len(group)

    def tree(rank: int) -> Any:
        return {"a": np.full((2, 3), rank), "b": [np.float32(rank), rank, rank / 2, bool(rank % 2)]}

    for made in each(group, lambda comm, rank: pccl.broadcast(tree(rank), world - 1, comm=comm)):
        expected = tree(world - 1)
        np.testing.assert_array_equal(made["a"], expected["a"])
        assert [type(x) for x in made["b"]] == [type(x) for x in expected["b"]]
        assert made["b"] == expected["b"]
    for made in each(group, lambda comm, rank: pccl.allgather(tree(rank), comm=comm)):
        np.testing.assert_array_equal(made["a"], np.stack([tree(r)["a"] for r in range(world)]))
        for i in range(4):
            np.testing.assert_array_equal(made["b"][i], [tree(r)["b"][i] for r in range(world)])

    def scatter(comm: Comm, rank: int) -> Any:
        mine = [np.arange(world * 2) + rank, {"x": np.ones((world, 3, 1), np.float32)}]
        return pccl.reduce_scatter(mine, comm=comm)

    total = world * np.arange(world * 2) + sum(range(world))
    for rank, made in enumerate(each(group, scatter)):
        np.testing.assert_array_equal(made[0], total[2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(made[1]["x"], np.full((1, 3, 1), world, np.float32))


def test_frameworks_get_their_own_arrays(group: list[Comm]) -> None:
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    world = len(group)

    def call(comm: Comm, rank: int) -> Any:
        tensors = {"t": torch.full((2,), rank, dtype=torch.bfloat16), "j": jnp.full((2,), rank)}
        sent = pccl.broadcast(tensors, world - 1, comm=comm)
        gathered = pccl.allgather(tensors, comm=comm)
        part = pccl.reduce_scatter(
            {"t": torch.ones(world, 2), "j": jnp.ones((world, 2))}, comm=comm
        )
        strided = torch.zeros(4, 2).t()
        pccl.broadcast(torch.full((2, 4), float(rank)), world - 1, out=strided, comm=comm)
        return sent, gathered, part, strided

    for sent, gathered, part, strided in each(group, call):
        assert sent["t"].dtype == torch.bfloat16 and (sent["t"] == world - 1).all()
        assert (sent["j"] == world - 1).all() and type(sent["j"]) is type(jnp.ones(1))
        assert gathered["t"].shape == gathered["j"].shape == (world, 2)
        assert (gathered["t"][:, 0].float() == torch.arange(world)).all()
        assert part["t"].shape == part["j"].shape == (1, 2)
        assert (part["t"] == world).all() and (part["j"] == world).all()
        assert (strided == world - 1).all()


def test_many_in_flight_meet_by_tag(group: list[Comm]) -> None:
    def call(comm: Comm, rank: int) -> bool:
        def one(tag: int) -> bool:
            if tag % 3 == 0:
                made = pccl.broadcast(
                    own(rank, tag * 1000 + 1), tag % len(group), tag=tag, comm=comm
                )
                return bool((made == own(tag % len(group), tag * 1000 + 1)).all())
            if tag % 3 == 1:
                made = pccl.allgather(np.full(tag * 500, rank), tag=tag, comm=comm)
                return bool((made == np.arange(len(group))[:, None]).all())
            made = pccl.reduce_scatter(np.ones((len(group), tag * 700)), tag=tag, comm=comm)
            return bool((made == len(group)).all())

        tags = list(np.random.default_rng(rank).permutation(12))
        return in_threads([lambda t=tag: one(int(t)) for tag in tags]) == [True] * len(tags)

    assert each(group, call) == [True] * len(group)


def test_explicit_works_in_place(pair: list[Comm]) -> None:
    def call(comm: Comm, rank: int) -> Any:
        array = np.full(5, rank)
        info = comm.broadcast(array, root=1, tag=3)
        gathered = np.zeros(4, np.uint8)
        comm.all_gather(np.full(2, rank + 1, np.uint8), gathered)
        part = np.zeros((3,), np.float32)
        comm.reduce_scatter(np.arange(6, dtype=np.float32).reshape(2, 3), part, op="sum")
        assert isinstance(info, pccl.ReduceInfo) and info.world_size == 2
        return array, gathered, part

    for rank, (array, gathered, part) in enumerate(each(pair, call)):
        assert (array == 1).all() and gathered.tolist() == [1, 1, 2, 2]
        assert part.tolist() == [6 * rank, 6 * rank + 2, 6 * rank + 4]


def test_who_disagrees_is_told(pair: list[Comm]) -> None:
    calls: list[tuple[Callable[[Comm], Any], Callable[[Comm], Any], str]] = [
        (
            lambda comm: pccl.broadcast(np.ones(3), 0, comm=comm),
            lambda comm: pccl.broadcast(np.ones(3), 1, comm=comm),
            "from rank",
        ),
        (
            lambda comm: pccl.broadcast(np.ones(4), 0, comm=comm),
            lambda comm: pccl.allgather(np.ones(4), comm=comm),
            "all_gather",
        ),
        (
            lambda comm: pccl.allgather(np.ones(4, "i8"), comm=comm),
            lambda comm: pccl.allgather(np.ones(4, "f8"), comm=comm),
            "float64",
        ),
        (
            lambda comm: pccl.reduce_scatter(np.ones(4), "sum", comm=comm),
            lambda comm: pccl.reduce_scatter(np.ones(4), "max", comm=comm),
            "reduce_scatter",
        ),
        (
            lambda comm: pccl.reduce_scatter(np.ones(4), comm=comm),
            lambda comm: pccl.allreduce(np.ones(4), comm=comm),
            "reduce_scatter",
        ),
        (
            lambda comm: pccl.alltoall(np.ones(4, "u1"), comm=comm),
            lambda comm: pccl.reduce_scatter(np.ones(4, "u1"), comm=comm),
            "all_to_all",
        ),
    ]
    for first, second, words in calls:
        for error in in_threads([lambda f=first: f(pair[0]), lambda s=second: s(pair[1])]):
            assert type(error) is pccl.MismatchedCall and words in str(error)


def test_what_cannot_be_done_starts_nothing(pair: list[Comm]) -> None:
    comm = pair[0]
    array = np.ones((4, 2))
    wrong: list[Callable[[], Any]] = [
        lambda: pccl.broadcast(array, 2, comm=comm),
        lambda: pccl.broadcast(array, -1, comm=comm),
        lambda: pccl.broadcast(np.array([object()]), comm=comm),
        lambda: pccl.broadcast(array, out=np.ones((2, 4)), comm=comm),
        lambda: pccl.broadcast({"a": array}, out={"b": array}, comm=comm),
        lambda: pccl.broadcast(array, out=np.broadcast_to(np.ones(2), (4, 2)), comm=comm),
        lambda: pccl.allgather(array, out=array, comm=comm),
        lambda: pccl.allgather(array, out=np.ones((2, 4, 2), "f4"), comm=comm),
        lambda: pccl.reduce_scatter(np.ones(3), comm=comm),
        lambda: pccl.reduce_scatter(np.float64(1), comm=comm),
        lambda: pccl.reduce_scatter(array, out=np.ones((4, 2)), comm=comm),
        lambda: pccl.reduce_scatter(array, "most", comm=comm),
        lambda: pccl.alltoall(np.ones(3), comm=comm),
        lambda: pccl.alltoall(np.float64(1), comm=comm),
        lambda: pccl.alltoall(array, out=np.ones((2, 4)), comm=comm),
        lambda: pccl.alltoall({"a": array, "b": 2}, comm=comm),
        lambda: comm.broadcast(np.ones((4, 4))[:, ::2]),
        lambda: comm.all_gather(array, np.ones(15)),
        lambda: comm.reduce_scatter(array, np.ones(4, "f4"), op="sum"),
        lambda: comm.all_to_all(array, np.ones(4)),
        lambda: comm.all_to_all(np.ones(3), np.ones(3)),
        lambda: comm.all_to_all(array, np.ones((4, 4))[:, ::2]),
    ]
    for call in wrong:
        with pytest.raises(pccl.InvalidArgument):
            call()
    # The next call of both still meets.
    assert each(pair, lambda c, rank: pccl.allgather(rank, comm=c).tolist()) == [[0, 1], [0, 1]]


def test_alone_nothing_is_sent() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        comm = Comm(master.address)
        comm.connect()
        assert pccl.broadcast(3, comm=comm) == 3
        assert pccl.allgather(np.arange(3), comm=comm).tolist() == [[0, 1, 2]]
        assert pccl.reduce_scatter(np.arange(3), "avg", comm=comm).tolist() == [0, 1, 2]
        assert pccl.alltoall(np.arange(3), comm=comm).tolist() == [0, 1, 2]
        for call in (
            lambda: comm.broadcast(np.ones(1)),
            lambda: comm.all_gather(np.ones(1), np.ones(1)),
            lambda: comm.reduce_scatter(np.ones(1), np.ones(1), op="sum"),
            lambda: comm.all_to_all(np.ones(1), np.ones(1)),
        ):
            with pytest.raises(pccl.TooFewPeers):
                call()
        comm.close()


def test_explicit_members_that_send_other_elements_are_told(pair: list[Comm]) -> None:
    told = in_threads(
        [
            lambda: pair[0].broadcast(np.ones(2, np.float32)),
            lambda: pair[1].broadcast(np.ones(1, np.int64)),
        ]
    )
    assert [type(error) for error in told] == [pccl.MismatchedCall] * 2


def test_parts_of_what_is_not_contiguous_are_right(pair: list[Comm]) -> None:
    torch = pytest.importorskip("torch")

    def call(comm: Comm, rank: int) -> Any:
        return pccl.reduce_scatter(torch.arange(8.0).reshape(2, 4).t(), comm=comm)

    whole = 2 * np.arange(8.0).reshape(2, 4).T
    for rank, part in enumerate(each(pair, call)):
        np.testing.assert_array_equal(part.numpy(), whole[2 * rank : 2 * rank + 2])
