"""Churn with real processes: peers join, leave, are killed and frozen, and never disagree.

    python tests/stress.py --minutes 3 --max-peers 8 --interval 0.2-1.0 [--seed N] [--json FILE]

A master and peers are processes on loopback. Each peer is a training loop. A step is a
`pccl.sync` of its state, then many tagged `pccl.allreduce_async` of arrays of all sizes and dtypes.
They are waited for in any order and checked against the contributors they name. The state changes
by their results.

There is one event per interval. A newcomer starts. A peer is killed at any moment of its life.
One is stopped, for a moment or until the others have evicted it, and then wakes or is killed. One
leaves. Strangers connect to master and peers and send noise. Two peers always live.

With `--masters 3` the run has three masters. Every `--master-interval` seconds the one that serves
the peers is killed, and started again without memory. Then more than half of the members always
live, since a membership needs a majority of the one before it.

Each step every peer tells this process, over a pipe, the SHA-256 of its state before and after the
sync. All that report the same revision must report the same hash, epoch and members. A member that
was in the sync before must find its own state unchanged. Steps and revisions only count up. A peer
that is evicted must have been frozen, and joins again in the same process. At the end all that are
frozen wake, all must get in step once more, and all stop at the same step. The exit code is 1, with
the state of every process, if any of this fails or no step completes for a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import random
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from programs.stress import be_peer
from workers import LISTENING, Masters, Run, Worker, masters, running, sockets

from pccl.tools.status import ask_any

# A failure is detected in two seconds instead of six, in about the ratio of the defaults.
SETTINGS = {
    "PCCL_BIND": "127.0.0.1",
    "PCCL_HEARTBEAT_INTERVAL": "0.3",
    "PCCL_HEARTBEAT_TIMEOUT": "2",
    "PCCL_LINK_TIMEOUT": "1",
    "PCCL_RECONNECT_TIMEOUT": "4",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
BLAME_SECONDS = 15.0  # after its waking: who is put out in that time was put out for its sleep
SHORT_FREEZE = (0.02, 1.0)  # seconds: most of them wake in time
LEAST_LIVE = 2  # peers that are in step and neither frozen nor about to go
END_SECONDS = 60.0  # to get everybody in step, and again to end
KEPT_STRANGERS = 48


class Process(Worker):
    """A peer's process, as the parent knows it."""

    def __init__(
        self, number: int, seed: int, inbox: queue.Queue[Any], env: dict[str, str]
    ) -> None:
        self.number = number
        self.inbox = inbox
        self.peer = ""  # id in its present life
        self.live = False  # in step, as far as we know
        self.frozen = False
        self.resume_at: float | None = None  # None while frozen: when it was put out
        self.woken_at = -math.inf
        self.out = False  # and not yet in again
        self.told = ""  # leave, stop, kill
        self.revision = -1
        self.last: dict[str, Any] = {}
        whole = "PCCL_MIN_PEERS" in env or seed % 2 == 0
        super().__init__(partial(be_peer, seed, whole), **env)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.inbox.put((self, json.loads(line)))
        self.inbox.put((self, None))

    def __str__(self) -> str:
        frozen = ", frozen" if self.frozen else ""
        return f"peer {self.number} (pid {self.pid}, {self.peer[:8] or 'no id'}{frozen})"

    def listening_ports(self) -> list[int]:
        """Where it accepts connections."""
        try:
            return sockets(self.pid, LISTENING)
        except OSError:
            return []  # it is gone


class ViolationError(Exception):
    """The run did something that it must not do. It ends there."""


