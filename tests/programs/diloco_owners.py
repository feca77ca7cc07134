"""Members of a DiLoCo run whose sparse codes owners reduce, however few they are."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

from pccl.training.diloco import reductions
from pccl.training.diloco.exchange import Exchange
from pccl.training.diloco.owners import Owners
from pccl.training.diloco.sparse import Sparsifier
from programs import diloco_member as member
from programs.peer import say


def always() -> None:
    """From now on: owners reduce in groups of any size."""

    def owners_for(sparsifier: Sparsifier, members: int) -> Owners | None:
        return Owners(sparsifier, members) if members > 1 else None

    vars(reductions)["owners_for"] = owners_for


def die(where: str) -> None:
    """From now on: killed "before" the calls of a reduction, "between" or "after" them."""

    def kill(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(Owners, {"before": "parts", "between": "reduce", "after": "mean"}[where], kill)


def be_interrupted_between() -> None:
    """Is interrupted between the calls of a reduction, leaves, and comes back."""
    reduce = Owners.reduce

    def interrupted(*_: Any) -> Any:
        Owners.reduce = reduce  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGINT)

    Owners.reduce = interrupted  # type: ignore[assignment, method-assign]
    with suppress(KeyboardInterrupt):
        member.go(1)
    member._come_back_after_an_interrupt(member.diloco.join, 3)


def count_exchanges() -> None:
    """From now on: notes what owners have reduced."""
    wait = Exchange.wait

    def wait_and_note(self: Exchange) -> Any:
        found = wait(self)
        noted.append(self.info.tx_bytes)
        return found

    Exchange.wait = wait_and_note  # type: ignore[method-assign]


noted: list[int] = []


def show_exchanges() -> None:
    """Says how many bytes each reduction by owners has sent, and all reductions together."""
    say(event="exchanges", sent=noted, all=member.diloco.tx_bytes)
