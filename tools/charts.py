"""Draws the charts of README and of docs/training-plots.md from benchmarks/results.

    python tools/charts.py                    # all of them, in docs/images
    python tools/charts.py --folder /tmp/x    # somewhere else

Each result file is what a benchmark writes with `--json`; a later run replaces it. `machine` in it
holds the date and the command, which the chart names. Backgrounds are transparent and axes are
mid-grey, so that the charts can be read on a light and on a dark page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
IMAGES = ROOT / "docs/images"

GREY = "#848d97"
COLORS = {"pccl": "#2f81f7", "MPI": "#d29922", "Gloo": "#8957e5", "Gloo, 8 groups": "#b083f0"}
COLORS |= {"torchft": "#db6d28", "hivemind": "#3fb950"}
COLORS |= {"ddp": GREY, "diloco": "#2f81f7", "diloco int8": "#3fb950", "diloco int4": "#a371f7"}
COLORS |= {"async": "#d29922", "streaming": "#f778ba", "sparse": "#f85149", "muloco": "#39c5cf"}
COLORS |= {"without a quorum": "#d29922", "with a quorum": "#2f81f7"}
DASHES = {"diloco int8": "--", "diloco int4": ":"}  # they lie on the line of "diloco"
MIB = 1 << 20

# Chart -> panel -> series -> points (place on the axis or its name, value).
Series = dict[str, list[tuple[Any, float]]]
Points = dict[str, Series]


def one_host(result: dict[str, Any]) -> Points:
    """Seconds of an all-reduce by its size, four ranks."""
    panels = {"shm": "through shared memory", "tcp": "over TCP"}
    points: Points = {}
    for row in result["results"]:
        if row["world"] != 4 or row["arrays"] not in panels:
            continue
        size = row["bytes"]
        where = f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
        for system, name in (("pccl", "pccl"), ("mpi", "MPI"), ("gloo", "Gloo")):
            if system in row["systems"]:
                panel = points.setdefault(panels[row["arrays"]], {})
                panel.setdefault(name, []).append((where, row["systems"][system]["seconds"]))
    return points


def wide_area(result: dict[str, Any]) -> Points:
    """Median seconds of an all-reduce by network, and what the links allow."""
    names = {
        "long_fat": "4 hosts, 500 Mbit/s,\n100 ms, 0.01 % loss",
        "transatlantic": "2 + 2 hosts, 200 Mbit/s,\n82 to 100 ms across",
    }
    series: dict[str, list[tuple[str, float]]] = {}
    for row in result["results"]:
        where = names[row["preset"]]
        for system, name in (("pccl", "pccl"), ("gloo1", "Gloo"), ("gloo8", "Gloo, 8 groups")):
            if system in row["seconds"]:
                seconds = statistics.median(row["seconds"][system])
                series.setdefault(name, []).append((where, seconds))
        series.setdefault("bound", []).append((where, row["bound"]))
    return {"": series}


def killed(result: dict[str, Any]) -> Points:
    """Median seconds after a kill: of the others, and of the process that is started again.

    Libraries whose run ends are left out. The bound is the program without a library.
    """
    places = {
        "kill": "until the other three\nhave finished a step",
        "rejoin": "until a new process in its\nplace has finished a step",
    }
    series: dict[str, list[tuple[str, float]]] = {}
    for row in result["failures"]:
        name = "bound" if row["library"] == "(plain program)" else row["library"]
        for what, where in places.items():
            seconds = [one["seconds"] for one in row[what] if "seconds" in one]
            if seconds:
                series.setdefault(name, []).append((where, statistics.median(seconds)))
    return {"": series}


def training_wide(result: dict[str, Any]) -> Points:
    """Loss of one seed by what it cost: tokens, bytes that a member sent, time."""
    panels: dict[str, Callable[[dict[str, Any]], float]] = {
        "million tokens, all members": lambda line: line["tokens"] / 1e6,
        "MB sent by a member": lambda line: line["tx_bytes"] / 1e6,
        "seconds": lambda line: line["seconds"],
    }
    return {
        panel: {
            method: [(place(line), line["bits"]) for line in runs[0]["curve"] if place(line)]
            for method, runs in result["runs"].items()
        }
        for panel, place in panels.items()
    }


def training_stall(result: dict[str, Any]) -> Points:
    """Tokens that members have taken, and members in the reduction, by time."""
    names = {"stall": "without a quorum", "stall quorum": "with a quorum"}
    panels = {
        "million tokens taken": ("tokens", 1e-6),
        "members in the reduction": ("members", 1),
    }
    return {
        panel: {
            names[method]: [(line["seconds"], line[key] * unit) for line in runs[0]["curve"]]
            for method, runs in result["runs"].items()
        }
        for panel, (key, unit) in panels.items()
    }


def shown(seconds: float) -> str:
    """With two or three digits and a unit."""
    value, unit = (seconds * 1e3, "ms") if seconds < 0.1 else (seconds, "s")
    return f"{value:.3g} {unit}"


def lines(axes: Any, series: Series) -> None:
    for name, points in series.items():
        places = range(len(points))
        seconds = [value for _, value in points]
        wide = 2.4 if name == "pccl" else 1.6
        axes.plot(places, seconds, marker="o", markersize=4, linewidth=wide, label=name,
                  color=COLORS[name])  # fmt: skip
        for place, value in zip(places, seconds, strict=True):
            others = [s[place][1] for other, s in series.items() if other != name]
            below = value <= min(others)
            if not below and value < max(others):
                continue  # between the two others: its label would lie on a line
            side = 0 if place == 0 else 1 if below else -1  # beside the rising lines
            axes.annotate(
                shown(value),
                (place, value),
                (5 * side, -5 if below else 5),
                textcoords="offset points",
                ha={0: "center", 1: "left", -1: "right"}[side],
                va="top" if below else "bottom",
                fontsize=8,
                color=COLORS[name],
            )
    first = next(iter(series.values()))
    axes.set_xticks(range(len(first)), [where for where, _ in first])
    axes.set_yscale("log")
    axes.set_yticks([1e-4, 1e-3, 1e-2, 1e-1], ["0.1 ms", "1 ms", "10 ms", "100 ms"])
    axes.set_ylim(2e-5, 1)
    axes.set_xlim(-0.4, len(first) - 0.4)
    axes.minorticks_off()
    axes.legend(loc="upper left", frameon=False, ncols=3)
    axes.grid(axis="y", color=GREY, alpha=0.25)


def bars(axes: Any, series: Series) -> None:
    bounds = dict(series.get("bound", []))
    series = {name: points for name, points in series.items() if name != "bound"}
    places = list(dict.fromkeys(where for points in series.values() for where, _ in points))
    thick = 0.8 / len(series)
    longest = max(value for points in series.values() for _, value in points)
    for row, (name, points) in enumerate(series.items()):
        for where, value in points:
            y = places.index(where) + (row + 0.5) * thick - 0.4
            axes.barh(y, value, thick * 0.82, color=COLORS[name])
            axes.text(value + longest / 90, y, f"{name}: {shown(value)}", va="center", fontsize=9,
                      fontweight="bold" if name == "pccl" else "normal")  # fmt: skip
    for where, value in bounds.items():
        y = places.index(where)
        axes.plot([value, value], [y - 0.46, y + 0.46], color=GREY, linestyle=":", linewidth=1.6)
    axes.set_yticks(range(len(places)), places)
    axes.set_ylim(len(places) - 0.45, -0.55)
    axes.set_xlim(0, longest * 1.24)
    axes.xaxis.set_major_formatter("{x:g} s")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GREY, alpha=0.25)


def curves(axes: Any, series: Series) -> None:
    """Lines; a whole number holds since the point before it, and is drawn as a step."""
    for name, points in series.items():
        places, values = zip(*points, strict=True)
        whole = all(isinstance(value, int) for value in values)
        axes.plot(
            places,
            values,
            linewidth=1.6,
            linestyle=DASHES.get(name, "-"),
            drawstyle="steps-pre" if whole else "default",
            label=name,
            color=COLORS[name],
        )
        if whole:
            axes.set_yticks(range(max(values) + 2))
    axes.grid(color=GREY, alpha=0.25)


def logarithmic_curves(axes: Any, series: Series) -> None:
    curves(axes, series)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")


class Chart(NamedTuple):
    points: Callable[[dict[str, Any]], Points]
    draw: Callable[[Any, Series], None]  # into the axes of a panel
    size: tuple[float, float]  # inches
    title: str
    note: str
    value: str = ""  # what the vertical axes show; with it, panels' names stand below them
    place: str = ""  # what the horizontal axes show, below panels with names above them
    one_scale: bool = True  # the panels' vertical axes are the same


# By the names of their files.
CHARTS = {
    "one_host": Chart(
        one_host,
        lines,
        (8.0, 3.1),
        "Four ranks on one host: time of an all-reduce",
        "Lower is better; both scales are logarithmic. Sum of float32, two cores.",
    ),
    "wide_area": Chart(
        wide_area,
        bars,
        (8.0, 3.1),
        "64 MiB over a wide area: time of an all-reduce",
        "Lower is better. Dotted: what the links allow. Emulated networks.",
    ),
    "killed": Chart(
        killed,
        bars,
        (8.0, 2.6),
        "One of four processes is killed, and started again",
        "Lower is better. Dotted: the program without a library. With Gloo and MPI the run ends.",
    ),
    "training_wide": Chart(
        training_wide,
        logarithmic_curves,
        (8.0, 3.6),
        "Loss by what it cost: four members, 50 ms, 100 Mbit/s",
        "Lower is better; the horizontal scales are logarithmic. A GPT of a million parameters, one seed.",
        value="held-out bits per byte",
    ),
    "training_stall": Chart(
        training_stall,
        curves,
        (8.0, 3.1),
        "One of four members stalls twice for 20 s",
        "DiLoCo in async, one seed. The stalls begin at a quarter and at half of the tokens.",
        place="seconds",
        one_scale=False,
    ),
}


def draw(name: str, result: dict[str, Any], file: Path) -> None:
    """Draws one chart. The file's description holds the points as JSON."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart = CHARTS[name]
    points = chart.points(result)
    about = result["machine"]
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": GREY,
        "axes.edgecolor": GREY,
        "axes.labelcolor": GREY,
        "axes.titlesize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": GREY,
        "ytick.color": GREY,
    }
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(
            1,
            len(points),
            figsize=chart.size,
            squeeze=False,
            sharey=chart.one_scale,
            layout="constrained",
        )
        for axes, (panel, series) in zip(panels[0], points.items(), strict=True):
            chart.draw(axes, series)
            if chart.value:
                axes.set_xlabel(panel)
            else:
                axes.set_title(panel)
                axes.set_xlabel(chart.place)
        panels[0][0].set_ylabel(chart.value)
        if chart.draw in (curves, logarithmic_curves):
            named = panels[0][0].get_legend_handles_labels()
            figure.legend(*named, loc="outside right upper", frameon=False)
        figure.suptitle(chart.title, fontsize=11, fontweight="bold")
        words = f"{about['date']}: {about['command']}"
        command = textwrap.fill(words, 125, break_on_hyphens=False)
        figure.supxlabel(f"{chart.note}\n{command}", fontsize=8)
        metadata = {"Date": None, "Title": chart.title, "Description": json.dumps(points)}
        figure.savefig(file, transparent=True, metadata=metadata)
        pyplot.close(figure)


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where the charts go")
    folder = parser.parse_args().folder
    for name in CHARTS:
        draw(name, load(name), folder / f"{name}.svg")
        print(folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
