"""What `pccl.sync` moves among members and newcomers, and whose state counts."""

from __future__ import annotations

import signal
import sys
from functools import partial

import pytest
from programs import links, sync_faults, sync_shell
from syncs import (
    MIB,
    Peers,
    add,
    agreed,
    do,
    failed,
    flip,
    full,
    hold,
    meanwhile,
    members,
    moved,
    newcomer,
    noise,
    ones,
    put,
    shared,
    sync,
    synced,
    tell,
    whether_equal,
    zeros,
)
from workers import FAST, Run


def test_founders_end_with_the_state_of_the_longest_standing_one(run: Run) -> None:
    peers = members(run, 3)
    answers = synced(peers, sync_faults.found_with_own_numbers)
    assert moved(answers) == [0, 8014, 8014]
    assert [answer["revision"] for answer in answers] == [0, 0, 0]
    assert answers[0]["received"] == []
    assert answers[1]["received"] == ["['layers'][0]", "['n']", "['w']"]
    assert answers[0]["diverged"] == {}
    held = do(peers, sync_faults.say_what_was_found)
    first = int(peers.ids[0][:6], 16)
    assert held[0] == {"w": first, "n": first, "same": True, "all": True}
    assert held[1] == held[2] == {"w": first, "n": first, "same": True, "all": False}
    again = synced(peers, sync())
    assert moved(again) == [0, 0, 0]
    assert again[0]["revision"] == 1
    assert all(answer["same"] for answer in do(peers, sync_shell.say_whether_given))


