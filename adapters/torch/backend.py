"""Makes torch.distributed take the backend "pccl"; `_pccl_torch` registers it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import _pccl_torch


def _with_monitored_barrier(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        own: Any = group or dist.group.WORLD
        # Not by the backend's name: "cpu:pccl,cuda:pccl" is this backend, too.
        if getattr(own, "is_pccl", False):
            own.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    return monitored_barrier


def register() -> None:
    """Registers the backend. REQUIRES: `torch.distributed.is_available()`; called once."""
    _pccl_torch.register()
    # torch's own refuses all backends but Gloo, by their name.
    dist.monitored_barrier = _with_monitored_barrier(dist.monitored_barrier)
    dist.distributed_c10d.monitored_barrier = dist.monitored_barrier
