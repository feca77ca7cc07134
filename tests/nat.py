"""Hosts on one network, some of them behind a NAT.

Every NAT masquerades (nftables), and drops packets from outside that nobody asked for. The networks
behind two NATs have the same numbers, as homes do.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from namespaces import Host, ip

_RULES = """
table ip nat {{
  chain in {{ type nat hook prerouting priority -100; {forwards} }}
  chain out {{ type nat hook postrouting priority 100; oifname "wan" masquerade; }}
}}
table ip filter {{
  chain input {{
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    iifname "lan" accept
  }}
  chain forward {{
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname "lan" accept
    ct status dnat accept
  }}
}}
"""


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot make NATs; None if it can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs the ip command"
    if shutil.which("nft") is None:
        return "needs nftables"
    name = f"pccl{os.getpid()}t"
    try:
        ip("netns", "add", name)
        try:
            _nft(name, _RULES.format(forwards=""))
        finally:
            ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"cannot make a NAT: {error.stderr}"
    return None


def _nft(namespace: str, rules: str) -> None:
    subprocess.run(
        ["ip", "netns", "exec", namespace, "nft", "-f", "-"],
        input=rules,
        capture_output=True,
        text=True,
        check=True,
    )


def forget_after(nat: int, seconds: int) -> None:
    """Has that NAT forget connections that were idle for so long."""
    for setting in (f"timeout_established={seconds}", "loose=0"):
        name = f"net.netfilter.nf_conntrack_tcp_{setting}"
        ip("netns", "exec", f"pccl{os.getpid()}n{nat}", "sysctl", "-qw", name)


def forget(host: Host, ends: Iterable[tuple[str, str]]) -> None:
    """Has the network forget these connections of that host (this end, the other end)."""
    rules = []
    for here, there in ends:
        (_, _, mine), (_, _, other) = here.rpartition(":"), there.rpartition(":")
        rules.append(f"add rule ip forgotten in tcp sport {other} tcp dport {mine} drop")
        rules.append(f"add rule ip forgotten out tcp sport {mine} tcp dport {other} drop")
    chains = [
        f"add chain ip forgotten {name} {{ type filter hook {hook} priority 0; }}"
        for name, hook in (("in", "input"), ("out", "output"))
    ]
    _nft(host.name, "\n".join(["add table ip forgotten", *chains, *rules, ""]))


def address_of_nat(nat: int) -> str:
    """The address that the outside sees of hosts behind it."""
    return f"10.77.3.{100 + nat}"


@contextmanager
def hosts(
    where: Sequence[int | None], forwards: dict[int, tuple[int, int]] | None = None
) -> Iterator[list[Host]]:
    """A host for each entry: behind the NAT of that number, or (None) without one.

    `forwards[nat] = (port, to)`: the NAT forwards `port` to port `to` of the first host behind it.
    """
    prefix = f"pccl{os.getpid()}"
    outside = f"{prefix}o"
    nats = sorted({nat for nat in where if nat is not None})
    with ExitStack() as stack:

        def namespace(name: str) -> str:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
            return name

        def network(name: str, device: str, address: str) -> None:
            ip(*f"-n {name} link add {device} type bridge".split())
            ip(*f"-n {name} addr add {address}/24 dev {device}".split())
            ip(*f"-n {name} link set {device} up".split())

        def plug(name: str, device: str, into: str, bridge: str, port: str) -> None:
            ip(*f"-n {into} link add {port} type veth peer name {device} netns {name}".split())
            ip(*f"-n {into} link set {port} master {bridge} up".split())
            ip(*f"-n {name} link set {device} up".split())

        # Packets to an address that nobody has get no answer.
        network(namespace(outside), "net", "10.77.3.254")
        for nat in nats:
            name = namespace(f"{prefix}n{nat}")
            plug(name, "wan", outside, "net", f"nat{nat}")
            ip(*f"-n {name} addr add {address_of_nat(nat)}/24 dev wan".split())
            network(name, "lan", "192.168.1.1")
            inside = forwards.get(nat) if forwards else None
            rule = f"tcp dport {inside[0]} dnat to 192.168.1.2:{inside[1]};" if inside else ""
            _nft(name, _RULES.format(forwards=rule))
            ip("netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        made = []
        for i, nat in enumerate(where):
            name = namespace(f"{prefix}h{i}")
            if nat is None:
                plug(name, "eth", outside, "net", f"host{i}")
                address, gateway = f"10.77.3.{i + 1}", "10.77.3.254"
            else:
                plug(name, "eth", f"{prefix}n{nat}", "lan", f"host{i}")
                address, gateway = f"192.168.1.{2 + where[:i].count(nat)}", "192.168.1.1"
            ip(*f"-n {name} addr add {address}/24 dev eth".split())
            ip(*f"-n {name} route add default via {gateway}".split())
            made.append(Host(name, address))
        yield made
