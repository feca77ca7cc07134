"""Secrets: which are accepted, where they come from, and what the command line says of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from programs import attacked
from tlsruns import OTHER, SECRET, refused
from workers import command

import pccl
from pccl import master

# ---- secrets


def test_a_secret_that_could_be_guessed_is_refused() -> None:
    for make in (pccl.Communicator, pccl.MasterNode):
        for short in ("x", "abcdefgh" * 3, b"01234567" * 3, "", b""):
            with pytest.raises(pccl.InvalidArgument, match="too short.*32.*pccl secret") as failure:
                make("127.0.0.1:1", secret=short)
            assert not short or str(short) not in str(failure.value).replace("too short", "")
        with pytest.raises(pccl.InvalidArgument, match="repeats itself"):
            make("127.0.0.1:1", secret="abc" * 20)
        with pytest.raises(pccl.InvalidArgument, match="text or bytes, not int"):
            make("127.0.0.1:1", secret=5)  # type: ignore[arg-type]


def test_a_new_secret_is_good_and_another_each_time() -> None:
    made = {master.make_secret() for _ in range(10)}
    assert len(made) == 10
    for secret in made:
        pccl.MasterNode("127.0.0.1:0", secret=secret)


def test_a_secret_comes_from_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(f"  {SECRET}\n")
    monkeypatch.setenv("PCCL_SECRET_FILE", str(file))
    with pccl.MasterNode("127.0.0.1:0") as node:
        refused(node.address, OTHER)  # an argument wins over the variable
        monkeypatch.delenv("PCCL_SECRET_FILE")
        monkeypatch.setenv("PCCL_SECRET", SECRET)
        with pccl.Communicator(node.address):
            pass
        monkeypatch.setenv("PCCL_SECRET_FILE", str(file))
        with pytest.raises(pccl.InvalidArgument, match="both"):
            pccl.Communicator(node.address)
        monkeypatch.delenv("PCCL_SECRET")
        file.write_text("short")
        with pytest.raises(pccl.InvalidArgument, match="too short"):
            pccl.Communicator(node.address)
        monkeypatch.setenv("PCCL_SECRET_FILE", str(tmp_path / "none"))
        with pytest.raises(pccl.InvalidArgument, match="cannot read .*none: No such file"):
            pccl.Communicator(node.address)


def in_the_environment(argv: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs it with this in the environment, and nothing else of secrets."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PCCL_SECRET")}
    return subprocess.run(
        argv, env=kept | env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("variable", ["PCCL_SECRET", "PCCL_SECRET_FILE"])
def test_an_empty_variable_is_not_the_same_as_no_secret(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As a command makes it that should have printed the secret, and failed.
    for words in (
        ["-m", "pccl", "master", "--listen", "127.0.0.1:0"],
        ["-m", "pccl", "master", "--insecure", "--listen", "127.0.0.1:0"],
        ["-m", "pccl.master", "--listen-address", "127.0.0.1:0"],
        ["-m", "pccl", "doctor", "127.0.0.1:1"],
    ):
        done = in_the_environment([sys.executable, *words], tmp_path, **{variable: ""})
        assert done.returncode != 0 and done.stdout == "", words
        assert f"{variable} is set" in done.stderr and "Traceback" not in done.stderr
    monkeypatch.setenv(variable, "")
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:  # an argument wins
        for call in (pccl.Communicator, pccl.MasterNode, pccl.init):
            with pytest.raises(pccl.InvalidArgument, match=f"{variable} is set, but empty"):
                call(node.address)
        with pccl.Communicator(node.address, secret=SECRET):
            pass
    monkeypatch.setenv("PCCL_SECRET" if variable == "PCCL_SECRET_FILE" else "PCCL_SECRET_FILE", "x")
    with pytest.raises(pccl.InvalidArgument, match=f"{variable} is set, but empty"):
        pccl.MasterNode("127.0.0.1:0")


# ---- the command line


def test_the_line_that_a_master_prints_is_all_that_a_peer_needs(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pccl", "master", "--listen", "127.0.0.1:0"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PCCL_SECRET")}
    for extra in ([], ["--secret-file", str(tmp_path / "made")]):
        process = subprocess.Popen(
            [*words, *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=env | {"PCCL_LOG_LEVEL": "TRACE"},
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("listening on 127.0.0.1:")
            line = process.stdout.readline().split()
            assert line[:2] == ["join", "with:"]
            given = dict(word.split("=", 1) for word in line[2:] if "=" in word)
            done = subprocess.run(
                command(attacked.print_world_size),
                env=env | given | {"PCCL_LOG_LEVEL": "TRACE"},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.stdout == "1\n", done.stderr
            secret = given.get("PCCL_SECRET") or (tmp_path / "made").read_text().strip()
            arguments = Path(f"/proc/{process.pid}/cmdline").read_text()
            process.terminate()
            _, said = process.communicate(timeout=30)
            for text in (arguments, said, done.stderr):
                assert secret not in text
        finally:
            process.kill()
            process.communicate()
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600


def test_a_secret_file_is_the_same_to_masters_and_peers(tmp_path: Path) -> None:
    # No UTF-8, and a line end that reading as text would change.
    file = tmp_path / "secret"
    file.write_bytes(b" \xff\xfe\r\n" + bytes(range(128, 160)) + b"\r\n0123\r\n ")
    words = [sys.executable, "-m", "pccl", "master", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*words, "--secret-file", str(file)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        at = process.stdout.readline().removeprefix("listening on ").strip()
        done = in_the_environment(
            command(attacked.print_world_size), tmp_path, PCCL_MASTER=at, PCCL_SECRET_FILE=str(file)
        )
        assert done.stdout == "1\n", done.stderr
    finally:
        process.kill()
        process.communicate()


def test_a_secret_file_that_cannot_be_made_or_read_is_named(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "pccl", "master", "--listen", "127.0.0.1:0", "--secret-file"]
    (tmp_path / "short").write_text("short")
    for path, words in (
        (tmp_path / "no" / "secret", "cannot make .*no/secret: No such file"),
        (tmp_path, f"cannot read {tmp_path}: Is a directory"),
        (tmp_path / "short", "secret in .*short is too short: 5 bytes"),
    ):
        done = in_the_environment([*arguments, str(path)], tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        assert re.search(words, done.stderr) and done.stderr.count("\n") == 1, done.stderr


def test_a_master_without_a_secret_warns_beyond_loopback(tmp_path: Path) -> None:
    for listen, warns in (("127.0.0.1:0", False), ("0.0.0.0:0", True)):
        done = subprocess.run(
            command(partial(attacked.run_a_master, listen)),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0
        assert ("no secret" in done.stderr) == warns
        assert done.stderr.count("\n") == int(warns)


def test_insecure_and_a_secret_at_once_are_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pccl", "master", "--insecure", "--listen", "127.0.0.1:0"],
        env=os.environ | {"PCCL_SECRET": SECRET},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "PCCL_SECRET is set" in done.stderr
    assert SECRET not in done.stderr


def test_ranks_of_pccl_run_have_a_secret_of_their_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pccl",
            "run",
            "-n",
            "2",
            "--",
            *command(attacked.print_length_of_secret),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(done.stdout.split("\n")) == ["", "[0] 43 2", "[1] 43 2"], done.stderr
