"""Tests are told why a process that they wait for has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from programs import idle
from workers import Worker, wait_until_asleep, wait_until_stopped


@pytest.mark.parametrize("wait", [wait_until_asleep, wait_until_stopped, Worker.cpu_seconds])
@pytest.mark.parametrize("forks", ["0", "1"])
def test_a_wait_for_a_worker_that_has_ended_shows_what_it_said(
    wait: Callable[[Worker], object], forks: str
) -> None:
    worker = Worker(idle.fail, TEST_FORKS=forks)
    try:
        worker.ends()
        with pytest.raises(AssertionError, match=r"programs.idle:fail ended: 1\nit cannot go on"):
            wait(worker)
    finally:
        worker.destroy()
