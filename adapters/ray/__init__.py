"""Elastic training on Ray: each member is an actor, and one that dies is replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import ray

from pccl.adapters.ray.actors import is_loopback
from pccl.adapters.ray.run import Run
from pccl.errors import InvalidArgument
from pccl.master import make_secret
from pccl.tools.run import ONE_PROCESS

__all__ = ["ElasticTrainer"]

_RECONNECT_SECONDS = "60"  # Ray may take longer than pccl's default to start another master
_ALL_INTERFACES = ("0.0.0.0", "::")


class ElasticTrainer:
    """Runs a function on members that may die, on a cluster of Ray.

        def train(config):
            pccl.init()
            ...  # with pccl.adapters.torch.DiLoCo, or pccl.admit and pccl.sync

        results = ElasticTrainer(train, {"steps": 1000}, members=8, min_members=4).fit()

    Each member is an actor, a process of its own. An actor that dies is replaced, while the others
    go on in their processes. The new one runs the function from its beginning and enters as a
    newcomer. When a function returns, the work has ended: members that die later are not replaced,
    and those that wait for resources or for their admission are ended.

    Args:
        train: The function of a member. `pccl.init()` in it finds the run.
        config: Its only argument.
        members: The number of members when Ray has the resources. Members above `min_members`
            start when the others have theirs, and there are resources for more.
        min_members: The number of members at the start, with reserved resources (a placement
            group). The run goes on with fewer while Ray has no place for replacements.
        resources: What Ray reserves for each member, e.g. `{"CPU": 4, "GPU": 1}`. Default: one CPU.
        strategy: How Ray places them: "SPREAD", "PACK", "STRICT_SPREAD" or "STRICT_PACK".
        max_failures: Deaths in the whole run that are tolerated; None: any number. Deaths by a
            preemption that Ray knows of do not count.
        settings: `PCCL_` variables of the members. Those of this process hold, too, except a
            `PCCL_BIND` that only this machine has. `PCCL_RECONNECT_TIMEOUT` is 60 by default.
        secret: The run's secret, at least 32 bytes. Default: a new one.

    Attributes:
        address: The master's "host:port" during `fit`, for `pccl status`; "" before.

    Raises:
        InvalidArgument: `min_members` is not in 1..`members`.
    """

    def __init__(
        self,
        train: Callable[[Any], Any],
        config: Any = None,
        *,
        members: int,
        min_members: int = 1,
        resources: Mapping[str, float] | None = None,
        strategy: str = "SPREAD",
        max_failures: int | None = 10,
        settings: Mapping[str, str] | None = None,
        secret: str | None = None,
    ) -> None:
        if not 1 <= min_members <= members:
            sentence = f"min_members must be in 1..{members}, not {min_members}"
            raise InvalidArgument.because("ElasticTrainer", sentence)
        self.address = ""
        self.members, self.min_members, self.max_failures = members, min_members, max_failures
        self.work, self.resources, self.strategy = (
            (train, config),
            resources or {"CPU": 1},
            strategy,
        )
        self.secret = secret or make_secret()
        own = {
            name: text
            for name, text in os.environ.items()
            if name.startswith("PCCL_") and name not in ONE_PROCESS
        }
        bind = own.get("PCCL_BIND", "")
        if not is_loopback(bind) and bind not in _ALL_INTERFACES:
            own.pop("PCCL_BIND", None)  # other nodes do not have that address
        self.settings = {"PCCL_RECONNECT_TIMEOUT": _RECONNECT_SECONDS, **own}
        self.settings |= {"PCCL_MIN_PEERS": str(min_members), **(settings or {})}

    def fit(self) -> list[Any]:
        """Runs the members until the work has ended. Ctrl-C ends them all.

        Returns:
            The value of `train` for each member, by number. None for a member without one: it left
            on purpose, or was lost or ended when the work had ended.

        Raises:
            RuntimeError: More than `max_failures` actors died.
            Exception: That of a member's function, with its traceback there. All others are ended.
        """
        if not ray.is_initialized():
            ray.init()
        run = Run(self)
        try:
            return run.results()
        finally:
            run.end()
