"""Real processes for tests: a master and peers, which talk with the test in lines of JSON."""

from __future__ import annotations

import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from forked import Forked, may_be_forked
from programs import master

# An emulated processor is slower, so tests wait longer for its programs.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))

# With these a failure is detected in a second instead of six, in the ratio of the defaults.
FAST = {
    "PCCL_HEARTBEAT_INTERVAL": "0.2",
    "PCCL_HEARTBEAT_TIMEOUT": "1.5",
    "PCCL_LINK_TIMEOUT": "0.8",
    "PCCL_RECONNECT_TIMEOUT": "2",
}

# A function of tests/programs, or a functools.partial of one with arguments that JSON can say.
Program = Callable[[], object]


def described(program: Program) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A program's name and arguments, for programs.shell.call in another process."""
    call = program if isinstance(program, partial) else partial(program)
    return f"{call.func.__module__}:{call.func.__qualname__}", call.args, call.keywords


def command(program: Program) -> list[str]:
    """The command that runs a program, from any folder."""
    name, *arguments = described(program)
    runner = Path(__file__).with_name("run_program.py")
    return [sys.executable, str(runner), name, json.dumps(arguments)]


def start(
    program: Program,
    *,
    stdin: IO[bytes] | int,
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
    **env: str,
) -> subprocess.Popen[bytes] | Forked:
    """Starts a process that runs it.

    It has NumPy already, and torch where its module says so (forked.py). With TEST_FORKS=0, or
    with variables that are read when libraries are loaded, it is a new interpreter.
    """
    python, *script = command(program)
    given: dict[str, Any] = {
        "stdin": stdin,
        "stdout": stdout,
        "stderr": stderr,
        "env": {**os.environ, **env},
        "cwd": tempfile.gettempdir(),  # not the source tree, which has no extension
    }
    call = program if isinstance(program, partial) else partial(program)
    module = sys.modules[call.func.__module__]
    if getattr(module, "FORKED", False) and given["env"].get("TEST_FORKS") != "0":
        return Forked(script, **given)
    if may_be_forked(given["env"]):
        return Forked(script, **given, kind="numpy")
    return subprocess.Popen([python, *script], **given)


