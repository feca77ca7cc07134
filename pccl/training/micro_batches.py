"""The same global batch for any number of members: each accumulates its part of it."""

from __future__ import annotations

from pccl import api
from pccl.api import Membership
from pccl.communicator import Communicator
from pccl.errors import InvalidArgument, InvalidUsage

__all__ = ["micro_batches"]


def micro_batches(
    global_batch: int,
    micro_batch: int = 1,
    *,
    membership: Membership | None = None,
    comm: Communicator | None = None,
) -> int:
    """The number of micro-batches that this member accumulates in the next step.

    The numbers of all members add up to `global_batch / micro_batch`, however many members there
    are. They differ by at most one; the lower ranks have the larger ones. No communication: all
    members know the membership. Call it for each step, after `pccl.admit`.

    Average the gradients over the member's own micro-batches and weight them by their number, as
    `pccl.allreduce(gradients, "avg", weight=count)`. The result is the mean over the global batch.
    A member with the number 0 takes part with zeros.

    Args:
        global_batch: Examples in a step of all members together.
        micro_batch: Examples in a micro-batch; divides `global_batch`. Default: 1, so that the
            result is a number of examples.
        membership: The members that divide the batch. Default: the group's present members.
        comm: Its members take part. Default: those of the process's communicator; before
            `pccl.init` the process is alone.

    Raises:
        InvalidArgument: A size is not positive, or `micro_batch` does not divide `global_batch`.
        InvalidUsage: This peer has not been let in yet: call `pccl.sync` first.
    """
    func = "micro_batches"
    if global_batch < 1 or micro_batch < 1:
        sentence = f"sizes must be positive, not {global_batch!r} and {micro_batch!r}"
        raise InvalidArgument.because(func, sentence)
    count, rest = divmod(global_batch, micro_batch)
    if rest:
        sentence = f"micro_batch={micro_batch} does not divide global_batch={global_batch}"
        raise InvalidArgument.because(func, sentence)
    if membership is None and comm is None and not api.is_initialized():
        return count
    group = api.membership(comm) if membership is None else membership
    if group.rank < 0:
        sentence = "this peer is not a member yet; call pccl.sync(state) first"
        raise InvalidUsage.because(func, sentence)
    share, over = divmod(count, group.world_size)
    return share + (group.rank < over)
