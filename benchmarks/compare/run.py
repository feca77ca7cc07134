"""pccl beside Gloo, MPI, torchft, hivemind and mpi4jax on this machine, in one run.

    python benchmarks/compare/run.py [--quick] [--json FILE] [--markdown FILE]

Everything is installed into a virtual environment in build/compare. A library that cannot be
installed or imported is a row that says why. Measured are:

1. all-reduce of float32 by four ranks: each library on its default path and over TCP. Blocks of
   calls of all libraries take turns, so that noise hits all alike. A call takes as long as its
   slowest rank
2. from the SIGKILL of one of four ranks until the others have finished a step, with a right result
3. from the start of a new process in its place until its own first step
4. lines in which each library's program differs from the one without a library
5. what happens when the coordinator is killed

2, 3 and 5 run the programs of 4, benchmarks/compare/programs/. All results are checked. As root on
Linux everything runs in a network namespace that has loopback alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import environment
import tables
from environment import FOLDER, Library
from failures import Run, start_alone
from processes import PROGRAMS, Failed, Ranks, end_orphans

# label, path, library of the environment, name in rank.py, case, over TCP
SYSTEMS = (
    ("pccl", "default", "pccl", "pccl", "", False),
    ("pccl", "TCP", "pccl", "pccl", "", True),
    ("Gloo", "TCP, its only one", "Gloo", "gloo", "", True),
    ("MPI", "default", "MPI", "mpi", "", False),
    ("MPI", "TCP", "MPI", "mpi", "", True),
    ("mpi4jax, in `jit`", "default", "mpi4jax", "mpi4jax", "", False),
    ("mpi4jax, in `jit`", "TCP", "mpi4jax", "mpi4jax", "", True),
    ("torchft: quorum, all-reduce, commit", "TCP (Gloo)", "torchft", "torchft", "step", True),
    ("torchft: all-reduce within a step", "TCP (Gloo)", "torchft", "torchft", "inner", True),
    ("hivemind: matchmaking, all-reduce", "TCP (libp2p)", "hivemind", "hivemind", "", True),
)
SEVERAL = "pccl, three masters"
RETRYING = "torchft, 10 retries"  # TORCHFT_QUORUM_RETRIES
SIZES = (4, tables.MIB, 64 * tables.MIB)
SLOW = {"hivemind"}  # part of a second to many seconds for a call
SLOW_CALLS, SLOW_ROUNDS = 2, 4
FAILING = ("pccl", SEVERAL, "Gloo", "MPI", "torchft", RETRYING, "hivemind")
NO_REJOIN = {"Gloo", "MPI"}
NO_RESTART = {
    "Gloo": "-",
    "MPI": "mpirun cannot be started again",
    "hivemind": "-",
}
ONCE = {"hivemind", RETRYING}  # half a minute each time


def calls(size: int) -> int:
    """Returns the calls of a block."""
    return 50 if size <= tables.KIB else 10 if size <= 4 * tables.MIB else 2


def note(text: str) -> None:
    print(f"compare: {text}", file=sys.stderr, flush=True)


class Deadline:
    """The deadline of the whole run. After it, nothing more is begun."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def passed(self) -> bool:
        return time.monotonic() > self.end


def measure_allreduce(
    libraries: dict[str, Library], sizes: Sequence[int], rounds: int, deadline: Deadline
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"library": label, "path": path, "seconds": {}, "partial": {}}
        for label, path, *_ in SYSTEMS
    ]
    groups: dict[tuple[str, bool], Ranks] = {}
    failed: dict[tuple[str, bool], str] = {}
    try:
        for label, _, needs, name, _, tcp in SYSTEMS:
            key = (name, tcp)
            if key in groups or key in failed:
                continue
            if libraries[needs].missing:
                failed[key] = libraries[needs].missing
                continue
            note(f"starting {label}{', TCP' if tcp else ''}")
            try:
                groups[key] = Ranks(name, tcp)
            except Failed as reason:
                failed[key] = f"failed: {reason}"
                note(failed[key])
        turns = random.Random(0)
        for size in sizes:
            note(f"all-reduce of {tables.size_name(size)}")
            for key in list(groups):
                attempt(groups, failed, key, "prepare", size=size)
            for turn in range(rounds):
                order = list(range(len(SYSTEMS)))
                turns.shuffle(order)
                for number in order:
                    _, _, _, name, case, tcp = SYSTEMS[number]
                    slow = name in SLOW
                    if (name, tcp) not in groups or (slow and turn >= SLOW_ROUNDS):
                        continue
                    if deadline.passed():
                        break
                    count = SLOW_CALLS if slow else calls(size)
                    what = {"case": case, "calls": count}
                    answers = attempt(groups, failed, (name, tcp), "block", **what)
                    if answers:
                        each = zip(*(answer["seconds"] for answer in answers), strict=True)
                        row = rows[number]
                        row["seconds"].setdefault(str(size), []).extend(map(max, each))
                        partial = max(answer["partial"] for answer in answers)
                        row["partial"][str(size)] = row["partial"].get(str(size), 0) + partial
        for row, (_, _, _, name, _, tcp) in zip(rows, SYSTEMS, strict=True):
            if (name, tcp) in failed:
                row["missing"] = failed[name, tcp]
    finally:
        for group in groups.values():
            group.end()
        end_orphans()
    return rows


