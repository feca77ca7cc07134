"""ElasticTrainer in a real Ray: members that die are replaced, and the others go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray import exceptions

from pccl import errors
from pccl.adapters.ray import ElasticTrainer
from pccl.adapters.ray.actors import is_death
from pccl.errors import InvalidArgument

RUNS = Path(__file__).with_name("ray_runs.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "integrations" / "ray_elastic.py"
LIMIT = 240  # seconds


def output(command: list[str], folder: Path) -> str:
    quiet = {"OMP_NUM_THREADS": "1", "PCCL_BIND": "127.0.0.1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=folder,  # not the source tree, which has no extension
        env={**os.environ, **quiet},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result(name: str, folder: Path) -> Any:
    """The result of one of the runs of ray_runs.py."""
    output([str(RUNS), name, str(folder)], folder)
    return json.loads((folder / "result.json").read_text())


def started(folder: Path) -> dict[str, int]:
    """The process ids of members that were started, by name; each was started once."""
    found = [path.name.split(".") for path in folder.glob("member-*.*")]
    assert len({name for name, _ in found}) == len(found)
    return {name: int(pid) for name, pid in found}


def test_a_killed_member_is_replaced_while_the_others_go_on(tmp_path: Path) -> None:
    found = result("killed", tmp_path)
    processes = started(tmp_path)
    assert set(processes) == {"member-0", "member-1", "member-1-1", "member-2"}
    assert [each["name"] for each in found] == ["member-0", "member-1-1", "member-2"]
    assert all(processes[each["name"]] == each["pid"] for each in found)
    assert len({each["w"] for each in found}) == 1  # bit for bit


def test_a_member_that_was_put_out_of_the_run_is_replaced(tmp_path: Path) -> None:
    found = result("kicked", tmp_path)
    assert set(started(tmp_path)) == {"member-0", "member-1", "member-1-1"}
    assert [each["name"] for each in found] == ["member-0", "member-1-1"]
    assert found[0]["w"] == found[1]["w"]


def test_members_become_more_with_a_node_and_fewer_without_it(tmp_path: Path) -> None:
    found = result("grows", tmp_path)
    assert set(started(tmp_path)) == {"member-0", "member-1", "member-2"}
    assert [each and each["name"] for each in found] == ["member-0", "member-1", None]
    assert found[0]["w"] == found[1]["w"]


def test_a_master_that_dies_is_replaced(tmp_path: Path) -> None:
    found = result("master", tmp_path)
    assert {each["name"]: each["pid"] for each in found} == started(tmp_path)
    assert found[0]["w"] == found[1]["w"]


def test_a_member_that_leaves_on_purpose_is_not_replaced(tmp_path: Path) -> None:
    found = result("leaves", tmp_path)
    assert found[0]["name"] == "member-0" and found[1] is None
    assert set(started(tmp_path)) == {"member-0", "member-1"}


def test_members_beyond_the_minimum_leave_the_resources_to_the_others(tmp_path: Path) -> None:
    found = result("starved", tmp_path)
    assert found[:2] == [2, 2]


def test_members_beyond_the_minimum_wait_again_when_all_nodes_are_lost(tmp_path: Path) -> None:
    found = result("again", tmp_path)
    assert found[:2] == [2, 2]


def test_an_actor_that_ray_ends_for_memory_is_a_death(tmp_path: Path) -> None:
    sentence, cause = result("memory", tmp_path)
    assert sentence.endswith(" died: 3 deaths in this run, max_failures is 2")
    assert cause == "OutOfMemoryError"


def test_a_member_that_may_rejoin_is_replaced(tmp_path: Path) -> None:
    found = result("rejoins", tmp_path)
    assert set(started(tmp_path)) == {"member-0", "member-1", "member-1-1", "member-1-2"}
    assert [each["name"] for each in found] == ["member-0", "member-1-2"]
    assert found[0]["w"] == found[1]["w"]


def test_a_replacement_with_a_name_of_its_own_ends_with_the_work(tmp_path: Path) -> None:
    assert result("late", tmp_path) == ["member-0", None]


def test_a_member_that_has_left_may_finish(tmp_path: Path) -> None:
    assert result("saves", tmp_path) == ["member-0", "member-1"]


def test_what_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    error, value = result("unreadable", tmp_path)
    assert error.startswith("UnserializableException") and "no such layer" in error
    assert value.startswith("RaySystemError") and "a value of another process" in value


LOST = ("00" * 28, None, "")


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ActorDiedError(),
        exceptions.ActorUnavailableError("no answer", None),
        exceptions.LocalRayletDiedError(),
        exceptions.NodeDiedError("no answer"),
        exceptions.ObjectLostError(*LOST),
        exceptions.OutOfMemoryError("95 %"),
        exceptions.OwnerDiedError(*LOST),
        exceptions.RaySystemError("the worker did not start"),
        exceptions.WorkerCrashedError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lost_process_or_node_is_a_death(error: exceptions.RayError) -> None:
    assert is_death(error)


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ActorDiedError(exceptions.RayTaskError("__init__", "", ValueError())),
        exceptions.ActorPlacementGroupRemoved(),
        exceptions.ActorUnschedulableError("no such node"),
        exceptions.RayTaskError("work", "", ValueError()),
        exceptions.RayTaskError("work", "", exceptions.OutOfMemoryError("of a task")),
        exceptions.RuntimeEnvSetupError("no such package"),
    ],
    ids=repr,
)
def test_what_the_next_actor_would_meet_too_is_an_error(error: exceptions.RayError) -> None:
    assert not is_death(error)


@pytest.mark.parametrize("kind", sorted(set(errors.__all__) - {"Result"}))
def test_errors_of_pccl_after_which_a_member_may_rejoin_are_deaths(kind: str) -> None:
    cause = getattr(errors, kind).because("allreduce", "")
    wrapped = exceptions.RayTaskError("work", "", cause)
    assert is_death(wrapped) == (kind in ("Evicted", "MasterLost", "Unreachable"))
    assert is_death(wrapped.as_instanceof_cause()) == is_death(wrapped)


def test_members_dial_a_lost_master_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PCCL_RECONNECT_TIMEOUT", raising=False)
    name = "PCCL_RECONNECT_TIMEOUT"
    assert ElasticTrainer(print, members=1).settings[name] == "60"
    assert ElasticTrainer(print, members=1, settings={name: "5"}).settings[name] == "5"
    monkeypatch.setenv(name, "7")
    assert ElasticTrainer(print, members=1).settings[name] == "7"


@pytest.mark.parametrize(
    ("bind", "passed_on"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", True),
        ("10.1.2.3", False),
        ("node-7", False),
    ],
)
def test_only_an_address_that_all_nodes_have_reaches_the_members(
    bind: str, passed_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_BIND", bind)
    assert ("PCCL_BIND" in ElasticTrainer(print, members=1).settings) == passed_on
    chosen = ElasticTrainer(print, members=1, settings={"PCCL_BIND": bind})
    assert chosen.settings["PCCL_BIND"] == bind


def test_an_error_of_the_function_is_raised_with_its_traceback(tmp_path: Path) -> None:
    text = result("wrong", tmp_path)
    assert "ValueError: no such layer" in text
    assert "in wrong" in text and "ray_runs.py" in text


def test_too_many_deaths_end_the_run(tmp_path: Path) -> None:
    sentence, cause = result("dies", tmp_path)
    assert sentence.startswith("member-")
    assert sentence.endswith(" died: 3 deaths in this run, max_failures is 2")
    assert "worker process has died" in cause


def test_ctrl_c_ends_all_members(tmp_path: Path) -> None:
    assert result("interrupted", tmp_path) == [True, True]


def test_the_example_ends_with_the_same_weights_on_all_members(tmp_path: Path) -> None:
    runner = str(RUNS.with_name("run_example.py"))
    lines = [line.split() for line in output([runner, str(EXAMPLE)], tmp_path).splitlines()]
    found = [line for line in lines if line[:1] == ["loss"]]
    assert len(found) == 2  # Ray has two processors
    assert len({line[3] for line in found}) == 1 and all(float(line[1]) < 5 for line in found)


@pytest.mark.parametrize("least", [0, 3])
def test_a_minimum_beyond_the_members_is_refused(least: int) -> None:
    with pytest.raises(InvalidArgument, match=r"min_members must be in 1\.\.2"):
        ElasticTrainer(print, members=2, min_members=least)
