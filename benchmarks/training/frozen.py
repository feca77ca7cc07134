"""The cost of a member that is frozen for a part of each minute: what the others and the run reach.

    python benchmarks/training/frozen.py                        # three ways, three minutes each
    python benchmarks/training/frozen.py --minutes 5 --mode sync --grace 1
    python benchmarks/training/frozen.py --asleep               # it goes on to send heartbeats

Members are processes of this host, over TCP. An inner step sleeps for `--step-seconds`, so they
take no processor time from each other. The last member is stopped (SIGSTOP) for `--frozen` seconds
of each minute. In the way "well" it is not; in "waits" the others wait for it until the heartbeat
timeout puts it out; in "quorum" they have `--grace` seconds for it. With `--asleep` it is not
stopped, but sleeps for so long in an inner step, and so no heartbeat timeout puts it out. It comes
back as a newcomer that watches (`background_join`). Members must hold the same bytes after the same
round.

`others`: inner steps a second of the other members, as a share of the first way's. `learned`:
tokens that the run has learned from, likewise; a token is an inner step. `longest`: the longest
time between two rounds' ends of a member that was not stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers import Peer, digest_of, say
from report import announce, write_results

import pccl
from pccl.diloco import DiLoCo

WAYS = ("well", "waits", "quorum")
_PERIOD = 60.0  # seconds, in which it is frozen once


def be_peer(parameters: int, step_seconds: float, every: int, mode: str, grace: float) -> None:
    """Trains until it is killed, and says at the end of each round how far it is."""
    model = {"w": np.zeros(parameters, np.float32)}
    quorum: dict[str, Any] = {"quorum": 0.75, "grace_seconds": grace} if grace >= 0 else {}
    pccl.init()
    diloco = DiLoCo(
        model,
        sync_every=every,
        mode=mode,
        verify_every=0,
        background_join=True,
        rejoin=pccl.init,
        **quorum,
    )
    say("in")
    random = np.random.default_rng()
    steps = 0
    while True:
        time.sleep(step_seconds)
        model["w"] -= np.float32(0.01) * random.standard_normal(parameters, np.float32)
        steps += 1
        if diloco.step(tokens=1):
            say(
                "round",
                round=diloco.outer_step,
                at=time.monotonic(),
                steps=steps,
                learned=diloco.world_tokens,
                digest=digest_of(diloco.parameters["['w']"]),
            )


def freeze(peer: Peer, seconds: float, asleep: bool, end: threading.Event) -> None:
    """Stops it for so long in each minute, until the end."""
    while not end.wait((_PERIOD - seconds) / 2):
        if asleep:
            peer.signal(signal.SIGUSR1)
            end.wait(seconds)
        else:
            peer.signal(signal.SIGSTOP)
            end.wait(seconds)
            peer.signal(signal.SIGCONT)
        if end.wait((_PERIOD - seconds) / 2):
            return


def measure(args: argparse.Namespace, way: str) -> dict[str, Any]:
    grace = args.grace if way == "quorum" else -1.0
    numbers = (args.parameters, args.step_seconds, args.every, args.mode, grace, args.frozen)
    end = threading.Event()
    with pccl.MasterNode("127.0.0.1:0") as master:
        env = {"PCCL_MASTER": master.address, "PCCL_SHM": "0", "PCCL_MIN_PEERS": str(args.members)}
        peers = [Peer(__file__, [str(one) for one in numbers], env) for _ in range(args.members)]
        try:
            for peer in peers:
                peer.hear("in")
            begun = time.monotonic()
            told: list[list[dict[str, Any]]] = [[] for _ in peers]
            if way != "well":
                frost = threading.Thread(
                    target=freeze, args=(peers[-1], args.frozen, args.asleep, end)
                )
                frost.start()
            while time.monotonic() < begun + 60 * args.minutes:
                for one, peer in zip(told[:-1], peers[:-1], strict=True):
                    one.append(peer.hear("round"))
            end.set()
            if way != "well":
                frost.join()
            told[-1] = peers[-1].heard()
            if peers[-1].process.poll() is not None:
                raise SystemExit("the member that was frozen has ended, see above")
        finally:
            end.set()
            for peer in peers:
                peer.end()
    held: dict[int, str] = {}
    for one in (said for own in told for said in own):
        if held.setdefault(one["round"], one["digest"]) != one["digest"]:
            raise SystemExit(f"members hold different parameters after round {one['round']}")
    spans = [(own[0], own[-1]) for own in told[:-1]]
    gaps = [b["at"] - a["at"] for own in told[:-1] for a, b in zip(own, own[1:], strict=False)]
    return {
        "way": way,
        "others": sum((b["steps"] - a["steps"]) / (b["at"] - a["at"]) for a, b in spans),
        "learned": sum((b["learned"] - a["learned"]) / (b["at"] - a["at"]) for a, b in spans)
        / len(spans),
        "longest": max(gaps),
        "rounds": len(held),
        "told": told,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=3.0, help="for each way")
    parser.add_argument("--frozen", type=float, default=20.0, help="seconds of each minute")
    parser.add_argument("--asleep", action="store_true", help="it sleeps, and is not stopped")
    parser.add_argument("--grace", type=float, default=2.0, help="seconds")
    parser.add_argument("--mode", choices=["sync", "async"], default="async")
    parser.add_argument("--every", type=int, default=100, help="inner steps of a round")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    about = announce()
    results = [measure(args, way) for way in args.ways]
    print("| way | others' steps/s | others | learned/s | learned | longest |")
    print("|---|---|---|---|---|---|")
    well = results[0]
    for one in results:
        print(
            f"| {one['way']} | {one['others']:.1f} | {100 * one['others'] / well['others']:.1f} % "
            f"| {one['learned']:.1f} | {100 * one['learned'] / well['learned']:.1f} % "
            f"| {one['longest']:.1f} s |"
        )
    write_results(args.json, about, results=results)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        size, seconds, inner, kind, patience, nap = sys.argv[2:]
        signal.signal(signal.SIGUSR1, lambda *_: time.sleep(float(nap)))
        be_peer(int(size), float(seconds), int(inner), kind, float(patience))
    else:
        sys.exit(main())
