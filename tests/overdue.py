"""When a test exceeds its time limit, writes the stacks of all threads, also in a worker process.

pytest-timeout writes them to the terminal. A worker of pytest-xdist has none, so that all one would
see is the end of the worker.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from typing import Any

import pytest

_GRACE = 10  # seconds in which a thread of Python can report
_stderr = -1  # the process's own: during a test, descriptor 2 is pytest's capture file


def pytest_configure() -> None:
    global _stderr
    _stderr = os.dup(2)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None  # pytest-timeout's own
    timer = threading.Timer(settings.timeout, end, (item, settings.timeout))
    timer.daemon = True

    # Without the GIL, if a call holds it.
    faulthandler.dump_traceback_later(settings.timeout + _GRACE, exit=True, file=_stderr)

    def cancel() -> None:
        faulthandler.cancel_dump_traceback_later()
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
