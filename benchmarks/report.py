"""The report of a benchmark: sizes, the machine, medians, tables, goals, the plot."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from processes import Block

import pccl

KIB, MIB = 1 << 10, 1 << 20
NAMES = {"pccl": "pccl", "mpi": "MPI", "gloo": "Gloo", "bound": "bound", "agreed": "agreed"}
LINES = {"bound": "--", "agreed": ":"}  # of the bare program, in the plot


def size_name(size: int) -> str:
    if size % MIB == 0:
        return f"{size // MIB} MiB"
    return f"{size // KIB} KiB" if size % KIB == 0 else f"{size} B"


def parse_sizes(text: str) -> list[int]:
    units = {"kib": KIB, "mib": MIB, "gib": 1 << 30, "b": 1}
    sizes = []
    for word in text.replace(" ", "").lower().split(","):
        unit = next((unit for unit in units if word.endswith(unit)), "")
        size = int(word.removesuffix(unit)) * units.get(unit, 1)
        if size < 4 or size % 4:
            raise argparse.ArgumentTypeError(f"{word}: a size is a multiple of 4 bytes")
        sizes.append(size)
    return sizes


def parse_worlds(text: str) -> list[int]:
    worlds = [int(word) for word in text.split(",")]
    if min(worlds) < 2:
        raise argparse.ArgumentTypeError("a world has at least 2 ranks")
    return worlds


def machine(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Describes the machine and the run. tools/charts.py shows the date and the command."""
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    about = {
        "date": str(datetime.date.today()),
        "command": shlex.join(["python", *sys.argv]),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pccl": pccl.__version__,
        "load_before": os.getloadavg()[0],
    }
    return about | {package: importlib.metadata.version(package) for package in packages}


