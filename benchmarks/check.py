"""Whether this tree is slower than another commit: both are measured side by side, in turns.

    make bench-check BASE=v0.1
    python benchmarks/check.py COMMIT [--rows tcp,2] [--pairs 8] [--json FILE]

It installs both into folders of their own (build/bench-check), and starts the ranks and a master of
each. Per row, blocks of calls of the one and of the other follow each other, the first one in turn.
The ratio of two neighbours is this tree's median call over the other's: above 1 it is slower. A row
shows the median ratio, and the quartiles as its spread.

A row counts as slower if at least three quarters of its ratios are above 1.02 in two independent
measurements. The second one, by new processes and with three times as many pairs, is made only if
the first one says slower. It alone decides, since the first one chose the row; both are shown. The
exit status is 1 if a row is slower.

    ms      of this tree: every rank takes the median of its calls; the slowest rank's median
    CPU     CPU seconds of all ranks and the master, this tree over the other: for information
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from processes import Block, Deadline, Ranks
from ranks import COLLECTIVES
from report import KIB, MIB, machine, size_name, write_results

ROOT = Path(__file__).resolve().parent.parent
SLOWER = 1.02
PAIRS = 8
BLOCK_SECONDS = 0.25
LEAST_CALLS, MOST_CALLS = 4, 5000
SECRET = "pccl-bench-check-0123456789-abcdefgh"


class Row(NamedTuple):
    """What is measured: calls of a case of ranks.py."""

    transport: str
    world: int
    case: str
    bytes: int

    @property
    def name(self) -> str:
        return f"{self.transport}, {self.world} ranks, {self.case}, {size_name(self.bytes)}"

    @property
    def needs(self) -> set[str]:
        """The method of a communicator and the settings, which older commits may lack."""
        method = next((name for name in COLLECTIVES if self.case.startswith(name)), "all_reduce")
        return {method, *SETTINGS[self.transport]}


ROWS = [
    *(
        Row(transport, world, "pccl", size)
        for transport in ("memory", "tcp", "tls")
        for world in (2, 4)
        for size in (4, 64 * KIB, MIB, 16 * MIB)
    ),
    *(Row("memory", 2, case, MIB) for case in ("shared", "shared in place", "fresh")),
    *(Row(transport, 2, "tree", MIB) for transport in ("memory", "tcp")),
    *(Row("tcp", 2, case, MIB) for case in ("bfloat16", "int8")),
    *(Row("tcp, 2 threads", 2, "pccl", size) for size in (64 * KIB, MIB, 16 * MIB)),
    *(
        Row(transport, 2, f"{collective} pccl", MIB)
        for transport in ("memory", "tcp")
        for collective in COLLECTIVES
    ),
    *(Row(transport, 2, "sync", 64 * MIB) for transport in ("memory", "tcp")),
]
SETTINGS = {
    "memory": {},
    "tcp": {},
    "tcp, 2 threads": {"PCCL_THREADS": "2"},
    "tls": {"PCCL_SECRET": SECRET},
}


def install(source: Path, folder: Path) -> None:
    """Builds and installs what is in `source`, without the packages that it needs."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(folder), str(source)], check=True)


def installed(commit: str) -> tuple[Path, Path]:
    """Folders with this tree and that commit."""
    folder = ROOT / "build" / "bench-check"
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise SystemExit(f"{commit!r} is no commit of this repository")
    full = found.stdout.strip()
    other = folder / f"{full}-{sys.implementation.cache_tag}"
    if not (other / "pccl").is_dir():
        source = folder / f"source-{full}"
        source.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", full], cwd=ROOT, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
        install(source, other)
    own = folder / "this"
    install(ROOT, own)
    return own, other


def abilities(folder: Path) -> set[str]:
    """The methods of a communicator of the pccl installed there, and those of SETTINGS that it
    knows."""
    asked = subprocess.run(
        [sys.executable, "-c", "import pccl; print(*dir(pccl.Communicator))"],
        cwd=folder,  # where Python looks first
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=True,
        capture_output=True,
        text=True,
    )
    settings = {name for chosen in SETTINGS.values() for name in chosen}
    paths = [path for kind in ("*.py", "*.so") for path in (folder / "pccl").rglob(kind)]
    files = [path.read_bytes() for path in paths]
    return {
        *asked.stdout.split(),
        *(name for name in settings if any(name.encode() in file for file in files)),
    }


def possible(rows: list[Row], there: set[str], commit: str) -> list[Row]:
    """Those that need only what is there. Says which others are left out."""
    kept = []
    for row in rows:
        lacks = sorted(row.needs - there)
        if lacks:
            print(f"{row.name}: left out, since {commit} has no {lacks[0]}")
        else:
            kept.append(row)
    return kept


