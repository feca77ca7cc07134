"""The programs of docs/guide/ that name `pccl run -n 2` run as they stand, on two peers.

Each prints its result in its last line, the same on both peers.
"""

import re
from pathlib import Path

import pytest
from together import run_together

import pccl

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guide"
PROGRAM = re.compile(
    r"^```python\n# (\w+\.py): pccl run -n 2 -- python \1\n(.*?)^```", re.DOTALL | re.MULTILINE
)
PROGRAMS = {
    f"{page.stem}/{name}": text
    for page in sorted(GUIDE.glob("*.md"))
    for name, text in PROGRAM.findall(page.read_text())
}
SECRET = "a-secret-of-this-test-0123456789"


def test_every_page_about_moving_has_a_program() -> None:
    pages = {name.partition("/")[0] for name in PROGRAMS}
    assert {page.stem for page in GUIDE.glob("from-*.md")} <= pages


@pytest.mark.timeout(300)  # two processes that import torch on a busy machine
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs_and_both_peers_print_the_same(name: str, tmp_path: Path) -> None:
    text = PROGRAMS[name]
    for word, needed in {"torch": "torch", "jax": "jax", "checkpoint": "safetensors"}.items():
        if re.search(rf"import .*\b{word}\b", text):
            pytest.importorskip(needed)
    script = tmp_path / "program.py"
    script.write_text(text)
    # As `pccl run` starts them.
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as master:
        shown = run_together(
            tmp_path,
            *[[str(script)]] * 2,
            kind="torch" if "torch" in text else "numpy",
            seconds=280,
            PCCL_MASTER=master.address,
            PCCL_SECRET=SECRET,
            PCCL_MIN_PEERS="2",
        )
    last = [lines.splitlines()[-1] for lines in shown]
    assert last[0] == last[1], shown
