"""The global batch stays the same for any number of members."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import data
from workers import Run

import pccl
from pccl.data import micro_batches


def of(rank: int, size: int) -> pccl.Membership:
    return pccl.Membership(0, rank, size, tuple(map(str, range(size))), 0)


@given(size=st.integers(1, 50), count=st.integers(1, 10_000), micro_batch=st.integers(1, 64))
def test_parts_add_up_and_are_even_and_the_first_ranks_have_the_larger_ones(
    size: int, count: int, micro_batch: int
) -> None:
    parts = [
        micro_batches(count * micro_batch, micro_batch, membership=of(rank, size))
        for rank in range(size)
    ]
    assert sum(parts) == count
    assert parts == sorted(parts, reverse=True) and parts[0] - parts[-1] <= 1


def test_there_may_be_more_members_than_micro_batches() -> None:
    assert [micro_batches(64, 32, membership=of(rank, 3)) for rank in range(3)] == [1, 1, 0]


def test_alone_it_needs_no_run() -> None:
    assert micro_batches(96, 32) == 3


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(pccl.InvalidArgument, match="micro_batch=7 does not divide global_batch=32"):
        micro_batches(32, 7)
    for sizes in ((0, 1), (8, 0), (-8, 8)):
        with pytest.raises(pccl.InvalidArgument, match="must be positive"):
            micro_batches(*sizes)
    with pytest.raises(pccl.InvalidUsage, match="not a member yet"):
        micro_batches(8, membership=of(-1, 0))


def test_after_a_loss_the_others_take_over_the_part_of_the_lost_one(run: Run) -> None:
    # 7 micro-batches: three members have 3, 2 and 2; two have 4 and 3.
    peers = run.peers(3, partial(data.accumulate, 7))
    before = {peer: peer.expect("step") for peer in peers}
    assert sorted(answer["count"] for answer in before.values()) == [2, 2, 3]
    last = next(peer for peer in peers if before[peer]["rank"] == 2)
    last.process.kill()
    last.ends()
    others = [peer for peer in peers if peer is not last]
    for peer in others:
        peer.tell("go")
    after = [peer.expect("done") for peer in others]
    assert sorted(answer["count"] for answer in after) == [3, 4]
    # The same gradient as before, up to rounding: the mean over all of the batch's examples.
    means = [answer["mean"] for answer in (*before.values(), *after)]
    assert means == pytest.approx(len(means) * [3.0])
