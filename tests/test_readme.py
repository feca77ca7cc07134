"""The programs in README.md run as they stand, on two peers, which end with the same bytes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAMS: dict[str, str] = dict(BLOCK.findall(README.read_text()))
# An expression with the result of each program, and the module that it needs.
RESULTS = {
    "train.py": ("state['w']", "numpy"),
    "diloco.py": ("*[p.detach() for p in model.parameters()]", "torch"),
    "jax_jit.py": ("state['w']", "jax"),
}


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_every_program_is_run() -> None:
    assert PROGRAMS.keys() == RESULTS.keys()


@pytest.mark.timeout(300)  # two processes that import torch on a busy machine
@pytest.mark.parametrize("name", RESULTS)
def test_it_runs_and_all_peers_end_with_the_same(name: str, tmp_path: Path) -> None:
    result, needed = RESULTS[name]
    pytest.importorskip(needed)
    told = (
        f"import numpy as np\nprint('end', *[np.asarray(a).tobytes().hex() for a in ({result},)])\n"
    )
    script = tmp_path / name
    script.write_text(PROGRAMS[name] + told)
    done = subprocess.run(
        [sys.executable, "-m", "pccl", "run", "-n", "2", "--", sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ends = re.findall(r"^\[\d\] end (.+)$", done.stdout, re.MULTILINE)
    assert len(ends) == 2 and len(set(ends)) == 1
    assert not re.fullmatch(r"[0 ]+", ends[0])  # it has moved
