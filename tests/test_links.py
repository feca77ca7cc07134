"""Connections that end lose and repeat nothing, and links find how many stripes they need."""

from __future__ import annotations

import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import links
from workers import Run

from pccl import _testing

# ---- one stripe

sizes = st.lists(st.integers(1, 2000), max_size=20)
pieces = st.lists(st.integers(1, 3000), max_size=5)


@given(sizes, st.integers(0, 30_000), st.integers(0, 30_000), pieces, st.integers(0, 3))
def test_what_did_not_come_whole_is_sent_again(
    sizes: list[int], written: int, read: int, pieces: list[int], told: int
) -> None:
    arrived, received, again, waiting, interrupted = _testing.stand_in(
        sizes, written, read, pieces, told=told
    )
    assert received == len(arrived)
    assert arrived + again + waiting == list(range(len(sizes)))
    assert interrupted <= 1


@given(sizes, st.integers(0, 30_000), pieces)
def test_a_spoilt_frame_is_sent_again_with_all_behind_it(
    sizes: list[int], spoilt: int, pieces: list[int]
) -> None:
    frame = 72 + 8
    arrived, _, again, waiting, _ = _testing.stand_in(
        sizes, 1 << 20, 1 << 20, pieces, spoilt=spoilt, told=1
    )
    at = 0
    intact = 0
    while intact < len(sizes) and at + frame + sizes[intact] <= spoilt:
        at += frame + sizes[intact]
        intact += 1
    assert arrived == list(range(intact))
    assert arrived + again + waiting == list(range(len(sizes)))


@given(sizes, st.integers(0, 30_000), st.integers(0, 30_000), pieces)
def test_nothing_of_an_operation_that_ended_is_sent_again(
    sizes: list[int], written: int, read: int, pieces: list[int]
) -> None:
    arrived, received, again, _, _ = _testing.stand_in(sizes, written, read, pieces, released=True)
    assert received == len(arrived)
    assert not again


# ---- one that does not come about


@pytest.mark.parametrize("every", [0.9, 2.5, 60])
def test_epochs_that_follow_each_other_do_not_hide_a_link_that_is_missing(every: float) -> None:
    link = _testing.MissingLink()
    passed = 0.0
    while not link.reports():
        link.epoch()
        link.passes(every)
        passed += every
        assert passed < 8 or every > 8
    assert passed >= 3  # PCCL_LINK_TIMEOUT
    # The next epoch may have the same plan: it is reported again.
    reports = link.reports()
    link.epoch()
    link.passes(1.0)
    assert link.reports() == reports + 1


def test_a_link_that_may_go_through_the_master_has_as_long_again() -> None:
    link = _testing.MissingLink()
    link.epoch()
    link.passes(3.5)
    reports = link.reports()
    link.epoch(may_relay=True)
    link.passes(2.0)
    assert link.reports() == reports == 1
    link.passes(2.0)
    assert link.reports() == 2


# ---- one whose path is cut

STRIPES = 16  # of a link between hosts, to begin with


def silent_link() -> _testing.SilentLink:
    link = _testing.SilentLink()
    link.passes(2.0)
    assert (link.working(), link.dials()) == (STRIPES, STRIPES)
    return link


@pytest.mark.parametrize("seconds", [2.5, 3.0, 4.0, 5.0])
def test_a_path_that_works_again_is_found_before_its_connections_try_again(seconds: float) -> None:
    link = silent_link()
    link.cut()
    link.passes(seconds)
    assert link.working() == 0
    link.heal()
    link.passes(0.8)
    assert link.stand_ins() == STRIPES
    assert STRIPES <= link.working() <= 1.5 * STRIPES  # the surplus ends, one each second
    link.passes(60)
    assert (link.working(), link.downs()) == (STRIPES, 0)


def test_a_path_that_stays_cut_breaks_the_link_when_it_is_due() -> None:
    link = silent_link()
    link.cut()
    link.passes(5.5)
    assert link.downs() == 0
    link.passes(2.0)
    assert link.downs() == 2


@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_connections_that_go_on_by_themselves_are_not_replaced(seconds: float) -> None:
    link = silent_link()
    link.cut()
    link.passes(seconds)
    dials = link.dials()
    link.heal(resume=True)
    link.passes(0.5)
    assert link.working() >= STRIPES
    assert link.stand_ins() == 0 or dials > STRIPES
    link.passes(60)
    assert (link.working(), link.downs()) == (STRIPES, 0)


