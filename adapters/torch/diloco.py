"""`pccl.diloco` around a torch model, whose parameters may be on any device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pccl.adapters.torch.devices import from_cpu, to_cpu
from pccl.errors import InvalidArgument
from pccl.frameworks import Array
from pccl.training import diloco

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DiLoCo", "DiLoCoKeywords"]  # and for trainers: check_end, Schedules


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Parameters:
    """Parameters of a module as `pccl.diloco.Inner`."""

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        self._tensors = dict(named)
        self.names: Sequence[str] = list(self._tensors)
        for name, tensor in self._tensors.items():
            if not tensor.dtype.is_floating_point:
                raise InvalidArgument.because("DiLoCo", f"{name} is of {tensor.dtype}")

    def _local(self, index: int) -> torch.Tensor:
        """The parameter, or this rank's shard of a DTensor, sharing its memory."""
        tensor = self._tensors[self.names[index]].detach()
        local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return local

    def read(self, index: int) -> Array:
        local = self._local(index)
        array: Array = to_cpu(local).to(_wide(local.dtype)).numpy()
        return array

    def write(self, index: int, value: Array) -> None:
        with torch.no_grad():
            from_cpu(torch.from_numpy(value), self._local(index))

    def wait(self) -> None:
        last = {self._local(index).device: index for index in range(len(self.names))}
        for index in last.values():  # a copy from a device waits for the work on its stream
            self._local(index).reshape(-1)[:1].cpu()

    def rounded(self, index: int, value: Array) -> Array:
        dtype = self._local(index).dtype
        if dtype == _wide(dtype):
            return value
        array: Array = torch.from_numpy(value).to(dtype).to(_wide(dtype)).numpy()
        return array


class _Outer:
    """A torch optimizer as `OuterOptimizer`, on tensors over the outer parameters' memory."""

    def __init__(
        self, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], arrays: Sequence[Array]
    ) -> None:
        self._tensors: list[torch.Tensor] = [torch.from_numpy(array) for array in arrays]
        self._optimizer = make(self._tensors)

    def state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer}

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array]) -> None:
        for tensor, gradient in zip(self._tensors, gradients, strict=True):
            tensor.grad = torch.from_numpy(gradient)
        self._optimizer.step()
        for tensor in self._tensors:
            tensor.grad = None


class DiLoCoKeywords(diloco.Keywords, total=False):
    """The keywords of `DiLoCo` and of the trainers' callbacks, for programs that pass them on."""

    exclude: Iterable[str]
    outer_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None


