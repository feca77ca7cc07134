"""The status of a run for Prometheus, through the package `prometheus_client`.

The number of series grows with the members, never with pairs of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from pccl.tools.status import Group, Member, Status

__all__ = ["CONTENT_TYPE", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LINK_STATES = ("ok", "relayed", "avoided", "unreachable", "silent", "broken")


def exposition(status: Status | None) -> bytes:
    """The text that Prometheus scrapes. None: the master gave no status; `pccl_up` is 0."""
    registry = CollectorRegistry()
    registry.register(_Collector(status))
    return bytes(generate_latest(registry))


class _Collector:
    def __init__(self, status: Status | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        up = GaugeMetricFamily("pccl_up", "1 if the master gives its status.")
        up.add_metric([], 0 if self._status is None else 1)
        yield up
        if self._status is not None:
            yield from _of_run(self._status)
            yield from _of_groups(self._status.groups)
            yield from _of_members(self._status.groups)


def _of_run(status: Status) -> Iterator[Any]:
    yield InfoMetricFamily(
        "pccl", "The run.", value={"software": status.software, "run": status.run}
    )
    for name, text, value in (
        ("pccl_master_term", "Number of the master's life.", status.term),
        ("pccl_master_seconds", "Seconds since this master began.", status.seconds),
        ("pccl_admission_paused", "1 while no newcomer is let in.", status.admission_paused),
    ):
        yield GaugeMetricFamily(name, text, value=float(value))
    yield CounterMetricFamily(
        "pccl_evictions", "Members that were evicted or lost.", value=status.evictions
    )
    yield CounterMetricFamily(
        "pccl_master_restarts", "Masters of this run before this one.", value=status.restarts
    )


def _longest(group: Group) -> float:
    """Seconds of the longest open call that waits for a member."""
    return max((call.seconds for call in group.calls if call.entered and call.missing), default=0.0)


def _of_groups(groups: tuple[Group, ...]) -> Iterator[Any]:
    gauges: dict[str, tuple[str, Callable[[Group], float]]] = {
        "members": ("Members.", lambda g: len(g.members)),
        "min_members": ("Members with which the group starts.", lambda g: g.min_peers),
        "missing_peers": ("Peers that are missing until the start.", lambda g: g.missing),
        "newcomers": ("Peers that wait to be let in.", lambda g: len(g.newcomers)),
        "epoch": ("Number of the epoch.", lambda g: g.epoch),
        "epoch_seconds": ("Seconds since the epoch began.", lambda g: g.epoch_seconds),
        "open_calls": ("Calls that some members have entered.", lambda g: len(g.calls)),
        "longest_wait_seconds": ("Seconds of the longest call that waits for a member.", _longest),
    }
    for name, (text, value) in gauges.items():
        family = GaugeMetricFamily(f"pccl_group_{name}", text, labels=["group"])
        for group in groups:
            family.add_metric([str(group.group)], float(value(group)))
        yield family
    totals: dict[str, tuple[str, Callable[[Group], float]]] = {
        "operations": ("Calls that were committed.", lambda g: g.operations),
        "aborted": ("Calls that ended otherwise.", lambda g: g.aborted),
    }
    for name, (text, value) in totals.items():
        counter = CounterMetricFamily(f"pccl_group_{name}", text, labels=["group"])
        for group in groups:
            counter.add_metric([str(group.group)], float(value(group)))
        yield counter
    links = GaugeMetricFamily(
        "pccl_group_links", "Links by state; a link has a direction.", labels=["group", "state"]
    )
    slowest = GaugeMetricFamily(
        "pccl_group_slowest_link_bytes_per_second", "The lowest measured rate.", labels=["group"]
    )
    for group in groups:
        found = Counter(link.state for link in group.links)
        for state in _LINK_STATES:
            links.add_metric([str(group.group), state], found[state])
        rates = [link.bytes_per_s for link in group.links if link.bytes_per_s is not None]
        if rates:
            slowest.add_metric([str(group.group)], min(rates))
    yield links
    yield slowest


def _held_up(group: Group, member: Member) -> float:
    call = group.held_up_by(member.rank)
    return 0.0 if call is None else call.seconds


def _of_members(groups: tuple[Group, ...]) -> Iterator[Any]:
    labels = ["group", "name", "id"]
    gauges: dict[str, tuple[str, Callable[[Group, Member], float]]] = {
        "seconds": ("Seconds since it was admitted.", lambda _, m: m.seconds),
        "heard_seconds": ("Seconds since its last message.", lambda _, m: m.heard_seconds),
        "connected": ("1 while it is connected to the master.", lambda _, m: m.connected),
        "draining": ("1 while it is to leave.", lambda _, m: m.draining),
        "log_entries_behind": ("Entries of the log it has not applied.", lambda _, m: m.behind),
        "waits_seconds": (
            "Seconds of the longest call that it is blocked in.",
            lambda _, m: max((wait.seconds for wait in m.waits), default=0.0),
        ),
        "held_up_seconds": ("Seconds that other members have waited for it.", _held_up),
    }
    for name, (text, value) in gauges.items():
        family = GaugeMetricFamily(f"pccl_member_{name}", text, labels=labels)
        for group in groups:
            for member in group.members:
                family.add_metric(_labels(group, member), float(value(group, member)))
        yield family
    totals = {
        "operations": "Operations since it joined.",
        "reduced_bytes": "Bytes of its arrays that were reduced.",
        "sent_bytes": "Bytes that it sent to other members.",
        "received_bytes": "Bytes that it received from other members.",
    }
    for name, text in totals.items():
        counter = CounterMetricFamily(f"pccl_member_{name}", text, labels=labels)
        for group in groups:
            for member in group.members:
                counter.add_metric(_labels(group, member), float(getattr(member, name)))
        yield counter


def _labels(group: Group, member: Member) -> list[str]:
    return [str(group.group), member.name, member.id[:8]]
