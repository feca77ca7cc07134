"""Runs the programs of benchmarks/compare/programs/, and kills ranks and coordinators.

Every step of a program says the least and the greatest element of its gradient. Shard s adds
2 ** s, so the mean shows which shards took part, and a wrong result is seen.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from environment import python
from processes import (
    HERE,
    PROGRAMS,
    START_SECONDS,
    WORLD,
    Failed,
    FirstPeer,
    Lighthouse,
    Master,
    Process,
    environment,
    free_port,
    mpirun,
)
from tables import shards

HANG_SECONDS = 60.0
GONE_SECONDS = 75.0  # longer than the libraries' own time-outs of a minute
OUTAGE_SECONDS = 3.0
SETTLE_SECONDS = 3.0  # after an outage, in which a pause may still come
VICTIM = WORLD - 1
STEPS_BEFORE = 5
ALL = frozenset(range(WORLD))


class Steps:
    """Collects the lines of the programs of one run. Any thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.imports: dict[int, float] = {}  # pid: when
        self.done: list[tuple[float, int, int, frozenset[int]]] = []  # when, shard, pid, of whom
        self.pids: dict[int, int] = {}  # shard: pid
        self.last: dict[int, int] = {}  # pid: step
        self.weights: dict[tuple[int, frozenset[int]], float] = {}
        self.wrong: list[str] = []

    def hear(self, said: dict[str, Any]) -> None:
        pid, shard = said["pid"], said["shard"]
        with self.changed:
            self.pids[shard] = pid
            if said["event"] == "imported":
                self.imports[pid] = said["at"]
            elif said["step"] > self.last.get(pid, -1):  # else a step that was dropped
                self.last[pid] = said["step"]
                members = shards(said["low"], said["high"], WORLD)
                if not members:
                    self.wrong.append(f"{said['low']:g} to {said['high']:g} in step {said['step']}")
                self.done.append((said["at"], shard, pid, members))
            self.changed.notify_all()

    def wait(
        self, what: Callable[[], Any], seconds: float, alive: Callable[[], bool] = lambda: True
    ) -> bool:
        """Waits until `what` is true; False after that many seconds, or when none lives."""
        until = time.monotonic() + seconds
        with self.changed:
            while not what():
                left = until - time.monotonic()
                if left <= 0 or not alive():
                    return bool(what())
                self.changed.wait(min(left, 0.2))
        return True

    def first(self, shard: int, since: float, allowed: frozenset[int]) -> float | None:
        """When that shard had its first right step after `since` with at least two members, all of
        which are allowed."""
        for at, whose, _, members in self.done:
            if at > since and whose == shard and len(members) > 1 and members <= allowed:
                return at
        return None


