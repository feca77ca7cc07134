"""DiLoCo for the Trainer of Lightning, as a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pccl
from pccl.adapters.torch.diloco import DiLoCo, Schedules, check_end
from pccl.errors import InvalidUsage

try:
    from lightning.pytorch import Callback
except ImportError:  # the same, under the name of its own package
    from pytorch_lightning import Callback

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pccl.adapters.torch.diloco import DiLoCoKeywords

__all__ = ["DiLoCoCallback"]


class DiLoCoCallback(Callback):  # type: ignore[misc]  # lightning is not typed
    """Makes a Lightning Trainer a member of a DiLoCo run.

        trainer = Trainer(devices=1, max_steps=1000, callbacks=[DiLoCoCallback(sync_every=50)])
        trainer.fit(module, loader)  # under `pccl run --elastic`, or with PCCL_MASTER

    Every member is one process with a Trainer and data of its own. Training ends when the run has
    made `max_steps` steps; a newcomer begins where the others are and makes fewer of its own. All
    members have the same parameters at the end. When a member is lost, the others go on.

    `pccl.init` is called when training begins, unless the program has done it. The Trainer's
    checkpoints contain the state of DiLoCo. With `max_steps`, schedules of the learning rate that
    step with each optimizer step follow the run's steps, also those of a newcomer; not with
    `round_seconds`, with another `frequency` than 1, or in manual optimization. The numbers of
    `DiLoCo.log_dict` are logged at the end of each round.

    Args:
        keywords: `sync_every`, and the options of `pccl.adapters.torch.DiLoCo`, also `exclude` and
            `outer_optimizer`.

    Attributes:
        diloco: The `DiLoCo` around the module; None before training.

    Raises:
        InvalidUsage: In `fit`: the Trainer has several processes.
        InvalidArgument: In `fit`: with `round_seconds`, `max_steps` is no multiple of `sync_every`.
        PCCLError: In `fit`: what `DiLoCo` and its `step` raise.
    """

    def __init__(self, **keywords: Unpack[DiLoCoKeywords]) -> None:
        self.diloco: DiLoCo | None = None
        self._schedules: Schedules | None = None
        self._keywords = keywords
        self._keywords["join"] = False  # the Trainer loads its checkpoint first
        self._loaded: Mapping[str, Any] | None = None
        self._steps = 0  # of the Trainer, up to the last batch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size > 1:
            sentence = (
                "this Trainer has several processes, and a member of a DiLoCo run is one: give it "
                "devices=1 and num_nodes=1, and start the members by `pccl run`"
            )
            raise InvalidUsage.because("DiLoCoCallback", sentence)
        self.diloco = DiLoCo(pl_module, trainer.optimizers, **self._keywords)
        if trainer.max_steps > 0:
            check_end(self.diloco, trainer.max_steps)
        if self._keywords.get("comm") is None and not pccl.is_initialized():
            pccl.init()
        if self._loaded is not None:
            self.diloco.load_state_dict(self._loaded)
            self._loaded = None
        # A checkpoint has the run's step where a round began, and this member's own steps.
        at = max(self.diloco.inner_step, trainer.global_step)
        self._schedules = Schedules(self.diloco, at, trainer.max_steps)
        self.diloco.join()
        self._catch_up(trainer, pl_module)
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.diloco is not None
        if trainer.global_step == self._steps:  # the batch was accumulated only
            return
        self._steps = trainer.global_step
        assert self._schedules is not None
        ended = self.diloco.step()
        self._schedules.stepped()
        self._catch_up(trainer, pl_module)  # it may have come back
        if ended:
            pl_module.log_dict(self.diloco.log_dict())
        # In rounds that end by their time, only the end of one is the same for all members.
        same = ended or self._keywords.get("round_seconds") is None
        if same and 0 < trainer.max_steps <= self.diloco.inner_step:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.diloco is not None
        self.diloco.finish()

    def _catch_up(self, trainer: Any, pl_module: Any) -> None:
        # Without max_steps a schedule is as long as this member's data. In manual optimization the
        # module steps it.
        if trainer.max_steps <= 0 or not pl_module.automatic_optimization:
            return
        assert self._schedules is not None
        # Another frequency counts batches of the epoch, which are each member's own.
        self._schedules.catch_up(
            config.scheduler
            for config in trainer.lr_scheduler_configs
            if config.interval == "step" and config.frequency == 1
        )

    def state_dict(self) -> dict[str, Any]:
        return {} if self.diloco is None else self.diloco.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._loaded = state_dict or None
