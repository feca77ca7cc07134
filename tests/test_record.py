"""docs/images/run.svg can be embedded in a page, and tools/record.py draws such pictures."""

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/images/run.svg"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("pyte")
    spec = importlib.util.spec_from_file_location("record", ROOT / "tools/record.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "record", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_small_and_needs_nothing_else() -> None:
    text = PICTURE.read_text()
    assert len(text.encode()) <= 300_000
    root = ElementTree.fromstring(text)
    assert not {node.tag for node in root.iter()} & {f"{SVG}script", f"{SVG}foreignObject"}
    links = [value for node in root.iter() for key, value in node.items() if key.endswith("href")]
    assert links and all(link.startswith("#") for link in links)
    assert "url(" not in text and "@import" not in text
    assert "@media(prefers-reduced-motion:reduce){*{animation:none!important}}" in text


def test_the_picture_ends_with_the_same_weights_on_four_peers() -> None:
    root = ElementTree.fromstring(PICTURE.read_text())
    lines = {line.get("id"): "".join(line.itertext()) for line in root.iter(f"{SVG}text")}
    weights = []
    for strip in ("trun", "tother"):
        places = [
            (float(use.get("y", "0")), use.get("href", "#")[1:])
            for group in root.iter(f"{SVG}g")
            if group.get("id") == strip
            for use in group.iter(f"{SVG}use")
        ]
        height = 18 * (16 if strip == "trun" else 6) + 10
        last = max(y for y, _ in places) // height
        shown = " ".join(lines.get(name, "") for y, name in places if y // height == last)
        weights.append(re.findall(r"weights sha256\s*([0-9a-f]{16})", shown))
    assert [len(found) for found in weights] == [3, 1]
    assert len(set(weights[0] + weights[1])) == 1


def screens(record: ModuleType, *times: float) -> list[Any]:
    return [
        (at, record.Screen((((0, f"screen {number}", ("green", True)),), ()), (0, 1)))
        for number, at in enumerate(times)
    ]


def test_pauses_are_cut_and_a_long_run_is_played_faster(record: ModuleType) -> None:
    captions = [(0.0, "begins"), (30.0, "ends")]
    given = record.Recording({"run": screens(record, 0.0, 0.5, 30.0)}, captions, 40.0)
    shown = record.shortened(given)
    assert shown.speed == 1 and shown.cut == pytest.approx(30 - 0.5 - record.PAUSE_SECONDS)
    end = 0.5 + record.PAUSE_SECONDS
    assert [at for at, _ in shown.screens["run"]] == pytest.approx([0, 0.5, end])
    assert [at for at, _ in shown.captions] == pytest.approx([0, end])
    assert shown.seconds == pytest.approx(end + record.END_SECONDS)

    times = [number / 2 for number in range(101)]  # no pause
    shown = record.shortened(record.Recording({"run": screens(record, *times)}, captions, 50.0))
    assert shown.cut == 0 and shown.seconds == pytest.approx(record.LOOP_SECONDS)
    assert shown.speed == pytest.approx(50 / (record.LOOP_SECONDS - record.END_SECONDS))


def test_a_recording_is_drawn_with_all_its_screens(record: ModuleType) -> None:
    both = {"run": screens(record, 0.0, 1.0), "other": screens(record, 0.0)}
    recording = record.Recording(both, [(0.0, "a < b")], 2.0)
    text = record.Drawing(recording, "note").draw()
    ElementTree.fromstring(text)
    assert text.count(">screen 0<") == 1 and text.count(">screen 1<") == 1  # each line once
    assert "a &lt; b" in text
    assert "50%{transform:translateY(" in text
