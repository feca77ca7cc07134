"""Means in which no member has more than a bounded influence.

All members gather the contributions of all, and each computes the same mean from them. Sums are
made of operations on single elements in a fixed order, so that every processor gets the same bytes.

Contributions many times as long as the median one do not count, nor, on request, those that point
away from the others. "clip" scales those that are still long down to a multiple of the median
length. "trimmed" is the coordinate-wise trimmed mean (Yin et al., arXiv 1803.01498).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import numpy as np

from pccl.errors import InvalidArgument
from pccl.frameworks import Array

# The weight of a contribution that counts. The products of a smaller one would have no digits left.
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e15
_ROUNDING = 1e-6  # of a cosine: contributions that cancel out have any direction
_AT_ONCE = 1 << 18  # elements of each member that are sorted at once: bounds the memory for it


def make_floats(options: object, names: Sequence[str], func: str) -> None:
    """Makes these attributes of a frozen dataclass floats, so that equal ones are the same text.

    Raises:
        InvalidArgument: One of them is no number.
    """
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidArgument.because(func, f"{name} is a number, not {value!r}")
        object.__setattr__(options, name, float(value))


@dataclass(frozen=True)
class Robust:
    """How DiLoCo bounds what one member can do to the mean: `robust=` of `DiLoCo`.

    A contribution with an element that is not finite never counts. Lengths are Euclidean norms. The
    median length is that of the contributions that are not 0; of an even number the lower one in
    the middle.

    Attributes:
        how: "clip": a contribution that is longer than `bound` times the median length is scaled
            down to that. "trimmed": the smallest and the largest values of each element are left
            out of the mean.
        bound: "clip" only: a positive multiple of the median length.
        trim: "trimmed" only: share of the members whose values are left out at each end, from 0 to
            below 0.5. With three members or more at least one value is, unless the share is 0.
        weight: No member weighs more than this multiple of the median weight; at least 1.
        drop: Where three or more contributions are not 0, one that is longer than this multiple of
            the median length does not count; at least 1. `math.inf`: all finite ones count.
        against: Where three or more contributions are not 0, one that points away from the others
            does not count: its cosine with their sum, each of them at length 1, is below minus
            this. From 0 to 1; 1: every direction counts. Use it where the members' data are alike:
            with different data members pull in different directions once the model is nearly
            trained, and all would be left out.
    """

    how: str = "clip"
    bound: float = 1.5
    trim: float = 0.125
    weight: float = 4.0
    drop: float = 10.0
    against: float = 1.0

    def __post_init__(self) -> None:
        def refuse(sentence: str) -> InvalidArgument:
            return InvalidArgument.because("Robust", sentence)

        if self.how not in ("clip", "trimmed"):
            raise refuse(f'how is "clip" or "trimmed", not {self.how!r}')
        make_floats(self, ("bound", "trim", "weight", "drop", "against"), "Robust")
        if not 0 < self.bound < math.inf:
            raise refuse(f"bound is a positive number, not {self.bound!r}")
        if not 0 <= self.trim < 0.5:
            raise refuse(f"trim is from 0 to below 0.5, not {self.trim!r}")
        if not 1 <= self.weight < math.inf:
            raise refuse(f"weight is a number of at least 1, not {self.weight!r}")
        if not self.drop >= 1:
            raise refuse(f"drop is a number of at least 1, not {self.drop!r}")
        if not 0 <= self.against <= 1:
            raise refuse(f"against is from 0 to 1, not {self.against!r}")

    def trimmed_of(self, members: int) -> int:
        """How many values are left out at each end."""
        if self.trim == 0 or members < 3:
            return 0
        return max(1, int(self.trim * members))


class Mean(NamedTuple):
    """The mean of members' contributions.

    Attributes:
        arrays: Its arrays; zeros if nothing counted.
        present: Whether anything counted.
        limited: Ranks whose contribution or weight was scaled down, or did not count.
        weight: Sum of the weights that counted.
    """

    arrays: list[Array]
    present: bool
    limited: list[int]
    weight: float


class Shares(NamedTuple):
    """Each rank's share of the mean. `limited` and `weight` are as in `Mean`."""

    shares: list[float]
    limited: list[int]
    weight: float


