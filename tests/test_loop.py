"""The threads that drive an event loop."""

from __future__ import annotations

import threading

from workers import wait_until_thread_sleeps

from pccl import _testing


def test_a_loop_is_stopped_while_its_thread_works_between_two_events() -> None:
    loop = _testing.HeldLoop()
    loop.wait_until_held()
    stopping = threading.Thread(target=loop.stop, daemon=True)
    stopping.start()
    assert stopping.native_id is not None
    wait_until_thread_sleeps(stopping.native_id)  # until the background thread ends
    loop.let_go()
    stopping.join(20)
    ended = not stopping.is_alive()
    loop.wake()
    stopping.join()
    assert ended


def test_a_thread_polls_before_it_sleeps_while_waits_are_short() -> None:
    rule = _testing.PollingRule()
    assert rule.length(0) == 0  # nothing is known yet
    rule.waited(199)
    assert rule.length(0) == 100
    rule.waited(200)
    assert rule.length(0) == 0


def test_a_thread_does_not_poll_where_other_programs_compute() -> None:
    rule = _testing.PollingRule()
    rule.waited(10)
    rule.yielded(999, now=5e3)
    assert rule.length(5e3) == 100
    rule.yielded(1000, now=5e3)
    assert rule.length(5e3) == 0
    assert rule.length(1.005e6 - 1) == 0
    assert rule.length(1.005e6) == 100
