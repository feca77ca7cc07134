"""What the adapters add: `pccl.allreduce` of JAX arrays and torch tensors against that of a NumPy
array, in one run.

    python benchmarks/adapters.py                # 64 MiB, two processes of this host, a table
    python benchmarks/adapters.py --quick --json build/adapters.json

All entrances take turns, a block of calls each; a block's time is that of its slowest rank. Calls
with new results are compared with NumPy's new results, calls in place with NumPy in place.
"numpy in place, as XLA" is a NumPy array that is reduced under what XLA imposes: memory without
huge pages, and a thread of its own for each call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from together import in_turns, ratio_quartiles, run_ranks

import pccl

# The entrance, and what it is compared with.
COMPARED = {
    "numpy": "numpy",
    "torch": "numpy",
    "jax": "numpy",
    "numpy in place": "numpy in place",
    "torch in place": "numpy in place",
    "numpy in place, as XLA": "numpy in place",
    "jax, jitted, donated": "numpy in place",
}


def entrances(count: int) -> dict[str, Callable[[], Any]]:
    """A call each, of `count` float32 elements."""
    import jax
    import jax.numpy as jnp
    import torch

    fresh = np.ones(count, np.float32)
    inside = np.ones(count, np.float32)
    pages = mmap.mmap(-1, 4 * count)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    small_pages = np.frombuffer(pages, np.float32)
    small_pages[:] = 1
    tensor = torch.ones(count)
    tensor_inside = torch.ones(count)
    array = jnp.ones(count)
    jitted = jax.jit(lambda x: pccl.allreduce(x, "avg"), donate_argnums=0)
    donated = [jnp.ones(count)]
    places = set()

    def run_jitted() -> None:
        donated[0] = jax.block_until_ready(jitted(donated[0]))
        places.add(donated[0].unsafe_buffer_pointer())
        if len(places) > 1:
            raise SystemExit("a donated array was copied")

    def run_as_xla() -> None:
        thread = threading.Thread(
            target=lambda: pccl.allreduce(small_pages, "avg", out=small_pages, tag=1)
        )
        thread.start()
        thread.join()

    places.add(donated[0].unsafe_buffer_pointer())
    return {
        "numpy": lambda: pccl.allreduce(fresh, "avg"),
        "torch": lambda: pccl.allreduce(tensor, "avg"),
        "jax": lambda: jax.block_until_ready(pccl.allreduce(array, "avg")),
        "numpy in place": lambda: pccl.allreduce(inside, "avg", out=inside),
        "torch in place": lambda: pccl.allreduce(tensor_inside, "avg", out=tensor_inside),
        "numpy in place, as XLA": run_as_xla,
        "jax, jitted, donated": run_jitted,
    }


def rank_main(args: argparse.Namespace) -> None:
    pccl.init(min_peers=args.world)
    times = in_turns(entrances((args.mib << 20) // 4), args.blocks, args.calls)
    if pccl.rank() == 0:
        print(json.dumps(times), flush=True)
    pccl.shutdown()


def run(args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds a call of each entrance, by block."""
    with pccl.MasterNode("127.0.0.1:0") as master:
        command = [sys.executable, __file__, "--peer"]
        for name in ("world", "mib", "blocks", "calls"):
            command += [f"--{name}", str(getattr(args, name))]
        env = {**os.environ, "PCCL_MASTER": master.address, "JAX_PLATFORMS": "cpu"}
        outputs = run_ranks([command] * args.world, env)
    found: dict[str, list[float]] = json.loads(b"".join(outputs))
    return found


def table(found: dict[str, list[float]]) -> str:
    """Medians over blocks; `of numpy` is the median of the blocks' ratios, with its quartiles."""
    lines = ["| entrance | ms | of numpy | quartiles |", "|---|---|---|---|"]
    for name, other in COMPARED.items():
        low, middle, high = ratio_quartiles(found[name], found[other])
        lines.append(
            f"| {name} | {statistics.median(found[name]):.2f} | {middle:.2f} | {low:.2f} - {high:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--calls", type=int, default=8, help="per block")
    parser.add_argument("--quick", action="store_true", help="1 MiB, two blocks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.mib, args.blocks, args.calls = 1, 2, 1
    if args.peer:
        rank_main(args)
        return
    for name in ("torch", "jax"):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is missing: pip install 'pccl-collectives[torch,jax]'", file=sys.stderr)
            sys.exit(2)
    found = run(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
