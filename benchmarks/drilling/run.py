"""A run under the drill: masters, peers that train, what they say, and what the status says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pccl.master import make_secret

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "wan"))
import lab  # noqa: E402

# A failure is detected in two seconds instead of six, in about the ratio of the defaults.
SETTINGS = {
    "PCCL_HEARTBEAT_INTERVAL": "0.3",
    "PCCL_HEARTBEAT_TIMEOUT": "2",
    "PCCL_LINK_TIMEOUT": "1",
    "PCCL_RECONNECT_TIMEOUT": "5",
    "PCCL_STRAGGLER_TIMEOUT": "5",
    "PCCL_DRAIN_SECONDS": "5",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
STATE_BYTES = 16 << 20
START_SECONDS = 120.0
LOOK_SECONDS = 0.1  # between two looks at the status
WELL_STEPS = 3  # in a row that all peers must make together

Place = int  # a host of the lab: masters, then peers, one for a newcomer, and the operator's
Status = dict[str, Any]


_PORT = 48148  # in the lab, where each host has ports of its own


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Failed(Exception):
    """The run did something that it must not do."""


@dataclass
class Step:
    """A peer's report of a step."""

    at: float
    step: int
    world: int
    digest: str


@dataclass
class Member:
    """One peer's process."""

    name: str
    place: Place
    process: subprocess.Popen[str]
    steps: list[Step] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)  # all but steps
    errors: Path = Path()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(word) + "\n")
            self.process.stdin.flush()

    def signal(self, number: int) -> None:
        if self.alive:
            self.process.send_signal(number)

    def events(self, since: float, event: str) -> list[dict[str, Any]]:
        return [one for one in self.said if one["at"] >= since and one["event"] == event]


