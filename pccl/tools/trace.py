"""`pccl trace merge`: the traces of a run's peers on one clock, and who made whom wait."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from pccl.tools import screen
from pccl.tools.parsing import Misuse

__all__ = ["Merged", "Trace", "merge", "report", "run"]

_NAME = re.compile(r"[0-9a-f]{32}\.json")
_MINUTE = 60e6  # microseconds; clocks that drift by 50 ppm differ by 3 ms more after that
_SHOWN = 10  # rows of each table
_Event = dict[str, Any]


class _Key(NamedTuple):
    """A call of a group in a run, the same in all its members' traces."""

    run: str  # ""; in traces of a pccl that did not write it
    group: int
    call: str


@dataclass
class Trace:
    """One peer's file. Times are microseconds, `wall - clock` is the wall clock's lead."""

    path: Path
    peer: str
    name: str
    boot: str
    lead: float
    group: int = 0

    def events(self) -> Iterator[_Event]:
        """Its events, without the last one if a part of it was written: by a killed peer, or to a
        full disk, where the closing bracket may follow it."""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                text = line.strip().rstrip(",")
                if text in ("", "[", "]"):
                    continue
                try:
                    yield json.loads(text)
                except ValueError:
                    if any(rest.strip() not in ("", "]") for rest in file):
                        raise Misuse(f"{self.path} is no trace of pccl; remove it") from None


@dataclass
class Merged:
    """The findings in the traces. Times are microseconds of the first trace's clock."""

    traces: list[Trace]
    error: float | None = None  # offsets are exact to this; None: they are from wall clocks
    seconds: float = 0.0  # from the first event to the last
    calls: int = 0  # that several of the peers made
    # By (late peer, waiting peer).
    waits: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    last: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # calls, by late peer
    worst: list[tuple[float, _Key, str, str]] = field(
        default_factory=list
    )  # wait, call, late, first
    groups: set[tuple[str, int]] = field(default_factory=set)  # runs and groups of all calls


def _open(path: Path) -> Trace | None:
    for event in Trace(path, "", "", "", 0.0).events():
        if event.get("name") == "pccl" and event.get("ph") == "M":
            said = event["args"]
            lead = said["wall_us"] - said["clock_us"]
            name = said.get("who") or said["peer"][:8]
            return Trace(path, said["peer"], name, said["boot"], lead, said.get("group", 0))
    return None  # killed before it wrote a line


