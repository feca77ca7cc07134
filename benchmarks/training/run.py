"""examples/byte_gpt.py with several methods: loss, bytes sent, and how much of the communication is
hidden.

    python benchmarks/training/run.py --plot FILE --json FILE            # one method of each kind, three seeds
    python benchmarks/training/run.py --methods ddp async --wan 50 100   # links of 50 ms, 100 Mbit/s; needs root
    python benchmarks/training/run.py --methods ddp diloco --churn 60    # a kill and a join every 60 s
    python benchmarks/training/run.py --methods ddp "diloco int8" --sync-every 100 --seeds 0
    python benchmarks/training/run.py --methods diloco uneven "uneven steps" --seeds 0
    python benchmarks/training/run.py --peers 8 --methods diloco hostile "hostile clip" --seeds 0
    python benchmarks/training/run.py --width 324 --layers 8 --heads 6 --context 256 --batch-size 8 \\
        --device cuda --tokens 16384000 --methods ddp "diloco int8"      # 10.2 million parameters
    python benchmarks/training/run.py --rejoin                           # 100 million parameters come back

Every run is a master and its peers, as processes, over TCP. All start with the parameters that one
process has made of `--pretrain` tokens, as in the paper (arXiv 2311.08105: 24,000 of 88,000 steps),
and see the same tokens with the same seeds; `--pretrain 0` starts from nothing. `bits per byte` are
of the held-out text, mean and half the range over the seeds; `to ddp` is that of the seeds' ratios
to ddp with the same seed. `MB sent` are those of reductions, of all members that came to the end;
`on the wire` is all that the hosts' interfaces sent meanwhile, headers included. `hidden` is the
share of the reductions' time that passed behind inner steps, without the last one, and with it.
`waited` are the seconds that the median member waited for reductions, also for other members to
enter them, and `seconds` are those of the longest run. `local` is one process without pccl that
takes the batches of all members; `bigrams` predicts each byte from the one before, counted in all
of the training text. At the end of every run all members must hold the same parameters, bit for
bit.

In "uneven" members' inner steps take 0.2 s, 0.2 s, 0.4 s and 0.8 s (`--step-seconds` is the
fastest ones', which has to be longer than they need), and rounds end by their time, in "uneven
async" and "uneven streaming", too; in "uneven steps" they end when all have made the same number of
steps. In "stall" the last member sleeps for `--stall` seconds after a quarter and after half of the
tokens, and in "stall quorum" the others give it five seconds. In "hostile" the progress of one
member is multiplied by `--factor`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "wan"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from report import announce, goal, in_seconds, percent, write_results
from wide import start_master

import pccl

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "byte_gpt.py"
METHODS = {
    "local": ["--method", "local"],
    "ddp": ["--method", "ddp"],
    "diloco": [],
    "diloco int8": ["--quantize", "int8"],
    "diloco int4": ["--quantize", "int4"],
    # For runs from nothing: --pretrain 0 --lr 2e-3.
    "diloco warm-up": ["--warm-up", "14"],
    "int8 warm-up": ["--warm-up", "14", "--quantize", "int8"],
    "async warm-up": ["--warm-up", "14", "--mode", "async"],
    "streaming warm-up": ["--warm-up", "14", "--mode", "streaming"],
    "async": ["--mode", "async"],
    "async int8": ["--mode", "async", "--quantize", "int8"],
    "streaming": ["--mode", "streaming"],
    # The default of 1.0 is for more rounds than the 40 that runs have here.
    "sparse": ["--density", "0.03125", "--outer-lr", "3"],
    "ddp muon": ["--method", "ddp", "--inner", "muon"],
    "muloco": ["--inner", "muon"],
    # Machines of different speed: rounds end by their time, and after H steps of each.
    "uneven": [],
    "uneven async": ["--mode", "async"],
    "uneven streaming": ["--mode", "streaming"],
    "uneven steps": [],
    # The last member stalls twice.
    "stall": ["--mode", "async"],
    # A member that evaluates alone takes more than the default grace of two seconds.
    "stall quorum": ["--mode", "async", "--quorum", "0.75", "--grace-seconds", "5"],
    # The last member's progress is multiplied by --factor.
    "hostile": [],
    "hostile clip": ["--robust", "clip"],
    "hostile trimmed": ["--robust", "trimmed"],
    "hostile clip against": ["--robust", "clip", "--against", "0.1"],
    "hostile trimmed against": ["--robust", "trimmed", "--against", "0.1"],
    "hostile sparse clip": ["--robust", "clip", "--density", "0.03125", "--outer-lr", "3"],
}
# One of each kind. The others are variants of these, or are for comparing with them.
USUAL = [
    *("local", "ddp", "diloco", "diloco int8", "diloco int4", "async", "streaming", "sparse"),
    *("muloco", "uneven", "stall quorum", "hostile clip"),
]
SPEEDS = (1.0, 1.0, 0.5, 0.25)  # of the members in "uneven"; others have SPEEDS[0]
MODEL = {"width": 128, "layers": 5, "heads": 4, "context": 128}  # as the example's defaults
QUICK = {"width": 32, "layers": 1, "heads": 4, "context": 32}
LAST_JOIN = 0.8  # of the tokens: who comes later might find that the run has ended
GRACE = 120.0  # seconds between the first member's end and the last one's
KEPT = 20  # lines of a failed process that are shown


class Process:
    """One member, or none yet; what it prints goes to the run."""

    def __init__(self, run: Run, command: Sequence[str], env: dict[str, str]) -> None:
        self.begun = self.killed = False
        # Checksum of its parameters, bytes it sent, seconds it waited.
        self.end: tuple[str, int, float] | None = None
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, args=(run.events,), daemon=True).start()

    def _read(self, events: queue.Queue[tuple[Process, str | None]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            events.put((self, line))
        events.put((self, None))

    def stop(self) -> None:
        self.killed = True
        self.process.kill()
        self.process.wait()


@dataclass
class Run:
    """One training run from its first process to its last."""

    arguments: list[str]
    tokens: int
    peers: int
    churn: float  # seconds; 0: none
    churn_share: float  # of the tokens, instead of seconds; 0: none
    command: Callable[[int], list[str]]  # what starts a program on that host
    env: dict[str, str]
    own: Sequence[list[str]] = ()  # arguments of each host's own
    curve: list[dict[str, Any]] = field(default_factory=list)
    kills: int = 0
    joins: int = 0
    stalls: int = 0
    processes: list[Process] = field(default_factory=list)
    events: queue.Queue[tuple[Process, str | None]] = field(default_factory=queue.Queue)

    def go(self) -> dict[str, Any]:
        """Runs it, and checks that all members end with the same parameters."""
        began = time.monotonic()
        try:
            for number in range(self.peers):
                self._start(number, self.peers)
            self._watch()
        finally:
            for process in self.processes:
                if process.process.poll() is None:
                    process.stop()
        ends = [process.end for process in self.processes if process.end is not None]
        if len({checksum for checksum, _, _ in ends}) != 1:
            raise SystemExit(f"members end with different parameters: {ends}")
        last = self.curve[-1]
        return {
            "bits": last["bits"],
            "bytes": sum(sent for _, sent, _ in ends),
            # Without the last reduction, which nothing is left to hide behind.
            "hidden": self.curve[max(0, len(self.curve) - 2)]["hidden"],
            "hidden_to_end": last["hidden"],
            "waited": statistics.median(waited for _, _, waited in ends),
            "seconds": time.monotonic() - began,
            "kills": self.kills,
            "joins": self.joins,
            "stalls": self.stalls,
            "members": len(ends),
            "tokens_per_second": tokens_per_second(self.curve),
            "curve": self.curve,
        }

    def _start(self, host: int, at_least: int) -> None:
        env = {**self.env, "PCCL_MIN_PEERS": str(at_least)}
        command = [*self.command(host), sys.executable, str(EXAMPLE), *self.arguments]
        command += self.own[host] if self.own else []
        self.processes.append(Process(self, command, env))

    def _watch(self) -> None:
        """Until all have ended."""
        next_churn = time.monotonic() + self.churn if self.churn else float("inf")
        deadline = float("inf")
        while any(
            p.process.poll() is None or not p.killed and p.end is None for p in self.processes
        ):
            now = time.monotonic()
            if now >= deadline:
                return self._late()
            if now >= next_churn:
                next_churn = now + self.churn
                self._churn()
                continue
            try:
                source, line = self.events.get(timeout=min(next_churn, deadline, now + 3600) - now)
            except queue.Empty:
                continue
            if line is None:
                source.process.wait()
                if not source.killed and source.end is None:
                    shown = "".join(source.lines)
                    raise SystemExit(f"a member failed:\n{shown}")
                continue
            self._hear(source, line)
            if source.end is not None and deadline == float("inf"):
                deadline, next_churn = time.monotonic() + GRACE, float("inf")
                for process in self.processes:  # there is nothing left for them to join
                    if not process.begun:
                        process.stop()

    def _hear(self, source: Process, line: str) -> None:
        source.lines = [*source.lines[-KEPT:], line]
        source.begun = source.begun or line.startswith("begins at")
        self.stalls += line.startswith("stalls for ")
        end = re.match(r"ends with parameters (\w+), sent (\d+) bytes, waited ([\d.]+) s", line)
        if end:
            source.end = end[1], int(end[2]), float(end[3])
        elif line.startswith("{"):
            self.curve.append(json.loads(line))
            if self.churn_share and self._done() >= self.churn_share * (1 + self.kills):
                self._churn()

    def _churn(self) -> None:
        """One of the members is killed, never the first one; another comes. Two go on, whose ends
        can be compared."""
        alive = [p for p in self.processes if p.begun and not p.killed]
        if self._done() > LAST_JOIN or len(alive) < 3:
            return
        alive[1 + self.kills % (len(alive) - 1)].stop()
        self.kills += 1
        self._start(self.joins % self.peers, 1)
        self.joins += 1

    def _done(self) -> float:
        return self.curve[-1]["tokens"] / self.tokens if self.curve else 0.0

    def _late(self) -> None:
        late = sum(p.begun and not p.killed and p.end is None for p in self.processes)
        raise SystemExit(f"{late} members did not end in {GRACE:.0f} s after the first")


def tokens_per_second(curve: Sequence[dict[str, Any]]) -> float:
    """The rate of all members together, from the first report to the last one."""
    first, last = curve[0], curve[-1]
    passed = last["seconds"] - first["seconds"]
    return float((last["tokens"] - first["tokens"]) / passed) if passed else 0.0


def possible(args: argparse.Namespace) -> float:
    """Tokens per second that members of `SPEEDS` could do if nobody waited for anybody."""
    return float(args.batch_size * args.context * sum(speeds_of(args)) / args.step_seconds)


def model_of(args: argparse.Namespace) -> list[str]:
    """The example's arguments for the model that is trained, and for where."""
    sizes = [word for name in MODEL for word in (f"--{name}", str(getattr(args, name)))]
    return [*sizes, "--device", args.device, *(["--test-examples", "16"] if args.quick else [])]


