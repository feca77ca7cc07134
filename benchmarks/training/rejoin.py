"""How long a replica that was lost takes to be back, against the time that its bytes alone take.

Two members hold parameters and momentum in float32. A third process, which has the same arrays with
other bytes, joins while the members do nothing but let newcomers in: from before `pccl.init` until
`pccl.sync(overwrite=True)` has returned. The bytes alone: the same size through one plain TCP
connection between two of the processes, in the same run, into memory that was used before; the best
of several.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers import Peer, ask, next_order, say
from report import factor, goal
from sync import State, receive_copy, send_copy

import pccl

HOLDERS = 2
ARRAYS = ("parameters", "momentum")
GOAL = 1.8  # times the bytes alone
BUFFER = 0  # of the plain connection: the kernel adapts it


def be_peer(size: int) -> None:
    """Does what the parent says."""
    state = State(size)
    state.fill(0)
    say("ready")
    while True:
        order = next_order()
        what = order.pop("order")
        if what == "found":
            pccl.init(min_peers=HOLDERS)
            pccl.sync(state.arrays, progress=False)
            say("founded")
        elif what == "serve":  # until somebody has come
            say("serving")
            while True:
                if pccl.admit():
                    pccl.sync(state.arrays, progress=False)
                    if pccl.world_size() > HOLDERS:
                        break
            say("served")
        elif what == "gone":
            while pccl.world_size() > HOLDERS:
                pccl.admit()
            say("alone")
        elif what == "rejoin":
            state.fill(1)
            began = time.monotonic()
            pccl.init()
            _, info = pccl.sync(state.arrays, overwrite=True, progress=False, return_info=True)
            seconds = time.monotonic() - began
            say("back", seconds=seconds, received=info.rx_bytes, right=state.has(0))
        elif what == "leave":
            pccl.shutdown()
            say("left")
        elif what == "send":
            send_copy(state, BUFFER)
        elif what == "receive":
            receive_copy(state, order["port"], BUFFER)


def measure(parameters: int, rounds: int) -> dict[str, Any]:
    """Seconds of each of `rounds` returns, and of the bytes alone."""
    size = parameters * 4 * len(ARRAYS)
    with pccl.MasterNode("127.0.0.1:0") as master:
        peers: list[Peer] = []
        try:
            for _ in range(HOLDERS + 1):
                peers.append(Peer(__file__, [str(size)], {"PCCL_MASTER": master.address}))
            for peer in peers:
                peer.hear("ready")
            holders, newcomer = peers[:-1], peers[-1]
            copies = [_copy(holders[0], newcomer) for _ in range(rounds)]
            ask(holders, "found", "founded")
            seconds = [_rejoin(holders, newcomer, size) for _ in range(rounds)]
        finally:
            for peer in peers:
                peer.end()
    return {
        "parameters": parameters,
        "bytes": size,
        "rejoin_seconds": seconds,
        "copy_seconds": copies,
        "ratio": statistics.median(seconds) / min(copies),
    }


def _copy(sender: Peer, receiver: Peer) -> float:
    sender.tell("send")
    receiver.tell("receive", port=sender.hear("listening")["port"])
    seconds: float = receiver.hear("copied")["seconds"]
    sender.hear("sent")
    return seconds


def _rejoin(holders: list[Peer], newcomer: Peer, size: int) -> float:
    ask(holders, "serve", "serving")
    [back] = ask([newcomer], "rejoin", "back")
    for holder in holders:
        holder.hear("served")
    if back["received"] != size or not back["right"]:
        raise SystemExit(f"the newcomer has not received everything: {back}")
    ask([newcomer], "leave", "left")
    ask(holders, "gone", "alone")
    seconds: float = back["seconds"]
    return seconds


def words(result: dict[str, Any]) -> str:
    """The result in a line."""
    return (
        f"{result['parameters'] / 1e6:.0f} M parameters and their momentum, {result['bytes'] / 1e6:.0f} MB: back in "
        f"{statistics.median(result['rejoin_seconds']):.2f} s, {result['ratio']:.2f} times the bytes alone "
        f"({min(result['copy_seconds']):.2f} s)"
    )


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Prints that of the ratio."""
    parts = [seconds / min(result["copy_seconds"]) for seconds in result["rejoin_seconds"]]
    name = f"back with {result['bytes'] / 1e6:.0f} MB, overwriting, of the time of the bytes alone"
    return [goal(name, result["ratio"], parts, factor, at_most=GOAL)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("size", type=int, help="bytes")
    be_peer(parser.parse_args().size)
