"""DTensors of torch: reductions, syncs and checkpoints take this rank's shard, and no other one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from members import each
from states import RefusedError, deliver, share

import pccl
from pccl import checkpoint

torch = pytest.importorskip("torch")


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensors_are_their_local_shards(pair: list[pccl.Communicator], mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard

    shards = [
        DTensor.from_local(torch.full((2, 3), float(i + 1)), mesh, [Shard(0)]).requires_grad_()
        for i in range(2)
    ]
    results = each(pair, lambda i, comm: pccl.allreduce(shards[i], comm=comm))
    for result in results:
        assert isinstance(result, DTensor) and result.placements == (Shard(0),)
        assert (result.shape, result.requires_grad) == ((2, 3), False)
        assert torch.equal(result.to_local(), torch.full((2, 3), 3.0))
    each(pair, lambda i, comm: pccl.allreduce(shards[i], out=shards[i], comm=comm))
    assert all(torch.equal(s.to_local().detach(), torch.full((2, 3), 3.0)) for s in shards)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(pccl.InvalidArgument, match="partial"):
        pccl.allreduce({"w": partial}, comm=pair[0])
    with pytest.raises(pccl.NotSupported, match="spread over ranks"):
        pccl.from_array(shards[0])


def test_a_sync_writes_the_local_shards_of_dtensors(
    pair: list[pccl.Communicator], mesh: Any
) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    def make(value: float) -> dict[str, Any]:
        local = torch.full((2, 3), value)
        return {
            "w": torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)])),
            "turned": DTensor.from_local(local.clone().T, mesh, [Replicate()]),
        }

    states = [make(float(i + 1)) for i in range(2)]
    results = each(pair, lambda i, comm: pccl.sync(states[i], revision=5 - i, comm=comm))
    for result, state in zip(results, states, strict=True):
        assert result is state and isinstance(result["w"], DTensor)
        assert torch.equal(result["w"].to_local(), torch.ones(2, 3))
        assert torch.equal(result["turned"].to_local(), torch.ones(3, 2))
    # A whole tensor and a shard are different things, even where their shapes are equal.
    mixed = [{"w": states[0]["w"]}, {"w": torch.ones(2, 3)}]
    for error in each(pair, lambda i, comm: pccl.sync(mixed[i], revision=9, comm=comm)):
        assert isinstance(error, pccl.MismatchedCall), error
        assert "shard 0 of 1 on axis 0 of [2,3], float32[2,3]" in str(error)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(pccl.InvalidArgument, match=r"state\['w'\]: .*partial"):
        pccl.sync({"w": partial}, comm=pair[0])
    for refused in (pccl.broadcast, pccl.allgather, pccl.reduce_scatter, pccl.alltoall):
        with pytest.raises(pccl.NotSupported, match="spread over"):
            refused(states[0]["w"], comm=pair[0])
    with pytest.raises(pccl.NotSupported, match="out is spread over"):
        pccl.reduce_scatter(torch.ones(4, 3), out=states[0]["w"], comm=pair[0])


def test_a_shard_is_not_made_where_it_is_missing(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    shard = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    sentence = r"state\['w'\] .* a part of a DTensor \(shard 0 of 1 on axis 0 of \[2,3\], float32\)"
    with pytest.raises(RefusedError, match=sentence):
        deliver({"w": shard}, {})


def test_a_checkpoint_has_the_shards_of_one_rank(tmp_path: Path, mesh: Any) -> None:
    pytest.importorskip("safetensors")
    from torch.distributed.tensor import DTensor, Shard

    def make(value: float) -> dict[str, Any]:
        return {"w": DTensor.from_local(torch.full((2, 2), value), mesh, [Shard(0)])}

    file = checkpoint.save(tmp_path / "1.safetensors", make(1.0), revision=1)
    state, _ = checkpoint.load(file, make(2.0))
    assert isinstance(state["w"], DTensor)
    assert torch.equal(state["w"].to_local(), torch.ones(2, 2))
    with pytest.raises(checkpoint.CheckpointError, match="shard 0 of 1"):
        checkpoint.load(file, {"w": torch.zeros(2, 2)})


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """This process is one of four ranks of a job whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


def placed(rank: int, placements: Sequence[Any], shape: tuple[int, ...] = (4, 4)) -> Any:
    """The DTensor of numbers 0, 1 ..., as that rank of a mesh of two times two has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(float(np.prod(shape))).reshape(shape)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def test_a_shard_is_taken_only_at_its_own_place(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from torch.distributed.tensor import Replicate, Shard

    layouts = {
        "rows": [Shard(0), Replicate()],
        "columns": [Shard(1), Replicate()],
        "rows, then columns": [Shard(0), Shard(1)],
        "columns, then rows": [Shard(1), Shard(0)],
        "rows twice": [Shard(0), Shard(0)],
        "whole": [Replicate(), Replicate()],
    }
    saved = {}
    for rank in range(4):
        with as_rank(rank):
            for name, placements in layouts.items():
                made = placed(rank, placements)
                file = checkpoint.save(tmp_path / f"{rank}{name}", {"w": made}, revision=1)
                saved[rank, name] = file, made.to_local().clone()
    refused = 0
    for rank in range(4):
        with as_rank(rank):
            for name, placements in layouts.items():
                for (other, there), (file, elements) in saved.items():
                    made = placed(rank, placements)
                    try:
                        checkpoint.load(file, {"w": made})
                    except checkpoint.CheckpointError as error:
                        assert " of [4,4], float32[" in str(error)
                        assert (rank, name) != (other, there)
                        refused += 1
                    else:  # another member may have the same elements
                        assert torch.equal(elements, saved[rank, name][1])
                        assert name == there
    assert refused > 300


def test_shards_of_different_tensors_may_have_equal_shapes() -> None:
    from torch.distributed.tensor import Replicate, Shard

    with as_rank(0):
        kinds = {share({"w": placed(0, [Shard(0), Replicate()], (n,))}).entries[0][1:3]
                 for n in (5, 6)}  # fmt: skip
    assert [shape for _, shape in kinds] == [(3,)] * 2 and len(kinds) == 2


def test_a_rank_outside_the_mesh_has_no_part(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    with as_rank(3):
        made = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        with pytest.raises(
            pccl.InvalidArgument, match=r"state\['w'\]: this rank is not in the mesh"
        ):
            checkpoint.save(tmp_path / "1.safetensors", {"w": made}, revision=1)
