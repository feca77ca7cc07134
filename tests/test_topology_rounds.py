"""How the master turns rounds of measurements into plans."""

from __future__ import annotations

from plans import LARGE, Table, chosen, class_for, even, make_table

from pccl import _testing

_Row = tuple[list[tuple[int, bool, int, int]], int, int]
PLAN = 2  # the cause of an epoch
NO_ROW = None


def rows_of(table: Table, members: list[int]) -> list[_Row]:
    n = len(members)
    return [
        (
            [(to, *table[1][a * n + b][:3]) for b, to in enumerate(members) if b != a],
            *table[0][a],
        )
        for a in range(n)
    ]


SLOW_LAST = make_table(
    4,
    lambda a, b: (15_625 if 3 in (a, b) else 62_500, 100_000),
    lambda a: (15_625,) * 2 if a == 3 else (62_500,) * 2,
)


def test_a_round_without_rows_changes_nothing() -> None:
    group = _testing.Planner(3)
    before = group.record()
    empty: _Row = ([], 0, 0)
    for rows in ([NO_ROW] * 3, [empty] * 3, [NO_ROW, empty, NO_ROW]):
        group.optimize(rows)
    assert group.record()[:5] == before[:5]
    assert group.record()[5] == 9  # every member was told, three times


def test_a_plan_comes_out_of_the_rows() -> None:
    group = _testing.Planner(4)
    first = group.record()[0]
    group.optimize(rows_of(SLOW_LAST, [1, 2, 3, 4]))
    epoch, cause, plan, table, _, told = group.record()
    assert (epoch, cause, told) == (first + 1, PLAN, 4)
    assert table == SLOW_LAST
    assert plan == chosen(SLOW_LAST, set(), [0, 1, 2, 3])[0]
    assert class_for(plan, LARGE)[2][3] == 0
    assert any("plan: " in line and "lower bound" in line for line in group.lines())
    # Nothing new: no epoch.
    group.optimize(rows_of(SLOW_LAST, [1, 2, 3, 4]))
    group.optimize([NO_ROW] * 4)
    assert group.record()[0] == epoch


def test_a_rebuilt_master_plans_the_same() -> None:
    live, again = _testing.Planner(4), _testing.Planner(4)
    for group in (live, again):
        group.optimize(rows_of(SLOW_LAST, [1, 2, 3, 4]))
    again.rebuild()
    assert again.record()[:5] == live.record()[:5]
    for group in (live, again):
        group.leave(2)
    assert again.record()[:5] == live.record()[:5]
    _, _, plan, table, members, _ = live.record()
    assert members == [1, 3, 4]
    keep = [0, 2, 3]
    assert table[0] == [SLOW_LAST[0][a] for a in keep]
    assert table[1] == [SLOW_LAST[1][a * 4 + b] for a in keep for b in keep]
    assert plan == chosen(table, set(), [0, 1, 2])[0]


def test_what_a_row_does_not_say_stays_known() -> None:
    group = _testing.Planner(3)
    group.optimize(rows_of(even(3), [1, 2, 3]))
    # Rows about a stranger, itself, an empty one, half of one, and a pair that broke.
    group.optimize([([(9, False, 7, 7), (1, False, 7, 7), (2, False, 0, 0)], 0, 0),
                    ([(3, False, 0, 33)], 0, 44), ([(1, True, 5, 5)], 0, 0)])  # fmt: skip
    hosts, links = group.record()[3]
    assert hosts == [(62_500, 62_500), (62_500, 44), (62_500, 62_500)]
    assert links[0 * 3 + 1] == (False, 62_500, 100_000, 0)
    assert links[1 * 3 + 2] == (False, 0, 33, 0)  # it was measured, and has no rate of its own
    assert links[2 * 3 + 0] == (True, 0, 0, 0)
    group.optimize([NO_ROW, NO_ROW, ([(1, False, 5, 0)], 0, 0)])
    assert group.record()[3][1][2 * 3 + 0] == (False, 5, 0, 0)


def test_what_transfers_show_changes_the_plan_only_when_it_is_worth_it() -> None:
    group = _testing.Planner(4)
    group.optimize(rows_of(even(4), [1, 2, 3, 4]))
    epoch, _, plan, table, _, _ = group.record()
    for number, row in enumerate(rows_of(even(4, 60_000), [1, 2, 3, 4]), 1):
        group.measured(number, row)
    group.tick(120)
    assert group.record()[0] == epoch
    for number, row in enumerate(rows_of(SLOW_LAST, [1, 2, 3, 4]), 1):
        group.measured(number, row)
    assert group.record()[3] == table  # until there is an epoch
    group.tick(40)
    assert group.record()[:4] == (
        epoch + 1, PLAN, chosen(SLOW_LAST, set(), [0, 1, 2, 3])[0], SLOW_LAST
    )  # fmt: skip
    assert group.record()[2] != plan
    # A loss takes what is known into its epoch, worth it or not.
    group.measured(1, ([(2, False, 62_000, 0)], 0, 0))
    group.tick(120)
    assert group.record()[0] == epoch + 1
    group.leave(4)
    assert group.record()[3][1][0 * 3 + 1] == (False, 62_000, 100_000, 0)


def test_large_groups_have_no_table() -> None:
    group = _testing.Planner(65)
    before = group.record()[:4]
    group.optimize([([(2, False, 1000, 1000)], 5, 5)] * 65)
    assert group.record()[:4] == before
