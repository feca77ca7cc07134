"""The `pccl` command: its help, its reference, and what it says when it is called wrongly."""

from __future__ import annotations

import fcntl
import importlib.util
import io
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from tlsruns import served
from workers import wait_until_thread_sleeps

import pccl
from pccl import master
from pccl.tools import bench, cli, doctor, progress, screen
from pccl.tools.parsing import Parser, arguments

ROOT = Path(__file__).resolve().parent.parent
TOP = cli.parser()
SECRET = "a secret of a test, which has enough characters"
PARSERS = [TOP, *TOP.commands().values(), master.parser()]


def of_tools(name: str) -> ModuleType:
    """A module of the folder tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_the_commands_is_what_the_parsers_say() -> None:
    tool = of_tools("cli_reference")
    assert tool.PAGE.read_text() == tool.reference(), "run python tools/cli_reference.py"


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_begins_with_examples_and_ends_with_what_to_do_next(
    parser: Parser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = parser.format_help().splitlines()
    assert lines[0].startswith(parser.description[:40])
    assert lines[2] == "Examples:"
    assert lines[3] == f"  # {parser.examples[0].purpose}"
    assert lines[4] == f"  {parser.examples[0].command}"
    assert lines.index(next(line for line in lines if line.startswith("Usage: "))) > 4
    assert lines[-1].startswith("Next: ")


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_every_option_tells_its_default_and_every_example_is_of_the_command(parser: Parser) -> None:
    for action in arguments(parser):
        if action.dest not in ("version", "unmarked"):
            assert "(default" in action.help or "(required)" in action.help, action.dest
    if parser is not TOP:
        assert all(parser.prog in each.command for each in parser.examples)


def test_the_version_names_python_the_platform_and_the_package(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"pccl {pccl.__version__}"
    assert [line.split()[0] for line in lines[1:4]] == ["Python", "platform", "package"]
    assert lines[3].endswith(str(Path(pccl.__file__).parent))


# Misuse: one sentence that names what was wrong and what to do, and status 2.


def ended(arguments: list[str], main: Callable[[list[str]], int] = cli.main) -> int | str | None:
    """The exit status of the command in this process."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


