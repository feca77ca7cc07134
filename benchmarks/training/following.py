"""The cost of followers to a DiLoCo run in a wide area, and what they get.

    python benchmarks/training/following.py                  # needs root
    python benchmarks/training/following.py --members 8 --followers 4 --megabytes 400

Every host has a link of `--mbit` and is `--rtt` ms from all others. Members hold `--megabytes` of
parameters. A round is `--seconds` of inner steps, in which the process sleeps, a reduction in int8
and a `pccl.publish`. The first rounds have no followers. `step` is the time of the reduction's
step, `publish` that of the copy, each on the slowest member of a round; the medians of both halves
are shown, and the longest of the second one. `pause` is how much longer a step takes with followers
than without, as a share of a round. `age` is the time from the end of a round, on the first member,
to when a follower has its parameters; `received` the share of the rounds that each follower got.
All that a follower receives must be what the members hold.
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


def be_member(parameters: int, seconds: float, rounds: int) -> None:
    """Trains and publishes, and says how long each `step` and each `publish` took."""
    pccl.init()
    model = {"w": np.zeros(parameters, np.float32)}
    diloco = DiLoCo(model, sync_every=1, quantize="int8", verify_every=0)
    say("in")
    random = np.random.default_rng(pccl.rank())
    while diloco.outer_step < rounds:
        time.sleep(seconds)
        model["w"] -= np.float32(0.01) * random.standard_normal(parameters, np.float32)
        began = time.monotonic()
        diloco.step()
        ended = time.monotonic()
        pccl.publish(diloco.parameters, diloco.outer_step)
        published = time.monotonic()
        say(
            "round",
            round=diloco.outer_step,
            took=ended - began,
            copied=published - ended,
            at=ended,
            digest=digest_of(diloco.parameters["['w']"]),
        )
    sys.stdin.readline()  # followers may need longer


def be_follower(last: int) -> None:
    """Says what it receives, to that round."""
    with pccl.follow() as follower:
        for revision in follower:
            at = time.monotonic()
            say(
                "got",
                round=revision.revision,
                at=at,
                seconds=revision.seconds,
                digest=digest_of(revision.state()["['w']"]),
            )
            if revision.revision == last:
                break
    say("end")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from lab import Host, Lab

    parameters = int(args.megabytes * 1e6 / 4)
    rounds = 2 * args.rounds + 1  # the first one makes connections
    peers: list[Peer] = []
    followers: list[Peer] = []
    hosts = args.members + args.followers
    with Lab([Host(args.mbit, args.mbit)] * hosts, delay_ms=args.rtt / 2) as lab:
        env = {"PCCL_MASTER": start_master(lab, {"PCCL_MEASURE_AFTER": "0"}), "PCCL_BIND": ""}
        try:
            least = {"PCCL_MIN_PEERS": str(args.members)}
            numbers = [str(parameters), str(args.seconds), str(rounds)]
            for host in range(args.members):
                peers.append(Peer(__file__, numbers, env | least, lab.command(host)))
            for peer in peers:
                peer.hear("in", 600)
            told: list[list[dict[str, Any]]] = []
            for number in range(1, rounds + 1):
                if number == args.rounds + 2:
                    for host in range(args.members, hosts):
                        followers.append(Peer(__file__, [str(rounds)], env, lab.command(host)))
                told.append([peer.hear("round", 600) for peer in peers])
                slowest = max(one["took"] for one in told[-1])
                print(f"round {number}: {slowest:.2f} s", flush=True)
            got: list[list[dict[str, Any]]] = []
            for follower in followers:
                own = []
                while line := follower._lines.get(timeout=600):
                    said = json.loads(line)
                    if said["event"] != "got":
                        break
                    own.append(said)
                else:
                    raise SystemExit("a follower has ended, see above")
                got.append(own)
        finally:
            for peer in (*peers, *followers):
                peer.end()
    held = {one["round"]: one["digest"] for members in told for one in members}
    if any(held[one["round"]] != one["digest"] for own in [*told, *got] for one in own):
        raise SystemExit("somebody holds or has received other parameters")
    ended = {members[0]["round"]: members[0]["at"] for members in told}
    alone, followed = told[1 : args.rounds + 1], told[args.rounds + 1 :]
    fresh = [[one for one in own if one["round"] > args.rounds + 1] for own in got]

    def slowest_of(rounds: list[list[dict[str, Any]]], what: str) -> list[float]:
        return [max(one[what] for one in members) for members in rounds]

    return {
        "step_alone": statistics.median(slowest_of(alone, "took")),
        "step_followed": statistics.median(slowest_of(followed, "took")),
        "longest": max(slowest_of(followed, "took")),
        "publish": statistics.median(slowest_of(followed, "copied")),
        "ages": [one["at"] - ended[one["round"]] for own in fresh for one in own],
        "received": [len(own) / args.rounds for own in fresh],
        "rounds": told,
        "got": got,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--followers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6, help="without followers, and as many with")
    parser.add_argument("--megabytes", type=float, default=50.0, help="of parameters")
    add_link_options(parser)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    about = announce()
    found = measure(args)
    pause = (found["step_followed"] - found["step_alone"]) / (args.seconds + found["step_alone"])
    print("| step alone | followed | longest | pause, of a round | publish | age | received |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {found['step_alone']:.2f} s | {found['step_followed']:.2f} s | {found['longest']:.2f} s "
        f"| {100 * pause:.1f} % | {found['publish']:.3f} s "
        f"| {min(found['ages']):.1f} to {max(found['ages']):.1f} s "
        f"| {', '.join(f'{100 * share:.0f} %' for share in found['received'])} |"
    )
    write_results(args.json, about, **found)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        if len(sys.argv) == 3:
            be_follower(int(sys.argv[2]))
        else:
            size, inner, last = sys.argv[2:]
            be_member(int(size), float(inner), int(last))
        sys.stdout.flush()
        os._exit(0)
    else:
        sys.exit(main())
