"""Peers of two architectures in one group hold the same bytes after every operation.

    mixed.py ROOT       two peers of this machine, two in the Debian of aarch64 at ROOT
    mixed.py --member   one of the peers

Every dtype with every op, weights, and codes, over elements of any bits: NaNs with payloads,
infinities, numbers below the least normal one. The other collectives, in place and in the
background, arrays of several segments, syncs, DiLoCo, and checkpoints that one architecture reads
of the other. Over TCP, encrypted, and in shared memory.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import pccl
from pccl import checkpoint
from pccl.diloco import DiLoCo, Sparse

MEMBERS = 4
COUNTS = (1, 63, 5000, 70_001)
LARGE = 700_001  # elements of 4 bytes: several segments of each chunk
CHECKPOINTS = Path(__file__).resolve().parents[2] / "build" / "aarch64" / "checkpoints"
Made = Iterator[tuple[str, Any]]
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


def reductions(rank: int) -> Made:
    """Every dtype, op and code."""
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


def large_ones(rank: int) -> Made:
    """Arrays of several segments: in place, in the background, in codes with what they left out."""
    own = elements(pccl.DataType.FLOAT, LARGE, rank, ordinary=True)
    started = [pccl.allreduce_async(own * np.float32(i), "avg") for i in (1, 3)]
    for work in started:
        yield f"in the background float32[{LARGE}]", work.wait()
    narrow = own.astype(ml_dtypes.bfloat16)
    yield f"in place bfloat16[{LARGE}]", pccl.allreduce(narrow, "sum", out=narrow)
    how = pccl.Quantize("int8", error_feedback=True)
    for _ in range(3):
        yield f"fed back float32[{LARGE}]", pccl.allreduce(own, "sum", quantize=how)
    tree = {"a": own[:1000], "b": [narrow[:77], np.arange(5) * rank]}
    yield "a tree", pccl.allreduce(tree, "sum")


def expect(name: str, result: np.ndarray, expected: np.ndarray) -> None:
    """Raises SystemExit unless both have the same bytes."""
    if result.tobytes() != np.ascontiguousarray(expected).tobytes():
        sys.exit(f"wrong: {name}")


def passed_on(rank: int) -> Made:
    """Elements of any bits that nobody combines, and parts of reductions."""
    for count in COUNTS:
        for dtype in pccl.DataType:
            what = f"{dtype.label}[{count}]"
            every = [
                elements(dtype, MEMBERS * count, 30 * count + member, ordinary=False)
                for member in range(MEMBERS)
            ]
            parts = [one.reshape(MEMBERS, count) for one in every]
            own, root = every[rank], count % MEMBERS
            made = pccl.broadcast(own, root, out=own.copy())
            expect(f"broadcast {what}", made, every[root])
            yield f"broadcast {what}", made
            made = pccl.allgather(own)
            expect(f"allgather {what}", made, np.stack(every))
            yield f"allgather {what}", made
            inside = own.reshape(MEMBERS, count).copy()
            made = pccl.alltoall(inside, out=inside)
            expect(f"alltoall {what}", made, np.stack([part[rank] for part in parts]))
            yield f"alltoall {what}", pccl.allgather(made)
            op = "max" if dtype.combines(pccl.ReduceOp.MAX) else "sum"
            made = pccl.reduce_scatter(parts[rank], op)
            yield f"reduce_scatter {what}", pccl.allgather(made)


def shared(rank: int) -> Made:
    """Syncs in which another member's state wins each time, and a member that has lost a byte."""
    for turn in range(MEMBERS):
        state = {
            dtype.label: elements(dtype, LARGE // 8, 100 * turn + rank, ordinary=False)
            for dtype in pccl.DataType
        } | {
            "step": rank,
            "name": f"of rank {rank}",
            "big-endian": np.arange(9, dtype=">i4") + rank,
        }
        revision = 10 * turn + (rank + turn) % MEMBERS
        state, info = pccl.sync(state, revision=revision, return_info=True)
        if state["step"] != (MEMBERS - 1 - turn) % MEMBERS:
            sys.exit("wrong: another state than that of the highest revision")
        yield f"sync {turn}", state
        if rank == turn:
            state["float32"].view(np.uint8)[-1] ^= 1
        yield f"sync after a broken byte at {turn}", pccl.sync(state, revision=info.revision)
    checkpoint.save(CHECKPOINTS / f"{rank}.safetensors", state, revision=rank + 1)
    pccl.barrier()
    for other in range(MEMBERS):
        fresh = {
            name: np.zeros_like(value) if isinstance(value, np.ndarray) else value
            for name, value in state.items()
        }
        read, revision = checkpoint.load(CHECKPOINTS / f"{other}.safetensors", fresh)
        if revision != other + 1:
            sys.exit("wrong: the revision of a checkpoint")
        yield f"checkpoint of rank {other}", read


def outer_steps(rank: int) -> Made:
    """Rounds of DiLoCo: whole, in codes, in sparse codes, and in the background."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "int8": {"quantize": "int8"},
        "sparse": {"compression": Sparse(density=1 / 16, chunk=256)},
        "async": {"mode": "async"},
    }
    for kind, options in kinds.items():
        random = np.random.default_rng(5)
        model = {
            name: random.standard_normal(size).astype(np.float32)
            for name, size in {"a": (300, 70), "b": (1001,), "c": ()}.items()
        }
        diloco = DiLoCo(model, sync_every=2, **options)
        own = np.random.default_rng(rank)
        for step in range(6):
            for array in model.values():
                array[...] -= np.float32(0.1) * own.standard_normal(array.shape).astype(np.float32)
            if diloco.step():
                yield f"DiLoCo {kind} step {step}", diloco.parameters
        diloco.finish()
        yield f"DiLoCo {kind} end", diloco.parameters


def digest(result: Any) -> str:
    """A hash of the bytes of a tree of arrays."""
    whole = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for key in sorted(part):
                add(part[key])
        elif isinstance(part, list):
            for child in part:
                add(child)
        else:
            whole.update(np.asarray(part).tobytes())

    add(result)
    return whole.hexdigest()[:16]


def be_member() -> None:
    """Prints a digest of each result."""
    pccl.init(min_peers=MEMBERS, timeout=120)
    pccl.barrier()
    for part in (reductions, large_ones, passed_on, shared, outer_steps):
        for name, result in part(pccl.rank()):
            print(f"{digest(result)} {name}", flush=True)
    pccl.shutdown()


def inside(root: Path, environment: dict[str, str], *command: str) -> list[str]:
    """The command, in the root, with this tree at /src."""
    mounts = 'root=$1; shift; mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; '
    mounts += 'mkdir -p "$root/src"; mount --bind . "$root/src"; exec chroot "$root" env -i "$@"'
    fixed = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/opt/pccl:/opt/site", "HOME": "/tmp"}
    settings = [f"{key}={value}" for key, value in {**fixed, **environment}.items()]
    return ["unshare", "--mount", "bash", "-euc", mounts, "-", str(root), *settings, *command]


def compare(root: Path, *, shared_memory: bool, secret: str | None = None) -> int:
    """How many operations gave the same bytes on all members.

    Raises:
        SystemExit: One did not, or a member failed.
    """
    shutil.rmtree(CHECKPOINTS, ignore_errors=True)
    with pccl.MasterNode("127.0.0.1:0", secret=secret) as master:
        settings = {
            "PCCL_MASTER": master.address,
            "PCCL_BIND": "127.0.0.1",
            "PCCL_SHM": "1" if shared_memory else "0",
            "PCCL_LOG_LEVEL": "ERR",  # syncs tell of members that differ
        }
        if secret is not None:
            settings["PCCL_SECRET"] = secret
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
    """Runs all transports."""
    if sys.argv[1] == "--member":
        be_member()
        return
    root = Path(sys.argv[1])
    for transport, shared_memory, secret in (
        ("over TCP", False, None),
        ("over TLS", False, secrets.token_urlsafe()),
        ("in shared memory", True, None),
    ):
        began = time.monotonic()
        same = compare(root, shared_memory=shared_memory, secret=secret)
        took = f"the same bytes on x86-64 and aarch64, {time.monotonic() - began:.0f} s"
        print(f"{same} operations {transport}: {took}", flush=True)


if __name__ == "__main__":
    main()