@pytest.fixture
def sentence(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., str]:
    """Runs a command that was called wrongly; its one line on the standard error."""

    def sentence(*arguments: str, main: Callable[[list[str]], int] = cli.main, **env: str) -> str:
        for name in [name for name in os.environ if name.startswith("PCCL_")]:
            monkeypatch.delenv(name)
        for name, value in {"PCCL_LOG_LEVEL": "WARN", **env}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(bench, "_JOIN_ATTEMPTS", 1)
        assert ended(list(arguments), main) == 2
        out, err = capfd.readouterr()
        lines = [line for line in err.splitlines() if "waiting for" not in line]
        assert (out, len(lines)) == ("", 1), (out, err)
        named = ["pccl: ", "pccl_master: ", *(f"pccl {word}: " for word in arguments[:1])]
        assert lines[0].startswith(tuple(named))
        return lines[0].partition(": ")[2]

    return sentence


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "",
            "give a command: run, master, status, top, doctor, bench, trace, kick, drain, pause-admission",
        ),
        ("rnu -n 2", "no command 'rnu'; did you mean run?"),
        ("frobnicate", "no command 'frobnicate'; the commands are run, master"),
        ("--frob", "no option --frob; leave it out"),
        ("run -n 0 -- true", "-n must be a whole number in 1..4096, not '0'"),
        ("run -n -3 -- true", "-n must be a whole number in 1..4096, not '-3'"),
        ("run -n two -- true", "-n must be a whole number in 1..4096, not 'two'"),
        ("run -n", "-n needs a value; write one after it"),
        ("run -n 2 python train.py", "write -- before the program, as in `pccl run -n 2 -- python"),
        ("run python a.py -n 2", "write -- before the program, as in `pccl run -n 4 -- python a"),
        ("run -n 2", "give a program, as in `pccl run -n 2 -- python train.py`"),
        ("run -n 2 --", "give a program, as in `pccl run -n 2 -- python train.py`"),
        ("run -- true", "give the number of ranks, as in `pccl run -n 4 -- true`"),
        ("run -n 2 --elastik -- true", "no option --elastik; did you mean --elastic?"),
        ("run -n 2 --elastic=1 -- true", "--elastic takes no value"),
        ("run -n 2 -- python gone.py", "no script gone.py; correct its path"),
        ("run -n 2 -- python -u -X dev gone.py --help", "no script gone.py; correct its path"),
        ("run -n 2 -- gone.py", "no script gone.py; correct its name"),
        ("run -n 2 -- ./gone", "no program ./gone; correct its name"),
        ("run -n 2 -- no-such-program", "no program no-such-program; correct its name"),
        ("run -n 2 -- /", "/ is a folder; give a program"),
        ("run --hosts a --ssh no-ssh -- true", "no program 'no-ssh'; install OpenSSH's client, or"),
        ('run --hosts a --ssh ssh" -- true', "--ssh is not a command: No closing quotation"),
        ("status x:1 y:1", "'y:1' is one argument too many; leave it out"),
        ("status --group x", "--group must be a whole number in 0.."),
        ("status", "give the master as HOST:PORT, or set PCCL_MASTER"),
        ("top 127.0.0.1:9", "needs a terminal (and rich); `pccl status` prints the same once"),
        ("top --interval 0 127.0.0.1:9", "--interval must be seconds in 0.5..3600, not '0'"),
        ("kick", "the following arguments are required: NAME"),
        ("kick 127.0.0.1:x ann", "the port must be a number"),
        ("trace split traces", "action must be merge, not 'split'"),
        ("secret --token", "--token needs the run's secret in PCCL_SECRET or PCCL_SECRET_FILE"),
        ("master --http x", "--http must be HOST:PORT or a port, not 'x'"),
        (
            "master --http 192.0.2.9:0 --listen 127.0.0.1:0 --insecure",
            "cannot serve HTTP on 192.0.2",
        ),
        ("master --show-token", "--show-token needs --http, as in `pccl master --http 48149"),
        ("master --min-peers -1", "--min-peers must be a whole number in 1.."),
        ("master --straggler-timeout -5", "must be seconds in 0.001..1e8, or `none`, not '-5'"),
        ("master --straggler-timeout 1e9", "must be seconds in 0.001..1e8, or `none`, not '1e9'"),
        ("master --insecure --secret-file x", "exclude each other; give one of them"),
        ("master --secret-file no/such/file", "no/such/file: No such file or directory; give the"),
        ("master --secret-file /", "cannot read /: Is a directory; give the path of a file"),
        ("master --listen 48148", "a number alone is not a host; write the port after a host"),
        ("master --listen 127.0.0.1:99999", "the port must be a number up to 65535"),
        ("master --listen a..b:0", "cannot listen on a..b"),
        ("master --listen 192.0.2.9:0 --insecure", "take 0.0.0.0 or an address of this machine"),
        ("doctor", "give the master as HOST:PORT, or set PCCL_MASTER"),
        ("doctor 127.0.0.1:99999", "the port must be a number up to 65535"),
        ("doctor 127.0.0.1:9 --group -1", "--group must be a whole number in 0.."),
        ("doctor :9", "HOST:PORT must be a host and a port, as in 192.0.2.7:48148, not ':9'"),
        (
            "doctor http://192.0.2.7:48148",
            "HOST:PORT must be a host and a port, without a protocol",
        ),
        ("master --listen me@192.0.2.7:9", "the host is neither a name nor an address"),
        ("master --listen :9", "--listen must be a host and a port, as in 192.0.2.7:48148"),
        ("doctor here there", "'there' is one argument too many; leave it out"),
        ("bench", "give --master HOST:PORT"),
        ("bench --master a..b:1", "cannot resolve a..b"),
        ("bench --master 127.0.0.1:1 --peers 1", "--peers must be a whole number in 2.."),
        ("bench --master 127.0.0.1:1 --seconds -1", "--seconds must be seconds in 0.001..3600"),
        ("bench --master 127.0.0.1:1 --seconds nan", "--seconds must be seconds in 0.001..3600"),
        ("bench --master 127.0.0.1:1 --sizes -4", "--sizes takes sizes such as 64KiB,1MiB"),
        ("bench --master 127.0.0.1:1 --peer-group -1", "--peer-group must be a whole number in 0"),
        ("secret now", "'now' is one argument too many; leave it out"),
    ],
)
def test_misuse_is_answered_in_one_sentence(
    sentence: Callable[..., str], command: str, words: str
) -> None:
    assert words in sentence(*command.split())


