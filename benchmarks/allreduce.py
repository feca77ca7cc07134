"""How long an all-reduce takes, side by side with torch.distributed's Gloo: float32 sum, TCP over loopback.

    python benchmarks/allreduce.py [--quick] [--worlds 2,4] [--sizes 4KiB,1MiB] [--json FILE] [--markdown FILE]

One process per rank, all on this machine; the master is in the parent. For each size all ranks first check a result
against NumPy, then alternate between blocks of pccl calls and blocks of Gloo calls, so that whatever else the machine
does meets both. In a block calls follow each other without a barrier.

    ms            every rank takes the median of the wall times of its own calls; the slowest rank's median is shown
    CPU s/GB      CPU seconds of all ranks, and of the master, per 10^9 bytes of one rank's array
    Gloo/pccl     time of Gloo divided by time of pccl: above 1 pccl is faster
    spread        the slowest block's median over the fastest one's, pccl and Gloo: how quiet the machine was

pccl reduces out of place, every call with the master's commit; Gloo has only the in-place form. Without torch only pccl
is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import pccl

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
QUICK_SIZES = [4 * KIB, MIB, 16 * MIB]
ROUNDS = 5  # blocks of each library per size
BLOCK_SECONDS = 0.4  # how long a block should take, unless --iterations says how many calls
LEAST_CALLS = 3  # in a block
MOST_CALLS = 2000
RANK_TIMEOUT = 120  # seconds that one call may take before a rank gives up


def cpu_seconds_of(pid: int) -> float:
    """CPU time of another process, all its threads."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux: the process's CPU clock


def size_name(size: int) -> str:
    if size % MIB == 0:
        return f"{size // MIB} MiB"
    return f"{size // KIB} KiB" if size % KIB == 0 else f"{size} B"


# ---- a rank --------------------------------------------------------------------------------------------------------


