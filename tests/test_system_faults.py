"""Faults of the system under a peer: late name servers, no room for descriptors or memory."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import system_faults
from workers import Run, free_ports, wait_until_asleep

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="preloads what Linux has"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a compiler"),
]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library to preload."""
    library = tmp_path_factory.mktemp("faulty") / "faulty.so"
    source = Path(system_faults.__file__).parent / "c" / "faulty.c"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    return str(library)


def test_a_name_may_be_looked_up_for_longer_than_a_connection_may_take(
    run: Run, faulty: str
) -> None:
    named = f"one.late:{run.address.rpartition(':')[2]}"  # a connection has five seconds
    program = system_faults.connect_once
    peer = run.peer(program, LD_PRELOAD=faulty, TEST_ANSWER_MS="5300", PCCL_MASTER=named)
    peer.expect("connected")


def test_a_late_answer_of_a_name_server_is_used_for_the_next_dial(run: Run, faulty: str) -> None:
    # With several masters a look-up has a second.
    port = run.address.rpartition(":")[2]
    named = f"one.late:{port},two.late:{free_ports(1)[0]}"
    peer = run.peer(
        system_faults.connect_once, LD_PRELOAD=faulty, TEST_ANSWER_MS="2300", PCCL_MASTER=named
    )
    # The master answers: it knows of no other.
    answer = peer.expect("refused")
    assert answer["error"] == "InvalidArgument", answer


def test_a_process_may_end_while_a_name_is_looked_up(run: Run, faulty: str) -> None:
    peer = run.peer(
        system_faults.join_until_interrupted,
        LD_PRELOAD=faulty,
        TEST_ANSWER_MS="60000",
        PCCL_MASTER="master.late:1",
    )
    peer.expect("joins")
    wait_until_asleep(peer)
    peer.signal(signal.SIGINT)
    peer.expect("interrupted")
    assert peer.ends(10) == 0


# The first is refused when it begins to connect, the third when it has connected.
@pytest.mark.env(PCCL_SHM="0")
def test_a_dial_for_which_the_loop_has_no_room_is_made_again(run: Run, faulty: str) -> None:
    peers = [
        run.peer(
            system_faults.reduce_once, PCCL_MIN_PEERS="2", LD_PRELOAD=faulty, TEST_REFUSE="inet13"
        )
        for _ in range(2)
    ]
    for peer in peers:
        assert peer.expect("reduced")["size"] == 2


@pytest.mark.env(PCCL_SHM="1")
def test_a_neighbour_for_which_the_loop_has_no_room_is_reached_otherwise(
    run: Run, faulty: str
) -> None:
    peers = [
        run.peer(
            system_faults.reduce_once, PCCL_MIN_PEERS="2", LD_PRELOAD=faulty, TEST_REFUSE="unix1"
        )
        for _ in range(2)
    ]
    for peer in peers:
        assert peer.expect("reduced")["size"] == 2


def counting(folder: Path) -> str:
    """The file of a system that counts all memory."""
    file = folder / "mode"
    file.write_text("2\n")
    return str(file)


# The first access to such memory would end the process by SIGBUS.
@pytest.mark.shared_memory
@pytest.mark.env(PCCL_SHM="1")
def test_where_memory_is_counted_shared_memory_is_refused_before_it_is_used(
    run: Run, faulty: str, tmp_path: Path
) -> None:
    faults = {"LD_PRELOAD": faulty, "TEST_COUNTED": counting(tmp_path), "TEST_FULL": "1"}
    peers = [run.peer(system_faults.reduce_once, PCCL_MIN_PEERS="2", **faults) for _ in range(2)]
    for peer in peers:
        assert peer.expect("reduced")["size"] == 2
        sentence = "no shared memory (reserving shared memory: No space left on device)"
        assert f"{sentence}: reducing over TCP" in peer.stderr()


# A kernel gives back what a call had reserved before the signal.
@pytest.mark.shared_memory
def test_signals_do_not_keep_memory_from_being_reserved(
    run: Run, faulty: str, tmp_path: Path
) -> None:
    faults = {"LD_PRELOAD": faulty, "TEST_COUNTED": counting(tmp_path), "TEST_SIGNALS": "1"}
    peer = run.peer(system_faults.make_a_long_array, **faults)
    peer.expect("made")


@pytest.mark.env(PCCL_SHM="0", PCCL_SECRET="a secret of this test, and of no other")
@pytest.mark.parametrize("cipher", ["aes", "chacha20"])
def test_an_openssl_without_chacha20_encrypts_with_aes(run: Run, faulty: str, cipher: str) -> None:
    lacking = {"LD_PRELOAD": faulty, "TEST_NO_CHACHA": "1"}
    peers = [
        run.peer(system_faults.reduce_once, PCCL_MIN_PEERS="2", PCCL_CIPHER=cipher, **faults)
        for faults in (lacking, {})
    ]
    for peer in peers:
        assert peer.expect("reduced")["size"] == 2
