"""DiLoCo: members train on their own for many steps, then average what they have learned.

Every member takes `sync_every` steps of its own (inner) optimizer. The difference between the
parameters that it began with and those that it has now, its pseudo-gradient, is averaged over the
members, and an outer optimizer takes one step with the mean. There are three modes:

* "sync" (Douillard et al., arXiv 2311.08105): members wait for the reduction.
* "async": the reduction runs in the background of the next inner steps, up to a whole round of
  them. A member trains on with what it has learned, as in the eager updates of Kale et al. (arXiv
  2502.12996). When the mean arrives, it moves to the new outer parameters plus what it has learned
  meanwhile (with plain averages: CoCoD-SGD, Shen et al., arXiv 1906.12043).
* "streaming" (Douillard et al., arXiv 2501.18512): fragments of the parameters take turns.

This package knows NumPy alone. `pccl.adapters.torch.DiLoCo` and `pccl.adapters.jax.diloco` put it
around a model.

Members come and go as follows. Outer parameters, the outer optimizer's state and the step count are
shared state. Newcomers are let in where a round ends, after all reductions in flight are over and
before new ones begin. Results that are not yet applied are part of the shared state, so a newcomer
holds everything that the members hold. It also takes part in the reductions that begin there, with
a weight too small to count, so it receives their results.
"""

from pccl.training.diloco.algorithm import DiLoCo
from pccl.training.diloco.inner import Inner
from pccl.training.diloco.options import Data, Keywords
from pccl.training.diloco.outer import SGD, OuterOptimizer
from pccl.training.diloco.presets import preset
from pccl.training.diloco.robust import Robust
from pccl.training.diloco.sparse import Sparse

__all__ = [
    "SGD",
    "Data",
    "DiLoCo",
    "Inner",
    "Keywords",
    "OuterOptimizer",
    "Robust",
    "Sparse",
    "preset",
]
