"""What members say to the master, byte by byte, as docs/internals/protocol.md says."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from pccl import _testing

JOIN, REJOIN, REQUEST_ADMISSION, PREPARED, ENTER_ROUND, OP_REPORT, ABORT = range(7)
LINK_REPORT, BLOCKED, LEAVE, HEARTBEAT = range(7, 11)
WELCOME, REFUSED, LOG = range(11, 14)
WITHDRAW, NEIGHBOURHOOD, MEASURED, INQUIRY, TRIED, WANT_RELAY = 17, 18, 19, 20, 23, 24
OPEN_RELAY, PUT_THROUGH = 26, 27
REQUEST_LOG, LOG_PART = 28, 29
ASK_STATUS, STATUS_PART, COMMAND, COMMAND_RESULT, DRAIN = range(30, 35)
NOT_SERVING, MAY_FOUND, ASK_PROMISE, PROMISE, PROPOSE, ACCEPT = range(35, 41)
BROKEN, UNREACHABLE, SILENT, MENDED, RELAYED = range(5)
BARRIER = 2
TIMEOUT, ENTERED = 0, 0
# Mark, version, type, flags, bytes of the payload, term, run, ordinal.
HEADER = struct.Struct("<4sBBHIIQQ")


def control(
    kind: int,
    payload: bytes = b"",
    *,
    length: int | None = None,
    term: int = 0,
    run: int = 0,
    ordinal: int = 0,
) -> bytes:
    """A whole message. `length`: replaces the payload's length in the header."""
    size = len(payload) if length is None else length
    version = _testing.PROTOCOL_VERSION
    return HEADER.pack(b"PCCL", version, kind, 0, size, term, run, ordinal) + payload


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def u64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def listed(items: Sequence[bytes]) -> bytes:
    return u32(len(items)) + b"".join(items)


def text(what: str) -> bytes:
    return u32(len(what)) + what.encode()


def seal(ticket: bytes) -> bytes:
    return hashlib.sha256(ticket).digest()[:16]


def verdict(ordinal: int) -> bytes:
    """An entry of the log: an operation that was right."""
    return u64(ordinal) + b"\x01" + u64(1) + b"\0" + u64(0, ordinal, 1) + bytes(18) + u32(0, 0)


def rejoin(
    peer: bytes,
    group: int,
    *,
    ticket: bytes | None = None,
    others: Sequence[bytes] = (),
    applied: int = 1,
    replicas: int = 0,
    hosts: Sequence[str] = (),
    name: str = "",
) -> bytes:
    """The Rejoin of `peer` in epoch 1, whose members are it and `others`.

    Tickets equal ids. `ticket`: that of `peer` instead, also in the record. `replicas`: ranks of
    each. `hosts`: addresses that each member has. `name`: of each.
    """
    ids = [peer, *others]
    tickets = [ticket or peer, *others]
    what = record(ids, tickets, replicas=replicas, hosts=hosts, name=name)
    return peer + u32(group) + what + u64(applied) + tickets[0]


def record(
    ids: Sequence[bytes],
    tickets: Sequence[bytes] | None = None,
    *,
    epoch: int = 1,
    replicas: int = 0,
    hosts: Sequence[str] = (),
    name: str = "",
    relayed: Sequence[tuple[int, int]] = (),
    gone: Sequence[tuple[bytes, str]] = (),
) -> bytes:
    """An epoch of these members, which begins with an admission.

    `relayed`: pairs of ranks. `gone`: ids, and why.
    """
    tickets = tickets or ids
    n = len(ids)
    addresses = listed([text(host) + bytes(2) for host in hosts])
    members = [
        who
        + u64(5)
        + addresses
        + bytes(16)
        + text(who.hex() if replicas else "")
        + seal(known)
        + text(name)
        + u32(1)
        for who, known in zip(ids, tickets, strict=True)
    ]
    plan = u32(65536) + listed([u32(rank) for rank in range(n)])
    plan += listed([u64(1 << 60) + b"\0" + listed([u32(1)] * n)]) + listed([]) * 2
    what = u64(epoch) + b"\0" + u64(1, 0) + listed(members) + plan
    departures = [who + text(why) + text("") for who, why in gone]
    what += (
        u32(0, 0, 0) + listed(departures) + listed([]) + bytes(2) + u64(0) + bytes(16) + listed([])
    )
    what += u32(0, 0) + u32(replicas) + u64(0) + b"\0"
    return what + listed([u32(*pair) for pair in relayed])


def log_part(log: Sequence[bytes], *, last: bool) -> bytes:
    """The answer to RequestLog."""
    return listed(log) + (b"\1" if last else b"\0")


def peer(number: int) -> bytes:
    """The id of the member with that number."""
    return bytes([number]) * 16


def op_key(tag: int, admission: int = 1) -> bytes:
    """The key of an operation."""
    return u64(admission) + b"\x01" + u64(tag, 0)


def op_state(
    tag: int, what: str = "", admission: int = 1, attempt: int = 1, phase: int = ENTERED
) -> bytes:
    """A member's state in an operation."""
    return op_key(tag, admission) + u64(attempt) + bytes([phase, 1]) + u64(5) + text(what)


def join(
    number: int,
    group: int = 0,
    hosts: list[str] | None = None,
    waiting: bool = True,
    name: str = "",
    replica: str = "",
    ticket: bytes | None = None,
) -> bytes:
    """A Join. `replica`: of no ranks. `ticket`: its id if there is none."""
    addresses = [text(host) + struct.pack("<H", 1) for host in hosts or ["192.0.2.1"]]
    founder = u32(group, 1) + bytes([waiting, 0])
    rest = text("pccl") + u32(0xFFFFFFFF) + bytes(16) + text(replica) + u32(0)
    own = (ticket or peer(number)) + text(name) + u32(0, 0xFFFFFFFF)
    return peer(number) + founder + listed(addresses) + rest + own


def heartbeat(
    operations: int = 0,
    draining: bool = False,
    quorum: int = 0,
    grace: float = 0.0,
) -> bytes:
    """`quorum`: in thousandths of the members. `grace`: in seconds."""
    patience = struct.pack("<HI", quorum, round(1000 * grace))
    return u64(operations, 0, 0, 0) + bytes([draining]) + patience


def link_report(about: int, epoch: int, state: int = BROKEN) -> bytes:
    """A member's report of its link to `about`."""
    return peer(about) + bytes([state]) + u64(epoch) + text("reset")


def gone(play: _testing.MasterPlay) -> dict[int, str]:
    """The reason of each connection that was refused since the last look."""
    return {connection: why for connection, what, _, why in play.told() if what == "refused"}
