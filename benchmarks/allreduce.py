"""How fast all-reduce is on this machine, side by side with what else one could use: float32 sum,
all ranks local.

    python benchmarks/allreduce.py [--quick] [--peers gloo,mpi,roofline]
        [--transport shm,tcp,shared-array] [--world 2,4] [--sizes 64KiB,1MiB]
        [--extras latency,fresh,bfloat16,tree,iperf]
        [--json FILE] [--markdown FILE] [--plot FILE]

One process per rank; the master is in the parent. All systems live in the same rank processes and
take turns in blocks of calls, so that whatever else the machine does meets all. Before each timed
call every rank rewrites its whole array, and all ranks meet; a rank's time runs from there. Results
are checked, exactly: noise before the first block, and the last call of every block.

    ms              every rank takes the median of its own calls; the slowest rank's median is shown
    faster / pccl   time of the faster of MPI and Gloo divided by time of pccl: above 1 pccl is
                    faster
    of bound        time of the bare program (benchmarks/roofline.cpp: the same passes over memory,
                    no protocol, no Python) divided by time of pccl
    of agreed       the same, but the bare program's ranks also meet before and after their passes,
                    as ranks do that agree
    CPU s/GB        CPU seconds of all ranks, and of pccl's master, per 10^9 bytes of one rank's
                    array, in the order of the columns before; rewriting and meeting are not in it
    spread          the slowest block's median over the fastest one's: how quiet the machine was

Arrays: "shm" are private NumPy arrays, reduced through shared memory; "tcp" the same with
PCCL_SHM=0, and MPI told to use TCP, too; "shared" ones come from pccl.empty. pccl and MPI reduce
out of place into memory that was touched before; Gloo has only the in-place form. Shared arrays of
1 MiB have a goal: 80 % of the bound. Latency rows call
without meeting, one call after the other. Systems that are not installed are left out.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from processes import (
    Block,
    Deadline,
    Ranks,
    Roofline,
    build_roofline,
    have_gloo,
    have_iperf,
    have_mpi,
    iperf,
)
from report import (
    KIB,
    MIB,
    NAMES,
    Table,
    announce,
    by_block,
    goal,
    main_columns,
    main_row,
    microseconds,
    milliseconds,
    parse_sizes,
    parse_worlds,
    percent,
    plot,
    ratio,
    size_name,
    summarise,
    warnings,
    write_results,
)

import pccl

SIZES = [4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
QUICK_SIZES = [4 * KIB, MIB, 16 * MIB]
LATENCY_SIZES = [4, KIB]
FRESH_SIZES = [MIB, 16 * MIB, 64 * MIB]
BFLOAT16_SIZES = [16 * MIB, 64 * MIB]
IPERF_SIZES = [MIB, 16 * MIB, 64 * MIB]
TREE_BYTES = 25_000_000
PEERS = ["gloo", "mpi", "roofline"]
TRANSPORTS = ["shm", "tcp", "shared-array"]
EXTRAS = ["latency", "fresh", "bfloat16", "tree", "iperf"]
ROUNDS = 5  # blocks of each system per size
LEAST_CALLS = 4  # in a block: 20 in all
BLOCK_SECONDS = 0.4  # how long a block should take
MOST_CALLS = 2000
MOST_LATENCY_CALLS = 5000
TRIAL_CALLS = 2
IPERF_SECONDS = 1
SHARED_SIZE, SHARED_GOAL = MIB, 0.8  # of shared arrays: of the bound

# What pccl reduces on a transport: the row's name, the case of ranks.py, and the kind of
# roofline.cpp that bounds it.
VARIANTS = {
    "shm": [("shm", "pccl", "staged")],
    "tcp": [("tcp", "pccl", None)],
    "shared-array": [
        ("shared", "shared", "gather"),
        ("shared, in place", "shared in place", "scratch"),
    ],
}

Systems = dict[str, Callable[[int], Block]]


class World:
    """The processes of one number of ranks on one transport."""

    def __init__(self, world: int, transport: str, options: argparse.Namespace) -> None:
        self.world, self.transport, self.options = world, transport, options
        self.deadline = Deadline(options.timeout)
        self.tcp = transport == "tcp"
        mpi, gloo = "mpi" in options.peers, "gloo" in options.peers
        self.others = [name for name in ("mpi", "gloo") if name in options.peers]
        self.roofline: Roofline | None = None
        self.ranks = Ranks(world, self.tcp, mpi, gloo, self.deadline)
        if options.roofline is not None and not self.tcp:
            self.roofline = Roofline(options.roofline, world, self.deadline)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self.ranks.finish()
        finally:
            self.ranks.end()
            if self.roofline is not None:
                self.roofline.end()

    def interleave(
        self, systems: Systems, size: int, trial: int = TRIAL_CALLS, most: int = MOST_CALLS
    ) -> dict[str, Any]:
        """Blocks of each in turn: a summary for each."""
        options = self.options
        calls = {}
        for name, block in systems.items():
            once = max(statistics.mean(rank) for rank in block(trial).seconds)
            calls[name] = min(most, max(options.least, math.ceil(options.block_seconds / once)))
        names = list(systems)
        blocks: dict[str, list[Block]] = {name: [] for name in names}
        for number in range(options.rounds):
            first = number % len(names)  # nobody always comes after the same other one
            for name in names[first:] + names[:first]:
                blocks[name].append(systems[name](calls[name]))
        return {name: summarise(blocks[name], size) for name in names}

    def of_ranks(self, *cases: str, paced: bool = True) -> Systems:
        return {case: partial(self.ranks.block, case, paced=paced) for case in cases}

    # The table.

    def measure(self, size: int) -> list[dict[str, Any]]:
        """One size: a result for each variant."""
        variants = VARIANTS[self.transport]
        cases = [case for _, case, _ in variants] + self.others
        self.ranks.prepare(cases, size)
        systems = self.of_ranks(*cases)
        if self.roofline is not None:
            self.roofline.prepare(size)
            for _, _, kind in variants:
                if kind is not None:
                    for bare in (kind, f"agreed-{kind}"):
                        systems[bare] = partial(self.roofline.block, bare)
        found = self.interleave(systems, size)
        results = []
        for name, case, kind in variants:
            have = {"pccl": found[case]} | {other: found[other] for other in self.others}
            if kind in found:
                have |= {"bound": found[kind], "agreed": found[f"agreed-{kind}"]}
            pccl_seconds = have["pccl"]["seconds"]
            faster = [have[other]["seconds"] for other in self.others]
            shares = {
                f"{bare}_share": have[bare]["seconds"] / pccl_seconds if bare in have else None
                for bare in ("bound", "agreed")
            }
            results.append(
                {
                    "arrays": name,
                    "world": self.world,
                    "bytes": size,
                    "systems": have,
                    "faster": min(faster) / pccl_seconds if faster else None,
                    **shares,
                }
            )
        return results

    def memory(self, size: int) -> dict[str, Any]:
        """Plain memory traffic, in bytes of one array per second, all processes together."""
        assert self.roofline is not None  # and prepared
        kinds = {"copy1": 1, "copy": self.world, "add1": 1, "add": self.world}
        systems: Systems = {kind: partial(self.roofline.block, kind) for kind in kinds}
        found = self.interleave(systems, size)
        return {
            "world": self.world,
            "bytes": size,
            **{kind: size * kinds[kind] / found[kind]["seconds"] for kind in kinds},
        }

    # Extras.

    def latency(self, size: int) -> dict[str, Any]:
        cases = ["pccl", "pccl.allreduce", *self.others]
        self.ranks.prepare(cases, size)
        systems = self.of_ranks(*cases, paced=False)
        return self.interleave(systems, size, trial=20, most=MOST_LATENCY_CALLS)

    def against(self, case: str, other: str, size: int) -> dict[str, Any]:
        """Two ways of using pccl."""
        self.ranks.prepare([case, other], size)
        found = self.interleave(self.of_ranks(case, other), size)
        return {
            "seconds": found[case]["seconds"],
            "other_seconds": found[other]["seconds"],
            "spread": found[case]["spread"],
            "other_spread": found[other]["spread"],
            "calls": found[case]["calls"],
        }

    def against_iperf(self, size: int) -> dict[str, Any]:
        """With two ranks each sends and receives as much as its array has."""
        self.ranks.prepare(["pccl"], size)
        rates: list[float] = []

        def run_iperf(calls: int) -> Block:
            rates.append(iperf(IPERF_SECONDS))
            return Block([[2 * size / rates[-1]] for _ in range(self.world)], 0.0)

        found = self.interleave({**self.of_ranks("pccl"), "iperf": run_iperf}, size)
        return {
            "seconds": found["pccl"]["seconds"],
            "rate": 2 * size / found["pccl"]["seconds"],
            "iperf_rate": statistics.median(rates[1:]),
            "spread": found["pccl"]["spread"],
            "iperf_spread": found["iperf"]["spread"],
            "calls": found["pccl"]["calls"],
        }


def list_of(names: list[str]) -> Callable[[str], list[str]]:
    """Some of these, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = names if text == "all" else [] if text == "none" else text.split(",")
        unknown = set(chosen) - set(names)
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not in {names}")
        return [name for name in names if name in chosen]

    return parse