def test_a_script_that_may_not_be_executed_is_named(
    sentence: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "plain.sh").write_text("true\n")
    assert "run `chmod +x ./plain.sh`" in sentence("run", "-n", "1", "--", "./plain.sh")
    assert "write ./plain.sh" in sentence("run", "-n", "1", "--", "plain.sh")


@pytest.mark.parametrize("arguments", [["master", "--listen"], ["--listen-address"]])
def test_a_port_that_is_taken_is_named_with_what_to_do(
    sentence: Callable[..., str], arguments: list[str]
) -> None:
    main = cli.main if arguments[0] == "master" else master.main
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = sentence(*arguments, address, main=main)
    assert f"{address}: Address already in use; take another port, or stop" in said


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["master"], {"PCCL_SECRET": "short"}, "`pccl secret` makes a good one"),
        (["master"], {"PCCL_SECRET": ""}, "unset it"),
        (["master", "--insecure"], {"PCCL_SECRET": SECRET}, "unset it, or drop --insecure"),
        (["doctor", "127.0.0.1:9"], {"PCCL_SECRET_FILE": "gone"}, "cannot read gone: No such"),
        (["bench", "--master", "127.0.0.1:9"], {"PCCL_SECRET_FILE": "/"}, "cannot read /: Is a"),
        (["run", "-n", "1", "--", "true"], {"PCCL_LOG_LEVEL": "loud"}, "PCCL_LOG_LEVEL="),
        (["doctor"], {"PCCL_MASTER": "127.0.0.1:"}, "the port must be a number"),
        (["bench"], {"PCCL_MASTER": "127.0.0.1:9", "PCCL_MIN_PEERS": "1"}, "PCCL_MIN_PEERS must"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    sentence: Callable[..., str], arguments: list[str], env: dict[str, str], words: str
) -> None:
    assert words in sentence(*arguments, **env)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_secret_that_another_user_keeps_is_named(
    sentence: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "secret").touch(0)
    assert "Permission denied; give the path" in sentence("master", "--secret-file", "secret")


def answer_as_a_web_server(connection: socket.socket) -> None:
    connection.recv(1)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)


a_web_server = partial(served, answer_as_a_web_server)  # no master


@contextmanager
def nobody() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def a_master() -> Iterator[str]:
    with pccl.MasterNode("127.0.0.1:0", secret=SECRET) as node:
        yield node.address


