"""`pccl status`: one dict, read in one place and shown on one screen; the operator's commands."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import statuses
from hypothesis import given
from hypothesis import strategies as st

from pccl import _core
from pccl.errors import AuthenticationFailed, Unreachable
from pccl.tools import bench, cli, screen, show
from pccl.tools.status import Status, Unreadable, ask_any, duration, rate, read, size, troubles


@pytest.fixture
def status_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `pccl status` at a master with that status: exit status, output and errors."""

    def status_of(status: dict[str, Any] | None, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(_core, "ask_status", statuses.Master(status), raising=False)
        monkeypatch.delenv("COLUMNS", raising=False)
        monkeypatch.setenv("PCCL_MASTER", "127.0.0.1:9")
        result = cli.main(["status", *options])
        return result, *capsys.readouterr()

    return status_of


def test_it_shows_everything_about_a_run_in_trouble(
    status_of: Callable[..., tuple[int, str, str]],
) -> None:
    result, out, err = status_of(statuses.example())
    assert (result, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == (
        "pccl 0.1.0, run 8c1f27d90b5ae364, master up 1 h 27 min, term 2, encrypted, relays, 3 evicted"
    )
    assert "Group 0: 5 members (at least 3), epoch 12 since 10 min 11 s (admission), " in out
    rows = [line.split()[:2] for line in lines if line[:1].isdigit()]
    assert rows == [
        ["0", "berlin-4711"],
        ["1", "berlin-4712"],
        ["2", "ohio-trainer"],
        ["3", "ohio-trainer-2"],
        ["4", "lagos-laptop"],
    ]
    row = next(line for line in lines if line.startswith("4 "))
    for words in ("198.51.100.7:52114", "10 min 22 s", "1.3 s", "0.6", "20.1 MB/s"):
        assert words in row
    assert row.endswith("4 wait for it (14 s); 2048 log entries behind")
    for words in (
        "allreduce #1204 (33554432 float32, avg), 14 s: 4 of 5 in; missing: lagos-laptop (rank 4)",
        "kitchen-pi   192.0.2.99:50001  1 min 11 s  cannot reach ohio-trainer, ohio-trainer-2",
        "direct up to 16 KiB, then host_direct up to 512 KiB, then regional; segments of 256 KiB",
        "ohio-trainer-2 (rank 3) to lagos-laptop (rank 4): silent: no bytes for 6.1 s",
        "       2.0 s ago  sendai-a100 joined; it connects to the members",
        "WARN  4 members wait for lagos-laptop in allreduce #1204 (10 s)",
    ):
        assert words in out, words
    assert lines[-2:] == [
        "group 0: 4 members waited 14 s in allreduce #1204 for lagos-laptop (rank 4).",
        "group 0: the link from ohio-trainer-2 (rank 3) to lagos-laptop (rank 4) is silent: "
        "no bytes for 6.1 s.",
    ]


def test_a_run_without_trouble_ends_with_0(status_of: Callable[..., tuple[int, str, str]]) -> None:
    result, out, _ = status_of(statuses.healthy())
    assert (result, out.splitlines()[-1]) == (0, "All is well.")
    result, out, _ = status_of({**statuses.healthy(), "groups": []})
    assert (result, out.splitlines()[-1]) == (0, "Nobody has joined yet.")


def test_a_master_that_does_not_answer_ends_with_2(
    status_of: Callable[..., tuple[int, str, str]],
) -> None:
    result, out, err = status_of(None)
    assert (result, out) == (2, "")
    assert err.endswith("Connection refused; start `pccl master` there, or correct the address\n")


def test_json_is_the_status_as_it_came_with_keys_of_later_versions(
    status_of: Callable[..., tuple[int, str, str]],
) -> None:
    given = {**statuses.example(), "later": {"x": [1]}}
    result, out, _ = status_of(given, "--json")
    assert result == 1 and json.loads(out) == given


def test_one_group_is_shown_alone(status_of: Callable[..., tuple[int, str, str]]) -> None:
    given = statuses.example()
    given["groups"].append({**statuses.healthy()["groups"][0], "group": 7})
    result, out, _ = status_of(given, "--group", "7")
    assert result == 0 and "Group 7" in out and "Group 0" not in out
    _, out, _ = status_of(given, "--group", "7", "--json")
    assert [group["group"] for group in json.loads(out)["groups"]] == [7]
    result, _, err = status_of(given, "--group", "3")
    assert result == 2 and "there is no group 3; the groups are: 0, 7" in err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"missing": 2, "members": [], "epoch": 0}, "group 0 has not started: 2 peers missing"),
        ({"min_peers": 9}, "group 0 has 5 members, fewer than its 9"),
    ],
)
def test_a_group_with_too_few_members_is_trouble(change: dict[str, Any], sentence: str) -> None:
    given = statuses.healthy()
    given["groups"][0].update(change)
    assert troubles(read(given)) == [sentence]


