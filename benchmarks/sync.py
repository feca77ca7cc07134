"""What `pccl.sync` costs, against the machine it runs on; loopback.

    python benchmarks/sync.py [--size 1GiB] [--rounds 5] [--holders 3]
        [--transport shared,shm,tcp] [--pause 3] [--json FILE] [--markdown FILE]

newcomer      three members hold a state, a fourth comes in with other bytes and receives it all:
              seconds from when the last of them called sync until the newcomer has it, all
              hashing, checking and copying included. As a ratio to the same bytes through one
              plain TCP connection between two of the processes, in the same run: blocking sockets,
              large buffers, received straight into memory that was used before; the best of
              several buffer sizes is taken
overwriting   the same with `overwrite=True`: the newcomer keeps nothing beside its old state
hashing       a sync of a peer alone hashes its state and nothing else: bytes per CPU second,
              whatever the number of threads, as a ratio to bytes per CPU second of NumPy
              reductions that only read the same memory, with as many threads; the fastest kind of
              reduction is taken
new memory    the newcomer keeps what it receives beside its old state until all of it is there, so
              it needs as much new memory: bytes per second of touching that much for the first
              time, right after as much was given back, and after a pause of 3 seconds. Then the
              host of a virtual machine may have taken it back, and gives it again page by page
no-op         all members in step: seconds of a sync, and bytes of state moved, which must be 0

Rates are in 10^9 bytes per second. Each figure is the median of the rounds, but the best one for
what pccl is compared with. The goals are for the overwriting newcomer's rate beside the copy's: 1.5
times where members share memory, with arrays of `pccl.empty` ("shared") and with others ("shm"),
and 0.8 times over TCP ("tcp": `PCCL_SHM=0`). Needs seven times the size in memory.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers import Peer, ask, next_order, say
from report import (
    MIB,
    Table,
    announce,
    factor,
    goal,
    parse_sizes,
    quartiles,
    size_name,
    write_results,
)

import pccl

HOLDERS = 3
GOALS = {"shared": 1.5, "shm": 1.5, "tcp": 0.8}  # by transport: times the rate of the copy
ARRAYS = 8  # the state's
HASH_THREADS = 8  # at most, as in the engine
COPY_BUFFERS = [0, MIB, 4 * MIB, 16 * MIB]  # of sockets; 0: the kernel adapts
COPY_PIECE = 4 * MIB  # per call


# ---- a peer
# ------------------------------------------------------------------------------


class State:
    """Arrays in one piece of memory."""

    def __init__(self, size: int, shared: bool = False) -> None:
        empty = pccl.empty if shared else np.empty
        self.memory: np.ndarray = empty(size // 8, np.uint64)
        self.memory.fill(0)
        self.arrays = {
            f"layer {i}": part for i, part in enumerate(np.array_split(self.memory, ARRAYS))
        }

    def fill(self, seed: int) -> None:
        """Noise, the same for the same seed."""
        piece = MIB // 8
        words = np.random.default_rng(seed).integers(0, 1 << 63, piece, np.uint64)
        for first in range(0, self.memory.size, piece):
            part = self.memory[first : first + piece]
            np.bitwise_xor(words[: part.size], np.uint64(first), out=part)

    def has(self, seed: int) -> bool:
        other = State(self.memory.nbytes)
        other.fill(seed)
        return np.array_equal(self.memory, other.memory)


def sync(state: State, overwrite: bool) -> dict[str, Any]:
    """One sync, begun by all at once."""
    pccl.barrier()
    began, cpu = time.monotonic(), time.process_time()
    _, info = pccl.sync(state.arrays, progress=False, return_info=True, overwrite=overwrite)
    return {
        "began": began,
        "ended": time.monotonic(),
        "cpu": time.process_time() - cpu,
        "tx": info.tx_bytes,
        "rx": info.rx_bytes,
        "members": info.world_size,
    }


def in_threads(threads: int, work: Callable[[np.ndarray], object], memory: np.ndarray) -> float:
    """CPU seconds of doing it to a part of the memory in each thread."""

    def quietly(part: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            work(part)

    parts = np.array_split(memory, threads)
    cpu = time.process_time()
    helpers = [threading.Thread(target=quietly, args=(part,)) for part in parts]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    return time.process_time() - cpu


def read_memory(memory: np.ndarray, threads: int, rounds: int) -> dict[str, float]:
    """Bytes per CPU second of what only reads, by kind."""
    doubles = memory.view(np.float64)  # noise: sums may overflow, at the same speed
    kinds = {
        "sum of uint64": (memory, np.add.reduce),
        "or of uint64": (memory, np.bitwise_or.reduce),
        "max of uint64": (memory, np.maximum.reduce),
        "sum of float64": (doubles, np.add.reduce),
        "dot of float64": (doubles, lambda part: np.dot(part, part)),
    }
    return {
        name: memory.nbytes / min(in_threads(threads, work, data) for _ in range(rounds))
        for name, (data, work) in kinds.items()
    }


def touch_new_memory(size: int) -> float:
    """Seconds of touching that many bytes for the first time, in the order of their addresses."""
    began = time.monotonic()
    memory = np.empty(size, np.uint8)
    memory[:: os.sysconf("SC_PAGESIZE")] = 1
    return time.monotonic() - began


def send_copy(state: State, buffer: int) -> None:
    """Waits for one connection, and gives it the whole state."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        say("listening", port=listener.getsockname()[1])
        stream, _ = listener.accept()
        with stream:
            data = memoryview(state.memory).cast("B")
            stream.recv(1)  # the other side is ready
            for first in range(0, data.nbytes, COPY_PIECE):
                stream.sendall(data[first : first + COPY_PIECE])
            stream.recv(1)  # until it has everything
    say("sent")


