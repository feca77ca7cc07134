"""The charts in docs/images are drawn from benchmarks/results."""

import copy
import importlib.util
import json
import re
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("one_host", "wide_area", "killed", "training_wide", "training_stall")


@pytest.fixture(scope="module")
def charts() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("charts", ROOT / "tools/charts.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data(file: Path) -> tuple[Any, list[str]]:
    """The points that a chart was drawn from, and every text on it."""
    svg = file.read_text()
    described = re.search(r"<dc:description>(.*?)</dc:description>", svg, re.DOTALL)
    assert described
    texts = [" ".join(unescape(text).split()) for text in re.findall(r"<text[^>]*>([^<]*)<", svg)]
    return json.loads(unescape(described[1])), texts


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_shows_what_its_result_file_holds(
    name: str, charts: ModuleType, tmp_path: Path
) -> None:
    result = charts.load(name)
    drawn = tmp_path / "again.svg"
    charts.draw(name, result, drawn)
    points, texts = data(drawn)
    assert data(ROOT / f"docs/images/{name}.svg") == (points, texts), "run tools/charts.py"
    about = result["machine"]
    assert f"{about['date']}: {about['command']}" in " ".join(texts)  # on several lines


def test_another_result_gives_another_chart(charts: ModuleType, tmp_path: Path) -> None:
    result = copy.deepcopy(charts.load("killed"))
    pccl = next(row for row in result["failures"] if row["library"] == "pccl")
    pccl["kill"] = [{"seconds": seconds} for seconds in (0.5, 0.6, 0.7)]
    charts.draw("killed", result, tmp_path / "killed.svg")
    points, texts = data(tmp_path / "killed.svg")
    assert points[""]["pccl"][0] == ["until the other three\nhave finished a step", 0.6]
    assert "pccl: 0.6 s" in texts


def test_curves_go_through_all_points_and_whole_numbers_are_steps(charts: ModuleType) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    series = {"diloco": [(1.0, 2.5), (2.0, 2.25), (4.0, 2.0)], "ddp": [(1.0, 4), (4.0, 3)]}
    charts.curves(axes, series)
    drawn = {line.get_label(): [tuple(place) for place in line.get_xydata()] for line in axes.lines}
    assert drawn == series
    assert [line.get_drawstyle() for line in axes.lines] == ["default", "steps-pre"]


def test_libraries_whose_run_ends_have_no_bar(charts: ModuleType) -> None:
    series = charts.killed(charts.load("killed"))[""]
    assert set(series) == {"bound", "pccl", "torchft", "hivemind"}


def test_the_tables_in_the_documents_have_the_same_numbers(charts: ModuleType) -> None:
    table = (ROOT / "docs/benchmarks.md").read_text()
    for arrays, panel in (("shm", "through shared memory"), ("tcp", "over TCP")):
        series = charts.one_host(charts.load("one_host"))[panel]
        for place, (size, _) in enumerate(series["pccl"]):
            times = [f"{1e3 * series[name][place][1]:.3g}" for name in ("pccl", "MPI", "Gloo")]
            assert f"| {arrays} | 4 | {size} | {' | '.join(times)} |" in table
    for method, (run,) in charts.load("training_wide")["runs"].items():
        last = run["curve"][-1]
        row = [f"{run['bytes'] / 1e6:,.{1 if run['bytes'] < 1e8 else 0}f}"]
        row += [f"{run['wire'] / 1e6:,.{1 if run['wire'] < 1e7 else 0}f}"]
        row += [f"{last['seconds']:.0f}", f"{run['waited']:.0f}"]
        loss = r"[^|]*\|[^|]*\|[^|]*"  # of three seeds
        assert re.search(rf"\| {method}{loss}\| {re.escape(' | '.join(row))} \|", table), method
