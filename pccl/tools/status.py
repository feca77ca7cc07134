"""The status of a run, typed. All views are made of a `Status`: screen, `top`, page, metrics."""

from __future__ import annotations

import dataclasses
import functools
import math
import queue
import threading
import time
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pccl import _core, _settings
from pccl._core import FIRST_PAIR
from pccl.errors import PCCLError, Refused
from pccl.following.doors import group_behind
from pccl.tools.parsing import Misuse, reason_of

__all__ = [
    "Call",
    "Event",
    "Group",
    "Link",
    "Master",
    "Member",
    "Newcomer",
    "Plan",
    "PlanClass",
    "Status",
    "Unreadable",
    "Wait",
    "ask",
    "ask_any",
    "binary",
    "duration",
    "in_background",
    "master_of",
    "master_troubles",
    "rate",
    "read",
    "size",
    "troubles",
]

HELD_SECONDS = 2.0  # a call that has waited this long for a member is marked
BEHIND_ENTRIES = 64  # of the log; a healthy member has not applied a few yet
LATE_SECONDS = 10.0  # a call that has waited this long for a member; the log names it then, too
SILENT_SECONDS = 10.0  # without a word of a member; heartbeats come every second or so
ROUNDED = 0.9995  # of a unit: from here on three digits of the next smaller one become 1000
BROKEN = ("unreachable", "silent", "broken")  # states of links that are in trouble


@dataclass(frozen=True)
class Wait:
    """A call in which a thread of a member is blocked."""

    call: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Member:
    """A member. Totals count from when it joined; rates are None until they are known."""

    rank: int = 0
    name: str = ""
    id: str = ""
    host: int = 0
    address: str = ""
    software: str = ""
    seconds: float = 0.0
    heard_seconds: float = 0.0
    connected: bool = True
    draining: bool = False
    replica: str = ""
    behind: int = 0
    waits: tuple[Wait, ...] = ()
    operations: int = 0
    reduced_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    operations_per_s: float | None = None
    reduced_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Newcomer:
    """A peer that has joined and is not a member yet."""

    name: str = ""
    id: str = ""
    address: str = ""
    seconds: float = 0.0
    state: str = "joined"
    without: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Why it waits."""
        if self.without:
            return f"cannot reach {', '.join(self.without)}"
        return {
            "joined": "its program has made no collective call yet",
            "asks": "waits for the group's start",
            "connects": "connects to the members",
            "ready": "enters at the next admission point",
        }.get(self.state, self.state)


@dataclass(frozen=True)
class Call:
    """A call that some members have entered. Others wait for the ranks that are missing."""

    call: str = ""
    what: str = ""
    seconds: float = 0.0
    entered: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    @functools.cached_property
    def _missing(self) -> frozenset[int]:
        return frozenset(self.missing)

    def waits_for(self, rank: int) -> bool:
        """Whether that member has not entered it."""
        return rank in self._missing


@dataclass(frozen=True)
class Link:
    """A path for bytes, in one direction."""

    from_: int = 0
    to: int = 0
    bytes_per_s: float | None = None
    rtt_seconds: float | None = None
    state: str = "ok"
    reason: str = ""


@dataclass(frozen=True)
class PlanClass:
    """The schedule of operations of up to `max_bytes`; None: of all larger ones."""

    max_bytes: int | None = None
    kind: str = ""


@dataclass(frozen=True)
class Plan:
    """Schedules by size, and the reason for the choice."""

    why: str = ""
    segment_bytes: int = 0
    classes: tuple[PlanClass, ...] = ()


@dataclass(frozen=True)
class Group:
    """A group. `missing`: so many peers have to come until it starts.

    `followers`: names of those that receive what its members publish.
    """

    group: int = 0
    epoch: int = 0
    epoch_seconds: float = 0.0
    cause: str = ""
    min_peers: int = 1
    missing: int = 0
    members: tuple[Member, ...] = ()
    newcomers: tuple[Newcomer, ...] = ()
    calls: tuple[Call, ...] = ()
    links: tuple[Link, ...] = ()
    plan: Plan = Plan()
    operations: int = 0
    aborted: int = 0
    followers: tuple[str, ...] = ()

    def name(self, rank: int) -> str:
        """The member's name, with its rank."""
        found = self._names.get(rank, "")
        return f"{found} (rank {rank})" if found else f"rank {rank}"

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {one.rank: one.name for one in reversed(self.members)}

    def names(self, ranks: tuple[int, ...]) -> str:
        """Names of these members; of many, the first four and how many more."""
        shown = [self.name(rank) for rank in ranks[:4]]
        more = len(ranks) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")

    def held_up_by(self, rank: int) -> Call | None:
        """The longest open call in which others wait for that member; None: nobody does."""
        calls = [call for call in self.calls if call.entered and call.waits_for(rank)]
        return max(calls, key=lambda call: call.seconds, default=None)


