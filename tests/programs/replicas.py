"""Ranks of replicas."""

from __future__ import annotations

import threading
import time
from typing import Any

import pccl
from programs.peer import expected, hear, say, start, x


def run_rank(name: str, rank: int, ranks: int) -> None:
    """Admits and reduces; says when its group's replicas have changed.

    Ends when a rank of its group is told "stop". Comes back after an eviction when told "again".
    """
    state: dict[str, Any] = {"stop": False, "order": None, "points": 0}
    heard = threading.Event()

    def listen() -> None:
        while True:
            order = hear()
            if order == "stop":
                state["stop"] = True
            elif order == "count":
                state["points"] = 100
            else:
                state["order"] = order
                heard.set()

    threading.Thread(target=listen, daemon=True).start()
    lives = 0
    while True:
        lives += 1
        start(peer_group=rank, replica_id=name, ranks_per_replica=ranks)
        say(event="joined")
        seen: tuple[str, ...] = ()
        steps = 0
        try:
            while True:
                added = pccl.admit()
                pccl.membership()
                tree: dict[str, Any] = {"x": x(1000), "stop": int(state["stop"])}
                total, info = pccl.allreduce(tree, return_info=True)
                assert (total["x"] == expected(info)).all(), "wrong sum"
                now = pccl.membership()
                steps += 1
                if now.replicas != seen:
                    say(event="replicas", names=list(now.replicas), rank=now.rank, added=added)
                    seen = now.replicas
                if total["stop"]:
                    break
                if state["points"] > 0:
                    state["points"] -= 1
                    if state["points"] == 0:
                        say(event="counted")
                time.sleep(0.002)
            say(event="done", steps=steps, lives=lives)
            heard.wait(60)
            if state["order"] == "reduce":
                total, info = pccl.allreduce(x(1000), return_info=True)
                say(event="after", size=info.world_size)
            pccl.shutdown()
            break
        except pccl.Evicted as error:
            say(event="evicted", reason=error.reason, advice=error.advice, at=time.time())
            pccl.shutdown()
            heard.wait(60)
            heard.clear()


def raise_in_one(name: str, rank: int) -> None:
    start(peer_group=rank, replica_id=name, ranks_per_replica=2)
    pccl.allreduce(x())
    say(event="joined")
    hear()
    if name == "b" and rank == 0:
        raise ValueError("a bug")
    try:
        while True:
            info = pccl.allreduce(x(), return_info=True)[1]
            if info.world_size == 1:
                say(event="alone")
                break
    except pccl.Evicted as error:
        say(event="evicted", reason=error.reason)
