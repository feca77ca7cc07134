"""A fault drill: a run of eight peers meets one kind of fault after the other.

    python benchmarks/drill.py [--short] [--peers 8] [--masters 3] [--only TEXT] [--loopback]
                               [--memory] [--json FILE]

For each fault it prints how many members train afterwards, the longest pause of those that were not
hit, when all were well again, and what the status said meanwhile. All steps of all peers are
compared: the same step must give the same weights everywhere, and no peer may make one twice. The
exit status is 1 if a run did not become well, members disagreed, somebody was told of a failure
that the fault does not explain, the status did not show the fault, or members paused for longer
than the heartbeat timeout, two round trips and 0.5 s because of a master. With --memory they may
pause for 0.5 s: calls in memory do not need the master.

As root, each process is on a host of its own (benchmarks/wan/lab.py: 200 Mbit/s, 1 ms), and lines
can be cut. Elsewhere, or with --loopback, faults of the network are left out. A failure is detected
in 2 s instead of 6 s. With --memory peers share memory, on one host. Between faults peers that are
gone are started again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from drilling import run as running
from drilling.faults import FAULTS, Fault
from drilling.run import Failed, Run, Status

_START_SECONDS = 120.0
_SHOWN = 3  # of the status's sentences, for each fault


@dataclass
class Result:
    """The effects of one fault."""

    fault: str
    world: int  # members that train afterwards
    pause: float  # seconds: the longest between two steps of a member that was not hit
    well: float  # seconds from the fault until all were well, the fault's own duration included
    said: list[str]  # by the status
    wrong: str = ""


_SLOW_SECONDS = 0.5  # of an answer of a master
_SILENT_SECONDS = 0.7  # without a heartbeat, which comes every 0.3 s
_IN_MEMORY_SECONDS = 0.5  # a pause for which a master is to blame


def sentences(status: Status | None, age: float) -> Iterator[str]:
    """A status as sentences, with the events of the last `age` seconds."""
    if status is None:
        yield "no answer"
        return
    if status["admission_paused"]:
        yield "admission is paused"
    if status["restarts"]:
        yield f"restarts {status['restarts']}"
    for master in status.get("masters", []):
        if master["state"] == "no answer":
            yield f"master {master['address']} does not answer"
    for group in status["groups"]:
        names = {member["rank"]: member["name"] for member in group["members"]}
        count = len(names)
        yield f"{count} member{'' if count == 1 else 's'}"
        for newcomer in group["newcomers"]:
            yield f"{newcomer['name']} {newcomer['state']}"
        for member in group["members"]:
            if member["draining"]:
                yield f"{member['name']} is draining"
            if not member["connected"]:
                yield f"{member['name']} is not connected"
            if member["heard_seconds"] > _SILENT_SECONDS:
                yield f"{member['name']} is silent"
        for call in group["calls"]:
            if call["missing"] and call["seconds"] > 0.3:
                missing = ", ".join(names.get(rank, "?") for rank in call["missing"])
                yield f"{call['call']} waits for {missing}"
    for event in status["events"]:
        if event["seconds_ago"] < age:
            yield event["text"]


def said(run: Run, since: float) -> list[str]:
    """The sentences that are new in the status since then, each once."""
    seen = list(run.seen)
    slowest = max((answered - asked for asked, answered, _ in seen if answered >= since), default=0)
    late = [f"the answer took {slowest:.1f} s"] if slowest > _SLOW_SECONDS else []
    found = dict.fromkeys(
        sentence
        for asked, answered, status in seen
        if asked >= since
        for sentence in sentences(status, answered - since)
    )
    known = {
        sentence
        for asked, _, status in seen
        if asked < since
        for sentence in sentences(status, 0.0)
    }
    new = [sentence for sentence in found if sentence not in known]
    return (new or list(found)) + late


def meet(run: Run, fault: Fault, slack: float) -> Result:
    """Makes a fault, and waits until all are well."""
    begun = time.monotonic()
    names = [member.name for member in run.living() if member.name not in fault.victims]
    result = Result(fault.name, 0, 0.0, 0.0, [])
    try:
        result.world = fault.make(run)
        over = time.monotonic()
        well = run.wait_until_well(over, result.world, fault.seconds)
        alive = [n for n in names if run.members[n].alive]
        result.pause = run.longest_pause(begun, well, alive)
        result.well = well - begun
        run.wait("the status is seen", lambda: any(asked > well for asked, *_ in run.seen))
        told = [
            f"{name}: {one['kind']}"
            for name in alive
            for one in run.members[name].events(begun, "error")
            if one["kind"] not in fault.errors
        ]
        if told:
            raise Failed("told of a failure: " + "; ".join(told))
        result.said = said(run, begun)
        if fault.shows is not None and not re.search(fault.shows, "\n".join(result.said)):
            raise Failed(f"the status did not show it: {result.said}")
        if fault.pause is not None:
            most = min(fault.pause, _IN_MEMORY_SECONDS) if run.memory else fault.pause
            if result.pause > most + slack:
                raise Failed(f"members paused for longer than {most:.2f} s")
    except Failed as error:
        result.said = result.said or said(run, begun)
        result.wrong = str(error)
    return result


def restore(run: Run) -> None:
    """Starts again who is gone, and ends who came in addition."""
    if late := run.members.pop("late", None):
        late.process.kill()
        late.process.wait()
    begun = time.monotonic()
    for member in list(run.members.values()):
        if not member.alive:
            run.start_peer(member.name, member.place)
    run.wait_until_well(begun, len(run.members), _START_SECONDS)
    del run.seen[:-20]


def report(result: Result) -> None:
    verdict = "ok  " if not result.wrong else "FAIL"
    print(
        f"{verdict} {result.fault:36} {result.world:>2} train on   longest pause "
        f"{result.pause:5.2f} s   all well after {result.well:5.2f} s"
    )
    for sentence in result.said[:_SHOWN]:
        print(f"       status: {sentence[:100]}")
    if result.wrong:
        print(f"       {result.wrong}")
    sys.stdout.flush()


def drill(
    faults: list[Fault], options: argparse.Namespace, with_lab: bool, folder: Path
) -> list[Result]:
    """Runs the faults one after the other. A run that did not become well is begun anew."""
    results: list[Result] = []
    left = list(faults)
    while left:
        with Run(options.peers, folder, with_lab, options.masters, options.memory) as run:
            run.wait_until_well(0.0, options.peers, _START_SECONDS)
            while left:
                results.append(meet(run, left.pop(0), options.slack))
                report(results[-1])
                if results[-1].wrong:
                    break
                restore(run)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="some of the faults")
    parser.add_argument("--peers", type=int, default=8, help="at least 3; default: %(default)s")
    parser.add_argument("--masters", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--only", default="", help="faults whose names contain this text")
    parser.add_argument("--loopback", action="store_true", help="no network of its own")
    slack = "seconds that pauses may be longer, on a busy machine (default: %(default)s)"
    parser.add_argument("--slack", type=float, default=0.0, help=slack)
    parser.add_argument("--memory", action="store_true", help="peers share memory")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--logs", type=Path, help="keep the logs there; default: a new folder")
    options = parser.parse_args()
    where = "--memory" if options.memory else "--loopback" if options.loopback else None
    why = where or running.lab.why_not()
    faults = [fault for fault in FAULTS if options.only in fault.name]
    faults = [fault for fault in faults if fault.in_short or not options.short]
    other = "several" if options.masters == 1 else "one"
    faults = [fault for fault in faults if fault.masters != other]
    if why is not None:
        print(f"without faults of the network: {why}")
        faults = [fault for fault in faults if not fault.needs_lab]
    folder = options.logs or Path(tempfile.mkdtemp(prefix="pccl-drill-"))
    folder.mkdir(parents=True, exist_ok=True)
    results = drill(faults, options, why is None, folder)
    if options.json:
        text = json.dumps([asdict(result) for result in results], indent=1)
        options.json.write_text(text + "\n")
    failed = [result.fault for result in results if result.wrong]
    print(f"{len(results)} faults, {len(failed)} failed; logs in {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
