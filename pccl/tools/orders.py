"""Commands to a run's master: `pccl kick`, `drain`, `pause-admission`, `resume-admission`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from pccl import _core
from pccl.errors import PCCLError
from pccl.tools.parsing import Example, Misuse, Parser, add_master, reason_of
from pccl.tools.status import SERVES, WAITS, ask_any, in_background, master_of

__all__: list[str] = []


class Order(NamedTuple):
    """A command, whether it names a peer, and what its help says."""

    kind: str
    names: bool
    help: str
    description: str
    purpose: str
    then: str


ORDERS = [
    Order(
        "kick",
        True,
        "evict a peer",
        "Evicts a peer from its run. The others go on without it at once.",
        "evict that member",
        "stop the program there; nothing keeps it from joining again.",
    ),
    Order(
        "drain",
        True,
        "ask a peer to leave at its next admission point",
        "Asks a peer to leave the run at its next admission point, where nobody waits for it.",
        "let that member leave in peace",
        "`pccl status` shows the member as draining until it has left.",
    ),
    Order(
        "pause-admission",
        False,
        "let no newcomer in",
        "Lets no newcomer in until `pccl resume-admission`. Members go on; newcomers wait.",
        "before maintenance",
        "`pccl status` says that admission is paused, and lists who waits.",
    ),
    Order(
        "resume-admission",
        False,
        "let newcomers in again",
        "Ends `pccl pause-admission`: newcomers enter at the next admission point.",
        "after maintenance",
        "`pccl status` lists the members.",
    ),
]
KINDS = {order.kind for order in ORDERS}


def add(add_parser: Callable[..., Parser], order: Order) -> None:
    """The parser of one of them."""
    tail = " trainer-7" if order.names else ""
    parser = add_parser(
        order.kind,
        help=order.help,
        description=order.description,
        examples=[
            Example(f"pccl {order.kind} 192.0.2.7:48148{tail}", order.purpose),
            Example(f"PCCL_SECRET=... pccl {order.kind}{tail}", "at the master of PCCL_MASTER"),
        ],
        then=order.then,
    )
    add_master(parser)
    if order.names:
        words = "the peer's name or id, as `pccl status` shows it (required)"
        parser.add_argument("name", metavar="NAME", help=words)


def run(options: argparse.Namespace) -> int:
    """The command. Prints what the master did.

    Raises:
        Misuse: The master did not answer, or refused.
    """
    master = master_of(options.master)
    kind, name = options.command, getattr(options, "name", "")
    call: Any = _core.command

    def order() -> Any:
        at = master
        if "," in master:
            at, answer = ask_any(master)
            # A standby that obeyed would do so later, when it takes over.
            if not any(one["state"] in (SERVES, WAITS) for one in answer["masters"]):
                raise Misuse("no master serves peers now; try again in a moment")
        return call(at, kind, name)

    try:
        print(in_background(order))
    except PCCLError as error:
        raise Misuse(reason_of(error)) from None
    return 0