class Worker:
    """One process. `tell` writes a line to it, `next` reads the next one from it."""

    def __init__(self, program: Program, **env: str) -> None:
        self.name = described(program)[0]
        self._stderr = tempfile.TemporaryFile()
        pipe = subprocess.PIPE
        self.process = start(program, stdin=pipe, stdout=pipe, stderr=self._stderr, **env)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.decode())
        self._lines.put(None)

    @property
    def pid(self) -> int:
        return self.process.pid

    def _stat(self) -> list[str]:
        """Its main thread's fields in /proc, from the state's letter on.

        Raises:
            AssertionError: The process has ended.
        """
        fields = _stat(self.pid)
        if fields[0] in _ENDED:
            raise AssertionError(f"{self.name} ended: {self.process.wait()}\n{self.stderr()}")
        return fields

    def state(self) -> str:
        """The letter that the system has for its main thread."""
        return self._stat()[0]

    def cpu_seconds(self) -> float:
        fields = self._stat()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stderr(self) -> str:
        # Not with seek and read: the process shares the offset, and would write over its lines.
        file = self._stderr.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def next(self, timeout: float = 30.0) -> dict[str, Any]:
        timeout *= PATIENCE
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"worker said nothing for {timeout} s\n{self.stderr()}") from None
        if line is None:
            raise AssertionError(f"{self.name} ended: {self.process.wait()}\n{self.stderr()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def expect(self, event: str, timeout: float = 30.0) -> dict[str, Any]:
        answer = self.next(timeout)
        assert answer.get("event") == event, f"{answer}\n{self.stderr()}"
        return answer

    def tell(self, what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def call(self, program: Program) -> None:
        """Has a process that is in programs.shell.obey call that function."""
        self.tell(described(program))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ends(self, timeout: float = 30.0) -> int:
        timeout *= PATIENCE
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"worker did not end in {timeout} s\n{self.stderr()}") from None

    def destroy(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # also a stopped one
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self._stderr.close()


class Run:
    """A master and its peers, all real processes, gone at the end of the test."""

    def __init__(self, open_files: int | None = None, **env: str) -> None:
        self.env = env
        self.workers: list[Worker] = []
        self._open_files = open_files
        self.master = self._serve("127.0.0.1:0")
        self.address = self.master.expect("listening")["address"]

    def _serve(self, listen: str) -> Worker:
        worker = Worker(partial(master.serve, listen, self._open_files), **self.env)
        self.workers.append(worker)
        return worker

    def restart_master(self) -> None:
        """A new master at the old one's address, with no memory of the run."""
        self.master = self._serve(self.address)
        assert self.master.expect("listening")["address"] == self.address

    def peer(self, program: Program, **env: str) -> Worker:
        worker = Worker(program, **{"PCCL_MASTER": self.address, **self.env, **env})
        self.workers.append(worker)
        return worker

    def peers(self, count: int, program: Program, **env: str) -> list[Worker]:
        """`count` peers that start together."""
        return [self.peer(program, PCCL_MIN_PEERS=str(count), **env) for _ in range(count)]


class Masters:
    """Several masters of one run and its peers, all real processes."""

    def __init__(self, count: int = 3, **env: str) -> None:
        self.env = env
        self.workers: list[Worker] = []
        self.count = count
        self.masters = [self._serve("127.0.0.1:0", index) for index in range(count)]
        self.addresses = [one.expect("listening")["address"] for one in self.masters]

    @property
    def address(self) -> str:
        """All of them, as in PCCL_MASTER."""
        return ",".join(self.addresses)

    def _serve(self, listen: str, index: int) -> Worker:
        # A list, since the arguments of a program travel as JSON.
        worker = Worker(partial(master.serve, listen, None, [index, self.count]), **self.env)
        self.workers.append(worker)
        return worker

    def kill(self, index: int) -> None:
        self.masters[index].process.kill()
        self.masters[index].ends()

    def restart(self, index: int) -> None:
        """A new master at that address, with no memory of the run."""
        self.masters[index] = self._serve(self.addresses[index], index)
        self.masters[index].expect("listening")

    def peers(self, count: int, program: Program, **env: str) -> list[Worker]:
        """`count` peers that start together."""
        together = {"PCCL_MASTER": self.address, "PCCL_MIN_PEERS": str(count)}
        made = [Worker(program, **{**together, **self.env, **env}) for _ in range(count)]
        self.workers += made
        return made


@contextmanager
def masters(count: int = 3, **env: str) -> Iterator[Masters]:
    """A run with several masters. Their log has INFO lines."""
    run = Masters(count, **{**FAST, "PCCL_LOG_LEVEL": "INFO", **env})
    try:
        yield run
    finally:
        for worker in run.workers:
            worker.destroy()


# Lines that a healthy run prints, too: whom a peer waits for at the start, and how to join.
_ONLY_TOLD = re.compile(
    r"(\[\d+\] )?(pccl run: to join: .*"
    r"|pccl\[\S+\] WARN: (waiting for (\d+ more peers?|the master at \S+ to answer)"
    r"|no master at .*; trying again))\n"
)


# Lines that members print when others come and go.
_NEWS = re.compile(r"(\[\d+\] )?pccl\[\S+\] WARN: (\d+ peers? joined: |lost rank ).*\n")


def complaints(text: str, *, news: bool = True) -> str:
    """The lines of an error stream that a healthy run does not have.

    `news`: members that come or go are among them.
    """
    lines = text.splitlines(keepends=True)
    return "".join(
        line
        for line in lines
        if not _ONLY_TOLD.fullmatch(line) and (news or not _NEWS.fullmatch(line))
    )


def wait_for_line(worker: Worker, pattern: str) -> str:
    """Returns the line of its error stream with that pattern, as soon as there is one."""
    deadline = time.monotonic() + 60
    while True:
        for line in worker.stderr().splitlines():
            if re.search(pattern, line):
                return line
        assert time.monotonic() < deadline, f"no {pattern!r}:\n{worker.stderr()}"
        time.sleep(0.02)


def eventually(
    look: Callable[[], Any],
    *,
    seconds: float = 30,
    said: Callable[[], object] = lambda: "it did not come about",
) -> Any:
    """What `look` returns, as soon as it is true. `said`: what explains that it does not."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, said()
        threading.Event().wait(0.05)
    return found


LISTENING, ESTABLISHED = "0A", "01"  # states in /proc/net/tcp


def sockets(pid: int, state: str) -> list[int]:
    """The local ports of a process's TCP sockets in that state."""
    held = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            held.add(os.readlink(descriptor))
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == state and f"socket:[{row[9]}]" in held
    ]


def free_ports(count: int) -> list[int]:
    """Ports where nobody listens.

    They are below those that the kernel gives to sockets without a port of their own, so nothing
    takes them before a process of the test listens there.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(10_000, max(given, 20_000))
    with ExitStack() as stack:
        made: list[socket.socket] = []
        while len(made) < count:
            address = ("127.0.0.1", random.SystemRandom().choice(below))
            with suppress(OSError):
                made.append(stack.enter_context(socket.create_server(address)))
        return [one.getsockname()[1] for one in made]


_ENDED = "XZ"  # states of threads that have ended


def _stat(thread: int) -> list[str]:
    """Its fields in /proc, from the state's letter on; X alone if it is gone."""
    try:
        with open(f"/proc/{thread}/stat") as stat:
            return stat.read().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X"]


def wait_until_stopped(worker: Worker) -> None:
    """Returns when SIGSTOP has stopped it."""
    eventually(lambda: worker.state() == "T", said=worker.stderr)


def wait_until_asleep(worker: Worker) -> None:
    """Returns when its main thread has slept for a while: it is inside its call, then."""
    _wait_until_asleep(worker.state, worker.stderr)


def wait_until_thread_sleeps(thread: int) -> None:
    """The same for any thread."""
    _wait_until_asleep(lambda: _stat(thread)[0], lambda: f"thread {thread}: {_stat(thread)[0]}")


def _wait_until_asleep(look: Callable[[], str], said: Callable[[], object]) -> None:
    """`look`: the letter of its state. `said`: what explains that it does not sleep."""
    asleep = 0
    deadline = time.monotonic() + 60
    while asleep < 20:
        assert time.monotonic() < deadline, said()
        state = look()
        # It looks around many times a second in its call, and may then wait for a processor.
        asleep = asleep + 1 if state == "S" else max(0, asleep - 1)
        time.sleep(0.01)


@contextmanager
def running(open_files: int | None = None, **env: str) -> Iterator[Run]:
    """A run with these settings. `open_files`: the most descriptors that its master may have."""
    run = Run(open_files, **env)
    try:
        yield run
    finally:
        for worker in run.workers:
            worker.destroy()
