"""DiLoCo with `background_join`: newcomers watch until they have the state, and nobody waits."""

from __future__ import annotations

import random
import signal
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from diloco_run import Peers, asked, close, go, made, make, reference, shown, tell, went
from programs import diloco_member as member
from programs import diloco_watching as watching
from workers import Run, Worker, complaints, eventually

from pccl import _core
from pccl.diloco import DiLoCo
from pccl.errors import InvalidArgument
from pccl.following.snapshot import Snapshot, listed, restore, unpack
from pccl.training.diloco import snapshots

BEHIND: dict[str, Any] = {"background_join": True}
FORMS: list[dict[str, Any]] = [
    {},
    {"verify_every": 0, "quantize": "int8"},
    {"mode": "async"},
    {"mode": "async", "overlap": 2},
    {"mode": "streaming", "fragments": 3, "overlap": 2},
    {"mode": "streaming", "overlap": 0, "verify_every": 1},
    {"sparse": {"density": 0.25}},
    {"robust": "clip", "join_megabits": 100},
    {"warm_up": 14},
    {"warm_up": 5, "mode": "async", "overlap": 2},
    {"warm_up": 5, "mode": "streaming", "fragments": 3, "overlap": 2},
]


def begun(run: Run, count: int, **options: Any) -> Peers:
    """The members of a run."""
    peers = Peers(run.peers(count, member.serve))
    make(peers, seed=0, **options)
    made(peers)
    return peers


def enter(run: Run, numbers: range, rounds: int, **options: Any) -> Peers:
    """Newcomers that wait to be let in, and then watch for so many rounds."""
    late = Peers([run.peer(member.serve) for _ in numbers])
    for number, worker in zip(numbers, late, strict=True):
        worker.call(partial(watching.make_late, number, rounds, **options))
    for worker in late:
        asked(worker)
    return late


def groups_of(run: Run) -> list[int]:
    """The numbers of the run's groups. Not more often than the master answers."""
    threading.Event().wait(0.2)
    return [group["group"] for group in _core.ask_status(run.address)["groups"]]


def observers(worker: Worker) -> dict[str, Any]:
    tell([worker], watching.show_observers)
    return worker.expect("observers")


@pytest.mark.parametrize(
    ("form", "rounds"), [*((form, 2) for form in FORMS), (FORMS[0], 0), (FORMS[4], 0)]
)
def test_a_newcomer_holds_what_the_members_hold_when_it_begins_to_count(
    run: Run, form: dict[str, Any], rounds: int
) -> None:
    options = BEHIND | form | {"sync_every": 4}
    peers = begun(run, 2, **options)
    go(peers, 2, inner=False, tokens=8)
    late = enter(run, range(2, 3), rounds, **options)
    tell(peers, partial(watching.go_until_newcomers_count, 3, tokens=8))
    tell(late, partial(member.go, 3, tokens=8))
    began = made(late)[0]["round"]
    assert began >= 3 + max(1, rounds)
    logs = went([*peers, *late], inner=False)
    assert [log[-1]["round"] for log in logs] == [began + 3] * 3
    assert logs[2][-1]["size"] == 3
    shown([*peers, *late])
    eventually(lambda: groups_of(run) == [0])


def test_the_newcomer_counts_from_the_round_that_it_began(run: Run) -> None:
    options = BEHIND | {"sync_every": 4}
    peers = begun(run, 2, **options)
    go(peers, 2)
    late = enter(run, range(2, 4), 2, **options)
    tell(peers, partial(watching.go_until_newcomers_count, 3))
    tell(late, partial(watching.go_until_newcomers_count, 3, came=True))
    entered = {number: one["round"] for number, one in enumerate(made(late), 2)}
    last = max(entered.values()) + 3
    logs = went([*peers, *late])
    assert [log[-1]["round"] for log in logs] == [last] * 4
    everybody = [
        [0, 1] + [number for number, at in entered.items() if at < round]
        for round in range(1, last + 1)
    ]
    assert close(shown([*peers, *late]), reference("sync", 4, everybody))