def test_a_peer_that_was_frozen_keeps_its_connections() -> None:
    link = silent_link()
    link.freeze(True)
    link.passes(4.0)
    assert STRIPES < link.dials() <= 2.5 * STRIPES
    link.freeze(False)
    link.passes(0.5)
    assert link.working() > STRIPES
    assert link.stand_ins() <= 1  # the surplus ends, one each second
    link.passes(60)
    assert (link.working(), link.downs()) == (STRIPES, 0)


@pytest.mark.parametrize(("newer", "older"), [(1.0, 3.0), (3.0, 1.0), (0.1, 1.0), (1.0, 0.1)])
def test_ends_with_other_intervals_wait_for_each_other(newer: float, older: float) -> None:
    link = _testing.SilentLink(newer=newer, older=older)
    link.passes(60)
    assert (link.working(), link.dials(), link.stand_ins()) == (STRIPES, STRIPES, 0)
    link.cut()
    link.passes(2.0)
    dials = link.dials()
    link.heal(resume=True)
    link.passes(60)
    assert (link.working(), link.downs()) == (STRIPES, 0)
    assert dials <= 3 * STRIPES


@given(st.lists(st.floats(0.05, 3), max_size=20))
def test_a_link_with_little_to_do_is_never_silent(pauses: list[float]) -> None:
    link = silent_link()
    for pause in pauses:
        link.ping()
        link.passes(pause)
    assert link.dials() == STRIPES


# ---- how many


def rates(knee: int, one: float = 2e6) -> list[float]:
    """A path on which each connection brings `one` bytes a second, up to `knee` of them."""
    return [min(count, knee) * one for count in range(64)]


@pytest.mark.parametrize("knee", [1, 4, 8, 20, 32])
def test_links_grow_to_what_fills_the_path_and_not_far_beyond(knee: int) -> None:
    settled = _testing.settle_stripes(8, 2, 32, rates(knee), 400)
    assert min(knee, 32) * 0.85 <= settled <= max(2, knee) * 1.7 + 2


def test_a_number_that_is_given_is_kept() -> None:
    busy = [(10_000_000 * i, 1.0, True, True) for i in range(1, 50)]
    assert set(_testing.tune_stripes(5, 5, 5, busy)) == {5}


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 34), st.floats(0, 10), st.booleans(), st.booleans()),
        max_size=60,
    )
)
def test_the_number_stays_within_its_bounds(
    windows: list[tuple[int, float, bool, bool]],
) -> None:
    assert all(2 <= wanted <= 32 for wanted in _testing.tune_stripes(10, 2, 32, windows))


def test_windows_that_say_nothing_change_nothing() -> None:
    idle = [(10_000_000, 1.0, False, True), (100, 1.0, True, True), (10_000_000, 1.0, True, False)]
    assert set(_testing.tune_stripes(10, 2, 32, idle * 20)) == {10}


# ---- real connections


@pytest.mark.parametrize("threads", ["1", "4"])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.env(
    PCCL_SHM="0", PCCL_STRIPES="8", PCCL_CHECKSUM="always", PCCL_HEARTBEAT_INTERVAL="0.2"
)
def test_connections_that_end_cost_no_operation_its_attempt(
    run: Run, quantize: bool, threads: str
) -> None:
    program = partial(links.reduce_and_end_connections, 60, quantize)
    peers = run.peers(3, program, PCCL_THREADS=threads)
    answers = [peer.expect("done", timeout=90) for peer in peers]
    assert min(answer["all_ended"] for answer in answers) > 20
    assert max(answer["open"] for answer in answers) < 200  # what ended was closed
    assert all(answer["attempts"] == answer["operations"] for answer in answers), answers


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's counts")
@pytest.mark.env(PCCL_SHM="0", PCCL_STRIPES="1", PCCL_HEARTBEAT_INTERVAL="0.2")
def test_a_link_at_rest_has_a_heartbeat_in_each_interval(run: Run) -> None:
    for peer in run.peers(2, partial(links.hear_heartbeats, 10)):
        assert 0.5 * 10 * 0.2 < peer.expect("heard")["seconds"] < 1.5 * 10 * 0.2