def parse(value: object, func: str) -> Robust:
    """The value of a user's `robust=`.

    Raises:
        InvalidArgument: It is neither a `Robust` nor the name of one.
    """
    if isinstance(value, Robust):
        return value
    if isinstance(value, str) and value in ("clip", "trimmed"):
        return Robust(value)
    raise InvalidArgument.because(func, f'robust is "clip", "trimmed" or a Robust, not {value!r}')


def words(robust: Robust) -> str:
    """For errors, and to compare: `, clip (bound=1.5, weight=4.0, drop=10.0, against=1.0)`."""
    own = f"bound={robust.bound}" if robust.how == "clip" else f"trim={robust.trim}"
    common = f"weight={robust.weight}, drop={robust.drop}, against={robust.against}"
    return f", {robust.how} ({own}, {common})"


def clipped(
    robust: Robust,
    contribution: Callable[[int], Sequence[Array]],
    norms: Sequence[float],
    weights: Sequence[float],
) -> Shares:
    """By how much each contribution counts in the mean of "clip".

    Args:
        robust: The bounds.
        contribution: The arrays of a rank's contribution. Not asked for one that does not count.
        norms: The contributions' lengths. One that is not finite does not count.
        weights: The members' weights. A member with weight 0 does not count, and its norm is not
            looked at.
    """
    capped, limited, middle = _capped(robust, contribution, norms, weights)
    limit = robust.bound * middle
    whole = total_of(capped.values())
    shares = [0.0] * len(norms)
    for rank, weight in capped.items():
        scale = limit / norms[rank] if norms[rank] > limit else 1.0
        shares[rank] = weight / whole * scale
        if scale < 1:
            limited.add(rank)
    return Shares(shares, sorted(limited), whole)


def mean(robust: Robust, gathered: Sequence[Array], weights: Sequence[float]) -> Mean:
    """The mean of the members' contributions.

    Args:
        robust: The bounds.
        gathered: The arrays of a contribution, each with what all members have in its first axis,
            by rank.
        weights: The members' weights. A contribution of weight 0 is not looked at.
    """

    def contribution(rank: int) -> list[Array]:
        return [one[rank] for one in gathered]

    norms = [norm(contribution(rank)) if weight > 0 else 0.0 for rank, weight in enumerate(weights)]
    if robust.how == "trimmed":
        capped, limited, _ = _capped(robust, contribution, norms, weights)
        arrays = [_trimmed(one, capped, robust.trimmed_of(len(capped))) for one in gathered]
        return Mean(arrays, bool(capped), sorted(limited), total_of(capped.values()))
    shares, ranks, whole = clipped(robust, contribution, norms, weights)
    arrays = [np.zeros(one.shape[1:], one.dtype) for one in gathered]
    for rank, share in enumerate(shares):
        if share > 0:
            for total, one in zip(arrays, gathered, strict=True):
                total += one[rank] * one.dtype.type(share)
    return Mean(arrays, any(share > 0 for share in shares), ranks, whole)


def norm(arrays: Sequence[Array]) -> float:
    """The Euclidean norm of all elements together, the same on every processor."""
    return math.sqrt(_dot(arrays, arrays))


@np.errstate(invalid="ignore", over="ignore")  # what is not finite is found by its norm
def _dot(ones: Sequence[Array], others: Sequence[Array]) -> float:
    """The sum of the products of all elements, the same on every processor."""
    sums = []
    for one, other in zip(ones, others, strict=True):
        a, b = one.reshape(-1), other.reshape(-1)
        for first in range(0, a.size, _AT_ONCE):
            last = first + _AT_ONCE
            sums.append(_sum(np.multiply(a[first:last], b[first:last], dtype=np.float64)))
    return total_of(sums)


