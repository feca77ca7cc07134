"""The outer optimizer, which moves the parameters that all members have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pccl.frameworks import Array


class OuterOptimizer(Protocol):
    """Moves the outer parameters. Each fragment has its own.

    Equal numbers must give equal results on every member.
    """

    def state(self) -> Mapping[str, Any]:
        """The state that a newcomer receives, in nested dicts and lists: writable NumPy arrays,
        which are written in place, and objects with `state_dict` and `load_state_dict`."""

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array]) -> None:
        """One step, in place.

        Args:
            parameters: Always the same arrays: float32 (float64 for float64).
            gradients: Of the same shapes and dtypes. The step may overwrite them.
        """


class SGD:
    """Gradient descent with momentum (Sutskever et al., ICML 2013), as torch's without dampening.

    Args:
        parameters: Arrays of float32 or float64, which the momentum is made for.
        lr: Learning rate.
        momentum: 0 keeps none.
        nesterov: Whether the momentum is Nesterov's.
    """

    def __init__(
        self,
        parameters: Sequence[Array],
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
    ) -> None:
        # NumPy's scalars would widen float32.
        self.lr = float(lr)
        self.momentum = float(momentum)
        self.nesterov = nesterov
        self._velocities = [np.zeros_like(array) for array in parameters] if momentum else []

    def state(self) -> dict[str, Any]:
        """The momentum, which begins at zero."""
        return {"momentum": self._velocities}

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array]) -> None:
        """v = momentum v + g, then parameters -= lr (g + momentum v); without Nesterov lr v.

        Overwrites `gradients`.
        """
        # In the dtype of the parameters, and every operation rounds once, so all machines compute
        # the same bytes. A Python float would widen float32 of shape () in NumPy 1.
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            lr, momentum = map(parameter.dtype.type, (self.lr, self.momentum))
            if self.momentum:
                velocity = self._velocities[index]
                np.multiply(velocity, momentum, out=velocity)
                np.add(velocity, gradient, out=velocity)
                if self.nesterov:
                    np.add(gradient, velocity * momentum, out=gradient)
                else:
                    gradient = velocity.copy()
            np.multiply(gradient, lr, out=gradient)
            np.subtract(parameter, gradient, out=parameter)
