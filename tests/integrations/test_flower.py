"""Flower: silos of several machines, of which one is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launches import LIMIT, example

pytest.importorskip("flwr")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network namespace")
def test_a_silo_goes_on_with_the_machines_that_are_left(tmp_path: Path) -> None:
    runner = str(Path(__file__).with_name("flower_run.py"))
    done = subprocess.run(
        ["unshare", "-n", sys.executable, runner, str(tmp_path), example("flower_silo")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        cwd=tmp_path,  # not the source tree, which has no extension
    )
    assert done.returncode == 0, done.stdout
    found = re.search(r"ends with (.*) members (.*)", done.stdout)
    assert found, done.stdout
    assert [float(one) for one in found[1].split()] == pytest.approx([1.0] * 4, abs=0.02)
    # Weighted by the silos' examples: 3 machines with the one that Flower starts, and 2; then 2, 2.
    first, *_, last = (float(one) for one in found[2].split())
    assert (first, last) == pytest.approx(((3 * 3 + 2 * 2) / 5, 2.0))
