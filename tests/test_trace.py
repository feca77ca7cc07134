"""Traces: what a peer writes, and what `pccl trace merge` makes of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from programs import stats
from workers import Run, eventually, wait_until_asleep

import pccl
from pccl import _core
from pccl.tools import cli, trace
from pccl.tools.parsing import Misuse

SMALL, LARGE = 1000, 300_000


def read(folder: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def spans(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [one for one in events if one["ph"] == "X" and one["name"].startswith(name)]


def check(events: list[dict[str, Any]]) -> None:
    """Spans of a lane nest, and every event has what viewers need."""
    lanes: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one in events:
        assert one["ph"] in "XMi" and one["pid"] and one["name"]
        if one["ph"] == "X":
            assert one["dur"] >= 0
            lane = lanes.setdefault((one["pid"], one["tid"]), [])
            lane.append((one["ts"], one["ts"] + one["dur"]))
    for lane in lanes.values():
        lane.sort(key=lambda span: (span[0], -span[1]))
        above: list[float] = []
        for begin, end in lane:
            while above and above[-1] <= begin + 0.001:  # sums of floats
                above.pop()
            assert not above or end <= above[-1] + 0.001
            above.append(end)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("shm", ["1", "0"])
def test_a_peer_writes_its_calls_and_the_bytes_on_its_links(
    run: Run, tmp_path: Path, shm: str, count: int
) -> None:
    program = partial(stats.reduce, 3, count)
    workers = run.peers(2, program, PCCL_SHM=shm, PCCL_TRACE=str(tmp_path / "new"))
    said = [worker.expect("reduced") for worker in workers]
    assert [worker.ends() for worker in workers] == [0, 0]
    for events in read(tmp_path / "new"):
        check(events)
        calls = spans(events, "collective #")
        assert [one["name"] for one in calls] == [f"collective #{n}" for n in range(3)]
        for one in calls:
            assert one["args"]["bytes"] == 4 * count
            parts = [one["args"][f"{part}_us"] for part in ("waiting", "moving", "commit")]
            # They are of the last attempt. The first ends if they find out that they share memory.
            assert sum(parts) <= one["dur"] + 0.01
            if "attempts" not in one["args"]:
                assert sum(parts) == pytest.approx(one["dur"], abs=0.01)
        begun = {one["args"]["peer"] for one in events if one["name"] == "pccl"}
        assert {one["args"]["group"] for one in events if one["name"] == "pccl"} == {0}
        (run_id,) = {one["args"]["run"] for one in events if one["name"] == "pccl run"}
        assert re.fullmatch("[0-9a-f]{16}", run_id)
        peers = {peer for one in said for peer in one["info"]["contributors"]}
        assert begun < peers
        assert any(one["ph"] == "i" and one["name"].startswith("epoch ") for one in events)
        sent, received = (
            [one for one in events if one["name"] == name] for name in ("sending", "receiving")
        )
        if shm == "1" and _core.shares_memory():
            # The first ones may have begun before they knew that they share memory.
            used = {one["args"]["key"] for one in [*sent, *received]}
            assert used == {one["args"]["key"] for one in calls[: len(used)]}
            assert len(used) <= 1 or count == SMALL  # a long one ends when they find out
            continue
        for flows, field in ((sent, "tx_bytes"), (received, "rx_bytes")):
            assert len(flows) == 3
            assert {one["args"]["bytes"] for one in flows} == {said[0]["info"][field]}
            assert {one["args"]["peer"] for one in flows} == peers - begun
            assert [one["args"]["key"] for one in flows] == [one["args"]["key"] for one in calls]


def test_nothing_is_written_unless_asked_for(run: Run, tmp_path: Path) -> None:
    for worker in run.peers(2, partial(stats.reduce, 1, SMALL)):
        worker.expect("reduced")
        worker.ends()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("PCCL_TRACE", str(file))
    with pytest.raises(
        pccl.InvalidArgument, match=r"cannot write a trace to .*file.* \(PCCL_TRACE\)"
    ):
        pccl.Communicator(run.address).connect()


def test_a_trace_ends_at_its_size(run: Run, tmp_path: Path) -> None:
    program = partial(stats.reduce, 8000, 10)
    for worker in run.peers(2, program, PCCL_TRACE=str(tmp_path), PCCL_TRACE_MB="1"):
        worker.expect("reduced", timeout=60)
        worker.ends()
    for path in tmp_path.iterdir():
        assert 1 << 20 <= path.stat().st_size < (1 << 20) + (1 << 19)
        assert json.loads(path.read_text())[-1]["name"] == "the trace ends here"


def test_a_trace_on_a_full_disk_ends_with_a_whole_event(run: Run, tmp_path: Path) -> None:
    program = partial(stats.reduce_with_little_space, 5000)
    for worker in run.peers(2, program, PCCL_TRACE=str(tmp_path)):
        worker.expect("reduced", timeout=60)
        worker.ends()
    for events in read(tmp_path):
        check(events)
        assert events[1]["name"] == "pccl"
        assert len(spans(events, "collective #")) < 100


def killed_and_late(run: Run, folder: Path) -> list[str]:
    """A late member, which is killed in the end. Returns the ids, its own first."""
    env = {"PCCL_SHM": "0", "PCCL_TRACE": str(folder), "PCCL_HEARTBEAT_TIMEOUT": "2"}
    first, late = run.peers(2, stats.meet, **env)
    for worker in (first, late):
        worker.expect("ready")
    first.tell(SMALL)
    first.expect("begins")
    wait_until_asleep(first)
    late.tell(SMALL)
    late.expect("begins")
    contributors = late.expect("met")["contributors"]
    first.expect("met")
    late.tell(SMALL)
    late.expect("begins")
    wait_until_asleep(late)
    eventually(  # both have written the first call
        lambda: sum('"collective #0"' in path.read_text() for path in folder.glob("*.json")) == 2
    )
    late.signal(signal.SIGKILL)
    late.ends()
    first.tell(SMALL)
    first.expect("begins")
    alone = first.expect("met")["contributors"]
    first.tell("end")
    assert first.ends() == 0
    return [*(set(contributors) - set(alone)), *alone]


def test_merge_says_who_made_whom_wait(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late, first = killed_and_late(run, tmp_path)
    names = {one.peer: one.name for path in tmp_path.iterdir() if (one := trace._open(path))}
    unfinished = (tmp_path / f"{late}.json").read_text()
    with pytest.raises(ValueError):
        json.loads(unfinished)
    alone = json.loads(unfinished + "]")  # as viewers do
    check(alone)
    lanes = {one["args"]["name"] for one in alone if one["name"] == "thread_name"}
    assert {f"to {names[first]}", f"from {names[first]}"} <= lanes
    # A peer that is killed while it writes.
    (tmp_path / f"{late}.json").write_text(unfinished + ',\n{"name":"colle')
    assert cli.main(["trace", "merge", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "2 traces" in printed
    # Builds that share no memory cannot tell either that two peers have one clock.
    assert "aligned to 0.000 ms" in printed or not _core.shares_memory()
    merged = json.loads((tmp_path / "merged.json").read_text())
    check(merged)
    assert min(one["ts"] for one in merged if "ts" in one) == 0
    assert any(one["name"].startswith("lost ") for one in merged)
    lanes = {one["args"]["name"] for one in merged if one["name"] == "thread_name"}
    ends = {f"{way} {name}" for way in ("to", "from") for name in names.values()}
    assert ends <= lanes and not any(one[:8] in str(lanes) for one in names)
    found = trace.merge(tmp_path, tmp_path / "again.json")
    (pair,) = [pair for pair, spent in found.waits.items() if spent > 1e5]
    assert pair == (names[late], names[first])
    assert found.worst[0][2:] == (names[late], names[first])
    assert f"for {names[late]}" in printed


def written(
    folder: Path,
    number: int,
    boot: str,
    ahead: float,
    events: list[Any],
    *,
    run: str | None = None,
    **more: Any,
) -> str:
    """A trace with a clock that is `ahead`, in microseconds."""
    peer = str(number) * 32
    said = {"peer": peer, "boot": boot, "wall_us": 0.0, "clock_us": 0.0, **more}
    lines: list[Any] = [{"name": "pccl", "ph": "M", "pid": peer[:8], "args": said}]
    if run is not None:
        lines.append({"name": "pccl run", "ph": "M", "pid": peer[:8], "args": {"run": run}})
    for name, key, begin, end, other in events:
        arguments: dict[str, Any] = {"key": key}
        if other is not None:
            arguments["peer"] = str(other) * 32
        lines.append(
            {
                "name": name,
                "ph": "X",
                "pid": peer[:8],
                "tid": 0,
                "ts": begin + ahead,
                "dur": end - begin,
                "args": arguments,
            }
        )
    (folder / f"{peer}.json").write_text("[\n" + ",\n".join(map(json.dumps, lines)))
    return peer[:8]


def test_clocks_of_hosts_are_aligned_within_the_bound_that_is_told(tmp_path: Path) -> None:
    # A ring of three hosts: frames go from 0 to 1 to 2 to 0, in 100 us, 300 us and 200 us.
    delays, ahead = {(0, 1): 100.0, (1, 2): 300.0, (2, 0): 200.0}, [0.0, 5e6, -3e6]
    begun = {0: 1000.0, 1: 51_000.0, 2: 2000.0}  # the second one is late
    names = []
    for number in range(3):
        after, before = (number + 1) % 3, (number - 1) % 3
        sent = 52_000.0
        received = sent + delays[before, number]
        names.append(
            written(
                tmp_path,
                number,
                f"boot {number}",
                ahead[number],
                [
                    ("collective #0", "1.-.0", begun[number], 60_000.0, None),
                    ("sending", "1.-.0", sent, sent + 1, after),
                    ("receiving", "1.-.0", received, received + 1, before),
                ],
            )
        )
    merged = trace.merge(tmp_path, tmp_path / "merged.json")
    assert merged.error == pytest.approx(300.0)  # half of the way around
    assert merged.last == {names[1]: 1}
    for waiter in (0, 2):
        spent = merged.waits[names[1], names[waiter]]
        assert abs(spent - (begun[1] - begun[waiter])) <= 2 * merged.error
    times = {
        (one["pid"], one["name"]): one["ts"]
        for one in json.loads((tmp_path / "merged.json").read_text())
        if "ts" in one
    }
    for sender, receiver in delays:  # nothing arrives before it was sent
        sent, received = times[names[sender], "sending"], times[names[receiver], "receiving"]
        assert sent <= received + 1e-6


def test_without_frames_both_ways_wall_clocks_are_used_and_that_is_told(tmp_path: Path) -> None:
    for number in range(2):
        written(tmp_path, number, f"boot {number}", 0.0, [("collective #0", "1.-.0", 1, 2, None)])
    merged = trace.merge(tmp_path, tmp_path / "merged.json")
    assert merged.error is None
    assert "clocks: as the hosts have them" in trace.report(merged)


@pytest.mark.parametrize("apart", ["group", "run"])
def test_groups_and_runs_of_one_folder_have_their_own_calls(tmp_path: Path, apart: str) -> None:
    names = []
    for number in range(4):
        own: Any = {
            "group": 0,
            "run": "ab",
            apart: [0, 1][number // 2] if apart == "group" else ["ab", "cd"][number // 2],
        }
        begin = 1e3 * number
        calls = [("collective #0", "1.-.0", begin, 5e3 + begin, None)]
        names.append(written(tmp_path, number, "boot", 0.0, calls, **own))
    merged = trace.merge(tmp_path, tmp_path / "merged.json")
    assert merged.calls == 2
    assert dict(merged.waits) == {(names[1], names[0]): 1e3, (names[3], names[2]): 1e3}
    said = trace.report(merged)
    for one in ("group 0", "group 1") if apart == "group" else ("run ab", "run cd"):
        assert f"collective #0 of {one} (since epoch 1), for" in said


def test_a_trace_of_a_full_disk_is_read_up_to_its_broken_line(tmp_path: Path) -> None:
    written(tmp_path, 1, "b", 0.0, [("collective #0", "1.-.0", 1, 2, None)])
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + ',\n{"name":"colle\n]\n')
    assert len(trace.merge(tmp_path, tmp_path / "merged.json").traces) == 1
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(Misuse, match="is no trace of pccl"):
        trace.merge(tmp_path, tmp_path / "merged.json")


def test_a_merge_that_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 1, "b", 0.0, [])
    assert cli.main(["trace", "merge", str(tmp_path), "-o", "/dev/full"]) == 1
    assert capsys.readouterr().err == "pccl trace merge: /dev/full: No space left on device\n"
    output = tmp_path / "merged.json"
    output.write_text("as it was")

    def full(written: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cli.main(["trace", "merge", str(tmp_path)]) == 1
    assert f"{output}: No space left" in capsys.readouterr().err
    assert output.read_text() == "as it was"
    assert len(list(tmp_path.iterdir())) == 2


def test_merge_refuses_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "merge", str(tmp_path)]) == 2
    assert "there are no traces" in capsys.readouterr().err
    assert cli.main(["trace", "merge", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / f"{str(1) * 32}.json").write_text("hello\nyou\n")
    with pytest.raises(Misuse, match="is no trace of pccl"):
        trace.merge(tmp_path, tmp_path / "merged.json")
    written(tmp_path, 1, "b", 0.0, [])
    assert cli.main(["trace", "merge", str(tmp_path), "-o", str(tmp_path / "no" / "file")]) == 1


def test_the_benchmark_runs() -> None:
    program = Path(__file__).resolve().parent.parent / "benchmarks" / "trace.py"
    done = subprocess.run(
        [sys.executable, str(program), "--quick"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:]] == [
        "plain",
        "again",
        "traced",
        "asked",
    ]