class _Clocks:
    """Offsets of the hosts' clocks, by minutes.

    A frame is received after it was sent. The first frame of each call to each peer bounds the
    difference of two clocks from one side, and the first one back from the other. All pairs, also
    those that reach each other through third hosts, get the tightest bounds of a minute (shortest
    paths in the graph of differences). An offset is the middle, and exact to half of the width: at
    most half of the fastest round trip of that minute.
    """

    def __init__(self, traces: list[Trace]) -> None:
        self._boots = sorted({trace.boot for trace in traces}, key=[t.boot for t in traces].index)
        self._lead = {trace.boot: trace.lead for trace in traces}
        self._least: dict[int, dict[tuple[str, str], float]] = defaultdict(dict)
        self._found: dict[int, dict[str, float]] = {}
        self.error: float | None = None

    def minute(self, boot: str, at: float) -> int:
        return int((at + self._lead[boot]) // _MINUTE)

    def note(self, sender: str, sent: float, receiver: str, received: float) -> None:
        if sender == receiver:
            return
        least = self._least[self.minute(receiver, received)]
        pair = (receiver, sender)
        least[pair] = min(least.get(pair, float("inf")), received - sent)

    def solve(self) -> None:
        widths = [self._solve(minute, least) for minute, least in self._least.items()]
        if not self._found:
            # Wall clocks that differ by minutes put the two directions into different ones.
            ever: dict[tuple[str, str], float] = {}
            for least in self._least.values():
                for pair, wide in least.items():
                    ever[pair] = min(ever.get(pair, wide), wide)
            widths = [self._solve(0, ever)]
        if self._found:
            self.error = max(widths)

    def _solve(self, minute: int, least: Mapping[tuple[str, str], float]) -> float:
        """Returns the error; 0 if there are no bounds."""
        boots, never = self._boots, float("inf")
        bound = {(a, b): 0.0 if a == b else least.get((a, b), never) for a in boots for b in boots}
        for via in boots:
            for a in boots:
                for b in boots:
                    bound[a, b] = min(bound[a, b], bound[a, via] + bound[via, b])
        first = boots[0]
        if never in (bound[pair] for boot in boots for pair in ((first, boot), (boot, first))):
            return 0.0
        self._found[minute] = {b: (bound[first, b] - bound[b, first]) / 2 for b in boots}
        return max((bound[first, b] + bound[b, first]) / 2 for b in boots)

    def shared(self, boot: str, at: float) -> float:
        """The same moment on the first host's clock."""
        if boot == self._boots[0]:
            return at
        if not self._found:
            return at + self._lead[boot] - self._lead[self._boots[0]]
        minute = self.minute(boot, at)
        if minute not in self._found:
            minute = min(self._found, key=lambda other: abs(other - minute))
        return at + self._found[minute][boot]


def merge(folder: Path, output: Path) -> Merged:
    """Writes all traces of a folder as one, and finds who made whom wait.

    Raises:
        Misuse: There are no traces, or a file is none.
        OSError: A file cannot be read or written.
    """
    files = sorted(path for path in folder.glob("*.json") if _NAME.fullmatch(path.name))
    traces = [trace for trace in map(_open, files) if trace is not None]
    if not traces:
        raise Misuse(f"there are no traces in {folder}; run the peers with PCCL_TRACE={folder}")
    names = [trace.name for trace in traces]
    for one in traces:
        if names.count(one.name) > 1:
            one.name += f"/{one.peer[:8]}"
    merged = Merged(traces)
    clocks = _Clocks(traces)
    boots = {trace.peer: trace.boot for trace in traces}
    flows: dict[tuple[_Key, str, str], dict[str, float]] = defaultdict(dict)
    calls: dict[_Key, list[tuple[Trace, float, float]]] = defaultdict(list)
    for trace in traces:
        number = ""
        for event in trace.events():
            arguments = event.get("args", {})
            if event.get("ph") == "M" and event.get("name") == "pccl run":
                number = arguments["run"]
            if event.get("ph") != "X" or "key" not in arguments:
                continue
            key, at = _Key(number, trace.group, arguments["key"]), event["ts"]
            if "peer" not in arguments:
                calls[key].append((trace, at, event["dur"]))
                continue
            sent = event["name"] == "sending"
            ends = (trace.peer, arguments["peer"])
            if arguments["peer"] not in boots:
                continue
            sender, receiver = ends if sent else ends[::-1]
            flow = flows[key, sender, receiver]
            flow["sent" if sent else "received"] = at
            if len(flow) == 2:
                clocks.note(boots[sender], flow["sent"], boots[receiver], flow["received"])
                del flows[key, sender, receiver]
    clocks.solve()
    merged.error = clocks.error
    _blame(merged, calls, clocks)
    _write(merged, clocks, output)
    return merged


def _blame(
    merged: Merged, calls: Mapping[_Key, list[tuple[Trace, float, float]]], clocks: _Clocks
) -> None:
    merged.groups = {key[:2] for key in calls}
    for key, made in calls.items():
        if len(made) < 2:
            continue
        merged.calls += 1
        begun = [(clocks.shared(one.boot, at), one, spent) for one, at, spent in made]
        begun.sort(key=lambda entry: entry[0])
        at, late, _ = begun[-1]
        merged.last[late.name] += 1
        for since, waiter, spent in begun[:-1]:
            merged.waits[late.name, waiter.name] += min(at - since, spent)
        worst = min(at - begun[0][0], begun[0][2])
        merged.worst.append((worst, key, late.name, begun[0][1].name))
    merged.worst.sort(reverse=True)
    del merged.worst[_SHOWN:]


def _write(merged: Merged, clocks: _Clocks, output: Path) -> None:
    begin = min(
        (
            clocks.shared(trace.boot, event["ts"])
            for trace in merged.traces
            for event in trace.events()
            if "ts" in event
        ),
        default=0.0,
    )
    end = begin
    with _replacing(output) as file:
        separator = "[\n"
        for trace in merged.traces:
            for event in trace.events():
                if "ts" in event:
                    event["ts"] = round(clocks.shared(trace.boot, event["ts"]) - begin, 3)
                    end = max(end, begin + event["ts"] + event.get("dur", 0.0))
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]\n")
    merged.seconds = (end - begin) / 1e6