def attempt(
    groups: dict[tuple[str, bool], Ranks],
    failed: dict[tuple[str, bool], str],
    key: tuple[str, bool],
    order: str,
    **what: Any,
) -> list[dict[str, Any]]:
    """Gives an order. A group that fails is ended, with the reason for the report."""
    try:
        return groups[key].order(order, **what)
    except Failed as reason:
        failed[key] = f"failed: {reason}"
        note(f"{key[0]}: {failed[key]}")
        groups.pop(key).end()
        return []


def measure_failures(
    libraries: dict[str, Library], repeat: int, deadline: Deadline
) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {
        name: {"library": name, "kill": [], "rejoin": [], "restarted": [], "gone": []}
        for name in FAILING
    }
    alone = [] if libraries["Gloo"].missing else [start_alone() for _ in range(repeat)]
    libraries = libraries | {RETRYING: libraries["torchft"], SEVERAL: libraries["pccl"]}
    for name, row in rows.items():
        if libraries[name].missing:
            for kind in ("kill", "rejoin", "restarted", "gone"):
                row[kind] = [{"missing": libraries[name].missing}]
    for turn in range(repeat):
        for name, row in rows.items():
            if libraries[name].missing or (turn and name in ONCE) or deadline.passed():
                continue
            note(f"failures of {name}, {turn + 1} of {repeat}")
            try:
                one_failure(name, row, turn == repeat - 1 or name in ONCE, deadline)
            except Failed as reason:
                row["kill"].append({"missing": f"failed: {reason}"})
                note(str(reason))
            finally:
                end_orphans()
    none = [{"none": True}]
    plain = {"library": "(plain program)", "kill": none, "restarted": none, "gone": none}
    return [plain | {"rejoin": alone}, *rows.values()]


def one_failure(name: str, row: dict[str, Any], last: bool, deadline: Deadline) -> None:
    """Kills a rank and starts it again; in the last turn, kills the coordinator, too."""
    run = Run(name)
    try:
        row["kill"].append(run.kill_a_rank())
        if name in NO_REJOIN:
            row["rejoin"] = [{"missing": "the job is started again"}]
        else:
            row["rejoin"].append(run.rejoin())
        if name == "hivemind":  # keeps its own values where a part of the mean is missing
            row["kill"][-1]["mixed"] = len(run.steps.wrong)
        check(run)
        rejoined = "seconds" in (row["rejoin"] or [{}])[-1]
        if run.library == "pccl" and rejoined:
            row["restarted"].append(run.kill_coordinator(restart=True))
            check(run)
    finally:
        run.end()
    if not last:
        return
    if name in NO_RESTART:
        row["restarted"] = [{"missing": NO_RESTART[name]}]
    elif run.library != "pccl" and not deadline.passed():
        row["restarted"] = [coordinator(name, restart=True)]
    if name == "Gloo":
        row["gone"] = [{"none": True}]
    elif not deadline.passed():
        row["gone"] = [coordinator(name, restart=False)]


def coordinator(name: str, restart: bool) -> dict[str, Any]:
    run = Run(name)
    try:
        found = run.kill_coordinator(restart)
        check(run)
        return found
    finally:
        run.end()


def check(run: Run) -> None:
    if run.steps.wrong and run.library != "hivemind":
        raise Failed(f"a wrong result: {run.steps.wrong[0]}")


def machine() -> dict[str, Any]:
    cpu = platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    command = ["python", "benchmarks/compare/run.py", *sys.argv[1:]]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": shlex.join(command),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it runs")
    parser.add_argument("--parts", default="allreduce,failures", help="which to measure")
    parser.add_argument("--only", help="libraries, separated by commas (default: all)")
    parser.add_argument("--sizes", type=lambda text: [*map(tables.parse_size, text.split(","))])
    parser.add_argument("--rounds", type=int, help="blocks of every library and size (default: 8)")
    parser.add_argument("--repeat", type=int, help="kills of every library (default: 3)")
    parser.add_argument("--no-install", action="store_true", help="take what was installed before")
    parser.add_argument("--minutes", type=float, default=10, help="begin nothing after this time")
    parser.add_argument("--json", type=Path, default=FOLDER / "compare.json")
    parser.add_argument("--markdown", type=Path, default=FOLDER / "compare.md")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 8)
    repeat = options.repeat or (1 if options.quick else 3)
    sizes = options.sizes or SIZES
    FOLDER.mkdir(parents=True, exist_ok=True)
    libraries = environment.prepare(fresh=not options.no_install)
    for name, library in libraries.items():
        if options.only and name.lower() not in options.only.lower().split(","):
            library.missing = "not wanted in this run"
    about = machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("compare: ended by a signal"))
    about["own_network"] = environment.isolate()
    environment.adopt_orphans()
    began = time.monotonic()
    deadline = Deadline(60 * options.minutes)
    result: dict[str, Any] = {"about": about, "sizes": list(sizes), "allreduce": [], "failures": []}
    result["libraries"] = {name: asdict(library) for name, library in libraries.items()}
    result["lines"] = tables.program_lines(PROGRAMS)
    try:
        if "allreduce" in options.parts:
            half = Deadline(30 * options.minutes)  # the rest is for the failures
            result["allreduce"] = measure_allreduce(libraries, sizes, rounds, half)
        if "failures" in options.parts:
            result["failures"] = measure_failures(libraries, repeat, deadline)
    finally:
        end_orphans()
    about["load_after"] = os.getloadavg()[0]
    about["seconds"] = time.monotonic() - began
    about["rounds"], about["repeat"] = rounds, repeat
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    options.markdown.write_text(tables.markdown(result))
    print(tables.markdown(result))


if __name__ == "__main__":
    main()
