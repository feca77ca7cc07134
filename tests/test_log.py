"""Lines of the log: their forms, their bound, and that they cannot be forged."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import news
from workers import Run, running, wait_for_line

from pccl import _testing

WARN, DEBUG = 3, 1
MOST = 4096


def line(form: str, text: bytes, *, who: bytes = b"ab12", epoch: int = 7, time: int = 0) -> bytes:
    made: bytes = _testing.log_line(form, time, WARN, who, epoch, text)
    return made


def test_the_three_forms_of_a_line() -> None:
    at = int(datetime(2026, 2, 28, 23, 59, 59, 7000, timezone.utc).timestamp() * 1000)
    assert line("short", b"it fell", time=at) == b"pccl[ab12] WARN: it fell\n"
    assert line("text", b"it fell", time=at) == (
        b"2026-02-28T23:59:59.007Z e7 pccl[ab12] WARN: it fell\n"
    )
    assert line("text", b"x", who=b"", epoch=0) == b"1970-01-01T00:00:00.000Z pccl WARN: x\n"
    assert json.loads(line("json", b"it fell", time=at)) == {
        "time": "2026-02-28T23:59:59.007Z",
        "level": "WARN",
        "who": "ab12",
        "epoch": 7,
        "text": "it fell",
    }
    assert json.loads(line("json", b"x", epoch=0))["epoch"] is None


@given(st.binary(max_size=300), st.binary(max_size=80), st.integers(0, 2**63))
def test_any_bytes_make_one_line(text: bytes, who: bytes, epoch: int) -> None:
    for form in ("short", "text", "json"):
        made = line(form, text, who=who, epoch=epoch)
        assert made.count(b"\n") == 1 and made.endswith(b"\n")
        assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", made)
    read = json.loads(made)
    assert set(read) == {"time", "level", "who", "epoch", "text"}
    clean = re.sub(r"[\x00-\x1f\x7f]", " ", text.decode(errors="replace"))
    if "\ufffd" not in clean:
        assert read["text"] == clean


@pytest.mark.parametrize("filler", [b"x", b'"', "ä".encode(), b"\xff", b"\n"])
@pytest.mark.parametrize("form", ["short", "text", "json"])
def test_a_line_is_cut_at_4096_bytes(form: str, filler: bytes) -> None:
    made = line(form, filler * 5000, who=b"w" * 64)
    assert MOST - 8 < len(made) <= MOST
    if form == "json":
        assert json.loads(made)["text"].endswith("...")
    else:
        assert made.endswith(b"...\n")
    assert len(line("json", b"x", who=filler * 5000)) <= MOST


def test_a_kind_of_line_cannot_flood() -> None:
    limit = _testing.LineLimit()
    printed = [limit.take(WARN, f"a stranger at port {n} said nothing", 1000) for n in range(1000)]
    assert printed.count(0) == printed.index(None) == 100
    # Another kind and another level are not affected.
    assert limit.take(WARN, "lost rank 3", 1000) == 0
    assert limit.take(DEBUG, "a stranger at port 1 said nothing", 1000) == 0
    # One more comes every two seconds, and says how many did not.
    assert limit.take(WARN, "a stranger at port 8 said nothing", 2999) is None
    assert limit.take(WARN, "a stranger at port 8 said nothing", 3000) == 901
    assert limit.take(WARN, "a stranger at port 8 said nothing", 3000) is None
    # After a long time a hundred are free again.
    assert [limit.take(WARN, "a stranger at port 9", 10**9) for _ in range(101)] == [1] + [
        0
    ] * 99 + [None]


def test_what_was_asked_for_may_come_faster() -> None:
    limit = _testing.LineLimit()
    taken = [limit.take(DEBUG, "a connection broke", 0) for _ in range(6000)]
    assert taken.count(0) == 5000


def test_a_run_logs_json(run: Run) -> None:
    worker = run.peer(news.admit_and_reduce, PCCL_MIN_PEERS="2", PCCL_LOG_FORMAT="json")
    read = json.loads(wait_for_line(worker, "waiting for"))
    assert read["level"] == "WARN" and read["text"] == "waiting for 1 more peer"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", read["time"])
    assert read["who"] and read["epoch"] is None
    other = run.peer(news.admit_and_reduce, PCCL_LOG_FORMAT="json")
    for one in (worker, other):
        one.expect("ready")
    other.destroy()
    worker.tell("step")
    worker.expect("step")
    lost = json.loads(wait_for_line(worker, "lost rank"))
    assert lost["epoch"] >= 2 and lost["text"].startswith("lost rank 1 (")


def test_a_file_has_the_time_of_each_line() -> None:
    with running(PCCL_LOG_FORMAT="auto") as run:
        worker = run.peer(news.admit_and_reduce, PCCL_MIN_PEERS="2")
        told = wait_for_line(worker, "waiting for")
    assert re.fullmatch(r"\d{4}-\S+Z pccl\[\S+\] WARN: waiting for 1 more peer", told)
