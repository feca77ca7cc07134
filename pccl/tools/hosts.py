"""`pccl run --hosts`: a program as peers on several machines, which this one reaches by ssh.

A process of `pccl.tools.there` on each machine starts the ranks. It hears on its standard input
what to start, with the secret, and later the signals for the ranks. The end of that input ends
them.

Longer than 200 lines, since the checks of the arguments and the contract of `launch_on` are here,
with the launch itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import BinaryIO

from pccl import __version__
from pccl.communicator import MasterNode
from pccl.departure import drain_seconds
from pccl.master import make_secret
from pccl.tools.parsing import Misuse
from pccl.tools.run import MAX_RANKS, ONE_PROCESS, Launch, Plan

__all__ = ["Host", "launch_on", "parse_hosts", "split_address"]

# Options of OpenSSH: no terminal, no question, and an end when the other machine does not answer.
_SETTINGS = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=10")
_SSH_OPTIONS = ("-T", *(word for setting in _SETTINGS for word in ("-o", setting)))
_GRACE_SECONDS = 8.0  # more than each machine gives its own ranks


@dataclass(frozen=True)
class Host:
    """A machine, as ssh knows it, and the number of its ranks."""

    name: str
    ranks: int


def parse_hosts(text: str) -> list[Host]:
    """Reads "a:4,b:4": names for ssh, each with its number of ranks, one if there is none.

    Raises:
        ValueError: It is something else.
    """
    hosts = []
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not colon:
            name, count = count, "1"
        if not name or name.startswith("-") or not count.isascii() or not count.isdigit():
            raise ValueError(f"must be hosts with numbers of ranks, as in a:4,b:4, not {text!r}")
        hosts.append(Host(name, int(count)))
    if not 0 < sum(host.ranks for host in hosts) <= MAX_RANKS or any(not h.ranks for h in hosts):
        raise ValueError(f"must be 1 to {MAX_RANKS} ranks, at least one on each host, not {text!r}")
    return hosts


def split_address(text: str) -> tuple[str, int]:
    """The parts of "host:port". The port may be missing: 0."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        return text.removesuffix(":"), 0
    return host, int(port)


def launch_on(
    hosts: Sequence[Host],
    command: Sequence[str],
    *,
    address: str | None,
    ssh: str,
    python: str,
    pass_on: Sequence[str],
    elastic: bool,
    restarts: int,
    show_join: bool,
) -> int:
    """Runs `command` on each of the hosts and waits. Call it from the main thread.

    Args:
        hosts: The machines, each with its number of ranks.
        command: The program and its arguments, as they are there.
        address: The master's, which runs here, as the hosts reach it: "host" or "host:port".
            None: this machine's address towards the first host, and any free port.
        ssh: The command that reaches a machine, with options.
        python: The interpreter there, in whose environment pccl is installed.
        pass_on: Variables for the ranks: NAME for this process's value, or NAME=VALUE. Settings of
            pccl are always passed on.
        elastic: Go on without ranks or hosts that fail.
        restarts: How often each rank that fails is started again.
        show_join: Print the line to join with, with the run's secret.

    Returns:
        The exit status, as `pccl.tools.run.launch` has it. A host that ssh cannot reach has 255.

    Raises:
        Misuse: There is no such command for `ssh`, no address is known, or one of the variables is
            not set.
        PCCLError: The master could not be started.
    """
    reach = _reach(ssh)
    host, port = split_address(address) if address else (_own_address(reach, hosts[0].name), 0)
    secret = make_secret()
    listen = "[::]" if host.startswith("[") else "0.0.0.0"
    if host in ("localhost", "[::1]") or host.startswith("127."):
        listen = host  # all hosts are this machine
    with MasterNode(f"{listen}:{port}", secret=secret) as master:
        ranks = sum(each.ranks for each in hosts)
        environment = {
            **{name: text for name, text in os.environ.items() if name.startswith("PCCL_")},
            **_chosen(pass_on),
        }
        environment = {k: v for k, v in environment.items() if k not in ONE_PROCESS}
        environment |= {
            "PCCL_MASTER": f"{host}:{master.address.rpartition(':')[2]}",
            "PCCL_SECRET": secret,
            "PCCL_MIN_PEERS": str(ranks),
        }
        Launch.say_how_to_join(environment, command, show_join)
        drain = drain_seconds("run")
        plan = Plan(len(hosts), elastic, 0, _GRACE_SECONDS, drain, peers=ranks)
        there = f"exec {shlex.quote(python)} -m pccl.tools.there"
        order = {"version": __version__, "folder": os.getcwd(), "command": list(command)}
        return asyncio.run(
            _Hosts(hosts, [*reach, *_SSH_OPTIONS], there, order, environment, restarts, plan).run()
        )


def _reach(ssh: str) -> list[str]:
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise Misuse(f"--ssh is not a command: {error}; correct its quotes") from None
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        raise Misuse(f"there is no program {program!r}; install OpenSSH's client, or correct --ssh")
    return words


def _own_address(reach: Sequence[str], name: str) -> str:
    """This machine's address towards a host of ssh."""
    try:
        settings = subprocess.run(
            [*reach, "-G", name], capture_output=True, text=True, check=True, timeout=10
        ).stdout
        words = dict(line.split(" ", 1) for line in settings.splitlines() if " " in line)
        (family, kind, _, _, to), *_ = socket.getaddrinfo(
            words["hostname"], int(words.get("port", "22")), socket.AF_INET, socket.SOCK_DGRAM
        )
        with socket.socket(family, kind) as probe:
            probe.connect(to)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
        raise Misuse(
            f"cannot tell which address of this machine {name} can reach ({error}); "
            "give it with --address"
        ) from None


def _chosen(pass_on: Sequence[str]) -> dict[str, str]:
    chosen = {}
    for word in pass_on:
        name, given, text = word.partition("=")
        if not given and name not in os.environ:
            raise Misuse(f"--env {name}: it is not set here; write --env {name}=VALUE")
        chosen[name] = text if given else os.environ[name]
    return chosen


class _Hosts(Launch):
    """The hosts of a run. What Launch calls a rank is a host here."""

    def __init__(
        self,
        hosts: Sequence[Host],
        reach: Sequence[str],
        there: str,
        order: Mapping[str, object],
        environment: dict[str, str],
        restarts: int,
        plan: Plan,
    ) -> None:
        super().__init__(list(reach), environment, plan)
        self._hosts = hosts
        self._there = there
        self._order = order
        self._rank_restarts = restarts

    async def _start(self, rank: int, more: Mapping[str, str]) -> None:
        host = self._hosts[rank]
        first = sum(each.ranks for each in self._hosts[:rank])
        plan = Plan(
            host.ranks,
            self._plan.elastic,
            self._rank_restarts,
            5.0,
            self._plan.drain,
            first,
            self._plan.peers,
        )
        order = {**self._order, "environment": self._environment, "plan": asdict(plan)}
        out = await self._pipe(rank, sys.stdout.buffer)
        err = await self._pipe(rank, sys.stderr.buffer)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                host.name,
                self._there,
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,  # the terminal's Ctrl-C reaches only us
            )
        finally:
            os.close(out)
            os.close(err)
        self._processes[rank] = process
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")

    def _signal(self, process: asyncio.subprocess.Process, number: int) -> None:
        if number == signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        elif process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(f"{int(number)}\n".encode())

    def _name(self, rank: int) -> str:
        return f"host {self._hosts[rank].name}"

    def _peers(self, rank: int) -> int:
        return self._hosts[rank].ranks

    def _prefix(self, rank: int, sink: BinaryIO) -> bytes:
        return b""  # each line has its rank's
