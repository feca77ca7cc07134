"""Measures what a group of hundreds of members costs its master: processor time, bytes, memory.

    python benchmarks/master.py [--members 8 64 256] [--repeats 10] [--json FILE] [--markdown FILE]

The master is the real one, and so are the messages. A loop sends those of all members, and there is
no network: a figure is the processor time from the bytes of the members' messages to those of the
answers. Sockets and encryption come on top. Nobody measures links: in groups of up to 64 members
that do, epochs have a table of all rates, and plans take longer to choose. Needs `make build`.

    start      all members join, until each has the first epoch
    call       an operation over TCP: a report of each member, and the verdict for each
    heartbeat  of one member
    loss       a member dies, all others report their links to it and have the next epoch
    admission  a newcomer joins, is prepared, and enters at an admission point
    restart    a master without a memory of the run takes all members back
    MB sent    by the master for a loss: every epoch names all members to each of them
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Table, announce, goal, in_seconds, microseconds, milliseconds, write_results

from pccl import _testing

EPOCH_GOAL = 1.0  # seconds of the master for a change of the membership


def measure(members: int, repeats: int) -> dict[str, Any]:
    """The figures of one size of the group: medians, but for the start."""
    group = _testing.ManyMembers(members)

    def median(step: Callable[[], tuple[float, int]]) -> float:
        return statistics.median(step()[0] for _ in range(repeats))

    start, _ = group.start()
    found: dict[str, Any] = {"members": members, "start": start}
    found["call"] = median(group.call)
    found["heartbeat"] = median(group.heartbeats) / members
    found["memory"] = group.memory()
    losses, admissions = [], []
    for _ in range(repeats):
        losses.append(group.lose())
        admissions.append(group.admit())
    found["loss"] = statistics.median(seconds for seconds, _ in losses)
    found["admission"] = statistics.median(seconds for seconds, _ in admissions)
    found["sent"] = statistics.median(sent for _, sent in losses)
    found["restart"] = median(group.restart)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    if min(args.members) < 2 or args.repeats < 1:
        parser.error("a group of two members at least, and one repeat")
    about = announce()
    columns = ["members", "start ms", "call us", "call us, a member", "heartbeat us"]
    columns += ["loss ms", "admission ms", "restart ms", "MB sent", "KiB a member"]
    table = Table("The master of one group", columns)
    rows = []
    for members in args.members:
        one = measure(members, args.repeats)
        rows.append(one)
        table.add(
            [
                str(members),
                milliseconds(one["start"]),
                microseconds(one["call"]),
                microseconds(one["call"] / members),
                microseconds(one["heartbeat"]),
                *(milliseconds(one[name]) for name in ("loss", "admission", "restart")),
                f"{one['sent'] / 1e6:.3g}",
                f"{one['memory'] / 1024:.1f}" if one["memory"] > 0 else "-",
            ]
        )
    changes = [one[name] for one in rows for name in ("loss", "admission")]
    name = "the master's part of the slowest change of the membership"
    print()
    goals = [goal(name, max(changes), changes, in_seconds, at_most=EPOCH_GOAL)]
    write_results(args.json, about, rows=rows, goals=goals)
    if args.markdown is not None:
        args.markdown.write_text(table.markdown())


if __name__ == "__main__":
    main()
