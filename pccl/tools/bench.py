"""`pccl bench`: the speed of all-reduce between the peers that run it, and of each pair."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from pccl import _settings, api
from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.tools import screen
from pccl.tools.parsing import Misuse, endpoints, reason_of, seconds, whole
from pccl.tools.status import ROUNDED
from pccl.types import ReduceOp, Topology

__all__ = ["add_arguments", "network_bound", "run"]

DEFAULT_SIZES = "4KiB,64KiB,1MiB,16MiB,64MiB"
# Apart from the group of a training run at the same master. Pairs of peers use the next numbers.
DEFAULT_GROUP = 1_650_811_392
_MAX_GROUP = 2_000_000_000
_MAX_PEERS = 4096
_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_JOIN_ATTEMPTS = 10  # one second apart
_MEET_SECONDS = 30.0  # for two peers to meet after the barrier
_PAIR_SECONDS = 120.0  # for a call between two peers
_PAIR_BYTES = (1 << 18, 1 << 22, 1 << 25)  # the largest that is quick enough counts
_LEAST_CALLS = 3
_LEAST_COMPARED = 1 << 20
_LEAST_COPIES, _MOST_COPIES = 9, 200
_MOST_CALLS = 1000
_LONGEST_CALL = 30.0  # seconds; sizes that would take longer are left out
_NAME_BYTES = 48
_GONE = "a peer is gone; start it again on all"

NOTES = """\
It starts when all peers are there, and prints the same on each (under `pccl run`: once). The time
of an all-reduce is the slowest peer's median, from a barrier on, the master's commit included.
"each way" is the bytes that a peer sends, and receives, per second. Pairs are measured one after
the other, with all-reduces of two.

The largest size, from 1 MiB on, is compared with a bound that is measured in the same run. On one
host that is a copy of the array in memory on all peers at once: an all-reduce also reads every
array and writes every result. With one peer on each host it is the time at the measured rates of the network.
"""


class _Stopped(Exception):
    """The peers have changed; the measurement cannot go on."""

    reason = ""


def parse_sizes(text: str) -> list[int]:
    """Bytes: "4KiB,1MiB,1000000"; multiples of 4, since the elements are float32."""
    sizes = []
    for word in text.lower().replace(" ", "").split(","):
        unit = next((unit for unit in _UNITS if word.endswith(unit)), "")
        number = word.removesuffix(unit).removesuffix("b")
        if not number.isdecimal():
            raise argparse.ArgumentTypeError(f"takes sizes such as 64KiB,1MiB, not {word!r}")
        size = int(number) * _UNITS.get(unit, 1)
        if size < 4 or size % 4:
            raise argparse.ArgumentTypeError(f"takes multiples of 4 bytes, not {word!r}")
        sizes.append(size)
    return sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--master",
        type=endpoints,
        metavar="HOST:PORT",
        help="the master, or several with commas (default: PCCL_MASTER)",
    )
    words = "how many run it (default: PCCL_MIN_PEERS, else 2)"
    parser.add_argument("--peers", type=whole(2, _MAX_PEERS), metavar="N", help=words)
    sizes = parse_sizes(DEFAULT_SIZES)
    words = f"bytes of each peer's array (default: {DEFAULT_SIZES})"
    parser.add_argument("--sizes", type=parse_sizes, default=sizes, metavar="SIZES", help=words)
    words = "about how long each size is measured (default: %(default)s)"
    least_to_most = seconds(0.001, 3600)
    parser.add_argument("--seconds", type=least_to_most, default=1.0, help=words)
    words = "for a second bench at the same master; a thousand apart or more (default: %(default)s)"
    parser.add_argument(
        "--peer-group",
        type=whole(0, _MAX_GROUP),
        default=DEFAULT_GROUP,
        metavar="GROUP",
        help=words,
    )
    parser.add_argument("--json", action="store_true", help="print JSON (default: tables)")


def run(options: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit status: 0, 1 when it failed after its begin, 130 after Ctrl-C.

    Raises:
        Misuse: It cannot begin.
    """
    try:
        result = _measure(options)
    except (PCCLError, _Stopped) as error:
        screen.failure("pccl bench", str(error.reason or error))
        return 1
    except KeyboardInterrupt:
        return 130
    # All peers found the same. Under `pccl run` one of them prints it.
    if _settings.text("PCCL_LOCAL_RANK") not in (None, "0"):
        return 0
    if options.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0


