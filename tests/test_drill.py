"""The short form of benchmarks/drill.py: every fault ends well, and the status shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DRILL = Path(__file__).resolve().parent.parent / "benchmarks" / "drill.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "least"),
    [
        (["--short", "--masters", "1"], 8),
        (["--masters", "3", "--loopback", "--only", "master that serves is"], 2),
    ],
)
def test_a_run_becomes_well_after_each_kind_of_fault(
    tmp_path: Path, options: list[str], least: int
) -> None:
    report = tmp_path / "drill.json"
    done = subprocess.run(
        [
            sys.executable,
            str(DRILL),
            *options,
            "--peers",
            "4",
            "--slack",
            "5",
            "--json",
            str(report),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(report.read_text())
    assert len(results) >= least
    assert all(result["said"] for result in results), results