def receive_copy(state: State, port: int, buffer: int) -> None:
    """Receives a whole state into this one."""
    with socket.socket() as stream:
        if buffer:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        stream.connect(("127.0.0.1", port))
        data = memoryview(state.memory).cast("B")
        began = time.monotonic()
        stream.sendall(b"x")
        have = 0
        while have < data.nbytes:
            count = stream.recv_into(data[have : have + COPY_PIECE])
            if not count:
                raise SystemExit("the copy ended early")
            have += count
        say("copied", seconds=time.monotonic() - began)
        stream.sendall(b"x")


def be_peer(size: int, rounds: int, transport: str) -> None:
    """Does what the parent says."""
    state = State(size, transport == "shared")
    state.fill(0)
    say("ready")
    while True:
        order = next_order()
        what = order.pop("order")
        if what == "join":
            pccl.init()
            say("in")
        elif what == "leave":
            pccl.shutdown()
            say("out")
        elif what == "meet":
            while pccl.world_size() != order["count"]:
                pccl.admit()
            say("met")
        elif what == "fill":
            state.fill(order["seed"])
            say("filled")
        elif what == "check":
            say("checked", right=state.has(order["seed"]))
        elif what == "sync":
            say("synced", **sync(state, order.get("overwrite", False)))
        elif what == "read":
            threads = min(len(os.sched_getaffinity(0)), HASH_THREADS)
            say("read", rates=read_memory(state.memory, threads, rounds))
        elif what == "touch":
            say("touched", seconds=touch_new_memory(size))
        elif what == "send":
            send_copy(state, order["buffer"])
        elif what == "receive":
            receive_copy(state, order["port"], order["buffer"])


# ---- the parent
# ------------------------------------------------------------------------------


def together(answers: list[dict[str, Any]], ended: str = "all") -> float:
    """Seconds of a sync, from the last that began to the last that ended, or to the newcomer, who
    is the last one."""
    end = answers[-1]["ended"] if ended == "newcomer" else max(a["ended"] for a in answers)
    return end - max(a["began"] for a in answers)


def moved(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["tx"] + answer["rx"] for answer in answers]


