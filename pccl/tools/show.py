"""`pccl status`: a run on one screen."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pccl.tools import screen
from pccl.tools.parsing import Misuse, add_master, whole
from pccl.tools.status import (
    BEHIND_ENTRIES,
    HELD_SECONDS,
    Call,
    Group,
    Link,
    Member,
    Plan,
    Status,
    Unreadable,
    ask,
    binary,
    duration,
    master_of,
    rate,
    read,
    troubles,
)

__all__: list[str] = []

_EVENTS = 10  # the last ones that are shown
_ROWS = 64  # members, calls and links of a group that are shown
_DROPPED = ("address", "since", "host", "received/s", "heard")  # in this order, on narrow screens
WORDS = ("name", "address", "state", "why")


class Table(NamedTuple):
    """Cells by columns, and which rows are in trouble."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bad: Sequence[int]

    def fitted(self, width: int | None) -> Table:
        """Without the columns that matter least, until it is at most that wide."""
        kept = list(self.columns)
        dropped = list(_DROPPED)
        while width and dropped and self._width(kept) > width:
            column = dropped.pop(0)
            if column in kept:
                kept.remove(column)
        at = [self.columns.index(column) for column in kept]
        return Table(kept, [[row[i] for i in at] for row in self.rows], self.bad)

    def _width(self, kept: Sequence[str]) -> int:
        widths = dict(zip(self.columns, self.widths(), strict=True))
        return sum(widths[column] + 2 for column in kept) - 2

    def widths(self) -> list[int]:
        """The columns' widths."""
        return [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pccl status`."""
    add_master(parser)
    words = "show this group alone (default: all)"
    parser.add_argument("--group", type=whole(0, 2**32 - 1), metavar="N", help=words)
    words = "print the status as one JSON object (default: text)"
    parser.add_argument("--json", action="store_true", help=words)


def run(options: argparse.Namespace) -> int:
    """The command.

    Returns:
        The exit status: 0 if all is well, 1 if something is not.

    Raises:
        Misuse: No master answered, or it knows no such group.
    """
    master = master_of(options.master)
    given = ask(master)
    status = _read(given, master)
    if options.group is not None:
        found = status.group(options.group)
        if found is None:
            known = ", ".join(str(group.group) for group in status.groups) or "none yet"
            raise Misuse(f"there is no group {options.group}; the groups are: {known}")
        given = {
            **given,
            "groups": [one for one in given["groups"] if one.get("group") == options.group],
        }
        status = read(given)
    wrong = troubles(status)
    if options.json:
        print(json.dumps(given))
    else:
        _print(status, wrong)
    return 1 if wrong else 0


def _read(given: object, master: str) -> Status:
    try:
        return read(given)
    except Unreadable as error:
        sentence = f"cannot read the status of {master}: {error}; use the master's version of pccl"
        raise Misuse(sentence) from None


def run_line(status: Status) -> str:
    """A line about the whole run."""
    parts = [
        status.software,
        f"run {status.run}",
        f"master up {duration(status.seconds)}",
        f"term {status.term}",
        "encrypted" if status.encrypted else "not encrypted",
        "relays" if status.relays else "does not relay",
        f"{status.evictions} evicted",
    ]
    if status.groups_left_out:
        parts.append(f"{status.groups_left_out} groups left out")
    if status.admission_paused:
        parts.append("ADMISSION PAUSED")
    return ", ".join(part for part in parts if part)


def masters_line(status: Status) -> str:
    """How the masters answer; "" if only one was asked."""
    if not status.masters:
        return ""
    return "Masters: " + ", ".join(f"{one.address} ({one.state})" for one in status.masters)


def group_line(group: Group) -> str:
    """A line about the whole group."""
    counts = f"{group.operations} operations, {group.aborted} aborted"
    followers = f", followed by {', '.join(group.followers)}" if group.followers else ""
    if not group.epoch:
        return f"Group {group.group}: not started, {group.missing} of {group.min_peers} missing"
    return (
        f"Group {group.group}: {len(group.members)} members (at least {group.min_peers}), epoch "
        f"{group.epoch} since {duration(group.epoch_seconds)} ({group.cause}), {counts}{followers}"
    )


def members_of(group: Group, members: Sequence[Member] | None = None) -> Table:
    """A row for each member, in that order. Those that others wait for are in trouble."""
    columns = [
        "rank",
        "name",
        "address",
        "host",
        "since",
        "heard",
        "ops/s",
        "reduced/s",
        "state",
    ]
    rows, bad = [], []
    for number, member in enumerate(group.members if members is None else members):
        if not member.connected or _held_up(group, member):
            bad.append(number)
        rows.append(
            [
                str(member.rank),
                member.name,
                member.address,
                str(member.host),
                duration(member.seconds),
                duration(member.heard_seconds),
                "-" if member.operations_per_s is None else f"{member.operations_per_s:.1f}",
                rate(member.reduced_bytes_per_s),
                state_of(group, member),
            ]
        )
    return Table(columns, rows, bad)


def _held_up(group: Group, member: Member) -> Call | None:
    """The call in which others wait for it, once that is more than the calls of a healthy run."""
    call = group.held_up_by(member.rank)
    return call if call is not None and call.seconds >= HELD_SECONDS else None


def state_of(group: Group, member: Member) -> str:
    """The calls that a member waits in, who waits for it, and other things of note."""
    said = [f"{wait.call} ({duration(wait.seconds)})" for wait in member.waits]
    call = _held_up(group, member)
    if call is not None:
        said.append(f"{len(call.entered)} wait for it ({duration(call.seconds)})")
    if not member.connected:
        said.append("not connected")
    if member.draining:
        said.append("draining")
    if member.behind >= BEHIND_ENTRIES:
        said.append(f"{member.behind} log entries behind")
    if member.replica:
        said.append(f"replica {member.replica}")
    return "; ".join(said)


def calls_of(group: Group) -> Iterator[str]:
    """A sentence for each open call."""
    for call in group.calls:
        what = f" ({call.what})" if call.what else ""
        missing = group.names(call.missing)
        state = f"missing: {missing}" if missing else "all are in"
        ranks = len(call.entered) + len(call.missing)
        yield (
            f"{call.call}{what}, {duration(call.seconds)}: {len(call.entered)} of {ranks} in; {state}"
        )


def plan_of(plan: Plan) -> Iterator[str]:
    """The schedules by size, then the reason for them."""
    classes = [
        f"{each.kind} up to {binary(each.max_bytes)}" if each.max_bytes is not None else each.kind
        for each in plan.classes
    ]
    if classes:
        yield f"{', then '.join(classes)}; segments of {binary(plan.segment_bytes)}"
    if plan.why:
        yield plan.why


def link_line(group: Group, link: Link) -> str:
    """A link that is not as it should be."""
    reason = f": {link.reason}" if link.reason else ""
    return f"{group.name(link.from_)} to {group.name(link.to)}: {link.state}{reason}"


def _print(status: Status, wrong: Sequence[str]) -> None:
    screen.line(run_line(status))
    if status.masters:
        screen.line(masters_line(status))
    for group in status.groups:
        _print_group(group)
    if status.events:
        screen.heading("Last events")
        for event in status.events[-_EVENTS:]:
            of = f"[{event.group}] " if event.group is not None and len(status.groups) > 1 else ""
            mark = "WARN  " if event.level == "warn" else ""
            screen.line(f"{duration(event.seconds_ago):>12} ago  {mark}{of}{event.text}")
    print()
    for sentence in wrong:
        screen.verdict(f"{sentence}.", good=False)
    if not wrong:
        screen.verdict("All is well." if status.groups else "Nobody has joined yet.", good=True)


def _print_group(group: Group) -> None:
    if group.members:
        found = members_of(group, group.members[:_ROWS]).fitted(screen.width())
        screen.table(group_line(group), found.columns, found.rows, words=WORDS, bad=found.bad)
        _more(len(group.members), "members")
    else:
        screen.heading(group_line(group))
    if group.newcomers:
        rows = [
            [one.name, one.address, duration(one.seconds), one.reason]
            for one in group.newcomers[:_ROWS]
        ]
        columns = ["name", "address", "since", "why"]
        fitted = Table(columns, rows, ()).fitted(screen.width())
        screen.table("Newcomers", fitted.columns, fitted.rows, words=WORDS)
        _more(len(group.newcomers), "newcomers")
    _section("Open calls", list(calls_of(group)))
    _section("Plan", list(plan_of(group.plan)))
    links = [link_line(group, link) for link in group.links if link.state != "ok"]
    _section("Links", links)


def _section(title: str, sentences: Sequence[str]) -> None:
    if sentences:
        screen.heading(title)
        for sentence in sentences[:_ROWS]:
            screen.line(f"  {sentence}")
        _more(len(sentences), "lines")


def _more(count: int, what: str) -> None:
    if count > _ROWS:
        screen.line(f"  and {count - _ROWS} more {what}; --json has all of them")
