"""`pccl top` and `pccl master --http` on a real run of two peers; `top` on a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import statuses
from programs import idle
from workers import Run, Worker, eventually

from pccl.tools import top
from pccl.tools.status import read

SECRET = "a secret of a test, which has enough characters"
WIDTH, HEIGHT = 130, 40


class Terminal:
    """A terminal in which a command of pccl runs."""

    def __init__(self, ours: int, theirs: int) -> None:
        pyte = pytest.importorskip("pyte")
        self._ours, self._theirs = ours, theirs
        self.first_settings = self.settings()
        self.process: subprocess.Popen[bytes]
        self.written = b""
        self._screen = pyte.Screen(WIDTH, HEIGHT)
        self._stream = pyte.ByteStream(self._screen)

    def _read(self) -> None:
        data = os.read(self._ours, 1 << 16)
        self.written += data
        self._stream.feed(data)

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display)

    def is_red(self, line: str) -> bool:
        """Whether the line that has these words is red."""
        row = next(i for i, shown in enumerate(self._screen.display) if line in shown)
        column = self._screen.display[row].index(line)
        return str(self._screen.buffer[row][column].fg) == "red"

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, pattern: str, timeout: float = 60.0) -> re.Match[str]:
        """Returns the match as soon as the screen has that pattern."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(pattern, self.text())):
            assert time.monotonic() < deadline, f"no {pattern!r}:\n{self.text()}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self._read()
        return found

    def ends(self) -> int:
        """Its exit status. Its last output is read, so that it can end."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()
            if select.select([self._ours], [], [], 0.1)[0]:
                self._read()
        while select.select([self._ours], [], [], 0)[0]:
            self._read()
        return self.process.returncode

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)


@contextmanager
def shown(*arguments: str, **env: str) -> Iterator[Terminal]:
    """`pccl` with these arguments on a terminal of its own."""
    pytest.importorskip("pyte")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", HEIGHT, WIDTH, 0, 0))
    terminal = Terminal(ours, theirs)
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    terminal.process = subprocess.Popen(
        [sys.executable, "-m", "pccl", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tempfile.gettempdir(),
        env={**inherited, "TERM": "xterm-256color", **env},
        start_new_session=True,
    )
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(ours)
        os.close(theirs)


def status(run: Run, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and output of `pccl status --json`."""
    done = subprocess.run(
        [sys.executable, "-m", "pccl", "status", run.address, "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tempfile.gettempdir(),
        env={**os.environ, **run.env},
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def two_peers(run: Run) -> list[Worker]:
    """Two members with names, which make no call until they are told."""
    workers = [
        run.peer(idle.wait_inside, PCCL_MIN_PEERS="2", PCCL_NAME=name) for name in ("anna", "bert")
    ]
    for worker in workers:
        worker.expect("in")
    return workers


def test_status_and_top_show_a_real_run_and_that_its_master_is_away(run: Run) -> None:
    two_peers(run)
    code, found = status(run)
    (group,) = found["groups"]
    assert code == 0
    assert sorted(member["name"] for member in group["members"]) == ["anna", "bert"]
    assert read(found).groups[0].members[0].software.startswith("pccl ")
    with shown("top", run.address, "--interval", "0.5") as terminal:
        terminal.wait_for(r"Group 0: 2 members")
        terminal.wait_for(r"(?s)0 +(anna|bert).*1 +(anna|bert)")
        terminal.press("?")
        terminal.wait_for(r"q +quit")
        terminal.press("n")
        terminal.wait_for(r"by name, least first")
        terminal.press("i")
        terminal.wait_for(r"(?s)bert.*anna.*by name, greatest first")
        run.master.signal(signal.SIGKILL)
        terminal.wait_for(r"The master does not answer: .*\n.*Trying again")
        assert "anna" in terminal.text()
        run.restart_master()
        terminal.wait_for(r"(?s)\A(?!.*does not answer).*term 2.*Group 0: 2 members")
        terminal.press("q")
        assert terminal.ends() == 0


def order(run: Run, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pccl", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tempfile.gettempdir(),
        env={**os.environ, **run.env, "PCCL_MASTER": run.address},
    )


def test_the_operator_s_commands_do_what_they_say(run: Run) -> None:
    two_peers(run)
    assert order(run, "pause-admission").returncode == 0
    assert status(run)[1]["admission_paused"] is True
    assert order(run, "resume-admission", run.address).returncode == 0
    assert status(run)[1]["admission_paused"] is False
    done = order(run, "kick", "nobody")
    assert done.returncode == 2 and "nobody" in done.stderr
    done = order(run, "kick", "bert")
    assert (done.returncode, done.stderr) == (0, "") and "bert" in done.stdout
    names = [member["name"] for member in status(run)[1]["groups"][0]["members"]]
    assert names == ["anna"]


def test_who_is_waited_for_is_red(run: Run) -> None:
    """A member that has stopped calling holds up the other one, which is shown within seconds."""
    workers = [
        run.peer(idle.wait_inside, PCCL_MIN_PEERS="2", PCCL_NAME="late"),
        run.peer(idle.meet_twice, PCCL_MIN_PEERS="2", PCCL_NAME="early"),
    ]
    workers[0].expect("in")
    with shown("top", run.address, "--interval", "0.5") as terminal:
        terminal.wait_for(r"late .*1 wait for it \((2|3)\.\d s\)")
        terminal.wait_for(r"barrier.*missing: late")
        assert terminal.is_red("late")
        assert not terminal.is_red("early")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_terminal_is_as_before_however_top_ends(number: signal.Signals) -> None:
    with shown("top", "127.0.0.1:9") as terminal:
        terminal.wait_for(r"The master does not answer: .*Connection refused")
        assert terminal.settings() != terminal.first_settings  # keys come without Enter
        terminal.process.send_signal(number)
        assert terminal.ends() == 128 + number
        assert terminal.settings() == terminal.first_settings
        # It has drawn on the alternate screen, and gives back the first one and the cursor.
        drawing, _, after = terminal.written.rpartition(b"\x1b[?1049l")
        assert drawing.count(b"\x1b[?1049h") == 1 and b"pccl top" not in after
        assert not terminal._screen.cursor.hidden


# Drawing an example, without a terminal.


def drawn(view: top.View, height: int = HEIGHT, width: int = WIDTH) -> list[str]:
    from rich.console import Console

    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))
    console.print(view.draw(height))
    return console.export_text().splitlines()


