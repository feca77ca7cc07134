"""DiLoCo for JAX programs: `pccl.diloco` as a pair of functions, in the manner of optax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pccl.adapters.jax.arrays import put
from pccl.errors import InvalidArgument
from pccl.frameworks import Array
from pccl.training import diloco as core

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DiLoCo", "DiLoCoState", "diloco"]


def _wide(dtype: Any) -> Any:
    return np.float64 if dtype == np.float64 else np.float32


class _Leaves:
    """The latest call's pytree as `pccl.diloco.Inner`. Arrays that change are replaced."""

    def __init__(self, params: Any) -> None:
        found, self.structure = jax.tree_util.tree_flatten_with_path(params)
        self.names: Sequence[str] = [jax.tree_util.keystr(path) for path, _ in found]
        self.leaves: list[Any] = [leaf for _, leaf in found]
        for name, leaf in zip(self.names, self.leaves, strict=True):
            self._check(name, leaf)

    @staticmethod
    def _check(name: str, leaf: Any) -> None:
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            sentence = f"params{name} is no floating-point jax.Array"
            raise InvalidArgument.because("diloco", sentence)

    def replace(self, params: Any) -> None:
        """Takes the parameters of the next step.

        Raises:
            InvalidArgument: They have another structure or other shapes, or are no floating-point
                arrays. Then nothing has changed.
        """
        leaves, structure = jax.tree_util.tree_flatten(params)
        if structure != self.structure:
            raise InvalidArgument.because("diloco", "params have another structure than in init")
        for name, leaf, known in zip(self.names, leaves, self.leaves, strict=True):
            self._check(name, leaf)
            if leaf.shape != known.shape:
                sentence = f"params{name} has shape {leaf.shape}, and {known.shape} in init"
                raise InvalidArgument.because("diloco", sentence)
        self.leaves = leaves

    def read(self, index: int) -> Array:
        leaf = self.leaves[index]
        made: Array = np.asarray(leaf).astype(_wide(leaf.dtype), copy=False)
        return made

    def write(self, index: int, value: Array) -> None:
        # A copy: the outer parameters' memory changes, and JAX may share what it is given.
        leaf = self.leaves[index]
        made = np.array(value, leaf.dtype)
        self.leaves[index] = put(made, leaf.sharding if leaf.committed else None)

    def wait(self) -> None:
        jax.block_until_ready(self.leaves)

    def rounded(self, index: int, value: Array) -> Array:
        dtype = self.leaves[index].dtype
        made: Array = value.astype(dtype).astype(value.dtype) if dtype != value.dtype else value
        return made


class DiLoCoState:
    """The state that `init` makes and `update` carries on.

    It holds the run, so it can neither be copied nor enter a jitted function.

    Attributes:
        params: The parameters after `init`: the run's. Begin with these.
        core: The `pccl.diloco.DiLoCo`, with `outer_step`, `inner_step`, `info`, `hidden`, `finish`,
            `join`, `state_dict` and `load_state_dict`. After one that changes the model (`finish`,
            `join`, `load_state_dict`) `params` are the new ones.
    """

    def __init__(self, leaves: _Leaves, made: core.DiLoCo) -> None:
        self._leaves = leaves
        self.core = made

    def log_dict(self) -> dict[str, float]:
        """Numbers for W&B or TensorBoard: `core.log_dict()`."""
        return self.core.log_dict()

    @property
    def params(self) -> Any:
        """The model's parameters, as the latest call left them."""
        return jax.tree_util.tree_unflatten(self._leaves.structure, self._leaves.leaves)


class DiLoCo(NamedTuple):
    """`init(params) -> state` and `update(params, state, tokens=None) -> (params, state)`."""

    init: Callable[[Any], DiLoCoState]
    update: Callable[..., tuple[Any, DiLoCoState]]


def diloco(
    *,
    outer_optimizer: Callable[[Sequence[Array]], core.OuterOptimizer] | None = None,
    **keywords: Unpack[core.Keywords],
) -> DiLoCo:
    """DiLoCo (arXiv 2311.08105, 2501.18512) around any inner optimizer, in the manner of optax.

        outer = pccl.adapters.jax.diloco(sync_every=50)
        state = outer.init(params)
        params = state.params  # the run's
        while state.core.outer_step < rounds:  # of the run, not of this process
            params, moments = train_step(params, moments, next(batches))  # jitted; optax's, say
            params, state = outer.update(params, state)

    `init` is a collective call, after `pccl.init`: it waits to be let in. `update` counts an inner
    step, outside of jit. It changes `params` only where a round (or a fragment's turn) ends.
    `tokens=` weighs this member's step, as in `pccl.diloco.DiLoCo.step`.

    Args:
        outer_optimizer: Makes another outer optimizer from a list of NumPy arrays: see
            `pccl.diloco.OuterOptimizer`.
        keywords: `sync_every` and all other options of `pccl.diloco.DiLoCo`. `fragments` may list
            names as `jax.tree_util.keystr` has them. With `join=False` `init` does not join yet:
            call `state.core.load_state_dict(...)`, then `state.core.join()`.

    Returns:
        The pair. `params` are pytrees of floating-point `jax.Array`s of any float dtype; results
        have their dtypes and shardings. Outer parameters are float32 in CPU memory (float64 for
        float64).

    Raises:
        PCCLError: `init` and `update` raise what `pccl.diloco.DiLoCo` and its `step` do.
    """

    def init(params: Any) -> DiLoCoState:
        leaves = _Leaves(params)
        made = core.DiLoCo(leaves, outer_optimizer=outer_optimizer, **keywords)
        return DiLoCoState(leaves, made)

    def update(
        params: Any, state: DiLoCoState, tokens: float | None = None
    ) -> tuple[Any, DiLoCoState]:
        state._leaves.replace(params)
        state.core.step(tokens)
        return state.params, state

    return DiLoCo(init, update)
