"""Tells where a test stands whose time is over, also in a worker process.

pytest-timeout writes the stacks to the terminal. A worker of pytest-xdist has none, so all that one
would see is that the worker ended.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from typing import Any

import pytest

_stderr = -1  # that of the process; during a test, 2 is a file that pytest captures to


def pytest_configure() -> None:
    global _stderr
    _stderr = os.dup(2)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None  # pytest-timeout's own
    timer = threading.Timer(settings.timeout, end, (item, settings.timeout))
    timer.daemon = True

    def cancel() -> None:
        timer.cancel()
        timer.join()

    item.cancel_timeout = cancel
    timer.start()
    return True


def end(item: pytest.Item, seconds: float) -> None:
    """Writes the stacks of all threads and what the test has printed, and ends the process."""
    try:
        tell(f"\n{item.nodeid} has not ended within {seconds:g} s\n".encode())
        faulthandler.dump_traceback(_stderr)
        capture = item.config.pluginmanager.getplugin("capturemanager")
        if capture:
            capture.suspend_global_capture()
            for said in capture.read_global_capture():
                tell(said.encode(errors="replace"))
    finally:
        os._exit(1)


def tell(words: bytes) -> None:
    while words:
        words = words[os.write(_stderr, words) :]
