"""Followers receive what members publish, and are no members."""

from __future__ import annotations

import gc
import json
import random
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
from members import Members, each, in_threads
from programs import publishers
from workers import FAST, Run, Worker, eventually, masters, wait_for_line

import pccl
from pccl import _core
from pccl.errors import (
    AuthenticationFailed,
    InvalidArgument,
    InvalidUsage,
    NotInitialized,
    Refused,
    StateUnavailable,
    Timeout,
    Unreachable,
)
from pccl.following import follower as following
from pccl.following import offer as offers
from pccl.following import publisher as publishing
from pccl.following.doors import door_of, group_behind
from pccl.following.offer import Assembly, Offer, Published
from pccl.following.pair import Pair
from pccl.following.publisher import Publisher
from pccl.following.snapshot import Snapshot
from pccl.frameworks import Array

SECRET = "6b1f0c7de8a94f35b2c1907a5e4d3f28"
SECONDS = 60.0
TIMEOUT = float(FAST["PCCL_HEARTBEAT_TIMEOUT"])


def state_of(revision: int, count: int = 1000) -> dict[str, Any]:
    return {"w": np.full(count, revision, np.float32), "at": revision}


def is_whole(found: pccl.Revision) -> bool:
    state = found.state()
    return bool((state["w"] == found.revision).all()) and state["at"] == found.revision


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "PIECE_BYTES", 64)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers give up after a moment."""
    monkeypatch.setattr(following, "_PATIENCE_SECONDS", 1.0)


def named_members(members: Members, count: int) -> list[pccl.Communicator]:
    """Members of which each has a name of its own at its doors, as processes have."""
    comms = members(count)
    for number, comm in enumerate(comms):
        comm._name = f"publisher-{number}"  # of its doors
    return comms


def wait_in_vain(worker: Worker, words: str, seconds: float) -> bool:
    """Whether the worker says that within this time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and words not in worker.stderr():
        threading.Event().wait(0.1)
    return words in worker.stderr()


def groups_of(comm: pccl.Communicator) -> list[int]:
    """The numbers of the run's groups, doors included. Not more often than the master answers."""
    threading.Event().wait(0.2)
    return [group["group"] for group in _core.ask_status(comm._address)["groups"]]


def meet(comms: list[pccl.Communicator]) -> None:
    """A round of all: members learn how large the run is."""
    found = each(comms, lambda rank, comm: comm.are_peers_pending())
    assert found == [False] * len(comms)


def publish_all(comms: list[pccl.Communicator], revision: int, **options: Any) -> None:
    for comm in comms:
        pccl.publish(state_of(revision, **options), revision, comm=comm)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_follower_receives_each_revision(members: Members, secret: str | None) -> None:
    comms = members(2, secret=secret)
    with pccl.follow(comms[0]._address, secret=secret) as follower:
        assert follower.latest is None
        for revision in (0, 1, 5):
            publish_all(comms, revision)
            found = follower.next(SECONDS)
            assert (found.revision, is_whole(found)) == (revision, True)
            assert follower.latest is found
        with pytest.raises(Timeout, match="no new revision within 0.1 s"):
            follower.next(0.1)
    with pytest.raises(InvalidUsage, match="closed"):
        follower.next()


def test_it_may_come_later_and_is_no_member(members: Members) -> None:
    comms = members(2)
    publish_all(comms, 3)
    with pccl.follow(comms[0]._address) as follower:
        assert is_whole(follower.next(SECONDS))
        meet(comms)
        for comm in comms:
            assert comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) == 2
            assert comm.get_attribute(pccl.Attribute.NUM_DISTINCT_PEER_GROUPS) == 1
            assert comm.stats().epoch == comms[0].stats().epoch


