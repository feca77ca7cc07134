"""Identifies the threads that make calls without a tag, which meet by the order of one thread."""

from __future__ import annotations

import sys
import threading


def current() -> int:
    """The calling thread."""
    return threading.get_ident()


def ended(thread: int) -> bool:
    """Whether that thread runs no Python any more.

    When `Thread.join` returns the system may still be about to end the thread. Threads that others
    have made run Python only inside their callbacks.
    """
    return thread not in sys._current_frames()
