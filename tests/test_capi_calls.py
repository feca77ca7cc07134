"""Every call of pccl.h, with real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import clibrary
import pytest
from programs import capi_calls as calls
from workers import Run, Worker, masters, running

pytestmark = clibrary.MARKS


@pytest.fixture
def run(library: Path) -> Iterator[Run]:
    with running(PCCL_C_LIBRARY=str(library)) as made:
        yield made


def c_peers(run: Run, count: int, program: Callable[[int], None], **env: str) -> list[Worker]:
    """Peers that connect and then do what is in `program`."""
    peers = [run.peer(partial(program, number), **env) for number in range(count)]
    for peer in peers:
        peer.expect("connected")
    return peers


def ok(*peers: Worker) -> None:
    """Waits for these to have come to their end."""
    for peer in peers:
        peer.expect("ok")
    for peer in peers:
        assert peer.ends() == 0, peer.stderr()


def test_null_unconnected_and_uninitialised_calls_are_refused_with_a_sentence(run: Run) -> None:
    peer = run.peer(calls.make_calls_too_early)
    ok(peer)


def test_arguments_of_reductions_and_states_are_checked_before_anything_starts(run: Run) -> None:
    ok(*c_peers(run, 2, calls.make_calls_with_wrong_arguments))


def test_alone_gets_too_few_peers_and_keeps_its_arrays(run: Run) -> None:
    peer = run.peer(calls.be_alone)
    ok(peer)


@pytest.mark.parametrize("shm", ["1", "0"])
def test_every_type_and_op_is_reduced_exactly_in_place_and_not(run: Run, shm: str) -> None:
    pytest.importorskip("ml_dtypes")
    ok(*c_peers(run, 3, calls.reduce_every_type, PCCL_SHM=shm))


@pytest.mark.parametrize("shm", ["1", "0"])
def test_a_peer_killed_in_an_all_reduce_leaves_inputs_and_the_survivors_go_on(
    run: Run, shm: str
) -> None:
    peers = first, second, victim = c_peers(run, 3, calls.reduce_with_a_victim, PCCL_SHM=shm)
    for peer in peers:
        peer.expect("gathered")
    for peer in (first, victim):
        peer.tell("launch")
        peer.expect("launched")
    victim.signal(signal.SIGKILL)
    first.expect("failed")
    second.tell("reduce")
    second.expect("failed")
    ok(first, second)


@pytest.mark.parametrize("shm", ["1", "0"])
def test_multiple_reductions_are_completed_by_the_survivors(run: Run, shm: str) -> None:
    *survivors, victim = c_peers(run, 3, calls.reduce_many_with_a_victim, PCCL_SHM=shm)
    victim.expect("in the middle")
    victim.signal(signal.SIGKILL)
    ok(*survivors)


def test_asynchronous_reductions_are_awaited_once_by_any_thread_and_hold_their_tag(
    run: Run,
) -> None:
    first, second = c_peers(run, 2, calls.launch_many)
    for peer in (first, second):
        peer.tell("go")
        peer.expect("launched")
    ok(first, second)


def test_a_shared_state_reaches_newcomers_and_moves_nothing_in_step(run: Run) -> None:
    ok(*c_peers(run, 2, calls.synchronise_a_state))


def test_c_peers_and_python_peers_are_members_of_one_run(run: Run) -> None:
    other = run.peer(calls.meet_c_in_python)
    (peer,) = c_peers(
        run,
        1,
        calls.meet_python,
    )
    ok(peer, other)


def test_attributes_count_groups_and_members(run: Run) -> None:
    peers = [run.peer(partial(calls.count_members, group)) for group in (0, 0, 1)]
    for peer in peers:
        peer.expect("in")
    for peer in peers:
        peer.tell("check")
    for peer in peers:
        peer.expect("checked")
    for peer in peers:
        peer.tell("end")
    ok(*peers)


def test_members_that_disagree_all_get_the_sentence_that_names_it(run: Run) -> None:
    ok(*c_peers(run, 2, calls.disagree))


def test_quantized_reductions_are_near_and_the_same_for_all(run: Run) -> None:
    peers = c_peers(run, 2, calls.quantize, PCCL_SHM="0")
    first, second = (peer.expect("sums")["sums"] for peer in peers)
    assert first == second
    ok(*peers)


def test_the_last_error_belongs_to_its_thread(run: Run) -> None:
    peer = run.peer(calls.fail_on_threads)
    ok(peer)


def test_a_signal_does_not_end_a_call(run: Run) -> None:
    first, second = c_peers(run, 2, calls.take_signals_in_a_call)
    first.tell("go")
    first.expect("launched")
    for _ in range(100):
        first.signal(signal.SIGINT)
    second.tell("go")
    second.expect("launched")
    ok(first, second)


def test_destroying_ends_reductions_in_flight_and_leaves_their_memory_alone(run: Run) -> None:
    leaving, other = c_peers(run, 2, calls.destroy_with_a_reduction_in_flight)
    for peer in (leaving, other):
        peer.expect("gathered")
    leaving.tell("go")
    leaving.expect("destroyed")
    other.tell("go")
    ok(other)
    leaving.tell("go")
    ok(leaving)


def test_destroying_ends_a_connect_of_another_thread(run: Run) -> None:
    newcomer = run.peer(calls.destroy_while_connecting)
    (member,) = c_peers(
        run,
        1,
        calls.watch_a_newcomer,
    )
    newcomer.tell("connect")
    member.expect("pending")
    newcomer.tell("destroy")
    ok(newcomer, member)


def test_a_process_that_just_ends_leaves_and_a_forked_child_harms_nobody(run: Run) -> None:
    ending, other = c_peers(run, 2, calls.fork_and_end)
    ok(ending)
    other.tell("go")
    ok(other)


def test_without_its_master_every_call_fails_and_a_new_one_takes_it_in(run: Run) -> None:
    peers = c_peers(run, 2, calls.lose_the_master, PCCL_RECONNECT_TIMEOUT="1")
    for peer in peers:
        peer.expect("in")
    run.master.signal(signal.SIGKILL)
    run.master.ends()
    for peer in peers:
        peer.tell("go")
    for peer in peers:
        peer.expect("out")
    run.restart_master()
    for peer in peers:
        peer.tell("go")
    ok(*peers)


def test_pccl_timeout_bounds_a_call(run: Run) -> None:
    first, second = c_peers(run, 2, calls.time_out, PCCL_TIMEOUT="5")
    first.expect("timed out")
    second.tell("go")
    second.expect("timed out")
    ok(first, second)


def test_pccl_timeout_bounds_a_call_of_many_reductions(run: Run) -> None:
    first, second = c_peers(run, 2, calls.time_out_of_many, PCCL_TIMEOUT="0.5")
    seconds = first.expect("timed out")["seconds"]
    assert seconds < 2, "each of eight reductions had the whole time"
    second.tell("go")
    ok(first, second)


def test_a_list_of_masters_may_have_names(library: Path) -> None:
    with masters(PCCL_C_LIBRARY=str(library), PCCL_SHM="0") as run:
        names = run.address.replace("127.0.0.1", "localhost")
        program = partial(calls.reduce_with_named_masters, run.addresses[0])
        peers = run.peers(2, program, PCCL_MASTER=names)
        for peer in peers:
            peer.expect("connected")
        for index in (None, 0):
            if index is not None:
                run.kill(index)
            for peer in peers:
                peer.tell(True)
            for peer in peers:
                peer.expect("reduced")
        for peer in peers:
            peer.tell(False)
        ok(*peers)


def test_masters_are_made_run_stopped_and_their_port_is_free_again(run: Run) -> None:
    peer = run.peer(calls.make_masters)
    ok(peer)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PCCL_PORT", "70000"),
        ("PCCL_ADVERTISE", "a:b"),
        ("PCCL_STRIPES", "x"),
        ("PCCL_SECRET", "s"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(run: Run, variable: str, value: str) -> None:
    word = "a:b" if variable == "PCCL_ADVERTISE" else variable
    peer = run.peer(partial(calls.refuse_a_variable, variable, value, word))
    ok(peer)
