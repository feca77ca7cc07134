"""DiLoCo around a torch model: `pccl.diloco` with the model's parameters on whatever device they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pccl.communicator import Communicator
from pccl.errors import InvalidArgument
from pccl.quantize import Quantize
from pccl.training import diloco

__all__ = ["DiLoCo"]

Array = npt.NDArray[Any]


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
        array: Array = local.to("cpu", _wide(local.dtype)).numpy()
        return array

    def write(self, index: int, value: Array) -> None:
        with torch.no_grad():
            self._local(index).copy_(torch.from_numpy(value))

    def rounded(self, index: int, value: Array) -> Array:
        dtype = self._local(index).dtype
        if dtype == _wide(dtype):
            return value
        array: Array = torch.from_numpy(value).to(dtype).to(_wide(dtype)).numpy()
        return array


class _Outer:
    """A torch optimizer as `pccl.diloco.OuterOptimizer`, on tensors over the outer parameters' memory."""

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


class DiLoCo:
    """Trains a module together with all members of the run, by DiLoCo (arXiv 2311.08105, 2501.18512).

        model = make_model()
        inner = torch.optim.AdamW(model.parameters())
        diloco = DiLoCo(model, inner, sync_every=50)
        while diloco.outer_step < rounds:  # of the run; a newcomer begins where the others are
            loss_of(model, next(batches)).backward()
            inner.step()
            inner.zero_grad()
            diloco.step()

    Making one is a collective call, after `pccl.init`: it waits to be let in, and gives the model
    the run's parameters. Members may be lost and come while the loop runs; `step` deals with both.
    After every round all members hold the same outer parameters, byte for byte; in mode "sync" the
    model's own as well.

    Outer parameters and the outer optimizer's state are in CPU memory: float32 (float64 for
    float64), whatever dtype and device the model has; what travels is of that dtype, too, without
    `quantize`. DTensors stand for their local shards. Shared are the parameters that the inner
    optimizer has. Others, and buffers, are each member's own, as the inner optimizer's state is:
    make frozen parameters from the same seed or file.

    The program's own collective calls belong right before `step`, not after it: a newcomer's first
    inner step comes after the round that let it in.

    Args:
        model: Any module; names in the run's state are those of its `named_parameters`.
        inner_optimizer: Trains the model. Only its parameters are looked at.
        sync_every: Inner steps in a round, the paper's H.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its momentum.
        nesterov: Whether its momentum is Nesterov's.
        outer_optimizer: Makes another one from a list of CPU tensors, as
            `lambda parameters: torch.optim.SGD(parameters, 0.7)`; once for each fragment. The three
            arguments before are not used then.
        mode: "sync", "async" or "streaming": see `pccl.diloco.DiLoCo`, also for what follows.
        fragments: "streaming": how many, or lists of parameters' names. Default: 4.
        overlap: Inner steps behind which a reduction runs. Default: "async": half of
            `sync_every`; "streaming": a twentieth of it.
        mixing: "streaming": how much of a member's own parameters stays, alpha. Default: 0.5.
        quantize: As in `pccl.allreduce`.
        verify_every: Rounds between comparisons of all members' states. Default: 1 for "sync", 16
            otherwise.
        data: A `pccl.data.ElasticSampler` that the program takes its examples from: shared with
            newcomers, and settled by each round's reduction.
        comm: Default: the process's communicator.
        rejoin: Makes a new communicator when this peer was put out of the run, as `pccl.init`.
            Default: `step` raises then.
        join: False: do not join yet; load a checkpoint and call `join`.

    Raises:
        InvalidArgument: An argument makes no sense, or the run has other settings than this peer.
        PCCLError: What `pccl.sync` and `pccl.allreduce` raise.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        outer_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        mode: str = "sync",
        fragments: int | Sequence[Sequence[str]] | None = None,
        overlap: int | None = None,
        mixing: float | None = None,
        quantize: Quantize | str | None = None,
        verify_every: int | None = None,
        data: diloco.Data | None = None,
        comm: Communicator | None = None,
        rejoin: Callable[[], Communicator] | None = None,
        join: bool = True,
    ) -> None:
        trained = {id(p) for group in inner_optimizer.param_groups for p in group["params"]}
        named = [(name, p) for name, p in model.named_parameters() if id(p) in trained]
        if len(named) != len(trained):
            sentence = "inner_optimizer has parameters that are not the model's"
            raise InvalidArgument.because("DiLoCo", sentence)
        make = outer_optimizer
        self._core = diloco.DiLoCo(
            _Parameters(named),
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            outer_optimizer=None if make is None else lambda arrays: _Outer(make, arrays),
            mode=mode,
            fragments=fragments,
            overlap=overlap,
            mixing=mixing,
            quantize=quantize,
            verify_every=verify_every,
            data=data,
            comm=comm,
            rejoin=rejoin,
            join=join,
        )

    def step(self, tokens: float | None = None) -> bool:
        """Counts an inner step, which the model has just made; reduces where it is time.

        Args:
            tokens: What this member's step has seen, in tokens or samples: its weight in the mean
                is their number in a round. All members pass it, or none does. Default: all steps
                weigh the same.

        Returns:
            Whether a round has ended.

        Raises:
            InvalidArgument: `tokens` is no number that is 0 or from 1e-6 to 1e15.
            InvalidUsage: Not joined; or not again after an exception.
            PCCLError: What `pccl.admit`, `pccl.sync` and `pccl.allreduce` raise, unless `rejoin`
                deals with it.
        """
        return self._core.step(tokens)

    def join(self) -> None:
        """Joins the run: after `join=False`, or again after an exception of `step` (see `pccl.diloco.DiLoCo.join`)."""
        self._core.join()

    def finish(self) -> None:
        """Applies what is in flight, and gives the model the outer parameters. All members call it."""
        self._core.finish()

    @property
    def outer_step(self) -> int:
        """Rounds that the run has finished; equal on all members."""
        return self._core.outer_step

    @property
    def inner_step(self) -> int:
        """Inner steps of the run's longest-standing members: for learning rates and data."""
        return self._core.inner_step

    @property
    def info(self) -> Any:
        """The latest reduction's `pccl.ReduceInfo`: bytes sent and received, members; None before."""
        return self._core.info

    @property
    def sync_info(self) -> Any:
        """The latest sync's `pccl.SyncInfo`; None before."""
        return self._core.sync_info

    @property
    def tx_bytes(self) -> int:
        """Bytes that this member's reductions sent in all."""
        return self._core.tx_bytes

    @property
    def hidden(self) -> float:
        """Share of the reductions' time that was spent on inner steps, not waiting; 1.0 before the first."""
        return self._core.hidden

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the outer parameters by name, in CPU memory."""
        return {
            name: torch.from_numpy(array.copy()) for name, array in self._core.parameters.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as tensors and numbers: `torch.load(..., weights_only=True)` takes it.

        Outer parameters and optimizer, and the count of steps up to the latest round's end. Waits for
        reductions in flight. One member may call it alone; best at a round's end.

        Raises:
            PCCLError: A reduction in flight failed.
        """
        made: dict[str, Any] = _map(self._core.state_dict(), np.ndarray, torch.from_numpy)
        return made

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a checkpoint: before `join`, on any member; the one with the most rounds counts for all.

        Raises:
            InvalidArgument: It is of another model, or of other fragments.
            InvalidUsage: Joined already.
        """
        self._core.load_state_dict(state)


def _map(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _map(value, kind, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_map(value, kind, change) for value in tree]
    return change(tree) if isinstance(tree, kind) else tree
