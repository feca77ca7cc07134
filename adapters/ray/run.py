"""The actors of one run, and the loop that replaces them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

import pccl
from pccl.errors import Evicted, RevisionMismatch

if TYPE_CHECKING:
    from pccl.adapters.ray import ElasticTrainer

__all__ = ["Run"]

_LOOK_SECONDS = 1.0  # between two looks for newcomers, when the work has ended

_log = logging.getLogger(__name__)


class _Master:
    """The actor of the run's master."""

    def __init__(self, listen: str, secret: str) -> None:
        self.node = pccl.MasterNode(listen or _at(get_node_ip_address()), secret=secret)
        self.node.run()

    def address(self) -> str:
        return self.node.address

    def newcomers(self) -> list[str]:
        groups = self.node.status()["groups"]
        return [peer["name"] for group in groups for peer in group["newcomers"]]

    def live(self) -> None:
        """Never returns: an error of this call tells the actor's end."""
        threading.Event().wait()


class _Member:
    """The actor of one member."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        os.environ.pop("PCCL_SECRET_FILE", None)
        os.environ.update(settings)

    def is_up(self) -> None: ...

    def work(self, train: Callable[[Any], Any], config: Any) -> tuple[bool, Any]:
        """Whether the function returned, rather than leaving on purpose; and its value."""
        try:
            return True, train(config)
        except SystemExit as error:
            if error.code and not isinstance(error, pccl.Drained):
                raise RuntimeError(f"the function ended with status {error.code}") from error
            return not isinstance(error, pccl.Drained), None
        finally:
            if pccl.is_initialized():
                pccl.shutdown()


def _of_the_function(error: Exception) -> bool:
    """Whether a new actor would not help: an error of the function, or when it was loaded."""
    if isinstance(error, Evicted):
        return isinstance(error, RevisionMismatch)
    return isinstance(error, RayTaskError) or getattr(error, "actor_init_failed", False)


def _at(host: str) -> str:
    """Any free port of that host."""
    return f"[{host}]:0" if ":" in host else f"{host}:0"


class Run:
    """The actors of one `fit`."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self.trainer, self.deaths, self.ended = trainer, 0, False
        self.actors: dict[int, Any] = {}  # by the member's number, as are the next three
        self.up: dict[int, Any] = {}  # is done when Ray has started the actor
        self.names: dict[int, str] = {}
        self.starts = [0] * trainer.members
        self.calls: dict[Any, int] = {}  # under way
        self.master: Any = None
        bundles = [dict(trainer.resources)] * trainer.min_members
        self.group = placement_group(bundles, strategy=trainer.strategy)

    def results(self) -> list[Any]:
        bind = self.trainer.settings.get("PCCL_BIND", "")
        self.start_master(_at(bind) if bind.startswith("127.") else "")
        for member in range(self.trainer.members):
            self.start(member)
        found: list[Any] = [None] * self.trainer.members
        while self.calls:
            timeout = _LOOK_SECONDS if self.ended else None
            for call in ray.wait([self.life, *self.calls], timeout=timeout)[0]:
                try:
                    returned, value = ray.get(call)
                except (Evicted, RayActorError) as error:
                    if _of_the_function(error):
                        raise
                    self.replace(self.calls.pop(call, None), error)  # None: the master
                else:
                    found[self.calls.pop(call)] = value
                    self.ended |= returned
            if self.ended:
                self.end_newcomers()
        return found

    def start_master(self, listen: str) -> None:
        """On this node, so that another one may get the same address."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": 3, "scheduling_strategy": here}
        self.master = ray.remote(_Master).options(**options).remote(listen, self.trainer.secret)
        self.life = self.master.live.remote()
        self.trainer.address = ray.get(self.master.address.remote())

    def start(self, member: int) -> None:
        """Makes an actor, which Ray places when there are resources."""
        trainer = self.trainer
        at = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=member)
        own: dict[str, Any] = dict(trainer.resources)
        options: dict[str, Any] = {
            "num_cpus": own.pop("CPU", 0),
            "num_gpus": own.pop("GPU", 0),
            "resources": own,
        }
        if member < trainer.min_members:
            options["scheduling_strategy"] = at
        again = f"-{self.starts[member]}" if self.starts[member] else ""
        self.starts[member] += 1
        self.names[member] = f"member-{member}{again}"
        settings = {
            **trainer.settings,
            "PCCL_MASTER": trainer.address,
            "PCCL_SECRET": trainer.secret,
            "PCCL_NAME": self.names[member],
            "PCCL_LOCAL_RANK": str(member),
        }
        actor = self.actors[member] = ray.remote(_Member).options(**options).remote(settings)
        self.up[member] = actor.is_up.remote()
        self.calls[actor.work.remote(*trainer.work)] = member

    def replace(self, member: int | None, error: Exception) -> None:
        """Counts a death, and starts a member, or the master (None), again."""
        what = "the master" if member is None else self.names[member]
        _log.warning("pccl: lost %s (%s)", what, type(error).__name__)
        if member is not None:
            ray.kill(self.actors[member])  # it may be cut off, and live
            if self.ended:
                return
        self.deaths += not getattr(error, "preempted", False)
        limit = self.trainer.max_failures
        if limit is not None and self.deaths > limit:
            sentence = f"{what} died: {self.deaths} deaths in this run, max_failures is {limit}"
            raise RuntimeError(sentence) from error
        if member is None:
            self.start_master(self.trainer.address)
        else:
            self.start(member)

    def end_newcomers(self) -> None:
        """Ends members that Ray has not placed, and those that wait for their admission."""
        waiting: list[str] = []
        with suppress(RayActorError):
            waiting = ray.get(self.master.newcomers.remote())
        for call, member in list(self.calls.items()):
            if self.names[member] in waiting or not ray.wait([self.up[member]], timeout=0)[0]:
                del self.calls[call]
                ray.kill(self.actors[member])

    def end(self) -> None:
        for actor in [*self.actors.values(), self.master]:
            if actor is not None:
                ray.kill(actor)
        remove_placement_group(self.group)