# Measuring.


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    func, address = "bench", options.master or _settings.text("PCCL_MASTER")
    if address is None:
        raise Misuse("give --master HOST:PORT, or start it as `pccl run -n 2 -- pccl bench`")
    comm = None
    try:
        count = _settings.integer(
            options.peers, "--peers", func, 2, _MAX_PEERS, variable="PCCL_MIN_PEERS", default=2
        )
        if _settings.text("PCCL_LOCAL_RANK") in (None, "0"):
            screen.note("pccl bench", f"waiting for {count} peers at {address}")
        comm = Communicator(address, options.peer_group)
        comm._join(func, min_peers=count, attempts=_JOIN_ATTEMPTS, timeout=None, enter=False)
    except PCCLError as error:
        if comm is not None:
            comm.close()
        raise Misuse(reason_of(error)) from None
    try:
        if api.rank(comm) < 0:
            sentence = "others run it there already; wait for them, or take another --peer-group"
            raise _Stopped(sentence)
        bench = _Bench(comm, address, options.peer_group, options.seconds)
        if bench.world < count:
            raise _Stopped(_GONE)
        return bench.run(options.sizes)
    finally:
        comm.close()


class _Bench:
    """This peer's part. All peers make the same calls, since they decide from agreed values."""

    def __init__(self, comm: Communicator, address: str, group: int, seconds: float) -> None:
        self._comm = comm
        self._address = address
        self._group = group
        self._seconds = seconds
        self._peers = api.membership(comm).peers
        self._rank = api.rank(comm)
        self.world = len(self._peers)

    def run(self, sizes: Sequence[int]) -> dict[str, Any]:
        names = self._names()
        self._say("the network")
        self._comm.optimize_topology()
        self._check_peers()
        network = self._comm.topology()
        self._say(f"all-reduce between {self.world} peers")
        rows: list[dict[str, Any]] = []
        left_out: list[dict[str, Any]] = []
        for size in sorted(set(sizes)):
            expected = rows[-1]["seconds"] * size / rows[-1]["bytes"] if rows else 0.0
            if expected > _LONGEST_CALL:
                left_out.append({"bytes": size, "expected_seconds": expected})
            else:
                rows.append(self._all_reduce(size))
        bound = self._bound(rows[-1], network)
        found = {"network": _as_json(network), "all_reduce": rows, "bound": bound}
        return {"peers": names, **found, "left_out": left_out, "pairs": self._pairs()}

    def _say(self, text: str) -> None:
        if self._rank == 0:
            screen.note("pccl bench", f"measures {text}")

    def _bound(self, row: dict[str, Any], network: Topology) -> dict[str, Any]:
        """Measures what an all-reduce of that size takes at least."""
        size, kind, least = row["bytes"], "none", None
        if size < _LEAST_COMPARED:
            kind = "small"
        elif len(set(network.hosts)) == 1:
            kind, least = "copy", self._copy(size, row["seconds"])
        elif len(set(network.hosts)) == self.world:
            kind, least = "network", network_bound(size, network.up, network.down)
        part = None if least is None else least / row["seconds"]
        return {"bytes": size, "kind": kind, "seconds": least, "part": part}

    def _copy(self, size: int, expected: float) -> float:
        """Seconds of a copy of the array on all peers at once: the slowest peer's median.

        `expected` is the time of an all-reduce, which all peers know: all make as many copies.
        """
        source = np.ones(size // 4, np.float32)
        target = np.zeros_like(source)
        times = []
        np.copyto(target, source)  # the first one also makes the pages
        for _ in range(min(_MOST_COPIES, max(_LEAST_COPIES, int(self._seconds / expected)))):
            api.barrier(comm=self._comm)
            began = time.perf_counter()
            np.copyto(target, source)
            times.append(time.perf_counter() - began)
        self._check_peers()
        return float(api.allreduce(statistics.median(times), "max", comm=self._comm))

    def _check_peers(self) -> None:
        if api.membership(self._comm).peers != self._peers:
            raise _Stopped(_GONE)

    def _names(self) -> list[str]:
        """The peers in rank order: host names, and process numbers where a host has several."""
        own = np.zeros((self.world, _NAME_BYTES), np.uint8)
        name = f"{socket.gethostname()}\0{os.getpid()}".encode()[-_NAME_BYTES:]
        own[self._rank, : len(name)] = np.frombuffer(name, np.uint8)
        every = api.allreduce(own, comm=self._comm)
        self._check_peers()
        parts = [bytes(line).rstrip(b"\0").decode(errors="replace").split("\0") for line in every]
        hosts = [host for host, *_ in parts]
        return [f"{p[0]} ({p[-1]})" if hosts.count(p[0]) > 1 else p[0] for p in parts]

    def _all_reduce(self, size: int) -> dict[str, Any]:
        """One row: all peers together."""
        times = self._times(self._comm, size, self._rank, self._seconds)
        self._check_peers()
        median = api.allreduce(statistics.median(times), "max", comm=self._comm)
        worst = api.allreduce(max(times), "max", comm=self._comm)
        sent = 2 * (self.world - 1) / self.world * size
        return {
            "bytes": size,
            "calls": len(times),
            "seconds": median,
            "worst_seconds": worst,
            "bytes_per_second": size / median,
            "each_way_bytes_per_second": sent / median,
        }

    def _times(
        self, comm: Communicator, size: int, rank: int, seconds: float, timeout: float | None = None
    ) -> list[float]:
        """Seconds of this peer's calls, as many as fit. Every result is checked."""
        world = self.world if comm is self._comm else 2
        send = np.zeros(size // 4, np.float32)
        recv = np.zeros_like(send)
        times: list[float] = []
        calls = 2  # at first: one to warm up, and one to know how many fit
        while len(times) < calls:
            number = len(times)
            send.fill(rank + 1 + number % 16)
            api.barrier(comm=comm, timeout=timeout)
            began = time.perf_counter()
            info = comm.all_reduce(send, recv, op=ReduceOp.SUM, timeout=timeout)
            times.append(time.perf_counter() - began)
            if info.local_world_size != world:
                raise _Stopped(_GONE)
            expected = world * (world + 1) // 2 + world * (number % 16)
            if not (recv == np.float32(expected)).all():
                raise _Stopped("wrong sum")  # cannot be
            if len(times) == 2:
                slowest = api.allreduce(times[1], "max", comm=comm, timeout=timeout)
                fit = int(seconds / max(slowest, 1e-6))
                calls = 1 + min(_MOST_CALLS, max(_LEAST_CALLS, fit))
        return times[1:]

    def _pairs(self) -> list[dict[str, Any]]:
        """Every pair of peers, one after the other, each in a group of its own."""
        figures = np.zeros((self.world, self.world, 2))
        pairs = list(combinations(range(self.world), 2))
        for number, pair in enumerate(pairs):
            self._say(f"pair {number + 1} of {len(pairs)}")
            if self._rank in pair:
                try:
                    found = self._pair(self._group + 1 + number, pair.index(self._rank))
                    if self._rank == pair[0]:
                        figures[pair] = found
                except PCCLError as error:  # the other pairs may work
                    screen.note("pccl bench", f"pair {pair}: {error.reason or error}")
            api.barrier(comm=self._comm)
            self._check_peers()
        every = api.allreduce(figures, comm=self._comm)
        self._check_peers()
        return [
            {
                "peers": [one, other],
                "seconds": float(every[one, other, 0]) or None,
                "each_way_bytes_per_second": float(every[one, other, 1]) or None,
            }
            for one, other in pairs
        ]

    def _pair(self, group: int, rank: int) -> tuple[float, float]:
        """Seconds of an all-reduce of 4 bytes, and bytes per second each way; the slower peer's."""
        comm = Communicator(self._address, group)
        try:
            comm._join(
                "bench", min_peers=2, attempts=_JOIN_ATTEMPTS, timeout=_MEET_SECONDS, enter=False
            )

            def median(size: int) -> float:
                times = self._times(comm, size, rank, self._seconds / 4, _PAIR_SECONDS)
                middle = statistics.median(times)
                return float(api.allreduce(middle, "max", comm=comm, timeout=_PAIR_SECONDS))

            latency, rate = median(4), 0.0
            for size in _PAIR_BYTES:
                seconds = median(size)
                rate = size / seconds
                if seconds > self._seconds / 8:
                    break
            return latency, rate
        finally:
            comm.close()


def network_bound(
    size: int, up: Sequence[float | None], down: Sequence[float | None]
) -> float | None:
    """Seconds that an all-reduce takes at least at these rates; None where one is not known.

    Every peer sends and receives the array at least once, and all of them together send, and
    receive, 2 (n - 1) arrays, however the work is shared.
    """
    ways = [rate for rate in (*up, *down) if rate]
    if len(ways) < len(up) + len(down):
        return None
    together = 2 * (len(up) - 1) * size
    sums = (sum(ways[: len(up)]), sum(ways[len(up) :]))
    return max(size / min(ways), together / min(sums))


def _as_json(network: Topology) -> dict[str, Any]:
    world = range(len(network.peers))
    return {
        "hosts": list(network.hosts),
        "up_bytes_per_second": list(network.up),
        "down_bytes_per_second": list(network.down),
        "round_trip_seconds": [[network.rtt.get((one, other)) for other in world] for one in world],
        "slow_ways": [[*pair, rate] for pair, rate in sorted(network.rate.items())],
        "unreachable": sorted(map(list, network.unreachable)),
        "ring": list(network.ring),
        "schedules": [
            {"up_to_bytes": each.up_to, "kind": each.kind, "shares": list(each.shares)}
            for each in network.schedules
        ],
    }


# Showing.


def _size(size: int) -> str:
    units = (("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
    return next(f"{size // scale} {unit}" for unit, scale in units if size % scale == 0)


def _scaled(value: float, *units: tuple[str, float]) -> str:
    """`value` in the largest unit that it reaches; the last one is for all smaller values."""
    unit, scale = next((one for one in units if value >= ROUNDED * one[1]), units[-1])
    return f"{value / scale:.3g} {unit}"


def _duration(seconds: float) -> str:
    return _scaled(seconds, ("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def _rate(bytes_per_second: float) -> str:
    return _scaled(bytes_per_second, ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))


def _show(result: dict[str, Any]) -> None:
    names = result["peers"]
    rows = [
        [
            _size(row["bytes"]),
            _duration(row["seconds"]),
            _duration(row["worst_seconds"]),
            _rate(row["bytes_per_second"]),
            _rate(row["each_way_bytes_per_second"]),
            str(row["calls"]),
        ]
        for row in result["all_reduce"]
    ]
    columns = ["array", "median", "worst", "array/time", "each way", "calls"]
    screen.table(f"All-reduce between {len(names)} peers, float32 sum", columns, rows)
    for row in result["left_out"]:
        screen.line(
            f"left out: {_size(row['bytes'])}, about {_duration(row['expected_seconds'])} a call"
        )

    screen.line(_compared(result["bound"], result["all_reduce"][-1], len(names)))

    _show_network(names, result["network"])
    cells = [["-"] * len(names) for _ in names]
    for pair in result["pairs"]:
        one, other = pair["peers"]
        if pair["seconds"] is not None:
            cells[one][other] = _rate(pair["each_way_bytes_per_second"])
            cells[other][one] = _duration(pair["seconds"])
    rows = [[f"{rank} {name}", *cells[rank]] for rank, name in enumerate(names)]
    title = "Pairs: bandwidth each way (upper right), latency of 4 bytes (lower left)"
    screen.table(title, ["peer", *map(str, range(len(names)))], rows)


def _show_network(names: Sequence[str], network: dict[str, Any]) -> None:
    def known(show: Callable[[float], str], value: float | None) -> str:
        return "-" if value is None else show(value)

    rows = [
        [
            f"{rank} {name}",
            known(_rate, network["up_bytes_per_second"][rank]),
            known(_rate, network["down_bytes_per_second"][rank]),
            *(known(_duration, rtt) for rtt in network["round_trip_seconds"][rank]),
        ]
        for rank, name in enumerate(names)
    ]
    if any(cell != "-" for row in rows for cell in row[1:]):
        columns = ["peer", "up", "down", *map(str, range(len(names)))]
        screen.table("Network: all flows out and in at once, and round trips", columns, rows)
    for schedule in network["schedules"]:
        up_to = schedule["up_to_bytes"]
        sizes = "larger ones" if up_to is None else f"up to {_size(up_to)}"
        shares = "/".join(f"{100 * share:.0f}" for share in schedule["shares"])
        screen.line(f"plan: {sizes}: {schedule['kind']}, shares of {shares} %")
    screen.line("ring: " + " ".join(map(str, network["ring"])))


def _compared(bound: dict[str, Any], row: dict[str, Any], count: int) -> str:
    """How fast the largest all-reduce is beside what was measured of this machine or network."""
    if bound["seconds"] is None:
        reasons = {
            "small": f"below {_size(_LEAST_COMPARED)} the bytes take little of the time",
            "none": "there are several hosts, and some ranks share one",
            "network": "a rate of the network is not known",
        }
        return f"No bound was measured: {reasons[bound['kind']]}."
    size, least = _size(bound["bytes"]), _duration(bound["seconds"])
    taken = f"{size} in {_duration(row['seconds'])}"
    if bound["kind"] == "copy":
        what = f"one copy of the array in memory, on all {count} peers at once, takes {least}"
    else:
        what = f"at the network's measured rates no plan takes less than {least}"
    if bound["part"] > 1:  # other programs disturbed one of the measurements
        return f"{taken} is faster than the measured bound, which was measured too low: {what}."
    return f"{taken} is {100 * bound['part']:.0f} % of the speed of the measured bound: {what}."