def test_a_newcomer_that_is_killed_while_it_watches_costs_nothing(run: Run) -> None:
    options = BEHIND | {"sync_every": 4}
    peers = begun(run, 2, **options)
    go(peers, 1)
    late = enter(run, range(2, 3), 1000, **options)
    go(peers, 3)
    assert observers(peers[0])["watching"] == 1, late[0].stderr() + peers[0].stderr()
    late[0].signal(signal.SIGKILL)
    go(peers, 3)
    found = [observers(peer) for peer in peers]
    assert [one["watching"] for one in found] == [0, 0]
    assert close(shown(peers), reference("sync", 4, [[0, 1]] * 7))


# Lines that a newcomer runs until it counts: see `watching.make_and_die`.
MOST_LINES = 11_000


@pytest.mark.parametrize(
    ("seed", "form"),
    list(enumerate([{}, {"mode": "async"}, FORMS[4], {}])),
)
def test_a_newcomer_that_is_killed_at_any_moment_changes_nothing(
    run: Run, seed: int, form: dict[str, Any]
) -> None:
    options = BEHIND | form | {"sync_every": 4}
    peers = begun(run, 2, **options)
    moments = random.Random(seed)
    logs: list[list[dict[str, Any]]] = [[], []]

    def go_on(count: int) -> None:
        for log, more in zip(logs, go(peers, count, inner=False), strict=True):
            log += more

    # The last one is killed where it begins to count.
    for lines in [*(moments.randrange(MOST_LINES) for _ in range(4)), 1_000_000]:
        late = Peers([run.peer(member.serve)])
        tell(late, partial(watching.make_and_die, 2, lines, **options))
        while late[0].process.poll() is None:
            go_on(1)
        assert late[0].ends() == -signal.SIGKILL, late[0].stderr()
        go_on(2)
        for peer in peers:
            # A holder does not wait for one that is gone.
            eventually(lambda peer=peer: observers(peer)["holding"] == 0)
            assert observers(peer)["watching"] == 0
    # The same rounds among two members to whom nobody comes.
    quiet = Peers(run.peers(2, partial(member.serve, peer_group=1)))
    make(quiet, seed=0, **options)
    made(quiet)
    want = [(one["round"], one["outer"]) for one in go(quiet, len(logs[0]), inner=False)[0]]
    assert [[(one["round"], one["outer"]) for one in log] for log in logs] == [want, want]
    assert [complaints(peer.stderr(), news=False) for peer in peers] == ["", ""]


def test_other_holders_send_what_one_that_is_killed_has_not_sent(run: Run) -> None:
    options = BEHIND | {"sync_every": 4}
    peers = begun(run, 3, **options)
    go(peers, 1)
    tell(peers[2:], watching.die_as_a_newcomer_asks)
    tell(peers[:2], partial(watching.send_after_the_end_of, peers[2].pid))
    late = Peers([run.peer(member.serve)])
    tell(late, watching.small_pieces)
    make(late, 3, **options)
    asked(late[0])
    tell(peers, partial(watching.go_until_newcomers_count, 3))
    tell(late, partial(member.go, 3))
    made(late)
    assert peers[2].ends() == -signal.SIGKILL
    went([*peers[:2], *late])
    shown([*peers[:2], *late])


NO_THREADS = {"holders have no threads": "pccl snapshot", "it has no threads": "pccl fetch"}


@pytest.mark.parametrize("stuck", ["no line", "too late", *NO_THREADS])
def test_the_members_wait_for_a_newcomer_that_does_not_get_the_state(run: Run, stuck: str) -> None:
    options = BEHIND | {"sync_every": 4, "mode": "async", "join_megabits": 100}
    peers = begun(run, 2, **options)
    go(peers, 2, inner=False)
    late = Peers([run.peer(member.serve)])
    if stuck in NO_THREADS:
        without = late if stuck == "it has no threads" else peers
        tell(without, partial(watching.start_no_threads, NO_THREADS[stuck]))
        make(late, 2, **options)
    elif stuck == "no line":
        tell(late, partial(watching.make_without_lines, 2, **options))
    else:
        tell(late, partial(watching.make_late, 2, 1000, most=2, **options))
    asked(late[0])
    tell(peers, partial(watching.go_until_newcomers_count, 3))
    tell(late, partial(member.go, 3))
    made(late)
    went([*peers, *late], inner=False)
    shown([*peers, *late])
    for peer in peers:
        assert peer.stderr().count("join_megabits=100 may be too low") == 1
    assert "too low" not in late[0].stderr()