class Sides:
    """The ranks of both, for one transport and number of ranks."""

    def __init__(self, stack: ExitStack, row: Row, folders: tuple[Path, Path]) -> None:
        self.ranks: list[Ranks] = []
        for folder in folders:
            settings = {"PYTHONPATH": str(folder), **SETTINGS[row.transport]}
            ranks = Ranks(
                row.world, row.transport != "memory", False, False, Deadline(3600), settings
            )
            stack.callback(ranks.end)
            if not all(Path(origin).is_relative_to(folder) for origin in ranks.origins):
                raise SystemExit(
                    f"{sys.executable} imports {ranks.origins[0]} in place of {folder}: it has an "
                    "editable pccl; use `make bench-check BASE=COMMIT`"
                )
            self.ranks.append(ranks)

    def finish(self) -> None:
        for ranks in self.ranks:
            ranks.finish()

    def measure(self, row: Row, pairs: int) -> list[tuple[Block, Block]]:
        paced = row.bytes >= 64 * KIB
        for ranks in self.ranks:
            ranks.prepare([row.case], row.bytes)
        trial = [slowest(ranks.block(row.case, 8, paced=paced)) for ranks in self.ranks]
        calls = math.ceil(BLOCK_SECONDS / max(*trial, 1e-7))
        calls = min(MOST_CALLS, max(LEAST_CALLS, calls))
        found = []
        for number in range(pairs):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            blocks: dict[int, Block] = {}
            for side in order:
                blocks[side] = self.ranks[side].block(row.case, calls, paced=paced)
            found.append((blocks[0], blocks[1]))
        return found


def slowest(block: Block) -> float:
    return max(statistics.median(seconds) for seconds in block.seconds)


class Verdict(NamedTuple):
    """The medians of the pairs of a row. Ratios: this tree over the other."""

    seconds: float
    ratio: float
    low: float  # first and third quartiles
    high: float
    cpu: float
    pairs: int
    # The ratio and the quartiles of the measurement before, which said slower, too.
    first: tuple[float, float, float] | None = None

    @property
    def slower(self) -> bool:
        return self.low > SLOWER

    @classmethod
    def of(cls, pairs: list[tuple[Block, Block]]) -> Verdict:
        ratios = [slowest(own) / slowest(other) for own, other in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(
            statistics.median(slowest(own) for own, _ in pairs),
            middle,
            low,
            high,
            sum(own.cpu for own, _ in pairs) / max(sum(other.cpu for _, other in pairs), 1e-9),
            len(pairs),
        )


def check(
    rows: list[Row], folders: tuple[Path, Path], pairs: int, tell: Callable[[str], None]
) -> Iterator[tuple[Row, Verdict]]:
    worlds = dict.fromkeys((row.transport, row.world) for row in rows)
    for transport, world in worlds:
        chosen = [row for row in rows if (row.transport, row.world) == (transport, world)]
        with ExitStack() as stack:
            sides = Sides(stack, chosen[0], folders)
            for row in chosen:
                verdict = Verdict.of(sides.measure(row, pairs))
                if verdict.slower:
                    first = (verdict.ratio, verdict.low, verdict.high)
                    tell(f"{row.name}: {figures(first)}; again, by other processes")
                    # By others: where their memory lies may make processes slower, too.
                    with ExitStack() as others:
                        more = Sides(others, row, folders)
                        verdict = Verdict.of(more.measure(row, 3 * pairs))._replace(first=first)
                        more.finish()
                yield row, verdict
            sides.finish()


def figures(ratios: tuple[float, float, float]) -> str:
    ratio, low, high = ratios
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def line_of(row: Row, verdict: Verdict) -> str:
    return (
        f"{row.name:44} {1e3 * verdict.seconds:10.4f}    "
        f"{figures((verdict.ratio, verdict.low, verdict.high))} {verdict.cpu:8.2f} "
        f"{verdict.pairs:6}"
        + (f"  before: {figures(verdict.first)}" if verdict.first is not None else "")
        + ("  SLOWER" if verdict.slower else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="to compare with")
    parser.add_argument(
        "--rows", default="", help="only rows that have these words, as tcp,2 ranks"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of blocks (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    words = [word.strip() for word in options.rows.split(",") if word.strip()]
    rows = [row for row in ROWS if all(word in row.name for word in words)]
    if not rows or options.pairs < 2:
        parser.error(f"no row has all of {words}" if not rows else "--pairs is at least 2")
    for name in ("PYTHONPATH", "PCCL_SECRET", "PCCL_SECRET_FILE"):
        os.environ.pop(name, None)
    folders = installed(options.commit)
    rows = possible(rows, abilities(folders[1]), options.commit)
    if not rows:
        raise SystemExit("no row is left")
    print(f"{'this tree over ' + options.commit:44} {'ms':>10} {'ratio':>8} (quartiles)")
    results: list[dict[str, Any]] = []
    slower: list[str] = []
    for row, verdict in check(rows, folders, options.pairs, lambda text: print(text, flush=True)):
        print(line_of(row, verdict), flush=True)
        results.append({"row": row.name, **verdict._asdict(), "slower": verdict.slower})
        if verdict.slower:
            slower.append(row.name)
    write_results(options.json, machine(), base=options.commit, rows=results)
    print(f"{len(slower)} of {len(results)} rows are slower" + "".join(f"\n  {n}" for n in slower))
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
