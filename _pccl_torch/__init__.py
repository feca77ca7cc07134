"""Tells torch of pccl, without loading it: the backend "pccl", and what not to compile.

`import torch` calls `autoload` in every program of an environment with pccl, by the entry point in
the group "torch.backends". So this package is not a part of `pccl`, whose import loads the engine
and NumPy. The first process group of the backend loads it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = [
    "api_untraced",
    "autoload",
    "class_untraced",
    "other_accelerators",
    "register",
    "untraced",
]


class _Devices(list[str]):
    """The types of devices of this process, found each time that torch asks.

    They are not known during `import torch`: CUDA_VISIBLE_DEVICES may be set later, and another
    package may register its device later.
    """

    def __iter__(self) -> Iterator[str]:
        import torch

        # torch puts tensors of its own on the last device. `device_count` does not start CUDA: a
        # child that is forked later may still use it.
        others = ["cuda"] if torch.cuda.device_count() > 0 else other_accelerators()
        return iter(["cpu", *others])


def other_accelerators() -> list[str]:
    """The type of this process's accelerator, in a list, if it is not CUDA's."""
    import torch

    # MPS, XPU, or what another package has registered. torch names what it was built for.
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if found is None or found.type == "cuda":
        return []
    return [found.type] if torch.get_device_module(found).is_available() else []


def _create_group(options: Any, backend_options: Any) -> Any:
    """Makes this process's part of a group. c10d calls it for the backend "pccl".

    Raises:
        DistBackendError: pccl cannot be loaded; the text has the reason.
    """
    try:
        from pccl.adapters.torch import process_group
    except Exception as error:
        import torch.distributed as dist

        raise dist.DistBackendError(
            f'backend "pccl" cannot be loaded: {type(error).__name__}: {error}; install '
            "pccl-collectives again, and see that `python -P -c 'import pccl'` works"
        ) from error
    return process_group.create(options, backend_options)


def register() -> None:
    """Registers the backend, once. Does nothing in a torch without torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available() or "pccl" in dist.Backend.backend_list:
        return
    # "cpu" has a default backend, so this one becomes the default of no device.
    dist.Backend.register_backend("pccl", _create_group, extended_api=True, devices=["cpu"])
    dist.Backend.backend_capability["pccl"] = _Devices(["cpu"])


def untraced(call: Callable[..., Any]) -> None:
    """Keeps torch.compile from `call` and all that it calls.

    As `torch.compiler.disable`, which would import the compiler. Does nothing where torch is made
    otherwise, as old ones are, or is just being loaded by another thread.
    """
    try:
        frames: Any = sys.modules["torch"]._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(call.__code__, frames._FrameExecStrategy(skip, skip))
    except Exception:
        return
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "a call of pccl"  # type: ignore[attr-defined]


def class_untraced(cls: type) -> None:
    """Makes the public methods `untraced`, also inherited ones of pccl."""
    for owner in cls.__mro__:
        if owner.__module__.startswith("pccl."):
            for name, call in vars(owner).items():
                if inspect.isfunction(call) and not name.startswith("_"):
                    untraced(call)


def api_untraced() -> None:
    """Makes what `pccl` has `untraced`, if both it and torch are loaded: the later one calls this.

    The engine takes no part in a graph: torch.compile has to break it at each call.
    """
    pccl = sys.modules.get("pccl")
    if pccl is None or "torch" not in sys.modules:
        return
    for name in getattr(pccl, "__all__", ()):
        found = getattr(pccl, name, None)  # another thread may be about to load it
        if inspect.isfunction(found):
            untraced(found)
        elif inspect.isclass(found):
            class_untraced(found)


def autoload() -> None:
    """The entry point. No error of it makes `import torch` fail."""
    try:
        api_untraced()
        register()
    except Exception:  # "Unknown backend" of `init_process_group` follows, in programs that use it
        pass
