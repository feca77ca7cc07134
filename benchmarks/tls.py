"""The cost of encryption: all-reduce over TCP on loopback with and without a secret, in turns,
with CPU seconds.

    python benchmarks/tls.py [--worlds 2,4] [--size 67108864] [--seconds 20] [--json FILE]

Each world size runs two groups of processes, one plain and one with a secret, which take turns of a
few calls each, so that both meet the same machine. The cipher alone is timed by `openssl speed`.
Every rank has one thread that moves bytes (`PCCL_THREADS=1`). The figures are medians of the turns,
the spreads the quartiles of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from report import by_block, factor, goal, percent, quartiles, size_name

import pccl
from pccl.master import make_secret

_CALLS = 4  # in one turn
_SEED_CALLS = 3  # before the first turn
_THROUGHPUT_GOAL = 0.5  # of plain, with two ranks on two cores
_CPU_GOAL = 1.12  # times the CPU seconds of plain and of the cipher


_NAMES = {"aes": "aes-128-gcm", "chacha20": "chacha20-poly1305"}  # for openssl


def cipher_seconds_per_gb(cipher: str) -> float:
    """CPU seconds to encrypt or decrypt 1 GB in records of 16 KiB, on one core."""
    name = _NAMES[cipher]
    command = ["openssl", "speed", "-seconds", "1", "-bytes", "16384", "-evp", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(rf"^{name}\s+([\d.]+)k", done.stdout, re.MULTILINE | re.IGNORECASE)
    assert found, done.stdout
    return 1e9 / (float(found[1]) * 1e3)


def member(size: int) -> None:
    """A rank: reads the number of calls from stdin, answers with seconds and CPU seconds."""
    import numpy as np

    pccl.init()
    data = np.ones(size // 4, np.float32)
    result = np.empty_like(data)
    print("in", flush=True)
    for line in sys.stdin:
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        sent = 0
        for _ in range(int(line)):
            _, info = pccl.allreduce(data, out=result, return_info=True)
            sent += info.tx_bytes
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps([seconds, cpu, sent]), flush=True)


class Group:
    """The ranks of one run."""

    def __init__(self, world: int, size: int, secret: str | None) -> None:
        self.master = pccl.MasterNode("127.0.0.1:0", secret=secret)
        self.master.run()
        env = {k: v for k, v in os.environ.items() if not k.startswith("PCCL_SECRET")}
        env |= {"PCCL_MASTER": self.master.address, "PCCL_MIN_PEERS": str(world), "PCCL_SHM": "0"}
        env |= {"PCCL_BIND": "127.0.0.1", "PCCL_THREADS": "1"}
        env |= {} if secret is None else {"PCCL_SECRET": secret}
        command = [sys.executable, os.path.abspath(__file__), "--member", str(size)]
        self.ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
                cwd=tempfile.gettempdir(),
            )
            for _ in range(world)
        ]
        for rank in self.ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "in\n"

    def turn(self, calls: int) -> tuple[float, float]:
        """Seconds of a call, and CPU seconds per GB sent, over all ranks."""
        for rank in self.ranks:
            assert rank.stdin is not None
            print(calls, file=rank.stdin, flush=True)
        told = [json.loads(rank.stdout.readline()) for rank in self.ranks if rank.stdout]
        sent = sum(one[2] for one in told)
        return max(one[0] for one in told) / calls, sum(one[1] for one in told) / sent * 1e9

    def end(self) -> None:
        for rank in self.ranks:
            rank.communicate(timeout=30)
        self.master.interrupt()


def measure(world: int, size: int, seconds: float, cipher: float) -> dict[str, Any]:
    groups = [Group(world, size, None), Group(world, size, make_secret())]
    told: list[list[tuple[float, float]]] = [[], []]
    try:
        for group in groups:
            group.turn(_SEED_CALLS)
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(told[0]) < 3:
            for group, times in zip(groups, told, strict=True):
                times.append(group.turn(_CALLS))
    finally:
        for group in groups:
            group.end()
    turns = [[list(column) for column in zip(*times, strict=True)] for times in told]
    plain, tls = ([statistics.median(column) for column in columns] for columns in turns)
    least_cpu = [one + 2 * cipher for one in turns[0][1]]
    # Every byte that is sent is encrypted by one rank and decrypted by another.
    return {
        "world": world,
        "bytes": size,
        "plain_ms": plain[0] * 1e3,
        "tls_ms": tls[0] * 1e3,
        "throughput_ratio": plain[0] / tls[0],
        "plain_cpu_s_per_gb": plain[1],
        "tls_cpu_s_per_gb": tls[1],
        "cipher_cpu_s_per_gb": 2 * cipher,
        "cpu_ratio": tls[1] / (plain[1] + 2 * cipher),
        "throughput_ratios": by_block(turns[0][0], turns[1][0]),
        "cpu_ratios": by_block(turns[1][1], least_cpu),
    }


def goals(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Prints them. That of the throughput is for two ranks, each with a core of its own."""
    of = f"all-reduce of {size_name(row['bytes'])} over TCP, {row['world']} ranks, encrypted"
    found = []
    if row["world"] == 2:
        parts = row["throughput_ratios"]
        name = f"{of}: throughput, of plain"
        found.append(goal(name, row["throughput_ratio"], parts, percent, at_least=_THROUGHPUT_GOAL))
    name = f"{of}: CPU time, of plain and cipher"
    found.append(goal(name, row["cpu_ratio"], row["cpu_ratios"], factor, at_most=_CPU_GOAL))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--size", type=int, default=64 << 20, help="bytes of the array")
    parser.add_argument("--seconds", type=float, default=20, help="for each world size")
    parser.add_argument("--cipher", choices=sorted(_NAMES), default="aes")
    parser.add_argument("--json", help="a file for the results")
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member is not None:
        return member(options.member)
    os.environ["PCCL_CIPHER"] = options.cipher  # the masters' as well as the ranks'
    cipher = cipher_seconds_per_gb(options.cipher)
    rows = [
        measure(int(n), options.size, options.seconds, cipher) for n in options.worlds.split(",")
    ]
    for row in rows:
        spread = " to ".join(map(percent, quartiles(row["throughput_ratios"])))
        print(
            f"world {row['world']}: plain {row['plain_ms']:.1f} ms, encrypted {row['tls_ms']:.1f} ms: "
            f"{row['throughput_ratio']:.0%} ({spread}) of the throughput; "
            f"CPU s per GB sent {row['plain_cpu_s_per_gb']:.2f} "
            f"and {row['tls_cpu_s_per_gb']:.2f}, cipher both ways {row['cipher_cpu_s_per_gb']:.2f}: "
            f"{row['cpu_ratio']:.2f} of the sum"
        )
    for row in rows:
        row["goals"] = goals(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
