"""Peers of two architectures in one group hold the same bytes after every operation.

    mixed.py ROOT       two peers of this machine, two in the Debian of aarch64 at ROOT
    mixed.py --member   one of the peers

Every dtype with every op, weights, and codes, over elements of any bits: NaNs with payloads,
infinities, numbers below the least normal one. In shared memory and over TCP.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

import pccl

MEMBERS = 4
COUNTS = (1, 63, 5000, 70_001)
FLOATS = (pccl.DataType.FLOAT16, pccl.DataType.BFLOAT16, pccl.DataType.FLOAT, pccl.DataType.DOUBLE)


def elements(dtype: pccl.DataType, count: int, seed: int, *, ordinary: bool) -> np.ndarray:
    """Ordinary numbers, or any bits."""
    random = np.random.default_rng(seed)
    kind = np.dtype(getattr(ml_dtypes, dtype.label, dtype.label))
    if ordinary and kind.kind not in "iub":
        made = random.standard_normal(count)
        return np.asarray(made * (1 + 1j) if kind.kind == "c" else made).astype(kind)
    most = 2 if dtype is pccl.DataType.BOOL else 256
    return random.integers(0, most, count * dtype.size, np.uint8).view(kind)


def results(rank: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every operation's name and result."""
    for count in COUNTS:
        for dtype in pccl.DataType:
            own = elements(dtype, count, 10 * count + rank, ordinary=False)
            for op in filter(dtype.combines, pccl.ReduceOp):
                yield f"{op.name} {dtype.label}[{count}]", pccl.allreduce(own, op)
            if dtype.combines(pccl.ReduceOp.AVG):
                name = f"weighted {dtype.label}[{count}]"
                yield name, pccl.allreduce(own, "avg", weight=0.3 + rank)
        for dtype in FLOATS:
            for ordinary in (True, False):
                own = elements(dtype, count, 20 * count + rank, ordinary=ordinary)
                for code in ("int8", "uint8", "int4", "float8"):
                    for rounding in ("nearest", "stochastic"):
                        how = pccl.Quantize(code, rounding=rounding)
                        name = f"{code} {rounding} {dtype.label}[{count}]"
                        yield name, pccl.allreduce(own, "avg", quantize=how)


def be_member() -> None:
    """Prints a digest of each result."""
    pccl.init(min_peers=MEMBERS, timeout=120)
    pccl.barrier()
    for name, result in results(pccl.rank()):
        print(f"{hashlib.sha256(result.tobytes()).hexdigest()[:16]} {name}", flush=True)
    pccl.shutdown()


def inside(root: Path, environment: dict[str, str], *command: str) -> list[str]:
    """The command, in the root, with this tree at /src."""
    mounts = 'root=$1; shift; mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; '
    mounts += 'mkdir -p "$root/src"; mount --bind . "$root/src"; exec chroot "$root" env -i "$@"'
    fixed = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/opt/pccl:/opt/site", "HOME": "/tmp"}
    settings = [f"{key}={value}" for key, value in {**fixed, **environment}.items()]
    return ["unshare", "--mount", "bash", "-euc", mounts, "-", str(root), *settings, *command]


def compare(root: Path, *, shared_memory: bool) -> int:
    """How many operations gave the same bytes on all members.

    Raises:
        SystemExit: One did not, or a member failed.
    """
    with pccl.MasterNode("127.0.0.1:0") as master:
        settings = {
            "PCCL_MASTER": master.address,
            "PCCL_BIND": "127.0.0.1",
            "PCCL_SHM": "1" if shared_memory else "0",
        }
        script = Path(__file__).resolve()
        here = [sys.executable, str(script), "--member"]
        there = ["/usr/bin/python3", f"/src/{script.relative_to(Path.cwd())}", "--member"]
        peers = [
            subprocess.Popen(
                inside(root, settings, *there) if index % 2 else here,
                stdout=subprocess.PIPE,
                text=True,
                env=None if index % 2 else {**os.environ, **settings},
            )
            for index in range(MEMBERS)
        ]
        told = [peer.communicate(timeout=1500)[0].splitlines() for peer in peers]
    if any(peer.returncode for peer in peers):
        sys.exit(f"a member failed: {[peer.returncode for peer in peers]}")
    for lines in zip(*told, strict=True):
        if len(set(lines)) > 1:
            sys.exit(f"members differ: {lines}")
    return len(told[0])


def main() -> None:
    """Runs both transports."""
    if sys.argv[1] == "--member":
        be_member()
        return
    for shared_memory in (False, True):
        same = compare(Path(sys.argv[1]), shared_memory=shared_memory)
        transport = "in shared memory" if shared_memory else "over TCP"
        print(f"{same} operations {transport}: the same bytes on x86-64 and aarch64", flush=True)


if __name__ == "__main__":
    main()