@pytest.mark.parametrize(
    ("there", "env", "words"),
    [
        (nobody, {}, "Connection refused; start `pccl master` there, or correct the address"),
        (a_web_server, {}, "not pccl's control protocol; correct the port"),
        (a_web_server, {"PCCL_SECRET": SECRET}, "TLS; correct the port, or start the master with"),
        (a_master, {}, "this run needs its secret: set PCCL_SECRET or PCCL_SECRET_FILE"),
        (a_master, {"PCCL_SECRET": SECRET[::-1]}, "set PCCL_SECRET to the one that `pccl master`"),
    ],
)
def test_where_no_master_answers_commands_say_what_to_do(
    sentence: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
    there: Callable[[], AbstractContextManager[str]],
    env: dict[str, str],
    words: str,
) -> None:
    with there() as address:
        assert words in sentence("bench", "--master", address, **env)
    with there() as address:
        assert words in sentence("pause-admission", address, **env)
    with there() as address:
        assert ended(["doctor", address]) == 2
    out, err = capfd.readouterr()
    last = out.splitlines()[-1]
    assert last.startswith("This machine cannot join: ") and words in last
    assert err == ""


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "this run needs its secret: set PCCL_SECRET or PCCL_SECRET_FILE"),
        ({"PCCL_SECRET": SECRET[::-1]}, "set PCCL_SECRET to the one that `pccl master` uses"),
        ({"PCCL_SECRET": ""}, "PCCL_SECRET is set, but empty"),
    ],
)
def test_run_starts_no_rank_that_the_master_would_refuse(
    sentence: Callable[..., str], env: dict[str, str], words: str
) -> None:
    with a_master() as address:
        assert words in sentence("run", "-n", "2", "--join", address, "--", "true", **env)


def test_the_master_that_refuses_a_secret_is_named(sentence: Callable[..., str]) -> None:
    with a_master() as address:
        said = sentence("status", address, PCCL_SECRET=SECRET[::-1])
    assert said.startswith(f"{address}: refuses our secret")


# Screens: one family, on terminals of any width and where the output is piped.


ROWS = [["4 KiB", "165 us", "24.8 MB/s"], ["64 MiB", "90.6 ms", "741 MB/s"]]
COLUMNS = ["array", "median", "array/time"]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Terminal]:
    """The standard output and error as a terminal with so many columns."""

    def terminal(columns: int, **env: str) -> Terminal:
        made = Terminal()
        for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm", "COLUMNS": str(columns), **env}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.stdout", made)
        monkeypatch.setattr("sys.stderr", made)
        return made

    return terminal


def words(text: str) -> list[str]:
    return re.sub(r"\x1b\[[\d;]*m|[^\x00-\x7f]", " ", text).split()


@pytest.mark.parametrize("columns", [100, 38, 34, 30, 26])
def test_a_table_fits_its_terminal_and_keeps_every_cell(
    terminal: Callable[..., Terminal], columns: int
) -> None:
    shown = terminal(columns, NO_COLOR="1")
    screen.table("The title of a table", COLUMNS, ROWS)
    assert max(map(len, shown.getvalue().splitlines())) <= columns
    assert "\x1b" not in shown.getvalue()
    found = words(shown.getvalue())
    assert all(word in found for row in [COLUMNS, *ROWS] for cell in row for word in cell.split())


def test_colors_are_for_terminals_without_no_color(
    terminal: Callable[..., Terminal], capsys: pytest.CaptureFixture[str]
) -> None:
    def show() -> None:
        screen.checks([doctor.Check("master", "fail", "127.0.0.1:9: Connection refused")])
        screen.verdict("This machine cannot join.", good=False)
        screen.note("pccl run", "rank 1 [red]ended[/]")
        print(screen.paint("[1]", 1, sys.stdout))

    plain = [
        "FAIL  master  127.0.0.1:9: Connection refused",
        "This machine cannot join.",
        "pccl run: rank 1 [red]ended[/]",
        "[1]",
    ]
    show()
    out, err = capsys.readouterr()
    assert [*out.splitlines()[:2], err.strip(), out.splitlines()[2]] == plain
    shown = terminal(80, NO_COLOR="1")
    show()
    assert [line.rstrip() for line in shown.getvalue().splitlines()] == plain
    shown = terminal(80)
    show()
    assert shown.getvalue().count("\x1b[") >= 8
    assert words(shown.getvalue()) == " ".join(plain).split()


