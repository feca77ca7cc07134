"""The examples run as they are, as real processes, and do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pccl

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(folder: Path, *command: str, status: int = 0) -> str:
    """Runs Python with these arguments in `folder`, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert not done.stderr or status, done.stderr
    return done.stdout


def launch(folder: Path, ranks: int, example: str) -> str:
    return run(
        folder, "-m", "pccl", "run", "-n", str(ranks), "--", sys.executable, str(EXAMPLES / example)
    )


def test_hello_adds_up_what_all_peers_gave(tmp_path: Path) -> None:
    lines = launch(tmp_path, 3, "hello.py").splitlines()
    assert sorted(line.split("] ", 1)[1] for line in lines) == [
        f"rank {rank} of 3 gave [{rank + 1}. {rank + 1}. {rank + 1}.] and got [6. 6. 6.]"
        for rank in range(3)
    ]


def test_level1_shares_its_state_and_goes_on_when_a_peer_vanishes(tmp_path: Path) -> None:
    lines = launch(tmp_path, 3, "level1.py")
    for peer in (0, 1):
        for step in range(6):
            mean, peers = ("2.000", 3) if step < 3 else ("1.500", 2)
            assert f"peer {peer}, step {step}: mean {mean} over {peers} peers" in lines
    assert "peer 2 vanishes" in lines
    assert "peer 2, step 3" not in lines
    # They began with weights of their own; all took those of the longest-standing peer.
    ends = re.findall(r"peer (\d) ends with weights ([0-9a-f]+)", lines)
    assert sorted(peer for peer, _ in ends) == ["0", "1"] and ends[0][1] == ends[1][1]
    received = dict(re.findall(r"peer (\d) received (\d+) bytes", lines))
    assert list(received.values()) == ["4000", "4000"]  # all but whoever came first


def test_torch_ddp_learns_and_all_ranks_have_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    command = [sys.executable, str(EXAMPLES / "torch_ddp.py"), "--init-method"]
    ranks = [
        subprocess.Popen(
            [*command, f"file://{tmp_path}/store"],
            cwd=tmp_path,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        shown = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], shown
    lines = [
        re.fullmatch(r"rank \d: accuracy (\S+), weights (\S+)", s.splitlines()[-1]) for s in shown
    ]
    assert lines[0] and lines[1], shown
    assert lines[0][2] == lines[1][2] and float(lines[0][1]) > 0.8
    assert "epoch 4" in shown[0]


def test_fsdp_replicas_learn_and_hold_the_same_shards(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    example = [str(EXAMPLES / "fsdp_diloco.py"), "--rounds", "8", "--replica"]
    with pccl.MasterNode("127.0.0.1:0") as master:
        env = {
            **os.environ,
            "PCCL_MASTER": master.address,
            "PCCL_MIN_PEERS": "2",
            "OMP_NUM_THREADS": "1",
        }
        replicas = [
            subprocess.Popen(
                [*torchrun, *example, name],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in "ab"
        ]
        try:
            shown = "".join(replica.communicate(timeout=100)[0] for replica in replicas)
        finally:
            for replica in replicas:
                replica.terminate()  # ends its ranks, too
    assert [replica.returncode for replica in replicas] == [0, 0], shown
    assert "round 8: loss" in shown and "2 replicas" in shown
    ends = re.findall(r"replica (\w) rank (\d): accuracy (\S+), shards (\w+)", shown)
    shards = {(name, rank): crc for name, rank, _, crc in ends}
    assert len(shards) == 4, shown
    for rank in "01":
        assert shards["a", rank] == shards["b", rank]
    assert shards["a", "0"] != shards["a", "1"]
    assert all(float(accuracy) > 0.7 for _, _, accuracy, _ in ends), shown


def test_digits_survives_a_killed_peer_takes_a_newcomer_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    shown = run(tmp_path, str(EXAMPLES / "digits.py"), "--steps", "100", "--svg", "digits.svg")
    assert re.search(r"^yes  peer 1 was killed at step 5\d", shown, re.MULTILINE), shown
    joined = re.search(r"^yes  a newcomer joined at step (\d+) and received 2\.4 MB$", shown, re.M)
    assert joined and 70 < int(joined[1]) < 100, shown
    assert "yes  4 peers finished all 100 steps" in shown
    assert "yes  their weights are bit-identical" in shown
    assert "yes  held-out accuracy 9" in shown
    steps = dict(re.findall(r"^ +(\d+)/100 .* (\d) +\d+$", shown, re.M))  # -> peers
    assert (steps["50"], steps["60"], steps["100"]) == ("4", "3", "4"), shown
    assert (tmp_path / "digits.png").stat().st_size > 1000
    picture = (tmp_path / "digits.svg").read_text()
    assert "SIGKILL" in picture and "JOIN" in picture


def test_digits_fails_when_it_has_not_learned(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    shown = run(tmp_path, str(EXAMPLES / "digits.py"), "--steps", "4", status=1)
    assert re.search(r"^NO   held-out accuracy", shown, re.MULTILINE), shown
