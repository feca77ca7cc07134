"""Programs that begin with `import torch` and never import pccl by name, but for two.

They are started by themselves, since run_program.py loads pccl.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any


class Before:
    """Calls a function before a module is found. It may raise what the import shall raise."""

    def __init__(self, module: str, call: Any) -> None:
        self._module, self._call = module, call
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self._module:
            self._call()


def list_modules() -> None:
    import torch  # noqa: F401

    print(*sys.modules)


def _join() -> Any:
    import torch.distributed as dist

    dist.init_process_group("pccl", store=dist.HashStore(), rank=0, world_size=1)
    return dist


def make_a_group() -> None:
    import torch

    assert "pccl" not in sys.modules
    dist = _join()
    ones = torch.ones(3)
    dist.all_reduce(ones)
    dist.monitored_barrier()  # torch's own function refuses it
    print(dist.get_backend(), ones.tolist())
    dist.destroy_process_group()


def use_a_broken_one(module: str, error: Exception) -> None:
    """The import of `module` raises `error`, once torch is loaded."""

    def fail() -> None:
        raise error

    import torch
    import torch.distributed as dist

    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        del sys.modules[name]  # torch itself looks for NumPy
    Before(module, fail)
    print(torch.ones(2).sum().item())
    try:
        _join()
    except dist.DistBackendError as found:
        print(found)


def without_distributed() -> None:
    def remove() -> None:
        import torch._C

        for name in ("_c10d_init", "_rpc_init", "_dist_autograd_init"):
            delattr(torch._C, name)

    Before("torch.distributed", remove)
    import torch

    print(torch.distributed.is_available(), "_pccl_torch" in sys.modules)


def fail_in_the_entry_point() -> None:
    import torch.distributed as dist

    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("another torch")

    dist.Backend.register_backend = fail
    import _pccl_torch

    _pccl_torch.autoload()
    print("pccl" in dist.Backend.backend_list)


def import_both(*modules: str) -> None:
    """Imports them in this order, and prints whether torch.compile leaves pccl alone."""
    for module in modules:
        importlib.import_module(module)
    import pccl

    print(*(hasattr(f, "_torchdynamo_disable") for f in (pccl.allreduce, pccl.Work.wait)))


def import_the_adapter() -> None:
    import torch.distributed as dist

    print("pccl" in dist.Backend.backend_list)
    import pccl.adapters.torch  # noqa: F401

    print("pccl" in dist.Backend.backend_list)


def die_once() -> None:
    """A rank under torchrun. Rank 1 is killed between two sums, in the first start."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("pccl")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if restarts == "0" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(ones)
    if dist.get_rank() == 0:
        print("total", ones.item(), "restarts", restarts)
    dist.destroy_process_group()