def add_pace(parser: argparse.ArgumentParser) -> None:
    """Options of how long all measurements take."""
    add = parser.add_argument
    add("--rounds", type=int, default=ROUNDS, help="blocks of each system (default: %(default)s)")
    add("--timeout", type=float, default=3600, help="seconds for a world (default: 3600)")
    add("--block-seconds", type=float, default=BLOCK_SECONDS, help=argparse.SUPPRESS)


def set_pace(options: argparse.Namespace) -> None:
    """What --quick changes of them; and `least`, the calls in a block."""
    options.least = LEAST_CALLS
    if options.quick:
        options.rounds = min(options.rounds, 3)
        options.block_seconds = min(options.block_seconds, 0.1)
        options.least = 2


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peers", type=list_of(PEERS), default=PEERS, help="default: gloo,mpi,roofline; or none")
    add(
        "--transport",
        type=list_of(TRANSPORTS),
        default=["shm"],
        help="shm (default), tcp, shared-array; or all",
    )
    add("--world", "--worlds", dest="worlds", type=parse_worlds, help="ranks (default: 2,4)")
    add("--sizes", type=parse_sizes, help="e.g. 4KiB,1MiB (default: 4 KiB to 256 MiB)")
    add(
        "--extras",
        type=list_of(EXTRAS),
        default=["latency"],
        help="more tables: latency (default), fresh, bfloat16, tree, iperf; or all, or none",
    )
    add_pace(parser)
    add("--quick", action="store_true", help="three sizes, few and short blocks")
    add("--json", type=Path, help="write all results to this file")
    add("--markdown", type=Path, help="write the tables to this file")
    add("--plot", type=Path, help="draw the table into this file, .svg or .png (matplotlib)")
    options = parser.parse_args()
    set_pace(options)
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    options.worlds = options.worlds or [2, 4]
    return options


