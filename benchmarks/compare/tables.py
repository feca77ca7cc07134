"""The report of the comparison: statistics, lines that differ, tables. No processes here."""

from __future__ import annotations

import difflib
import math
import re
import statistics
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
UNITS = {"b": 1, "kib": KIB, "mib": MIB}


def parse_size(text: str) -> int:
    """Returns the bytes of "4B", "1MiB" or a number; a multiple of 4."""
    word = text.replace(" ", "").lower()
    unit = next((unit for unit in ("kib", "mib", "b") if word.endswith(unit)), "")
    size = int(word.removesuffix(unit)) * UNITS.get(unit, 1)
    if size < 4 or size % 4:
        raise ValueError(f"{text}: a size is a multiple of 4 bytes")
    return size


def size_name(size: int) -> str:
    if size % MIB == 0:
        return f"{size // MIB} MiB"
    return f"{size // KIB} KiB" if size % KIB == 0 else f"{size} B"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and count."""
    ordered = sorted(values)
    low, median, high = (
        statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    )
    return {"median": median, "low": low, "high": high, "count": len(ordered)}


def seconds(value: float) -> str:
    """Three digits and a unit."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value < limit:
            scaled = value * factor
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{value:.0f} s" if value >= 100 else f"{value:.3g} s"


def with_spread(values: Sequence[float]) -> str:
    """The median, and the quartiles (few values: the least and the greatest) in parentheses."""
    if len(values) == 1:
        return seconds(values[0])
    found = spread(values)
    low, high = (found["low"], found["high"]) if len(values) > 4 else (min(values), max(values))
    return f"{seconds(found['median'])} ({seconds(low)} to {seconds(high)})"


def differing_lines(plain: str, changed: str) -> int:
    """Returns how many lines of `changed` are not in `plain`, plus those of `plain` that are gone
    without a successor. Blank lines and the module's docstring do not count."""
    sides = []
    for text in (plain, changed):
        body = text.partition('"""\n')[2] if text.startswith('"""') else text
        sides.append([line for line in body.splitlines() if line.strip()])
    matcher = difflib.SequenceMatcher(None, *sides, autojunk=False)
    return sum(
        max(old_end - old, new_end - new)
        for kind, old, old_end, new, new_end in matcher.get_opcodes()
        if kind != "equal"
    )


def program_lines(folder: Path) -> dict[str, int]:
    """Returns the differing lines of each `with_NAME.py`, by NAME."""
    plain = (folder / "plain.py").read_text()
    return {
        path.stem.removeprefix("with_"): differing_lines(plain, path.read_text())
        for path in sorted(folder.glob("with_*.py"))
    }


def shards(low: float, high: float, world: int) -> frozenset[int]:
    """Returns the shards whose mean a gradient is, from its least and greatest element; shard s
    adds 2 ** s. Empty if the elements differ or no mean fits."""
    if not math.isfinite(low) or not math.isclose(low, high, rel_tol=1e-4):
        return frozenset()
    for count in range(1, world + 1):
        for some in combinations(range(world), count):
            if math.isclose(low, sum(2.0**shard for shard in some) / count, rel_tol=1e-3):
                return frozenset(some)
    return frozenset()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    ]


def brief(reason: str) -> str:
    """The first sentence of a program's last words, without the place in its sources."""
    text = re.sub(r"\[[^\] ]*/[^\] ]*\] *|^\[rank\d+\]: *", "", reason)
    text = text.partition(". ")[0].strip(" .")
    return text if len(text) <= 110 else text[:107] + "..."


def outcome(found: Sequence[dict[str, Any]]) -> str:
    """Describes what happened in the repetitions of one experiment."""
    if not found:
        return "not measured"
    parts = []
    times = [one["seconds"] for one in found if "seconds" in one]
    if times:
        parts.append(with_spread(times))
    pauses = [one["pause"] for one in found if "pause" in one]
    if pauses:
        parts.append(with_spread(pauses))
    ended = [one for one in found if "ended" in one]
    if ended:
        after = with_spread([one["ended"] for one in ended])
        parts.append(f"run stops after {after} ({brief(ended[-1].get('why', ''))})")
    if hangs := [one["hangs"] for one in found if "hangs" in one]:
        parts.append(f"hangs > {hangs[0]:.0f} s")
    if goes_on := [one["goes_on"] for one in found if "goes_on" in one]:
        parts.append(f"goes on (watched for {goes_on[0]:.0f} s)")
    if missing := [one["missing"] for one in found if "missing" in one]:
        parts.append(missing[-1])
    if any("none" in one for one in found):
        parts.append("-")
    if mixed := sum(one.get("mixed", 0) for one in found):
        parts.append(f"{mixed} steps mixed the means of different members")
    count = f" in {len(times)} of {len(found)}" if times and len(times) < len(found) else ""
    return "; ".join(parts) + count


def reduce_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for row in result["allreduce"]:
        cells = [row["library"], row["path"]]
        for size in result["sizes"]:
            values = row["seconds"].get(str(size), [])
            text = with_spread(values) if values else ""
            if row["partial"].get(str(size)):
                text += f"; {row['partial'][str(size)]} of {len(values)} calls averaged fewer ranks"
            cells.append(text or row.get("missing", "not measured"))
        rows.append(cells)
    return rows


def failure_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for row in result["failures"]:
        joins = row["rejoin"]
        split = ""
        if times := [one for one in joins if "seconds" in one]:
            imports = statistics.median(one["imports"] for one in times)
            rest = statistics.median(one["rest"] for one in times)
            split = f": imports {seconds(imports)}, the rest {seconds(rest)}"
        cells = [row["library"], outcome(row["kill"]), outcome(joins) + split]
        for kind in ("restarted", "gone"):
            cells.append(outcome(row[kind]))
        rows.append(cells)
    return rows


def markdown(result: dict[str, Any]) -> str:
    """The whole report."""
    about = result["about"]
    versions = ", ".join(
        f"{name} {entry['version'] or 'missing (' + entry['missing'] + ')'}"
        for name, entry in result["libraries"].items()
    )
    lines = [
        f"Measured on {about['date']} with `{about['command']}` on {about['cores']} cores of "
        f"{about['cpu']}, Linux {about['kernel']}, Python {about['python']}; load before the run "
        f"{about['load_before']:.1f}, after it {about['load_after']:.1f}; "
        f"{about['seconds']:.0f} s. {versions}. Four ranks. In parentheses: quartiles, or least and "
        "greatest of up to four values.",
        "",
        *table(
            ["library", "path", *(size_name(size) for size in result["sizes"])],
            reduce_rows(result),
        ),
        "",
        *table(
            [
                "library",
                "one of four is killed: until the others have finished a step",
                "started again: until its first step",
                "coordinator killed, back after 3 s: longest pause between steps",
                "coordinator gone for good",
            ],
            failure_rows(result),
        ),
        "",
        *table(
            ["program", "lines that differ from `plain.py`"],
            [[f"`with_{name}.py`", str(count)] for name, count in result["lines"].items()],
        ),
    ]
    return "\n".join(lines) + "\n"
