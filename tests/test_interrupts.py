"""Ctrl-C in a call that blocks: nothing of the call goes on without the caller."""

from __future__ import annotations

import pytest
from programs import interrupts
from workers import Run


@pytest.mark.timeout(300)
def test_nothing_is_in_flight_after_a_ctrl_c_at_any_line_of_a_call(run: Run) -> None:
    first, second = run.peers(2, interrupts.sweep)
    for peer in (first, second):
        peer.expect("in", 60)
    for name in [*interrupts.CALLS, interrupts.EXPLICIT]:
        first.tell(name)
        answer = first.next(60)
        assert (answer["event"], answer["unfinished"]) == ("timeout", 0), (name, answer)
        assert answer["lines"] > 10, name  # else it blocked before it began
    for peer in (first, second):
        peer.tell(None)
        peer.tell(None)
        peer.ends()
