"""`pccl doctor`: what it says of a machine that can join, and of what is in the way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import programs.doctor
import pytest
from programs import idle
from workers import running

import pccl
from pccl.tools.doctor import _ways

SECRET = "a secret of a test, which has enough characters"


def doctor(master: str, **env: str) -> tuple[int, dict[str, Any]]:
    """Its exit status, and its checks by name."""
    done = subprocess.run(
        [sys.executable, "-m", "pccl", "doctor", master, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] == (done.returncode == 0)
    return done.returncode, {check["name"]: check for check in answer["checks"]}


def test_all_is_well_where_a_master_listens_and_nobody_is_there_yet() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        status, checks = doctor(master.address)
    assert status == 0
    assert [checks[name]["verdict"] for name in ("name", "master", "versions")] == ["ok"] * 3
    assert checks["encryption"]["text"] == "none"
    assert checks["round trip"]["text"].endswith("ms to the master")
    assert checks["from outside"]["verdict"] == "ok"
    assert "nobody" in checks["peers"]["text"]
    assert {"shared memory", "open files"} <= checks.keys()


def test_a_master_with_a_secret_is_asked_with_it_alone() -> None:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as master:
        status, checks = doctor(master.address, PCCL_SECRET=SECRET)
        assert status == 0
        assert "TLS 1.3" in checks["encryption"]["text"]
        assert checks["from outside"]["verdict"] == "ok"
        for env in ({}, {"PCCL_SECRET": SECRET[::-1]}):
            status, checks = doctor(master.address, **env)
            assert status == 2
            assert checks["master"]["verdict"] == "fail"
            assert "secret" in checks["master"]["text"]


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "with a secret"])
def test_peers_of_a_run_are_tried_both_ways_and_the_run_goes_on(secret: str | None) -> None:
    env = {"PCCL_SECRET": secret} if secret else {}
    with running(**env) as run:
        peers = [run.peer(programs.doctor.reduce_when_told) for _ in range(2)]
        for worker in peers:
            worker.expect("in")
        status, checks = doctor(run.address, **env)
        assert status == 0
        assert checks["peers"]["verdict"] == "ok", checks
        assert "of 2 tried 2 are reached" in checks["peers"]["text"]
        assert "of 2 asked 2 reach this machine, 2 both ways" in checks["peers"]["text"]
        for worker in peers:
            worker.tell("go")
        for worker in peers:
            answer = worker.expect("done")
            assert answer["right"] and answer["size"] == 2


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """A program that is no peer, and answers so whatever is said; the port it listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection = stack.enter_context(server.accept()[0])
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "with a secret"])
def test_who_listens_where_a_member_should_is_not_taken_for_it(secret: str | None) -> None:
    env = {"PCCL_SECRET": secret} if secret else {}
    with (
        listening(b"") as silent,
        listening(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4) as web,
        pccl.MasterNode("127.0.0.1:0", secret=secret) as master,
        running(PCCL_HEARTBEAT_TIMEOUT="60", PCCL_RELAY="0", **env) as run,
    ):
        where = f"{silent}, {web}, {master.address}"
        member = run.peer(idle.wait_inside, PCCL_ADVERTISE=where, PCCL_NAME="oslo-1")
        member.expect("in")
        member.signal(signal.SIGSTOP)  # so that it does not answer, but for the kernel
        _, checks = doctor(run.address, **env)
    assert checks["peers"]["verdict"] != "ok"
    assert "of 1 tried 0 are reached" in checks["peers"]["text"]
    assert "neither end reaches the other: oslo-1 (to: " in checks["peers"]["text"]


def test_a_port_that_is_advertised_is_tried_where_the_master_sees_this_host() -> None:
    with listening(b"") as forwarded, pccl.MasterNode("127.0.0.1:0") as master:
        named = f"198.51.100.4:7, localhost:{forwarded.rpartition(':')[2]}"
        status, checks = doctor(master.address, PCCL_ADVERTISE=named)
        assert status == 0
        assert checks["from outside"]["verdict"] == "ok"
        port = forwarded.rpartition(":")[2]
        assert checks["from outside"]["text"].endswith(f"127.0.0.1, port {port}")
        assert "198.51.100.4:7" in checks["advertised"]["text"]
        assert "localhost" not in checks["advertised"]["text"]
    with socket.socket() as taken, pccl.MasterNode("127.0.0.1:0") as master:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = str(taken.getsockname()[1])
        status, checks = doctor(master.address, PCCL_ADVERTISE=f"127.0.0.1:{port}")
        assert status == 0
        assert checks["from outside"]["verdict"] == "ok"  # at its own port
        assert not checks["from outside"]["text"].endswith(f"port {port}")
        assert "advertised" not in checks


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "fail"),
        ({"relays": True}, "warn"),
        ({"size": 3}, "warn"),  # one was not tried, and may be reached
        ({"untested": ["198.51.100.4:40000"]}, "warn"),
        ({"master_reached_us": ("", "busy", "")}, "warn"),  # and a member was not asked
        ({"we_reached_members": [("a" * 32, "", ""), ("b" * 32, "10.0.0.2:5000", "")]}, "warn"),
        ({"members_reached_us": [("a" * 32, "yes", "")]}, "warn"),
    ],
)
def test_it_says_cannot_join_only_where_nothing_is_left_to_hope_for(
    changes: dict[str, Any], verdict: str
) -> None:
    found = {
        "port": 5000,
        "asked": 5000,
        "seen": "192.0.2.7",
        "master_reached_us": ("", "no", "no answer"),
        "untested": [],
        "size": 2,
        "we_reached_members": [("a" * 32, "", "no answer"), ("b" * 32, "", "no answer")],
        "members_reached_us": [("a" * 32, "no", "no answer")],
        "relays": False,
    }
    checks = {check.name: check for check in _ways(found | changes)}
    assert checks["peers"].verdict == verdict


def test_a_master_that_is_not_there_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, checks = doctor(address)
    assert status == 2
    assert checks["master"]["verdict"] == "fail"
    assert "refused" in checks["master"]["text"]
    assert checks["master"]["text"].count(address) == 1


def test_a_name_that_nobody_has_is_named() -> None:
    status, checks = doctor("a..b:48148")
    assert status == 2
    assert checks["name"]["verdict"] == "fail"
    assert "a..b" in checks["name"]["text"]


def test_what_is_no_master_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)

        thread = threading.Thread(target=answer)
        thread.start()
        status, checks = doctor(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert status == 2
    assert checks["master"]["verdict"] == "fail"


def test_a_port_that_is_taken_is_named() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            status, checks = doctor(master.address, PCCL_PORT=str(taken.getsockname()[1]))
    assert status == 1
    assert "PCCL_PORT" in checks["own port"]["text"]


def test_a_name_to_listen_at_that_nobody_has_is_named() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        status, checks = doctor(master.address, PCCL_BIND="a..b")
    assert status == 1
    assert "a..b" in checks["own port"]["text"]


def test_the_screen_ends_with_one_plain_sentence() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        done = subprocess.run(
            [sys.executable, "-m", "pccl", "doctor", master.address],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "This machine can join."
    assert len(done.stdout.splitlines()) <= 24
