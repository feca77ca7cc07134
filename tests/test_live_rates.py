"""Rates measured from running transfers: from a member's looks at its links to a new plan."""

from __future__ import annotations

from pccl import _testing

NOTHING: tuple[list[tuple[int, bool, int, int]], int, int] = ([], 0, 0)
# A look is half a second; a rate is taken from two seconds, between which a link was always full.
LOOKS = 5


def after(
    watcher: _testing.RateWatcher, links: list[tuple[int, int, bool]], looks: int = LOOKS
) -> tuple[list[tuple[int, bool, int, int]], int, int]:
    """Returns the news after so many equal looks. The first one only starts the count."""
    for _ in range(looks - 1):
        assert watcher.look(links) == NOTHING
    return watcher.look(links)


def test_links_that_are_all_full_show_the_up_link() -> None:
    watcher = _testing.RateWatcher()
    assert after(watcher, [(500, 700, True)] * 3) == ([], 3_000, 0)


def test_links_with_room_show_nothing() -> None:
    watcher = _testing.RateWatcher()
    assert after(watcher, [(500, 500, False)] * 3, 40) == NOTHING


def test_what_is_known_is_not_said_but_what_is_much_faster() -> None:
    for now, news in [(3_200, 0), (2_900, 0), (2_400, 0), (4_500, 4_500)]:
        watcher = _testing.RateWatcher()
        watcher.know(3_000, 0, {})
        looks = LOOKS if news == 0 else LOOKS - 1  # so much has moved, full or not
        assert after(watcher, [(now // 6, 0, True)] * 3, looks) == ([], news, 0)


def test_what_is_slower_is_said_when_it_was_so_twice() -> None:
    watcher = _testing.RateWatcher()
    watcher.know(3_000, 0, {})
    assert after(watcher, [(200, 0, True)] * 3, 4) == NOTHING
    assert after(watcher, [(250, 0, True)] * 3, 5)[1] == 1_500  # the faster of two
    watcher = _testing.RateWatcher()
    watcher.know(3_000, 0, {})
    for _ in range(10):
        assert after(watcher, [(250, 0, True)] * 3, 5) == NOTHING
        assert after(watcher, [(500, 0, True)] * 3, 8) == NOTHING


def test_a_pause_is_no_slow_network() -> None:
    watcher = _testing.RateWatcher()
    watcher.know(3_000, 0, {})
    for _ in range(20):
        assert after(watcher, [(500, 0, True)] * 3, 3) == NOTHING
        assert after(watcher, [(0, 0, True)] * 3, 6) == NOTHING


def test_what_was_said_is_said_again_only_after_a_while() -> None:
    watcher = _testing.RateWatcher()
    full = [(500, 0, True)] * 2
    assert after(watcher, full) == ([], 2_000, 0)
    assert after(watcher, full, 20) == NOTHING
    watcher.wait(61)
    assert watcher.look(full) == NOTHING
    assert after(watcher, full, 3) == ([], 2_000, 0)


def test_the_one_link_that_holds_up_the_others_has_a_rate_of_its_own() -> None:
    watcher = _testing.RateWatcher()
    links = [(150, 100, True), (75, 100, False), (75, 100, False)]
    assert after(watcher, links, 2 * LOOKS - 1) == ([(0, False, 300, 0)], 0, 0)
    # Not if the up-link is known, and that is more than a part of it.
    watcher = _testing.RateWatcher()
    watcher.know(600, 600, {})
    assert after(watcher, links, 40) == NOTHING


def test_a_link_that_was_slow_and_is_not_any_more_is_said_to_be_faster() -> None:
    watcher = _testing.RateWatcher()
    watcher.know(2_000, 0, {1: (100, 40_000)})
    assert after(watcher, [(500, 0, True)] * 2) == ([(1, False, 1_000, 40_000)], 0, 0)


def test_around_a_ring_the_only_link_that_is_used_is_the_up_link_unless_that_is_known() -> None:
    ring = [(500, 0, True), (0, 500, False)]
    watcher = _testing.RateWatcher()
    assert after(watcher, ring) == ([], 1_000, 0)
    watcher = _testing.RateWatcher()
    watcher.know(10_000, 10_000, {})
    assert after(watcher, ring, 2 * LOOKS - 1) == ([(0, False, 1_000, 0)], 0, 0)


def test_more_than_is_known_to_fit_corrects_what_is_known() -> None:
    watcher = _testing.RateWatcher()
    watcher.know(1_000, 1_000, {})
    assert after(watcher, [(400, 700, False)] * 2, 4) == ([], 1_600, 2_800)


def test_a_link_counts_as_full_only_between_two_looks_that_found_it_so() -> None:
    watcher = _testing.RateWatcher()
    for _ in range(20):
        assert watcher.look([(500, 0, True)] * 2) == NOTHING
        watcher.skip()
    for turn in range(20):
        assert watcher.look([(500, 0, turn % 2 == 0)] * 2) == NOTHING


def test_round_trips_at_rest() -> None:
    watcher = _testing.RateWatcher()
    assert watcher.round_trip(0, 45_000) == NOTHING
    assert watcher.round_trip(0, 40_000) == NOTHING
    assert watcher.round_trip(0, 90_000) == ([(0, False, 0, 40_000)], 0, 0)
    watcher.know(0, 0, {0: (0, 40_000)})
    for _ in range(9):
        assert watcher.round_trip(0, 44_000) == NOTHING
    for _ in range(2):
        assert watcher.round_trip(0, 70_000) == NOTHING
    assert watcher.round_trip(0, 71_000) == ([(0, False, 0, 70_000)], 0, 0)


def test_round_trips_that_differ_by_less_than_a_millisecond_are_the_same() -> None:
    watcher = _testing.RateWatcher()
    watcher.know(0, 0, {0: (0, 150)})
    for rtt in (300, 900, 80, 1_100) * 3:
        assert watcher.round_trip(0, rtt) == NOTHING


def test_a_round_trip_keeps_the_rate_that_the_way_has() -> None:
    watcher = _testing.RateWatcher()
    watcher.know(0, 0, {2: (700, 10_000)})
    watcher.round_trip(2, 30_000)
    watcher.round_trip(2, 30_000)
    assert watcher.round_trip(2, 30_000) == ([(2, False, 700, 30_000)], 0, 0)


# ---- the master


def table(
    ups: list[int], rates: dict[tuple[int, int], int]
) -> tuple[list[tuple[int, int]], list[tuple[bool, int, int, int]]]:
    """Hosts of these up-links, 20 ms apart, and the ways that have rates of their own; kB/s."""
    n = len(ups)
    return (
        [(up, 0) for up in ups],
        [
            (False, rates.get((a, b), 0), 40_000 if a != b else 0, 0)
            for a in range(n)
            for b in range(n)
        ],
    )


def test_ways_that_fill_the_link_of_a_slow_host_are_not_slow_themselves() -> None:
    ups = [100_000, 100_000, 100_000, 25_000]
    into_the_slow = {(other, 3): 8_300 for other in range(3)}
    shares = _testing.best_shares(table(ups, into_the_slow))
    assert shares == _testing.best_shares(table(ups, {}))
    assert shares is not None and shares[3] == 0


def test_one_slow_way_leaves_its_ends_their_links() -> None:
    ups = [100_000] * 4
    shares = _testing.best_shares(table(ups, {(0, 1): 10_000}))
    assert shares is not None and shares[0] + shares[1] < 0.2 < shares[2] == shares[3]
    ring = _testing.best_ring(table(ups, {(0, 1): 10_000}))
    assert ring is not None and ring[(ring.index(0) + 1) % 4] != 1


def test_ways_that_differ_are_slow_themselves_even_if_they_fill_the_link() -> None:
    ups = [100_000] * 4
    ring = _testing.best_ring(table(ups, {(0, 1): 10_000, (0, 2): 10_000, (0, 3): 75_000}))
    assert ring is not None and ring[1] == 3


def test_ways_that_carry_less_than_the_links_at_their_ends_are_slow() -> None:
    ups = [100_000] * 4
    shares = _testing.best_shares(table(ups, {(other, 3): 8_300 for other in range(3)}))
    assert shares is not None and shares[3] < 0.02
    assert _testing.best_shares(table(ups, {})) == [0.25] * 4
