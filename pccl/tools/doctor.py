"""`pccl doctor`: whether this machine can join a run, on one screen."""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pccl import __version__, _core, _settings
from pccl.errors import PCCLError
from pccl.tools import places, screen
from pccl.tools.parsing import MISUSE, Misuse, add_master, advised, reason_of, whole
from pccl.tools.screen import Check
from pccl.tools.status import in_background, master_of

__all__: list[str] = []

_MIB = 1 << 20
_ALLOWED = "net.ipv4.tcp_allowed_congestion_control"
_FILES = 1024  # fewer descriptors leave a link few connections
_BUFFER = 4 * _MIB  # bytes of tcp_rmem and tcp_wmem; they bound a connection's rate at 100 ms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pccl doctor`."""
    add_master(parser, metavar="HOST:PORT")
    words = "peer group to look at (default: 0)"
    group = whole(0, 2**32 - 1)
    parser.add_argument("--group", type=group, default=0, metavar="N", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")


def run(options: argparse.Namespace) -> int:
    """The command.

    Returns:
        The exit status: 0 if this machine can join, 1 if not, 2 if no master could be asked.

    Raises:
        Misuse: There is nothing to ask.
    """
    master = master_of(options.master)
    try:
        checks, asked = _of_the_masters([part.strip() for part in master.split(",")], options.group)
        checks += _of_this_machine()
        checks += places.findings(places.here())
    except PCCLError as error:
        raise Misuse(reason_of(error)) from None
    failed = [check for check in checks if check.verdict == "fail"]
    indirect = any(check.name == "peers" and check.verdict == "warn" for check in checks)
    if options.json:
        print(json.dumps({"ok": not failed, "checks": [check._asdict() for check in checks]}))
    else:
        screen.checks(checks)
        screen.verdict(_sentence(failed, indirect), good=not failed)
    if not failed:
        return 0
    return 1 if asked else MISUSE


def _sentence(failed: Sequence[Check], indirect: bool) -> str:
    """The last line of the screen."""
    if not failed and indirect:
        return "This machine can join; some data may go through another member or the master."
    if not failed:
        return "This machine can join."
    if failed[0].name == "peers":
        return (
            "This machine cannot join: no path to any member. Open a port of one of the two "
            "(PCCL_PORT, PCCL_ADVERTISE), or let the master relay (PCCL_RELAY)."
        )
    return f"This machine cannot join: {advised(failed[0].text)}."


class _Answer(NamedTuple):
    """One master's checks, whether it answered, and whether the group has members there."""

    checks: list[Check]
    answered: bool
    serves: bool


def _asked(master: str, group: int) -> _Answer:
    checks = [_resolved(master)]
    if checks[0].verdict == "fail":
        return _Answer(checks, False, False)
    found = _in_background(master, group)
    if not all(address for _, address, _ in found["we_reached_members"]):
        found["names"] = _names(master)
    checks += _of_the_master(master, found)
    return _Answer(checks, not found["failure"], found["size"] > 0)


def _of_the_masters(addresses: Sequence[str], group: int) -> tuple[list[Check], bool]:
    """The checks of all masters of a run, and whether one of them answered."""
    answers = [_asked(address, group) for address in addresses]
    if len(answers) == 1:
        return answers[0].checks, answers[0].answered
    # A peer joins at the master that serves the group; a group without members begins at the first.
    serving = next((one for one in answers if one.serves), None)
    chosen = serving or next((one for one in answers if one.answered), None)
    checks: list[Check] = []
    for one in answers:
        for check in one.checks:
            if one.answered and one is not chosen and check.name not in ("name", "master"):
                continue
            if not one.answered and check.verdict == "fail":
                check = check._replace(verdict="warn")
            if one is serving and check.name == "master":
                check = check._replace(text=f"{check.text} and serves the group")
            checks.append(check)
    if chosen is None:
        checks.append(Check("masters", "fail", "no master answers"))
    elif serving is None and not answers[0].answered:
        text = f"group {group} has no members, and {addresses[0]}, where it begins, does not answer"
        checks.append(Check("masters", "fail", text))
    return checks, chosen is not None


def _names(master: str) -> dict[str, str]:
    """The members' names by id, if the master says them."""
    try:
        status = in_background(lambda: _core.ask_status(master))
    except PCCLError:
        return {}
    return {
        member["id"]: member["name"] for group in status["groups"] for member in group["members"]
    }


def _in_background(master: str, group: int) -> dict[str, Any]:
    """Diagnoses on another thread, so that Ctrl-C works."""
    port = _settings.integer(None, "port", "doctor", 0, 65535, variable="PCCL_PORT", default=0)
    advertise = _settings.addresses(None, "doctor")
    return in_background(lambda: _core.diagnose(master, group, port, advertise))


def _resolved(master: str) -> Check:
    host = master.rpartition(":")[0] if master.count(":") == 1 or "]:" in master else master
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return Check("name", "fail", f"{host} cannot be resolved: {reason}")
    return Check("name", "ok", f"{host} is {', '.join(sorted({str(i[4][0]) for i in found}))}")


def _of_the_master(master: str, found: dict[str, Any]) -> Iterator[Check]:
    if found["failure"]:
        where, failure = found["address"] or master, found["failure"]
        told = failure.startswith(where)  # the system's own sentence begins with the address
        yield Check("master", "fail", failure if told else f"{where}: {failure}")
        return
    yield Check("master", "ok", f"{found['address']} answers")
    encryption = "TLS 1.3, with the run's secret" if found["encrypted"] else "none"
    yield Check("encryption", "info", encryption)
    ours = f"pccl {__version__}"
    if found["software"] == ours:
        yield Check("versions", "ok", ours)
    else:
        text = f"{found['software']} there, {ours} here; the protocol is the same"
        yield Check("versions", "warn", text)
    yield Check("round trip", "info", f"{found['round_trip'] * 1000:.2f} ms to the master")
    yield from _ways(found)


def _ways(found: dict[str, Any]) -> Iterator[Check]:
    if found["port"] == 0:
        yield Check("own port", "fail", f"{found['port_failure']} (PCCL_PORT, PCCL_BIND)")
        return
    where = f"{found['seen']}, port {found['asked']}"
    _, reached, why = found["master_reached_us"]
    hidden = reached == "no"
    if reached == "yes":
        yield Check("from outside", "ok", f"the master reaches {where}")
    elif hidden:
        text = (
            f"the master does not reach {where} ({why}); links are dialled from here, and need "
            "peers that are reached, or a port that is open (PCCL_PORT, PCCL_ADVERTISE)"
        )
        yield Check("from outside", "warn", text)
    else:
        yield Check("from outside", "info", f"not known: the master is busy ({where})")
    if found["untested"]:
        untested = ", ".join(found["untested"])
        text = f"not tested: {untested}: the master sees {found['seen']} instead"
        yield Check("advertised", "info", text)
    if found["size"] == 0:
        yield Check("peers", "info", "nobody is in the group yet")
        return
    back = {peer: (reached, why) for peer, reached, why in found["members_reached_us"]}
    good = 0
    lost = []
    for peer, address, failure in found["we_reached_members"]:
        there, why = back.get(peer, ("not tried", ""))
        who = found.get("names", {}).get(peer) or peer[:8]
        if address or there == "yes":
            good += 1
        elif there == "no":
            lost.append(f"{who} (to: {failure}; from: {why})")
        else:
            lost.append(f"{who} (to: {failure})")
    tried = [peer for peer, _, _ in found["we_reached_members"]]
    out = [peer for peer, address, _ in found["we_reached_members"] if address]
    both = sum(back.get(peer, ("",))[0] == "yes" for peer in out)
    backs = sum(reached == "yes" for reached, _ in back.values())
    text = (
        f"{found['size']} in the group; of {len(tried)} tried {len(out)} are "
        f"reached from here, of {len(back)} asked {backs} reach this machine, {both} both ways"
    )
    if lost:
        text += "; neither end reaches the other: " + ", ".join(lost[:3])
        if good == 0 and found["relays"]:
            text += "; the master relays, and bounds the speed"
    # A peer that was not tried may carry all traffic, and an untried address may lead here.
    refuted = hidden or all(back.get(peer, ("",))[0] == "no" for peer in tried)
    all_known = refuted and found["size"] <= len(tried) and not found["untested"]
    closed = good == 0 and not found["relays"] and all_known
    yield Check("peers", "fail" if closed else "warn" if lost else "ok", text)


def _words(name: str) -> list[str] | None:
    try:
        return Path("/proc/sys", *name.split(".")).read_text().split()
    except OSError:
        return None


def _sysctl(name: str) -> list[int] | None:
    words = _words(name)
    try:
        return None if words is None else [int(word) for word in words]
    except ValueError:
        return None


def _of_this_machine() -> Iterator[Check]:
    if os.environ.get("PCCL_SHM") == "0":
        yield Check("shared memory", "info", "turned off (PCCL_SHM=0)")
    elif not _core.shares_memory():
        yield Check("shared memory", "info", "not on this system: peers of one host use TCP")
    elif _core.shared_memory(4096) is None:
        yield Check("shared memory", "warn", "refused by the system: peers of one host use TCP")
    else:
        yield Check("shared memory", "ok", "works")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or files >= _FILES:
        yield Check("open files", "ok", str(files))
    else:
        text = f"{files}; with fewer than {_FILES} links have fewer connections (ulimit -n)"
        yield Check("open files", "warn", text)
    small, shown = [], []
    for name in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"):
        values = _sysctl(name)
        if values is None:
            continue
        shown.append(f"{name.rpartition('.')[2]} up to {values[-1] / _MIB:.1f} MiB")
        if values[-1] < _BUFFER:
            small.append(f"{name} ends at {values[-1]}")
    for name in ("net.core.rmem_max", "net.core.wmem_max"):
        values = _sysctl(name)
        if values is not None:
            shown.append(f"{name.rpartition('.')[2]} {values[-1] / _MIB:.1f} MiB")
    if small:
        text = f"{'; '.join(small)}: one connection is slow where the way is long; raise the last "
        yield Check("buffers", "warn", text + f"number to {_BUFFER} or more")
    elif shown:
        yield Check("buffers", "ok", ", ".join(shown))
    chosen = os.environ.get("PCCL_TCP_CONGESTION", "")
    if chosen:
        yield Check("congestion", "info", f"{chosen} (PCCL_TCP_CONGESTION)")
    elif _core.long_path_congestion():
        yield Check("congestion", "info", "BBR where a round trip takes 5 ms or more")
    elif (allowed := _words(_ALLOWED)) is not None:
        how = f'modprobe tcp_bbr; sysctl -w {_ALLOWED}="{" ".join([*allowed, "bbr"])}"'
        text = f"the system's; BBR is faster where packets get lost ({how})"
        yield Check("congestion", "info", text)
    idle = _sysctl("net.ipv4.tcp_slow_start_after_idle")
    if idle is not None:
        again = "again after every pause (net.ipv4.tcp_slow_start_after_idle=1; 0 is better where "
        text = again + "steps are apart)" if idle[0] else "not after pauses"
        yield Check("slow start", "info", text)
