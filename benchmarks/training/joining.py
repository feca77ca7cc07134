"""The cost of newcomers in a DiLoCo run in a wide area: how long the members' `step` takes at the
ends of rounds, alone and while newcomers come.

    python benchmarks/training/joining.py                      # both ways; needs root
    python benchmarks/training/joining.py --members 8 --megabytes 400 --ways background

Every host has a link of `--mbit` and is `--rtt` ms from all others. Members hold `--megabytes` of
parameters and momentum together, of which a newcomer needs all. A round is `--seconds` of inner
steps, in which the process sleeps, and a reduction in int8. `alone` is the median time of `step`
over the rounds before the first newcomer comes. A pause is what a member's `step` takes beyond it,
as a share of a round. Part of it remains when nobody watches any more, since a reduction of more
members takes longer: `beside` is the pause beyond rounds with as many members, of whom none
watches. In the way "waiting" all wait until a newcomer has the state; in "background"
it watches meanwhile. Links are not measured by themselves, which takes three seconds where
newcomers have come and operations are slow. At the end all must hold the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "wan"))

from peers import Peer, digest_of, say
from report import announce, write_results
from wide import add_link_options, start_master

import pccl
from pccl.diloco import DiLoCo

BEFORE = 3  # rounds before the first newcomer comes; the first one also makes connections
WAYS = {"waiting": False, "background": True}


def be_peer(parameters: int, seconds: float, rounds: int, background: bool) -> None:
    """Trains to that round of the run, and says how long each `step` took."""
    pccl.init()
    # Newcomers have nothing in common with the members, so everything has to be sent.
    model = {"w": np.full(parameters, os.getpid(), np.float32)}
    began = time.monotonic()
    diloco = DiLoCo(
        model, sync_every=1, quantize="int8", verify_every=0, background_join=background
    )
    say("in", seconds=time.monotonic() - began, round=diloco.outer_step)
    random = np.random.default_rng(pccl.rank())
    while diloco.outer_step < rounds:
        time.sleep(seconds)
        model["w"] -= np.float32(0.01)
        model["w"][:1000] -= np.float32(0.01) * random.standard_normal(1000, np.float32)
        began = time.monotonic()
        diloco.step()
        took = time.monotonic() - began
        members, watching = pccl.world_size(), len(diloco.observers)
        say("round", round=diloco.outer_step, took=took, members=members, watching=watching)
    say("end", digest=digest_of(diloco.parameters["['w']"]))


def beside(steps: list[dict[str, Any]], seconds: float) -> float:
    """The longest `step` with watching newcomers, beyond those of as many members without any, as a
    share of a round."""
    quiet = {
        members: statistics.median(times)
        for members in {one["members"] for one in steps}
        if (times := [s["took"] for s in steps if s["members"] == members and not s["watching"]])
    }
    watched = [one for one in steps if one["watching"] and one["members"] in quiet]
    return max(
        ((s["took"] - quiet[s["members"]]) / (seconds + quiet[s["members"]]) for s in watched),
        default=0.0,
    )


def measure(args: argparse.Namespace, way: str) -> dict[str, Any]:
    """A run in which `args.newcomers` come, one every two rounds."""
    from lab import Host, Lab

    parameters = int(args.megabytes * 1e6 / 8)
    rounds = BEFORE + 2 * args.newcomers + args.more
    arguments = [str(parameters), str(args.seconds), str(rounds), str(int(WAYS[way]))]
    hosts = args.members + args.newcomers
    peers: list[Peer] = []
    with Lab([Host(args.mbit, args.mbit)] * hosts, delay_ms=args.rtt / 2) as lab:
        env = {"PCCL_MASTER": start_master(lab, {"PCCL_MEASURE_AFTER": "0"}), "PCCL_BIND": ""}

        def start(host: int, **more: str) -> None:
            peers.append(Peer(__file__, arguments, env | more, lab.command(host)))

        try:
            for host in range(args.members):
                start(host, PCCL_MIN_PEERS=str(args.members))
            for peer in peers:
                peer.hear("in", 600)
            steps: list[dict[str, Any]] = []
            for number in range(1, rounds + 1):
                if number > BEFORE and (number - BEFORE) % 2 and len(peers) < hosts:
                    start(len(peers))
                took = [peer.hear("round", 600) for peer in peers[: args.members]]
                assert {one["round"] for one in took} == {number}
                slowest = max(one["took"] for one in took)
                steps.append(took[0] | {"took": slowest})
                members, watching = took[0]["members"], took[0]["watching"]
                print(f"{way}, round {number}: {slowest:.2f} s", end=", ")
                print(f"{members} members, {watching} watching", flush=True)
            joined = [peer.hear("in", 600) for peer in peers[args.members :]]
            digests = []
            for peer in peers:
                while (said := json.loads(peer._lines.get(timeout=600)))["event"] == "round":
                    pass
                digests.append(said["digest"])
        finally:
            for peer in peers:
                peer.end()
    if len(set(digests)) != 1:
        raise SystemExit(f"members hold different parameters: {digests}")
    alone = statistics.median(one["took"] for one in steps[1:BEFORE])
    worst = max(one["took"] for one in steps[BEFORE:])
    return {
        "way": way,
        "alone": alone,
        "worst": worst,
        "pause": (worst - alone) / (args.seconds + alone),
        "beside": beside(steps[1:], args.seconds),
        "joined": [{"seconds": one["seconds"], "round": one["round"]} for one in joined],
        "steps": steps,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--newcomers", type=int, default=2)
    parser.add_argument("--more", type=int, default=3, help="rounds after the last one's two")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of state")
    add_link_options(parser)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    about = announce()
    results = [measure(args, way) for way in args.ways]
    print("| newcomers | alone | worst step | pause, of a round | beside | until they count |")
    print("|---|---|---|---|---|---|")
    for one in results:
        until = ", ".join(f"{joined['seconds']:.0f} s" for joined in one["joined"])
        print(
            f"| {one['way']} | {one['alone']:.2f} s | {one['worst']:.2f} s "
            f"| {100 * one['pause']:.1f} % | {100 * one['beside']:.1f} % | {until} |"
        )
    write_results(args.json, about, results=results)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        size, inner, last, behind = sys.argv[2:]
        be_peer(int(size), float(inner), int(last), behind == "1")
    else:
        sys.exit(main())