def _sum(products: Array) -> float:
    """Adds one half to the other until one number is left."""
    left = products
    while left.size > 1:
        half = left.size // 2
        rest = left[2 * half :]
        left = left[:half] + left[half : 2 * half]
        if rest.size:
            left[0] += rest[0]
    return float(left[0])


def total_of(values: Iterable[float]) -> float:
    """Their sum. That of Python differs between its versions."""
    total = 0.0
    for value in values:
        total += value
    return total


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _opposed(
    against: float,
    contribution: Callable[[int], Sequence[Array]],
    norms: Sequence[float],
    ranks: Sequence[int],
) -> set[int]:
    """Which of these point away from the others: see `Robust.against`."""
    ranks = [rank for rank in ranks if norms[rank] > 0]
    # Nobody knows which one of two is wrong.
    if against == 1 or len(ranks) < 3:
        return set()
    whole = [np.zeros(array.shape, np.float64) for array in contribution(ranks[0])]
    for rank in ranks:
        for total, array in zip(whole, contribution(rank), strict=True):
            total += array / np.float64(norms[rank])
    square = _dot(whole, whole)
    found = set()
    for rank in ranks:
        along = _dot(contribution(rank), whole) / norms[rank]
        others = math.sqrt(max(square - 2 * along + 1, 0.0))  # the length of their sum
        if along - 1 < -against * others - _ROUNDING:
            found.add(rank)
    return found


def _capped(
    robust: Robust,
    contribution: Callable[[int], Sequence[Array]],
    norms: Sequence[float],
    weights: Sequence[float],
) -> tuple[dict[int, float], set[int], float]:
    """Bounds the weights, and leaves out what must not count.

    Returns:
        The weights by rank, the limited ranks, and the median of the finite lengths above 0 (0 if
        there is none).
    """
    there = [rank for rank, weight in enumerate(weights) if weight != 0]
    finite = [
        rank
        for rank in there
        if math.isfinite(norms[rank]) and LEAST_WEIGHT <= weights[rank] <= MOST_WEIGHT
    ]
    lengths = [norms[rank] for rank in finite if norms[rank] > 0]
    middle = _median(lengths) if lengths else 0.0
    # Nobody knows which one of two is wrong.
    longest = robust.drop * middle if len(lengths) > 2 else math.inf
    counted = [rank for rank in finite if norms[rank] <= longest]
    opposed = _opposed(robust.against, contribution, norms, counted)
    counted = [rank for rank in counted if rank not in opposed]
    limited = set(there) - set(counted)
    if not counted:
        return {}, limited, middle
    most = robust.weight * _median([weights[rank] for rank in counted])
    limited.update(rank for rank in counted if weights[rank] > most)
    return {rank: min(weights[rank], most) for rank in counted}, limited, middle


def _trimmed(one: Array, weights: dict[int, float], trim: int) -> Array:
    """The weighted mean of the members' values, without the outermost ones of each element."""
    ranks = list(weights)
    flat = one.reshape(len(one), -1)
    made = np.zeros(flat.shape[1], one.dtype)
    for first in range(0, flat.shape[1] if ranks else 0, _AT_ONCE):
        values = flat[ranks, first : first + _AT_ONCE]
        kept = _kept(values, trim)
        total, whole = np.zeros((2, values.shape[1]), np.float64)
        for row, here, weight in zip(values, kept, weights.values(), strict=True):
            total += np.where(here, row, 0) * np.float64(weight)
            whole += here * np.float64(weight)
        made[first : first + _AT_ONCE] = total / whole
    return made.reshape(one.shape[1:])


def _kept(values: Array, trim: int) -> Array:
    """Whether each value stays. Among equal ones the outermost members' go first."""
    kept = np.ones(values.shape, bool)
    columns = np.arange(values.shape[1])
    for _ in range(trim):
        kept[np.where(kept, values, np.inf).argmin(axis=0), columns] = False
        last = np.where(kept, values, -np.inf)[::-1].argmax(axis=0)
        kept[len(values) - 1 - last, columns] = False
    return kept
