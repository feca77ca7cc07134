"""The goals of the benchmarks of the wide-area lab; and the smallest run of those that need it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lab
import pytest

WAN = Path(lab.__file__).resolve().parent

MIB = 1 << 20


@pytest.fixture(scope="module")
def wan_run() -> ModuleType:
    """benchmarks/wan/run.py, which adds benchmarks/ to sys.path. Tests have modules named alike."""
    spec = importlib.util.spec_from_file_location("wan_run", WAN / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = sys.path.copy()
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def result_of(**changes: Any) -> dict[str, Any]:
    plain = {"preset": "long_line", "rates": 1.0, "secret": False, "bytes": 128 * MIB}
    plain |= {"bound": 4.0, "idle": 0.0, "quantize": None, "dtype": "float32"}
    return plain | {"first": {"pccl": 8.0}, "seconds": {"pccl": [4.0, 4.0]}} | changes


def test_the_first_call_counts_in_the_goal_of_bulk(wan_run: ModuleType) -> None:
    [goal] = wan_run.goals(result_of())
    assert goal["figure"] == 4.0 * 3 / 16 and goal["count"] == 3
    assert goal["at_least"] == 0.9 and not goal["reached"]


def test_int8_is_compared_with_float32_of_the_same_run(wan_run: ModuleType) -> None:
    both = {"pccl": [1.0, 1.0], "plain": [4.0, 4.0]}
    [goal] = wan_run.goals(
        result_of(quantize="int8", seconds=both, first={"pccl": 2.0, "plain": 7.0})
    )
    assert goal["figure"] == 15 / 4 and goal["at_least"] == 3.5 and goal["reached"]
    assert wan_run.goals(result_of(quantize="int8")) == []


def test_rested_calls_have_a_goal_with_and_without_a_warning(wan_run: ModuleType) -> None:
    seconds = {"pccl": [2.0, 2.0], "prepared": [1.0, 1.3]}
    goals = wan_run.goals(result_of(bytes=32 * MIB, idle=60.0, bound=1.0, seconds=seconds))
    assert [goal["reached"] for goal in goals] == [False, True]
    assert all(goal["at_least"] == 0.75 for goal in goals)


@pytest.mark.parametrize("changes", [{"preset": "europe"}, {"rates": 0.5}, {"bytes": MIB}])
def test_other_rows_have_no_goal(changes: dict[str, Any], wan_run: ModuleType) -> None:
    assert wan_run.goals(result_of(**changes)) == []


def shown(tmp_path: Path, program: str, *options: str) -> tuple[dict[str, Any], str]:
    file = tmp_path / "results.json"
    command = [sys.executable, str(WAN / program), *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


needs_lab = pytest.mark.skipif(lab.why_not() is not None, reason=str(lab.why_not()))


@pytest.mark.root
@needs_lab
def test_steps_with_a_cut_are_measured(tmp_path: Path) -> None:
    options = ["--mb", "1", "--steps", "1", "--cuts", "1", "--seconds", "0.3"]
    found, output = shown(tmp_path, "cut.py", *options)
    [cut] = found["cuts"]
    assert cut["pair"] == [0, 1] and cut["step"] > 0 and cut["next"] > 0 and cut["attempts"] == 1
    [goal] = found["goals"]
    assert goal["at_most"] == found["step"] + 0.3 + 1 and goal["figure"] >= cut["step"]
    assert "goal: worst step of 1 MiB, long_line, a link cut for 0.3 s" in output


@pytest.mark.root
@needs_lab
def test_float32_takes_turns_with_fewer_bits(tmp_path: Path) -> None:
    options = ["--preset", "long_line", "--no-gloo", "--mb", "0.25", "--repeats", "1"]
    found, _ = shown(tmp_path, "run.py", *options, "--quantize", "int8", "--plain")
    [row] = found["results"]
    assert row["seconds"].keys() == {"pccl", "plain"}
    assert found["goals"] == []  # of this size


@pytest.mark.root
@needs_lab
def test_a_large_group_is_compared_with_the_hops_of_a_ring(tmp_path: Path) -> None:
    found, _ = shown(tmp_path, "large_group.py", "--members", "3", "--delay", "1", "--calls", "1")
    assert [goal["at_most"] for goal in found["goals"]] == [3]  # of the four hops
