"""All-reduce over the wide area of lab.py: pccl, Gloo, and Gloo with eight connections, against
what the links allow.

    python benchmarks/wan/run.py --preset europe long_fat --mb 16 64
    python benchmarks/wan/run.py --preset transatlantic --idle 5 --quantize int8 --json FILE --markdown FILE

The preset long_line has goals, printed after the table:

    python benchmarks/wan/run.py --preset long_line --no-gloo --mb 128
    python benchmarks/wan/run.py --preset long_line --no-gloo --mb 128 --quantize int8 --plain
    python benchmarks/wan/run.py --preset long_line --no-gloo --mb 32 --idle 60 --prepare

Needs root and Linux; Gloo also torch. All systems live in the same processes, one for each host,
and take turns. A call's time is from the first host's start to the last one's end. Every result is
checked, all elements.
"""

from __future__ import annotations

import argparse
import importlib.util
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab import DEVICE, PRESETS, Host, Lab, LabError, preset
from peers import Peer, ask
from report import (
    MIB,
    Table,
    by_block,
    factor,
    goal,
    machine,
    percent,
    ratio,
    size_name,
    warnings,
    write_results,
)

FOLDER = Path(__file__).resolve().parent
GLOO = {"gloo1": "Gloo", "gloo8": "8 Gloo"}
NAMES = {"pccl": "pccl", "prepared": "prepared", "plain": "plain", **GLOO}
GOAL_PRESET = "long_line"
BULK_BYTES, BULK_GOAL = 128 * MIB, 0.9  # of the bound, first calls included
INT8_GOAL = 3.5  # times the speed of float32, for as many bytes
RESTED_BYTES, RESTED_GOAL = 32 * MIB, 0.75  # of the bound, each call after silence
LATE_MS = 5.0  # packets that are later than that make a measurement worthless
START = 300.0  # seconds for joining
CALL = 900.0  # seconds for a call


def bound_seconds(hosts: Sequence[Host], size: int, line_mbit: float = 0) -> float:
    """The least time for an all-reduce of `size` bytes over links of these rates.

    Every host sends and receives the array at least once: size / slowest rate. And each element is
    sent n - 1 times in order to be combined and n - 1 times as a result: 2 (n - 1) size / sum of
    the rates, which with equal links is the well-known 2 (n - 1) / n * size / rate. Into a site
    with one line come at least the sums of the others, an array. Delays and headers, 3.5 % of all
    packets, are not counted.
    """
    rates = [min(host.up_mbit, host.down_mbit) * 1e6 / 8 for host in hosts]
    if min(rates) <= 0:
        return 0.0
    line = size / (line_mbit * 1e6 / 8) if line_mbit else 0.0
    return max(size / min(rates), 2 * (len(rates) - 1) * size / sum(rates), line)


@contextmanager
def peers_of(lab: Lab, systems: Sequence[str], args: argparse.Namespace) -> Iterator[list[Peer]]:
    """A process on each host, all of them joined in the order of the hosts; the master is on host
    0."""
    script = str(FOLDER / "peer.py")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        shared = {"PCCL_BIND": "", "PCCL_MIN_PEERS": str(len(lab.hosts))}
        if args.secret:
            shared["PCCL_SECRET"] = secrets.token_urlsafe(32)
        master = Peer(script, ["--master"], shared, lab.command(0))
        stack.callback(master.end)
        shared["PCCL_MASTER"] = f"{lab.address(0)}:{master.hear('listening')['port']}"
        options = ["--hosts", str(len(lab.hosts)), "--dtype", args.dtype, "--device", DEVICE]
        options += ["--store", f"{folder}/store", "--systems", *systems]
        if args.quantize:
            options += ["--quantize", args.quantize]
        peers = []
        for host in range(len(lab.hosts)):
            environment = shared | {"PCCL_LOCAL_RANK": str(host)}
            command = ["--host", str(host), *options]
            peers.append(Peer(script, command, environment, lab.command(host)))
            stack.callback(peers[-1].end)
        ranks = [peer.hear("joined", START)["rank"] for peer in peers]
        assert ranks == sorted(ranks), ranks
        yield peers
        for peer in peers:
            peer.tell("end")