def test_only_what_has_changed_is_received(members: Members, small_pieces: None) -> None:
    comms = members(1)
    first = {"a": np.arange(640, dtype=np.uint8), "b": np.zeros(640, np.uint8)}
    with pccl.follow(comms[0]._address) as follower:
        pccl.publish(first, 1, comm=comms[0])
        found = follower.next(SECONDS)
        assert (found.size, found.received_bytes) == (1280, 1280)
        first["b"][70] = 1
        pccl.publish(first, 2, comm=comms[0])
        found = follower.next(SECONDS)
        assert (found.size, found.received_bytes) == (1280, 64)
        assert all((found.state()[name] == first[name]).all() for name in first)
        pccl.publish(first, 3, comm=comms[0])
        found = follower.next(SECONDS)
        assert (found.revision, found.received_bytes) == (3, 0)


def test_what_is_published_is_a_copy(members: Members) -> None:
    (comm,) = members(1)
    state = state_of(4)
    pccl.publish(state, 4, comm=comm)
    state["w"][:] = 0
    with pccl.follow(comm._address) as follower:
        assert is_whole(follower.next(SECONDS))


def test_it_is_loaded_into_a_state_of_ones_own(members: Members) -> None:
    (comm,) = members(1)
    pccl.publish({"w": np.arange(3.0), "list": [1, 2.5, "x", None]}, 0, comm=comm)
    with pccl.follow(comm._address) as follower:
        found = follower.next(SECONDS)
    own = {"w": np.zeros(3), "list": [0, 0.0, "", None], "more": 1}
    w = own["w"]
    loaded = found.load(own)
    assert loaded["w"] is w
    assert w.tolist() == [0.0, 1.0, 2.0]  # type: ignore[attr-defined]
    assert (loaded["list"], loaded["more"]) == ([1, 2.5, "x", None], 1)
    with pytest.raises(InvalidArgument, match=r"'w'.*float64 there, and float32 here"):
        found.load({"w": np.zeros(3, np.float32)})


def test_a_slow_follower_gets_the_latest(members: Members) -> None:
    (comm,) = members(1)
    with pccl.follow(comm._address) as follower:
        for revision in range(20):
            pccl.publish(state_of(revision), revision, comm=comm)
        eventually(lambda: follower.latest is not None and follower.latest.revision == 19)
        assert follower.next(0).revision == 19


