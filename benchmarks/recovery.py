"""How long survivors take when a peer dies in the middle of an all-reduce, on loopback.

    python benchmarks/recovery.py [--kills 50] [--stops 5] [--size 64MiB] [--json FILE] [--markdown FILE]

Four peers sum a float32 array. Once they are at it, after a random part of the usual time, one of
them gets SIGKILL; the other three finish among themselves, and check the sum. A newcomer takes the
place, and so on. Undisturbed all-reduces of four and of three run in between, so that all meet the
same machine.

    recovery      from before the signal was sent until the last survivor has the result
    detection     the part of it until the last survivor knew: in each survivor a second thread
                  waits in a barrier that the victim never enters, so it ends when the membership
                  without the victim is announced. The rest is the all-reduce of the three, from
                  its start
    goal          recovery < 2 x the median undisturbed all-reduce of four + 50 ms

Kills that came too late, after the result was everybody's, do not count and are made again. The
same with SIGSTOP and a heartbeat timeout of half a second: nothing breaks, so what is found out is
silence, and the goal is that timeout more.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from peers import Peer, ask, next_order, say
from report import announce, parse_sizes, percentile, size_name, write_results

import pccl

WORLD = 4
UNDISTURBED = 2  # all-reduces before each kill
GOAL_SECONDS = 0.05
QUICK = {  # for SIGSTOP
    "PCCL_HEARTBEAT_INTERVAL": "0.1",
    "PCCL_HEARTBEAT_TIMEOUT": "0.5",
    "PCCL_LINK_TIMEOUT": "0.3",
}


# ---- a peer
# ------------------------------------------------------------------------------


def be_peer(size: int) -> None:
    """Does what the parent says."""
    comm = pccl.init()
    own = comm._engine.peer_id()
    send = np.full(size // 4, value(own), np.float32)
    out = np.empty_like(send)
    out.fill(0)
    say("in", peer=own)
    while True:
        order = next_order()
        if order["order"] == "meet":
            while pccl.world_size() != order["count"]:
                pccl.admit()
            say("met")
        elif order["order"] == "reduce":
            say("reduced", **reduce(send, out))
        elif order["order"] == "disturbed":
            say("finished", **reduce(send, out, watch=order["watch"], tell=True))


def value(peer: str) -> int:
    """Returns the value of all elements of a peer's array. All peers know it; sums are exact."""
    return int(peer[:4], 16)


def reduce(
    send: np.ndarray, out: np.ndarray, watch: bool = False, tell: bool = False
) -> dict[str, Any]:
    """One all-reduce, together with the others, and checked."""
    noticed: list[float] = []

    def wait_for_news() -> None:
        pccl.barrier()
        noticed.append(time.monotonic())

    watcher = threading.Thread(target=wait_for_news)
    pccl.barrier()
    began = time.monotonic()
    if tell:
        say("going")
    if watch:
        watcher.start()
    _, info = pccl.allreduce(send, out=out, tag=1, return_info=True)
    ended = time.monotonic()
    if watch:
        watcher.join()
    if (out != sum(map(value, info.contributors))).any():
        raise SystemExit("wrong sum")
    return {
        "began": began,
        "ended": ended,
        "noticed": noticed[0] if noticed else None,
        "members": len(info.contributors),
        "attempts": info.attempts,
    }


# ---- the parent
# ------------------------------------------------------------------------------