class DiLoCo(diloco.DiLoCo):
    """Trains a module with all members of the run, by DiLoCo (arXiv 2311.08105, 2501.18512).

        model = make_model()
        inner = torch.optim.AdamW(model.parameters())
        diloco = DiLoCo(model, inner, sync_every=50)
        while diloco.outer_step < rounds:  # of the run; a newcomer begins where the others are
            loss_of(model, next(batches)).backward()
            inner.step()
            inner.zero_grad()
            diloco.step()

    This is `pccl.diloco.DiLoCo` around a module; see there for its rules, options and methods.

    Outer parameters and the outer optimizer's state are in CPU memory as float32 (float64 for
    float64), whatever dtype and device the model has. They travel in that dtype without `quantize`.
    DTensors stand for their local shards. The run shares the parameters that the inner optimizers
    have. Frozen parameters, those in `exclude`, buffers and the inner optimizers' state are each
    member's own: make frozen parameters from the same seed or file.

    Args:
        model: Any module; names in the run's state are those of its `named_parameters`.
        inner_optimizer: Trains the model; or several, each of which trains a part of it, as Muon
            and AdamW do together. Only their parameters are looked at.
        exclude: Names of parameters that are trained and stay each member's own.
        outer_optimizer: Makes another outer optimizer from a list of CPU tensors, as
            `lambda parameters: torch.optim.SGD(parameters, 0.7)`; once for each fragment.
            `outer_lr`, `outer_momentum` and `nesterov` are not used then.
        keywords: `sync_every` and all other options of `pccl.diloco.DiLoCo`. `fragments` may list
            the parameters' names.

    Raises:
        InvalidArgument: An argument makes no sense, or the run has other settings than this peer.
        PCCLError: What `pccl.sync` and `pccl.allreduce` raise.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        exclude: Iterable[str] = (),
        outer_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        **keywords: Unpack[diloco.Keywords],
    ) -> None:
        optimizers = inner_optimizer if isinstance(inner_optimizer, Sequence) else [inner_optimizer]
        named = _shared(model, optimizers, set(exclude))
        make = outer_optimizer
        outer = None if make is None else lambda arrays: _Outer(make, arrays)
        super().__init__(_Parameters(named), outer_optimizer=outer, **keywords)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the outer parameters by name, in CPU memory."""
        return {name: torch.from_numpy(array.copy()) for name, array in super().parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        """As `pccl.diloco.DiLoCo`, in tensors that `torch.load(..., weights_only=True)` takes."""
        made: dict[str, Any] = _as_tensors(super().state_dict())
        return made


def check_end(training: diloco.DiLoCo, steps: int) -> None:
    """Checks that the members of a trainer's run end together.

    A trainer ends by itself after its own `steps`. With `round_seconds` a fast member would make
    them in the middle of a round, which the others have not ended.

    Raises:
        InvalidArgument: They may end in the middle of a round.
    """
    plan = training._plan
    if plan.round_seconds is not None and steps % plan.sync_every:
        sentence = (
            f"with round_seconds all members end where a round does: max_steps, {steps}, must be a "
            f"multiple of sync_every, {plan.sync_every}"
        )
        raise InvalidArgument.because("DiLoCoCallback", sentence)


class Schedules:
    """Brings a trainer's learning rates to the run's step where this member has missed steps.

    Without that a trainer steps its schedules once for each step of this member. Those of a
    newcomer, and of one that comes back, would be late by the steps that the others made alone.
    With `round_seconds` nothing is done: members count steps there that they have not made.

    Args:
        training: Around the trainer's model.
        at: The run's step at which the schedules are, before this member joins.
        last: The run's last step, for which the schedules are made. They go no further.
    """

    def __init__(self, training: diloco.DiLoCo, at: int, last: int) -> None:
        self._training = training
        self._at = at
        self._last = last

    def stepped(self) -> None:
        """The trainer has stepped its schedules, after an inner step."""
        self._at += 1

    def catch_up(self, schedules: Iterable[Any]) -> None:
        """Steps these of torch, or of a trainer around one, as often as the others did alone.

        Those that follow a loss, and those of other packages, are left alone.
        """
        if self._training._plan.round_seconds is not None:
            return
        missed = min(self._training.inner_step, self._last) - self._at
        if missed <= 0:
            return
        self._at += missed
        for schedule in schedules:
            follows_a_loss = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
            if follows_a_loss or "last_epoch" not in schedule.state_dict():
                continue
            with warnings.catch_warnings():
                # The steps in between were made by others, not by this optimizer.
                warnings.filterwarnings(
                    "ignore", "Detected call of `lr_scheduler.step\\(\\)` before"
                )
                for _ in range(missed):
                    schedule.step()


def _shared(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], exclude: set[str]
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that the run shares: those of the optimizers, in the model's order.

    Raises:
        InvalidArgument: An optimizer has a parameter that is not the model's, or none has one that
            is trained and not excluded, or a name is no parameter's.
    """

    def refuse(sentence: str) -> InvalidArgument:
        return InvalidArgument.because("DiLoCo", sentence)

    every = dict(model.named_parameters())
    if unknown := sorted(exclude - set(every)):
        raise refuse(f"exclude names {unknown[0]!r}, which is no parameter of the model")
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if not held <= {id(p) for p in every.values()}:
        raise refuse("inner_optimizer has parameters that are not the model's")
    left = [
        n for n, p in every.items() if p.requires_grad and id(p) not in held and n not in exclude
    ]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise refuse(
            f"no inner optimizer has {left[0]}{more}: pass all optimizers in a list, freeze it by "
            "requires_grad_(False), or name it in exclude="
        )
    return [(n, p) for n, p in every.items() if id(p) in held and n not in exclude]


def _as_tensors(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _as_tensors(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_as_tensors(value) for value in tree]
    return torch.from_numpy(tree) if isinstance(tree, np.ndarray) else tree
