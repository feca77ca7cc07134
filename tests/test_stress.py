"""tests/stress.py as a test.

PCCL_STRESS_MINUTES (default 0.3), PCCL_STRESS_PEERS (8) and PCCL_STRESS_SEED (1) are its settings.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest


def _minutes() -> float:
    return float(os.environ.get("PCCL_STRESS_MINUTES", "0.3"))


def churn(*more: str) -> dict[str, Any]:
    """The report of a run of tests/stress.py."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, str(Path(__file__).with_name("stress.py")), "--json", str(path)]
        command += ["--minutes", str(_minutes()), "--interval", "0.2-1.0"]
        command += ["--max-peers", os.environ.get("PCCL_STRESS_PEERS", "8")]
        command += ["--seed", os.environ.get("PCCL_STRESS_SEED", "1"), *more]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        report: dict[str, Any] = json.loads(path.read_text())
    assert report["violations"] == []
    assert report["steps"] > 10
    return report


# Above what it takes by itself in the end: the watchdog's minute, one to get in step, one to stop.
@pytest.mark.timeout(60 * _minutes() + 240)
def test_peers_that_come_and_go_agree_on_every_byte_of_every_step() -> None:
    report = churn()
    # Something happened, and the run outlived it.
    assert report["kills"] > 0 and report["joins"] > 2 and report["garbage"] > 0


@pytest.mark.timeout(60 * _minutes() + 240)
def test_peers_that_come_and_go_outlive_their_masters() -> None:
    report = churn("--masters", "3", "--master-interval", "4")
    assert report["kills"] > 0 and report["joins"] > 2 and report["garbage"] > 0
    assert report["masters_killed"] > 1
