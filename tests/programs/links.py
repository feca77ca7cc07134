"""Peers that end their connections to other peers while these reduce, or look at them."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import pccl
from programs.peer import expected, hear, say, start, x


def links(master: int) -> Iterator[socket.socket]:
    """Copies of the connections of this process, but for those to the master's port."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            end = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with end:
            end.setblocking(False)  # otherwise dup() would make the connection itself blocking
            try:
                if (
                    end.type == socket.SOCK_STREAM
                    and end.family in (socket.AF_INET, socket.AF_INET6)
                    and master not in (end.getpeername()[1], end.getsockname()[1])
                ):
                    yield end
            except OSError:
                continue


def received(link: socket.socket) -> int:
    """Bytes, by the kernel's count."""
    at = 128  # tcpi_bytes_received
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + 8)
    return int(struct.unpack_from("Q", info, at)[0])


def say_received() -> None:
    """Says how many bytes have come on its TCP connections to other peers."""
    master = int(os.environ["PCCL_MASTER"].rpartition(":")[2])
    say(event="received", bytes=sum(map(received, links(master))))


def hear_heartbeats(count: int) -> None:
    """Says how long so many take to come, on the only link."""
    start()
    pccl.allreduce(x())
    (link,) = [end.dup() for end in links(int(os.environ["PCCL_MASTER"].rpartition(":")[2]))]
    before = received(link)
    began = time.monotonic()
    while received(link) < before + 72 * count:
        threading.Event().wait(0.01)
    say(event="heard", seconds=time.monotonic() - began)
    hear()


class Saboteur(threading.Thread):
    """Ends one connection every few milliseconds, chosen at random."""

    def __init__(self, master: int) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.ended = 0
        self._master = master

    def run(self) -> None:
        rng = random.Random(1)
        while not self.done.wait(0.03):
            alive = 0
            chosen = None
            for end in links(self._master):
                alive += 1
                if rng.randrange(alive) == 0:
                    if chosen:
                        chosen.close()
                    chosen = end.dup()
            if chosen and alive > 12:  # of 16: no pair ever loses its last one
                try:
                    chosen.shutdown(rng.choice([socket.SHUT_RDWR, socket.SHUT_WR]))
                    self.ended += 1
                except OSError:
                    pass
            if chosen:
                chosen.close()


def reduce_and_end_connections(steps: int, quantize: bool) -> None:
    start()
    keywords: dict[str, Any] = {}
    if quantize:
        keywords = {"quantize": pccl.Quantize("int8", error_feedback=True), "tag": 1}
    saboteur = Saboteur(int(os.environ["PCCL_MASTER"].rpartition(":")[2]))
    pccl.barrier()
    saboteur.start()
    mine = x(200_000, np.float32 if quantize else np.int64)
    attempts = operations = all_ended = 0
    while operations < 2 * steps or all_ended <= 20:
        total, info = pccl.allreduce(mine, return_info=True, **keywords)
        assert info.world_size == 3, info
        exact = expected(info)
        most = 0.02 * abs(exact) + 1 if quantize else 0
        assert (abs(total - exact) <= most).all(), operations
        attempts += info.attempts
        # How many ended everywhere: the same number for all, so all stop after the same operation.
        total, info = pccl.allreduce(np.array([saboteur.ended]), return_info=True)
        all_ended = int(total[0])
        attempts += info.attempts
        operations += 2
    saboteur.done.set()
    pccl.barrier()
    say(
        event="done",
        attempts=attempts,
        operations=operations,
        all_ended=all_ended,
        open=len(os.listdir("/proc/self/fd")),
    )
    hear()