def speeds_of(args: argparse.Namespace) -> list[float]:
    """The members' speeds in "uneven"."""
    return [SPEEDS[host % len(SPEEDS)] for host in range(args.peers)]


def run_of(args: argparse.Namespace, method: str, seed: int, start: Path | None) -> dict[str, Any]:
    """One run of that method, with a master of its own."""
    arguments = [*METHODS[method], "--seed", str(seed), "--tokens", str(args.tokens)]
    arguments += ["--batch-size", str(args.batch_size), "--sync-every", str(args.sync_every)]
    arguments += ["--lr", str(args.lr)]
    arguments += ["--report-every", str(args.tokens // 20), *model_of(args)]
    arguments += ["--start", str(start)] if start else []
    own: list[list[str]] = []
    if method.startswith("uneven"):
        own = [["--step-seconds", str(args.step_seconds / speed)] for speed in speeds_of(args)]
    if method.startswith("hostile"):
        own = [[]] * (args.peers - 1) + [["--spoil", str(args.factor)]]
    if method.startswith("stall"):
        own = [[]] * (args.peers - 1) + [["--stall", str(args.stall)]]
    if method.startswith("uneven") and method != "uneven steps":
        arguments += ["--round-seconds", str(args.sync_every * args.step_seconds)]
    env = {**os.environ, "PCCL_SHM": "0", "OMP_NUM_THREADS": "1"}
    if method == "local":
        arguments += ["--batch-size", str(args.batch_size * args.peers)]
        return Run(arguments, args.tokens, 1, 0, 0, lambda _: [], env).go()
    with ExitStack() as stack:
        command: Callable[[int], list[str]] = lambda _: []  # noqa: E731
        hosts = 1
        if args.wan:
            from lab import Host, Lab

            delay, rate = args.wan
            lab = stack.enter_context(Lab([Host(rate, rate)] * args.peers, delay_ms=delay / 2))
            command, env["PCCL_BIND"], hosts = lab.command, "", args.peers
            env["PCCL_MASTER"] = start_master(lab, env)
        else:
            env["PCCL_BIND"] = "127.0.0.1"
            env["PCCL_MASTER"] = stack.enter_context(pccl.MasterNode("127.0.0.1:0")).address
        # A quick run may be over before the first seconds have passed.
        share = 0.25 if args.churn and args.quick else 0
        seconds = 0 if args.quick else args.churn
        run = Run(arguments, args.tokens, args.peers, seconds, share, command, env, own)
        before = sum(transmitted(command(host)) for host in range(hosts))
        result = run.go()
        if method.startswith("stall") and result["stalls"] != 2:
            raise SystemExit(f"the last member stalled {result['stalls']} times, not twice")
        result["wire"] = sum(transmitted(command(host)) for host in range(hosts)) - before
        return result


def transmitted(command: Sequence[str]) -> int:
    """Bytes that a host has sent so far: on the lab's links, or without a lab on the loopback
    interface."""
    table = subprocess.run(
        [*command, "cat", "/proc/net/dev"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    rows = dict(line.split(":") for line in table.splitlines()[2:])
    names = [name for name in rows if (name.strip() == "lo") != bool(command)]
    return sum(int(rows[name].split()[8]) for name in names)


def pretrained(args: argparse.Namespace, folder: str) -> Path | None:
    """Parameters that all runs start with, made by one process with a seed of its own; None: they
    start with none."""
    if not args.pretrain:
        return None
    result: Path = args.start or Path(folder) / "start.safetensors"
    if result.exists():
        print(f"all start with {result}", flush=True)
        return result
    arguments = ["--method", "local", "--seed", "1000", "--tokens", str(args.pretrain)]
    arguments += ["--batch-size", "16", "--threads", "2", "--result", str(result), *model_of(args)]
    run = Run(arguments, args.pretrain, 1, 0, 0, lambda _: [], dict(os.environ)).go()
    print(f"all start with {run['bits']:.3f} bits per byte, {run['seconds']:.0f} s", flush=True)
    return result


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("byte_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def bigram_bits(example: Any) -> float:
    """Bits per byte of the held-out text, each byte from the one before; counts begin at a
    quarter."""
    text, test = example.load_text()
    counts = np.full((256, 256), 0.25)
    np.add.at(counts, (text[:-1], text[1:]), 1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log2(shares[test[:-1], test[1:]]).mean())


HEADINGS = [
    *("method", "bits per byte", "", "to ddp", "MB sent", "ddp's to it"),
    *("MB on the wire", "ddp's to it", "hidden", "waited", "seconds", "kills, joins"),
]
HEAD = f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|"

# How far above ddp the loss may be, in percent.
GOALS = {"diloco": 2.0, "diloco warm-up": 5.0, "diloco int8": 2.5, "async": 4.0, "sparse": 3.0}
# How many times fewer bytes than ddp's.
FEWER_GOALS = {"diloco int8": 200, "sparse": 1500}
CHURN_GOAL = 3.0
HIDDEN_GOAL = 0.95  # share of async's reductions, with the last one
# "hostile": the loss above that of honest members, in percent, where one of so many spoils rounds.
HOSTILE_GOAL, HOSTILE_PEERS = 2.0, 8
# "uneven": the loss above that of even machines, in percent; the share of what each could do alone.
UNEVEN_GOAL, SHARE_GOAL = 3.0, 0.9
LONGEST = 720.0  # seconds


def table_row(method: str, runs: list[dict[str, Any]], ddp: list[dict[str, Any]]) -> str:
    bits = [run["bits"] for run in runs]
    sent = _mean_bytes(runs)
    wire = statistics.mean(run.get("wire", 0) for run in runs)  # nobody sends anything in "local"
    to_ddp = fewer = fewer_on_wire = ""
    if len(ddp) == len(runs):
        more = all_above(runs, ddp)
        to_ddp = f"{statistics.mean(more):+.1f} ± {(max(more) - min(more)) / 2:.1f} %"
        if sent:
            fewer = f"{_mean_bytes(ddp) / sent:.0f}"
            fewer_on_wire = f"{statistics.mean(run['wire'] for run in ddp) / wire:.0f}"
    cells = [
        method,
        f"{statistics.mean(bits):.3f}",
        f"± {(max(bits) - min(bits)) / 2:.3f}",
        to_ddp,
        f"{sent / 1e6:.1f}",
        fewer,
        f"{wire / 1e6:.1f}",
        fewer_on_wire,
        f"{hidden(runs, 'hidden')} % ({hidden(runs, 'hidden_to_end')})" if sent else "",
        f"{statistics.mean(run['waited'] for run in runs):.0f}",
        f"{max(run['seconds'] for run in runs):.0f}",
        f"{sum(run['kills'] for run in runs)}, {sum(run['joins'] for run in runs)}",
    ]
    return "| " + " | ".join(cells) + " |"


def _mean_bytes(runs: list[dict[str, Any]]) -> float:
    return statistics.mean(run["bytes"] for run in runs)


def hidden(runs: list[dict[str, Any]], key: str) -> str:
    return f"{100 * statistics.mean(run[key] for run in runs):.0f}"


def all_above(runs: list[dict[str, Any]], beside: list[dict[str, Any]]) -> list[float]:
    """By how many percent each loss is above the other with the same seed."""
    return [100 * (a["bits"] / b["bits"] - 1) for a, b in zip(runs, beside, strict=True)]


def goals(
    args: argparse.Namespace, found: dict[str, list[dict[str, Any]]], bigrams: float
) -> list[dict[str, Any]]:
    """Prints what the library sets itself, and whether this run shows it. Parts are the seeds."""
    made: list[dict[str, Any]] = []

    def check(
        name: str, parts: Sequence[float], show: Callable[[float], str], **limit: Any
    ) -> None:
        made.append(goal(name, statistics.mean(parts), parts, show, **limit))

    def loss(method: str, beside: str, limit: float) -> None:
        name = f"{method}: loss above that of {beside}"
        parts = all_above(found[method], found[beside])
        check(name, parts, "{:+.1f} %".format, at_most=limit)

    ddp = found.get("ddp", [])
    if ddp:
        below = [bigrams - run["bits"] for run in ddp]
        check("ddp: bits per byte below bigrams", below, "{:.2f}".format, at_least=0.5)
    for method, runs in found.items():
        limit = CHURN_GOAL if args.churn else GOALS.get(method)
        if ddp and method != "ddp" and limit is not None:
            loss(method, "ddp", limit)
        usual = args.sync_every == 50 and args.peers == 4 and not args.churn
        if ddp and method in FEWER_GOALS and usual:
            fewer = [_mean_bytes(ddp) / run["bytes"] for run in runs]
            name = f"{method}: fewer bytes than ddp's, times"
            check(name, fewer, "{:.0f}".format, at_least=FEWER_GOALS[method])
        if args.wan and method == "async":
            shares = [run["hidden_to_end"] for run in runs]
            name = "async: reductions hidden, with the last one"
            check(name, shares, percent, at_least=HIDDEN_GOAL)
        if method.startswith("uneven"):
            shares = [run["tokens_per_second"] / possible(args) for run in runs]
            name = f"{method}: tokens per second, of what its members could do alone"
            check(name, shares, percent, at_least=SHARE_GOAL)
            if found.get("diloco"):
                loss(method, "diloco", UNEVEN_GOAL)
        # One of fewer members has a larger part in each round.
        if method.startswith("hostile") and found.get("diloco") and args.peers == HOSTILE_PEERS:
            loss(method, "diloco", HOSTILE_GOAL)
    seconds = [run["seconds"] for runs in found.values() for run in runs]
    made.append(goal("the longest run", max(seconds), seconds, in_seconds, at_most=LONGEST))
    return made


def mean_curve(runs: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Loss by tokens, over the seeds: at those places that all of them have."""
    curves = [{line["tokens"]: line["bits"] for line in run["curve"]} for run in runs]
    places = sorted(set.intersection(*map(set, curves)))
    return [(place, statistics.mean(curve[place] for curve in curves)) for place in places]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All methods with all seeds. Seeds are the outer loop, so that what changes on the machine
    meets all methods."""
    example = load_example()
    bigrams = bigram_bits(example)
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in args.methods}
    with tempfile.TemporaryDirectory() as folder:
        start = pretrained(args, folder)
        for seed in args.seeds:
            for method in args.methods:
                run = run_of(args, method, seed, start)
                found[method].append(run)
                print(
                    f"seed {seed}, {method}: {run['bits']:.3f} bits per byte, {run['seconds']:.0f} s, "
                    f"{run['members']} members end with the same parameters",
                    flush=True,
                )
    print(f"bigrams: {bigrams:.3f} bits per byte")
    print(HEAD)
    for method, runs in found.items():
        print(table_row(method, runs, found.get("ddp", [])))
    reached = goals(args, found, bigrams)
    if args.plot:
        curves = {method: mean_curve(runs) for method, runs in found.items()}
        last = max(x for curve in curves.values() for x, _ in curve)
        curves["bigrams"] = [(0, bigrams), (last, bigrams)]
        example.write_plot(args.plot, curves, "tokens, all members", "held-out bits per byte")
    return {"bigrams": bigrams, "runs": found, "goals": reached}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = f"default: {', '.join(USUAL)}, which with three seeds take hours"
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=USUAL, help=words)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, help="over all members; default: 2048000")
    parser.add_argument("--pretrain", type=int, help="tokens before; 0: none; default: 2048000")
    words = "the parameters of --pretrain; made if it does not exist"
    parser.add_argument("--start", type=Path, metavar="FILE", help=words)
    parser.add_argument("--lr", type=float, default=1e-3, help="of the inner optimizer (0.001)")
    parser.add_argument("--peers", type=int, help="default: 4")
    parser.add_argument("--batch-size", type=int, default=2, help="rows of a member in a step (2)")
    for name, size in MODEL.items():
        parser.add_argument(f"--{name}", type=int, help=f"of the model; default: {size}")
    parser.add_argument("--device", default="cpu", help="of all members; default: cpu")
    parser.add_argument("--step-seconds", type=float, default=0.2, help='of "uneven" (0.2)')
    parser.add_argument("--sync-every", type=int, help="H; default: 50")
    parser.add_argument("--churn", type=float, default=0, help="seconds between a kill and a join")
    parser.add_argument("--wan", nargs=2, type=float, metavar=("RTT_MS", "MBIT"), help="needs root")
    parser.add_argument("--factor", type=float, default=-100.0, help='of "hostile" (-100)')
    parser.add_argument("--stall", type=float, default=20.0, help='of "stall" (20)')
    parser.add_argument("--rejoin", action="store_true", help="measure only that")
    parser.add_argument("--parameters", type=int, help="of --rejoin; default: 100 million")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens: a test")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--plot", type=Path, help="write the curves to this SVG file")
    args = parser.parse_args()
    args.tokens = args.tokens or (20_000 if args.quick else 2_048_000)  # 40 rounds
    if args.pretrain is None:
        args.pretrain = 0 if args.quick else 2_048_000
    for name, size in (QUICK if args.quick else MODEL).items():
        setattr(args, name, getattr(args, name) or size)
    args.peers = args.peers or (2 if args.quick else 4)
    args.sync_every = args.sync_every or (10 if args.quick else 50)
    if args.start and not args.pretrain:
        parser.error("--start needs --pretrain")
    if args.churn and args.peers < 3:
        parser.error("--churn needs three peers: one is killed, and two are compared")
    about = announce()
    if args.rejoin:
        import rejoin

        parameters = args.parameters or (1_000_000 if args.quick else 100_000_000)
        result = rejoin.measure(parameters, 2 if args.quick else 5)
        print(rejoin.words(result))
        result["goals"] = rejoin.goals(result)
    else:
        result = compare(args)
    write_results(args.json, about, **result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
