"""The entry point of `import torch`: the backend is known without an import, and harms nobody."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

TESTS = Path(__file__).resolve().parent
COMMAND = "from programs.torch_entry import *; {}"


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def prints(call: str, folder: Path, *, launcher: tuple[str, ...] = (), **env: str) -> str:
    """What a call of a function of programs.torch_entry prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, *launcher, "-c", COMMAND.format(call)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,  # not the source tree, which has no extension
        env=environment(**env),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_group_needs_no_import_of_pccl(tmp_path: Path) -> None:
    assert prints("make_a_group()", tmp_path) == "pccl [1.0, 1.0, 1.0]\n"


def test_import_torch_loads_no_module_of_pccl_but_the_entry_point(tmp_path: Path) -> None:
    loaded = set(prints("list_modules()", tmp_path).split())
    without = set(prints("list_modules()", tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split())
    more = {name for name in loaded - without if name.split(".")[0] not in sys.stdlib_module_names}
    assert more == {"_pccl_torch"}


def test_the_entry_point_is_installed() -> None:
    points = importlib.metadata.distribution("pccl-collectives").entry_points
    (point,) = [point for point in points if point.group == "torch.backends"]
    assert (point.name, point.value) == ("pccl", "_pccl_torch:autoload")


# The module whose import fails, what it raises, and what the error says.
BROKEN = [
    ("pccl._core", "ImportError('libssl.so.3: cannot open shared object file')", "libssl.so.3"),
    ("pccl._core", "ModuleNotFoundError('none', name='pccl._core')", "native part is missing"),
    ("pccl._core", "RuntimeError('ABI 7 expected')", "RuntimeError: ABI 7 expected"),
    ("numpy", "ImportError('numpy is for another CPU')", "numpy is for another CPU"),
]


@pytest.mark.parametrize(("module", "error", "cause"), BROKEN)
def test_a_broken_engine_leaves_torch_alone_and_is_named_at_first_use(
    module: str, error: str, cause: str, tmp_path: Path
) -> None:
    said = prints(f"use_a_broken_one({module!r}, {error})", tmp_path)
    total, reason = said.splitlines()
    assert total == "2.0"
    assert reason.startswith('backend "pccl" cannot be loaded: ') and cause in reason, reason


def test_a_torch_without_distributed_is_imported_as_ever(tmp_path: Path) -> None:
    assert prints("without_distributed()", tmp_path) == "False True\n"


def test_whatever_fails_in_the_entry_point_import_torch_does_not(tmp_path: Path) -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert prints("fail_in_the_entry_point()", tmp_path, **off) == "False\n"


def test_without_autoload_an_import_registers_the_backend(tmp_path: Path) -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert prints("import_the_adapter()", tmp_path, **off) == "False\nTrue\n"


@pytest.mark.parametrize(
    ("modules", "autoload"),
    [
        (("torch", "pccl"), "1"),
        (("torch", "pccl"), "0"),
        (("pccl", "torch"), "1"),
        (("pccl", "torch", "pccl.adapters.torch"), "0"),
    ],
)
def test_compiled_functions_do_without_pccl_whichever_is_imported_first(
    modules: tuple[str, ...], autoload: str, tmp_path: Path
) -> None:
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    assert prints(f"import_both(*{modules})", tmp_path, **env) == "True True\n"


def test_the_backend_is_the_default_of_no_device() -> None:
    assert "pccl" not in torch.distributed.Backend.default_device_backend_map.values()


def test_devices_are_found_when_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = torch.distributed.distributed_c10d

    def devices() -> list[str]:
        return list(c10d.BackendConfig(c10d.Backend("pccl")).get_device_backend_map())

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices() == ["cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices() == ["cpu", "cuda"]


def test_torchrun_starts_a_job_again_without_an_import(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    launcher += ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--no-python")
    launcher += (sys.executable,)
    assert "total 4.0 restarts 1" in prints("die_once()", tmp_path, launcher=launcher)
