"""DDP across peers that come and go: a communication hook on `pccl.allreduce_async`."""

# Annotations are evaluated here, since DDP compares those of a hook with the types it wants.

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import pccl
from pccl.communicator import Communicator
from pccl.types import ReduceInfo, ReduceOp

__all__ = ["DDPState", "ddp_hook"]

_TAG = 0xDD9_0000  # a tag, since autograd may call the hook on a thread of its own


class _Bucket(NamedTuple):
    """Some gradients of a step, side by side in one buffer."""

    buffer: torch.Tensor
    gradients: list[torch.Tensor]  # views of it
    numbers: list[int]  # of their parameters
    future: "torch.futures.Future[torch.Tensor]"

    def key(self) -> str:
        """A part of the call that members compare: whose gradients these are, in which order."""
        text = ",".join(map(str, self.numbers))
        if len(text) > 40:
            text = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"parameters {text}"


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
        self._buckets: list[_Bucket] = []
        self._works: list[pccl.Work[dict[str, torch.Tensor]]] = []
        # Numbers of the parameters, in the order of the first step's buckets: DDP makes those from
        # the model alone, so a parameter has one number on all members.
        self._numbers: dict[int, int] = {}
        self._parameters: list[torch.Tensor] = []  # keeps the keys above
        self._met: set[str] = set()  # members of the step before
        self._whole = True

    def _start(self, bucket: _Bucket) -> "pccl.Work[dict[str, torch.Tensor]]":
        tree = {bucket.key(): bucket.buffer}
        return pccl.allreduce_async(tree, self._op, tag=self._tag, comm=self._comm)

    def _begin_step(self) -> None:
        # DDP orders its buckets anew after its first step. So a newcomer has other buckets than
        # the others in its first step. All members know the newcomers alike.
        members = set(pccl.membership(self._comm).peers)
        self._whole = not members <= self._met
        self._met = members

    def _add(self, grads: dist.GradBucket) -> Any:
        parameters = grads.parameters()
        for parameter in parameters:
            if self._numbers.setdefault(id(parameter), len(self._numbers)) == len(self._parameters):
                self._parameters.append(parameter)
        bucket = _Bucket(
            grads.buffer(),
            grads.gradients(),
            [self._numbers[id(parameter)] for parameter in parameters],
            torch.futures.Future(),
        )
        try:
            if not self._buckets:
                self._begin_step()
            self._buckets.append(bucket)
            if not self._whole:
                self._works.append(self._start(bucket))
            if grads.is_last():
                for waiting, result in zip(self._buckets, self._reduce(), strict=True):
                    waiting.future.set_result(result)
                self._buckets, self._works = [], []
        except BaseException:
            # `backward` raises this call's error; the reducer still waits for the other buckets.
            for waiting in {id(b): b for b in (*self._buckets, bucket)}.values():
                waiting.future.set_result(waiting.buffer)
            self._buckets, self._works = [], []
            raise
        return bucket.future

    def _reduce(self) -> list[torch.Tensor]:
        """Results of all buckets over the same members. All members agree on who they are."""
        if self._whole:
            self._reduce_whole()
            return [bucket.buffer for bucket in self._buckets]
        works = self._works
        while True:
            results = [work.wait() for work in works]
            if len({work.info.contributors for work in works}) == 1:
                self.info = works[-1].info
                return [r[b.key()] for b, r in zip(self._buckets, results, strict=True)]
            self.reruns += 1
            works = [self._start(bucket) for bucket in self._buckets]

    def _reduce_whole(self) -> None:
        """One operation for the step, in place, in an order that no bucket decides."""
        found = {n: g for b in self._buckets for n, g in zip(b.numbers, b.gradients, strict=True)}
        tree = {str(number): found[number] for number in sorted(found)}
        _, self.info = pccl.allreduce(
            tree, self._op, out=tree, tag=self._tag, comm=self._comm, return_info=True
        )


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that averages gradients over the present members of the pccl run.

    When a member is lost in a step, the others run the step's reduction again from their own
    gradients. So all gradients of a step are over the same members, and equal on all. When that is
    not possible (`MasterLost`, `Evicted` ...), `backward()` raises; throw the gradients away.

    The module's process group must be this process alone. Newcomers enter where the program calls
    `pccl.admit` or `pccl.sync`, between steps. The first step with a newcomer is reduced as a whole
    after `backward` has computed it, since DDP's buckets differ between the members then.

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(model)
        model.register_comm_hook(DDPState(), ddp_hook)
    """
    return state._add(bucket)
