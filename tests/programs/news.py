"""Programs whose users are told something."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import pccl
from programs.peer import hear, say, start


def admit_and_reduce() -> None:
    """Lets newcomers in and reduces, each time it is told to."""
    start()
    say(event="ready")
    for line in sys.stdin:
        if json.loads(line) == "end":
            break
        pccl.admit()
        say(event="step", world=pccl.allreduce(1))
    pccl.shutdown()
    say(event="done")


def explicit() -> None:
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    comm.connect()
    while comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < 2:
        comm.update_topology()
    say(event="together")
    hear()


def join_as_replica() -> None:
    start(replica_id="a", ranks_per_replica=1)
    say(event="in")
    pccl.admit()
    hear()


def run_master() -> None:
    pccl.MasterNode("127.0.0.1:0").run()


def run_two_masters() -> None:
    masters = [pccl.MasterNode("127.0.0.1:0") for _ in range(2)]
    for master in masters:
        master.run()
    os._exit(0)


def use_modules_as_attributes() -> None:
    assert pccl.adapters.generic.__name__ == "pccl.adapters.generic"
    assert pccl.diloco.DiLoCo and pccl.data and pccl.checkpoint
    assert not {"torch", "jax"} & set(sys.modules)
    try:
        pccl.nothing  # noqa: B018
    except AttributeError as error:
        print(error)


def name_diloco_of_jax() -> None:
    print(pccl.adapters.jax.diloco.__name__)


def trees_with_none() -> None:
    start()

    def refused(call: Callable[[Any], object], tree: object) -> str | None:
        try:
            call(tree)
        except pccl.InvalidArgument as error:
            return str(error)
        return None

    trees: list[Any] = [[None, None], {}, None, {"a": [], "b": None}]
    for tree in trees:
        others = (pccl.allgather, pccl.broadcast, pccl.reduce_scatter, pccl.alltoall)
        for call in (pccl.allreduce, *others):
            text = refused(call, tree)
            assert text and "no array in it" in text, (tree, call, text)
    mixed: list[Any] = [np.ones(2), None]
    same = pccl.allreduce(mixed)
    assert same[1] is None and (same[0] == pccl.world_size()).all()
    say(event="ok")


def none_on_one(call: str, plain: bool) -> None:
    start()
    if plain:
        leaf = np.ones(2)
    else:
        leaf = np.ones((2, 2)).T[:1] if call == "allreduce" else np.ones(2, bool)
    me = pccl.rank()
    tree = {"a": leaf, "b": None} if me else {"a": leaf}
    try:
        getattr(pccl, call)(tree)
    except pccl.MismatchedCall as error:
        say(event="refused", text=str(error))


def calls_that_cannot_meet() -> None:
    start()
    me = pccl.rank()
    try:
        pccl.allgather(np.ones(3)) if me else pccl.barrier()
    except pccl.Deadlock as error:
        say(event="stuck", text=str(error))
