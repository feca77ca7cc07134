"""Processes that need torch, forked from one that has imported it: see fork_server.py."""

from __future__ import annotations

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
_TOO_LATE = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_DEVICE_BACKEND_AUTOLOAD")
LIMIT = 60  # seconds, for the import of torch on a busy machine
# Tests have more processes than the machine has processors.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class _Server:
    def __init__(self) -> None:
        self.env = os.environ | _ONE_THREAD
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            script = str(Path(fork_server.__file__))
            self._process = subprocess.Popen(
                [sys.executable, script, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=self.env,
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
            socket.send_fds(self._socket, [data], fds)
            answer = self._socket.recv(4)
        assert answer, "the process that forks others has ended"
        return int.from_bytes(answer, "little")


def _end(socket: socket.socket, process: subprocess.Popen[bytes]) -> None:
    socket.close()
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_servers: list[_Server] = []  # the one of this process, once it is needed


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
    ) -> None:
        """Runs `command`, a script and its arguments."""
        if not _servers or _servers[-1].ended():
            _servers.append(_Server())
        server = _servers[-1]

        def usual(name: str) -> str | None:
            """The test process's own value, where the server has one thread instead."""
            return os.environ.get(name) if name in _ONE_THREAD else server.env.get(name)

        names = {name for name in env.keys() | server.env.keys() if name.startswith(_TOO_LATE)}
        late = [name for name in names if env.get(name) not in (server.env.get(name), usual(name))]
        assert not late, f"too late for a process that is forked: {late}"
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
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            status = os.read(self._report, 4)
            os.close(self._report)
            # An empty report: the process that forks others has ended.
            status = status or int(signal.SIGKILL).to_bytes(4, "little")
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended, and this is not reported yet
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
