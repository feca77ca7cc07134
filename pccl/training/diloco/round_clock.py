"""The end of rounds that end by their time."""

from __future__ import annotations

import math
import time

now = time.monotonic


class RoundClock:
    """Tells when a round is over: with the step that ends nearest to its time.

    The time of a step is the shortest of this round and the one before. Others may have had to
    compile, or the program has done something else between two steps.

    Args:
        seconds: The length of a round; None: a round never ends by its time.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._before = self._shortest = math.inf
        self.begin()

    def begin(self) -> None:
        """A round begins now."""
        self._began = self._latest = now()
        self._before, self._shortest = self._shortest, math.inf

    def step(self) -> bool:
        """Counts a step that is over now. Returns whether the round is over."""
        if self._seconds is None:
            return False
        latest, self._latest = self._latest, now()
        self._shortest = min(self._shortest, self._latest - latest)
        another = min(self._shortest, self._before)
        return self._latest - self._began + another / 2 >= self._seconds
