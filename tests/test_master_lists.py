"""All that takes a list of masters, while the first one of the list is gone: APIs and commands."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import clibrary
import pytest
from programs import master_lists, several_masters
from workers import FAST, Masters, Worker, eventually, free_ports, masters, wait_for_line

from pccl import _core, _masters, api
from pccl.errors import InvalidArgument, InvalidUsage, PCCLError
from pccl.master import make_secret


def needs_c(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs the C library."""
    for mark in clibrary.MARKS:
        test = mark(test)
    return test


def pccl(*arguments: str, **env: str) -> tuple[int, str, str]:
    """The command's exit status, and what it prints on its two streams."""
    done = subprocess.run(
        [sys.executable, "-m", "pccl", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )
    return done.returncode, done.stdout, done.stderr


def lose_the_first(run: Masters, number: signal.Signals = signal.SIGKILL) -> None:
    """Kills or stops the first master, and waits until the second one serves."""
    run.masters[0].signal(number)
    wait_for_line(run.masters[1], "taken over")


def trained(peers: list[Worker]) -> list[int]:
    """The number of members in a step of each of these."""
    for peer in peers:
        peer.tell(1)
    return [peer.expect("step", 60)["size"] for peer in peers]


# ---- the explicit API and the C API


def summed(peers: list[Worker], members: int) -> None:
    """Each of the first `members` peers lets that many in, and has the sum of what they gave."""
    for peer in peers:
        peer.tell(members)
    for peer in peers:
        answer = peer.expect("sum", 60)
        assert (answer["size"], answer["sum"]) == (members, 2**members - 1)


def test_the_explicit_api_connects_to_a_list_whose_first_master_is_gone() -> None:
    with masters() as run:
        program = master_lists.use_the_explicit_api
        peers = [*run.peers(1, partial(program, 0)), *run.peers(1, partial(program, 1))]
        summed(peers, 2)
        lose_the_first(run)
        summed(peers, 2)
        peers += run.peers(1, partial(program, 2))
        summed(peers, 3)


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
@needs_c
def test_c_takes_the_list_of_the_environment_if_its_address_is_in_it(
    library: Path, which: int
) -> None:
    with masters(PCCL_C_LIBRARY=str(library)) as run:
        program = partial(master_lists.use_c, address=run.addresses[which])
        peers = [*run.peers(1, partial(program, 0)), *run.peers(1, partial(program, 1))]
        summed(peers, 2)
        lose_the_first(run)
        summed(peers, 2)
        peers += run.peers(1, partial(program, 2))
        summed(peers, 3)


@needs_c
def test_c_asks_its_address_alone_if_the_list_does_not_have_it(library: Path) -> None:
    with masters(PCCL_C_LIBRARY=str(library)) as run:
        lists = {
            "no list": run.addresses[0],
            "others": ",".join(run.addresses[1:]),
        }
        for what, addresses in lists.items():
            program = partial(master_lists.fail_in_c, run.addresses[0])
            (peer,) = run.peers(1, program, PCCL_MASTER=addresses)
            failed = peer.expect("failed", 60)
            assert failed["result"] == "InvalidArgument", (what, failed)
            assert "and this peer has 1 address" in failed["text"], (what, failed)


# ---- commands


def doctor(masters: str) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """The exit status of the doctor, and the verdicts and texts of its checks by name."""
    status, out, err = pccl("doctor", masters, "--json")
    assert err == ""
    found: dict[str, list[tuple[str, str]]] = {}
    for check in json.loads(out)["checks"]:
        found.setdefault(check["name"], []).append((check["verdict"], check["text"]))
    return status, found


def test_the_doctor_says_which_masters_answer_and_which_one_serves() -> None:
    with masters() as run:
        first, second, third = run.addresses
        peers = run.peers(2, master_lists.train)
        for peer in peers:
            peer.expect("in")

        def said_of_the_first(verdict: str, what: str) -> None:
            status, checks = doctor(run.address)
            assert status == 0
            assert checks["master"] == [
                (verdict, f"{first}{what}"),
                ("ok", f"{second} answers and serves the group"),
                ("ok", f"{third} answers"),
            ]
            ((verdict, text),) = checks["peers"]
            assert verdict == "ok" and text.startswith("2 in the group; of 2 tried 2 are reached")

        lose_the_first(run)
        said_of_the_first("warn", ": Connection refused")
        run.restart(0)  # it knows nobody then
        said_of_the_first("ok", " answers")
        assert trained(peers) == [2, 2]


def test_the_doctor_knows_that_a_run_begins_at_the_first_master_only() -> None:
    with masters() as run:
        first, second, third = run.addresses
        assert doctor(run.address)[0] == 0
        run.kill(0)
        status, checks = doctor(run.address)
        assert status == 1
        assert [verdict for verdict, _ in checks["master"]] == ["warn", "ok", "ok"]
        ((verdict, text),) = checks["masters"]
        assert verdict == "fail" and first in text
        out = pccl("doctor", run.address)[1]
        assert out.splitlines()[-1].startswith("This machine cannot join: group 0 has no members")
        run.kill(1)
        run.kill(2)
        status, checks = doctor(run.address)
        assert status == 2
        assert [verdict for verdict, _ in checks["master"]] == ["warn"] * 3
        assert checks["masters"] == [("fail", "no master answers")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_status_and_commands_find_the_master_that_serves(number: signal.Signals) -> None:
    with masters() as run:
        peers = [
            worker
            for name in ("ada", "bob", "eve")
            for worker in run.peers(1, master_lists.train, PCCL_NAME=name, PCCL_MIN_PEERS="3")
        ]
        for peer in peers:
            peer.expect("in")
        lose_the_first(run, number)
        status, out, err = pccl("status", run.address, "--json")
        (group,) = json.loads(out)["groups"]
        assert (status, err) == (1, "")  # the first master does not answer
        states = [one["state"] for one in json.loads(out)["masters"]]
        assert states[0] == "no answer" and sorted(states[1:]) == ["serves", "stands by"]
        assert {member["name"] for member in group["members"]} == {"ada", "bob", "eve"}
        assert group["min_peers"] == 3  # what they asked the first master for
        status, out, err = pccl("kick", run.address, "bob")
        assert (status, err) == (0, "") and "(bob) of group 0" in out
        ada, bob, eve = peers
        bob.tell(1)
        told = bob.expect("out")
        assert told["kind"] == "Evicted" and "kicked by the operator" in told["text"]
        assert trained([ada, eve]) == [2, 2]
        status, out, err = pccl("kick", "bob", PCCL_MASTER=run.address)
        assert (status, out) == (2, "") and 'no peer of this run has the name or id "bob"' in err


def test_commands_are_refused_while_no_master_serves() -> None:
    with masters() as run:
        for arguments in (["kick", run.address, "bob"], ["pause-admission", run.address]):
            status, out, err = pccl(*arguments)
            assert (status, out) == (2, "") and "no master serves peers now" in err


def test_a_pause_of_admission_ends_with_the_master_that_was_asked() -> None:
    with masters() as run:
        peers = run.peers(2, master_lists.train)
        for peer in peers:
            peer.expect("in")
        status, out, err = pccl("pause-admission", PCCL_MASTER=run.address)
        assert (status, err) == (0, "") and "wait until admission is resumed" in out
        assert json.loads(pccl("status", run.address, "--json")[1])["admission_paused"]
        (late,) = run.peers(1, master_lists.train)
        late.expect("in")
        late.tell(1)
        wait_for_line(late, "paused admission")
        assert trained(peers) == [2, 2]
        lose_the_first(run)
        assert not json.loads(pccl("status", run.address, "--json")[1])["admission_paused"]
        step = 2
        while step == 2:  # until the newcomer has reached the second master
            step = max(trained(peers))
        assert step == 3 and late.expect("step")["size"] == 3


# ---- pccl master --peers


@contextmanager
def command(log: Path, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """`pccl master` with these arguments, which has printed where it listens."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "pccl", "master", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **env},
        )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("listening on "), said + log.read_text()
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def term_in(log: Path) -> int:
    """The term in which that master has taken over, as soon as it has."""
    text = eventually(lambda: log.read_text().partition("taken over with term ")[2], seconds=60)
    return int(text.split()[0])


def test_each_master_of_the_command_line_finds_its_place(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(make_secret())
    ports = free_ports(3)
    where = ",".join(f"127.0.0.1:{port}" for port in ports)
    listens = ["127.0.0.1:{}", "localhost:{}", "0.0.0.0:{}"]
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    peers: list[Worker] = []
    with ExitStack() as stack:
        served = [
            stack.enter_context(
                command(
                    log,
                    *("--listen", listen.format(port)),
                    *("--peers", where, "--secret-file", str(secret)),
                    **FAST,
                )
            )
            for log, listen, port in zip(logs, listens, ports, strict=True)
        ]
        try:
            env = {**FAST, "PCCL_MASTER": where, "PCCL_SECRET_FILE": str(secret)}
            for _ in range(3):
                peers.append(Worker(master_lists.train, **env, PCCL_MIN_PEERS="3"))
            for peer in peers:
                peer.expect("in", 60)
            # Master number i of n uses the terms k * n + i, and only the first one begins a run.
            assert trained(peers) == [3] * 3
            for place in (1, 2):
                served[place - 1].kill()
                assert term_in(logs[place]) % 3 == place
                assert trained(peers) == [3] * 3
        finally:
            for peer in peers:
                peer.destroy()


def test_a_master_that_is_in_no_place_of_the_list_says_so() -> None:
    port, other = free_ports(2)
    elsewhere = f"198.51.100.1:{port},203.0.113.1:{port}"
    here = f"127.0.0.1:{port},203.0.113.1:{port}"
    for listen, peers, what in (
        (f"0.0.0.0:{port}", elsewhere, "none"),
        (f"127.0.0.1:{port}", elsewhere, "none"),
        (f"127.0.0.1:{other}", here, "none"),
        (f"0.0.0.0:{port}", f"127.0.0.1:{port},127.0.0.2:{port}", "several"),
    ):
        status, out, err = pccl("master", "--insecure", "--listen", listen, "--peers", peers)
        assert (status, out) == (2, "")
        sentence = f"{what} of the masters may be the one on {listen}; give its place in the list"
        assert sentence in err and err.count("\n") == 1, err
    status, out, err = pccl("master", "--insecure", "--peers", here, "--place", "3")
    assert (status, out) == (2, "") and "--place must be in 1..2" in err


def test_a_place_is_found_by_host_and_port() -> None:
    far, farther = "198.51.100.1", "203.0.113.1"
    masters = [("127.0.0.1", 5001), (far, 5001), ("localhost", 5002), (farther, 5002)]
    assert _masters.place_of("0.0.0.0:5001", masters, "test") == 0
    assert _masters.place_of(f"{far}:5001", masters, "test") == 1
    assert _masters.place_of("127.0.0.1:5002", masters, "test") == 2
    assert _masters.place_of("[::]:5002", masters, "test") == 2
    with pytest.raises(InvalidArgument, match="none of the masters"):
        _masters.place_of("127.0.0.1:5003", masters, "test")


# ---- pccl.init(standby=True)


def answers(address: str) -> bool:
    """Whether a master answers there."""
    try:
        _core.ask_status(address)
    except PCCLError:
        return False
    return True


def test_a_standby_takes_the_place_that_is_free_and_serves_in_it() -> None:
    with masters() as run:
        run.kill(2)
        program: Any = partial(master_lists.train, standby=True)
        peers = run.peers(1, program, PCCL_MIN_PEERS="3")
        eventually(lambda: answers(run.addresses[2]))
        for _ in range(2):
            peers += run.peers(1, master_lists.train, PCCL_MIN_PEERS="3")
        for peer in peers:
            peer.expect("in", 60)
        for place, following in ((0, run.masters[1]), (1, peers[0])):
            run.kill(place)
            wait_for_line(following, "taken over")
            assert trained(peers) == [3] * 3
        (group,) = _core.ask_status(run.addresses[2])["groups"]
        assert len(group["members"]) == 3


def test_a_standby_listens_where_others_reach_it() -> None:
    # Debian's /etc/hosts has 127.0.1.1 for the machine's own name.
    for host in ("deb-host", "localhost-a"):
        assert _masters._listen(host, 5) == ":5"  # all interfaces
    for host in ("localhost", "Localhost.", "a.localhost", "ip6-localhost", "127.1", "192.0.2.1"):
        assert _masters._listen(host, 5) == f"{host}:5"
    assert _masters._listen("::1", 5) == "[::1]:5"


def test_a_standby_does_not_wait_for_names_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    resolve = socket.getaddrinfo

    def slowly(host: Any, *rest: Any, **options: Any) -> Any:
        if host == "slow-host":
            over.wait(30)
            raise socket.gaierror
        return resolve(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    try:
        port, other = free_ports(2)
        standby = _masters.standby(f"slow-host:{port},127.0.0.1:{port}", None, "test", 0.2)
        standby.interrupt()
        assert standby.address == f"127.0.0.1:{port}"
        elsewhere = f"slow-host:{port},198.51.100.1:{port}"
        with pytest.raises(InvalidUsage, match="not resolved within 0.1 s: slow-host"):
            _masters.standby(elsewhere, None, "test", 0.2)
        begun = time.monotonic()
        with pytest.raises(PCCLError):
            api.init(f"slow-host:{port},127.0.0.1:{other}", timeout=0.2, standby=True)
        assert time.monotonic() - begun < 5
    finally:
        over.set()


def test_a_process_for_which_no_place_is_left_can_be_no_standby() -> None:
    with masters() as run:
        elsewhere = "198.51.100.1:48148,203.0.113.1:48148"
        for addresses, kind, text in (
            (run.address, "InvalidUsage", "Address already in use"),
            (elsewhere, "InvalidUsage", "none of the masters' addresses is one of this machine"),
            (run.addresses[0], "InvalidArgument", "the addresses of all masters"),
        ):
            program = partial(several_masters.join_and_fail, standby=True)
            (peer,) = run.peers(1, program, PCCL_MASTER=addresses)
            failed = peer.expect("failed")
            assert failed["kind"] == kind and text in failed["text"], failed
        # With the variable it goes on without a master of its own.
        (peer,) = run.peers(1, master_lists.train, PCCL_STANDBY="1")
        peer.expect("in")
        assert trained([peer]) == [1]