@contextmanager
def _replacing(output: Path) -> Iterator[IO[str]]:
    """A new file that replaces `output` when it is whole.

    Raises:
        OSError: It cannot be written; names `output`, which is as before.
    """
    target = output.resolve()
    is_device = target.exists() and not target.is_file()  # or a pipe: nothing to replace
    name = f".{secrets.token_hex(8)}.unfinished"
    written = target if is_device else target.with_name(name)
    try:
        with written.open("w", encoding="utf-8") as file:
            yield file
        if not is_device:
            os.replace(written, target)
    except OSError as error:
        if error.filename not in (None, str(written)):
            raise  # a trace cannot be read
        raise OSError(error.errno, error.strerror, str(output)) from error
    finally:
        if not is_device:
            written.unlink(missing_ok=True)


def _called(key: _Key, groups: Collection[tuple[str, int]]) -> str:
    """ "3.-.17" is the 17th call without a tag since the admission of epoch 3."""
    admission, tag, sequence = key.call.split(".")
    of = [] if tag == "-" else [f"tag {tag}"]
    if len({group for _, group in groups}) > 1:
        of.append(f"group {key.group}")
    if len({run for run, _ in groups}) > 1:
        of.append(f"run {key.run or 'unknown'}")
    which = f" of {', '.join(of)}" if of else ""
    return f"collective #{sequence}{which} (since epoch {admission})"


def report(merged: Merged) -> str:
    """What `pccl trace merge` prints."""
    peers = len(merged.traces)
    lines = [f"{peers} trace{'s' * (peers > 1)}, {merged.seconds:.3f} s, {merged.calls} calls"]
    if merged.error is None:
        lines.append("clocks: as the hosts have them, since no frames went both ways between them")
    else:
        lines.append(f"clocks: aligned to {merged.error / 1e3:.3f} ms")
    total: dict[str, float] = defaultdict(float)
    for (late, _), spent in merged.waits.items():
        total[late] += spent
    lines += ["", "made others wait      seconds  as the last one in"]
    for name in sorted(total, key=lambda one: -total[one])[:_SHOWN]:
        share = merged.last[name]
        lines.append(f"{name:<20} {total[name] / 1e6:>8.3f}  {share} of {merged.calls} calls")
    lines += ["", "who waited            seconds  for"]
    pairs = sorted(merged.waits, key=lambda pair: -merged.waits[pair])
    for late, waiter in pairs[:_SHOWN]:
        lines.append(f"{waiter:<20} {merged.waits[late, waiter] / 1e6:>8.3f}  {late}")
    lines += ["", "longest waits         seconds  in"]
    for spent, key, late, first in merged.worst:
        lines.append(f"{first:<20} {spent / 1e6:>8.3f}  {_called(key, merged.groups)}, for {late}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """`pccl trace merge FOLDER [-o FILE]`."""
    folder = Path(options.folder)
    if not folder.is_dir():
        raise Misuse(f"there is no folder {folder}; give the one that PCCL_TRACE named")
    output = folder / "merged.json" if options.output is None else Path(options.output)
    try:
        merged = merge(folder, output)
    except OSError as error:
        screen.failure("pccl trace merge", f"{error.filename}: {error.strerror}")
        return 1
    print(report(merged))
    print(f"\n{output}: open it in https://ui.perfetto.dev or chrome://tracing")
    return 0
