"""Peers of runs that are attacked, or have a secret."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pccl
from programs.peer import expected, hear, peer_id, say, start, value, x


def train(peers: int) -> None:
    """Reduces until it is told anything but "count"; every element of every sum is compared."""
    start(min_peers=peers)
    say(event="in", peer=peer_id())
    steps = 0
    stop = threading.Event()

    def listen() -> None:
        while hear() == "count":
            say(event="steps", steps=steps)
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    while True:
        pccl.admit()
        mine = x(20_000)
        # Pauses like a program that computes, and leaves the attackers a core.
        tree: dict[str, Any] = {"x": mine, "stop": int(stop.wait(0.002))}
        total, info = pccl.allreduce(tree, return_info=True)
        assert (total["x"] == expected(info)).all(), "wrong sum"
        assert (mine == value(peer_id())).all(), "input was written"
        steps += 1
        if steps == 1:
            say(event="training", size=info.world_size)
        if total["stop"]:
            break
    say(event="done", steps=steps, size=info.world_size)
    hear()


def come_and_go() -> None:
    start()
    pccl.admit()
    say(event="in")
    pccl.shutdown()


def come_and_go_when_told(master: str) -> None:
    start(master=master)
    pccl.admit()
    say(event="in")
    hear()
    pccl.shutdown()
    say(event="out")


def come_and_reduce() -> None:
    """Takes part in one step of `train`."""
    start()
    pccl.admit()
    say(event="size", size=pccl.world_size())
    tree: dict[str, Any] = {"x": x(20_000), "stop": 0}
    pccl.allreduce(tree)
    pccl.shutdown()
    say(event="out")


def reduce_as_told() -> None:
    """Reduces arrays of so many elements as it is told."""
    comm = start()
    say(event="in", rank=pccl.rank(), peer=peer_id(), pattern=value(peer_id()))
    while (count := hear()) != "end":
        total, info = pccl.allreduce(x(count), return_info=True)
        right = bool((total == expected(info)).all()) and info.world_size == 2
        say(event="reduced", right=right, relayed=sorted(comm.topology().relayed))
    pccl.shutdown()


def train_and_sync(killed: bool) -> None:
    start(min_peers=3)
    say(event="in")
    for step in range(40):
        pccl.admit()
        mine = x(150_000)
        total, info = pccl.allreduce(mine, return_info=True)
        assert (total == expected(info)).all(), "wrong sum"
        if step == 20 and killed:
            os.kill(os.getpid(), signal.SIGKILL)
    state = pccl.sync({"w": x(300_000)})
    say(event="done", size=info.world_size, w=int(state["w"][7]))
    hear()


def print_world_size() -> None:
    pccl.init()
    print(pccl.world_size())


def print_length_of_secret() -> None:
    pccl.init()
    print(len(os.environ["PCCL_SECRET"]), pccl.allreduce(1))


def run_a_master(listen: str) -> None:
    with pccl.MasterNode(listen):
        pass
