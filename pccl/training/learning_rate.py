"""A learning rate for the size of a step that members make together."""

from __future__ import annotations

import math
from typing import Literal

from pccl.errors import InvalidArgument

__all__ = ["learning_rate"]


def learning_rate(
    usual: float, batch: float, usual_batch: float, *, rule: Literal["sqrt", "linear"] = "sqrt"
) -> float:
    """The learning rate for a step of another size than the one that `usual` was found for.

        mean, info = pccl.allreduce(gradient, "avg", weight=len(x), return_info=True)
        lr = learning_rate(1e-3, info.total_weight, usual_batch=256)

    For runs in which members come and go and each keeps its batch, so that the global batch
    changes. Where `micro_batches` keeps the global batch the same, the rate stays, too. No
    communication: members that pass the same numbers get the same rate, to the last bit.

    Args:
        usual: The learning rate that is right for `usual_batch`.
        batch: Examples or tokens in this step of all members together: `info.total_weight` of a
            weighted reduction. In DiLoCo, those of a round: the growth of `world_tokens`.
        usual_batch: In the same unit.
        rule: "sqrt" multiplies by the square root of `batch / usual_batch`, as is usual for Adam
            and its kin (Malladi et al., arXiv 2205.10287). "linear" multiplies by the ratio, as is
            usual for SGD (Goyal et al., arXiv 1706.02677). Both hold up to some largest batch.

    Raises:
        InvalidArgument: A number is not positive and finite, or there is no such rule.
    """
    func = "learning_rate"
    numbers = {"usual": usual, "batch": batch, "usual_batch": usual_batch}
    for name, given in numbers.items():
        try:
            positive = 0 < given < math.inf
        except (TypeError, ValueError):  # text, None, or an array of several
            positive = False
        if not positive:
            raise InvalidArgument.because(func, f"{name} is a positive number, not {given!r}")
    if rule not in ("sqrt", "linear"):
        raise InvalidArgument.because(func, f'rule is "sqrt" or "linear", not {rule!r}')
    ratio = float(batch) / float(usual_batch)
    return float(usual) * (math.sqrt(ratio) if rule == "sqrt" else ratio)