def test_the_members_wait_for_a_newcomer_that_keeps_many_results(run: Run) -> None:
    options = BEHIND | {"sync_every": 20, "warm_up": 70}  # up to ten results in a round
    peers = begun(run, 2, **options)
    late = Peers([run.peer(member.serve)])
    tell(late, partial(watching.make_late, 2, 1000, **options))
    asked(late[0])
    tell(peers, partial(watching.go_until_newcomers_count, 1))
    tell(late, partial(member.go, 1))
    made(late)
    rounds = went([*peers, *late])[0]
    assert len(rounds) <= 6  # 16 results are more than two rounds


def test_a_newcomer_that_has_the_state_goes_on_when_all_others_are_killed(run: Run) -> None:
    options = BEHIND | {"sync_every": 4}
    peers = begun(run, 2, **options)
    go(peers, 2)
    late = enter(run, range(2, 3), 0, **options)
    tell(peers, partial(watching.go_until_newcomers_count, 1))
    round = made(late)[0]["round"]
    for peer in peers:
        peer.signal(signal.SIGKILL)
    assert go(late, 2)[0][-1]["round"] >= round + 2


def test_a_newcomer_without_the_state_is_told_that_all_who_had_it_are_gone(run: Run) -> None:
    options = BEHIND | {"sync_every": 4}
    peers = begun(run, 2, **options)
    go(peers, 2)
    late = Peers([run.peer(member.serve)])
    tell(late, partial(watching.make_or_fail, 2, 1000, **options))
    asked(late[0])
    go(peers, 2)
    for peer in peers:
        peer.signal(signal.SIGKILL)
    assert late[0].expect("failed", 60)["kind"] == "StateUnavailable"


@pytest.mark.parametrize("members", [1, 2])
def test_a_newcomer_never_passes_its_own_parameters_off_as_the_runs(run: Run, members: int) -> None:
    options = BEHIND | {"sync_every": 4, "verify_every": 0}
    peers = begun(run, members, **options)
    go(peers, 2)
    late = Peers([run.peer(member.serve)])
    tell(late, partial(watching.make_or_fail, 2, 1000, most=2, **options))
    asked(late[0])
    tell(peers, watching.die_as_all_wait_for_a_newcomer)
    tell(peers, partial(member.go, 1000))
    assert late[0].expect("failed", 60)["kind"] == "StateUnavailable"


@pytest.mark.parametrize("other", ["layout", "outer_lr", "data"])
def test_a_newcomer_with_another_model_or_late_settings_is_told(run: Run, other: str) -> None:
    options = BEHIND | {"sync_every": 4}
    peers = begun(run, 2, **options)
    go(peers, 1)
    late = Peers([run.peer(member.serve)])
    more: dict[str, Any] = {"outer_lr": {"outer_lr": 0.5}, "layout": {"dtype": "float64"}}.get(
        other, {"sampled": True}
    )
    tell(late, partial(watching.make_or_fail, 2, **options, **more))
    asked(late[0])
    tell(peers, partial(member.go, 3))
    assert late[0].expect("failed", 60)["kind"] == "InvalidArgument"
    went(peers)


def test_the_last_holder_gives_the_state_away_before_it_leaves(run: Run) -> None:
    options = BEHIND | {"sync_every": 4}
    peers = begun(run, 1, **options)
    go(peers, 2)
    late = enter(run, range(1, 2), 1000, **options)
    go(peers, 2)
    assert observers(peers[0]) == {"event": "observers", "watching": 1, "holding": 2}
    tell(peers, watching.drain)
    tell(peers, watching.go_until_drained)
    round = made(late)[0]["round"]
    assert round >= 5
    assert peers[0].expect("drained", 60)["round"] >= round
    assert go(late, 2)[0][-1]["round"] >= round + 2