def test_a_member_that_is_gone_or_silent_is_trouble() -> None:
    given = statuses.healthy()
    given["groups"][0]["members"][1]["connected"] = False
    given["groups"][0]["members"][2]["heard_seconds"] = 12.0
    assert troubles(read(given)) == [
        "group 0: berlin-4712 (rank 1) has lost its connection to the master",
        "group 0: ohio-trainer (rank 2) has said nothing for 12 s",
    ]


def test_a_call_that_just_began_is_no_trouble() -> None:
    given = statuses.healthy()
    given["groups"][0]["calls"] = statuses.example()["groups"][0]["calls"]
    given["groups"][0]["calls"][0]["seconds"] = 9.0
    assert troubles(read(given)) == []


# Reading.


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a status are, other than the status itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, each in items:
        found.append((*path, key))
        if isinstance(each, dict | list):
            found += paths(each, (*path, key))
    return found


PATHS = paths(statuses.EXAMPLE)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    status = statuses.example()
    at: Any = status
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return status


@given(st.sampled_from(PATHS), JSON)
def test_any_value_at_any_place_is_read_or_refused(path: tuple[Any, ...], value: Any) -> None:
    try:
        status = read(changed(path, value))
    except Unreadable as error:
        assert "status" in str(error)
        return
    troubles(status)
    for group in status.groups:
        show.members_of(group).fitted(80)
        assert len(list(show.calls_of(group))) == len(group.calls)


@given(st.sampled_from([path for path in PATHS if isinstance(path[-1], str)]))
def test_a_key_that_is_missing_has_its_default(path: tuple[Any, ...]) -> None:
    status = statuses.example()
    at: Any = status
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    read(status)


@pytest.mark.parametrize("seconds", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(Unreadable, match=r"status\.seconds"):
        read({"seconds": seconds})


def test_an_empty_status_is_one() -> None:
    assert read({}) == Status()


TEXTS = [path for path in PATHS if path[-1] in ("name", "address", "text", "reason", "why", "call")]


@given(st.sampled_from(TEXTS), st.text())
def test_no_text_of_a_peer_reaches_the_terminal_as_a_command(
    path: tuple[Any, ...], text: str
) -> None:
    """Neither escapes nor new lines, nor characters that turn the direction of what follows."""
    status = read(changed(path, f"\x1b]0;x\x07\r\n\u202e{text}"))
    said = [show.run_line(status), *troubles(status)]
    for group in status.groups:
        said += [cell for row in show.members_of(group).rows for cell in row]
        said += [*show.calls_of(group), *show.plan_of(group.plan), show.group_line(group)]
        said += [show.link_line(group, link) for link in group.links]
        said += [f"{newcomer.name} {newcomer.reason}" for newcomer in group.newcomers]
    said += [event.text for event in status.events]
    assert all(line.isprintable() for line in said)


@given(st.integers(40, 250))
def test_the_members_fit_their_terminal_or_lack_only_what_matters_least(width: int) -> None:
    group = read(statuses.example()).groups[0]
    whole = show.members_of(group)
    fitted = whole.fitted(width)
    assert {"rank", "name", "ops/s", "state"} <= set(fitted.columns)
    assert fitted.bad == whole.bad
    if fitted.columns != whole.columns:
        assert sum(whole.widths()) + 2 * len(whole.columns) - 2 > width
    assert all(len(row) == len(fitted.columns) for row in fitted.rows)


@given(st.floats(0, 1e9))
def test_durations_never_show_a_full_unit(seconds: float) -> None:
    parts = duration(seconds).split()
    limits = {"s": 60, "min": 60, "h": 24}
    for number, unit in zip(parts[::2], parts[1::2], strict=True):
        assert float(number) < limits.get(unit, 1e9)


def test_sizes_never_show_a_full_unit() -> None:
    assert size(999.5e6) == "1 GB"
    assert size(999.4e6) == "999 MB"
    assert size(999.6) == "1 kB"
    assert bench._rate(999.6e6) == "1 GB/s"


def test_durations_and_sizes_have_few_digits() -> None:
    said = [duration(seconds) for seconds in (0, 1.25, 9.96, 59.6, 3599, 3600, 86400, 90061)]
    assert said == ["0.0 s", "1.2 s", "10 s", "1 min", "59 min 59 s", "1 h", "1 d", "1 d 1 h"]
    assert [size(0), size(999), size(1500), size(2.5e12)] == ["0 B", "999 B", "1.5 kB", "2.5 TB"]
    assert [rate(None), rate(2e6)] == ["-", "2 MB/s"]


def test_on_a_terminal_members_that_others_wait_for_are_red(
    monkeypatch: pytest.MonkeyPatch, status_of: Callable[..., tuple[int, str, str]]
) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = Terminal()
    from rich.console import Console

    monkeypatch.setattr(
        screen,
        "console",
        lambda stream: (
            Console(file=shown, width=160, force_terminal=True, highlight=False)
            if stream is sys.stdout
            else None
        ),
    )
    assert status_of(statuses.example())[0] == 1
    red = [line for line in shown.getvalue().splitlines() if "\x1b[1;31m" in line]
    assert any("lagos-laptop" in line and "wait for it" in line for line in red)
    assert not any("berlin-4711" in line for line in red)


# The operator's commands.


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["kick", "127.0.0.1:9", "ohio"], ("127.0.0.1:9", "kick", "ohio")),
        (["kick", "ohio"], ("192.0.2.7:1", "kick", "ohio")),
        (["drain", "ohio"], ("192.0.2.7:1", "drain", "ohio")),
        (["pause-admission", "127.0.0.1:9"], ("127.0.0.1:9", "pause-admission", "")),
        (["resume-admission"], ("192.0.2.7:1", "resume-admission", "")),
    ],
)
def test_orders_reach_the_master_and_its_answer_is_printed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    asked: tuple[str, ...],
) -> None:
    calls: list[tuple[str, ...]] = []

    def command(*given: str) -> str:
        calls.append(given)
        return "done"

    monkeypatch.setattr(_core, "command", command, raising=False)
    monkeypatch.setenv("PCCL_MASTER", "192.0.2.7:1")
    assert cli.main(arguments) == 0
    assert calls == [asked]
    assert capsys.readouterr().out == "done\n"


