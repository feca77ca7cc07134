"""Checkpoints: what is written comes back, whole or not at all, and only into what it fits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import struct
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import checkpoints
from workers import Run, running

import pccl
from pccl.checkpoint import CheckpointError
from pccl.data import ElasticSampler
from pccl.training import checkpoint

pytest.importorskip("safetensors")

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(alphabet=st.characters(categories=["Cs"])),
)


def same(one: object, other: object) -> bool:
    """Equal in type and value, NaN included."""
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("<d", one) == struct.pack("<d", other) or (
            math.isnan(one) and math.isnan(other)
        )
    return type(one) is type(other) and one == other


@given(values=st.lists(VALUES, max_size=6), revision=st.integers(0, 2**63 - 1))
def test_values_of_all_kinds_come_back(
    tmp_path_factory: pytest.TempPathFactory, values: list[object], revision: int
) -> None:
    path = tmp_path_factory.mktemp("values") / "x.safetensors"
    checkpoint.save(path, {"values": values, "number": 10**5000}, revision=revision)
    read, found = checkpoint.load(path, {"values": [0] * len(values), "number": 0})
    assert found == revision
    assert read["number"] == 10**5000
    assert all(same(a, b) for a, b in zip(values, read["values"], strict=True))


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "uint16", "int64", "float16", "float64", "complex64", "complex128"),
        *("<U5", "S3"),
        *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4"),
    ],
)
def test_arrays_of_every_dtype_come_back_in_place(tmp_path: Path, dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.arange(24).astype(kind).reshape(2, 3, 4)
    state = {
        "a": array,
        "empty": array[:0],
        "point": array[1, 1, 1:2].reshape(()),
        "strided": array[:, ::2],
    }
    path = checkpoint.save(tmp_path / "x.safetensors", state, revision=3)
    target = np.zeros((2, 3, 4), kind)
    blank: dict[str, Any] = {
        "a": target,
        "empty": np.zeros((0, 3, 4), kind),
        "point": np.zeros((), kind),
        "strided": np.zeros((2, 2, 4), kind),
    }
    read, revision = checkpoint.load(path, blank)
    assert revision == 3 and read["a"] is target
    for name, value in state.items():
        assert read[name].dtype == kind
        assert np.ascontiguousarray(read[name]).tobytes() == np.ascontiguousarray(value).tobytes()


def test_other_readers_of_safetensors_find_tensors_by_their_key_paths(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    state = {"layers": [{"w": np.arange(6, dtype=np.float32).reshape(2, 3)}], "step": 7}
    found = load_file(checkpoint.save(tmp_path / "x.safetensors", state, revision=0))
    assert list(found) == ["['layers'][0]['w']"]
    assert np.array_equal(found["['layers'][0]['w']"], state["layers"][0]["w"])


def test_a_bare_array_is_a_state(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "x.safetensors", np.arange(5), revision=1)
    read, _ = checkpoint.load(path, np.zeros(5, np.int64))
    assert read.tolist() == [0, 1, 2, 3, 4]


@dataclasses.dataclass
class Both:
    weights: np.ndarray[Any, Any]
    rate: float


def test_containers_keep_their_kinds(tmp_path: Path) -> None:
    state = [Both(np.ones(3), 0.5), (1, {"x": None}), {3: "three"}]
    path = checkpoint.save(tmp_path / "x.safetensors", state, revision=1)
    read, _ = checkpoint.load(path, [Both(np.zeros(3), 0.0), (0, {"x": None}), {3: ""}])
    assert isinstance(read[0], Both) and read[0].rate == 0.5 and read[0].weights.tolist() == [1] * 3
    assert read[1:] == [(1, {"x": None}), {3: "three"}]


def test_torch_models_and_optimizers_come_back_also_into_one_that_has_not_stepped(
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        sampler = ElasticSampler(100, batch_size=4, seed=seed)
        objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
        return {**objects, "sampler": sampler, "half": torch.zeros(3, dtype=torch.float8_e5m2)}

    def step(state: dict[str, Any]) -> None:
        inputs = torch.tensor(state["sampler"].take()).to(torch.bfloat16)
        state["model"](inputs[None]).float().square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["schedule"].step()
        state["sampler"].commit()

    state = made(1)
    step(state)
    state["half"].fill_(1.5)
    path = checkpoint.save(tmp_path / "x.safetensors", state, revision=9)
    other = made(2)
    read, _ = checkpoint.load(path, other)
    assert all(read[name] is other[name] for name in other)
    assert read["half"].float().tolist() == [1.5] * 3
    for _ in range(3):
        step(state)
        step(read)
    for one, two in zip(state["model"].parameters(), read["model"].parameters(), strict=True):
        assert torch.equal(one, two)
    assert state["sampler"].state_dict() == read["sampler"].state_dict()
    assert state["schedule"].get_last_lr() == read["schedule"].get_last_lr()


def test_what_differs_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    saved = {"w": np.ones((3, 4), np.float32), "b": np.ones(4), "step": 5}
    path = checkpoint.save(tmp_path / "x.safetensors", saved, revision=1)

    def refused(state: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(path, state)
        assert isinstance(caught.value, pccl.InvalidArgument)
        return str(caught.value)

    b = np.zeros(4)
    shape = refused({"w": np.zeros((4, 4), np.float32), "b": b, "step": 0})
    assert "state['w'] is float32[4,4], and float32[3,4] in the checkpoint" in shape
    dtype = refused({"w": np.zeros((3, 4), np.float16), "b": b, "step": 0})
    assert "state['w'] is float16[3,4], and float32[3,4] in the checkpoint" in dtype
    name = refused({"w": np.zeros((3, 4), np.float32), "b": b, "step": 0, "bias": b.copy()})
    assert "state['bias'] is float64[4], and the checkpoint has none" in name
    value = refused({"w": 1.0, "b": b, "step": 0})
    assert "state['w'] is float, and float32[3,4] in the checkpoint" in value
    kind = refused([b])
    assert "state[0] is float64[4], and the checkpoint has none" in kind
    many = refused({f"x{i}": 0 for i in range(9)})
    assert "6 more differences" in many
    assert not b.any()


def test_arrays_that_share_memory_are_loaded_only_where_that_makes_them_what_was_saved(
    tmp_path: Path,
) -> None:
    w = np.zeros(6)
    apart = checkpoint.save(tmp_path / "a", {"a": np.ones(6), "b": np.full(6, 2.0)}, revision=1)
    tied = checkpoint.save(tmp_path / "b", {"a": np.ones(6), "b": np.ones(6)}, revision=1)
    with pytest.raises(CheckpointError, match=r"\['b'\] and \['a'\] are the same memory here"):
        checkpoint.load(apart, {"a": w, "b": w})
    with pytest.raises(pccl.InvalidArgument, match=r"\['a'\] and \['b'\] share memory"):
        checkpoint.load(tied, {"a": w, "b": w[::-1]})
    assert not w.any()
    checkpoint.load(tied, {"a": w, "b": w})
    assert (w == 1).all()


def test_missing_entries_are_made_where_that_can_be(tmp_path: Path) -> None:
    saved = {"w": np.ones(3), "moments": {"m": [np.ones(2), np.ones(2)]}}
    path = checkpoint.save(tmp_path / "x.safetensors", saved, revision=1)
    read, _ = checkpoint.load(path, {"w": np.zeros(3)})
    assert [m.tolist() for m in read["moments"]["m"]] == [[1, 1], [1, 1]]
    inside = checkpoint.save(tmp_path / "y.safetensors", {"both": Both(np.ones(3), 1)}, revision=1)
    with pytest.raises(CheckpointError, match="of the checkpoint cannot be had here"):
        checkpoint.load(inside, {})


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = checkpoint.save(tmp_path / "x.safetensors", {"w": np.ones(1000)}, revision=1)
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.load(path, {"w": np.zeros(1000)})
    save_file({"w": np.ones(3)}, path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.load(path, {"w": np.zeros(3)})
    entries = json.dumps([["['v']", "float64", [3], '[""]', None]])
    metadata = {"pccl.format": "1", "pccl.revision": "1", "pccl.entries": entries}
    save_file({"w": np.ones(3)}, path, metadata)
    with pytest.raises(CheckpointError, match="disagree"):
        checkpoint.load(path, {"w": np.zeros(3)})
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none.safetensors", {})


def test_latest_goes_by_revision_and_keep_leaves_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert checkpoint.latest(folder) is None
    for revision in (10, 9, 100, 3):
        checkpoint.save(folder / f"{revision}.safetensors", {"r": revision}, revision=revision)
    (folder / "broken.safetensors").write_bytes(b"x")
    found = checkpoint.latest(folder)
    assert found == folder / "100.safetensors"
    checkpoint.save(folder / "50.safetensors", {"r": 50}, revision=50, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == [
        "100.safetensors",
        "50.safetensors",
        "broken.safetensors",
    ]
    # One that goes on from an old checkpoint keeps what it writes.
    checkpoint.save(folder / "4.safetensors", {"r": 4}, revision=4, keep=1)
    assert {p.name for p in folder.iterdir()} >= {"4.safetensors", "100.safetensors"}


@pytest.mark.parametrize("keep", [0, 2.0, "2", True])
def test_a_keep_that_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, keep: Any
) -> None:
    with pytest.raises(pccl.InvalidArgument, match="keep must be an integer"):
        checkpoint.save(tmp_path / "x.safetensors", {}, revision=1, keep=keep)
    assert list(tmp_path.iterdir()) == []


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    name = "x" * (os.pathconf(tmp_path, "PC_NAME_MAX") - len(checkpoint.SUFFIX))
    checkpoint.save(tmp_path / f"{name}{checkpoint.SUFFIX}", {"step": 3}, revision=3)
    assert checkpoint.resume(tmp_path, {"step": 0}) == ({"step": 3}, 3)


def test_files_of_killed_saves_are_removed_and_those_of_others_stay(
    tmp_path: Path, run: Run
) -> None:
    saving = [run.peer(partial(checkpoints.save_without_end, str(tmp_path))) for _ in range(3)]
    killed, fresh, alive = (tmp_path / peer.expect("saves")["folder"] for peer in saving)
    others = tmp_path / ".cache.tmp"
    others.mkdir()
    for folder in (killed, alive, others):
        os.utime(folder, (0, 0))
    for peer in saving[:2]:
        peer.signal(signal.SIGKILL)
        peer.ends()
    checkpoint.save(tmp_path / "1.safetensors", {"step": 1}, revision=1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"1.safetensors", fresh.name, alive.name, others.name}
    saving[2].signal(signal.SIGKILL)


def test_a_link_to_a_file_that_is_gone_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(20))  # then StopIteration
    read = checkpoint._read_metadata
    monkeypatch.setattr(checkpoint, "_read_metadata", lambda *args: (next(looks), read(*args))[1])
    (tmp_path / "last.safetensors").symlink_to(tmp_path / "gone" / "12.safetensors")
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.resume(tmp_path, {"step": 0}) == ({"step": 0}, None)
    checkpoint.save(tmp_path / "1.safetensors", {"step": 1}, revision=1, keep=1)
    assert checkpoint.resume(tmp_path, {"step": 0}) == ({"step": 1}, 1)


def test_resume_reads_the_newest_also_while_others_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": np.zeros(3)}
    assert checkpoint.resume(tmp_path / "none", state) == (state, None)
    checkpoint.save(tmp_path / "1.safetensors", {"w": np.ones(3)}, revision=1)
    opened, removals = checkpoint._opened, 0

    def removed_before(path: Path, func: str) -> Any:
        nonlocal removals
        if removals < 2:
            removals += 1
            revision = int(path.stem) + 1
            newer = {"w": np.full(3, revision)}
            checkpoint.save(tmp_path / f"{revision}.safetensors", newer, revision=revision, keep=1)
        return opened(path, func)

    monkeypatch.setattr(checkpoint, "_opened", removed_before)
    read, revision = checkpoint.resume(tmp_path, {"w": np.zeros(3, np.int64)})
    assert (read["w"].tolist(), revision, removals) == ([3, 3, 3], 3, 2)

    def away_for_a_moment(path: Path, func: str) -> Any:
        monkeypatch.setattr(checkpoint, "_opened", opened)
        raise FileNotFoundError(path)

    monkeypatch.setattr(checkpoint, "_opened", away_for_a_moment)
    assert checkpoint.resume(tmp_path, {"w": np.zeros(3, np.int64)})[1] == 3

    def lost(path: Path, func: str) -> Any:
        path.unlink()
        return opened(path, func)

    monkeypatch.setattr(checkpoint, "_opened", lost)
    with pytest.raises(FileNotFoundError):
        checkpoint.resume(tmp_path, state)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.save(tmp_path / "x.safetensors", {"w": np.ones(3)}, revision=1)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(path, {"w": np.zeros(3)}, revision=2)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_the_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    path = checkpoint.save(tmp_path / "x.safetensors", {"w": 1}, revision=1)
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_readers_and_writers_at_once_see_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    checkpoint.save(path, {"w": np.full(50_000, 0)}, revision=0)

    def write(number: int) -> None:
        for revision in range(number, number + 10):
            checkpoint.save(path, {"w": np.full(50_000, revision)}, revision=revision, keep=1)

    writers = [threading.Thread(target=write, args=(100 * n,)) for n in (1, 2)]
    for writer in writers:
        writer.start()
    reads = 0
    while reads < 5 or any(writer.is_alive() for writer in writers):
        read, _ = checkpoint.load(path, {"w": np.zeros(50_000, np.int64)})
        assert (read["w"] == read["w"][0]).all()
        reads += 1
    for writer in writers:
        writer.join()
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_without_safetensors_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (
        lambda: checkpoint.save(tmp_path / "x.safetensors", {}, revision=0),
        lambda: checkpoint.load(tmp_path / "x.safetensors", {}),
        lambda: checkpoint.latest(tmp_path),
        lambda: checkpoint.resume(tmp_path, {}),
    ):
        with pytest.raises(pccl.NotSupported, match=r"pccl-collectives\[checkpoint\]"):
            call()


def test_a_run_that_lost_all_its_peers_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def begin(run: Run, folder: Path, count: int) -> list[Any]:
        peers = run.peers(count, checkpoints.train)
        for peer in peers:
            peer.tell(str(folder))
        return peers

    def ends(peers: list[Any], steps: int) -> dict[str, Any]:
        for peer in peers:
            peer.tell(steps)
        answers = [peer.expect("trained") for peer in peers]
        assert all(answer == answers[0] for answer in answers)
        return dict(answers[0])

    with running() as run:
        whole = begin(run, tmp_path / "whole", 2)
        assert [peer.expect("ready")["step"] for peer in whole] == [0, 0]
        expected = ends(whole, 10)
    with running() as run:
        first = begin(run, tmp_path / "parts", 2)
        assert [peer.expect("ready")["step"] for peer in first] == [0, 0]
        ends(first, 6)
    with running() as run:
        # The last step was not saved; it is made again.
        second = begin(run, tmp_path / "parts", 2)
        assert [(r["step"], r["revision"]) for r in (p.expect("ready") for p in second)] == [
            (5, 5),
            (5, 5),
        ]
        answer = ends(second, 10)
    assert answer == expected
