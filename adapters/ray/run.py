"""The loop of one run, which replaces its actors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from pccl.adapters.ray.actors import Master, Member, any_port, is_death, is_loopback

if TYPE_CHECKING:
    from pccl.adapters.ray import ElasticTrainer

__all__ = ["Run"]

_LOOK_SECONDS = 1.0  # between two looks for newcomers, when the work has ended

_log = logging.getLogger(__name__)


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
        bind = trainer.settings.get("PCCL_BIND", "")
        self.listen = any_port(bind) if is_loopback(bind) else ""
        bundles = [dict(trainer.resources)] * trainer.min_members
        self.group = placement_group(bundles, strategy=trainer.strategy)
        # Members without a bundle start when all others are up. Ray reserves the group's resources
        # as one unit, and would wait for ever if such members took some of them before.
        self.later = set(range(trainer.min_members, trainer.members))

    def results(self) -> list[Any]:
        self.start_master()
        for member in range(self.trainer.min_members):
            self.start(member)
        found: list[Any] = [None] * self.trainer.members
        while self.calls or self.later:
            timeout = _LOOK_SECONDS if self.ended else None
            starting = self.start_others() if self.later else []
            for ref in ray.wait([self.life, *self.calls, *starting[:1]], timeout=timeout)[0]:
                if ref in starting:
                    continue
                try:
                    returned, value = ray.get(ref)
                except RayError as error:
                    if not is_death(error):
                        raise
                    self.replace(self.calls.pop(ref, None), error)  # None: the master
                else:
                    found[self.calls.pop(ref)] = value
                    self.ended |= returned
            if self.ended:
                self.end_the_waiting()
        return found

    def start_master(self) -> None:
        """On this node, so that another one may get the same address."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": 3, "scheduling_strategy": here}
        self.master = ray.remote(Master).options(**options).remote(self.listen, self.trainer.secret)
        self.life = self.master.live.remote()
        try:
            self.listen = self.trainer.address = ray.get(self.master.address.remote())
        except RayError as error:
            if not is_death(error):
                raise
            self.replace(None, error)

    def start(self, member: int) -> None:
        """Makes an actor, which Ray places when there are resources."""
        trainer = self.trainer
        own: dict[str, Any] = dict(trainer.resources)
        options: dict[str, Any] = {
            "num_cpus": own.pop("CPU", 0),
            "num_gpus": own.pop("GPU", 0),
            "resources": own,
        }
        if member < trainer.min_members:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group, member)
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
        actor = self.actors[member] = ray.remote(Member).options(**options).remote(settings)
        self.up[member] = actor.is_up.remote()
        self.calls[actor.work.remote(*trainer.work)] = member

    def start_others(self) -> list[Any]:
        """Starts the members without a bundle, unless others are not up, which it returns."""
        needed = [self.up[member] for member in range(self.trainer.min_members)]
        starting: list[Any] = ray.wait(needed, num_returns=len(needed), timeout=0)[1]
        while self.later and not starting:
            self.start(self.later.pop())
        return starting

    def start_again(self, member: int) -> None:
        """Starts a member after a death. Those with a bundle come first."""
        if member >= self.trainer.min_members:
            self.later.add(member)
            return
        self.start(member)
        for call, other in list(self.calls.items()):
            if other >= self.trainer.min_members and not self.is_placed(other):
                self.kill(call)
                self.later.add(other)

    def is_placed(self, member: int) -> bool:
        """Whether Ray has started the actor."""
        return bool(ray.wait([self.up[member]], timeout=0)[0])

    def kill(self, call: Any) -> None:
        ray.kill(self.actors[self.calls.pop(call)])

    def replace(self, member: int | None, error: Exception) -> None:
        """Counts a death, and starts a member, or the master (None), again."""
        what = "the master" if member is None else self.names[member]
        _log.warning("pccl: lost %s (%s)", what, type(error).__name__)
        ray.kill(self.master if member is None else self.actors[member])  # it may be cut off
        if member is not None and self.ended:
            return
        self.deaths += not getattr(error, "preempted", False)
        limit = self.trainer.max_failures
        if limit is not None and self.deaths > limit:
            sentence = f"{what} died: {self.deaths} deaths in this run, max_failures is {limit}"
            raise RuntimeError(sentence) from error
        if member is None:
            self.start_master()
        else:
            self.start_again(member)

    def end_the_waiting(self) -> None:
        """Ends members that Ray has not placed, and those that wait for their admission."""
        self.later.clear()
        members, newcomers = self.peers()
        for call, member in list(self.calls.items()):
            if not self.is_placed(member):
                self.kill(call)
            elif self.names[member] in newcomers:
                self.kill(call)
        # Nobody admits newcomers to an empty group. Those with another name are members whose
        # function chose it. A member that is none of them has left, and may still save its state.
        unknown = [name for name in newcomers if name not in self.names.values()]
        if not members and len(self.calls) <= len(unknown):
            for call in list(self.calls):
                self.kill(call)

    def peers(self) -> tuple[int, list[str]]:
        """The number of members, and the names of newcomers, as the master knows them."""
        try:
            members, newcomers = ray.get(self.master.peers.remote())
            return members, newcomers
        except RayError as error:
            if not is_death(error):
                raise
            return 0, []  # `life` tells its death

    def end(self) -> None:
        for actor in [*self.actors.values(), self.master]:
            if actor is not None:
                ray.kill(actor)
        remove_placement_group(self.group)
