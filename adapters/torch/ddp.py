"""DDP across peers that come and go: a communication hook on `pccl.allreduce_async`."""

# Annotations are evaluated here, since DDP compares those of a hook with the types it wants.

from typing import Any

import torch
import torch.distributed as dist

import pccl
from pccl.communicator import Communicator
from pccl.types import ReduceInfo, ReduceOp

__all__ = ["DDPState", "ddp_hook"]

_TAG = 0xDD9_0000  # a tag, since autograd may call the hook on a thread of its own


class DDPState:
    """Settings and results of `ddp_hook`.

    Args:
        comm: Default: the process's communicator.
        op: "avg", or what `pccl.allreduce` takes.
        tag: Of its operations; different for models that are trained side by side.

    Attributes:
        info: The latest step's `ReduceInfo`: `contributors` are the peers whose gradients it has.
        reruns: Number of times that a step was reduced again after a member was lost within it.
    """

    def __init__(
        self, comm: Communicator | None = None, op: ReduceOp | str = "avg", *, tag: int = _TAG
    ) -> None:
        self.info: ReduceInfo | None = None
        self.reruns = 0
        self._comm = comm
        self._op = op
        self._tag = tag
        self._buckets: list[tuple[torch.Tensor, Any, pccl.Work[torch.Tensor]]] = []

    def _start(self, bucket: torch.Tensor) -> pccl.Work[torch.Tensor]:
        return pccl.allreduce_async(bucket, self._op, tag=self._tag, comm=self._comm)

    def _add(self, bucket: torch.Tensor, *, last: bool) -> Any:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        try:
            self._buckets.append((bucket, future, self._start(bucket)))
            if last:
                results = self._reduce(self._buckets)
                for (_, waiting, _), result in zip(self._buckets, results, strict=True):
                    waiting.set_result(result)
                self._buckets = []
        except BaseException:
            # `backward` raises this call's error; the reducer still waits for the other buckets.
            for tensor, waiting, _ in self._buckets:
                waiting.set_result(tensor)
            self._buckets = []
            raise
        return future

    def _reduce(
        self, buckets: list[tuple[torch.Tensor, Any, pccl.Work[torch.Tensor]]]
    ) -> list[torch.Tensor]:
        """Results of all buckets over the same members. All members agree on who they are."""
        works = [work for _, _, work in buckets]
        while True:
            results = [work.wait() for work in works]
            if len({work.info.contributors for work in works}) == 1:
                self.info = works[-1].info
                return results
            self.reruns += 1
            works = [self._start(tensor) for tensor, _, _ in buckets]


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that averages gradients over the present members of the pccl run.

    When a member is lost in a step, the others run the step's reduction again from their own
    gradients. So all gradients of a step are over the same members, and equal on all. When that is
    not possible (`MasterLost`, `Evicted` ...), `backward()` raises; throw the gradients away.

    The module's process group must be this process alone. Newcomers enter where the program calls
    `pccl.admit` or `pccl.sync`, between steps.

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(model)
        model.register_comm_hook(DDPState(), ddp_hook)
    """
    return state._add(bucket.buffer(), last=bucket.is_last())
