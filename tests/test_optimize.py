"""The network between members is measured, and the plan made by it."""

from __future__ import annotations

import signal
from functools import partial

import pytest
from programs import optimize
from workers import Run, Worker, eventually, wait_for_line

import pccl
from pccl import _testing

# ---- what one member reports

COUNTED = 0.8  # seconds


def test_rates_and_round_trips_are_added_up_and_passed_on() -> None:
    ways = [
        (int(8e6 * COUNTED), 20_000, 5_000, 15_000, 3),
        (int(4e6 * COUNTED), 40_000, 6_000, 15_000, 3),
    ]
    links, up, down = _testing.probed_row(ways)
    assert links == [(0, False, 0, 20_000), (1, False, 0, 40_000)]
    assert (up, down) == (11_000, 12_000)


def test_a_way_that_carries_much_less_than_its_part_has_a_rate_of_its_own() -> None:
    even = (0, 20_000, 10_000, 30_000, 3)
    links, _, _ = _testing.probed_row([even, even, (0, 20_000, 1_000, 21_000, 3)])
    assert [rate for _, _, rate, _ in links] == [0, 0, 1_000]


@pytest.mark.parametrize(
    ("rtt", "down"),
    [(20_000, 3_000), (200_000, 21_000)],
    ids=["its peer receives as little from all", "connections of long round trips get less"],
)
def test_a_way_whose_rate_has_another_reason_has_none_of_its_own(rtt: int, down: int) -> None:
    even = (0, 20_000, 10_000, 30_000, 3)
    links, _, _ = _testing.probed_row([even, even, (0, rtt, 1_000, down, 3)])
    assert [rate for _, _, rate, _ in links] == [0, 0, 0]


def test_who_does_not_answer_is_left_out_and_absurd_answers_harm_nobody() -> None:
    most = 2**32 - 1
    links, up, down = _testing.probed_row([(0, 0, -1, 0, 0), (2**60, 1, most, 2**64 - 1, 0)])
    assert links == [(1, False, 0, 1)]
    assert (up, down) == (most, most)
    assert _testing.probed_row([]) == ([], 0, 0)


# ---- real peers


@pytest.mark.env(PCCL_SHM="0")
def test_all_ways_are_measured_at_once(run: Run) -> None:
    peers = run.peers(3, optimize.measure)
    for answer in [peer.expect("done", 60) for peer in peers]:
        assert answer["nothing_before"]
        assert answer["peers"]
        assert 2 < answer["took"] < 15  # three seconds, and two rounds
        assert None not in answer["rtt"] + answer["up"] + answer["down"], answer
        assert all(0 < rtt < 1 for rtt in answer["rtt"])
        assert all(rate > 1e6 for rate in answer["up"] + answer["down"])
        assert answer["unreachable"] == 0
        assert answer["ring"] == [0, 1, 2]
        assert all(abs(total - 1) < 1e-3 for total in answer["shares"])
        assert answer["last"] is None


@pytest.mark.shared_memory
def test_peers_that_share_memory_have_nothing_to_measure(run: Run) -> None:
    for answer in [peer.expect("done", 60) for peer in run.peers(2, optimize.measure_in_memory)]:
        assert not answer["known"]
        assert answer["took"] < 2
        assert answer["hosts"] == 1


@pytest.mark.shared_memory  # a second epoch says who shares it
def test_pairs_that_the_plan_does_without_are_not_taken_for_broken(run: Run) -> None:
    # Two hosts of two: between them go only the links of the same place.
    peers = [
        run.peer(optimize.measure_two_hosts, PCCL_MIN_PEERS="4", PCCL_HOST_ID=host)
        for host in "aabb"
    ]
    for answer in [peer.expect("done", 60) for peer in peers]:
        assert len(set(answer["hosts"])) == 2
        assert answer["unreachable"] == 0
        assert answer["known"] == 8


def test_alone_there_is_nothing_to_measure(run: Run) -> None:
    answer = run.peer(optimize.measure_alone).expect("done")
    assert answer["peers"] == 1
    assert answer["up"] == [None]


@pytest.mark.env(PCCL_SHM="0")
def test_a_peer_killed_while_it_measures_delays_nobody(run: Run) -> None:
    peers = run.peers(3, optimize.measure_with_one_that_dies)
    for peer in peers:
        peer.expect("in")
    victim = peers.pop()
    victim.signal(signal.SIGKILL)
    for peer in peers:
        answer = peer.expect("done", 30)
        assert answer["size"] == answer["known"] == 2


def wait_until_it_sends(worker: Worker) -> None:
    """Returns when it has worked for 50 ms more: to send all that its links take does that."""
    begun = worker.cpu_seconds()
    eventually(lambda: worker.cpu_seconds() >= begun + 0.05, seconds=60, said=worker.stderr)


@pytest.mark.parametrize("when", ["timeout", "interrupt"])
@pytest.mark.env(PCCL_SHM="0")
def test_it_can_be_given_up(run: Run, when: str) -> None:
    peers = run.peers(2, partial(optimize.measure_or_give_up, 1.0 if when == "timeout" else None))
    for peer in peers:
        peer.expect("in")
    if when == "interrupt":
        # At any moment of it, all of them are told.
        wait_until_it_sends(peers[0])
        peers[0].signal(signal.SIGINT)
    answers = [peer.expect("done", 30)["how"] for peer in peers]
    if when == "timeout":
        assert set(answers) == {"Timeout"}
    else:
        assert answers == ["interrupted", "PeerLost"]
    for peer in peers:
        after = peer.expect("after", 30)
        assert after["right"] and after["size"] == 2


@pytest.mark.parametrize("what", ["kill", "interrupt"])
@pytest.mark.env(PCCL_SHM="0", PCCL_MEASURE_AFTER="0.001", PCCL_LOG_LEVEL="INFO")
def test_members_that_measure_by_themselves_survive_what_happens_to_one(
    run: Run, what: str
) -> None:
    peers = run.peers(3, optimize.admit_twice)
    wait_for_line(run.master, "so the links are measured")  # all are in admit
    if what == "kill":
        peers.pop().signal(signal.SIGKILL)
        first = ["done", "done"]
    else:
        peers[0].signal(signal.SIGINT)
        first = ["interrupted", "PeerLost", "PeerLost"]
    for hows in (first, ["done"] * len(peers)):
        answers = [peer.expect("admitted", 30) for peer in peers]
        assert [answer["how"] for answer in answers] == hows
        assert {answer["size"] for answer in answers} == {len(peers)}


def test_measuring_by_itself_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_MEASURE_AFTER", "0")
    with pccl.MasterNode("127.0.0.1:0"):
        pass
    monkeypatch.setenv("PCCL_MEASURE_AFTER", "-1")
    with pytest.raises(pccl.InvalidArgument, match="PCCL_MEASURE_AFTER"):
        pccl.MasterNode("127.0.0.1:0").run()
