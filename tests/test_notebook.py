"""The notebook runs in Jupyter as it stands, and a membership shows as a table there."""

import io
import shutil
from pathlib import Path
from typing import Any

import pytest

import pccl

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples/notebook.ipynb"


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The notebook after all of its cells have run in a kernel."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")  # rich draws its bars with it
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    shutil.copy(NOTEBOOK, tmp_path)
    cells = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(cells, timeout=60, kernel_name="python3", resources=folder).execute()
    return cells


def test_the_notebook_loses_and_gains_a_peer(notebook: Any) -> None:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    tables = [output.data.get("text/html", "") for output in outputs if "data" in output]
    sizes = [table.count("<tr>") - 1 for table in tables if table.startswith("<table>")]
    assert sizes == [3, 2, 3]
    text = "".join(output.get("text", "") for output in outputs)
    assert "identical on 3 peers" in text
    bars = [output for output in outputs if "widget-view" in str(output.get("data"))]
    assert len(bars) == 2


def test_the_notebook_is_stored_with_what_it_printed() -> None:
    text = NOTEBOOK.read_text()
    assert "identical on 3 peers" in text and "<table>" in text
    assert "widget-view" not in text  # pages without a kernel cannot show it


MEMBERSHIP = pccl.Membership(7, 1, 2, ("a" * 32, "b" * 32), 0, ("<left>", "right"))


def test_a_membership_is_a_table_in_html() -> None:
    assert MEMBERSHIP._repr_html_() == (
        "<table><caption>group 0, epoch 7: 2 members</caption>"
        "<tr><th>rank</th><th>peer</th><th>replica</th></tr>"
        "<tr><td>0</td><td>aaaaaaaa</td><td>&lt;left&gt;</td></tr>"
        "<tr><th>1</th><th>bbbbbbbb</th><th>right</th></tr></table>"
    )
    waiting = pccl.Membership(0, -1, 1, ("c" * 32,), 3)
    assert "group 3, epoch 0: 1 member; this peer waits to be let in" in waiting._repr_html_()


def test_a_membership_is_a_table_of_rich() -> None:
    from rich.console import Console

    shown = io.StringIO()
    Console(file=shown, width=60).print(MEMBERSHIP)
    lines = shown.getvalue().splitlines()
    assert "group 0, epoch 7: 2 members" in lines[0]
    assert any("aaaaaaaa" in line and "<left>" in line for line in lines)
