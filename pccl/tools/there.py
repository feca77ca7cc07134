"""The part of `pccl run --hosts` on each machine: starts ranks as it is told on standard input.

The first line says what to start, in JSON. Each further line is the number of a signal for the
ranks. The end of the input means that the launcher is gone: the ranks are asked to leave, and
ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from pccl import __version__
from pccl.tools import screen
from pccl.tools.parsing import MISUSE, Misuse
from pccl.tools.run import Launch, Plan, check_program, rank_environment, resolve

_MOST_BYTES = 1 << 22  # of the first line


class _There(Launch):
    def __init__(self, command: list[str], environment: dict[str, str], plan: Plan) -> None:
        super().__init__(command, environment, plan)
        self._hearing: asyncio.Task[None] | None = None

    def hear(self, source: asyncio.StreamReader) -> None:
        """Takes signals from `source` until it ends."""
        self._hearing = asyncio.ensure_future(self._hear(source))

    async def _hear(self, source: asyncio.StreamReader) -> None:
        try:
            while line := await source.readline():
                self._signals.put_nowait(int(line))
        finally:  # also after a line that is no number: ranks must not outlive their launcher
            self._signals.put_nowait(signal.SIGTERM)


async def _main() -> int:
    source = asyncio.StreamReader(limit=_MOST_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(source), sys.stdin
    )
    if not (first := await source.readline()):
        raise Misuse("the launcher ended before it said what to start")
    order: dict[str, Any] = json.loads(first)
    if order["version"] != __version__:
        raise Misuse(f"pccl is {__version__} here and {order['version']} at the launcher")
    if os.path.isdir(order["folder"]):
        os.chdir(order["folder"])
    else:
        Launch.say(f"there is no folder {order['folder']} on {_host()}: using {os.getcwd()}")
    # A shell of ssh has not activated an environment: "python" and "pccl" mean those of this one.
    own = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join([own, os.environ.get("PATH", os.defpath)])
    check_program(order["command"])
    plan = Plan(**order["plan"])
    environment = rank_environment({**os.environ, **order["environment"]}, plan.ranks)
    ranks = _There(resolve(order["command"]), environment, plan)
    ranks.hear(source)
    return await ranks.run()


def _host() -> str:
    return os.uname().nodename


def main() -> int:
    try:
        return asyncio.run(_main())
    except Misuse as error:
        screen.failure("pccl run", f"{_host()}: {error}")
        return MISUSE


if __name__ == "__main__":
    sys.exit(main())
