"""The learning of a member from a round that ended without it: see `quorum` of `DiLoCo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pccl.training.diloco.reductions import Contribution

# Later it is measured from parameters that are too old.
_MOST_ROUNDS = 4


@dataclass(frozen=True)
class Late:
    """A contribution, and the inner step of the run at which it was due."""

    steps: int
    contribution: Contribution

    def counts(self, steps: int, sync_every: int) -> bool:
        """Whether it may be part of what is sent at that inner step."""
        return 0 <= steps - self.steps <= _MOST_ROUNDS * sync_every


def combined(parts: Sequence[Contribution]) -> Contribution | None:
    """Their mean by weight, with the sum of the weights. None: no weight counts."""
    counting = [part for part in parts if part.weight > 0]
    total = sum(part.weight for part in counting)
    if not counting:
        return None
    gradients = []
    for arrays in zip(*(part.gradients for part in counting), strict=True):
        mean = np.zeros_like(arrays[0])
        for part, array in zip(counting, arrays, strict=True):
            mean += np.asarray(array * (part.weight / total), mean.dtype)
        gradients.append(mean)
    return Contribution(total, gradients, any(part.tokens for part in counting))