def test_of_two_masters_that_serve_the_one_with_the_higher_term_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = threading.Event()

    def ask(address: str, secret: object = None) -> dict[str, Any]:
        if address == "frozen":
            never.wait()
        if address in ("frozen", "down"):
            raise Unreachable.because("ask_status", "nobody is there")
        return {"groups": [{"members": [1]}], "term": {"woken": 1, "serves": 2}[address]}

    monkeypatch.setattr(_core, "ask_status", ask)
    for masters in ("woken,serves,down", "serves,woken,frozen", "frozen,down,woken,serves"):
        assert ask_any(masters)[0] == "serves"
    never.set()


def test_the_status_says_how_each_of_several_masters_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def group(**peers: list[dict[str, Any]]) -> dict[str, Any]:
        return {"groups": [{"group": 0, "members": [], "newcomers": [], **peers}], "term": 4}

    answers = {
        "192.0.2.1:1": group(),
        "192.0.2.2:1": group(members=[{"rank": 0}]),
        "192.0.2.3:1": Unreachable.because("ask_status", "192.0.2.3:1: Connection refused"),
        "192.0.2.4:1": AuthenticationFailed.because("ask_status", "this run needs its secret"),
        "192.0.2.5:1": {**group(members=[{"rank": 0}]), "term": 3},
        "192.0.2.6:1": group(newcomers=[{"name": "a"}]),
    }

    def ask(address: str, secret: object = None) -> dict[str, Any]:
        answer = answers[address]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(_core, "ask_status", ask)
    assert cli.main(["status", ",".join(answers), "--json"]) == 1
    seen = json.loads(capsys.readouterr().out)["masters"]
    states = ["stands by", "serves", "no answer", "refuses", "serves, too", "waits to start"]
    assert [one["state"] for one in seen] == states
    assert [one["address"] for one in seen] == list(answers)
    assert cli.main(["status", ",".join(answers)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "192.0.2.1:1 (stands by), 192.0.2.2:1 (serves), 192.0.2.3:1 (no answer)" in shown
    assert "master 192.0.2.3:1 does not answer: Connection refused" in shown
    assert "master 192.0.2.4:1 refuses to answer: this run needs its secret" in shown
    assert "master 192.0.2.5:1 serves members, too: it was frozen, or they are" in shown
    assert cli.main(["status", "192.0.2.1:1,192.0.2.2:1"]) == 0
    # Before the start it is the master where newcomers wait.
    assert ask_any("192.0.2.1:1,192.0.2.6:1")[0] == "192.0.2.6:1"
    capsys.readouterr()
    assert cli.main(["status", "192.0.2.2:1", "--json"]) == 0
    assert "masters" not in json.loads(capsys.readouterr().out)
    monkeypatch.setenv("PCCL_MASTER", "192.0.2.2:1,")
    assert cli.main(["status"]) == 2
    assert "PCCL_MASTER has an empty address" in capsys.readouterr().err


def test_an_error_that_nobody_expects_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: str, secret: object) -> dict[str, Any]:
        raise MemoryError(address)

    monkeypatch.setattr(_core, "ask_status", fail)
    for addresses in ("a:1", "a:1,b:1"):
        with pytest.raises(MemoryError, match="[ab]:1"):
            ask_any(addresses)
