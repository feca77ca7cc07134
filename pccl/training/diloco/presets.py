"""Options to begin with, for a number of members, a model and a network."""

from __future__ import annotations

import math

from pccl.training.diloco.options import Keywords, refused
from pccl.training.diloco.sparse import Sparse

# The best outer learning rate for 1, 2, 4 and 8 members: Charles et al., arXiv 2503.09799.
_OUTER_LR = ((1, 0.4), (5, 0.6), (math.inf, 0.8))
_LEAST_STEPS, _MOST_STEPS = 50, 500  # in a round; the DiLoCo paper (arXiv 2311.08105) uses 500
_WAITED = 0.1  # share of a round that members may wait
_LEAST, _MOST = 1e-9, 1e15  # of all numbers
_MARGIN = 1.25  # steps of overlap over those that the reduction takes, since both vary
_INTERNET = 1000.0  # Mbit/s below which whole elements are not sent
# Bytes that a member sends for each parameter and, for sparse codes, each other member.
_EXACT, _INT8, _SPARSE = 8.0, 2.03, 0.056
# Where owners reduce sparse codes (mode "sync", six members or more): up to so many members, bytes
# per parameter.
_LEAST_OWNERS = 6
_OWNED = ((8, 0.225), (16, 0.35), (24, 0.46), (math.inf, 0.55))
# Sparse codes in short runs, as measured with 30 and 40 rounds of mode "sync": docs/benchmarks.md.
_SHORT_RUN, _SHORT_RUN_OUTER_LR = 50, 3.0


def preset(
    *,
    members: int,
    parameters: float,
    megabits: float,
    step_seconds: float,
    rounds: int | None = None,
    compression: str | None = None,
) -> Keywords:
    """Options for `DiLoCo` to begin with, computed from what is usual in a run.

        options = pccl.diloco.preset(members=8, parameters=1e8, megabits=100, step_seconds=1)
        diloco = DiLoCo(model, inner, **options)

    The outer learning rate is the best one of the scaling-law paper (arXiv 2503.09799) for so many
    members. A round has from 50 to 500 steps, the fewest with which members wait for at most a
    tenth of the time. Elements are sent exactly from 1000 Mbit/s on if that fits, else as int8. If
    500 steps are too few for that, the reduction runs in the background of the next steps
    ("async"): as many as it takes, and a quarter more. If these are more than half a round, sparse
    codes are sent, unless int8 sends fewer bytes with so many members.

    Args:
        members: The usual number.
        parameters: Of the model.
        megabits: Up-link of a usual member, in Mbit/s; a down-link is often faster.
        step_seconds: Of an inner step on a usual member.
        rounds: Of the whole run, if that is known. With sparse codes in mode "sync" a run of at
            most 50 rounds gets an outer learning rate of 3. The usual one of 1 is for more rounds.
            Default: many.
        compression: "sparse": sparse codes are sent, whatever the network. Rounds have the fewest
            steps with which members wait for at most a tenth of the time, as above. Default: as
            above.

    All members must pass the same numbers: other numbers give other options, which the run refuses.

    Raises:
        InvalidArgument: A number makes no sense, or no reduction fits in a round of 500 steps.
    """
    if isinstance(members, bool) or not isinstance(members, int) or members < 1:
        raise refused(f"members is a whole number of at least 1, not {members!r}")
    for name, given in (
        ("parameters", parameters),
        ("megabits", megabits),
        ("step_seconds", step_seconds),
    ):
        fits = isinstance(given, int | float) and not isinstance(given, bool)
        if not fits or not _LEAST <= given <= _MOST:
            raise refused(f"{name} is a number from {_LEAST:g} to {_MOST:g}, not {given!r}")
    if rounds is not None and (
        isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1
    ):
        raise refused(f"rounds is a whole number of at least 1, not {rounds!r}")
    if compression not in (None, "sparse"):
        raise refused(f'compression is "sparse" or None, not {compression!r}')
    outer_lr = next(rate for most, rate in _OUTER_LR if members <= most)
    usual = Keywords(sync_every=_LEAST_STEPS, outer_lr=outer_lr, outer_momentum=0.9)

    def steps(bytes_each: float) -> float:
        """Inner steps that a reduction takes."""
        return bytes_each * parameters * 8 / (megabits * 1e6) / step_seconds

    def waiting(reduction: float) -> int:
        """Steps in a round with which members wait for that little of it."""
        return max(_LEAST_STEPS, 10 * math.ceil(reduction / _WAITED / 10))

    share = (members - 1) / members
    exact, int8, sparse = (
        steps(_EXACT * share),
        steps(_INT8 * share),
        steps(_SPARSE * (members - 1)),
    )
    together = sparse
    if members >= _LEAST_OWNERS:
        together = steps(share * next(owned for most, owned in _OWNED if members <= most))
    if compression is not None and together <= _WAITED * _MOST_STEPS:
        found = Keywords(sync_every=waiting(together), compression=Sparse())
        if rounds is not None and rounds <= _SHORT_RUN:
            found["outer_lr"] = _SHORT_RUN_OUTER_LR
        return found
    if compression is None and megabits >= _INTERNET and exact <= _WAITED * _LEAST_STEPS:
        return usual
    usual["quantize"] = "int8"
    if compression is None and int8 <= _WAITED * _MOST_STEPS:
        usual["sync_every"] = waiting(int8)
        return usual
    usual["sync_every"], usual["mode"] = _MOST_STEPS, "async"
    overlap = math.ceil(_MARGIN * int8)
    if compression is not None or overlap > _MOST_STEPS // 2 and sparse < int8:
        overlap = max(1, math.ceil(_MARGIN * sparse))
        usual = Keywords(sync_every=_MOST_STEPS, mode="async", compression=Sparse())
    elif overlap > _MOST_STEPS // 2:
        usual["outer_momentum"] = 0.5  # the mean is so old that more overshoots
    if overlap > _MOST_STEPS:
        raise refused(
            f"a reduction wants {overlap} steps at {megabits:g} Mbit/s, and a round has "
            f"{_MOST_STEPS}: train fewer parameters, such as adapters of a frozen model"
        )
    usual["overlap"] = overlap
    return usual
