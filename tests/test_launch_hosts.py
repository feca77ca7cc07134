"""`pccl run --hosts`: ranks on machines that ssh reaches."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
from namespaces import Host as NetworkHost
from namespaces import Lab, ip
from programs import launch
from workers import Program, command, eventually

import pccl
from pccl.tools.hosts import Host, parse_hosts, split_address

# Runs the last argument in a shell, as ssh does at the other end, and fails for the host "nowhere".
STAND_IN = """#!/bin/sh
if [ "$1" = -G ]; then echo "hostname 127.0.0.1"; exit; fi
while [ $# -gt 2 ]; do shift; done
if [ "$1" = nowhere ]; then echo "ssh: no such host" >&2; exit 255; fi
cd "$HOME" && exec env -i HOME="$HOME" PATH="$PATH" sh -c "$2"
"""


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    program = tmp_path / "ssh"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    return str(program)


def start(ssh: str, hosts: str, program: Program, *options: str) -> subprocess.Popen[str]:
    run = [sys.executable, "-m", "pccl", "run", "--hosts", hosts, "--ssh", ssh, *options, "--"]
    return subprocess.Popen(
        [*run, *command(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(ssh).parent,
    )


def run(ssh: str, hosts: str, program: Program, *options: str) -> tuple[int, list[str], str]:
    """The status, the lines of the output, and the errors without the line to join with."""
    out, err = (process := start(ssh, hosts, program, *options)).communicate(timeout=200)
    join, _, err = err.partition("\n")
    assert join.startswith("pccl run: to join: PCCL_MASTER=127.0.0.1:"), join + err
    return process.returncode, out.splitlines(), err


def test_hosts_are_read_as_ssh_names_with_numbers_of_ranks() -> None:
    assert parse_hosts("a:4, me@b.example:2,c") == [
        Host("a", 4),
        Host("me@b.example", 2),
        Host("c", 1),
    ]
    for wrong in ["", "a:", ":3", "a,,b", "a:x", "a:0", "-oProxyCommand=x:1", "a:5000"]:
        with pytest.raises(ValueError, match="must be"):
            parse_hosts(wrong)


def test_the_port_of_an_address_may_be_missing() -> None:
    assert split_address("b.example") == ("b.example", 0)
    assert split_address("192.0.2.7:48148") == ("192.0.2.7", 48148)
    assert split_address("[2001:db8::7]:48148") == ("[2001:db8::7]", 48148)
    assert split_address("[2001:db8::7]") == ("[2001:db8::7]", 0)


def test_ranks_of_all_hosts_reduce_together(ssh: str) -> None:
    status, lines, err = run(ssh, "alice:2,bob", launch.sum_of_ones)
    assert (status, sorted(lines), err) == (0, ["[0] 3.0", "[1] 3.0", "[2] 3.0"], "")


def test_ranks_get_what_is_passed_on_and_the_folder_of_the_same_name(
    ssh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "from here")
    monkeypatch.setenv("HIDDEN", "x")
    monkeypatch.setenv("PCCL_HEARTBEAT_INTERVAL", "0.5")
    monkeypatch.setenv("PCCL_PORT", "1")
    names = ("GIVEN", "MORE", "HIDDEN", "PCCL_HEARTBEAT_INTERVAL", "PCCL_PORT", "PCCL_LOCAL_RANK")
    program = partial(launch.print_variables, *names)
    status, lines, _ = run(ssh, "alice", program, "--env", "GIVEN", "--env", "MORE=a b")
    assert status == 0
    where, *words = lines[0].removeprefix("[0] ").split("|")
    assert words == ["from here", "a b", "None", "0.5", "None", "0"]
    assert Path(where).samefile(Path(ssh).parent)


def test_no_secret_is_in_an_argument_of_any_process(ssh: str) -> None:
    process = start(ssh, "alice", launch.find_secret_in_arguments)
    out, err = process.communicate(timeout=100)
    assert out == "[0] 0\n", out + err


def test_a_rank_that_fails_ends_those_on_other_hosts(ssh: str) -> None:
    status, _, err = run(ssh, "alice:2,bob", launch.fail_at_two)
    assert status == 3
    assert "rank 2 ended with exit status 3" in err
    assert "host bob ended with exit status 3; stopping the others" in err


@pytest.mark.parametrize("hosts", ["alice:2", "alice,bob"])
def test_an_elastic_run_that_lost_a_rank_before_its_start_ends(ssh: str, hosts: str) -> None:
    status, _, err = run(ssh, hosts, partial(launch.fail_or_join, failing=0), "--elastic")
    assert status == 7
    assert "the run cannot start: it waits for 2 peers, and no more than 1 can come" in err


@pytest.mark.parametrize("elastic", [False, True])
def test_a_host_that_is_not_reached_counts_as_one_that_failed(ssh: str, elastic: bool) -> None:
    options = ["--elastic"] if elastic else []
    program = launch.print_settings if elastic else launch.print_pid_and_wait
    status, lines, err = run(ssh, "alice,nowhere", program, *options)
    assert "ssh: no such host\n" in err
    assert "host nowhere ended with exit status 255" in err
    assert status == (0 if elastic else 255)
    assert not elastic or len(lines) == 1


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_signals_reach_the_ranks(ssh: str, number: signal.Signals, status: int) -> None:
    process = start(ssh, "alice,bob", launch.tell_signals)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == [f"[0] {number.name}", f"[1] {number.name}"], err
    assert process.returncode == status


def test_ranks_end_when_the_launcher_is_killed(ssh: str) -> None:
    process = start(ssh, "alice,bob", launch.print_pid_and_wait)
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.kill()
    process.communicate()
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), seconds=60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hosts", "a:x"], "must be hosts with numbers of ranks"),
        (["--hosts", "a", "-n", "2"], "not both"),
        (["-n", "2", "--env", "A=1"], "belong to --hosts"),
        (["--hosts", "a", "--address", "127.0.0.1", "--env", "NOT_SET_HERE"], "it is not set here"),
    ],
)
def test_what_cannot_begin_is_said_in_a_sentence(options: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pccl", "run", *options, "--", "true"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert said in done.stderr


def test_another_version_is_refused(ssh: str) -> None:
    order = b'{"version": "0.0.0"}\n'
    there = [sys.executable, "-m", "pccl.tools.there"]
    done = subprocess.run(there, input=order, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert f"pccl is {pccl.__version__} here and 0.0.0 at the launcher" in done.stderr.decode()


def test_nothing_starts_without_an_order() -> None:
    there = [sys.executable, "-m", "pccl.tools.there"]
    done = subprocess.run(there, input=b"", capture_output=True, timeout=60)
    assert done.returncode == 2
    assert "the launcher ended before it said what to start" in done.stderr.decode()


# ---- OpenSSH


def sshd_command(folder: Path) -> str:
    """A server for this user, with keys and settings in `folder`; skips the test without one."""
    server = shutil.which("sshd") or "/usr/sbin/sshd"
    if not os.path.exists(server) or shutil.which("ssh-keygen") is None:
        pytest.skip("needs Debian's package openssh-server")
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # it does not start without
    for name in ["host", "user"]:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    (folder / "allowed").write_bytes((folder / "user.pub").read_bytes())
    (folder / "sshd.conf").write_text(f"""
HostKey {folder}/host
AuthorizedKeysFile {folder}/allowed
PidFile none
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
""")
    return f"{server} -e -f {folder}/sshd.conf"


def ssh_command(folder: Path, *hosts: str) -> str:
    """The command that reaches servers of that folder. `hosts`: what to say of each."""
    (folder / "ssh.conf").write_text(f"""
IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
StrictHostKeyChecking accept-new
{"".join(hosts)}""")
    return f"ssh -F {folder}/ssh.conf"


@pytest.fixture
def sshd(tmp_path: Path) -> str:
    """A server for this user on loopback. Returns the command that reaches it."""
    # -i: one connection, on standard input. So nothing listens, and ssh starts it for each one.
    proxy = f"{sshd_command(tmp_path)} -i"
    return ssh_command(tmp_path, f"Host alice bob\n  HostName 127.0.0.1\n  ProxyCommand {proxy}\n")


def test_openssh_carries_ranks_their_output_and_signals(sshd: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    base = [sys.executable, "-m", "pccl", "run", "--hosts", "alice:2,bob", "--ssh", sshd, "--"]
    done = subprocess.run(
        [*base, *command(launch.sum_of_ones)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 3.0", "[1] 3.0", "[2] 3.0"]
    process = subprocess.Popen(
        [*base, *command(launch.tell_signals)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline().endswith(" ready\n")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == [f"[{rank}] SIGTERM" for rank in range(3)]
    assert process.returncode == 143


def kill_all_on(host: NetworkHost) -> None:
    """Kills the processes that the test has started there."""
    for pid in ip("netns", "pids", host.name).split():
        with suppress(ProcessLookupError):  # it has ended with another one
            os.kill(int(pid), signal.SIGKILL)


@contextmanager
def serving(command: str, host: NetworkHost) -> Iterator[None]:
    """A server of ssh at the address of that host, which has no other one."""
    at_address = ["-D", "-o", f"ListenAddress={host.address}"]
    process = subprocess.Popen(
        ["ip", "netns", "exec", host.name, *command.split(), *at_address],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        assert first == f"Server listening on {host.address} port 22.\n", first
        Thread(target=process.stderr.read, daemon=True).start()  # it must not fill
        yield
    finally:
        kill_all_on(host)  # also sessions, after a test that has failed
        process.wait(60)


def arguments_of_all() -> list[bytes]:
    """The arguments of every process of this machine."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            found.append(Path("/proc", pid, "cmdline").read_bytes())
    return found


@pytest.mark.root
@pytest.mark.parametrize("lost", ["rank", "host"])
def test_ranks_on_two_hosts_of_openssh_go_on_when_some_are_killed(
    lost: str, lab: Lab, tmp_path: Path
) -> None:
    server = sshd_command(tmp_path)
    here, *hosts = lab(3)
    names = ["alice", "bob"]
    ssh = ssh_command(
        tmp_path,
        *(
            f"Host {name}\n  HostName {host.address}\n"
            for name, host in zip(names, hosts, strict=True)
        ),
    )
    rest = [0, 1, 3] if lost == "rank" else [0, 1]
    program = partial(launch.reduce_until_some_are_lost, 4, len(rest))
    run = ["ip", "netns", "exec", here.name, sys.executable, "-m", "pccl", "run"]
    run += ["--hosts", "alice:2,bob:2", "--ssh", ssh]
    with serving(server, hosts[0]), serving(server, hosts[1]):
        process = subprocess.Popen(
            [*run, "--elastic", "--", *command(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PCCL_BIND": ""},
        )
        assert process.stdout is not None
        try:
            said = [process.stdout.readline() for _ in range(4)]
            lines = [re.fullmatch(r"\[(\d)\] process (\d+)\n", line) for line in said]
            pids = {int(line[1]): int(line[2]) for line in lines if line}
            assert pids.keys() == {0, 1, 2, 3}, said
            # Each host has its ranks.
            networks = [os.stat(f"/proc/{pids[rank]}/ns/net").st_ino for rank in range(4)]
            made = [os.stat(f"/run/netns/{host.name}").st_ino for host in hosts]
            assert networks == [made[0], made[0], made[1], made[1]]
            variables = Path(f"/proc/{pids[0]}/environ").read_bytes()
            secret = re.search(rb"\0PCCL_SECRET=([^\0]+)", b"\0" + variables)
            assert secret
            everything = arguments_of_all()
            assert any(b"pccl.tools.there" in arguments for arguments in everything)
            assert not any(secret[1] in arguments for arguments in everything)
            if lost == "rank":
                os.kill(pids[2], signal.SIGKILL)
            else:
                kill_all_on(hosts[1])
            out, err = process.communicate(timeout=100)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, err
    words = " ".join([str(len(rest))] * 3)
    assert sorted(out.splitlines()) == [f"[{rank}] then {words}" for rank in rest], err
    said_of = {"rank": "rank 2 was ended by SIGKILL; 1 of 2 go on", "host": "host bob ended with"}
    assert said_of[lost] in err