@dataclass
class Report:
    """The events of a run."""

    seed: int
    seconds: float = 0.0
    steps: int = 0
    syncs: int = 0
    joins: int = 0
    rejoins: int = 0
    kills: int = 0
    leaves: int = 0
    freezes: int = 0
    evictions: int = 0
    garbage: int = 0
    masters_killed: int = 0
    recoveries: int = 0  # steps in which operations were run again
    reruns: int = 0  # such operations
    results_checked: int = 0
    most_members: int = 0
    longest_pause: float = 0.0
    median_step: float = 0.0
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"stress: seed {self.seed}, {self.seconds:.0f} s: {self.steps} steps, {self.syncs} syncs, "
            f"{self.results_checked} results checked; up to {self.most_members} members; {self.joins} joins, "
            f"{self.kills} kills, {self.freezes} freezes, {self.leaves} leaves, {self.garbage} garbage connections, "
            f"{self.masters_killed} masters killed; "
            f"{self.evictions} evictions, {self.rejoins} rejoined; {self.reruns} operations run again in "
            f"{self.recoveries} steps; median step {self.median_step * 1e3:.0f} ms, longest pause "
            f"{self.longest_pause:.2f} s: {'FAILED' if self.violations else 'all agreed'}"
        )


class Stress:
    """One run. Everything happens in the thread that calls `run`."""

    def __init__(self, options: argparse.Namespace, cluster: Run | Masters) -> None:
        self.options = options
        self.cluster = cluster
        self.rng = random.Random(options.seed)
        self.report = Report(options.seed)
        self.inbox: queue.Queue[tuple[Process, dict[str, Any] | None]] = queue.Queue()
        self.processes: list[Process] = []
        self.strangers: list[socket.socket] = []
        self.agreed: dict[int, tuple[Any, ...]] = {}  # revision -> what all must report
        self.first_at: dict[int, float] = {}  # revision -> when the first reported it
        self.reruns: Counter[int] = Counter()  # step -> most that a member reported
        self.progress_at = time.monotonic()
        self.newest = -1  # revision
        self.members: tuple[str, ...] = ()
        self.ending = False
        self.done: dict[str, int] = {}  # digest -> peers that ended with it
        several = isinstance(cluster, Masters)
        self.next_master_kill = time.monotonic() + options.master_interval if several else math.inf
        self.killed_master: int | None = None  # to be started again

    # The run.

    def run(self) -> Report:
        """Raises ViolationError at the first thing that is wrong."""
        began = time.monotonic()
        try:
            for _ in range(LEAST_LIVE):
                self.start(founder=True)
            self.churn(began + 60 * self.options.minutes)
            self.end()
        except ViolationError as error:
            self.report.violations.append(str(error))
            print(f"VIOLATION: {error}", file=sys.stderr, flush=True)
            self.dump()
            if self.options.hold:
                print("held; Ctrl-C ends it", file=sys.stderr, flush=True)
                signal.pause()
        finally:
            for stranger in self.strangers:
                stranger.close()
        self.report.seconds = time.monotonic() - began
        self.report.syncs = len(self.agreed)
        self.report.recoveries = sum(count > 0 for count in self.reruns.values())
        self.report.reruns = sum(self.reruns.values())
        times = [self.first_at[revision] for revision in sorted(self.first_at)]
        pauses = [after - before for before, after in zip(times, times[1:], strict=False)]
        self.report.longest_pause = max(pauses, default=0.0)
        self.report.median_step = float(np.median(pauses)) if pauses else 0.0
        return self.report

    def churn(self, end: float) -> None:
        """One event per interval."""
        next_event = said = time.monotonic()
        while (now := time.monotonic()) < end:
            wakes = [p.resume_at for p in self.processes if p.resume_at is not None]
            self.take(min([next_event, end, self.next_master_kill, *wakes]))
            if isinstance(self.cluster, Masters) and time.monotonic() >= self.next_master_kill:
                self.disturb_masters(self.cluster)
            for process in [p for p in self.processes if p.resume_at is not None]:
                if process.resume_at is not None and process.resume_at <= time.monotonic():
                    self.wake(process)
            if now >= next_event:
                if len(self.live()) >= LEAST_LIVE:  # the founders first
                    self.event()
                next_event = now + self.rng.uniform(*self.options.interval)
            if now >= said + 10 and not self.options.quiet:
                said = now
                print(
                    f"{self.options.minutes * 60 - (end - now):.0f} s: {self.report.steps} steps, "
                    f"{len(self.live())} of {len(self.processes)} peers live",
                    flush=True,
                )

    def end(self) -> None:
        """Wakes everybody, waits until all are in step, and stops them at one step."""
        if isinstance(self.cluster, Masters) and self.killed_master is not None:
            self.cluster.restart(self.killed_master)
        for process in self.processes:
            if process.frozen:
                self.wake(process)
        limit = time.monotonic() + END_SECONDS
        since = self.newest
        while not all(p.live and p.revision > since for p in self.processes):
            if time.monotonic() > limit:
                late = [str(p) for p in self.processes if not (p.live and p.revision > since)]
                raise ViolationError(
                    f"not in step a minute after the last event: {', '.join(late)}"
                )
            self.take(time.monotonic() + 1)
        self.ending = True
        for process in self.processes:
            process.told = "stop"
            with suppress(BrokenPipeError):
                process.tell("stop")
        limit = time.monotonic() + END_SECONDS
        while self.processes:
            if time.monotonic() > limit:
                raise ViolationError(f"did not end: {', '.join(map(str, self.processes))}")
            self.take(time.monotonic() + 1)
        if len(self.done) != 1:
            raise ViolationError(f"ended with different states: {self.done}")

    # Lines that peers say.

    def take(self, until: float) -> None:
        """Handles what peers say until then, and at least what they have said."""
        while True:
            try:
                process, line = self.inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if line is None:
                self.on_end(process)
            else:
                self.on_line(process, line)
        if not self.ending and time.monotonic() - self.progress_at > self.options.watchdog:
            raise ViolationError(f"no step completed for {self.options.watchdog:.0f} s")

    def on_line(self, process: Process, line: dict[str, Any]) -> None:
        process.last = line
        if line["event"] == "in":
            process.peer = line["peer"]
            self.report.rejoins += process.out
            process.out = False
        elif line["event"] == "sync":
            self.on_sync(process, line)
        elif line["event"] == "out":
            if not process.frozen and line["at"] > process.woken_at + BLAME_SECONDS:
                raise ViolationError(
                    f"{process} was put out though nobody froze it: {line['text']}"
                )
            self.report.evictions += 1
            process.live, process.out = False, True
        elif line["event"] == "done":
            if line["why"] == "stop":
                self.done[line["digest"]] = self.done.get(line["digest"], 0) + 1
            elif line["why"] != "leave":
                raise ViolationError(f"{process} ended by itself")

    def on_sync(self, process: Process, line: dict[str, Any]) -> None:
        revision = line["revision"]
        told = (line["digest"], line["epoch"], line["step"], tuple(line["peers"]), line["diverged"])
        known = self.agreed.setdefault(revision, told)
        if told != known:
            sentence = f"revision {revision} is {told} on {process}, {known} on others"
            raise ViolationError(sentence)
        if line["diverged"]:
            raise ViolationError(f"revision {revision}: {line['diverged']} had diverged")
        if process.peer not in line["peers"]:
            raise ViolationError(f"{process} is no member of its own sync: {line}")
        if line["standing"]:
            if line["received"] or line["rx"] or line["before"] != line["digest"]:
                raise ViolationError(f"sync changed the state of {process}, a member: {line}")
            if revision <= process.revision:
                raise ViolationError(f"revision {revision} after {process.revision} on {process}")
        before = self.agreed.get(revision - 1)
        if before is not None and line["step"] != before[2] + 1:
            raise ViolationError(
                f"revision {revision} is of step {line['step']}, after {before[2]}"
            )
        process.revision = revision
        process.live = not process.frozen and line["at"] > process.woken_at and process.told == ""
        self.report.results_checked += line["checked"]
        self.reruns[line["step"]] = max(self.reruns[line["step"]], line["reruns"])
        first = self.first_at.get(revision)
        self.first_at[revision] = line["at"] if first is None else min(first, line["at"])
        if revision > self.newest:
            self.newest, self.progress_at = revision, time.monotonic()
            self.members = tuple(line["peers"])
            self.report.steps = max(self.report.steps, line["step"])
            self.report.most_members = max(self.report.most_members, len(self.members))
            for other in self.processes:
                self.plan_wake(other)

    def plan_wake(self, process: Process) -> None:
        """Someone who is frozen until the others have put it out: have they?"""
        if process.frozen and process.resume_at is None and process.peer not in self.members:
            process.resume_at = time.monotonic() + self.rng.uniform(0, 3)

    def on_end(self, process: Process) -> None:
        code = process.ends()
        if process.told != "kill" and (code != 0 or process.told == ""):
            raise ViolationError(f"{process} ended with {code}:\n{process.stderr()[-4000:]}")
        self.forget(process)

    def forget(self, process: Process) -> None:
        self.processes.remove(process)
        self.cluster.workers.remove(process)
        process.destroy()

    # Events.

    def live(self) -> list[Process]:
        """The processes that are in step."""
        return [process for process in self.processes if process.live]

    def event(self) -> None:
        """Something happens; what is impossible now becomes a newcomer, or garbage."""
        what = self.rng.choices(
            ["join", "kill", "kill two", "freeze", "freeze long", "leave", "garbage"],
            [9, 4, 1, 2, 1, 1, 3],
        )[0]
        happened = {
            "join": self.start,
            "kill": self.kill,
            "kill two": lambda: self.kill() and self.kill(),
            "freeze": self.freeze,
            "freeze long": lambda: self.freeze(long=True),
            "leave": self.leave,
            "garbage": self.garbage,
        }[what]()
        if not happened and not self.start():
            self.garbage()

    def disturb_masters(self, cluster: Masters) -> None:
        """Kills the master that serves the peers, or starts the one that was killed before."""
        self.next_master_kill = time.monotonic() + self.options.master_interval / 2
        if self.killed_master is not None:
            cluster.restart(self.killed_master)
            self.killed_master = None
            return
        serving, status = ask_any(cluster.address)
        if not any(group["members"] for group in status["groups"]):
            return  # one of them is taking over
        self.killed_master = cluster.addresses.index(serving)
        cluster.kill(self.killed_master)
        self.report.masters_killed += 1

    def victim(self) -> Process | None:
        """Anybody who may be lost, in whatever state."""
        live = self.live()
        spare = len(live) > LEAST_LIVE
        if isinstance(self.cluster, Masters):
            left = sum(process.peer in self.members for process in live) - 1
            spare = spare and left > len(self.members) / 2
        able = [p for p in self.processes if p.told == "" and (spare or not p.live)]
        return self.rng.choice(able) if able else None

    def start(self, founder: bool = False) -> bool:
        if len(self.processes) >= self.options.max_peers:
            return False
        env = {**SETTINGS, "PCCL_MASTER": self.cluster.address}
        if founder:
            env["PCCL_MIN_PEERS"] = str(LEAST_LIVE)
        self.report.joins += 1
        seed = self.rng.randrange(1 << 30)
        process = Process(self.report.joins, seed, self.inbox, env)
        self.processes.append(process)
        self.cluster.workers.append(process)
        return True

    def kill(self) -> bool:
        process = self.victim()
        if process is None:
            return False
        process.told, process.live, process.resume_at = "kill", False, None
        process.signal(signal.SIGKILL)
        self.report.kills += 1
        return True

    def freeze(self, long: bool = False) -> bool:
        process = self.victim()
        if process is None or process.frozen:
            return False
        process.frozen, process.live = True, False
        process.signal(signal.SIGSTOP)
        self.report.freezes += 1
        if not long:
            process.resume_at = time.monotonic() + self.rng.uniform(*SHORT_FREEZE)
        elif process.peer not in self.members:
            process.resume_at = time.monotonic() + self.rng.uniform(1, 5)
        return True

    def wake(self, process: Process) -> None:
        process.frozen, process.resume_at = False, None
        process.woken_at = time.monotonic()
        process.signal(signal.SIGCONT)

    def leave(self) -> bool:
        process = self.victim()
        if process is None or not process.live:
            return False
        process.told, process.live = "leave", False
        with suppress(BrokenPipeError):  # it has ended: on_end finds out why
            process.tell("leave")
        self.report.leaves += 1
        return True

    def garbage(self) -> bool:
        """Strangers at one master's door and at one peer's; some stay for a while."""
        host, _, port = self.rng.choice(self.cluster.address.split(",")).rpartition(":")
        doors = [(host, int(port))]
        if self.processes:
            doors += [(host, p) for p in self.rng.choice(self.processes).listening_ports()]
        for door in doors:
            for _ in range(self.rng.randrange(1, 6)):
                self.stranger(door)
        while len(self.strangers) > KEPT_STRANGERS:
            self.strangers.pop(0).close()
        return True

    def stranger(self, door: tuple[str, int]) -> None:
        rng = self.rng
        noise = rng.choice(
            [
                b"",
                b"\x00" * rng.randrange(1, 100),
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"PCCL",
                b"PCCL\x05\x00\x00\x00\xff\xff\xff\xff" + b"\x00" * 20,
                b"PCCL" + rng.randbytes(rng.randrange(200)),
                b"PCF1" + rng.randbytes(rng.randrange(200)),
                b"PCF1" + bytes([rng.randrange(16)]) + b"\x00" * 80,
                rng.randbytes(rng.randrange(20_000)),
            ]
        )
        stranger = socket.socket()
        stranger.settimeout(0.5)
        try:
            stranger.connect(door)
            self.report.garbage += 1
            stranger.sendall(noise)
        except OSError:
            pass  # it is gone, or threw us out
        if rng.random() < 0.3:
            self.strangers.append(stranger)
        else:
            stranger.close()

    # When something is wrong.

    def dump(self) -> None:
        """Says what everybody was doing."""
        for process in self.processes:
            if not process.frozen:
                process.signal(signal.SIGUSR1)
        time.sleep(1)  # faulthandler has no way to say that it has written
        for process in self.processes:
            threads = []
            for task in Path(f"/proc/{process.pid}/task").glob("*"):
                try:
                    threads.append(
                        f"{(task / 'comm').read_text().strip()}:{(task / 'wchan').read_text()}"
                    )
                except OSError:
                    pass  # it has ended meanwhile
            print(
                f"---- {process}, told {process.told!r}, live {process.live}, last said {process.last}\n"
                f"threads {' '.join(threads)}\n{process.stderr()[-6000:]}",
                file=sys.stderr,
            )
        run = self.cluster
        for master in run.masters if isinstance(run, Masters) else [run.master]:
            print(f"---- master (pid {master.pid})\n{master.stderr()[-6000:]}", file=sys.stderr)
        sys.stderr.flush()


