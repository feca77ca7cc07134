"""The actors of a run, and which of their errors a new actor mends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from ray import exceptions
from ray.util import get_node_ip_address

import pccl
from pccl.errors import PCCLError

__all__ = ["Master", "Member", "any_port", "is_death", "is_loopback"]

# The user's function raised them, or the next actor would meet them too.
_LASTING = (
    exceptions.RayTaskError,
    exceptions.UnserializableException,
    exceptions.CrossLanguageError,
    exceptions.RuntimeEnvSetupError,
    exceptions.ActorUnschedulableError,
    exceptions.TaskUnschedulableError,
    exceptions.ActorPlacementGroupRemoved,
    exceptions.TaskPlacementGroupRemoved,
    exceptions.AuthenticationError,
)


def is_death(error: exceptions.RayError) -> bool:
    """Whether a new actor in the place of the one that had this error can go on.

    Such an actor was killed, its node was lost, or the member may join the run again. All else is
    an error of the user's function, of the actor's initialisation, or of the cluster's setup.
    """
    if isinstance(error, exceptions.RayTaskError) and isinstance(error.cause, PCCLError):
        return error.cause.advice == "rejoin"
    if isinstance(error, exceptions.RaySystemError):
        return error.traceback_str is None  # otherwise this process cannot load the value
    return not (isinstance(error, _LASTING) or getattr(error, "actor_init_failed", False))


def any_port(host: str) -> str:
    """The address of any free port of that host."""
    return f"[{host}]:0" if ":" in host else f"{host}:0"


def is_loopback(host: str) -> bool:
    """Whether peers reach that address on their own machine only."""
    with suppress(ValueError):  # a name
        return ip_address(host).is_loopback
    return host == "localhost"


class Master:
    """The actor of the run's master."""

    def __init__(self, listen: str, secret: str) -> None:
        self.node = pccl.MasterNode(listen or any_port(get_node_ip_address()), secret=secret)
        self.node.run()

    def address(self) -> str:
        return self.node.address

    def peers(self) -> tuple[int, list[str]]:
        """The number of members, and the names of newcomers, over all groups."""
        groups = self.node.status()["groups"]
        newcomers = [peer["name"] for group in groups for peer in group["newcomers"]]
        return sum(len(group["members"]) for group in groups), newcomers

    def live(self) -> None:
        """Never returns: an error of this call tells the actor's end."""
        threading.Event().wait()


class Member:
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
