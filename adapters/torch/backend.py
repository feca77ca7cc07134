"""Makes the backend "pccl" known to torch.distributed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pccl.adapters.torch.devices import other_accelerators


def _create_group(options: Any, backend_options: Any) -> Any:
    from pccl.adapters.torch import process_group

    return process_group.create(options, backend_options)


def _with_monitored_barrier(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        if dist.distributed_c10d._rank_not_in_group(group) or dist.get_backend(group) != "pccl":
            original(group, timeout, wait_all_ranks)
        else:
            (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return monitored_barrier


def register() -> None:
    """Registers the backend. REQUIRES: `torch.distributed.is_available()`; called once."""
    # torch's own refuses all backends but Gloo, by their name.
    dist.monitored_barrier = _with_monitored_barrier(dist.monitored_barrier)
    dist.distributed_c10d.monitored_barrier = dist.monitored_barrier
    # torch puts tensors of its own on the last device. `device_count` does not start CUDA: a child
    # that is forked later may still use it.
    devices = ["cpu", "cuda"] if torch.cuda.device_count() > 0 else ["cpu", *other_accelerators()]
    dist.Backend.register_backend("pccl", _create_group, extended_api=True, devices=devices)
