"""How long a step takes in which a link between two hosts is cut for seconds.

    python benchmarks/wan/cut.py [--preset long_line] [--mb 32] [--cuts 12] [--json FILE] [--markdown FILE]

A step is one all-reduce of float32 among the hosts of lab.py, by pccl with its default timeouts. In
the middle of every step with a cut, all that is on its way between two hosts is lost, and all that
follows for `--seconds`; they are not told. The pairs take turns. The master is on host 0, so a pair
with host 0 cuts a member off from its master, too. Between two cuts there is a step without one. A
step's time is from the first host's start to the last one's end, and every result is checked. The
goal: no step takes longer than the cut, a step, and a second. Needs root and Linux.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab import PRESETS, Lab, LabError, preset
from peers import Peer, ask
from report import MIB, Table, announce, goal, in_seconds, size_name, write_results
from run import begin, call, end, peers_of

WARM_UP = 2  # steps
MORE_GOAL = 1.0  # seconds beside the cut and a step


def cut_step(
    lab: Lab, peers: list[Peer], pair: tuple[int, int], wait: float, seconds: float
) -> dict[str, Any]:
    """A step in which that pair is cut after `wait` seconds, and one after it."""
    begin(peers, "pccl", 0)
    time.sleep(wait)
    lab.cut(*pair)
    time.sleep(seconds)
    lab.heal(*pair)
    took, answers = end(peers, "pccl")
    attempts = max(answer["attempts"] for answer in answers)
    return {"pair": pair, "step": took, "attempts": attempts, "next": call(peers, "pccl", 0)}


def cut_goal(result: dict[str, Any]) -> dict[str, Any]:
    """Prints that of the worst step."""
    steps = [one["step"] for one in result["cuts"]]
    worst = max(*steps, *(one["next"] for one in result["cuts"]))
    target = result["cut_seconds"] + result["step"] + MORE_GOAL
    name = f"worst step of {size_name(result['bytes'])}, {result['preset']}, a link cut for "
    name += f"{result['cut_seconds']:g} s"
    return goal(name, worst, steps, in_seconds, at_most=target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=list(PRESETS), default="long_line")
    parser.add_argument("--mb", type=float, default=32, help="MiB of the array")
    parser.add_argument("--steps", type=int, default=5, help="without a cut, before the first one")
    parser.add_argument("--cuts", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3, help="of a cut")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    if args.steps < 1 or args.cuts < 1 or args.seconds <= 0:
        parser.error("a step at least, and a cut that lasts")
    args.dtype, args.quantize, args.secret = "float32", None, False  # of the hosts
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    about = announce()
    size = int(args.mb * MIB) // 8 * 8
    with preset(args.preset) as lab, peers_of(lab, ["pccl"], args) as peers:
        ask(peers, "size", "sized", bytes=size)
        steps = [call(peers, "pccl", 0) for _ in range(WARM_UP + args.steps)][WARM_UP:]
        step = statistics.median(steps)
        result: dict[str, Any] = {"preset": lab.name, "bytes": size, "cut_seconds": args.seconds}
        result |= {"step": step, "steps": steps, "cuts": []}
        title = f"Steps of {size_name(size)}, {lab.name}: median {step:.2f} s "
        title += f"({min(steps):.2f} to {max(steps):.2f}) without a cut"
        table = Table(title, ["cut", "hosts", "step s", "next s", "attempts"])
        pairs = itertools.cycle(itertools.combinations(range(len(lab.hosts)), 2))
        for number, pair in zip(range(args.cuts), pairs, strict=False):
            one = cut_step(lab, peers, pair, step / 2, args.seconds)
            result["cuts"].append(one)
            cells = [f"{one['step']:.2f}", f"{one['next']:.2f}", str(one["attempts"])]
            table.add([str(number + 1), f"{pair[0]} and {pair[1]}", *cells])
    print()
    write_results(args.json, about, **result, goals=[cut_goal(result)])
    if args.markdown:
        args.markdown.write_text(table.markdown())


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        raise SystemExit(f"no wide area here: {error}") from None
