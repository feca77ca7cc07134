"""Processes of the comparison: each is started here, has a deadline, and is ended by its id."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from environment import FOLDER, last_line, python, search_path

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
WORLD = 4
START_SECONDS = 120.0
BLOCK_SECONDS = 90.0
LIBC = ctypes.CDLL(None)


class Failed(Exception):
    """A library did not do what is measured; the text is its row in the report."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(**more: str) -> dict[str, str]:
    """The environment of every process: one thread each, loopback, no other run's settings."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PCCL_")}
    return own | {
        "PATH": search_path(),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PCCL_BIND": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "JAX_PLATFORMS": "cpu",
        "PYTHONWARNINGS": "ignore",
        "HIVEMIND_LOGLEVEL": "ERROR",
        **more,
    }


def die_with_parent() -> None:
    """In a new process: it gets SIGKILL when this program ends, however that comes about."""
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


class Process:
    """A process in a session of its own. Lines of JSON on its standard output go to `hear`, the
    rest to a file."""

    def __init__(
        self,
        command: Sequence[str],
        env: dict[str, str],
        hear: Callable[[Any], None] | None = None,
    ) -> None:
        self.log = tempfile.TemporaryFile("w+", dir=FOLDER)
        self.hear = hear
        self.began = time.monotonic()
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=env,
            cwd=FOLDER,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.lines: list[str] = []
        self.said = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if self.hear is not None and line.startswith("{"):
                with suppress(ValueError):  # two ranks' lines in one, from mpirun
                    self.hear(json.loads(line))
                continue
            with self.said:
                self.lines.append(line)
                self.said.notify_all()
        with self.said:
            self.said.notify_all()

    def line(self, start: str, seconds: float) -> str:
        """Waits for a line that starts like that."""

        def found() -> list[str]:
            return [line for line in self.lines if line.startswith(start)]

        with self.said:
            self.said.wait_for(lambda: found() or self.popen.poll() is not None, seconds)
            if not found():
                raise Failed(f"a service did not start: {self.why()}")
            return found()[0].removeprefix(start).strip()

    def why(self) -> str:
        """Returns the last line of what it said about its end."""
        if not self.log.closed:
            self.log.seek(0)
            self.reason = last_line("".join(self.lines[-50:]) + self.log.read())
        return self.reason

    def kill(self) -> float:
        """Kills the session, its helpers included; returns when."""
        now = time.monotonic()
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        return now

    def end(self, seconds: float = 0.0) -> None:
        if seconds:
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(seconds)
        self.kill()
        self.popen.wait()
        self.reader.join(5)
        self.why()
        for stream in (self.popen.stdin, self.popen.stdout, self.log):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def end_orphans() -> int:
    """Ends all children that are left, which are orphans of ended processes; returns how many."""
    count = 0
    for _ in range(10):  # children of children come up
        pids = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            count += 1
        if not pids:
            break
    return count


def mpirun(tcp: bool = False) -> list[str]:
    """Open MPI on this host alone: its default path (shared memory), or TCP over loopback."""
    command = ["mpirun", "-np", str(WORLD), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    settings = {"btl_tcp_if_include": "lo", "pml": "ob1"}
    settings["btl"] = "self,tcp" if tcp else "^tcp"
    if len(os.sched_getaffinity(0)) < WORLD:
        settings["mpi_yield_when_idle"] = "1"
    for name, value in settings.items():
        command += ["--mca", name, value]
    return command


class Service:
    """A process that a library needs beside its ranks."""

    process: Process

    def end(self) -> None:
        self.process.end()


class Master(Service):
    """pccl's master; can be killed and started again at the same address."""

    def __init__(self, more: int = 0) -> None:
        """With `more` masters, which take over from it."""
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(1 + more)]
        self.standbys = [self.serve(address) for address in self.addresses[1:]]
        self.start()

    def start(self) -> None:
        self.process = self.serve(self.addresses[0])

    def serve(self, address: str) -> Process:
        command = [str(FOLDER / "bin" / "pccl"), "master", "--listen", address, "--insecure"]
        command += ["--min-peers", str(WORLD)]
        if len(self.addresses) > 1:
            command += ["--peers", ",".join(self.addresses)]
        process = Process(command, environment())
        process.line("listening on", START_SECONDS)
        return process

    def end(self) -> None:
        for process in (self.process, *self.standbys):
            process.end()

    def settings(self) -> dict[str, str]:
        return {"PCCL_MASTER": ",".join(self.addresses)}