def test_a_newcomer_that_does_not_fit_is_told_and_the_members_go_on(run: Run) -> None:
    options = BEHIND | {"sync_every": 4}
    peers = begun(run, 2, **options)
    go(peers, 3)
    tell(peers[:1], member.save)
    saved = peers[0].expect("saved")["state"]
    other = Peers([run.peer(member.serve)])
    tell(other, partial(watching.make_or_fail, 2, **(BEHIND | {"sync_every": 5})))
    asked(other[0])
    tell(peers, partial(member.go, 3))
    failed = other[0].expect("failed", 60)
    assert failed["kind"] == "InvalidArgument"
    assert "sync_every=5" in failed["text"] and "sync_every=4" in failed["text"]
    went(peers)
    # Another run is behind that checkpoint.
    behind = Peers([run.peer(partial(member.serve, peer_group=1))])
    make(behind, seed=0, **options)
    made(behind)
    go(behind, 1)
    ahead = Peers([run.peer(partial(member.serve, peer_group=1))])
    tell(ahead, partial(watching.make_ahead, 1, saved, **options))
    ahead[0].expect("made")  # without having joined
    asked(ahead[0])
    go(behind, 1)
    assert ahead[0].expect("failed", 60)["kind"] == "RevisionMismatch"
    go(behind, 1)


@pytest.mark.parametrize("holders", [1, 3])
@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_the_holders_of_a_member_send_no_more_than_its_rate(
    monkeypatch: pytest.MonkeyPatch, holders: int, seconds: float
) -> None:
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(snapshots, "time", clock)
    progress = snapshots.Progress(lambda: False, 8)  # a MB a second
    sent, next_at = 0, [0.0] * holders
    while now < 60:
        holder = next_at.index(min(next_at))
        now = max(now, next_at[holder])
        length = progress.room(1 << 20)
        assert 0 < length <= 250_000
        now += seconds  # what it takes to send the piece
        sent += length
        next_at[holder] = now + progress.rest(length, seconds)
    assert 0.9 * 60e6 < sent <= 61e6 + holders * 250_000


def test_without_a_bound_a_holder_rests_for_a_share_of_the_time() -> None:
    reduces = False
    progress = snapshots.Progress(lambda: reduces)
    assert progress.room(1 << 20) == 1 << 20
    assert progress.rest(1 << 20, 0.08) == pytest.approx(0.02)
    reduces = True
    assert progress.rest(1 << 20, 0.08) == pytest.approx(0.24)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"join_megabits": 5}, "join_megabits needs background_join"),
        ({"join_megabits": 0, **BEHIND}, "join_megabits is a positive number of Mbit/s, not 0"),
        ({"join_megabits": True, **BEHIND}, "join_megabits is a positive number"),
    ],
)
def test_a_bound_that_makes_no_sense_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        DiLoCo({"w": np.zeros(3, np.float32)}, sync_every=2, join=False, **options)


def test_a_snapshot_is_what_it_was_when_it_was_made() -> None:
    def fresh() -> dict[str, Any]:
        return {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "n": 7, "none": {}, "s": "x"}

    state = fresh() | {"more": [np.array([1, 2], np.int64)], "empty": np.empty(0)}
    snapshot = Snapshot(state, "diloco")
    size = snapshot.packed().size - snapshot.manifest.size - 8
    state["a"][...] = 0
    data = snapshot.read(0, size)
    for cut in range(size + 1):
        parts = [snapshot.read(0, cut), snapshot.read(cut, size - cut)]
        assert np.concatenate(parts).tobytes() == data.tobytes()
    other = fresh()
    own = other["a"]
    own[...] = 1
    other["n"] = 0
    found = restore(other, listed(snapshot.manifest), data, "diloco")
    assert found["a"] is own
    assert own.tolist() == fresh()["a"].tolist()
    assert (found["n"], found["s"], found["more"][0].tolist()) == (7, "x", [1, 2])
    padded = np.concatenate([snapshot.packed(), np.zeros(9, np.uint8)])
    assert unpack(fresh(), padded, "diloco")["n"] == 7
    with pytest.raises(InvalidArgument, match="here"):
        restore({"a": np.zeros(3, np.float32)}, snapshot.listed, data, "diloco")