class Run:
    """One run of a library's program by four ranks."""

    def __init__(self, library: str) -> None:
        self.library, _, option = library.partition(", ")
        self.steps = Steps()
        self.members: dict[int, Process] = {}
        self.service: Master | Lighthouse | FirstPeer | None = None
        self.stores: Process | None = None
        self.ports: list[int] = []
        self.more: dict[str, str] = {"STEPS": str(10**9)}
        self.standbys = 2 if option == "three masters" else 0
        if option and self.library == "torchft":
            self.more["TORCHFT_QUORUM_RETRIES"] = option.split()[0]
        self.mpi = library == "MPI"
        try:
            self.start()
        except BaseException:
            self.end()
            raise

    def start(self) -> None:
        if self.library == "pccl":
            self.service = Master(self.standbys)
        elif self.library == "torchft":
            self.service = Lighthouse()
            command = [python(), str(HERE / "services.py"), "stores", str(WORLD + 1)]
            self.stores = Process(command, environment())
            line = self.stores.line("[", START_SECONDS)
            self.ports = [int(port) for port in line.strip("[]").split(",")]
        elif self.library == "hivemind":
            self.service = FirstPeer()
        elif self.library == "Gloo":
            self.more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if self.service is not None:
            self.more |= self.service.settings()
        if self.mpi:
            command = [*mpirun(), python(), str(self.program())]
            self.members[0] = Process(command, environment(**self.more), self.steps.hear)
        else:
            for shard in range(WORLD):
                self.start_member(shard)
        for shard in range(WORLD):
            enough = self.steps.wait(
                lambda shard=shard: self.full_steps(shard) >= STEPS_BEFORE,
                START_SECONDS,
                lambda: self.alive(ALL),
            )
            if not enough:
                raise Failed(f"the program made no steps: {self.why()}")

    def program(self) -> Any:
        return PROGRAMS / f"with_{self.library.lower()}.py"

    def start_member(self, shard: int) -> Process:
        more = {"SHARD": str(shard), "RANK": str(shard), "WORLD_SIZE": str(WORLD), **self.more}
        if self.library == "torchft":  # a replica of one rank each
            more |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
            more["MASTER_PORT"] = str(self.ports.pop())
        command = [python(), str(self.program())]
        self.members[shard] = Process(command, environment(**more), self.steps.hear)
        return self.members[shard]

    def full_steps(self, shard: int) -> int:
        count = sum(step[1] == shard and step[3] == ALL for step in self.steps.done)
        return count if self.library != "hivemind" else count * STEPS_BEFORE  # seconds each

    def alive(self, whom: frozenset[int]) -> bool:
        """Whether any of them is running."""
        if self.mpi:
            return self.members[0].popen.poll() is None
        return any(self.members[shard].popen.poll() is None for shard in whom)

    def why(self) -> str:
        ended = [process for process in self.members.values() if process.popen.poll() is not None]
        return (ended or list(self.members.values()))[0].why()

    def outcome(self, since: float, allowed: frozenset[int]) -> dict[str, Any]:
        """Waits until all of them have a right step after `since`, or all have ended."""

        def finished() -> bool:
            return all(self.steps.first(shard, since, allowed) for shard in allowed)

        self.steps.wait(finished, HANG_SECONDS, lambda: self.alive(allowed))
        times = [self.steps.first(shard, since, allowed) for shard in allowed]
        found: dict[str, Any] = {"steps": sum(at > since for at, *_ in self.steps.done)}
        if all(times):
            return found | {"seconds": max(at for at in times if at) - since}
        if not self.alive(allowed):
            return found | {"ended": time.monotonic() - since, "why": self.why()}
        return found | {"hangs": HANG_SECONDS}

    def kill_a_rank(self) -> dict[str, Any]:
        """SIGKILL to the last shard; how the others go on."""
        if not self.mpi:
            since = self.members[VICTIM].kill()
            self.members[VICTIM].popen.wait()
        else:
            since = time.monotonic()
            os.kill(self.steps.pids[VICTIM], signal.SIGKILL)
        return self.outcome(since, ALL - {VICTIM})

    def rejoin(self) -> dict[str, Any]:
        """Starts the killed shard again; until its first right step."""
        self.members[VICTIM].end()
        process = self.start_member(VICTIM)
        pid, since = process.popen.pid, process.began

        def first() -> float | None:
            for at, _, whose, members in self.steps.done:
                if whose == pid and VICTIM in members and len(members) > 1:
                    return at
            return None

        self.steps.wait(first, HANG_SECONDS, lambda: process.popen.poll() is None)
        at = first()
        if at is None:
            ended = process.popen.poll() is not None
            return {"ended": 0.0, "why": process.why()} if ended else {"hangs": HANG_SECONDS}
        imported = self.steps.imports[pid] - since
        return {"seconds": at - since, "imports": imported, "rest": at - since - imported}

    def kill_coordinator(self, restart: bool) -> dict[str, Any]:
        """SIGKILL to the coordinator, which is started again after three seconds or never."""
        if self.mpi:
            since = time.monotonic()
            self.members[0].popen.kill()  # not its session, which the ranks are in
            return {"ended": self.ranks_end(since), "why": "the ranks end with mpirun"}
        service = self.service
        if service is None:
            return {"none": True}
        since = service.process.kill()
        service.process.popen.wait()
        if not restart:
            return self.without_coordinator(since)
        self.steps.wait(lambda: False, OUTAGE_SECONDS)
        service.process.end()
        service.start()
        found = self.outcome(time.monotonic(), ALL)
        if "seconds" not in found:
            return found
        self.steps.wait(lambda: False, SETTLE_SECONDS)
        return {"pause": self.longest_pause(since, time.monotonic())}

    def without_coordinator(self, since: float) -> dict[str, Any]:
        """Watches the members until they end or a minute has passed."""
        self.steps.wait(lambda: False, GONE_SECONDS, lambda: self.alive(ALL))
        last = max(at for at, *_ in self.steps.done)
        if not self.alive(ALL):
            return {"ended": time.monotonic() - since, "why": self.why()}
        if time.monotonic() - last > HANG_SECONDS / 2:
            return {"hangs": GONE_SECONDS}
        return {"goes_on": GONE_SECONDS}

    def longest_pause(self, since: float, until: float) -> float:
        """Returns the longest time between two steps of one shard, of those that end or begin after
        `since`."""
        longest = 0.0
        for shard in ALL:
            times = sorted(at for at, whose, *_ in self.steps.done if whose == shard)
            times = [at for at in times if at <= until]
            before = [at for at in times if at <= since][-1:]
            edges = [*before, *(at for at in times if at > since)]
            longest = max([longest, *(b - a for a, b in zip(edges, edges[1:], strict=False))])
        return longest

    def ranks_end(self, since: float) -> float:
        """Waits for ranks that lost their mpirun; they are not children of this process."""
        until = since + HANG_SECONDS
        left = set(self.steps.pids.values())
        while left and time.monotonic() < until:
            for pid in list(left):
                with suppress(OSError):
                    if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
                        continue
                left.discard(pid)
            self.steps.wait(lambda: False, 0.05)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return time.monotonic() - since

    def end(self) -> None:
        for process in self.members.values():
            process.kill()
        for process in self.members.values():
            process.end()
        if self.service is not None:
            self.service.end()
        if self.stores is not None:
            self.stores.end()
        if self.mpi:
            for pid in self.steps.pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def start_alone() -> dict[str, Any]:
    """Starts the plain program: the seconds that no library adds."""
    steps = Steps()
    process = Process(
        [python(), str(PROGRAMS / "plain.py")], environment(SHARD="0", STEPS="1"), steps.hear
    )
    try:
        steps.wait(lambda: steps.done, START_SECONDS, lambda: process.popen.poll() is None)
        process.reader.join(5)
        if not steps.done:
            return {"missing": process.why()}
        seconds = steps.done[0][0] - process.began
        imported = steps.imports[process.popen.pid] - process.began
        return {"seconds": seconds, "imports": imported, "rest": seconds - imported}
    finally:
        process.end()