def measure(size: int, rounds: int, holders: int, transport: str, pause: float) -> dict[str, Any]:
    """All of it."""
    with pccl.MasterNode("127.0.0.1:0") as master:
        arguments = ["--size", f"{size}b", "--rounds", str(rounds), "--transport", transport]
        peers: list[Peer] = []
        try:
            env = {"PCCL_MASTER": master.address, "PCCL_SHM": "0" if transport == "tcp" else "1"}
            for number in range(holders + 1):
                peers.append(Peer(__file__, arguments, env))
                peers[number].hear("ready")
            result = {
                "bytes": size,
                "holders": holders,
                "transport": transport,
                **measure_hashing(peers[0], size, rounds),
                **measure_copy(peers, size, rounds),
            }
            form_group(peers[:-1])
            result |= {
                **measure_newcomer(peers, size, rounds),
                **measure_newcomer(peers, size, rounds, "overwriting", overwrite=True),
                **measure_no_op(peers, rounds),
                **measure_new_memory(peers[-1], size, pause),  # last: it leaves memory behind
            }
        finally:
            for peer in peers:
                peer.end()
    for kind in ("newcomer", "overwriting"):
        result[f"{kind}_to_copy"] = result[f"{kind}_rate"] / result["copy_rate"]
    result["hash_to_read"] = result["hash_rate"] / result["read_rate"]
    return result


def measure_hashing(alone: Peer, size: int, rounds: int) -> dict[str, Any]:
    ask([alone], "join", "in")
    [read] = ask([alone], "read", "read")
    syncs = [ask([alone], "sync", "synced")[0] for _ in range(rounds + 1)][1:]
    return {
        "hash_rate": size / statistics.median(sync["cpu"] for sync in syncs),
        "alone_seconds": statistics.median(map(together, [[sync] for sync in syncs])),
        "read_rate": max(read["rates"].values()),
        "read_rates": read["rates"],
    }


