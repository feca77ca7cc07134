"""Runs over IPv6: on loopback, between hosts with IPv6 only, and between those and others."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import namespaces
import pytest
from programs import doctor, idle, ipv6
from workers import Worker

import pccl

SECRET = "a secret of these tests, and of no other run"


def ipv6_works() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not ipv6_works(), reason="there is no IPv6 here")


def reduce_once_more(peers: Sequence[Worker]) -> None:
    for peer in peers:
        peer.tell("go")
    for peer in peers:
        peer.expect("again", 60)


def all_is_well(asked: Worker, reached: int) -> dict[str, Any]:
    """The checks of a doctor that reached so many peers both ways."""
    found = asked.expect("doctor", 60)
    assert found["status"] == 0, found
    checks = {check["name"]: check for check in json.loads(found["screen"])["checks"]}
    assert f" {reached} both ways" in checks["peers"]["text"], checks
    assert checks["from outside"]["verdict"] == "ok", checks
    return checks


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "with a secret"])
@pytest.mark.parametrize("listen", ["[::1]:0", "[::]:0"])
def test_a_run_on_loopback(listen: str, secret: str | None) -> None:
    env = {"PCCL_SHM": "0", "PCCL_MIN_PEERS": "2"} | ({"PCCL_SECRET": secret} if secret else {})
    with pccl.MasterNode(listen, secret=secret) as master:
        host, _, port = master.address.rpartition(":")
        # One that listens at all its addresses does so at those of IPv4, too.
        ways = ["[::1]", "127.0.0.1" if host == "[::]" else "[::1]"]
        env["PCCL_BIND"] = host.strip("[]")
        workers = [Worker(ipv6.reduce, PCCL_MASTER=f"{way}:{port}", **env) for way in ways]
        try:
            for peer in workers:
                peer.expect("reduced", 60)
            workers.append(Worker(doctor.look, PCCL_MASTER=f"[::1]:{port}", **env))
            assert "::1, port" in all_is_well(workers[-1], 2)["from outside"]["text"]
            reduce_once_more(workers[:2])
        finally:
            for worker in workers:
                worker.destroy()


@pytest.mark.root
@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "with a secret"])
def test_a_run_between_hosts_that_have_nothing_else(secret: str | None) -> None:
    env = {"PCCL_MIN_PEERS": "3"} | ({"PCCL_SECRET": secret} if secret else {})
    with (
        namespaces.namespaces(3, ["6"] * 3) as hosts,
        namespaces.running_on(hosts[0], **env) as run,
    ):
        peers = [run.peer(ipv6.reduce, host) for host in hosts]
        for peer in peers:
            peer.expect("reduced", 60)
        checks = all_is_well(run.peer(doctor.look, hosts[2]), 3)
        assert hosts[2].address in checks["from outside"]["text"]
        reduce_once_more(peers)


@pytest.mark.root
@pytest.mark.parametrize("versions", [("46", "6", "46"), ("46", "4", "6", "46")])
def test_a_run_between_hosts_of_which_some_have_the_one_and_some_the_other(
    versions: tuple[str, ...],
) -> None:
    # Two that have no way to each other are no neighbours, and nothing is relayed.
    settings = {
        "PCCL_MIN_PEERS": str(len(versions)),
        "PCCL_RELAY": "0",
        "PCCL_HEARTBEAT_INTERVAL": "0.3",
        "PCCL_HEARTBEAT_TIMEOUT": "4",
        "PCCL_LINK_TIMEOUT": "1.5",
    }
    with (
        namespaces.namespaces(len(versions), versions) as hosts,
        namespaces.running_on(hosts[0], **settings) as run,
    ):
        masters = {"6": namespaces.at(hosts[0].address6), "4": namespaces.at(hosts[0].address)}
        peers = [
            run.peer(ipv6.reduce, host, PCCL_MASTER=masters[version[-1]])
            for host, version in zip(hosts, versions, strict=True)
        ]
        for peer in peers:
            peer.expect("reduced", 60)
        for host, version in zip(hosts, versions, strict=True):
            if len(version) == 1:
                asked = run.peer(doctor.look, host, PCCL_MASTER=masters[version])
                all_is_well(asked, sum(version in other for other in versions))
        reduce_once_more(peers)


@pytest.mark.root
@pytest.mark.parametrize(
    ("listen", "version"), [("0.0.0.0", "4"), ("[::]", "4"), ("[::]", "6"), ("[::]", "46")]
)
def test_the_line_that_a_master_prints_leads_to_it(listen: str, version: str) -> None:
    with namespaces.namespaces(2, [version] * 2) as hosts:
        for number in version:
            namespaces.ip(*f"-n {hosts[0].name} -{number} route add default dev eth".split())
        workers = [namespaces.worker(partial(ipv6.serve_with_secret, f"{listen}:0"), hosts[0])]
        try:
            assert workers[0].next()["line"].startswith("listening on ")
            line = workers[0].next()["line"]
            words = dict(word.split("=", 1) for word in line.split() if "=" in word)
            program = partial(idle.wait, min_peers=1)
            workers.append(namespaces.worker(program, hosts[1], PCCL_BIND="", **words))
            workers[1].expect("in")
        finally:
            for worker in workers:
                worker.destroy()
