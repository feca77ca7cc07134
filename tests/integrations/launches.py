"""Starts programs of this folder and examples, and reads what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("run_example.py")
LIMIT = 240  # seconds


def example(name: str) -> str:
    return str(ROOT / "examples" / "integrations" / f"{name}.py")


def run(command: list[str], folder: Path, *, fails: bool = False, **env: str) -> str:
    """Returns what the command prints, errors included. It must end well, or fail."""
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PCCL_BIND": "127.0.0.1"}
    quiet["RAY_USAGE_STATS_ENABLED"] = "0"
    done = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        cwd=folder,  # not the source tree, which has no extension
        env={**os.environ, **quiet, "DIES_ONCE": str(folder / "died"), **env},
    )
    assert (done.returncode != 0) is fails, done.stdout
    assert (folder / "died").exists() is ("DIES_AT" in env), done.stdout
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^(?:\[\d\] )?loss (\S+)", output, re.MULTILINE)]


def members(*program: str, folder: Path, restarts: int = 0, **env: str) -> str:
    """Two members of an elastic run, as `run`."""
    launcher = ["-m", "pccl", "run", "-n", "2", "--elastic", "--restarts", str(restarts), "--"]
    return run([*launcher, sys.executable, str(RUNNER), *program], folder, **env)
