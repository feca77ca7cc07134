"""A reduction of sparse codes by owners: an all-to-all of parts, then an all-gather of results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pccl import api, collective_api
from pccl.communicator import Communicator
from pccl.errors import InvalidArgument, PeerLost
from pccl.frameworks import Array
from pccl.training.diloco.owners import Owners
from pccl.training.diloco.robust import Mean
from pccl.training.diloco.sparse import plain_shares
from pccl.types import ReduceInfo


class Exchange:
    """Both calls, made by `wait`. Otherwise as a `pccl.Work`. *the training thread*

    Args:
        owners: Of the group that takes part.
        tree: "code" and "weight", as in an all-gather.
    """

    def __init__(
        self, owners: Owners, tree: dict[str, Array], tag: int, comm: Communicator | None
    ) -> None:
        self._owners, self._tree, self._tag, self._comm = owners, tree, tag, comm
        self._info: ReduceInfo | None = None

    def done(self) -> bool:
        """Whether it is over."""
        return self._info is not None

    @property
    def info(self) -> ReduceInfo:
        """Both calls together, once it is over."""
        assert self._info is not None
        return self._info

    def wait(self) -> dict[str, Any]:
        """Makes the calls.

        Returns:
            "weight": that of each member, by rank, as it was passed; "mean": a `Mean`.

        Raises:
            PeerLost: A member was lost or interrupted, before, in or between the calls: all members
                begin again with the same codes.
            InvalidArgument: The code of a member makes no sense; on all members.
            PCCLError: As `pccl.alltoall` and `pccl.allgather`.
        """
        owners, size = self._owners, self._owners.members
        parts = owners.parts(self._tree["code"])
        weight = np.tile(self._tree["weight"], (size, 1))
        try:
            found, first = collective_api.alltoall(
                {"part": parts, "weight": weight}, tag=self._tag, return_info=True, comm=self._comm
            )
        except InvalidArgument:
            if api.world_size(self._comm) == size:
                raise
            raise _lost() from None  # a call of another thread has ended meanwhile
        group = api.membership(self._comm)
        rank = first.contributors.index(group.peers[group.rank])
        shares = plain_shares(found["weight"][:, 0].tolist())
        code = owners.reduce(rank, found["part"], shares.shares)
        codes, second = collective_api.allgather(
            code, tag=self._tag, return_info=True, comm=self._comm
        )
        if second.contributors != first.contributors:
            raise _lost()
        mean = Mean(owners.mean(codes), shares.weight > 0, [], shares.weight)
        self._info = replace(
            second,
            attempts=first.attempts + second.attempts - 1,
            **{name: getattr(first, name) + getattr(second, name) for name in _ADDED},
        )
        return {"weight": found["weight"], "mean": mean}


# Fields of a `ReduceInfo` that are sums over calls.
_ADDED = ("tx_bytes", "rx_bytes", "bytes", "seconds", "waiting_seconds", "moving_seconds")


def _lost() -> PeerLost:
    return PeerLost.because(
        "diloco", "a member was lost before or between the two calls of a reduction"
    )
