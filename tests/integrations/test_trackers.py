"""Experiment trackers and sweeps: curves go on when a member is killed."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import example, losses, members, run

ROUNDS, STEPS, BATCH = 8, 10, 32  # rounds, inner steps of a round, examples of a step


def tensorboard(folder: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of a curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def mlflow_curve(file: Path, name: str) -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{file}")
    (found,) = client.search_runs(["0"])
    return [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, name)]


def wandb_curve(folder: Path, run: str, name: str) -> list[tuple[int, float]]:
    """(step, value) of a curve of the offline run of that id."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob(f"wandb/offline-run-*/run-{run}.wandb")
    curve = []
    for data in log_records(file.read_bytes()):
        items = Record.FromString(data).history.item
        found = {item.key or ".".join(item.nested_key): item.value_json for item in items}
        if name in found:
            curve.append((int(found["_step"]), float(found[name])))
    return curve


def log_records(log: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, which begins with a header of seven bytes."""
    assert log.startswith(b":W&B")
    block, header = 32768, struct.Struct("<IHB")  # checksum, length, kind
    record, at = b"", 7
    while at + header.size <= len(log):
        if block - at % block < header.size:  # the rest of a block is too small for a header
            at += block - at % block
            continue
        _, length, kind = header.unpack_from(log, at)
        at += header.size
        record += log[at : at + length]
        at += length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@pytest.mark.parametrize("dies", [0, 35])
def test_trackers_have_the_numbers_of_each_round(tmp_path: Path, dies: int) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    env = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    if dies:
        env["DIES_AT"] = str(dies)
    shown = members(example("trackers"), str(tmp_path), folder=tmp_path, **env)
    assert len(losses(shown)) == (1 if dies else 2)
    # Rank 1 is killed in the fourth round, in which only the other one counts.
    both = 3 if dies else ROUNDS
    tokens = [(STEPS * n, float(STEPS * BATCH * (min(n, both) + n))) for n in range(1, ROUNDS + 1)]
    for found in (
        tensorboard(tmp_path / "member-0", "diloco/world_tokens"),
        mlflow_curve(tmp_path / "member-0.db", "diloco/world_tokens"),
        wandb_curve(tmp_path, "member-0", "diloco/world_tokens"),
    ):
        assert found == tokens
    other = tensorboard(tmp_path / "member-1", "diloco/world_tokens")
    assert other == tokens[: len(other)] and len(other) == (3 if dies else ROUNDS)
    other = wandb_curve(tmp_path, "member-1", "diloco/world_tokens")
    assert other == tokens[: len(other)]
    assert len(other) == ROUNDS or dies  # W&B writes every 15 s, so a killed member may have none
    last = re.findall(r" tokens (\S+)$", shown, re.MULTILINE)
    assert set(last) == {str(tokens[-1][1])}


@pytest.mark.parametrize("dies", [0, 10])
def test_a_sweep_finds_the_best_of_its_trials(tmp_path: Path, dies: int) -> None:
    """Also when a member of the first trial is killed."""
    pytest.importorskip("optuna")
    killer = str(Path(__file__).with_name("dies"))
    env = {"DIES_AT": str(dies), "PYTHONPATH": killer} if dies else {}
    shown = run([example("optuna_sweep")], tmp_path, **env)
    values = [float(one) for one in re.findall(r"finished with value: (\S+) and", shown)]
    best = re.findall(r"^best (\S+) loss (\S+)$", shown, re.MULTILINE)
    assert len(values) == 5 and float(best[0][1]) == min(values) < 0.01
