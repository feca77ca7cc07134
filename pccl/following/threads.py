"""Threads that end soon after their owner is closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_SECONDS = 2.0  # to wait for them; an interpreter that ends under them prints warnings


class Threads:
    """The threads of one owner. *any thread*"""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: set[threading.Thread] = set()
        self._lock = threading.Lock()  # guards _running

    def start(self, call: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                call(*args)
            finally:
                with self._lock:
                    self._running.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        with self._lock:
            thread.start()
            self._running.add(thread)

    def wait(self) -> None:
        """Waits for their ends, but not for long."""
        with self._lock:
            running = self._running - {threading.current_thread()}
        until = time.monotonic() + _SECONDS
        for thread in running:
            thread.join(max(0.0, until - time.monotonic()))
