"""All-gather, reduce-scatter, broadcast and all-to-all on this machine, side by side with MPI and
Gloo: float32, all ranks local.

    python benchmarks/collectives.py [--quick] [--peers gloo,mpi] [--transport shm,tcp]
        [--world 2,4] [--sizes 64KiB,1MiB] [--json FILE] [--markdown FILE]

A size is that of the larger array: of all parts together. Arrays are private; in memory, broadcasts
of arrays from pccl.empty ("shared") have rows, too. How it is measured, and what the columns mean:
benchmarks/allreduce.py. The goal is for private and shared arrays in memory, from 64 KiB on: 1.3
times the speed of the faster of MPI and Gloo.
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
    by_block,
    factor,
    goal,
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
GOAL, GOAL_SIZE = 1.3, 64 * KIB  # times the faster of the others, from this size on


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


def measure(world: World, collective: str, size: int) -> list[dict[str, Any]]:
    """A result for private arrays, and one for shared ones where they are measured."""
    ways = {"private": "pccl"}
    if collective == "broadcast" and not world.tcp:
        ways["shared"] = "shared"
    cases = {name: f"{collective} {name}" for name in (*ways.values(), *world.others)}
    world.ranks.prepare(list(cases.values()), size)
    found = world.interleave(world.of_ranks(*cases.values()), size)
    others = {other: found[cases[other]] for other in world.others}
    faster = min(others.values(), key=lambda one: float(one["seconds"]), default=None)
    results = []
    for arrays, way in ways.items():
        own = found[cases[way]]
        results.append(
            {
                "collective": collective,
                "arrays": arrays,
                "transport": world.transport,
                "world": world.world,
                "bytes": size,
                "systems": {"pccl": own, **others},
                "faster": faster["seconds"] / own["seconds"] if faster else None,
                "faster_parts": by_block(faster["blocks"], own["blocks"]) if faster else [],
            }
        )
    return results


def has_goal(result: dict[str, Any]) -> bool:
    in_memory = result["transport"] == "shm"
    return in_memory and result["bytes"] >= GOAL_SIZE and result["faster"] is not None


def faster_goal(result: dict[str, Any]) -> dict[str, Any]:
    """Prints it."""
    name = f"{result['collective']} of {size_name(result['bytes'])}, {result['arrays']} arrays, "
    name += f"{result['world']} ranks: speed, of "
    others = [NAMES[system] for system in result["systems"] if system != "pccl"]
    name += f"the faster of {' and '.join(others)}" if len(others) > 1 else others[0]
    return goal(name, result["faster"], result["faster_parts"], factor, at_least=GOAL)


def row(result: dict[str, Any], systems: list[str]) -> list[str]:
    have = result["systems"]
    cells = [result["collective"], result["arrays"], result["transport"], str(result["world"])]
    cells.append(size_name(result["bytes"]))
    cells += [milliseconds(have[system]["seconds"]) for system in systems]
    if result["faster"] is not None:
        reached = "reached" if result["faster"] >= GOAL else "not reached"
        cells += [ratio(result["faster"]), reached if has_goal(result) else "-"]
    cells.append(" / ".join(f"{have[system]['spread']:.2f}" for system in systems))
    return [*cells, str(have["pccl"]["calls"])]


def main() -> int:
    options = parse_options()
    missing = what_is_there(options)
    about = announce()
    print(*warnings(about, max(options.worlds)), *missing, sep="\n")
    systems = ["pccl", *(name for name in ("mpi", "gloo") if name in options.peers)]
    columns = ["collective", "arrays", "transport", "ranks", "array"]
    columns += [f"{NAMES[system]} ms" for system in systems]
    columns += ["faster / pccl", f"goal {GOAL}x"] if len(systems) > 1 else []
    table = Table("float32, against MPI and Gloo", [*columns, "spread", "calls"])
    results = []
    for transport in options.transport:
        for number in options.worlds:
            with World(number, transport, options) as world:
                for collective in options.collectives:
                    for size in options.sizes:
                        for result in measure(world, collective, size):
                            results.append(result)
                            table.add(row(result, systems))
    print()
    goals = [faster_goal(result) for result in results if has_goal(result)]
    write_results(options.json, about, results=results, goals=goals)
    if options.markdown:
        options.markdown.write_text(table.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
