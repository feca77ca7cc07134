"""JAX arrays, averaged gradients and DiLoCo for JAX programs.

In a function that JAX traces, `pccl.allreduce` becomes a call of the compiled program, in place if
its input is donated. `typed_errors` and `average_gradients` are for such programs.
"""

from pccl.adapters.jax import arrays
from pccl.adapters.jax._diloco import diloco
from pccl.adapters.jax.arrays import *  # noqa: F403
from pccl.adapters.jax.gradients import average_gradients
from pccl.adapters.jax.traced import typed_errors

__all__ = ["average_gradients", "diloco", "typed_errors"]
__all__ += arrays.__all__
