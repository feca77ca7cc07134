"""All-to-all, in both APIs: part s of the result on rank r is part r of what rank s passed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from groups import KINDS, SIZES, Comm, dtype, each, own
from members import in_threads

import pccl


def sent(rank: int, world: int, count: int, kind: str = "f4") -> np.ndarray[Any, Any]:
    return own(rank, world * count, kind).reshape(world, count)


def wanted(rank: int, world: int, count: int, kind: str = "f4") -> np.ndarray[Any, Any]:
    return np.stack([sent(other, world, count, kind)[rank] for other in range(world)])


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("kind", ["f4", "bfloat16", "S3"])
def test_each_gets_its_part_of_all(group: list[Comm], kind: str, count: int) -> None:
    world = len(group)

    def call(comm: Comm, rank: int) -> Any:
        mine = sent(rank, world, count, kind)
        before = mine.copy()
        new = pccl.alltoall(mine, comm=comm)
        out = np.zeros((world, count), dtype(kind))
        assert pccl.alltoall(mine, out=out, comm=comm) is out
        assert (mine == before).all()
        in_place = mine.copy()
        assert pccl.alltoall(in_place, out=in_place, comm=comm) is in_place
        return new, out, in_place

    for rank, made in enumerate(each(group, call)):
        for array in made:
            assert array.dtype == dtype(kind) and array.shape == (world, count)
            assert array.tobytes() == wanted(rank, world, count, kind).tobytes()


@pytest.mark.parametrize("count", SIZES)
def test_twice_is_what_there_was(group: list[Comm], count: int) -> None:
    def call(comm: Comm, rank: int) -> None:
        mine = sent(rank, len(group), count)
        again = pccl.alltoall(pccl.alltoall(mine, comm=comm), comm=comm)
        np.testing.assert_array_equal(again, mine)

    each(group, call)


def test_trees_and_frameworks_keep_their_kinds(group: list[Comm]) -> None:
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    world = len(group)

    def call(comm: Comm, rank: int) -> Any:
        rows = np.arange(world)[:, None] + 10.0 * rank
        tree = {
            "a": [np.tile(rows, (1, 70_000)), np.zeros((world, 0))],
            "t": torch.tensor(rows, dtype=torch.bfloat16),
            "j": jnp.asarray(rows, "float32"),
            "n": None,
        }
        strided = torch.zeros(3, 2 * world).t()
        pccl.alltoall(torch.full((2 * world, 3), float(rank)), out=strided, comm=comm)
        return pccl.alltoall(tree, comm=comm), strided

    for rank, (made, strided) in enumerate(each(group, call)):
        rows = 10.0 * np.arange(world)[:, None] + rank
        assert (made["a"][0] == rows).all() and made["a"][1].shape == (world, 0)
        assert made["t"].dtype == torch.bfloat16 and made["n"] is None
        np.testing.assert_array_equal(made["t"].float().numpy(), rows)
        np.testing.assert_array_equal(np.asarray(made["j"]), rows)
        np.testing.assert_array_equal(
            strided.numpy(), np.repeat(np.arange(world), 2)[:, None] + np.zeros(3)
        )


def test_the_info_names_whose_parts_they_are(group: list[Comm]) -> None:
    world = len(group)

    def call(comm: Comm, rank: int) -> Any:
        plain, first = pccl.alltoall(sent(rank, world, 5), return_info=True, comm=comm)
        tree, second = pccl.alltoall({"a": plain}, return_info=True, comm=comm)
        np.testing.assert_array_equal(tree["a"], sent(rank, world, 5))
        return [(info.contributors, info.bytes) for info in (first, second)]

    peers = pccl.membership(group[0]).peers
    assert each(group, call) == [[(peers, 20 * world)] * 2] * world


def test_many_arrays_share_segments(group: list[Comm]) -> None:
    world = len(group)
    counts = [1 + 37 * (index % 11) for index in range(200)]

    def call(comm: Comm, rank: int) -> None:
        tree = {f"{i}": sent(rank, world, count, KINDS[i % 3]) for i, count in enumerate(counts)}
        made = pccl.alltoall(tree, comm=comm)
        for i, count in enumerate(counts):
            np.testing.assert_array_equal(made[f"{i}"], wanted(rank, world, count, KINDS[i % 3]))
        assert pccl.alltoall(tree, out=tree, comm=comm) is tree
        assert all((tree[name] == made[name]).all() for name in tree)

    each(group, call)


def test_many_in_flight_meet_by_tag(group: list[Comm]) -> None:
    world = len(group)

    def call(comm: Comm, rank: int) -> bool:
        def one(tag: int) -> bool:
            made = pccl.alltoall(sent(rank, world, 4000 * tag + 1), tag=tag, comm=comm)
            return bool((made == wanted(rank, world, 4000 * tag + 1)).all())

        tags = list(np.random.default_rng(rank).permutation(12))
        return in_threads([lambda t=tag: one(int(t)) for tag in tags]) == [True] * len(tags)

    assert each(group, call) == [True] * world


@pytest.mark.parametrize("count", [1, 300_001])
def test_explicit_counts_its_bytes(group: list[Comm], count: int) -> None:
    world = len(group)
    if world == 1:
        pytest.skip("the explicit API refuses to be alone")

    def call(comm: Comm, rank: int) -> Any:
        mine = sent(rank, world, count)
        received = np.zeros(mine.size, "f4")  # any shape
        info = comm.all_to_all(mine, received, tag=3)
        assert received.tobytes() == wanted(rank, world, count).tobytes()
        comm.all_to_all(mine, mine, tag=4)
        assert mine.tobytes() == received.tobytes()
        return info.world_size, info.tx_bytes, info.rx_bytes

    others = (world - 1) * count * 4
    assert each(group, call) == [(world, others, others)] * world