class Run:
    """The processes of one run. Ends them in `__exit__`.

    Args:
        peers: How many train.
        folder: For logs and checkpoints.
        with_lab: Whether each process is on a host of its own, whose lines can be cut. Otherwise
            all are processes of this host's loopback.
        masters: How many the run has.
        memory: Whether peers share memory. Not with the lab.
    """

    def __init__(
        self, peers: int, folder: Path, with_lab: bool, masters: int = 3, memory: bool = False
    ) -> None:
        self.folder = folder
        self.secret = make_secret()
        self.lab: lab.Lab | None = None
        self.memory = memory
        self._with_lab = with_lab
        self._settings = SETTINGS | {"PCCL_SHM": str(int(memory))}
        if with_lab:
            self._settings["PCCL_BIND"] = ""  # whatever the tests' own processes bind to
        self._count = peers
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []
        self._digests: dict[int, str] = {}  # of each step, whoever made it
        self._lock = threading.Lock()
        self._wrong: list[str] = []
        self.members: dict[str, Member] = {}
        self.masters: list[subprocess.Popen[str] | None] = [None] * masters
        self.addresses: list[str] = []
        self.spare: Place = masters + peers  # a newcomer's
        self._operator: Place = masters + peers + 1
        self._watch_end = threading.Event()
        self.seen: list[tuple[float, float, Status | None]] = []  # asked, answered
        self.serving = 0  # the master that answered with the highest term
        self.term = 0

    def __enter__(self) -> Run:
        try:
            if self._with_lab:
                hosts = [lab.Host(200, 200)] * (self._operator + 1)
                self.lab = self._stack.enter_context(lab.Lab(hosts, delay_ms=1.0))
            self.addresses = [
                f"{self.host(place)}:{_PORT if self.lab else _free_port()}"
                for place in range(len(self.masters))
            ]
            for index in range(len(self.masters)):
                self.start_master(index)
            for number in range(self._count):
                place = len(self.masters) + number
                self.start_peer(f"peer{number}", place, PCCL_MIN_PEERS=str(self._count))
            self._asker = self._popen(
                self._operator,
                [sys.executable, "-P", str(FOLDER / "ask.py"), self.address],
                self.folder / "ask.log",
            )
            watcher = threading.Thread(target=self._watch, daemon=True)
            watcher.start()
            self._stack.callback(watcher.join)
            self._stack.callback(self._watch_end.set)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything."""
        self._watch_end.set()
        self._stack.close()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()

    # ---- processes

    def host(self, place: Place) -> str:
        return self.lab.address(place) if self.lab else "127.0.0.1"

    def _popen(
        self, place: Place, command: Sequence[str], errors: Path, **env: str
    ) -> subprocess.Popen[str]:
        full = {**os.environ, **self._settings, "PCCL_SECRET": self.secret, **env}
        if self.lab:
            command = self.lab.command(place, command)
        with errors.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=full,
                cwd=self.folder,
            )
        self._processes.append(process)
        return process

    @property
    def address(self) -> str:
        """The addresses of all masters, as in PCCL_MASTER."""
        return ",".join(self.addresses)

    @property
    def places(self) -> range:
        """The places of all masters and peers."""
        return range(self.spare)

    def start_master(self, index: int = 0) -> None:
        """Starts a master, at the address of the one before."""
        command = [sys.executable, "-P", "-m", "pccl", "master"]
        command += ["--listen", self.addresses[index]]
        if len(self.masters) > 1:
            command += ["--peers", self.address]
        log = self.folder / f"master{index}.log"
        master = self._popen(index, command, log, PCCL_LOG_LEVEL="INFO")
        self.masters[index] = master
        assert master.stdout is not None
        said = master.stdout.readline()
        if not said.startswith("listening on "):
            raise Failed(f"the master did not start: {said}; see {log}")
        threading.Thread(target=master.stdout.read, daemon=True).start()

    def start_peer(
        self, name: str, place: Place, state_bytes: int = STATE_BYTES, **env: str
    ) -> Member:
        """Starts a peer. A name that was used before is a new life of it."""
        command = [sys.executable, "-P", str(FOLDER / "peer.py"), name, str(state_bytes)]
        errors = self.folder / f"{name}.log"
        process = self._popen(
            place, command, errors, PCCL_MASTER=self.address, DRILL_FOLDER=str(self.folder), **env
        )
        member = Member(name, place, process, errors=errors)
        self.members[name] = member
        threading.Thread(target=self._read, args=(member,), daemon=True).start()
        return member

    def _read(self, member: Member) -> None:
        assert member.process.stdout is not None
        for line in member.process.stdout:
            said = json.loads(line)
            if said["event"] != "step":
                member.said.append(said)
                continue
            del said["event"]
            step = Step(**said)
            with self._lock:
                known = self._digests.setdefault(step.step, step.digest)
                if known != step.digest:
                    self._wrong.append(f"{member.name} has other weights after step {step.step}")
                if member.steps and step.step <= member.steps[-1].step:
                    self._wrong.append(f"{member.name} made step {step.step} twice")
            member.steps.append(step)

    def master(self, index: int = 0) -> subprocess.Popen[str]:
        master = self.masters[index]
        assert master is not None
        return master

    # ---- what the status says

    def _watch(self) -> None:
        while not self._watch_end.wait(LOOK_SECONDS):
            asked = time.monotonic()
            status = self.status()
            self.seen.append((asked, time.monotonic(), status))

    def status(self) -> Status | None:
        """What `pccl status --json` prints; None if nobody answers."""
        assert self._asker.stdin is not None and self._asker.stdout is not None
        self._asker.stdin.write("\n")
        self._asker.stdin.flush()
        answer: tuple[str, Status] | None = json.loads(self._asker.stdout.readline() or "null")
        if answer is None:
            return None
        # One that was frozen may answer before it finds that its members are gone.
        if (
            any(group["members"] for group in answer[1]["groups"])
            and answer[1]["term"] >= self.term
        ):
            self.term = answer[1]["term"]
            self.serving = self.addresses.index(answer[0])
        return answer[1]

    def command(self, kind: str, name: str = "") -> None:
        """An operator's command, from a host of its own."""
        words = [sys.executable, "-P", "-m", "pccl", kind, self.address, *filter(None, [name])]
        process = self._popen(self._operator, words, self.folder / "operator.log")
        if process.wait(30) != 0:
            raise Failed(f"pccl {kind} failed: see operator.log")

    # ---- what the run does

    def check(self) -> None:
        """Raises: Failed: members have disagreed."""
        with self._lock:
            if self._wrong:
                raise Failed("; ".join(self._wrong[:3]))

    def living(self) -> list[Member]:
        return [member for member in self.members.values() if member.alive]

    def well(self, since: float, world: int) -> float | None:
        """When all that live, `world` of them, had made some steps together after `since`."""
        living = self.living()
        if len(living) != world:
            return None
        by_step: dict[int, list[Step]] = defaultdict(list)
        for member in living:
            for step in member.steps[-50:]:
                if step.at >= since and step.world == world:
                    by_step[step.step].append(step)
        whole = sorted(number for number, steps in by_step.items() if len(steps) == world)
        for first in whole:
            row = range(first, first + WELL_STEPS)
            if all(number in whole for number in row):
                return max(step.at for step in by_step[first])
        return None

    def wait_until_well(self, since: float, world: int, seconds: float) -> float:
        """Returns when it was. Raises: Failed."""
        end = time.monotonic() + seconds
        while (at := self.well(since, world)) is None:
            self.check()
            if time.monotonic() > end:
                alive = ", ".join(member.name for member in self.living())
                said = [m.said[-1].get("text", "") for m in self.members.values() if m.said]
                raise Failed(
                    f"no steps of {world} members within {seconds:g} s; alive: {alive}; {said[:1]}"
                )
            time.sleep(0.02)
        self.check()
        return at

    def wait(self, what: str, claim: Callable[[], bool], seconds: float = 30.0) -> None:
        """Raises: Failed: the claim did not become true in time."""
        end = time.monotonic() + seconds
        while not claim():
            if time.monotonic() > end:
                raise Failed(f"not within {seconds:g} s: {what}")
            time.sleep(0.02)

    def longest_pause(self, since: float, until: float, names: Sequence[str]) -> float:
        """The longest time that one of these members waited for its next step, in seconds."""
        longest = 0.0
        for name in names:
            times = [s.at for s in self.members[name].steps if since - 1 <= s.at <= until]
            times = [since, *(at for at in times if at > since), until]
            gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
            longest = max(longest, *gaps)
        return longest
