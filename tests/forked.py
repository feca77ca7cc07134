"""Processes that are forked from one that has imported libraries: see fork_server.py."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import fork_server

# Read when libraries are loaded: too late for a forked process.
_TOO_LATE = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)
LIMIT = 60  # seconds, for the import of torch on a busy machine
# Tests have more processes than the machine has processors.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_LOADED_WITH = os.environ | _ONE_THREAD  # all servers' environment


class _Server:
    def __init__(self, kind: str) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            script = str(Path(fork_server.__file__))
            self._process = subprocess.Popen(
                [sys.executable, script, str(theirs.fileno()), kind],
                stdin=subprocess.DEVNULL,
                env=_LOADED_WITH,
                pass_fds=[theirs.fileno()],
            )
        self._socket.settimeout(LIMIT)
        weakref.finalize(self, _end, self._socket, self._process)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def start(self, request: Mapping[str, object], fds: Sequence[int]) -> int:
        """Returns the id of the new process."""
        with self._lock:
            data = json.dumps(request).encode()
            assert len(data) <= fork_server.LARGEST
            try:
                socket.send_fds(self._socket, [data], fds)
                answer = self._socket.recv(4)
            except BaseException:
                self._process.kill()  # or the next request would get this one's answer
                raise
        assert answer, "the process that forks others has ended"
        return int.from_bytes(answer, "little")


def _end(socket: socket.socket, process: subprocess.Popen[bytes]) -> None:
    socket.close()
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# They start at their first use. Two by turns are for NumPy, so that members of one run have
# different seeds of string hashes.
_servers: dict[str, _Server] = {}
_turns = itertools.cycle(("numpy", "numpy again"))


def _server(name: str) -> _Server:
    if name not in _servers or _servers[name].ended():
        _servers[name] = _Server(name.partition(" ")[0])
    return _servers[name]


def _too_late(env: Mapping[str, str]) -> list[str]:
    """The variables that differ from those with which a server has loaded its libraries."""

    def usual(name: str) -> str | None:
        """The test process's own value, where the servers have one thread instead."""
        return os.environ.get(name) if name in _ONE_THREAD else _LOADED_WITH.get(name)

    names = {name for name in env.keys() | _LOADED_WITH.keys() if name.startswith(_TOO_LATE)}
    return [name for name in names if env.get(name) not in (_LOADED_WITH.get(name), usual(name))]


def may_be_forked(env: Mapping[str, str]) -> bool:
    """Whether a process with this environment is the same if it is forked."""
    return env.get("TEST_FORKS") != "0" and not _too_late(env)


class Forked:
    """A process, with those parts of `subprocess.Popen` that the tests use."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: IO[bytes] | int,
        stdout: IO[bytes] | int,
        stderr: IO[bytes] | int,
        env: Mapping[str, str],
        cwd: str | Path,
        kind: str = "torch",
    ) -> None:
        """Runs `command`, a script and its arguments. `kind`: of fork_server.PRELOADED."""
        late = _too_late(env)
        assert not late, f"too late for a process that is forked: {late}"
        server = _server(kind if kind == "torch" else next(_turns))
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        theirs: list[int] = []
        try:
            for number, stream in enumerate((stdin, stdout, stderr)):
                if stream == subprocess.PIPE:
                    reading, writing = os.pipe()
                    theirs.append(writing if number else reading)
                    if number == 0:
                        self.stdin = open(writing, "wb", buffering=0)
                    else:
                        assert number == 1
                        self.stdout = open(reading, "rb")
                elif stream == subprocess.STDOUT:
                    theirs.append(os.dup(theirs[1]))
                elif stream == subprocess.DEVNULL:
                    theirs.append(os.open(os.devnull, os.O_RDWR))
                else:
                    theirs.append(os.dup(stream if isinstance(stream, int) else stream.fileno()))
            self._report, reported = os.pipe()
            theirs.append(reported)
            request = {"command": list(command), "env": dict(env), "cwd": str(cwd)}
            self.pid = server.start(request, theirs)
        finally:
            for fd in theirs:
                os.close(fd)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            reported = select.poll()  # not select(): the descriptor may be a large number
            reported.register(self._report, select.POLLIN)
            if not reported.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            status = os.read(self._report, 4)
            os.close(self._report)
            if not status:  # the process that forks others has ended
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                status = int(signal.SIGKILL).to_bytes(4, "little")
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended, and this is not reported yet
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
