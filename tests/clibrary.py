"""The C library, as a user installs it: session fixtures that conftest.py offers to all tests.

PCCL_C_BUILD names a build tree that has the library. Without it the editable build's is taken, or
one is made in build/c, which takes minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def find_tree() -> Path | None:
    """A build tree that has libpccl.so."""
    given = os.environ.get("PCCL_C_BUILD")
    trees = [Path(given)] if given else sorted((ROOT / "build").glob("editable-*"))
    return next((tree for tree in trees if (tree / "libpccl.so").exists()), None)


# Marks of every test that needs the library.
MARKS = [
    pytest.mark.skipif(
        not all(map(shutil.which, ("cc", "c++", "cmake"))), reason="needs a compiler and cmake"
    ),
    pytest.mark.timeout(120 if find_tree() else 1800),
]


def sh(*command: object, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the C library is installed, as a user installs it."""
    tree = find_tree()
    if tree is None:
        tree = ROOT / "build" / "c"
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        sh("cmake", "-S", ROOT, "-B", tree, *generator, "-DPCCL_PYTHON=OFF", "-DPCCL_WERROR=ON")
        sh("cmake", "--build", tree, "--target", "pccl")
    prefix = tmp_path_factory.mktemp("installed")
    sh("cmake", "--install", tree, "--prefix", prefix, "--component", "c")
    return prefix


@pytest.fixture(scope="session")
def library(installed: Path) -> Path:
    (found,) = installed.glob("lib*/**/libpccl.so")
    return found