def stress(options: argparse.Namespace) -> Report:
    """Runs it."""
    run = running(**SETTINGS) if options.masters == 1 else masters(options.masters, **SETTINGS)
    with run as cluster:
        return Stress(options, cluster).run()


def interval(text: str) -> tuple[float, float]:
    """ "0.2-1.0", or one number."""
    low, _, high = text.partition("-")
    bounds = float(low), float(high or low)
    if not 0 < bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text}: seconds, low-high")
    return bounds


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="default: %(default)s")
    parser.add_argument("--max-peers", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--interval", type=interval, default=(0.2, 1.0), help="seconds between events (0.2-1.0)"
    )
    parser.add_argument("--masters", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--master-interval",
        type=float,
        default=5.0,
        help="with several masters: seconds from one loss of a master to the next (%(default)s)",
    )
    parser.add_argument("--seed", type=int, help="of the events; default: a new one, printed")
    parser.add_argument(
        "--watchdog", type=float, default=60.0, help="seconds without a step (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--quiet", action="store_true", help="only the report")
    parser.add_argument(
        "--hold", action="store_true", help="after a failure keep all processes for a debugger"
    )
    options = parser.parse_args(arguments)
    if options.max_peers < LEAST_LIVE + 1:
        parser.error(f"--max-peers is at least {LEAST_LIVE + 1}")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 32)
    return options


def main() -> int:
    options = parse()
    if not options.quiet:
        print(f"stress: seed {options.seed}", flush=True)
    report = stress(options)
    print(report, flush=True)
    if options.json:
        options.json.write_text(json.dumps(vars(report), indent=1) + "\n")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