@dataclass(frozen=True)
class Event:
    """A line of the master's log."""

    seconds_ago: float = 0.0
    level: str = "info"
    group: int | None = None
    epoch: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Master:
    """One of a run's masters, as who asks sees it. `reason`: of a state that is not well."""

    address: str = ""
    state: str = ""
    reason: str = ""


# States of masters.
SERVES, SERVES_TOO, WAITS = "serves", "serves, too", "waits to start"
STANDS_BY, REFUSES, NO_ANSWER = "stands by", "refuses", "no answer"


@dataclass(frozen=True)
class Status:
    """A run as its master sees it. `masters`: empty if only one was asked."""

    software: str = ""
    run: str = ""
    term: int = 1
    seconds: float = 0.0
    encrypted: bool = False
    relays: bool = False
    admission_paused: bool = False
    evictions: int = 0
    restarts: int = 0
    groups: tuple[Group, ...] = ()
    groups_left_out: int = 0
    events: tuple[Event, ...] = ()
    masters: tuple[Master, ...] = ()

    def group(self, number: int) -> Group | None:
        """The group with that number; None: the master knows none."""
        return next((one for one in self.groups if one.group == number), None)


class Unreadable(ValueError):
    """A status that is not of the agreed shape."""


def read(given: object) -> Status:
    """The status as typed values. Unknown keys are ignored, and missing ones have their default.

    Characters that a terminal would obey are replaced in all texts: they come from peers.

    Raises:
        Unreadable: A value has another type than agreed.
    """
    status = _read(Status, given, "status")
    assert isinstance(status, Status)
    return _without_pairs(status)


def _without_pairs(status: Status) -> Status:
    """Pairs are groups of the run, too. They only tell who its followers are."""
    met: dict[int, dict[str, None]] = {}
    for one in status.groups:
        if (behind := group_behind(one.group)) is not None:
            met.setdefault(behind, {}).update({member.name: None for member in one.members})
    groups = tuple(
        dataclasses.replace(
            one,
            followers=tuple(
                name
                for name in met.get(one.group, ())
                if name not in {member.name for member in one.members}
            ),
        )
        for one in status.groups
        if one.group < FIRST_PAIR
    )
    return dataclasses.replace(status, groups=groups)


@functools.cache
def _fields(kind: type) -> list[tuple[str, str, Any]]:
    """Name, key and type of each field."""
    hints = typing.get_type_hints(kind)
    return [(one.name, one.name.rstrip("_"), hints[one.name]) for one in dataclasses.fields(kind)]


def _read(kind: Any, given: object, where: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(given, dict):
            raise Unreadable(f"{where} is no object")
        return kind(
            **{
                name: _read(of, given[key], f"{where}.{key}")
                for name, key, of in _fields(kind)
                if key in given
            }
        )
    if typing.get_origin(kind) is tuple:
        if not isinstance(given, list | tuple):
            raise Unreadable(f"{where} is no list")
        of = typing.get_args(kind)[0]
        return tuple(_read(of, each, f"{where}[{i}]") for i, each in enumerate(given))
    if isinstance(kind, types.UnionType):  # X | None
        return None if given is None else _read(typing.get_args(kind)[0], given, where)
    if kind is float and isinstance(given, int) and not isinstance(given, bool):
        return float(given)
    if not isinstance(given, kind) or (kind is int and isinstance(given, bool)):
        raise Unreadable(f"{where} must be {kind.__name__}, not {type(given).__name__}")
    if isinstance(given, float) and not math.isfinite(given):
        raise Unreadable(f"{where} must be a finite number")
    return _printable(given) if isinstance(given, str) else given


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}"
                   for c in text)  # fmt: skip