class Cluster:
    """Four peers, some of whom die."""

    def __init__(self, size: int, environment: dict[str, str]) -> None:
        self.size = size
        # The master in this process reads the same settings, for as long as this cluster lives.
        self.environment = environment
        os.environ.update(environment)
        self.master = pccl.MasterNode("127.0.0.1:0")
        self.master.run()
        self.peers: list[Peer] = []
        self.undisturbed: list[float] = []
        self.undisturbed_survivors: list[float] = []

    def fill(self) -> None:
        """Newcomers for those who died."""
        new = [
            Peer(__file__, ["--size", f"{self.size}b"], {"PCCL_MASTER": self.master.address})
            for _ in range(WORLD - len(self.peers))
        ]
        self.peers += new
        for peer in new:
            peer.hear("in")
        ask(self.peers, "meet", "met", count=WORLD)

    def reduce(self) -> float:
        """An undisturbed all-reduce; seconds from the first that began to the last that ended."""
        answers = ask(self.peers, "reduce", "reduced")
        return max(a["ended"] for a in answers) - min(a["began"] for a in answers)

    def disturb(self, number: signal.Signals, rng: random.Random) -> dict[str, float] | None:
        """One death; None when it came too late."""
        self.fill()
        self.reduce()  # the newcomer's first: its links and pages are new
        self.undisturbed += [self.reduce() for _ in range(UNDISTURBED)]
        usual = statistics.median(self.undisturbed)
        victim = self.peers.pop(rng.randrange(WORLD))
        for peer in self.peers:
            peer.tell("disturbed", watch=True)
        victim.tell("disturbed", watch=False)
        for peer in (victim, *self.peers):
            peer.hear("going")
        time.sleep(rng.random() * usual)
        at = victim.signal(number)
        answers = [peer.hear("finished") for peer in self.peers]
        victim.end()
        counts = answers[0]["members"] == WORLD - 1
        if counts:
            self.undisturbed_survivors.append(self.reduce())
        else:
            ask(self.peers, "meet", "met", count=WORLD - 1)
            return None
        return {
            "recovery": max(a["ended"] for a in answers) - at,
            "detection": max(a["noticed"] for a in answers) - at,
            "into_it": at - min(a["began"] for a in answers),
        }

    def end(self) -> None:
        for peer in self.peers:
            peer.end()
        self.master.interrupt()
        for name in self.environment:
            del os.environ[name]


def measure(number: signal.Signals, times: int, options: argparse.Namespace) -> dict[str, Any]:
    """So many deaths by that signal."""
    rng = random.Random(options.seed)
    stopped = number == signal.SIGSTOP
    cluster = Cluster(options.size, QUICK if stopped else {})
    deaths: list[dict[str, float]] = []
    late = 0
    try:
        while len(deaths) < times:
            death = cluster.disturb(number, rng)
            if death is None:
                late += 1
                if late > 20 + 3 * times:
                    raise SystemExit("the signals come too late; take a larger --size")
                continue
            deaths.append(death)
            if sys.stdout.isatty():
                print(f"\r{number.name} {len(deaths)}/{times}", end="", flush=True)
    finally:
        cluster.end()
    if sys.stdout.isatty():
        print("\r", end="")
    usual = statistics.median(cluster.undisturbed)
    timeout = float(QUICK["PCCL_HEARTBEAT_TIMEOUT"]) if stopped else 0.0
    goal = 2 * usual + GOAL_SECONDS + timeout
    recoveries = [death["recovery"] for death in deaths]
    detections = [death["detection"] for death in deaths]
    rest = [death["recovery"] - death["detection"] for death in deaths]
    return {
        "signal": number.name,
        "bytes": options.size,
        "deaths": times,
        "came_late": late,
        "heartbeat_timeout": timeout or None,
        "undisturbed_median": usual,
        "undisturbed_p99": percentile(cluster.undisturbed, 0.99),
        "undisturbed_survivors_median": statistics.median(cluster.undisturbed_survivors),
        "recovery_median": statistics.median(recoveries),
        "recovery_p99": percentile(recoveries, 0.99),
        "detection_median": statistics.median(detections),
        "detection_p99": percentile(detections, 0.99),
        "rest_median": statistics.median(rest),
        "goal": goal,
        "within_goal": sum(recovery < goal for recovery in recoveries) / times,
        "all": deaths,
    }


HEAD = """\
| signal | array | deaths | undisturbed ms | of three ms | recovery ms: median | p99 | detection ms: median | p99 \
| goal ms | within |
|---|---|---|---|---|---|---|---|---|---|---|"""


def markdown_row(result: dict[str, Any]) -> str:
    names = [
        "undisturbed_median",
        "undisturbed_survivors_median",
        "recovery_median",
        "recovery_p99",
    ]
    names += ["detection_median", "detection_p99", "goal"]
    cells = [result["signal"], size_name(result["bytes"]), str(result["deaths"])]
    cells += [f"{result[name] * 1e3:.0f}" for name in names]
    return "| " + " | ".join([*cells, f"{result['within_goal']:.0%}"]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--stops", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--size", default="64MiB", help="of the array; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    [options.size] = parse_sizes(options.size)
    if options.peer:
        be_peer(options.size)
    about = announce()
    print(f"{WORLD} peers on {about['cores']} cores", flush=True)
    plan = [(signal.SIGKILL, options.kills), (signal.SIGSTOP, options.stops)]
    results = [measure(number, times, options) for number, times in plan if times]
    rows = [HEAD, *map(markdown_row, results)]
    print("\n".join(rows))
    write_results(options.json, about, results=results)
    if options.markdown:
        options.markdown.write_text("\n".join(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