def what_is_there(options: argparse.Namespace) -> list[str]:
    """Leaves out what is not installed; says what."""
    missing = []
    if "gloo" in options.peers and not have_gloo():
        options.peers.remove("gloo")
        missing.append("torch is not installed: no Gloo (pip install '.[bench]')")
    if "mpi" in options.peers and not have_mpi():
        options.peers.remove("mpi")
        missing.append(
            "Open MPI or mpi4py is not installed: no MPI (apt: openmpi-bin, pip: mpi4py)"
        )
    if not hasattr(pccl, "empty"):
        if "shared-array" in options.transport:
            options.transport.remove("shared-array")
            missing.append("this pccl has no pccl.empty: no shared arrays")
    options.roofline = None
    if "roofline" in options.peers and set(options.transport) - {"tcp"}:
        options.roofline = build_roofline()
        if options.roofline is None:
            missing.append("no C++ compiler: no bound (apt: build-essential)")
    if "iperf" in options.extras and not have_iperf():
        options.extras.remove("iperf")
        missing.append("iperf3 is not installed: not compared (apt: iperf3)")
    return missing


class Suite:
    """All that is asked for, in tables and as results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.tables: list[Table] = []

    def table(self, title: str, columns: list[str]) -> Table:
        self.tables.append(Table(title, columns))
        return self.tables[-1]

    def keep(self, name: str, result: dict[str, Any]) -> None:
        self.results.setdefault(name, []).append(result)

    def run(self) -> None:
        options = self.options
        others = [name for name in ("mpi", "gloo") if name in options.peers]
        systems = ["pccl", *others, *(["bound"] if options.roofline else [])]
        memory: list[dict[str, Any]] = []
        if options.transport:
            table = self.table("All-reduce, float32 sum", main_columns(systems))
        for transport in options.transport:
            for world in options.worlds:
                with World(world, transport, options) as processes:
                    for size in options.sizes:
                        for result in processes.measure(size):
                            table.add(main_row(result, systems))
                            self.keep("results", result)
                        have = any((m["world"], m["bytes"]) == (world, size) for m in memory)
                        if processes.roofline is not None and not have:
                            memory.append(processes.memory(size))
        self.show_memory(memory)
        self.shared_goals()
        if "latency" in options.extras:
            self.latency(others)
        self.ways_of_use()
        if "iperf" in options.extras:
            self.iperf()

    def shared_goals(self) -> None:
        """Prints them: shared arrays beside the passes that they need."""
        for result in self.results.get("results", []):
            have = result["systems"]
            if not result["arrays"].startswith("shared") or "bound" not in have:
                continue
            if result["bytes"] == SHARED_SIZE:
                parts = by_block(have["bound"]["blocks"], have["pccl"]["blocks"])
                name = f"all-reduce of {size_name(result['bytes'])}, {result['arrays']}, "
                name += f"{result['world']} ranks: speed, of the bound's"
                share = result["bound_share"]
                self.keep("goals", goal(name, share, parts, percent, at_least=SHARED_GOAL))

    def show_memory(self, memory: list[dict[str, Any]]) -> None:
        if not memory:
            return
        self.results["memory"] = memory
        columns = ["array", "processes", "memcpy: one", "all", "a[i] += b[i]: one", "all"]
        table = self.table("Memory, 10^9 bytes of array per second, all together", columns)
        for result in memory:
            rates = [f"{result[kind] / 1e9:.3g}" for kind in ("copy1", "copy", "add1", "add")]
            table.add([size_name(result["bytes"]), str(result["world"]), *rates])

    def latency(self, others: list[str]) -> None:
        columns = ["transport", "ranks", "array", "Communicator.all_reduce", "pccl.allreduce"]
        columns += [NAMES[other] for other in others]
        if "mpi" in others:
            columns += ["Communicator / MPI", "pccl.allreduce / MPI"]
        if "gloo" in others:
            columns += ["Gloo / Communicator", "Gloo / pccl.allreduce"]
        table = self.table("Latency, microseconds: median, p99", columns)
        for transport in [t for t in self.options.transport if t != "shared-array"] or ["shm"]:
            for world in self.options.worlds:
                with World(world, transport, self.options) as processes:
                    for size in LATENCY_SIZES:
                        found = processes.latency(size)
                        self.keep(
                            "latency",
                            {"transport": transport, "world": world, "bytes": size, **found},
                        )
                        cells = [transport, str(world), size_name(size)]
                        for one in found.values():
                            pair = (one["seconds"], one["p99_seconds"])
                            cells.append(", ".join(map(microseconds, pair)))
                        ours = [found[case]["seconds"] for case in ("pccl", "pccl.allreduce")]
                        if "mpi" in others:
                            cells += [ratio(own / found["mpi"]["seconds"]) for own in ours]
                        if "gloo" in others:
                            cells += [ratio(found["gloo"]["seconds"] / own) for own in ours]
                        table.add(cells)

    def ways_of_use(self) -> None:
        """pccl against itself."""
        wanted: list[tuple[str, str, str, list[int]]] = []
        if "fresh" in self.options.extras:
            wanted.append(("fresh", "pccl.allreduce", "fresh result / out=", FRESH_SIZES))
        if "bfloat16" in self.options.extras:
            name = "bfloat16 / float32, as many bytes"
            wanted.append(("bfloat16", "pccl.allreduce", name, BFLOAT16_SIZES))
        if "tree" in self.options.extras:
            name = "tree of 200 arrays / one flat array"
            wanted.append(("tree", "flat", name, [TREE_BYTES]))
        if not wanted:
            return
        columns = ["what", "transport", "ranks", "array", "ms", "ms", "time"]
        columns += ["elements/s", "spread", "calls"]
        table = self.table("Ways of using pccl.allreduce: the first against the second", columns)
        for transport in [t for t in self.options.transport if t != "shared-array"] or ["shm"]:
            for world in self.options.worlds:
                with World(world, transport, self.options) as processes:
                    for case, other, what, sizes in wanted:
                        for size in self.sizes(sizes):
                            found = processes.against(case, other, size)
                            about = {"what": case, "transport": transport}
                            about |= {"world": world, "bytes": size}
                            self.keep("ways_of_use", {**about, **found})
                            time = found["seconds"] / found["other_seconds"]
                            table.add(
                                [
                                    *(what, transport, str(world)),
                                    "25 MB" if size == TREE_BYTES else size_name(size),
                                    milliseconds(found["seconds"]),
                                    milliseconds(found["other_seconds"]),
                                    ratio(time),
                                    ratio(2 / time) if case == "bfloat16" else "-",
                                    f"{found['spread']:.2f} / {found['other_spread']:.2f}",
                                    str(found["calls"]),
                                ]
                            )

    def iperf(self) -> None:
        columns = ["array", "pccl ms", "pccl GB/s", "iperf3 --bidir GB/s", "pccl / iperf3"]
        columns += ["spread", "calls"]
        table = self.table("TCP over loopback, two ranks, both directions together", columns)
        with World(2, "tcp", self.options) as processes:
            for size in self.sizes(IPERF_SIZES):
                found = processes.against_iperf(size)
                self.keep("iperf", {"bytes": size, **found})
                table.add(
                    [
                        size_name(size),
                        milliseconds(found["seconds"]),
                        f"{found['rate'] / 1e9:.2f}",
                        f"{found['iperf_rate'] / 1e9:.2f}",
                        f"{found['rate'] / found['iperf_rate']:.0%}",
                        f"{found['spread']:.2f} / {found['iperf_spread']:.2f}",
                        str(found["calls"]),
                    ]
                )

    def sizes(self, sizes: list[int]) -> list[int]:
        return sizes[:1] if self.options.quick else sizes


def main() -> int:
    options = parse_options()
    missing = what_is_there(options)
    packages = {"gloo": "torch", "mpi": "mpi4py"}
    about = announce([packages[peer] for peer in options.peers if peer in packages])
    print(*warnings(about, max(options.worlds)), *missing, sep="\n")
    suite = Suite(options)
    suite.run()
    about["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    about["missing"] = missing
    write_results(options.json, about, **suite.results)
    if options.markdown:
        options.markdown.write_text("\n".join(table.markdown() for table in suite.tables))
    if (
        options.plot
        and "results" in suite.results
        and not plot(suite.results["results"], options.plot)
    ):
        print("matplotlib is not installed: no plot (pip install '.[bench]')")
    return 0


if __name__ == "__main__":
    sys.exit(main())
