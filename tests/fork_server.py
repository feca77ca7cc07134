"""Starts scripts in processes that have imported some libraries already.

    python fork_server.py SOCKET KIND

An import of torch takes some seconds of CPU time, and hundreds of tests need ranks that have it.
One of NumPy takes a tenth of a second, and nearly all others need it. This process imports what its
kind has once, and forks for each request on the socket with that number. The child runs the script
as `python SCRIPT ARGUMENTS` would. The seed of string hashes is the same in all children: what may
depend on it belongs in a process of its own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

PRELOADED = {
    "torch": (
        "torch",
        "torch._dynamo",
        "torch._dynamo.polyfills.loader",
        "torch.distributed",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
        "torch.nn.parallel",
        "torch.profiler",
        "sklearn.datasets",
    ),
    # These are modules that pccl imports. Each child imports pccl itself, which is tested, too.
    "numpy": (
        "numpy",
        "numpy.typing",
        "argparse",
        "asyncio",
        "ctypes",
        "difflib",
        "hashlib",
        "html",
    ),
}
DESCRIPTORS = 4  # the child's standard input, output and error, and where its end is reported
LARGEST = 1 << 18  # bytes of a request


def receive(server: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its descriptors; None at the end."""
    data, fds, _, _ = socket.recv_fds(server, LARGEST, DESCRIPTORS)
    return (json.loads(data), fds) if data else None


def become(request: dict[str, Any], fds: list[int]) -> None:
    """In the child: takes over the streams, the environment and the folder of the request."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.closerange(3, 1 << 16)
    # Other kinds of files than the parent's, which Python asked when it opened these.
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), write_through=unbuffered)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def serve(server: socket.socket) -> list[str] | None:
    """Forks for each request. Returns None at the end, and in a child the script's command."""
    children: dict[int, int] = {}  # descriptor of the process: where its end is reported
    selector = selectors.DefaultSelector()
    selector.register(server, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd != server.fileno():
                selector.unregister(key.fd)
                _, status = os.waitpid(key.data, 0)
                with suppress(BrokenPipeError):  # nobody waits for it
                    os.write(children[key.fd], status.to_bytes(4, "little"))
                os.close(children.pop(key.fd))
                os.close(key.fd)
                continue
            found = receive(server)
            if found is None:
                return None
            request, fds = found
            pid = os.fork()
            if pid == 0:
                selector.close()
                server.close()
                become(request, fds)
                command: list[str] = request["command"]
                return command
            *streams, report = fds
            for fd in streams:
                os.close(fd)
            process = os.pidfd_open(pid)
            children[process] = report
            selector.register(process, selectors.EVENT_READ, pid)
            server.send(pid.to_bytes(4, "little"))


def leave() -> None:
    """Ends this process as the interpreter would, but frees none of torch's objects.

    That takes two seconds of CPU time, and all memory that the parent shares with this process.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test's process ends this one
    server = socket.socket(fileno=int(sys.argv[1]))
    kind = sys.argv[2]
    gc.disable()  # torch makes two million objects: reading them again and again takes 15 s
    for name in PRELOADED[kind]:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    command = serve(server)
    if command is None:
        os._exit(0)
    script, *_ = sys.argv = command
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
    if kind == "torch":
        leave()


if __name__ == "__main__":
    main()