def test_a_run_that_goes_back_is_followed(
    members: Members, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(following, "_BACK_SECONDS", 0.5)
    (comm,) = members(1)
    with pccl.follow(comm._address) as follower:
        for revision in (7, 2):
            publish_all([comm], revision)
            assert follower.next(SECONDS).revision == revision
    assert "gone back from revision 7 to 2" in caplog.text


def test_two_members_at_one_door_take_others(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter([7, 7, *range(100, 200)])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(numbers))
    comms = members(2)
    publish_all(comms, 1)  # their threads meet at door 7

    def others() -> bool:
        doors = groups_of(comms[0])[1:]
        return [door - _core.FIRST_DOOR for door in doors] == [100, 101]

    eventually(others)
    with pccl.follow(comms[0]._address) as follower:
        assert is_whole(follower.next(SECONDS))


def test_several_followers_are_served(members: Members) -> None:
    (comm,) = members(1)
    publish_all([comm], 1)
    with ExitStack() as stack:
        names = [f"reader-{number}" for number in range(5)]
        all_of_them = [stack.enter_context(pccl.follow(comm._address, name=name)) for name in names]
        assert all(is_whole(follower.next(SECONDS)) for follower in all_of_them)
        publish_all([comm], 2)
        assert all(follower.next(SECONDS).revision == 2 for follower in all_of_them)


def test_a_group_of_two_refuses_a_third_one_at_once(members: Members) -> None:
    (comm,) = members(1)
    door = door_of(0)
    ends = [Pair(comm._companion(door), "test") for _ in range(3)]
    try:
        assert in_threads([lambda end=end: end.join(SECONDS) for end in ends[:2]]) == [None, None]
        with pytest.raises(Refused, match="two others have met"):
            ends[2].join(SECONDS)
    finally:
        for end in ends:
            end.close()


def test_followers_that_choose_one_door_take_others(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one that comes first gets it. The others do not wait there until they give up.
    monkeypatch.setattr(following, "_DOOR_SECONDS", SECONDS)
    (comm,) = members(1)
    publish_all([comm], 1)
    eventually(lambda: len(groups_of(comm)) == 2)
    together = threading.Barrier(3)
    came: set[int] = set()

    def ask(*arguments: Any, real: Any = following.ask_any, **options: Any) -> Any:
        found = real(*arguments, **options)
        if threading.get_ident() not in came:
            came.add(threading.get_ident())
            together.wait(SECONDS)
        return found

    monkeypatch.setattr(following, "ask_any", ask)
    with ExitStack() as stack:
        names = [f"reader-{number}" for number in range(3)]
        all_of_them = [stack.enter_context(pccl.follow(comm._address, name=name)) for name in names]
        assert all(is_whole(follower.next(SECONDS)) for follower in all_of_them)


def test_ended_followers_leave_nothing_at_the_master(members: Members) -> None:
    comms = members(2)
    publish_all(comms, 1)

    for _ in range(3):
        with pccl.follow(comms[0]._address) as follower:
            follower.next(SECONDS)
    eventually(lambda: len(groups_of(comms[0])) == 3)  # the members', and their doors


@pytest.fixture
def no_cycles() -> Iterator[None]:
    """Only what no cycle holds is freed."""
    gc.disable()
    yield
    gc.enable()


def test_a_follower_that_is_closed_keeps_no_connection(members: Members, no_cycles: None) -> None:
    (comm,) = members(1)
    publish_all([comm], 1)
    with pccl.follow(comm._address) as follower:
        follower.next(SECONDS)
        connections = [weakref.ref(line._pair._comm) for line in follower._lines]
    assert len(connections) == 1
    eventually(lambda: connections[0]() is None)


def test_a_follower_that_failed_is_freed(members: Members, no_cycles: None) -> None:
    (comm,) = members(1, secret=SECRET)
    follower = pccl.follow(comm._address, secret=SECRET[::-1])
    with pytest.raises(AuthenticationFailed):
        follower.next(SECONDS)
    follower.close()
    there = weakref.ref(follower)
    del follower
    eventually(lambda: there() is None)


def test_members_are_found_by_their_names_though_doors_have_them(members: Members) -> None:
    (comm,) = members(1)
    other = pccl.Communicator(comm._address, 1, name="lonely")
    with other:
        pccl.publish({"x": 1}, 1, comm=other)
        eventually(lambda: len(groups_of(comm)) == 3)
        assert "asked rank 0 (lonely) of group 1 to" in _core.command(
            comm._address, "drain", "lonely"
        )
        with pccl.follow(comm._address, group=1, name="reader") as follower:
            follower.next(SECONDS)
            assert "(reader) of group" in _core.command(comm._address, "kick", "reader")


@pytest.mark.parametrize("first", [_core.FIRST_PAIR, _core.FIRST_DOOR])
def test_a_pair_of_members_counts_nowhere(members: Members, first: int) -> None:
    """A newcomer of DiLoCo and a holder, too, which are in the run by the same names."""
    from pccl.tools import status

    (comm,) = members(1)
    with pccl.Communicator(comm._address, 1, name="lonely") as other:
        ends = [Pair(one._companion(first + 77), "test") for one in (comm, other)]
        assert in_threads([end.join for end in ends]) == [None, None]
        assert groups_of(comm) == [0, 1, first + 77]
        found = status.read(_core.ask_status(comm._address))
        assert [one.group for one in found.groups] == [0, 1]
        meet([comm])
        assert comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) == 2
        told = _core.command(comm._address, "drain", "lonely")
        assert "asked rank 0 (lonely) of group 1 to" in told
        for end in ends:
            end.close()
        eventually(lambda: groups_of(comm) == [0, 1])


def test_settings_of_members_do_not_hurt_a_follower(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    comms = members(2, secret=SECRET)
    publish_all(comms, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PCCL_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("PCCL_SECRET", "short")
        monkeypatch.setenv("PCCL_TIMEOUT", "0.01")
        with pccl.follow(comms[0]._address, secret=SECRET) as follower:
            assert is_whole(follower.next(SECONDS))
            publish_all(comms, 2)
            assert next(iter(follower)).revision == 2
    monkeypatch.setenv("PCCL_ADVERTISE", "no:such:address:")
    with pytest.raises(InvalidArgument):
        pccl.follow(comms[0]._address, secret=SECRET, group=-1)


def test_a_publisher_that_hangs_holds_up_nobody(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "_SLOW_SECONDS", 0.1)
    monkeypatch.setattr(following, "_ANSWER_SECONDS", 2.0)
    free = threading.Event()
    hung: list[Published] = []
    piece = Published.piece

    def hang(self: Published, index: int) -> Array:
        if self._offer is not None and (not hung or hung[0] is self):
            hung.append(self)
            free.wait()
        return piece(self, index)

    master, *_ = comms = named_members(members, 2)
    monkeypatch.setattr(Published, "piece", hang)
    try:
        publish_all(comms, 1)
        with pccl.follow(master._address) as follower:
            assert is_whole(follower.next(SECONDS))
            publish_all(comms, 2)
            assert is_whole(follower.next(SECONDS))
    finally:
        free.set()
    assert hung


def test_a_full_publisher_says_so(
    members: Members, monkeypatch: pytest.MonkeyPatch, patience: None
) -> None:
    monkeypatch.setattr(publishing, "_MOST_FOLLOWERS", 1)
    (comm,) = members(1)
    publish_all([comm], 1)
    with pccl.follow(comm._address) as first:
        first.next(SECONDS)
        with pccl.follow(comm._address, name="late") as late:
            with pytest.raises(StateUnavailable, match="all places .* are taken"):
                late.next(SECONDS)
            first.close()
            monkeypatch.setattr(following, "_PATIENCE_SECONDS", SECONDS)
            assert is_whole(late.next(SECONDS))


@pytest.mark.parametrize("state", [[1, np.ones(3)], (np.ones(2), "x"), {}, {"a": {}}, {3: 4}])
def test_a_state_is_made_anew_as_it_was(members: Members, state: Any) -> None:
    (comm,) = members(1)
    pccl.publish(state, 1, comm=comm)
    with pccl.follow(comm._address) as follower:
        found = follower.next(SECONDS).state()
    assert type(found) is type(state)
    assert len(found) == (0 if state == {"a": {}} else len(state))
    if type(state) is not dict:
        assert all(np.array_equal(a, b) for a, b in zip(found, state, strict=True))


def test_a_model_loads_it(members: Members) -> None:
    torch = pytest.importorskip("torch")
    (comm,) = members(1)
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    pccl.publish({name: p.detach().numpy() for name, p in model.named_parameters()}, 1, comm=comm)
    with pccl.follow(comm._address) as follower:
        assert follower.next(SECONDS).load(other) is other
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_publisher_comes_back(members: Members) -> None:
    (comm,) = members(1)
    again = pccl.Communicator(comm._address, 7, name="again")
    with pccl.follow(comm._address, group=7) as follower:
        with again:
            publish_all([again], 1)
            assert follower.next(SECONDS).revision == 1
        with pccl.Communicator(comm._address, 7, name="again") as one:
            publish_all([one], 2)
            assert follower.next(SECONDS).revision == 2


def test_a_forked_copy_is_refused(members: Members) -> None:
    (comm,) = members(1)
    publish_all([comm], 1)
    with pccl.follow(comm._address) as follower:
        follower.next(SECONDS)
        follower._fork -= 1
        with pytest.raises(InvalidUsage, match="forked"):
            follower.next()
        follower._fork += 1


def test_groups_are_apart(members: Members, patience: None) -> None:
    (comm,) = members(1)
    other = pccl.Communicator(comm._address, 3)
    with other:
        publish_all([comm], 1)
        pccl.publish(state_of(2), 2, comm=other)
        with pccl.follow(comm._address, group=3) as follower:
            assert follower.next(SECONDS).revision == 2
        with pccl.follow(comm._address, group=1) as follower:
            with pytest.raises(StateUnavailable, match="no member of group 1 has published for"):
                follower.next(SECONDS)


def test_wrong_calls_are_refused(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    (comm,) = members(1)
    for revision in (-1, 2**63, 1.5, None):
        with pytest.raises(InvalidArgument, match="revision must be an integer"):
            pccl.publish({}, revision, comm=comm)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="object"):
        pccl.publish({"x": object()}, 1, comm=comm)
    with pytest.raises(NotInitialized):
        pccl.publish({}, 1)
    high = pccl.Communicator(comm._address, 4096)
    with high, pytest.raises(InvalidArgument, match="only groups 0 to 4095 have followers"):
        pccl.publish({}, 1, comm=high)
    monkeypatch.delenv("PCCL_MASTER", raising=False)
    with pytest.raises(InvalidArgument, match="give the master as"):
        pccl.follow()
    with pytest.raises(InvalidArgument, match="group must be an integer in 0..4095"):
        pccl.follow("127.0.0.1:1", group=4096)
    with pytest.raises(InvalidArgument, match="port"):
        pccl.follow("127.0.0.1:x")


def test_a_wrong_secret_is_told_at_once(members: Members) -> None:
    (comm,) = members(1, secret=SECRET)
    with pccl.follow(comm._address, secret=SECRET[::-1]) as follower:
        with pytest.raises(AuthenticationFailed):
            follower.next(SECONDS)


def test_a_master_that_does_not_answer_is_told(patience: None) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        address = master.address
    with pccl.follow(address) as follower:
        with pytest.raises(Unreachable):
            follower.next(SECONDS)


def test_the_end_of_a_run_ends_the_loop(members: Members, patience: None) -> None:
    comms = members(2)
    publish_all(comms, 1)
    seen = []
    with pccl.follow(comms[0]._address) as follower:
        for found in follower:
            seen.append(found.revision)
            for comm in comms:
                comm.close()
    assert seen == [1]


def test_the_status_shows_followers_and_no_doors(members: Members) -> None:
    from pccl.tools import show, status

    (comm,) = members(1)
    publish_all([comm], 1)
    with pccl.follow(comm._address, name="reader") as follower:
        follower.next(SECONDS)

        def read() -> status.Status:
            return status.read(_core.ask_status(comm._address))

        eventually(lambda: len(groups_of(comm)) == 3)
        found = read()
        (group,) = found.groups
        assert group.followers == ("reader",)
        assert "followed by reader" in show.group_line(group)
        assert status.troubles(found) == []
        assert all(event.group in (0, None) for event in found.events)


def test_a_member_that_rests_is_asked_again(
    members: Members, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    (comm,) = members(1)
    answers = iter([False, False, True, False])
    monkeypatch.setattr(Publisher, "may_send", lambda self: next(answers, True))
    publish_all([comm], 1)
    with pccl.follow(comm._address) as follower:
        assert is_whole(follower.next(SECONDS))
    assert next(answers, None) is None


def test_trouble_with_the_master_ends_a_loop_and_is_forgotten(
    members: Members, monkeypatch: pytest.MonkeyPatch, patience: None
) -> None:
    (comm,) = members(1)
    publish_all([comm], 1)
    with pccl.follow(comm._address) as follower:
        loop = iter(follower)
        assert next(loop).revision == 1

        def refuse(*_: object, **__: object) -> None:
            raise Refused.because("ask_status", "too many questions about the status")

        monkeypatch.setattr(following, "ask_any", refuse)
        comm.close()
        eventually(lambda: not follower._lines and isinstance(follower._trouble, Refused))
        assert list(loop) == []
        with pytest.raises(StateUnavailable, match="too many questions"):
            follower.next(SECONDS)


# Several processes.


def test_several_members_send_and_a_killed_one_is_replaced(run: Run) -> None:
    peers = run.peers(3, publishers.serve)
    for peer in peers:
        peer.expect("ready")
    with pccl.follow(run.address) as follower:
        for peer in peers:
            peer.tell([1, 50_000])
        assert is_whole(follower.next(SECONDS))
        eventually(lambda: len([one for one in follower._lines if one.offer]) == 3)
        for peer in peers:
            peer.tell([2, 10_000_000])
        peers[1].signal(signal.SIGKILL)
        found = follower.next(SECONDS)
        assert (found.revision, is_whole(found)) == (2, True)
    for peer in (peers[0], peers[2]):
        peer.tell([])
        assert peer.ends() == 0
        assert "leaked" not in peer.stderr()


def test_it_goes_on_when_another_master_takes_over() -> None:
    with masters(3) as run:
        peers = run.peers(2, publishers.serve)
        for peer in peers:
            peer.expect("ready")
        with pccl.follow(run.address) as follower:
            for revision in (1, 2):
                for peer in peers:
                    peer.tell([revision, 1000])
                assert is_whole(follower.next(SECONDS))
                run.kill(0)
        with pccl.follow(run.address) as follower:
            assert follower.next(SECONDS).revision == 2


@pytest.mark.parametrize("fault", ["frozen", "killed with a follower"])
def test_it_comes_although_a_host_is_gone(fault: str) -> None:
    with masters(3, PCCL_SECRET=SECRET) as run:
        peers = run.peers(3, publishers.serve)
        for peer in peers:
            peer.expect("ready")
            peer.tell([1, 1000])
        if fault == "frozen":
            run.masters[0].signal(signal.SIGSTOP)
            wait_for_line(run.masters[1], "taken over")
        else:  # one process has a member and follows the others
            peers[2].tell([0, 0])
            peers[2].expect("follows", SECONDS)
            peers[2].signal(signal.SIGKILL)
            wait_for_line(run.masters[0], "peer .* is out")
        with pccl.follow(run.address, secret=SECRET) as follower:
            assert is_whole(follower.next(SECONDS))
            peers[0].tell([2, 1000])
            assert follower.next(SECONDS).revision == 2
        if fault != "frozen":
            # For longer than a master bears not to reach a majority.
            assert not wait_in_vain(run.masters[0], "steps down", 2.5 * TIMEOUT)


def test_a_pair_on_a_host_that_is_gone_ends_no_masters_term() -> None:
    with masters(3) as run:
        for peer in run.peers(2, publishers.serve):
            peer.expect("ready")
        (both,) = run.peers(1, partial(publishers.be_a_pair, _core.FIRST_PAIR + 77))
        both.expect("met", SECONDS)
        both.signal(signal.SIGKILL)
        assert not wait_in_vain(run.masters[0], "steps down", 2.5 * TIMEOUT)


def test_members_do_not_notice_that_a_follower_is_killed(run: Run) -> None:
    peers = run.peers(2, publishers.train)
    for peer in peers:
        peer.expect("step")
    reader = run.peer(publishers.follow)
    assert reader.expect("revision", SECONDS)["whole"]
    reader.signal(signal.SIGKILL)
    again = run.peer(publishers.follow)
    assert again.expect("revision", SECONDS)["revision"] >= 100
    for peer in peers:
        peer.tell("end")
    for peer in peers:
        assert peer.ends() == 0
        assert peer.expect("done")["again"] == 0


# Offers.


def offered(state: Any, revision: int = 1) -> Offer:
    return Offer.read(Published(revision, Snapshot(state, "publish")).offer(), "follow")


def put(made: Assembly, published: Published, index: int) -> None:
    made.put(index, published.piece(index))


def test_an_assembly_asks_for_each_piece_once(small_pieces: None) -> None:
    published = Published(1, Snapshot({"a": np.arange(150, dtype=np.uint8)}, "publish"))
    made = Assembly(Offer.read(published.offer(), "follow"), [])
    assert [made.take(()) for _ in range(4)] == [0, 1, 2, None]
    made.put_back(1)
    assert made.take(()) == 1
    for index in range(3):
        assert not made.complete
        put(made, published, index)
    assert (made.complete, made.received) == (True, 150)
    assert made.data[:150].tolist() == list(range(150))


def test_a_piece_that_does_not_come_is_asked_of_another(
    small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "_SLOW_SECONDS", 0.0)
    published = Published(1, Snapshot({"a": np.arange(100, dtype=np.uint8)}, "publish"))
    made = Assembly(Offer.read(published.offer(), "follow"), [])
    assert [made.take(()), made.take(())] == [0, 1]
    assert made.take({0, 1}) is None  # by the one that was asked for both
    assert made.take({1}) == 0
    assert made.take(()) == 1
    assert made.take(()) is None  # two are asked for each
    put(made, published, 0)
    made.put_back(0)  # the other one fails
    assert made.take(()) is None
    put(made, published, 1)
    assert (made.complete, made.received) == (True, 100)
    put(made, published, 1)
    assert made.received == 100


def test_pieces_are_known_again_by_their_bytes(small_pieces: None) -> None:
    def assembled(state: Any, *known: Assembly) -> tuple[Assembly, list[int]]:
        published = Published(1, Snapshot(state, "publish"))
        made = Assembly(Offer.read(published.offer(), "follow"), known)
        asked = []
        while (index := made.take(())) is not None:
            asked.append(index)
            put(made, published, index)
        assert made.data.tobytes() == Snapshot(state, "publish").read(0, made.data.size).tobytes()
        return made, asked

    first, asked = assembled({"a": np.arange(200, dtype=np.uint8)})
    assert asked == [0, 1, 2, 3]
    longer, asked = assembled({"a": np.arange(250, dtype=np.uint8)}, first)
    assert asked == [3]
    _, asked = assembled({"a": np.arange(100, dtype=np.uint8)}, longer)
    assert asked == [1]
    _, asked = assembled({"a": np.empty(0)}, longer)
    assert asked == []
    other = np.arange(250, dtype=np.uint8)[::-1].copy()
    begun = Assembly(offered({"a": other}), [])  # only a part of it has come
    index = begun.take(())
    assert index == 0
    put(begun, Published(1, Snapshot({"a": other}, "publish")), index)
    _, asked = assembled({"a": other}, begun, longer)
    assert asked == [1, 2, 3]


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"[]",
        b"{}",
        b'{"revision":1,"entries":[],"pieces":["00"]}',
        b'{"revision":-1,"entries":[],"pieces":[]}',
        b'{"revision":1.5,"entries":[],"pieces":[]}',
        b'{"revision":1,"entries":[["a","uint8",[1],"",-1]],"pieces":[]}',
        b'{"revision":1,"entries":[["a","uint8",[1],"",1]],"pieces":[7]}',
        b'{"revision":1,"entries":[["a"]],"pieces":[]}',
        b'{"revision":1,"entries":[["a","uint8",[1],7,0]],"pieces":[]}',
        b'{"revision":1,"entries":[["a","uint8",[-1],"",0]],"pieces":[]}',
        b'{"revision":1,"entries":[["a","uint8",1,"",0]],"pieces":[]}',
        b'{"revision":1,"entries":[["a","uint8",[1],"",0,1]],"pieces":[]}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_offers_that_make_no_sense_are_refused(told: bytes) -> None:
    with pytest.raises(Refused, match="an offer"):
        Offer.read(np.frombuffer(told, np.uint8), "follow")


@pytest.mark.parametrize("hint", ["", "{}", '["numpy"]', '["numpy",7]', '["numpy",["x","y"]]'])
def test_entries_that_cannot_be_made_are_refused(hint: str) -> None:
    told = {"revision": 1, "entries": [["['a']", "uint8", [0], hint, 0]], "pieces": []}
    offer = Offer.read(np.array(bytearray(json.dumps(told).encode())), "follow")
    with pytest.raises(InvalidArgument, match="cannot be had here"):
        pccl.Revision(Assembly(offer, []), 0.0).state()


def test_doors_tell_whose_they_are() -> None:
    for group in (0, 1, 4095):
        door = door_of(group)
        assert _core.FIRST_DOOR <= door < 2**32
        assert group_behind(door) == group
    assert group_behind(_core.FIRST_DOOR - 1) is None


def test_lies_of_a_publisher_are_refused(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes than offered are never given to the program."""
    (comm,) = members(1)
    lies = 0

    def lie(self: Published, index: int, real: Any = Published.piece) -> Array:
        nonlocal lies
        made: Array = real(self, index)
        if self._offer is not None and lies < 2:
            lies += 1
            made[0] ^= 1
        return made

    monkeypatch.setattr(Published, "piece", lie)
    publish_all([comm], 6)
    with pccl.follow(comm._address) as follower:
        assert is_whole(follower.next(SECONDS))
    assert lies == 2
