"""An example of the status of a run in trouble, for tests of its views."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

from pccl.errors import MasterLost

EXAMPLE = json.loads((Path(__file__).parent / "status.json").read_text())
HOSTILE = "<script>alert(1)</script><img/src=x/onerror=alert(2)>"


def example() -> dict[str, Any]:
    """A copy: five members, two newcomers, a call that waits for rank 4, links in trouble."""
    return copy.deepcopy(EXAMPLE)


def healthy() -> dict[str, Any]:
    """The same run when all is well."""
    status = example()
    group = status["groups"][0]
    group["calls"] = []
    group["links"] = [link for link in group["links"] if link["state"] == "ok"]
    for member in group["members"]:
        member.update(waits=[], behind=0, draining=False)
    return status


class Master:
    """Answers as a master does that has this status; None: it is away."""

    def __init__(self, status: dict[str, Any] | None) -> None:
        self.status = status
        self.asked = threading.Event()

    def __call__(self, *_: object) -> dict[str, Any]:
        self.asked.set()
        if self.status is None:
            raise MasterLost.because("ask_status", "127.0.0.1:9: Connection refused")
        return copy.deepcopy(self.status)