@pytest.mark.shared_memory
@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's counts")
def test_inside_a_host_a_state_moves_through_memory(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    size = 256 * MIB
    synced(peers, sync(ones(size // 8)))
    tell(late, sync(zeros(size // 8)))
    tell(peers, sync(until=3))
    assert moved(agreed(peers + late)) == [0, 0, size]
    # Some pieces go over TCP, until there are pipes.
    assert do(late, links.say_received)[0]["bytes"] < size // 4


@pytest.mark.shared_memory
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's counts")
def test_inside_a_host_shared_arrays_are_read_where_they_are(run: Run, overwrite: bool) -> None:
    peers, late = members(run, 2), newcomer(run)
    count = 1 << 24
    held = synced(peers, sync({"a": shared(count, 1), "b": ones(1000)}))[0]["digest"]
    tell(late, sync({"a": zeros(count), "b": zeros(1000)}, overwrite=overwrite))
    tell(peers, sync(until=3))
    answers = agreed(peers + late)
    assert moved(answers) == [0, 0, 8 * count + 8000]
    assert sum(answer["tx"] for answer in answers) == 8 * count + 8000
    assert answers[2]["digest"] == held
    assert do(late, links.say_received)[0]["bytes"] < MIB
    assert do(late, sync_shell.wait_until_unmapped) == [{"mapped": 0}]
    # The newcomer has its own copy.
    tell(late, put("a", 0, value=5))
    again = synced(peers + late, sync())
    assert (moved(again), again[0]["digest"]) == ([0, 0, MIB], held)


@pytest.mark.shared_memory
def test_shared_arrays_that_a_newcomer_cannot_map_are_sent(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    count = 1 << 25
    held = synced(peers, sync(shared(count, 1)))[0]["digest"]
    tell(late, partial(sync_shell.hold, zeros(count)))
    tell(late, partial(sync_shell.limit_memory, 100 << 20), sync(overwrite=True))
    tell(peers, sync(until=3))
    answers = agreed(peers + late)
    assert (moved(answers), answers[2]["digest"]) == ([0, 0, 8 * count], held)
    assert late[0].stderr().count("cannot map memory of") == 1


@pytest.mark.shared_memory
def test_arrays_that_a_sync_has_shared_are_reduced_where_they_are_as_well(run: Run) -> None:
    peers, late = members(run, 2), newcomer(run)
    synced(peers, sync({"a": shared(1 << 20, 1), "step": 0}))
    tell(late, sync({"a": shared(1 << 20, 0), "step": 0}))
    tell(peers, sync(until=3))
    assert moved(agreed(peers + late)) == [0, 0, 8 << 20]
    for value in (3.0, 9.0):
        assert do(peers + late, partial(sync_shell.reduce_in_place, "a")) == [{"is": value}] * 3
        assert moved(synced(peers + late, sync())) == [0, 0, 0]


def test_a_newcomer_receives_everything_and_members_in_step_move_nothing(run: Run) -> None:
    peers = members(run, 2)
    synced(peers, sync({"w": noise(1, (3 << 20) + 1), "step": 7}))
    late = newcomer(run)
    tell(late, sync({"w": noise(2, (3 << 20) + 1), "step": 0}))
    tell(peers, sync(until=3))
    answers = agreed(peers + late)
    assert moved(answers) == [0, 0, 3 * MIB + 2]
    assert answers[2]["received"] == ["['step']", "['w']"]
    assert answers[2]["peers"] == peers.ids + late.ids
    assert answers[0]["diverged"] == {}
    whole = {"w": noise(1, (3 << 20) + 1), "step": 7}
    assert do(late, whether_equal(whole)) == [{"same": True}]
    assert moved(synced(peers + late, add("step"), sync())) == [0, 0, 0]


def test_several_newcomers_at_once_receive_from_several_holders(run: Run) -> None:
    peers = members(run, 2)
    synced(peers, sync(noise(1, (20 << 20) + 1)))
    late = newcomer(run, 3)
    tell(late, sync(zeros((20 << 20) + 1, "uint8"), until=5))
    tell(peers, sync(until=5))
    answers = agreed(peers + late)
    assert moved(answers) == [0, 0] + [20 * MIB + 1] * 3
    assert all(answer["tx"] > 0 for answer in answers[:2])


@pytest.mark.parametrize("members_call", ["admit", "sync"])
def test_newcomers_enter_by_admit_or_by_sync_wherever_the_members_are(
    run: Run, members_call: str
) -> None:
    peers = members(run, 2)
    synced(peers, sync(noise(1, 1000)))
    everybody = list(peers)
    for admits in (False, True):
        late = newcomer(run)
        if admits:
            tell(late, sync_shell.admit)
        tell(late, sync(noise(2, 1000)))
        if members_call == "admit":
            tell(everybody, sync_shell.admit_until_some)
        tell(everybody, sync(until=late.ids[0]))
        everybody += late
        assert moved(agreed(everybody)) == [0] * (len(everybody) - 1) + [1000]
        # From here on their calls meet.
        assert do(everybody, sync_shell.reduce_and_admit) == [
            {"total": len(everybody), "let_in": False}
        ] * len(everybody)
        assert moved(synced(everybody, sync())) == [0] * len(everybody)


def test_a_training_loop_of_sync_and_reductions_takes_newcomers_in(run: Run) -> None:
    peers = members(run, 2)
    tell(peers, partial(sync_faults.train_until_four, fill=0, step=0))
    late = newcomer(run, 2)
    tell(late, partial(sync_faults.train_until_four, fill=1, step=-9))
    everybody = peers + late
    assert moved(agreed(everybody)) == [0] * 4
    after = [peer.expect("after") for peer in everybody]
    assert all(answer["ok"] for answer in after)
    assert after[0]["step"] > 1


def test_a_newcomer_never_overwrites_a_member(run: Run) -> None:
    peers = members(run, 1)
    first = synced(peers, sync({"w": noise(1, 1000)}))
    late = newcomer(run, 1)
    tell(late, sync({"w": noise(2, 1000)}))
    tell(peers, sync(until=2))
    answers = agreed(peers + late)
    assert answers[0]["digest"] == first[0]["digest"]
    assert moved(answers) == [0, 1000]


def test_many_newcomers_that_agree_do_not_outvote_a_member(run: Run) -> None:
    peers = members(run, 1)
    first = synced(peers, sync({"w": noise(1, 1000)}))
    late = newcomer(run, 3)
    tell(late, sync({"w": noise(2, 1000)}, until=4))
    tell(peers, sync(until=4))
    answers = agreed(peers + late)
    assert answers[0]["digest"] == first[0]["digest"]
    assert moved(answers) == [0, 1000, 1000, 1000]
    assert answers[0]["diverged"] == {}


def test_a_member_that_worked_before_the_first_sync_is_not_outvoted_by_newcomers(run: Run) -> None:
    peers = members(run, 1)
    tell(peers, partial(sync_shell.reduce, 3))
    do(peers, sync_shell.say_digest)  # the operations are over
    late = newcomer(run, 2)
    tell(late, sync({"w": zeros(1000, "int64")}, until=3))
    tell(peers, partial(sync_shell.sleep, 0.5), sync({"w": full(1000, 7), "m": 1}, until=3))
    assert moved(agreed(peers + late)) == [0, 8001, 8001]
    assert do(peers + late, partial(sync_shell.say_value, "w", 0)) == [{"value": 7}] * 3


def test_founders_that_worked_together_before_their_first_sync_are_equal(run: Run) -> None:
    peers = members(run, 3)
    tell(peers, sync_shell.reduce)
    for rank, peer in enumerate(peers):
        tell([peer], sync({"w": full(100, min(rank, 1))}))
    assert moved(agreed(peers)) == [800, 0, 0]


def test_the_majority_wins_among_members_and_all_hear_who_had_diverged(run: Run) -> None:
    peers = members(run, 3)
    first = synced(peers, sync({"b": noise(1, 10), "w": noise(2, 5000)}))
    tell(peers[:1], flip("w", 5))
    answers = synced(peers, sync())
    assert answers[0]["digest"] == first[0]["digest"]
    assert moved(answers) == [5000, 0, 0]
    assert answers[0]["diverged"] == {peers.ids[0]: ["['w']"]}
    # Three contents: the longest-standing member's counts.
    tell(peers[1:2], flip("w", 5))
    tell(peers[2:], flip("b", 0), flip("w", 0))
    answers = synced(peers, sync())
    assert answers[0]["digest"] == first[0]["digest"]
    assert moved(answers) == [0, 5000, 5010]
    assert answers[0]["diverged"] == {peers.ids[1]: ["['w']"], peers.ids[2]: ["['b']", "['w']"]}
    assert synced(peers, sync())[0]["diverged"] == {}


def test_only_chunks_that_differ_move(run: Run) -> None:
    peers = members(run, 3)
    tell(peers, hold({"small": noise(1, 100), "w": noise(2, (5 << 20) + 3)}))
    tell(peers[1:2], flip("w", (2 << 20) + 5))
    tell(peers[2:], flip("w", -1), flip("small", 0))
    answers = synced(peers, sync())
    assert moved(answers) == [0, MIB, 103]
    assert answers[2]["received"] == ["['small']", "['w']"]
    # Also where the array itself cannot be written.
    tell(peers[1:2], partial(sync_faults.change_half_and_freeze, ["w"]))
    assert moved(synced(peers, sync())) == [0, 2 * MIB, 0]
    assert do(peers[1:2], partial(sync_faults.say_whether_replaced, ["w"])) == [
        {"kept": True, "new": True}
    ]


def test_a_run_resumes_at_the_highest_revision_offered(run: Run) -> None:
    peers = members(run, 3)
    for rank, (peer, revision) in enumerate(zip(peers, (5, 9, None), strict=True)):
        tell([peer], sync(noise(rank, 1000), revision=revision))
    answers = agreed(peers)
    assert moved(answers) == [1000, 0, 1000]
    assert answers[0]["revision"] == 9
    assert answers[0]["diverged"] == {}
    assert synced(peers, sync())[0]["revision"] == 10
    # A checkpoint that the run has left behind is no reason to be refused.
    late = newcomer(run)
    tell(late, sync(noise(7, 1000), revision=10))
    tell(peers, sync(until=4))
    assert moved(agreed(peers + late)) == [0, 0, 0, 1000]


def test_a_newcomer_ahead_of_the_run_is_refused_and_the_members_go_on(run: Run) -> None:
    peers = members(run, 2)
    synced(peers, sync(noise(1, 1000)))
    late = newcomer(run)
    tell(late, sync(noise(2, 1000), revision=1_000_000))
    told = failed(meanwhile(late[0], peers), "RevisionMismatch")
    assert told["advice"] == "fix"
    assert "1000000" in told["text"]
    assert do(late, whether_equal(noise(2, 1000))) == [{"same": True}]
    assert synced(peers, sync())[0]["size"] == 2
    # In the same process, as a newcomer that asks for nothing.
    tell(late, sync_shell.rejoin)
    late = Peers(late)
    tell(late, sync())
    tell(peers, sync(until=3))
    assert moved(agreed(peers + late)) == [0, 0, 1000]


def test_sync_needs_a_run(run: Run) -> None:
    answer = run.peer(sync_faults.sync_without_a_run).expect("failed")
    assert answer["result"] == "NOT_INITIALIZED"


def test_alone_everything_is_in_step(run: Run) -> None:
    peers = members(run, 1)
    tell(peers, hold({"w": ones(3)}))
    for revision in range(3):
        (answer,) = synced(peers, sync())
        assert (answer["revision"], answer["size"]) == (revision, 1)
        assert (answer["tx"], answer["rx"], answer["received"]) == (0, 0, [])
        assert do(peers, sync_shell.say_whether_given) == [{"same": True}]


# The life of a state.


@pytest.mark.env(**FAST)
def test_a_group_that_empties_starts_anew(run: Run) -> None:
    digests = set()
    for leave in (sync_shell.leave, sync_shell.die, None):
        peers = members(run, 2)
        for peer, name in zip(peers, peers.ids, strict=True):
            tell([peer], sync(noise(int(name[:6], 16), 1000)))
        answers = agreed(peers)
        assert sorted(moved(answers)) == [0, 1000]
        assert answers[0]["revision"] == 0
        digests.add(answers[0]["digest"])
        assert synced(peers, sync())[0]["revision"] == 1
        if leave is not None:
            tell(peers, leave)
    assert len(digests) == 3


def test_a_state_lives_while_one_holder_lives(run: Run) -> None:
    peers = members(run, 3)
    for rank, peer in enumerate(peers):
        tell([peer], sync(noise(rank, 1000)))
    first = agreed(peers)
    for victim in peers[:2]:
        victim.signal(signal.SIGKILL)
    late = newcomer(run)
    tell(late, sync(noise(7, 1000)))
    tell(peers[2:], sync(until=2))
    answers = agreed([*peers[2:], *late])
    assert moved(answers) == [0, 1000]
    assert answers[0]["digest"] == first[0]["digest"]
    # The last of the founders leaves, too.
    tell(peers[2:], sync_shell.leave)
    later = newcomer(run)
    tell(later, sync(noise(8, 1000)))
    tell(late, sync_shell.meet_until_alone, sync(until=2))
    answers = agreed(late + later)
    assert moved(answers) == [0, 1000]
    assert answers[0]["digest"] == first[0]["digest"]
    assert answers[0]["revision"] > first[0]["revision"]