def call(peers: Sequence[Peer], system: str, idle: float) -> float:
    """Seconds of one all-reduce, or SystemExit if it is wrong anywhere."""
    begin(peers, system, idle)
    return end(peers, system)[0]


def begin(peers: Sequence[Peer], system: str, idle: float) -> None:
    """Begins an all-reduce, after so many seconds of silence."""
    ask(peers, "ready", "ready")
    if system == "prepared":
        for peer in peers:
            peer.tell("prepare", seconds=idle)
    time.sleep(idle)
    for peer in peers:
        peer.tell("go", system=system)


def end(peers: Sequence[Peer], system: str) -> tuple[float, list[dict[str, Any]]]:
    """The seconds of what was begun, and each host's answer; SystemExit if it is wrong anywhere."""
    answers = [peer.hear("done", CALL) for peer in peers]
    if not all(answer["right"] for answer in answers):
        raise SystemExit(f"{system}: a wrong result on one of the hosts")
    if len({answer["crc"] for answer in answers}) != 1:
        raise SystemExit(f"{system}: results that differ between hosts")
    seconds = max(one["end"] for one in answers) - min(one["begin"] for one in answers)
    return float(seconds), answers


def measure(
    lab: Lab, peers: Sequence[Peer], size: int, systems: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    """One row: seconds of every call of each system, in turn."""
    ask(peers, "size", "sized", bytes=size)
    warm = {system: call(peers, system, 0) for system in systems}
    joined = [call(peers, "pccl", args.idle) for _ in range(3 if args.optimize else 0)]
    optimized = ask(peers, "optimize", "optimized")[0] if args.optimize else {}
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    lab.clear()
    for repeat in range(args.repeats):
        first = repeat % len(systems)
        for system in [*systems[first:], *systems[:first]]:
            seconds[system].append(call(peers, system, args.idle))
    stats = lab.stats()
    return {
        "preset": lab.name,
        "hosts": len(lab.hosts),
        "rates": args.rates,
        "bytes": size,
        "dtype": args.dtype,
        "quantize": args.quantize,
        "secret": args.secret,
        "idle": args.idle,
        "bound": bound_seconds(lab.hosts, size, lab.line_mbit),
        "first": warm,
        "as_joined": joined,
        "optimize": optimized,
        "seconds": seconds,
        "relay_cpu": stats.cpu_seconds / stats.seconds,
        "late_ms": stats.late_ms,
        "segments": {
            name: stats.total(name)
            for name in ("delivered", "lost", "up_full", "line_full", "down_full", "no_room")
        },
    }


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Prints those of this row; most rows have none."""
    if (result["preset"], result["rates"], result["secret"]) != (GOAL_PRESET, 1, False):
        return []
    bound, seconds, quantize = result["bound"], result["seconds"], result["quantize"]
    of = f"all-reduce of {size_name(result['bytes'])}, {result['preset']}"
    found = []
    if result["idle"] and result["bytes"] == RESTED_BYTES and quantize is None:
        for system in [name for name in ("pccl", "prepared") if name in seconds]:
            shares = [bound / one for one in seconds[system]]
            name = f"{of}, {NAMES[system]}, after {result['idle']:g} s of silence: "
            name += "speed, of the bound's"
            share = bound / statistics.median(seconds[system])
            found.append(goal(name, share, shares, percent, at_least=RESTED_GOAL))
    elif not result["idle"] and result["bytes"] == BULK_BYTES:
        calls = {system: [result["first"][system], *seconds[system]] for system in seconds}
        own = calls["pccl"]
        if quantize is None:
            share = bound * len(own) / sum(own)
            name = f"{of}, first call included: speed of all calls together, of the bound's"
            shares = [bound / one for one in own]
            found.append(goal(name, share, shares, percent, at_least=BULK_GOAL))
        elif quantize == "int8" and "plain" in calls:
            parts = by_block(calls["plain"], own)
            name = f"{of}, int8, first call included: speed of all calls together, of "
            name += f"{result['dtype']}'s"
            times = sum(calls["plain"]) / sum(own)
            found.append(goal(name, times, parts, factor, at_least=INT8_GOAL))
    return found


def columns(systems: Sequence[str], optimize: bool) -> list[str]:
    names = [NAMES[system] for system in systems]
    timed = [cell for name in names for cell in (f"{name} s", "of bound")]
    return [
        "hosts",
        "array",
        "bound s",
        *timed,
        *(f"{name} / pccl" for name in names[1:]),
        "relay CPU",
        *(["as joined", "optimize"] if optimize else []),
    ]


def cells(result: dict[str, Any], systems: Sequence[str]) -> list[str]:
    medians = {system: statistics.median(result["seconds"][system]) for system in systems}
    timed = []
    for seconds in medians.values():
        timed += [f"{seconds:.2f}", f"{result['bound'] / seconds:.0%}"]
    ratios = [ratio(medians[system] / medians["pccl"]) for system in systems[1:]]
    late = result["late_ms"]["p99"] > LATE_MS or result["segments"]["no_room"] > 0
    return [
        f"{result['preset']} ({result['hosts']})",
        size_name(result["bytes"]),
        f"{result['bound']:.2f}",
        *timed,
        *ratios,
        f"{result['relay_cpu']:.0%}{' late' if late else ''}",
        *([f"{statistics.median(result['as_joined']):.2f} s"] if result["as_joined"] else []),
        *([f"{new['seconds']:.2f} s: {new['kind']}"] if (new := result["optimize"]) else []),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--mb", type=float, nargs="+", default=[16, 64], help="MiB of the array")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--idle", type=float, default=0, help="seconds before each timed call")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--quantize", choices=["int8", "int4", "float8"], help="pccl's; Gloo has none"
    )
    parser.add_argument(
        "--optimize", action="store_true", help="pccl measures the links before it is timed"
    )
    parser.add_argument("--secret", action="store_true", help="pccl with TLS; Gloo has none")
    parser.add_argument("--rates", type=float, default=1.0, help="multiplies all links' rates")
    parser.add_argument(
        "--systems", nargs="+", choices=list(GLOO), default=list(GLOO), help="beside pccl"
    )
    parser.add_argument("--prepare", action="store_true", help="calls after pccl.prepare, too")
    parser.add_argument("--plain", action="store_true", help="calls without --quantize, too")
    parser.add_argument("--no-gloo", action="store_true", help="pccl alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    systems = ["pccl", *(["prepared"] if args.prepare else [])]
    systems += ["plain"] if args.plain else []
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: without Gloo")
    elif not args.no_gloo:
        systems += args.systems
    about = machine()
    for warning in warnings(about, 0):
        print(f"note: {warning}")
    title = f"All-reduce of {args.dtype} over the wide area"
    title += f", pccl with quantize={args.quantize!r}" if args.quantize else ""
    title += ", pccl encrypted" if args.secret else ""
    title += f", after {args.idle:g} s of silence" if args.idle else ""
    title += f", rates times {args.rates:g}" if args.rates != 1 else ""
    table = Table(title, columns(systems, args.optimize))
    results = []
    for name in args.preset:
        with preset(name, args.rates) as lab, peers_of(lab, systems, args) as peers:
            for mb in args.mb:
                result = measure(lab, peers, int(mb * MIB) // 8 * 8, systems, args)
                table.add(cells(result, systems))
                results.append(result)
                # After every row: some take minutes.
                write_results(args.json, about, results=results)
                if args.markdown:
                    args.markdown.write_text(table.markdown())
    print()
    reached = [one for result in results for one in goals(result)]
    write_results(args.json, about, results=results, goals=reached)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        raise SystemExit(f"no wide area here: {error}") from None
