"""Averaged gradients as the first link of an optimizer's chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pccl
from pccl.communicator import Communicator
from pccl.types import ReduceOp

if TYPE_CHECKING:
    import optax


def average_gradients(
    op: ReduceOp | str = "avg", *, comm: Communicator | None = None
) -> optax.GradientTransformation:
    """The first link of an optimizer's chain: gradients become their mean over all members.

    `optax.chain(average_gradients(), optax.adam(1e-3))`; inside jit and outside. Imports optax.

    Args:
        op: "avg", or "sum".
        comm: Default: the process's communicator.

    Raises:
        PCCLError: Its `update` raises what `pccl.allreduce` does.
    """
    import optax

    def init(params: Any) -> Any:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return pccl.allreduce(updates, op, comm=comm), state

    return optax.GradientTransformation(init, update)
