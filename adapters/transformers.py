"""DiLoCo for the Trainer of Hugging Face transformers, as a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

import pccl
from pccl.adapters.torch.diloco import DiLoCo, Schedules, check_end
from pccl.errors import InvalidUsage

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pccl.adapters.torch.diloco import DiLoCoKeywords

__all__ = ["DiLoCoCallback"]


class DiLoCoCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Makes a Trainer a member of a DiLoCo run.

        diloco = DiLoCoCallback(sync_every=50)
        trainer = Trainer(model, args, train_dataset=data, callbacks=[diloco])
        trainer.train()  # under `pccl run --elastic`, or with PCCL_MASTER

    Every member is one process with a Trainer and data of its own. Training ends when the run has
    made `max_steps` steps; a newcomer begins where the others are and makes fewer of its own. All
    members have the same parameters at the end. When a member is lost, the others go on.

    `pccl.init` is called when training begins, unless the program has done it. The learning rate's
    schedule follows the run's steps, also that of a newcomer; not with `round_seconds`. Whatever
    the Trainer logs has the numbers of `DiLoCo.log_dict`, too: in its `state.log_history`, and for
    callbacks that come after this one.

    Args:
        keywords: `sync_every`, and the options of `pccl.adapters.torch.DiLoCo`, also `exclude` and
            `outer_optimizer`.

    Attributes:
        diloco: The `DiLoCo` around the Trainer's model; None before training.

    Raises:
        InvalidUsage: In `train`: the Trainer is a rank of a torch.distributed job, or is to load
            the best model at the end.
        InvalidArgument: In `train`: with `round_seconds`, `max_steps` is no multiple of
            `sync_every`.
        PCCLError: In `train`: what `DiLoCo` and its `step` raise.
    """

    def __init__(self, **keywords: Unpack[DiLoCoKeywords]) -> None:
        self.diloco: DiLoCo | None = None
        self._schedules: Schedules | None = None
        self._joins = keywords.get("join", True)
        self._keywords: DiLoCoKeywords = {**keywords, "join": False}  # after its end is checked

    def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        if args.world_size > 1:
            sentence = (
                "this Trainer is a rank of a torch.distributed job, and a member of a DiLoCo run is "
                "one process: start it by `pccl run`, not by torchrun"
            )
            raise InvalidUsage.because("DiLoCoCallback", sentence)
        if args.load_best_model_at_end:
            sentence = "load_best_model_at_end would replace the parameters before the last round"
            raise InvalidUsage.because("DiLoCoCallback", sentence)
        self.diloco = DiLoCo(of["model"], of["optimizer"], **self._keywords)
        check_end(self.diloco, state.max_steps)
        if self._keywords.get("comm") is None and not pccl.is_initialized():
            pccl.init()
        if self._joins:
            self.diloco.join()
        # A checkpoint has the schedule, and not the run's step.
        self._schedules = Schedules(self.diloco, state.global_step, state.max_steps)
        self._catch_up(of)

    def _catch_up(self, of: Mapping[str, Any]) -> None:
        schedule = of.get("lr_scheduler")
        assert self._schedules is not None
        self._schedules.catch_up([] if schedule is None else [schedule])

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        assert self.diloco is not None
        assert self._schedules is not None
        ended = self.diloco.step()
        self._schedules.stepped()
        self._catch_up(of)  # it may have come back
        # In rounds that end by their time, only the end of one is the same for all members.
        same = ended or self._keywords.get("round_seconds") is None
        if same and self.diloco.inner_step >= state.max_steps:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **of: Any) -> None:
        if self.diloco is None or logs is None:
            return
        numbers = self.diloco.log_dict()
        logs.update(numbers)
        if state.log_history:  # which has a copy of `logs` already
            state.log_history[-1].update(numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        assert self.diloco is not None
        self.diloco.finish()
