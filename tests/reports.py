"""What a member says to the master when it comes back, byte by byte (docs/protocol.md: Rejoin)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


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
) -> bytes:
    """Of `peer` in epoch 1, whose members are it and `others`.

    Tickets are what ids are; `ticket`: that of `peer`, also in the record. `replicas`: ranks of each.
    `hosts`: addresses that each member has.
    """
    ids = [peer, *others]
    tickets = [ticket or peer, *others]
    n = len(ids)
    addresses = listed([text(host) + bytes(2) for host in hosts])
    members = [
        who + u64(5) + addresses + bytes(16) + text(who.hex() if replicas else "") + seal(known)
        for who, known in zip(ids, tickets, strict=True)
    ]
    plan = u32(65536) + listed([u32(rank) for rank in range(n)])
    plan += listed([u64(1 << 60) + b"\0" + listed([u32(1)] * n)]) + listed([]) * 2
    record = u64(1) + b"\0" + u64(1, 0) + listed(members) + plan
    record += u32(0, 0, 0) + listed([]) * 2 + bytes(2) + u64(0) + bytes(16) + listed([])
    record += u32(0, 0) + u32(replicas) + u64(0) + b"\0" + listed([])
    return peer + u32(group) + record + u64(applied) + tickets[0]


def log_part(log: Sequence[bytes], *, last: bool) -> bytes:
    """What answers RequestLog."""
    return listed(log) + (b"\1" if last else b"\0")