def test_plain_tables_are_narrow_where_columns_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    screen.table("Title", COLUMNS, ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "",
        "Title",
        "array    median  array/time",
        "4 KiB    165 us   24.8 MB/s",
        "64 MiB  90.6 ms    741 MB/s",
    ]
    monkeypatch.setenv("COLUMNS", "24")
    screen.table("Title", COLUMNS, ROWS)
    assert capsys.readouterr().out.splitlines()[2:5] == [
        "array           4 KiB",
        "median         165 us",
        "array/time  24.8 MB/s",
    ]


@pytest.mark.parametrize("columns", [100, 50, 30])
def test_the_progress_bar_fits_its_terminal(
    terminal: Callable[..., Terminal], columns: int
) -> None:
    shown = terminal(columns, NO_COLOR="1")
    drawn = screen.bar("pccl: receiving state")
    task = drawn.add_task("", total=4 << 30)
    drawn.update(task, completed=1 << 30)
    lines = [line for line in drawn.console.render_lines(drawn.get_renderable()) if line]
    assert len(lines) == 1
    assert sum(len(segment.text) for segment in lines[0]) <= columns
    assert shown.getvalue() == ""


def pccl_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pccl", *arguments]


def test_ranks_are_colored_on_a_terminal_and_plain_in_a_pipe(tmp_path: Path) -> None:
    command = pccl_command("run", "-n", "2", "--", "sh", "-c", "echo $COLUMNS")
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    piped = subprocess.run(command, capture_output=True, cwd=tmp_path, env=env, timeout=200)
    assert sorted(piped.stdout.splitlines()) == [b"[0] ", b"[1] "]
    assert b"\x1b" not in piped.stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 61, 0, 0))
    with open(ours, "rb", buffering=0) as screen_of:
        terminal = {**env, "TERM": "xterm"}
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=tmp_path, env=terminal):
            os.close(theirs)
            said = b""
            with suppress(OSError):  # EIO: all have closed it
                while data := screen_of.read(1000):
                    said += data
    assert b"\x1b[36m[0]\x1b[0m " in said and b"\x1b[33m[1]\x1b[0m " in said
    assert said.count(b"\x1b[0m 57\r\n") == 2


@pytest.mark.parametrize("arguments", [["secret"], ["--help"], ["doctor", "127.0.0.1:9"]])
def test_output_that_cannot_be_written_is_told_without_a_traceback(
    tmp_path: Path, arguments: list[str]
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            pccl_command(*arguments),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            timeout=200,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "pccl: cannot write the output: No space left on device\n",
    )


def test_a_terminal_without_a_character_shows_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    monkeypatch.setattr(cli, "_main", lambda given: print("p\u00e9er \u2026"))
    cli.main([])
    assert written.getvalue() == b"p\xe9er ?\n"


class Lesser:
    """A standard error of a program's own."""

    def write(self, text: str) -> None:
        pass


@pytest.mark.parametrize("kind", ["missing", "closed", "lesser"])
def test_a_standard_error_that_is_no_terminal_shows_no_progress(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(
        sys, "stderr", {"missing": None, "closed": closed, "lesser": Lesser()}[kind]
    )
    with progress.reporting(None, "sync") as shown:
        assert shown is None
    with progress.reporting(True, "sync") as shown:
        assert shown is not None
        shown(1, 2)


def test_a_reader_that_left_ends_a_command_silently(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        pccl_command("doctor", "127.0.0.1:9"),
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        timeout=200,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_does_not_block_and_a_slow_reader_lose_nothing(unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    program = "for _ in range(3000): print('y' * 100)"
    with subprocess.Popen(
        pccl_command("run", "-n", "1", "--", sys.executable, "-c", program),
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    ) as process:
        os.close(writing)
        waits = select.poll()
        waits.register(reading, select.POLLIN)
        waits.poll()
        wait_until_thread_sleeps(process.pid)  # the pipe is full
        with open(reading, "rb") as output:
            said = output.read()
        assert process.stderr is not None and b"cannot" not in process.stderr.read()
    assert process.returncode == 0
    assert said == (b"[0] " + b"y" * 100 + b"\n") * 3000
