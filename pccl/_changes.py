"""Tells a program of memberships that it has not seen yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinMethodType, MethodType

from pccl.errors import InvalidArgument
from pccl.types import Departure, MembershipChange

__all__ = ["Changes", "Subscription"]

_Callback = Callable[[MembershipChange], object]


class Subscription:
    """A callback of `on_membership_change`, until it is removed. *any thread*"""

    def __init__(self, changes: Changes, callback: _Callback) -> None:
        self._changes = changes
        self._callback = callback

    def remove(self) -> None:
        """Ends the calls. Does nothing the second time."""
        self._changes.remove(self)


def _is_same(one: _Callback, other: _Callback) -> bool:
    # Each look-up of a method makes another object. Others' own comparison is not asked.
    methods = (MethodType, BuiltinMethodType)
    return one is other or (type(one) in methods and type(one) is type(other) and one == other)


class Changes:
    """The callbacks of one communicator, in order. *any thread*

    The next communicator of a process that comes back to its run has the same object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []
        self._peers: tuple[str, ...] = ()  # the members that the program knows
        self._epoch = 0

    def __bool__(self) -> bool:
        return bool(self._subscriptions)

    def add(self, callback: _Callback, func: str) -> Subscription:
        """The subscription of this callback, which may be there already.

        Raises:
            InvalidArgument: The callback cannot be called.
        """
        if not callable(callback):
            raise InvalidArgument.because(func, f"callback must be callable, not {callback!r}")
        with self._lock:
            for known in self._subscriptions:
                if _is_same(known._callback, callback):
                    return known
            made = Subscription(self, callback)
            self._subscriptions.append(made)
        return made

    def remove(self, subscription: Subscription) -> None:
        with self._lock:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)

    def begin(self, peers: Sequence[str]) -> None:
        """Sets the members with which the next membership is compared."""
        self._peers = tuple(peers)
        self._epoch = 0

    def tell(
        self,
        epoch: int,
        rank: int,
        peers: Sequence[str],
        names: Sequence[str],
        departures: Sequence[tuple[str, str, str]],
    ) -> list[Callable[[], object]]:
        """Returns what is to be called now. The engine calls it outside of locks."""
        now = tuple(peers)
        with self._lock:
            if epoch <= self._epoch:
                return []  # another thread has told of a newer one
            self._epoch = epoch
            before, self._peers = self._peers, now
            subscriptions = list(self._subscriptions)
        known = {peer: (name, reason) for peer, reason, name in departures}
        gone = [peer for peer in before if peer not in now]
        change = MembershipChange(
            epoch=epoch,
            rank=rank,
            peers=now,
            names=tuple(names),
            joined=tuple(peer for peer in now if peer not in before),
            lost=tuple(Departure(peer, *known.get(peer, (peer[:8], ""))) for peer in gone),
        )
        if not change.joined and not change.lost:
            return []  # another plan
        return [partial(one._callback, change) for one in subscriptions]