def measure_copy(peers: list[Peer], size: int, rounds: int) -> dict[str, Any]:
    sender, receiver = peers[0], peers[-1]
    rates: dict[int, float] = {}
    for buffer in COPY_BUFFERS:
        for _ in range(max(2, rounds // 2)):
            sender.tell("send", buffer=buffer)
            port = sender.hear("listening")["port"]
            receiver.tell("receive", port=port, buffer=buffer)
            seconds = receiver.hear("copied")["seconds"]
            sender.hear("sent")
            rates[buffer] = max(rates.get(buffer, 0.0), size / seconds)
    return {"copy_rate": max(rates.values()), "copy_rates": rates}


def measure_new_memory(peer: Peer, size: int, pause: float) -> dict[str, Any]:
    def touch() -> float:
        return size / ask([peer], "touch", "touched")[0]["seconds"]

    touch()
    at_once = [touch(), touch()]
    later = []
    for _ in range(2):
        time.sleep(pause)
        later.append(touch())
    return {"new_memory_rates": at_once, "new_memory_rates_after_pause": later}


def measure_newcomer(
    peers: list[Peer], size: int, rounds: int, kind: str = "newcomer", *, overwrite: bool = False
) -> dict[str, Any]:
    holders, newcomer = peers[:-1], peers[-1]
    seconds, shares, cpu = [], [], []
    for number in range(rounds):
        ask([newcomer], "fill", "filled", seed=1 + number)
        ask([newcomer], "join", "in")
        ask(peers, "meet", "met", count=len(peers))
        answers = ask(peers, "sync", "synced", overwrite=overwrite)
        if answers[-1]["rx"] != size or sum(answer["tx"] for answer in answers) != size:
            raise SystemExit(f"not the whole state went to the newcomer: {answers}")
        [check] = ask([newcomer], "check", "checked", seed=0)
        if not check["right"]:
            raise SystemExit("the newcomer has wrong bytes")
        seconds.append(together(answers, "newcomer"))
        cpu.append([answer["cpu"] for answer in answers])
        shares.append([answer["tx"] / size for answer in answers[:-1]])
        ask([newcomer], "leave", "out")
        ask(holders, "meet", "met", count=len(holders))
    return {
        f"{kind}_seconds": statistics.median(seconds),
        f"{kind}_rate": size / statistics.median(seconds),
        f"{kind}_all": seconds,
        f"{kind}_cpu": cpu,  # seconds, of each process, the newcomer last
        f"{kind}_shares": shares,  # of the holders, in what was sent
    }


def form_group(holders: list[Peer]) -> None:
    for peer in holders[1:]:  # the first has been alone in it
        ask([peer], "join", "in")
    ask(holders, "meet", "met", count=len(holders))
    ask(holders, "sync", "synced")


def measure_no_op(peers: list[Peer], rounds: int) -> dict[str, Any]:
    ask(peers[-1:], "join", "in")
    ask(peers, "meet", "met", count=len(peers))
    syncs = [ask(peers, "sync", "synced") for _ in range(rounds + 1)][1:]
    if any(answer["members"] != len(peers) for answers in syncs for answer in answers):
        raise SystemExit("a member was lost")
    return {
        "no_op_seconds": statistics.median(map(together, syncs)),
        "no_op_cpu_seconds": statistics.median(a["cpu"] for answers in syncs for a in answers),
        "no_op_bytes": sum(sum(moved(answers)) for answers in syncs),
    }


COLUMNS = (
    "state",
    "holders",
    "transport",
    "to a newcomer GB/s (quartiles)",
    "overwriting GB/s",
    "one TCP copy GB/s",
    "ratios",
    "new memory GB/s, after a pause",
    "hash GB per CPU s",
    "read GB per CPU s",
    "ratio",
    "no-op ms",
    "no-op CPU ms each",
    "bytes",
)


def cells_of(result: dict[str, Any]) -> list[str]:
    rates = []
    for kind in ("newcomer", "overwriting"):
        low, high = quartiles([result["bytes"] / seconds for seconds in result[f"{kind}_all"]])
        middle = result[f"{kind}_rate"]
        rates.append(f"{middle / 1e9:.2f} ({low / 1e9:.2f} - {high / 1e9:.2f})")
    new, later = (
        statistics.mean(result[name]) / 1e9
        for name in ("new_memory_rates", "new_memory_rates_after_pause")
    )
    return [
        size_name(result["bytes"]),
        str(result["holders"]),
        result["transport"],
        *rates,
        f"{result['copy_rate'] / 1e9:.2f}",
        f"{result['newcomer_to_copy']:.2f}, {result['overwriting_to_copy']:.2f}",
        f"{new:.1f}, {later:.1f}",
        f"{result['hash_rate'] / 1e9:.1f}",
        f"{result['read_rate'] / 1e9:.1f}",
        f"{result['hash_to_read']:.2f}",
        f"{result['no_op_seconds'] * 1e3:.0f}",
        f"{result['no_op_cpu_seconds'] * 1e3:.0f}",
        str(result["no_op_bytes"]),
    ]


def newcomer_goal(result: dict[str, Any]) -> dict[str, Any]:
    """Prints that of the newcomer's rate."""
    parts = [result["bytes"] / one / result["copy_rate"] for one in result["overwriting_all"]]
    name = f"sync of {size_name(result['bytes'])} to a newcomer, {result['holders']} holders, "
    name += f"{result['transport']}, overwriting: rate, of one TCP copy's"
    target = GOALS[result["transport"]]
    return goal(name, result["overwriting_to_copy"], parts, factor, at_least=target)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=parse_sizes, default=[1 << 30], help="of the state; default: 1GiB"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--holders", type=int, default=HOLDERS, help="default: %(default)s")
    parser.add_argument(
        "--transport",
        type=lambda text: text.split(","),
        default=["shared", "shm"],
        help="some of shared, shm, tcp; default: shared,shm",
    )
    parser.add_argument("--pause", type=float, default=3.0, help="seconds; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if any(size % 8 for size in options.size):
        parser.error("--size is a multiple of 8 bytes")
    if options.holders < 1 or set(options.transport) - set(GOALS):
        parser.error("at least one holder, and the transports shared, shm and tcp")
    if options.peer:
        be_peer(options.size[0], options.rounds, options.transport[0])
    about = announce()
    table = Table("pccl.sync, against the machine", COLUMNS)
    results = []
    for size in options.size:
        for transport in options.transport:
            results.append(measure(size, options.rounds, options.holders, transport, options.pause))
            table.add(cells_of(results[-1]))
    print()
    goals = [newcomer_goal(result) for result in results]
    write_results(options.json, about, results=results, goals=goals)
    if options.markdown:
        options.markdown.write_text(table.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
