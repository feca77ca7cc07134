"""Network namespaces as hosts: each has its own network and shares no memory with the others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pytest
from programs import master, netns
from workers import Program, Worker

# Makes so many hosts on one network, each with an IP version of its own if that is given.
Lab = Callable[..., list["Host"]]
_PORT = 48148  # each namespace has its own
_T = TypeVar("_T")


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Host:
    """A namespace with one interface, `eth`, on a network with the others."""

    name: str
    address: str
    address6: str = ""  # IPv6, where it has both

    def sent(self, device: str = "eth") -> int:
        """Bytes that have left this host, headers included; through "lo": that stayed in it."""
        (link,) = json.loads(ip("-n", self.name, "-s", "-j", "link", "show", "dev", device))
        return int(link["stats64"]["tx"]["bytes"])


def inside(host: Host, make: Callable[[], _T]) -> _T:
    """What `make` returns on that host. Sockets made so stay there."""

    # Only that thread of this process is there.
    with ThreadPoolExecutor(1, initializer=netns.enter, initargs=(host.name,)) as thread:
        return thread.submit(make).result()


@contextmanager
def namespaces(count: int, versions: Sequence[str] = ()) -> Iterator[list[Host]]:
    """That many hosts on one network; skips the test where they cannot be made.

    `versions`: of IP, of each host: "4" (the default), "6" or "46".
    """
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command")
    prefix = f"pccl{os.getpid()}"
    hosts = []
    for i, version in enumerate(versions or ["4"] * count):
        addresses = {"4": f"10.77.3.{i + 1}", "6": f"fd77::{i + 1}"}
        hosts.append(Host(f"{prefix}h{i}", *(addresses[number] for number in version)))
    switch = f"{prefix}s"
    with ExitStack() as stack:
        try:
            for name in (switch, *(host.name for host in hosts)):
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for i, host in enumerate(hosts):
                ip(
                    *f"-n {switch} link add port{i} type veth peer name eth netns {host.name}".split()
                )
                ip(*f"-n {switch} link set port{i} master bridge up".split())
                for address in filter(None, (host.address, host.address6)):
                    usable = "/64 nodad" if ":" in address else "/24"  # at once
                    ip(*f"-n {host.name} addr add {address}{usable} dev eth".split())
                ip(*f"-n {host.name} link set eth up".split())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces: {error.stderr}")
        yield hosts


def at(address: str) -> str:
    """A master there."""
    return f"[{address}]:{_PORT}" if ":" in address else f"{address}:{_PORT}"


def worker(program: Program, host: Host, **env: str) -> Worker:
    """A process of that host."""
    return Worker(program, TEST_NETNS=host.name, **env)


class HostsRun:
    """A master on one host, and its peers on any."""

    def __init__(self, host: Host, env: dict[str, str]) -> None:
        self.env = env
        self.workers: list[Worker] = []
        self.address = at(host.address)
        everywhere = "[::]" if ":" in host.address + host.address6 else "0.0.0.0"
        self._serve = partial(master.serve, f"{everywhere}:{_PORT}")
        self.master = self.peer(self._serve, host)
        self.master.expect("listening")

    def restart_master(self, host: Host) -> None:
        """A new master in the old one's place, with no memory of the run."""
        self.master.process.kill()
        self.master.ends()
        self.master = self.peer(self._serve, host)
        self.master.expect("listening")

    def peer(self, program: Program, host: Host, **env: str) -> Worker:
        settings = {"PCCL_MASTER": self.address, "PCCL_BIND": ""}
        self.workers.append(worker(program, host, **(settings | self.env | env)))
        return self.workers[-1]


@contextmanager
def running_on(host: Host, **env: str) -> Iterator[HostsRun]:
    run = HostsRun(host, env)
    try:
        yield run
    finally:
        for worker in run.workers:
            worker.destroy()