def rows(lines: list[str]) -> list[str]:
    """Names in the order of the table's rows."""
    return [line.split()[1] for line in lines if re.match(r"\d ", line)]


@pytest.fixture
def view() -> top.View:
    made = top.View("192.0.2.7:48148")
    made.status = read(statuses.example())
    return made


def test_members_are_sorted_by_the_key_that_was_pressed(view: top.View) -> None:
    by_rank = ["berlin-4711", "berlin-4712", "ohio-trainer", "ohio-trainer-2", "lagos-laptop"]
    assert rows(drawn(view)) == by_rank
    for key, first in {"n": by_rank[0], "o": by_rank[0], "w": by_rank[0], "h": by_rank[4]}.items():
        view.press(key)
        assert rows(drawn(view))[0] == first
        view.press("i")
        assert rows(drawn(view))[0] != first
    view.press("r")
    assert rows(drawn(view)) == by_rank


def test_keys_choose_the_group_and_what_else_is_shown(view: top.View) -> None:
    given = statuses.example()
    given["groups"].append({**given["groups"][0], "group": 3, "members": []})
    view.status = read(given)
    assert any("sendai-a100 joined" in line for line in drawn(view))
    view.press("e")
    assert not any("sendai-a100 joined" in line for line in drawn(view))
    view.press("g")
    assert any(line.startswith("Group 3:") for line in drawn(view))
    view.press("g")
    assert any(line.startswith("Group 0:") for line in drawn(view))
    assert drawn(view) == drawn(view)
    view.press("x")  # means nothing
    view.press("?")
    assert any("next group" in line for line in drawn(view))