def troubles(status: Status) -> list[str]:
    """Sentences about what an operator should look at; none: all is well."""
    return master_troubles(status) + [
        sentence for group in status.groups for sentence in _troubles_of(group)
    ]


def master_troubles(status: Status) -> list[str]:
    """Sentences about those of several masters that are not as they should be."""
    what = {
        NO_ANSWER: "does not answer",
        REFUSES: "refuses to answer",
        SERVES_TOO: "serves members, too: it was frozen, or they are another run",
    }
    return [
        f"master {one.address} {what[one.state]}" + (f": {one.reason}" if one.reason else "")
        for one in status.masters
        if one.state in what
    ]


def _troubles_of(group: Group) -> Iterator[str]:
    of = f"group {group.group}"
    if group.missing:
        yield f"{of} has not started: {_count(group.missing, 'peer')} missing"
    elif group.members and not group.members[0].replica and len(group.members) < group.min_peers:
        yield f"{of} has {_count(len(group.members), 'member')}, fewer than its {group.min_peers}"
    for call in group.calls:
        if call.seconds >= LATE_SECONDS and call.entered and call.missing:
            yield (
                f"{of}: {_count(len(call.entered), 'member')} waited {duration(call.seconds)} in "
                f"{call.call} for {group.names(call.missing)}"
            )
    for member in group.members:
        who = f"{of}: {group.name(member.rank)}"
        if not member.connected:
            yield f"{who} has lost its connection to the master"
        elif member.heard_seconds >= SILENT_SECONDS:
            yield f"{who} has said nothing for {duration(member.heard_seconds)}"
    for link in group.links:
        if link.state in BROKEN:
            way = f"{group.name(link.from_)} to {group.name(link.to)}"
            yield f"{of}: the link from {way} is {link.state}" + (
                f": {link.reason}" if link.reason else ""
            )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds in at most two units, as 3.2 s, 4 min 10 s or 2 d 3 h."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for unit, scale, below, lower in (("min", 60, "s", 1), ("h", 3600, "min", 60)):
        if whole < (3600 if unit == "min" else 86400):
            rest = whole % scale // lower
            return f"{whole // scale} {unit}" + (f" {rest} {below}" if rest else "")
    rest = whole % 86400 // 3600
    return f"{whole // 86400} d" + (f" {rest} h" if rest else "")


