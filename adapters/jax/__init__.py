"""JAX arrays, averaged gradients and DiLoCo for JAX programs.

In a function that JAX traces `pccl.allreduce` becomes a call of the compiled program, in place where
its input is donated; `typed_errors` and `average_gradients` are for such programs.
"""

from pccl.adapters.jax._diloco import diloco
from pccl.adapters.jax.arrays import (
    adopt,
    flatten,
    from_buffers,
    immutable,
    is_spread,
    is_traced,
    recognises,
    share,
    to_buffers,
)
from pccl.adapters.jax.gradients import average_gradients
from pccl.adapters.jax.traced import allreduce as allreduce_traced
from pccl.adapters.jax.traced import typed_errors

__all__ = [
    "adopt",
    "allreduce_traced",
    "average_gradients",
    "diloco",
    "flatten",
    "from_buffers",
    "immutable",
    "is_spread",
    "is_traced",
    "recognises",
    "share",
    "to_buffers",
    "typed_errors",
]