def test_masters_that_do_not_answer_are_shown(view: top.View) -> None:
    long = [f"master-{number}.region.example.org:48148" for number in range(3)]
    states = ["serves", "stands by", "no answer"]
    seen = [{"address": a, "state": state} for a, state in zip(long, states, strict=True)]
    view.status = read({**statuses.example(), "masters": seen})
    for height in (24, HEIGHT):
        lines = drawn(view, height, width=80)
        assert len(lines) <= height and "quit" in lines[-1]
        assert any(f"master {long[2]} does not answer" in line for line in lines)


def test_more_members_than_lines_are_scrolled(view: top.View) -> None:
    given = statuses.healthy()
    one = given["groups"][0]["members"][0]
    given["groups"][0].update(
        members=[{**one, "rank": rank, "name": f"m{rank}"} for rank in range(100)], newcomers=[]
    )
    view.status = read(given)
    view.press("e")
    assert len(drawn(view, 20)) <= 20
    assert "m0" in rows(drawn(view, 20))
    for _ in range(200):
        view.press("j")
        drawn(view, 20)
    assert any("m99" in line for line in drawn(view, 20))
    view.press("k")
    assert not any("m99" in line for line in drawn(view, 20))


# `pccl master --http`.


@contextmanager
def master(*arguments: str, **env: str) -> Iterator[tuple[str, str]]:
    """A master with a status page: its address and that of the page."""
    with subprocess.Popen(
        [sys.executable, "-m", "pccl", "master", "--listen", "127.0.0.1:0", "--http", "0"]
        + list(arguments),
        stdout=subprocess.PIPE,
        text=True,
        cwd=tempfile.gettempdir(),
        env={**os.environ, **env},
    ) as process:
        assert process.stdout is not None
        try:
            listening = process.stdout.readline().removeprefix("listening on ").strip()
            lines = iter(process.stdout.readline, "")
            page = next(line for line in lines if line.startswith("status page: "))
            yield listening, page.removeprefix("status page: ").strip()
        finally:
            process.terminate()
            assert process.wait(60) == 0


def fetched(url: str, **headers: str) -> dict[str, Any]:
    with urlopen(Request(url, headers=headers), timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_a_real_master_serves_its_run(run: Run) -> None:
    with master("--insecure") as (address, page):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", page)
        peers = [run.peer(idle.wait_inside, PCCL_MASTER=address, PCCL_MIN_PEERS="2") for _ in "ab"]
        for peer in peers:
            peer.expect("in")
        eventually(
            lambda: sum(len(g["members"]) for g in fetched(page + "status.json")["groups"]) >= 2,
            seconds=60,
        )
        found = fetched(page + "page.json")
        assert found["troubles"] == [] and found["status"]["encrypted"] is False


def test_the_page_of_a_run_with_a_secret_wants_the_token_that_pccl_prints() -> None:
    env = {"PCCL_SECRET": SECRET}
    token = subprocess.run(
        [sys.executable, "-m", "pccl", "secret", "--token"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
        env={**os.environ, **env},
    ).stdout.strip()
    assert re.fullmatch(r"[0-9a-f]{64}", token) and SECRET not in token
    with master(**env) as (_, page):
        assert "token" not in page
        with pytest.raises(HTTPError, match="401"):
            fetched(page + "status.json")
        assert fetched(f"{page}status.json", Authorization=f"Bearer {token}")["encrypted"]
    with master("--show-token", **env) as (_, page):
        assert page.endswith(f"/?token={token}")
    with master() as (_, page):  # the new secret is printed, and so is its token
        assert re.search(r"/\?token=[0-9a-f]{64}$", page) and token not in page


def test_all_keys_of_a_read_count() -> None:
    assert top._keys_in("\x1bq") == ["\x1b", "q"]
    assert top._keys_in("\x1b[Bj\x1bOAq") == ["j", "j", "k", "q"]
    assert top._keys_in("\x1b[1;5Bq") == ["\x1b[1;5B", "q"]