class Lighthouse(Service):
    """torchft's lighthouse, with the time-outs of its own documentation's example."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        command = [str(FOLDER / "bin" / "torchft_lighthouse"), "--bind", self.address]
        command += ["--min_replicas", "2", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        self.process = Process(command, environment())
        until = time.monotonic() + START_SECONDS
        host, _, port = self.address.partition(":")
        while True:
            with suppress(OSError), socket.create_connection((host, int(port)), 1):
                return
            if time.monotonic() > until or self.process.popen.poll() is not None:
                raise Failed(f"the lighthouse did not start: {self.process.why()}")
            self.process.reader.join(0.05)

    def settings(self) -> dict[str, str]:
        return {"TORCHFT_LIGHTHOUSE": f"http://{self.address}"}


class FirstPeer(Service):
    """A first peer for hivemind's hash table."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.process = Process([python(), str(HERE / "services.py"), "dht"], environment())
        self.addresses = json.loads("[" + self.process.line("[", START_SECONDS))

    def settings(self) -> dict[str, str]:
        return {"INITIAL_PEERS": " ".join(self.addresses)}


class Ranks:
    """The ranks of one library that take measurements, as their parent sees them."""

    def __init__(self, library: str, tcp: bool) -> None:
        self.processes: list[Process] = []
        self.streams: list[socket.socket] = []
        self.service: Master | Lighthouse | FirstPeer | None = None
        self.files = tempfile.TemporaryDirectory()
        try:
            self.start(library, tcp)
        except BaseException:
            self.end()
            raise

    def start(self, library: str, tcp: bool) -> None:
        more = {"COMPARE_STORE": f"{self.files.name}/store", "PCCL_SHM": "0" if tcp else "1"}
        services: dict[str, Any] = {
            "pccl": Master,
            "torchft": Lighthouse,
            "hivemind": FirstPeer,
        }
        if library in services:
            self.service = services[library]()
            more |= self.service.settings()  # type: ignore[union-attr]
        line = f"{self.files.name}/line"
        with open(line, "wb") as file:
            file.truncate(4096)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path := f"{self.files.name}/parent")
            listener.listen(WORLD)
            command = [python(), str(HERE / "rank.py"), "--library", library, "--socket", path]
            command += ["--line", line, "--world", str(WORLD)]
            if library in ("mpi", "mpi4jax"):
                commands = [[*mpirun(tcp), *command]]
            else:
                commands = [[*command, "--rank", str(rank)] for rank in range(WORLD)]
            self.processes += [Process(each, environment(**more)) for each in commands]
            listener.settimeout(0.2)
            until = time.monotonic() + START_SECONDS
            while len(self.streams) < WORLD:
                self.check(until, "start")
                with suppress(TimeoutError):
                    self.streams.append(listener.accept()[0])
        ranks = [answer["rank"] for answer in self.hear(START_SECONDS)]
        self.streams = [self.streams[ranks.index(rank)] for rank in range(WORLD)]

    def check(self, until: float, what: str) -> None:
        for process in self.processes:
            if process.popen.poll() is not None:
                raise Failed(f"{what}: {process.why()}")
        if time.monotonic() > until:
            raise Failed(f"{what}: no answer in time")

    def hear(self, seconds: float = BLOCK_SECONDS) -> list[dict[str, Any]]:
        """Returns the next line of each rank."""
        until = time.monotonic() + seconds
        said = dict.fromkeys(self.streams, b"")
        while waiting := [stream for stream in said if not said[stream].endswith(b"\n")]:
            ready, _, _ = select.select(waiting, [], [], 0.5)
            for stream in ready:
                data = stream.recv(1 << 20)
                said[stream] += data
                if not data:
                    self.processes[0].end(2)
                    raise Failed(self.ended())
            if not ready:
                self.check(until, "measuring")
        return [json.loads(said[stream]) for stream in self.streams]

    def ended(self) -> str:
        return next((p.why() for p in self.processes if p.popen.poll()), "a rank ended")

    def order(self, order: str, **what: Any) -> list[dict[str, Any]]:
        for stream in self.streams:
            with suppress(OSError):  # hear() tells
                stream.sendall(json.dumps({"order": order, **what}).encode() + b"\n")
        return self.hear()

    def end(self) -> None:
        with suppress(Failed, OSError):
            if len(self.streams) == WORLD:
                self.order("end")
        for process in self.processes:
            process.end(5)
        if self.service is not None:
            self.service.end()
        for stream in self.streams:
            stream.close()
        self.files.cleanup()