class Measured:
    """What one library did on one rank at one size."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.blocks: list[float] = []  # median seconds per call, a block each
        self.seconds: list[float] = []  # per call
        self.cpu = 0.0  # of this process
        self.master_cpu = 0.0

    def block(self, calls: int, master: int | None) -> None:
        own = time.process_time()
        masters = cpu_seconds_of(master) if master else 0.0
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            self.call()
            times.append(time.perf_counter() - began)
        self.cpu += time.process_time() - own
        self.master_cpu += (cpu_seconds_of(master) - masters) if master else 0.0
        self.blocks.append(statistics.median(times))
        self.seconds += times

    def report(self) -> dict[str, Any]:
        return {
            "median": statistics.median(self.seconds),
            "p90": sorted(self.seconds)[int(0.9 * (len(self.seconds) - 1))],
            "calls": len(self.seconds),
            "blocks": self.blocks,
            "cpu": self.cpu,
            "master_cpu": self.master_cpu,
        }


def be_rank(options: argparse.Namespace) -> None:
    """One process: measures every size with both libraries and prints a JSON line per size."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    number, world = options.rank, options.world
    comm = pccl.init(timeout=RANK_TIMEOUT)
    dist = None
    if options.gloo:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        import torch
        from torch import distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(options.gloo, world)  # no port to choose
        limit = timedelta(seconds=RANK_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=limit)
    master = os.getppid() if number == 0 else None

    for size in options.sizes:
        send = np.random.default_rng(number).standard_normal(size // 4, np.float32)
        recv = np.empty_like(send)

        def reduce_pccl(send: Any = send, recv: Any = recv) -> None:
            comm.all_reduce(send, recv, op=pccl.ReduceOp.SUM, timeout=RANK_TIMEOUT)

        libraries = {"pccl": Measured(reduce_pccl)}
        reduce_pccl()
        check(recv, size, world, "pccl")
        if dist is not None:
            tensor = torch.from_numpy(send.copy())

            def reduce_gloo(tensor: Any = tensor) -> None:
                dist.all_reduce(tensor)

            reduce_gloo()
            check(tensor.numpy(), size, world, "Gloo")
            tensor.zero_()  # in place again and again: stays finite
            libraries["gloo"] = Measured(reduce_gloo)

        # As many calls as fit in a block of the slower library; agreed on by all ranks.
        calls = -(-options.iterations // options.rounds) if options.iterations else 0
        if not calls:
            slowest = 0.0
            for library in libraries.values():
                began = time.perf_counter()
                library.call()
                library.call()
                slowest = max(slowest, (time.perf_counter() - began) / 2)
            slowest = pccl.allreduce(slowest, "max", timeout=RANK_TIMEOUT)
            calls = min(MOST_CALLS, max(LEAST_CALLS, math.ceil(options.block_seconds / slowest)))
        for _ in range(options.rounds):
            for library in libraries.values():
                library.call()  # in step, and warm
                library.block(calls, master)
        print(
            json.dumps({name: library.report() for name, library in libraries.items()}), flush=True
        )
    pccl.barrier(timeout=RANK_TIMEOUT)
    pccl.shutdown()
    if dist is not None:
        dist.destroy_process_group()


def check(result: Any, size: int, world: int, name: str) -> None:
    """A fast wrong answer is worth nothing."""
    expected = sum(
        np.random.default_rng(rank).standard_normal(size // 4, np.float32) for rank in range(world)
    )
    if not np.allclose(result, expected, rtol=1e-4, atol=1e-5):
        raise SystemExit(f"{name} gave a wrong sum at {size_name(size)}")


def end_with_parent() -> None:
    """The parent holds our stdin open for as long as it lives."""
    os.read(0, 1)
    os._exit(1)


# ---- the parent ----------------------------------------------------------------------------------------------------


def run_world(world: int, options: argparse.Namespace, gloo: bool) -> list[dict[str, Any]]:
    """All sizes at one world size: a result per size."""
    results = []
    with tempfile.TemporaryDirectory() as folder, pccl.MasterNode("127.0.0.1:0") as master:
        environment = os.environ | {
            "PCCL_MASTER": master.address,
            "PCCL_MIN_PEERS": str(world),
            "PCCL_BIND": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        base = [sys.executable, __file__, "--world", str(world), "--rounds", str(options.rounds)]
        base += ["--sizes", ",".join(map(str, options.sizes))]
        base += ["--iterations", str(options.iterations)]
        base += ["--block-seconds", str(options.block_seconds)]
        if gloo:
            base += ["--gloo", f"{folder}/store"]
        ranks: list[subprocess.Popen[bytes]] = []
        watchdog = threading.Timer(options.timeout, lambda: [rank.kill() for rank in ranks])
        watchdog.daemon = True
        watchdog.start()
        try:
            for number in range(world):
                command = [*base, "--rank", str(number)]
                ranks.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                    )
                )
            for size in options.sizes:
                lines = [rank.stdout.readline() for rank in ranks if rank.stdout]
                if not all(lines):
                    raise SystemExit(f"a rank of {world} ended at {size_name(size)}, see above")
                results.append(summarise(world, size, [json.loads(line) for line in lines]))
                print(markdown_row(results[-1]), flush=True)
            for rank in ranks:
                if rank.wait(RANK_TIMEOUT):
                    raise SystemExit(f"a rank of {world} failed in the end, see above")
        finally:
            watchdog.cancel()
            for rank in ranks:
                rank.kill()
                rank.wait()
    return results


def summarise(world: int, size: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"world": world, "bytes": size}
    for name in ranks[0]:
        reports = [rank[name] for rank in ranks]
        gigabytes = size * reports[0]["calls"] / 1e9
        blocks = [max(block) for block in zip(*(r["blocks"] for r in reports), strict=True)]
        result[name] = {
            "seconds": max(report["median"] for report in reports),
            "p90_seconds": max(report["p90"] for report in reports),
            "calls": reports[0]["calls"],
            "cpu_seconds_per_gb": sum(report["cpu"] for report in reports) / gigabytes,
            "spread": max(blocks) / min(blocks),
        }
        if name == "pccl":
            master = sum(report["master_cpu"] for report in reports) / gigabytes
            result[name]["master_cpu_seconds_per_gb"] = master
            result[name]["cpu_seconds_per_gb"] += master
    if "gloo" in result:
        result["speedup"] = result["gloo"]["seconds"] / result["pccl"]["seconds"]
    return result


HEAD = """\
| ranks | array | pccl ms | Gloo ms | Gloo/pccl | pccl CPU s/GB | Gloo CPU s/GB | spread | calls |
|---|---|---|---|---|---|---|---|---|"""


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def markdown_row(result: dict[str, Any]) -> str:
    ours, theirs = result["pccl"], result.get("gloo")
    cells = [
        str(result["world"]),
        size_name(result["bytes"]),
        milliseconds(ours["seconds"]),
        milliseconds(theirs["seconds"]) if theirs else "-",
        f"{result['speedup']:.2f}x" if theirs else "-",
        f"{ours['cpu_seconds_per_gb']:.3g}",
        f"{theirs['cpu_seconds_per_gb']:.3g}" if theirs else "-",
        f"{ours['spread']:.2f}" + (f" / {theirs['spread']:.2f}" if theirs else ""),
        str(ours["calls"]),
    ]
    return "| " + " | ".join(cells) + " |"


def machine(gloo: bool) -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    about = {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pccl": pccl.__version__,
        "load_before": os.getloadavg()[0],
    }
    if gloo:
        import torch

        about["torch"] = torch.__version__
    return about


def have_gloo() -> bool:
    try:
        from torch import distributed
    except ImportError:
        return False
    return distributed.is_available() and distributed.is_gloo_available()


def parse_sizes(text: str) -> list[int]:
    units = {"kib": KIB, "mib": MIB, "gib": 1 << 30, "b": 1}
    sizes = []
    for word in text.replace(" ", "").lower().split(","):
        unit = next((unit for unit in units if word.endswith(unit)), "")
        size = int(word.removesuffix(unit)) * units.get(unit, 1)
        if size < 4 or size % 4:
            raise argparse.ArgumentTypeError(f"{word}: a size is a multiple of 4 bytes")
        sizes.append(size)
    return sizes


def parse_worlds(text: str) -> list[int]:
    worlds = [int(word) for word in text.split(",")]
    if min(worlds) < 2:
        raise argparse.ArgumentTypeError("a world has at least 2 ranks")
    return worlds


def main() -> int:
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=parse_sizes, help="e.g. 4KiB,1MiB (default: 4 KiB to 256 MiB)"
    )
    parser.add_argument("--worlds", type=parse_worlds, default=[2, 4], help="ranks (default: 2,4)")
    parser.add_argument("--iterations", type=int, default=0, help="calls per size and library")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="blocks (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="three sizes, short blocks")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds for a world (default: 900)"
    )
    parser.add_argument(
        "--block-seconds", type=float, default=BLOCK_SECONDS, help=argparse.SUPPRESS
    )
    for internal in ("--rank", "--world"):
        parser.add_argument(internal, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gloo", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 3)
        options.block_seconds = min(options.block_seconds, 0.1)
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    if options.rank is not None:
        be_rank(options)
        return 0

    gloo = have_gloo()
    about = machine(gloo)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if not gloo:
        print("torch is not installed: only pccl is measured (pip install '.[bench]')")
    if about["load_before"] > 0.3 * about["cores"]:
        print(f"the machine is busy (load {about['load_before']:.1f}): do not trust these numbers")
    if max(options.worlds) > about["cores"]:
        print(
            f"{max(options.worlds)} ranks share {about['cores']} cores: this is then a measure of CPU cost"
        )
    print(HEAD, flush=True)
    results = []
    for world in options.worlds:
        results += run_world(world, options, gloo)
    about["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text("\n".join([HEAD, *map(markdown_row, results)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
