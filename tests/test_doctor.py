"""`pccl doctor`: what it says of a machine that can join, and of what is in the way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

from workers import running

import pccl


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
    secret = "a secret of a test, which has enough characters"
    with pccl.MasterNode("127.0.0.1:0", secret=secret) as master:
        status, checks = doctor(master.address, PCCL_SECRET=secret)
        assert status == 0
        assert "TLS 1.3" in checks["encryption"]["text"]
        assert checks["from outside"]["verdict"] == "ok"
        for env in ({}, {"PCCL_SECRET": secret[::-1]}):
            status, checks = doctor(master.address, **env)
            assert status == 1
            assert checks["master"]["verdict"] == "fail"
            assert "secret" in checks["master"]["text"]


def test_peers_of_a_run_are_tried_both_ways_and_the_run_goes_on() -> None:
    peer = """
    comm = start(min_peers=2)
    pccl.barrier()
    say(event="in")
    hear()
    total, info = pccl.allreduce(x(), return_info=True)
    say(event="done", right=bool((total == expected(info)).all()), size=info.world_size)
    """
    with running() as run:
        peers = [run.peer(peer) for _ in range(2)]
        for worker in peers:
            worker.expect("in")
        status, checks = doctor(run.address)
        assert status == 0
        assert checks["peers"]["verdict"] == "ok", checks
        assert "of 2 tried 2 are reached" in checks["peers"]["text"]
        assert "of 2 asked 2 reach this machine, 2 both ways" in checks["peers"]["text"]
        for worker in peers:
            worker.tell("go")
        for worker in peers:
            answer = worker.expect("done")
            assert answer["right"] and answer["size"] == 2


def test_a_master_that_is_not_there_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        status, checks = doctor(f"127.0.0.1:{taken.getsockname()[1]}")
    assert status == 1
    assert checks["master"]["verdict"] == "fail"
    assert "refused" in checks["master"]["text"]


def test_a_name_that_nobody_has_is_named() -> None:
    status, checks = doctor("a..b:48148")
    assert status == 1
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
    assert status == 1
    assert checks["master"]["verdict"] == "fail"


def test_a_port_that_is_taken_is_named() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            status, checks = doctor(master.address, PCCL_PORT=str(taken.getsockname()[1]))
    assert status == 1
    assert "PCCL_PORT" in checks["own port"]["text"]


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
