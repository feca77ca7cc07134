"""`pccl bench`: peers print the same figures, or say why they cannot."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from programs import idle
from workers import Run, running

from pccl import _core
from pccl.tools.bench import DEFAULT_GROUP, _compared, network_bound, parse_sizes

SIZES = ["--sizes", "64KiB,4KiB", "--seconds", "0.01"]


@contextmanager
def benches(
    folder: Path, count: int, *options: str, **env: str
) -> Iterator[list[subprocess.Popen]]:
    """So many `pccl bench`, gone at the end."""
    processes: list[subprocess.Popen] = []
    try:
        for _ in range(count):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "pccl", "bench", *SIZES, *options],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=folder,  # not the source tree, which has no extension
                    env={**os.environ, **env},
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Status, output and error text of each."""
    said = [process.communicate(timeout=200) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def bench(folder: Path, run: Run, count: int, *options: str) -> list[tuple[int, str, str]]:
    master = ["--master", run.address, "--peers", str(count)]
    with benches(folder, count, *master, *options) as processes:
        return ends(processes)


def test_all_peers_print_the_same_figures_for_every_size_and_pair(tmp_path: Path) -> None:
    with running() as run:
        said = bench(tmp_path, run, 3, "--json")
    assert [status for status, _, _ in said] == [0, 0, 0], said
    [text] = {out for _, out, _ in said}
    result = json.loads(text)
    assert len(set(result["peers"])) == 3
    assert [row["bytes"] for row in result["all_reduce"]] == [4096, 65536]
    for row in result["all_reduce"]:
        assert row["calls"] >= 3
        assert 0 < row["seconds"] <= row["worst_seconds"]
        assert row["each_way_bytes_per_second"] == pytest.approx(row["bytes_per_second"] * 4 / 3)
    assert result["left_out"] == []
    bound = {"bytes": 65536, "kind": "small", "seconds": None, "part": None}
    assert result["bound"] == bound
    assert [pair["peers"] for pair in result["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(p["seconds"] > 0 and p["each_way_bytes_per_second"] > 0 for p in result["pairs"])


def test_one_master_serves_bench_after_bench(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        assert [status for status, _, _ in bench(tmp_path, run, 2)] == [0, 0]


def test_the_tables_are_plain_text_without_a_terminal(tmp_path: Path) -> None:
    with running() as run:
        said = bench(tmp_path, run, 2)
    for status, out, _ in said:
        assert status == 0
        lines = out.splitlines()
        assert lines[1] == "All-reduce between 2 peers, float32 sum"
        assert [line[:6] for line in lines[3:5]] == ["4 KiB ", "64 KiB"]
        assert out.isascii()


def test_it_runs_under_pccl_run_without_options(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pccl"]
    done = subprocess.run(
        [*command, "run", "-n", "2", "--", *command, "bench", *SIZES, "--sizes", "1MiB"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("All-reduce between 2 peers") == 1  # rank 0 prints for all
    # The bound is that of the memory, if the peers share it, or of their links.
    assert ("on all 2 peers at once" in done.stdout) == _core.shares_memory()


def test_a_peer_that_goes_ends_the_others_with_the_reason(run: Run, tmp_path: Path) -> None:
    run.peer(partial(idle.leave, peer_group=DEFAULT_GROUP, min_peers=3))
    master = ["--master", run.address, "--peers", "3"]
    with benches(tmp_path, 2, *master) as processes:
        for status, out, err in ends(processes):
            assert (status, out) == (1, "")
            assert "gone" in err


def test_a_latecomer_is_told_that_others_run_it(run: Run, tmp_path: Path) -> None:
    holder = run.peer(partial(idle.wait, peer_group=DEFAULT_GROUP))
    holder.expect("in")
    with benches(tmp_path, 1, "--master", run.address) as processes:
        [(status, _, err)] = ends(processes)
    assert status == 1
    assert "already" in err


def test_sizes_have_units() -> None:
    assert parse_sizes("8, 4KiB,1mib,2MB,12B") == [8, 4096, 1 << 20, 2_000_000, 12]
    for text in ("", "3", "0", "4 elephants", "-4"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_sizes(text)


@pytest.mark.parametrize(
    ("up", "down", "seconds"),
    [
        ([100.0, 100.0], [100.0, 100.0], 10.0),
        ([100.0, 50.0, 100.0], [100.0] * 3, 20.0),  # the slow one sends its array once
        ([100.0] * 4, [50.0] * 4, 30.0),  # 6 arrays go in, at 200 bytes per second
        ([100.0, None], [100.0, 100.0], None),
    ],
)
def test_the_networks_bound_is_what_the_measured_rates_allow(
    up: list[float | None], down: list[float | None], seconds: float | None
) -> None:
    assert network_bound(1000, up, down) == seconds


def test_the_comparison_with_the_bound_claims_no_more_than_was_measured() -> None:
    row = {"seconds": 0.2}
    bound = {"bytes": 1 << 20, "kind": "copy", "seconds": 0.05, "part": 0.25}
    assert _compared(bound, row, 2) == (
        "1 MiB in 200 ms is 25 % of the speed of the measured bound: one copy of the array in "
        "memory, on all 2 peers at once, takes 50 ms."
    )
    bound = {"bytes": 1 << 20, "kind": "network", "seconds": 0.4, "part": 2.0}
    assert "1 MiB in 200 ms is faster than the measured bound" in _compared(bound, row, 2)
    bound = {"bytes": 1 << 20, "kind": "none", "seconds": None, "part": None}
    assert _compared(bound, row, 2).startswith("No bound was measured: there are several hosts")
    bound = {"bytes": 1 << 12, "kind": "small", "seconds": None, "part": None}
    assert "below 1 MiB the bytes take little" in _compared(bound, row, 2)
