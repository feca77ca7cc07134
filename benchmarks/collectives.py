"""All-gather, reduce-scatter, broadcast and all-to-all on this machine, side by side with MPI and
Gloo: float32, all ranks local.

    python benchmarks/collectives.py [--quick] [--peers gloo,mpi] [--transport shm,tcp]
        [--world 2,4] [--sizes 64KiB,1MiB] [--json FILE] [--markdown FILE]

A size is that of the larger array: of all parts together. How it is measured, and what the columns
mean: benchmarks/allreduce.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from allreduce import World, add_pace, list_of, set_pace, what_is_there
from ranks import COLLECTIVES
from report import (
    KIB,
    MIB,
    NAMES,
    Table,
    announce,
    milliseconds,
    parse_sizes,
    parse_worlds,
    ratio,
    size_name,
    warnings,
    write_results,
)

SIZES = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
QUICK_SIZES = [4 * KIB, MIB]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    peers, transports = ["gloo", "mpi"], ["shm", "tcp"]
    add("--peers", type=list_of(peers), default=peers, help="default: gloo,mpi; or none")
    add("--transport", type=list_of(transports), default=["shm"], help="default: shm; or all")
    add("--collectives", type=list_of(COLLECTIVES), default=COLLECTIVES, help="default: all")
    add("--world", "--worlds", dest="worlds", type=parse_worlds, default=[2, 4])
    add("--sizes", type=parse_sizes, help="e.g. 4KiB,1MiB (default: 4 KiB to 64 MiB)")
    add_pace(parser)
    add("--quick", action="store_true", help="two sizes, few and short blocks")
    add("--json", type=Path, help="write all results to this file")
    add("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    options.extras = []
    set_pace(options)
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    return options


def measure(world: World, collective: str, size: int) -> dict[str, Any]:
    systems = ["pccl", *world.others]
    cases = [f"{collective} {system}" for system in systems]
    world.ranks.prepare(cases, size)
    found = world.interleave(world.of_ranks(*cases), size)
    have = {system: found[case] for system, case in zip(systems, cases, strict=True)}
    own = have["pccl"]["seconds"]
    others = [have[other]["seconds"] for other in world.others]
    return {
        "collective": collective,
        "transport": world.transport,
        "world": world.world,
        "bytes": size,
        "systems": have,
        "faster": min(others) / own if others else None,
    }


def row(result: dict[str, Any], systems: list[str]) -> list[str]:
    have = result["systems"]
    cells = [result["collective"], result["transport"], str(result["world"])]
    cells.append(size_name(result["bytes"]))
    cells += [milliseconds(have[system]["seconds"]) for system in systems]
    if result["faster"] is not None:
        cells.append(ratio(result["faster"]))
    cells.append(" / ".join(f"{have[system]['spread']:.2f}" for system in systems))
    return [*cells, str(have["pccl"]["calls"])]


def main() -> int:
    options = parse_options()
    missing = what_is_there(options)
    about = announce()
    print(*warnings(about, max(options.worlds)), *missing, sep="\n")
    systems = ["pccl", *(name for name in ("mpi", "gloo") if name in options.peers)]
    columns = ["collective", "transport", "ranks", "array", *(f"{NAMES[s]} ms" for s in systems)]
    columns += ["faster / pccl"] if len(systems) > 1 else []
    table = Table("float32, against MPI and Gloo", [*columns, "spread", "calls"])
    results = []
    for transport in options.transport:
        for number in options.worlds:
            with World(number, transport, options) as world:
                for collective in options.collectives:
                    for size in options.sizes:
                        results.append(measure(world, collective, size))
                        table.add(row(results[-1], systems))
    write_results(options.json, about, results=results)
    if options.markdown:
        options.markdown.write_text(table.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
