"""The examples run as they are, as real processes, and do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(folder: Path, *command: str, status: int = 0) -> str:
    """Runs Python with these arguments in `folder`, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert not done.stderr or status, done.stderr
    return done.stdout


def launch(folder: Path, ranks: int, example: str) -> str:
    return run(
        folder, "-m", "pccl", "run", "-n", str(ranks), "--", sys.executable, str(EXAMPLES / example)
    )


def test_hello_adds_up_what_all_peers_gave(tmp_path: Path) -> None:
    lines = launch(tmp_path, 3, "hello.py").splitlines()
    assert sorted(line.split("] ", 1)[1] for line in lines) == [
        f"rank {rank} of 3 gave [{rank + 1}. {rank + 1}. {rank + 1}.] and got [6. 6. 6.]"
        for rank in range(3)
    ]


def test_level1_goes_on_when_a_peer_vanishes(tmp_path: Path) -> None:
    lines = launch(tmp_path, 3, "level1.py")
    for peer in (0, 1):
        for step in range(6):
            mean, peers = ("2.000", 3) if step < 3 else ("1.500", 2)
            assert f"peer {peer}, step {step}: mean {mean} over {peers} peers" in lines
    assert "peer 2 vanishes" in lines
    assert "peer 2, step 3" not in lines


def test_digits_survives_a_killed_peer_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    shown = run(tmp_path, str(EXAMPLES / "digits.py"), "--steps", "100", "--svg", "digits.svg")
    assert re.search(r"^yes  peer 1 was killed at step 5\d", shown, re.MULTILINE), shown
    assert "yes  their weights are bit-identical" in shown
    assert "yes  held-out accuracy 9" in shown
    assert (tmp_path / "digits.png").stat().st_size > 1000
    assert "SIGKILL" in (tmp_path / "digits.svg").read_text()


def test_digits_fails_when_it_has_not_learned(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    shown = run(tmp_path, str(EXAMPLES / "digits.py"), "--steps", "4", status=1)
    assert re.search(r"^NO   held-out accuracy", shown, re.MULTILINE), shown
