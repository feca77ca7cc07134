"""Peers of the wide-area lab."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import zlib
from typing import Any

import numpy as np

import pccl
from programs.links import links
from programs.peer import expected, hear, peer_id, say, start, value, x


def reduce_as_told() -> None:
    """Reduces as many elements as it is told, and says how that went; 0: the end."""
    start()
    pccl.allreduce(x(10))
    say(event="in")
    for line in sys.stdin:
        count = json.loads(line)
        if count == 0:
            break
        total, info = pccl.allreduce(x(count, np.int32), return_info=True)
        right = bool(
            (total == np.int32(expected(info) & 0x7FFFFFFF)).all()
            or (total == np.int64(expected(info)).astype(np.int32)).all()
        )
        say(event="done", right=right, size=info.world_size, attempts=info.attempts)
    pccl.shutdown()


def await_congestion() -> None:
    """Waits until each connection to another peer has the congestion control that it should have.

    A connection has it from soon after it was made.
    """
    start()
    pccl.allreduce(x(10))
    wanted = os.environ["NAMES"].split()
    master = int(os.environ["PCCL_MASTER"].rpartition(":")[2])

    def names() -> list[str]:
        option = socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16
        return [end.getsockopt(*option).rstrip(b"\0").decode() for end in links(master)]

    for tries in itertools.count():
        now = names()
        if now == wanted:
            break
        if tries % 3000 == 2999:
            say(event="other", names=now)
        threading.Event().wait(0.01)
    say(event="congestion")
    hear()


def prepare_as_told() -> None:
    """Prepares a call each time that it is told; "call": makes it, and says how that went."""
    start()
    pccl.allreduce(x(10))
    say(event="in")
    while hear() != "call":
        pccl.prepare(0.5)
        say(event="prepared")
    total, info = pccl.allreduce(x(100_000), return_info=True)
    say(event="done", right=bool((total == expected(info)).all()))
    hear()


def find_a_slow_link() -> None:
    """All stop at the same reduction: each says in it what it sees."""
    comm = start()
    pccl.barrier()
    comm.optimize_topology()
    mine = np.zeros(4, np.int64)
    mine[pccl.rank()] = "SLOW" in os.environ
    slow = int(pccl.allreduce(mine).argmax())
    before = comm.topology()
    up = before.up[slow]
    assert up is not None
    say(event="measured", up=before.up)
    hear()
    seen = False
    for step in range(40):  # noqa: B007  # said below
        tree: dict[str, Any] = {"x": x(1_000_000), "seen": int(seen)}
        total, info = pccl.allreduce(tree, return_info=True)
        right = bool((total["x"] == expected(info)).all())
        if not right or total["seen"] == 4:
            break
        now = comm.topology()
        ways = [rate for way, rate in now.rate.items() if slow in way]
        seen = now.schedules != before.schedules and min(ways, default=1e9) < up / 2
    say(event="done", right=right, found=total["seen"] == 4, step=step, now=str(now))
    hear()


def admit_and_reduce() -> None:
    comm = start()
    mine = np.zeros(4, np.int64)
    mine[pccl.rank()] = "SLOW" in os.environ
    slow = int(pccl.allreduce(mine).argmax())
    shares = []
    for _ in range(3):
        pccl.admit()
        total, info = pccl.allreduce(x(500_000), return_info=True)
        assert (total == expected(info)).all()
        shares.append(comm.topology().schedules[-1].shares[slow])
    say(event="done", shares=shares, up=comm.topology().up)
    hear()


def reduce_with_a_slow_link() -> None:
    comm = start()
    pccl.barrier()
    comm.optimize_topology()
    topology = comm.topology()
    pccl.allreduce(x(10))
    slow = min(range(4), key=lambda rank: topology.up[rank] or 0)
    total, info = pccl.allreduce(x(500_000), return_info=True)
    say(
        event="done",
        right=bool((total == expected(info)).all()),
        up=topology.up,
        down=topology.down,
        rtt=list(topology.rtt.values()),
        slow=pccl.rank() == slow,
        share=topology.schedules[-1].shares[slow],
    )
    hear()


def find_the_near_ones() -> None:
    """Goes on until the ring of all of them crosses between the two sites only twice."""
    comm = start()
    count, site = int(os.environ["ALL"]), int(os.environ["SITE"])
    while True:
        pccl.admit()
        sites = pccl.allgather(np.array([site]))[:, 0]
        topology = comm.topology()
        ring = [int(sites[rank]) for rank in topology.ring]
        crosses = sum(a != b for a, b in zip(ring, ring[1:] + ring[:1], strict=True))
        found = len(sites) == count and crosses == 2
        # All see the same ranks, but a plan may have changed between two of these looks.
        if pccl.allreduce(np.array([found]), op="min")[0]:
            break
    say(event="found", rates=[rate for rate in topology.up if rate is not None])
    hear()


def reduce_between_sites() -> None:
    comm = start()
    pccl.barrier()
    comm.optimize_topology()
    say(event="planned", kind=comm.topology().schedules[-1].kind)
    for quantize in (None, None, "int8"):
        hear()
        mine = x(1_000_000, np.float32) / np.float32(1 << 24)
        total, info = pccl.allreduce(mine, quantize=quantize, return_info=True)
        right = np.float32(expected(info) / (1 << 24))
        error = float(np.abs(total - right).max())
        # All elements of a block are equal, so that it has no range, and rounding costs nothing.
        say(event="done", error=error, crc=zlib.crc32(total.tobytes()))
    hear()


def reduce_quantized_with_feedback() -> None:
    comm = start()
    pccl.barrier()
    how = pccl.Quantize("int8", error_feedback=True)
    errors, crcs = [], []
    for _ in range(8):
        rng = np.random.default_rng(value(peer_id()))
        mine = rng.standard_normal(50_000).astype(np.float32)
        mean, info = pccl.allreduce(mine, "avg", quantize=how, tag=1, return_info=True)
        right = sum(
            np.random.default_rng(value(peer)).standard_normal(50_000).astype(np.float32)
            for peer in info.contributors
        ) / len(info.contributors)
        errors.append((mean - right).tolist()[:1000])
        crcs.append(zlib.crc32(mean.tobytes()))
    each = np.abs(errors)
    together = np.abs(np.mean(errors, axis=0))
    kinds = sorted({schedule.kind for schedule in comm.topology().schedules})
    say(
        event="done",
        crcs=crcs,
        kinds=kinds,
        size=info.world_size,
        worst=float(each.max()),
        mean=float(each.mean()),
        together=float(together.mean()),
    )
    hear()