def size(count: float) -> str:
    """Bytes, as 3.20 GB."""
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= ROUNDED * scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def binary(count: int) -> str:
    """Limits and segments, which are powers of two, as 512 KiB."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count} B"


def rate(bytes_per_second: float | None) -> str:
    """Bytes per second, as 3.20 GB/s; "-" where it is not known."""
    return "-" if bytes_per_second is None else f"{size(bytes_per_second)}/s"


def master_of(given: str | None) -> str:
    """The master to ask: the argument, else PCCL_MASTER.

    Raises:
        Misuse: There is neither.
    """
    master = given or _settings.text("PCCL_MASTER")
    if master is None:
        raise Misuse("give the master as HOST:PORT, or set PCCL_MASTER")
    if "://" in master:
        raise Misuse(f"write PCCL_MASTER as HOST:PORT without a protocol, not {master!r}")
    if not all(part.strip() for part in master.split(",")):
        raise Misuse(f"PCCL_MASTER has an empty address: {master!r}")
    return master


# For other masters, once one has answered that it serves members.
_OTHERS_SECONDS = 0.2
_PATIENCE_SECONDS = 2.0  # the same, where the answer says which masters are there


def ask_any(
    masters: str, *, others: float = _OTHERS_SECONDS, secret: _core.Secret | None = None
) -> tuple[str, dict[str, Any]]:
    """The status of the master that serves members, and its address.

    The higher term wins if two do: one of them was frozen, and has not found yet that its members
    are gone. If none serves members, it is the status of the first one where newcomers wait, or
    else of the first one that answers. It says how each one answers, if there are several.

    Args:
        masters: Addresses, with commas between them.
        others: Seconds in which other masters may answer when one has that serves members.
        secret: The run's; None: the environment's.

    Raises:
        PCCLError: No master answers.
    """
    addresses = [address.strip() for address in masters.split(",")]
    if len(addresses) == 1:
        return addresses[0], _core.ask_status(addresses[0], secret)
    heard = _hear(addresses, others, secret)
    answers = {index: one for index, one in heard.items() if not isinstance(one, PCCLError)}
    if not answers:
        failure = heard[min(heard)]
        assert isinstance(failure, PCCLError)
        raise failure
    serving = {index: one for index, one in answers.items() if _serves(one)}
    if serving:
        index = max(serving, key=lambda number: serving[number]["term"])
    else:
        index = min(answers, key=lambda number: (not _has_newcomers(answers[number]), number))
    seen = [_seen(address, heard.get(number)) for number, address in enumerate(addresses)]
    seen = [
        dataclasses.replace(one, state=SERVES_TOO)
        if one.state == SERVES and number != index
        else one
        for number, one in enumerate(seen)
    ]
    return addresses[index], {**answers[index], "masters": [*map(dataclasses.asdict, seen)]}


def _serves(answer: dict[str, Any]) -> bool:
    return any(group["members"] for group in answer["groups"])


def _has_newcomers(answer: dict[str, Any]) -> bool:
    return any(group.get("newcomers") for group in answer["groups"])


def _seen(address: str, answer: dict[str, Any] | PCCLError | None) -> Master:
    if answer is None:
        return Master(address, NO_ANSWER)
    if isinstance(answer, PCCLError):
        reason = reason_of(answer).removeprefix(f"{address}: ")
        return Master(address, REFUSES if isinstance(answer, Refused) else NO_ANSWER, reason)
    if _serves(answer):
        return Master(address, SERVES)
    return Master(address, WAITS if _has_newcomers(answer) else STANDS_BY)


def _hear(
    addresses: list[str], others: float, secret: _core.Secret | None
) -> dict[int, dict[str, Any] | PCCLError]:
    """The answers that come in time, by the index of the address."""
    answers: queue.SimpleQueue[tuple[int, dict[str, Any] | Exception]] = queue.SimpleQueue()

    def ask_one(index: int) -> None:
        try:
            answers.put((index, _core.ask_status(addresses[index], secret)))
        except Exception as error:
            answers.put((index, error))

    for index in range(len(addresses)):  # at once: one that is frozen must not delay the others
        threading.Thread(target=ask_one, args=(index,), daemon=True).start()
    heard: dict[int, dict[str, Any] | PCCLError] = {}
    until = None
    while len(heard) < len(addresses):
        try:
            left = None if until is None else max(until - time.monotonic(), 0)
            index, answer = answers.get(timeout=left)
        except queue.Empty:
            break
        if isinstance(answer, Exception) and not isinstance(answer, PCCLError):
            raise answer
        heard[index] = answer
        if not isinstance(answer, PCCLError) and _serves(answer):
            until = until or time.monotonic() + others
    return heard


Result = typing.TypeVar("Result")


def in_background(call: typing.Callable[[], Result]) -> Result:
    """The result of `call` on another thread, so that Ctrl-C works meanwhile."""
    done: list[Result] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failed:
        raise failed[0]
    return done[0]


def ask(master: str) -> dict[str, Any]:
    """The master's status as it came.

    Raises:
        Misuse: It did not answer.
    """
    try:
        return in_background(lambda: ask_any(master, others=_PATIENCE_SECONDS)[1])
    except PCCLError as error:
        raise Misuse(reason_of(error)) from None
