"""The end of rounds that end by their time, or of the turns that fragments take in them."""

from __future__ import annotations

import math
import time

now = time.monotonic


class RoundClock:
    """Tells when a round, or a turn in it, is over: with the step that ends nearest to its time.

    The time of a step is the shortest of this round and the one before. Others may have had to
    compile, or the program has done something else between two steps.

    Args:
        seconds: The length of a round; None: a round never ends by its time.
        turns: Turns of equal length in a round.
    """

    def __init__(self, seconds: float | None, turns: int = 1) -> None:
        self._seconds = seconds
        self._turns = turns
        self._before = self._shortest = self._mean_before = math.inf
        self._steps = 0
        self.begin()

    def begin(self) -> None:
        """A round begins now."""
        self._mean_before = self.mean_seconds
        self._began = self._latest = now()
        self._over = 0  # turns
        self._steps = 0
        self._before, self._shortest = self._shortest, math.inf

    def next_turn(self) -> None:
        """A turn is over, by its time or by its number of steps."""
        self._over += 1

    @property
    def mean_seconds(self) -> float:
        """How long a step of this round has taken; before its first one, of the round before.

        Infinite before the first of all. Where steps run elsewhere, the first ones of a round seem
        to take no time.
        """
        if not self._steps:
            return self._mean_before
        return (self._latest - self._began) / self._steps

    def step(self) -> bool:
        """Counts a step that is over now. Returns whether the turn is over."""
        latest, self._latest = self._latest, now()
        self._shortest = min(self._shortest, self._latest - latest)
        self._steps += 1
        return self._left() <= self._another() / 2

    def steps_left(self) -> float:
        """Further steps in the turn; infinite if it does not end by its time."""
        left, another = self._left(), self._another()
        steps = left / another if another > 0 else math.inf
        return max(1, round(steps)) if steps < math.inf else steps

    def _another(self) -> float:
        return min(self._shortest, self._before)

    def _left(self) -> float:
        """Seconds of the turn as of the latest step; infinite if it does not end by its time."""
        if self._seconds is None:
            return math.inf
        end = self._seconds * (self._over + 1) / self._turns
        return end - (self._latest - self._began)