def announce(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Prints what `machine` returns, and returns it."""
    about = machine(packages)
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    return about


def write_results(path: Path | None, about: dict[str, Any], **found: Any) -> None:
    """Writes a file of results for tools/charts.py, if a path is given."""
    if path is not None:
        path.write_text(json.dumps({"machine": about, **found}, indent=1) + "\n")


def warnings(about: dict[str, Any], world: int) -> list[str]:
    """Returns warnings about the conditions of the measurement."""
    found = []
    if about["load_before"] > 0.3 * about["cores"]:
        found.append(
            f"the machine is busy (load {about['load_before']:.1f}): do not trust these numbers"
        )
    if world > about["cores"]:
        found.append(
            f"{world} ranks share {about['cores']} cores: this is then a measure of CPU cost"
        )
    return found


def percentile(numbers: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return sorted(numbers)[max(0, math.ceil(share * len(numbers)) - 1)]


def summarise(blocks: Sequence[Block], size: int) -> dict[str, Any]:
    """Returns each figure of its slowest rank, and the CPU seconds of all ranks per 10^9 bytes of
    one rank's array."""
    ranks = [
        [second for block in parts for second in block]
        for parts in zip(*(block.seconds for block in blocks), strict=True)
    ]
    medians = [max(statistics.median(rank) for rank in block.seconds) for block in blocks]
    gigabytes = size * len(ranks[0]) / 1e9
    return {
        "seconds": max(statistics.median(rank) for rank in ranks),
        "p99_seconds": max(percentile(rank, 0.99) for rank in ranks),
        "least_seconds": max(map(min, ranks)),
        "calls": len(ranks[0]),
        "cpu_seconds_per_gb": sum(block.cpu for block in blocks) / gigabytes,
        "master_cpu_seconds_per_gb": sum(block.master_cpu for block in blocks) / gigabytes,
        "spread": max(medians) / min(medians),
        "blocks": medians,
    }


# ---- tables
# ------------------------------------------------------------------------------


class Table:
    """Rows of Markdown, printed as they come."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title = title
        self.lines = [row(columns), "|" + "---|" * len(columns)]
        print(f"\n{title}\n", *self.lines, sep="\n", flush=True)

    def add(self, cells: Sequence[str]) -> None:
        self.lines.append(row(cells))
        print(self.lines[-1], flush=True)

    def markdown(self) -> str:
        return "\n".join([self.title, "", *self.lines, ""])


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def ratio(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}x"


def main_columns(systems: Sequence[str]) -> list[str]:
    names = [NAMES[system] for system in systems]
    columns = ["arrays", "ranks", "array", *(f"{name} ms" for name in names)]
    columns += ["faster / pccl", "of bound", "of agreed"]
    return [*columns, "CPU s/GB: " + names[0], *names[1:], "spread", "calls"]


def main_row(result: dict[str, Any], systems: Sequence[str]) -> list[str]:
    have = result["systems"]
    found = [have.get(system) for system in systems]
    shares = (result["bound_share"], result["agreed_share"])
    return [
        result["arrays"],
        str(result["world"]),
        size_name(result["bytes"]),
        *(milliseconds(one["seconds"]) if one else "-" for one in found),
        ratio(result["faster"]),
        *("-" if share is None else f"{share:.0%}" for share in shares),
        *(f"{one['cpu_seconds_per_gb']:.3g}" if one else "-" for one in found),
        " / ".join(f"{one['spread']:.2f}" if one else "-" for one in found),
        " / ".join(f"{one['calls']}" if one else "-" for one in found),
    ]


# ---- goals
# ------------------------------------------------------------------------------


def goal(
    name: str,
    figure: float,
    parts: Sequence[float],
    show: Callable[[float], str],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> dict[str, Any]:
    """Prints a goal, its figure, their spread, and whether the figure reaches the goal.

    Args:
        name: What is measured, with all that the goal depends on.
        figure: What is compared with the goal.
        parts: The figure of each call, block or round; the spread is that of their quartiles.
        show: Writes a figure with its unit.

    Returns:
        The same for a file of results.
    """
    target = at_least if at_least is not None else at_most
    assert target is not None
    reached = figure >= target if at_least is not None else figure <= target
    low, high = quartiles(parts)
    word = "at least" if at_least is not None else "at most"
    print(
        f"goal: {name}: {word} {show(target)}; {show(figure)} (quartiles {show(low)} to "
        f"{show(high)} of {len(parts)}): {'reached' if reached else 'not reached'}",
        flush=True,
    )
    return {
        "goal": name,
        "at_least" if at_least is not None else "at_most": target,
        "figure": figure,
        "quartiles": [low, high],
        "count": len(parts),
        "reached": reached,
    }


def quartiles(numbers: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of one number, that number."""
    if len(numbers) < 2:
        return numbers[0], numbers[0]
    low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, high


def by_block(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Ratios of blocks that followed each other."""
    return [a / b for a, b in zip(above, below, strict=True)]


def percent(share: float) -> str:
    return f"{share:.1%}"


def factor(number: float) -> str:
    return f"{number:.3g}x"


def in_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


# ---- the plot
# ------------------------------------------------------------------------------


def plot(results: Sequence[dict[str, Any]], path: Path) -> bool:
    """Speed by size, a panel for each kind of arrays and number of ranks; False without
    matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(result["arrays"] for result in results))
    worlds = list(dict.fromkeys(result["world"] for result in results))
    figure, panels = pyplot.subplots(
        len(kinds),
        len(worlds),
        figsize=(5 * len(worlds), 3.4 * len(kinds)),
        squeeze=False,
        layout="constrained",
    )
    for line, kind in zip(panels, kinds, strict=True):
        for panel, world in zip(line, worlds, strict=True):
            rows = [r for r in results if (r["arrays"], r["world"]) == (kind, world)]
            for system, name in NAMES.items():
                points = [
                    (r["bytes"], r["bytes"] / 1e9 / r["systems"][system]["seconds"])
                    for r in rows
                    if system in r["systems"]
                ]
                if points:
                    style = {"linestyle": LINES[system], "color": "gray"} if system in LINES else {}
                    panel.plot(*zip(*points, strict=True), marker=".", label=name, **style)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_title(f"{kind}, {world} ranks")
            panel.set_xticks(ticks := sorted({r["bytes"] for r in rows}))
            panel.set_xticklabels([size_name(tick) for tick in ticks], rotation=30, ha="right")
            panel.set_ylabel("10⁹ bytes of array per second")
            panel.grid(alpha=0.3)
            panel.legend()
    figure.savefig(path)
    return True
