"""A wide area on one machine: hosts with delays, rates, losses and cuts between them, without
netem.

    with preset("europe") as lab:
        lab.run(0, ["ping", "-c", "1", lab.address(1)])
        lab.cut(0, 1)

    python benchmarks/wan/lab.py --preset europe         # a shell on host 0; `ip netns exec` enters the others

Each host is a network namespace with one device, `wan`; relay.cpp carries packets between them.
Nothing outside these namespaces is touched. Needs root, /dev/net/tun, `ip` and a C++20 compiler.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

FOLDER = Path(__file__).resolve().parent
BUILD = FOLDER.parent.parent / "build" / "wan"
PREFIX = "pccl-wan"
NETWORK = "10.78.0"
DEVICE = "wan"
GRACE = 10.0  # seconds in which the relay starts, answers and ends
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow"]

# A value per ordered pair of hosts: one number for all, rows by the first host, or a function.
PerPair: TypeAlias = "float | Sequence[Sequence[float]] | Callable[[int, int], float]"


class LabError(RuntimeError):
    """The lab cannot be made here, or refuses a command."""


@dataclass(frozen=True)
class Host:
    """Its links to the rest of the world, in Mbit/s of IP packets; 0: without a limit."""

    up_mbit: float = 0.0
    down_mbit: float = 0.0


@dataclass(frozen=True)
class Counters:
    """Segments from one host to another, by what became of them."""

    source: int
    target: int
    delivered: int
    bytes: int  # of the delivered ones, IP headers included
    lost: int  # at random
    up_full: int  # did not fit into the queue of the first host's up-link
    line_full: int  # did not fit into the queue of the second host's site
    down_full: int  # did not fit into the queue of the second host's down-link
    cut: int
    no_room: int  # the relay had no memory: the lab's fault
    resets: int


@dataclass(frozen=True)
class Stats:
    """Counters of the relay since its start or the last `clear`."""

    seconds: float
    cpu_seconds: float
    late_ms: dict[str, float]  # mean, p99, most: how late packets left
    write_errors: int
    paths: dict[tuple[int, int], Counters]

    def total(self, name: str) -> int:
        """The sum of one of the counters."""
        return sum(getattr(counters, name) for counters in self.paths.values())


_numbers = itertools.count()


def why_not() -> str | None:
    """Why there can be no lab here; None when there can."""
    if os.geteuid() != 0:
        return "needs root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun"
    if shutil.which("ip") is None:
        return "needs the ip command"
    if _compiler() is None:
        return "needs a C++ compiler"
    return _no_namespaces()


@functools.cache
def _no_namespaces() -> str | None:
    """Root in a container may be refused them all the same."""
    name = f"pccl-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"cannot make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def build_relay() -> Path:
    """The compiled relay; compiles it when it has changed."""
    source = FOLDER / "relay.cpp"
    compiler = _compiler()
    if compiler is None:
        raise LabError("needs a C++ compiler")
    program = BUILD / f"relay-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        fresh = program.with_suffix(f".{os.getpid()}")
        command = [compiler, "-std=c++20", "-O2", *WARNINGS, str(source), "-o", str(fresh)]
        subprocess.run(command, check=True)
        fresh.replace(program)  # whoever compiles at the same time
    return program


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _remove(namespace: str) -> None:
    """Ends what runs in a namespace of a lab, and removes it."""
    # Again until there are none: what is being killed may just have started another.
    deadline = time.monotonic() + GRACE
    while (pids := _ip("netns", "pids", namespace).split()) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", namespace)


def _sweep() -> None:
    """Removes what labs whose process was killed have left."""
    folder = Path("/run/netns")
    for name in [path.name for path in folder.iterdir()] if folder.is_dir() else []:
        owner = name.removeprefix(f"{PREFIX}-").split("-")[0]
        if name.startswith(f"{PREFIX}-") and owner.isdigit() and not Path("/proc", owner).exists():
            with suppress(LabError):  # another lab was faster
                _remove(name)


@dataclass
class Lab:
    """Hosts and what is between them, from `__enter__` to `__exit__`.

    Attributes:
        hosts: Their links. delay_ms: One-way delays. loss: Shares of segments that get lost at
        random on their way. queue_ms: What the queues before the links hold, as time; what does not
        fit is dropped. sites: By host: those with the same number are on one site; (): each has one
        of its own. line_mbit: What all that enters a site from others shares, in Mbit/s; 0: without
        a limit. mtu: Of the hosts' devices, up to 9000. congestion: The congestion control of all
        TCP connections; None: this machine's. sysctl: More settings of the hosts' networks, such as
        {"net.ipv4.tcp_wmem": "4096 16384 16777216"}. seed: Of the losses.
    """

    hosts: Sequence[Host]
    delay_ms: PerPair = 0.0
    loss: PerPair = 0.0
    queue_ms: float = 100.0
    sites: Sequence[int] = ()
    line_mbit: float = 0.0
    mtu: int = 1500
    congestion: str | None = "cubic"
    sysctl: Mapping[str, str] = field(default_factory=dict)
    seed: int = 1
    name: str = "lab"
    last_stats: Stats | None = field(default=None, init=False)  # once it has ended
    _namespaces: list[str] = field(default_factory=list, init=False)
    _started: list[subprocess.Popen[Any]] = field(default_factory=list, init=False)
    _relay: subprocess.Popen[str] | None = field(default=None, init=False)
    _stack: ExitStack = field(default_factory=ExitStack, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    # ---- begin and end ----

    def __enter__(self) -> Lab:
        reason = why_not()
        if reason is not None:
            raise LabError(reason)
        if not 2 <= len(self.hosts) <= 64 or not 576 <= self.mtu <= 9000:
            raise LabError("2 to 64 hosts with an MTU of 576 to 9000")
        _sweep()
        program = build_relay()
        name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        try:
            for host in range(len(self.hosts)):
                self._add_namespace(f"{name}-h{host}")
            self._start_relay(program)
            for host in range(len(self.hosts)):
                self._set_up(host)
            self._shape()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that was started on the hosts, the relay, and the hosts."""
        self._stack.close()
        self._started.clear()
        self._namespaces.clear()

    def _add_namespace(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        self._stack.callback(_remove, namespace)

    def _start_relay(self, program: Path) -> None:
        paths = [f"/run/netns/{namespace}" for namespace in self._namespaces]
        self._relay = subprocess.Popen(
            [str(program), str(self.seed), str(self.mtu), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(self._end_relay)
        self._stack.callback(self._end_processes)
        if self._answer() != "ready":
            raise LabError("the relay did not start, see above")

    def _end_processes(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _end_relay(self) -> None:
        relay, self._relay = self._relay, None
        assert relay is not None
        try:
            said, _ = relay.communicate("stats\n", timeout=GRACE)
        except subprocess.TimeoutExpired:
            relay.kill()
            relay.communicate()
            return
        with suppress(ValueError):  # it said nothing if it could not start
            self.last_stats = _parse(said.partition("\n")[0])

    def _set_up(self, host: int) -> None:
        namespace = self._namespaces[host]
        address = f"{self.address(host)}/24"
        _ip("-n", namespace, "link", "set", "lo", "up")
        settings = {
            "net.ipv6.conf.all.disable_ipv6": "1",  # nothing but what is asked for is on the way
            "net.ipv4.tcp_no_metrics_save": "1",  # a connection knows nothing of those before it
            **self.sysctl,
        }
        for key, value in settings.items():
            path = "/proc/sys/" + key.replace(".", "/")
            write = 'if [ -e "$1" ]; then echo "$2" > "$1"; fi'  # a kernel may be without IPv6
            self.run(host, ["sh", "-c", write, "sh", path, value])
        _ip("-n", namespace, "addr", "add", address, "dev", DEVICE)
        _ip("-n", namespace, "link", "set", DEVICE, "up")
        if self.congestion is not None:  # by route: the setting of a namespace allows only some
            route = f"{NETWORK}.0/24 dev {DEVICE} proto kernel scope link src {self.address(host)}"
            _ip("-n", namespace, "route", "replace", *route.split(), "congctl", self.congestion)

    def _shape(self) -> None:
        for number, host in enumerate(self.hosts):
            self.rate(number, host.up_mbit, host.down_mbit)
        for a, b in self.pairs():
            self.set_delay(a, b, _of(self.delay_ms, a, b))
            self.set_loss(a, b, _of(self.loss, a, b))
        for number, site in enumerate(self.sites):
            self._tell(f"site {number} {site}")
        for site in set(self.sites):
            self._tell(f"line {site} {self.line_mbit} {self.queue_ms}")

    # ---- what is where ----

    def pairs(self) -> list[tuple[int, int]]:
        """All ordered pairs of hosts."""
        return list(itertools.permutations(range(len(self.hosts)), 2))

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def namespace(self, host: int) -> str:
        return self._namespaces[host]

    def rtt_ms(self, a: int, b: int) -> float:
        return _of(self.delay_ms, a, b) + _of(self.delay_ms, b, a)

    def scaled(self, factor: float) -> Lab:
        """The same with all rates multiplied."""
        hosts = [Host(host.up_mbit * factor, host.down_mbit * factor) for host in self.hosts]
        return replace(self, hosts=hosts, line_mbit=self.line_mbit * factor)

    # ---- processes ----

    def command(self, host: int, command: Sequence[str] = ()) -> list[str]:
        """Returns the command that runs `command` on a host.

        pccl chooses no congestion control there, unless PCCL_TCP_CONGESTION is set.
        """
        default = ': "${PCCL_TCP_CONGESTION=system}"; export PCCL_TCP_CONGESTION; exec "$@"'
        return ["ip", "netns", "exec", self.namespace(host), "sh", "-c", default, "sh", *command]

    def run(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs it to its end; its output is captured, and `env` is added to the environment."""
        options = {"capture_output": True, "text": True, "check": True} | options
        environment = {**os.environ, **(env or {})}
        return subprocess.run(self.command(host, command), env=environment, **options)

    def popen(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Starts it. It is killed when the lab ends."""
        environment = {**os.environ, **(env or {})}
        process = subprocess.Popen(self.command(host, command), env=environment, **options)
        self._started.append(process)
        return process

    # ---- while it runs ----

    def rate(self, host: int, up_mbit: float, down_mbit: float) -> None:
        """Changes a host's links."""
        self._tell(f"rate {host} {up_mbit} {down_mbit} {self.queue_ms}")

    def set_delay(self, a: int, b: int, delay_ms: float) -> None:
        """Changes the one-way delay from `a` to `b`."""
        self._tell(f"delay {a} {b} {delay_ms}")

    def set_loss(self, a: int, b: int, share: float) -> None:
        """Changes what gets lost from `a` to `b`."""
        self._tell(f"loss {a} {b} {share:.9f}")

    def cut(self, a: int, b: int, one_way: bool = False) -> None:
        """Lets nothing through, what is on its way included, and tells nobody. `one_way`: from `a`
        to `b`."""
        for one, other in [(a, b)] if one_way else [(a, b), (b, a)]:
            self._tell(f"cut {one} {other}")

    def heal(self, a: int, b: int, one_way: bool = False) -> None:
        """Ends a cut."""
        for one, other in [(a, b)] if one_way else [(a, b), (b, a)]:
            self._tell(f"heal {one} {other}")

    def reset(self, a: int, b: int, count: int = 1, *, port: int = 0, spare: int = 0) -> None:
        """Resets `count` TCP connections between two hosts at both ends, each when it next carries
        data, either way.

        Returns at once; `stats` counts those that are done.

        Args:
            port: Only connections with that port at one end.
            spare: Only connections without that port: the master's, for example.
        """
        if port and spare:
            raise LabError("either port or spare")
        self._tell(f"reset {a} {b} {count} {port or -spare}")

    def resets(self, a: int, b: int) -> int:
        """Connections between the two that were reset."""
        paths = self.stats().paths
        return paths[a, b].resets + paths[b, a].resets

    def stats(self) -> Stats:
        return _parse(self._ask("stats"))

    def clear(self) -> None:
        """Sets all counters to zero."""
        self._tell("clear")

    # ---- the relay ----

    def _tell(self, line: str) -> None:
        answer = self._ask(line)
        if answer != "ok":
            raise LabError(f"the relay says: {answer or 'nothing; it has ended'}")

    def _ask(self, line: str) -> str:
        with self._lock:
            if self._relay is None or self._relay.stdin is None:
                raise LabError("the lab is not running")
            try:
                self._relay.stdin.write(line + "\n")
                self._relay.stdin.flush()
            except OSError as error:
                raise LabError(f"the relay has ended: {error}") from None
            return self._answer()

    def _answer(self) -> str:
        assert self._relay is not None and self._relay.stdout is not None
        return self._relay.stdout.readline().strip()


def _parse(text: str) -> Stats:
    said = json.loads(text)
    paths = [Counters(**path) for path in said.pop("paths")]
    return Stats(**said, paths={(path.source, path.target): path for path in paths})


def _of(table: PerPair, a: int, b: int) -> float:
    if callable(table):
        return table(a, b)
    return table[a][b] if isinstance(table, Sequence) else table


# ---- presets
# ------------------------------------------------------------------------------


def _halves(rtts: Mapping[tuple[int, int], float]) -> Callable[[int, int], float]:
    return lambda a, b: rtts[min(a, b), max(a, b)] / 2


def _sides(near: float, far: float) -> Callable[[int, int], float]:
    """Even hosts on one side, odd ones on the other: the order of joining is then the worst of all
    rings."""
    return lambda a, b: (near if a % 2 == b % 2 else far) / 2


_EUROPE = {(0, 1): 20, (0, 2): 26, (0, 3): 34, (1, 2): 30, (1, 3): 40, (2, 3): 22}
_ATLANTIC = {(0, 1): 100, (0, 2): 12, (0, 3): 90, (1, 2): 95, (1, 3): 14, (2, 3): 82}
# Frankfurt, Virginia, Singapore, Sao Paulo.
_WORLD = {(0, 1): 90, (0, 2): 160, (0, 3): 200, (1, 2): 220, (1, 3): 120, (2, 3): 300}
_LOSS = {(0, 1): 0.001, (0, 2): 0.002, (0, 3): 0.005, (1, 2): 0.005, (1, 3): 0.01, (2, 3): 0.002}

PRESETS: dict[str, Lab] = {
    lab.name: lab
    for lab in (
        Lab([Host(200, 200)] * 4, _halves(_EUROPE), name="europe"),
        Lab([Host(200, 200)] * 4, _halves(_ATLANTIC), name="transatlantic"),
        Lab([Host(200, 200)] * 4, _halves(_WORLD), name="world"),
        Lab([Host(200, 200)] * 3 + [Host(50, 50)], 20, name="slow_peer"),
        Lab([Host(200, 200)] * 4, 20, lambda a, b: _LOSS[min(a, b), max(a, b)], name="lossy"),
        Lab([Host(500, 500)] * 4, 50, 0.0001, name="long_fat"),
        Lab(
            [Host(400, 400)] * 4, 40, 0.0001, name="long_line"
        ),  # of the goals of run.py and cut.py
        Lab([Host(100, 100)] * 8, _sides(20, 100), name="two_continents"),
        # Each site has one line to the world, half of what one of its hosts has at home.
        Lab([Host(100, 100)] * 8, _sides(2, 40), sites=[0, 1] * 4, line_mbit=50, name="two_sites"),
    )
}


def preset(name: str, rates: float = 1.0, **changes: Any) -> Lab:
    """A lab by its name, with all rates multiplied by `rates` and `changes` of its attributes."""
    if name not in PRESETS:
        raise LabError(f"no such preset: {name}; there are {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes).scaled(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description="A shell on host 0 of a lab.")
    parser.add_argument("--preset", choices=list(PRESETS), default="europe")
    parser.add_argument("--rates", type=float, default=1.0, help="multiplies all rates")
    parser.add_argument("command", nargs="*", help="instead of a shell")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with preset(args.preset, args.rates) as lab:
        for host in range(len(lab.hosts)):
            print(
                f"host {host}: {lab.address(host)}, ip netns exec {lab.namespace(host)} ...",
                flush=True,
            )
        command = args.command or [os.environ.get("SHELL", "/bin/sh")]
        status = subprocess.call(lab.command(0, command))
    sys.exit(status)


if __name__ == "__main__":
    main()
