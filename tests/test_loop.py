"""The thread that drives an event loop in the background."""

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
