"""Peers that measure the network between them."""

from __future__ import annotations

import time

import pccl
from programs.peer import expected, hear, say, start, x


def measure() -> None:
    comm = start()
    pccl.barrier()
    before = comm.topology()
    began = time.monotonic()
    comm.optimize_topology()
    took = time.monotonic() - began
    after = comm.topology()
    total, info = pccl.allreduce(x(200_000), return_info=True)
    assert (total == expected(info)).all()
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    say(
        event="done",
        took=took,
        rtt=[after.rtt.get(pair) for pair in pairs],
        up=after.up,
        down=after.down,
        unreachable=len(after.unreachable),
        peers=after.peers == pccl.membership().peers,
        ring=sorted(after.ring),
        shares=[sum(schedule.shares) for schedule in after.schedules],
        last=after.schedules[-1].up_to,
        nothing_before=not before.rtt and set(before.up) == {None} and before.hosts == after.hosts,
    )
    hear()


def measure_in_memory() -> None:
    comm = start()
    info = pccl.ReduceInfo()
    while info.epoch < 2:  # of one that is planned for shared memory
        _, info = pccl.allreduce(x(10), return_info=True)
    began = time.monotonic()
    comm.optimize_topology()
    topology = comm.topology()
    say(
        event="done",
        took=time.monotonic() - began,
        known=bool(topology.rtt),
        hosts=len(set(topology.hosts)),
    )
    hear()


def measure_two_hosts() -> None:
    comm = start()
    info = pccl.ReduceInfo()
    while info.epoch < 2:
        _, info = pccl.allreduce(x(10), return_info=True)
    comm.optimize_topology()
    topology = comm.topology()
    pairs = [(a, b) for a in range(4) for b in range(4) if topology.hosts[a] != topology.hosts[b]]
    say(
        event="done",
        hosts=sorted(topology.hosts),
        unreachable=len(topology.unreachable),
        known=sum(pair in topology.rtt for pair in pairs),
    )
    hear()


def measure_alone() -> None:
    comm = start()
    comm.optimize_topology()
    topology = comm.topology()
    say(event="done", peers=len(topology.peers), up=topology.up)


def measure_with_one_that_dies() -> None:
    comm = start()
    pccl.barrier()
    say(event="in")
    comm.optimize_topology()
    say(event="done", size=pccl.world_size(), known=len(comm.topology().peers))
    hear()


def measure_or_give_up(timeout: float | None) -> None:
    comm = start()
    pccl.barrier()
    try:
        say(event="in")
        comm.optimize_topology(timeout=timeout)
        say(event="done", how="done")
    except KeyboardInterrupt:
        say(event="done", how="interrupted")
    except pccl.PCCLError as error:
        say(event="done", how=type(error).__name__)
    total, info = pccl.allreduce(x(100), return_info=True)
    say(event="after", right=bool((total == expected(info)).all()), size=info.world_size)
    hear()


def admit_twice() -> None:
    """Its first operation takes over a millisecond, so members measure at the next admission."""
    start()
    pccl.allreduce(x(1_000_000))
    for _ in range(2):
        try:
            pccl.admit()
            how = "done"
        except KeyboardInterrupt:
            how = "interrupted"
        except pccl.PCCLError as error:
            how = type(error).__name__
        say(event="admitted", how=how, size=pccl.world_size())
        total, info = pccl.allreduce(x(100), return_info=True)
        assert (total == expected(info)).all()
    hear()
