"""The examples run as they are, and do what they say.

Most of those that need torch run in processes that are forked from one that has imported it.
"""

from __future__ import annotations

import ast
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
from forked import Forked
from together import run_together
from workers import complaints, free_ports

import pccl

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(folder: Path, *command: str, status: int = 0) -> str:
    """Runs Python with these arguments in `folder`, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert not complaints(done.stderr, news=False) or status, done.stderr
    return done.stdout


def launch(folder: Path, ranks: int, example: str, *options: str) -> str:
    command = [sys.executable, str(EXAMPLES / example), *options]
    return run(folder, "-m", "pccl", "run", "-n", str(ranks), "--", *command)


class Crowd:
    """Programs that are heard together, and ended at the end of the test.

    A command that begins with a script runs in a process forked from one that has torch.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._heard: dict[int, list[str]] = {}
        self._readers: list[threading.Thread] = []
        self.programs: list[subprocess.Popen[bytes] | Forked] = []
        self.fine: tuple[int, ...] = ()  # exit statuses that programs may end with

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs:
            program.send_signal(signal.SIGTERM)  # torchrun ends its ranks, too
        for program in self.programs:
            try:
                program.wait(40)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        for reader in self._readers:
            reader.join(40)
            assert not reader.is_alive(), "somebody still holds what a program prints to"

    def begin(self, command: list[str], **env: str) -> subprocess.Popen[bytes] | Forked:
        make = Forked if command[0].endswith(".py") else subprocess.Popen
        program = make(
            command,
            cwd=self._folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert program.stdout is not None
        reader = threading.Thread(target=self._read, args=(len(self.programs), program.stdout))
        reader.start()
        self._readers.append(reader)
        self.programs.append(program)
        return program

    def _read(self, number: int, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                self._lines.put((number, line.decode()))
        self._lines.put((number, ""))

    def hear(self, pattern: str) -> str:
        """Returns what the next line with that has there; all programs go on meanwhile."""
        deadline = time.monotonic() + 240  # programs that import torch on a busy machine
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                number, line = self._lines.get(timeout=left)
            except queue.Empty:
                raise AssertionError(f"no {pattern!r}:\n" + self.heard()) from None
            self._heard.setdefault(number, []).append(f"{time.monotonic():.1f} {number}: {line}")
            if not line and self.programs[number].wait(40) not in self.fine:
                raise AssertionError(f"program {number} ended:\n" + self.heard())
            if found := re.search(pattern, line):
                return found[0]

    def heard(self) -> str:
        """The end of what each of them said."""
        return "".join(line for lines in self._heard.values() for line in lines[-30:])


@pytest.mark.parametrize("name", sorted(file.name for file in EXAMPLES.glob("*.py")))
def test_an_example_begins_with_the_command_that_runs_it(name: str) -> None:
    description = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    assert description
    assert re.search(rf"(python|torchrun)\s.*examples/{name}", description, re.DOTALL)


@pytest.mark.parametrize(
    ("command", "missing", "needed"),
    [
        ("async_diloco.py", "sklearn", "torch,demo"),
        ("byte_gpt.py", "torch", "torch,checkpoint"),
        ("byte_gpt.py --result weights.safetensors", "safetensors", "checkpoint"),
        ("digits.py", "matplotlib", "demo"),
        ("fsdp_diloco.py", "torch", "torch,demo"),
        ("jax_diloco.py", "optax", "jax"),
        ("jax_pmap.py", "jax", "jax"),
        ("jax_shard_map.py", "jax", "jax"),
        ("kill_and_join.py", "sklearn", "demo"),
        ("serve_text.py", "torch", "torch"),
        ("torch_ddp.py", "torch", "torch,demo"),
        ("torch_diloco.py", "torch", "torch,demo"),
    ],
)
def test_an_example_says_what_it_needs(
    command: str, missing: str, needed: str, tmp_path: Path
) -> None:
    name, *options = command.split()
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError(name={missing!r})\n")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2 and not done.stdout, done.stdout + done.stderr
    sentence = rf"{missing} is missing: pip install 'pccl-collectives\[{needed}\]'.*\n"
    assert re.fullmatch(sentence, done.stderr), done.stderr


def test_hello_adds_up_what_all_peers_gave(tmp_path: Path) -> None:
    lines = launch(tmp_path, 3, "hello.py").splitlines()
    assert sorted(line.split("] ", 1)[1] for line in lines) == [
        f"rank {rank} of 3 gave [{rank + 1}. {rank + 1}. {rank + 1}.] and got [6. 6. 6.]"
        for rank in range(3)
    ]


def test_explicit_shares_its_state_and_goes_on_when_a_peer_vanishes(tmp_path: Path) -> None:
    lines = launch(tmp_path, 3, "explicit.py")
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
    program = [str(EXAMPLES / "torch_ddp.py"), "--init-method", f"file://{tmp_path}/store"]
    shown = run_together(tmp_path, program, program, WORLD_SIZE="2")
    lines = [
        re.fullmatch(r"rank \d: accuracy (\S+), weights (\S+)", s.splitlines()[-1]) for s in shown
    ]
    assert lines[0] and lines[1], shown
    assert lines[0][2] == lines[1][2] and float(lines[0][1]) > 0.8
    assert "epoch 4" in shown[0]


@pytest.mark.timeout(400)  # processes that import torch or JAX on a busy machine
@pytest.mark.parametrize(
    ("needed", "forked", "program"),
    [
        ("torch", False, "torch_diloco.py --rounds 12"),
        ("torch", True, "torch_diloco.py --rounds 12 --quantize int8"),
        ("torch", True, "async_diloco.py --rounds 20"),
        ("torch", True, "async_diloco.py --rounds 20 --mode streaming"),
        ("optax", False, "jax_diloco.py"),
    ],
)
def test_diloco_learns_and_all_members_have_the_same_weights(
    tmp_path: Path, needed: str, forked: bool, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(needed)
    if needed == "torch":
        pytest.importorskip("sklearn")
    example, *options = program.split()
    if forked:
        command = [str(EXAMPLES / example), *options]
        with pccl.MasterNode("127.0.0.1:0") as master:
            env = {"PCCL_MASTER": master.address, "PCCL_MIN_PEERS": "2"}
            shown = "".join(run_together(tmp_path, command, command, **env))
    else:
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        shown = launch(tmp_path, 2, example, *options)
    weights = re.findall(r"weights ([0-9a-f]{8})", shown)
    assert len(weights) == 2 and weights[0] == weights[1], shown
    losses = [float(loss) for loss in re.findall(r"round \d+: loss (\S+?),?(?:\s|$)", shown)]
    assert losses[-1] < 0.7 * losses[0], shown
    assert all(float(one) > 0.8 for one in re.findall(r"accuracy (\S+),", shown))


@pytest.mark.timeout(600)  # two runs of four processes that import torch
def test_fsdp_replicas_learn_hold_the_same_shards_and_go_on_at_one_round(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    pytest.importorskip("safetensors")

    def train(names: str, rounds: int) -> str:
        """The output of these replicas, of two ranks each. torchrun sets these variables, too."""
        example = [str(EXAMPLES / "fsdp_diloco.py"), "--rounds", str(rounds)]
        with pccl.MasterNode("127.0.0.1:0") as master, Crowd(tmp_path) as crowd:
            crowd.fine = (0, -signal.SIGABRT)
            for name, port in zip(names, free_ports(len(names)), strict=True):
                for rank in "01":
                    crowd.begin(
                        [*example, "--replica", name, "--checkpoints", "run"],
                        PCCL_MASTER=master.address,
                        PCCL_MIN_PEERS=str(len(names)),
                        MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=str(port),
                        WORLD_SIZE="2",
                        RANK=rank,
                        LOCAL_RANK=rank,
                    )
            for _ in range(2 * len(names)):
                crowd.hear(": accuracy ")
            # A thread of Gloo may abort the interpreter's exit.
            ended = {program.wait(60) for program in crowd.programs}
            assert ended <= {0, -signal.SIGABRT}, crowd.heard()
            return crowd.heard()

    shown = train("ab", 10)
    # 20 steps of 32 digits on each of four ranks are a round; every digit counts once.
    assert re.search(r"round 8: loss \S+, 2 replicas, 20480 digits", shown), shown
    ends = re.findall(r"replica (\w) rank (\d): accuracy (\S+), shards ([0-9a-f]{8})", shown)
    shards = {(name, rank): crc for name, rank, _, crc in ends}
    assert len(shards) == 4, shown
    for rank in "01":
        assert shards["a", rank] == shards["b", rank]
    assert shards["a", "0"] != shards["a", "1"]
    assert all(float(accuracy) > 0.7 for _, _, accuracy, _ in ends), shown
    # As if all had been killed when the second ranks had not saved yet.
    (tmp_path / "run" / "rank1" / "10.safetensors").unlink()
    shown = train("a", 6)
    assert re.findall(r"rank \d: begins at round (\d+)", shown) == ["5", "5"], shown
    assert re.search(r"round 6: loss \S+, 1 replicas, 14080 digits", shown), shown


@pytest.mark.timeout(900)  # six processes that import torch
def test_fsdp_goes_on_when_a_rank_is_killed_and_its_replica_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    pytest.importorskip("safetensors")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    example = [str(EXAMPLES / "fsdp_diloco.py"), "--rounds", "1000000"]

    def saved(name: str) -> set[tuple[str, str, bytes]]:
        """Rank, round and checkpoint of what that replica has now."""
        found = set()
        for file in (tmp_path / name).glob("*/*.safetensors"):
            with suppress(FileNotFoundError):  # replaced by a newer one
                found.add((file.parent.name, file.stem, file.read_bytes()))
        return found

    def ranks(program: subprocess.Popen[bytes] | Forked) -> list[int]:
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        return [
            int(pid)
            for pid in children
            if b"fsdp_diloco.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    with pccl.MasterNode("127.0.0.1:0") as master, Crowd(tmp_path) as crowd:
        for name in "ab":
            crowd.begin(
                [*torchrun, "--max-restarts=3", *example, "--replica", name, "--checkpoints", name],
                PCCL_MASTER=master.address,
                PCCL_MIN_PEERS="2",
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            )
        crowd.hear("round 2: .* 2 replicas")
        # The other's ranks import torch meanwhile, and need the processor more.
        for pid in ranks(crowd.programs[0]):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), 19)
        os.kill(ranks(crowd.programs[1])[0], signal.SIGKILL)
        crowd.hear(" 1 replicas")
        crowd.hear(r"replica b rank \d: begins at round [1-9]")
        crowd.hear(" 2 replicas")
        # Both save every fifth round, and keep two.
        after = max((int(number) for _, number, _ in saved("b")), default=0)
        while True:
            both = saved("a") & saved("b")
            if {rank for rank, number, _ in both if int(number) > after} == {"rank0", "rank1"}:
                break
            crowd.hear("round ")


def test_kill_and_join_ends_with_the_same_weights_on_all_peers(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    command = [str(EXAMPLES / "kill_and_join.py"), "1500"]
    # scikit-learn comes with torch, too.
    with pccl.MasterNode("127.0.0.1:0") as master, Crowd(tmp_path) as crowd:

        def begin(at_least: int) -> subprocess.Popen[bytes] | Forked:
            return crowd.begin(command, PCCL_MASTER=master.address, PCCL_MIN_PEERS=str(at_least))

        crowd.fine = (0, -signal.SIGKILL)
        peers = [begin(4) for _ in range(4)]
        crowd.hear("4 peers")
        peers.pop().kill()
        crowd.hear("3 peers")
        peers.append(begin(1))
        ends = [crowd.hear(r"accuracy 9\d\.\d%, weights sha256 \w+") for _ in peers]
        assert len(set(ends)) == 1
        assert [peer.wait(40) for peer in peers] == [0] * 4
        assert f"pid {peers[-1].pid}  received 76 kB of state" in crowd.heard()


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


@pytest.mark.timeout(600)  # two runs
@pytest.mark.parametrize(
    "options",
    [
        ["--mode", "async", "--density", "0.25"],
        ["--method", "ddp", "--inner", "muon"],
    ],
)
def test_byte_gpt_learns_and_goes_on_from_its_checkpoint(
    tmp_path: Path, options: list[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    small = "--width 32 --layers 1 --context 32 --sync-every 8 --test-examples 16 --report-every 1"

    def train(tokens: int) -> tuple[list[dict], list[str]]:
        program = [str(EXAMPLES / "byte_gpt.py"), *small.split(), *options]
        program += ["--checkpoints", "run", "--save-every", "4000", "--plot", "loss.svg"]
        program += ["--tokens", str(tokens)]
        with pccl.MasterNode("127.0.0.1:0") as master:
            env = {"PCCL_MASTER": master.address, "PCCL_MIN_PEERS": "2"}
            shown = "".join(run_together(tmp_path, program, program, **env))
        ends = re.findall(r"ends with parameters (\w+), sent \d+ bytes", shown)
        assert len(ends) == 2 and ends[0] == ends[1], shown
        begins = re.findall(r"begins at (\d+) tokens", shown)
        lines = shown.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")], begins

    reports, begins = train(12_000)
    assert begins == ["0", "0"]
    assert reports[-1]["tokens"] >= 12_000 and reports[-1]["members"] == 2
    assert reports[-1]["bits"] < 6.5 < reports[0]["bits"]
    svg = (tmp_path / "loss.svg").read_text()
    assert svg.startswith("<svg") and "polyline" in svg
    further, begins = train(16_000)
    assert begins[0] == begins[1] and 4000 <= int(begins[0]) <= 12_300
    assert further[-1]["tokens"] >= 16_000 and further[-1]["bits"] < 6.5


SMALL_GPT = "--width 32 --layers 1 --context 32 --test-examples 16".split()


@pytest.mark.timeout(600)
def test_byte_gpt_saves_at_the_step_that_lets_a_newcomer_in(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    command = [str(EXAMPLES / "byte_gpt.py"), *SMALL_GPT, "--method", "ddp"]
    # Far more tokens than anybody waits for; every step is one to save at.
    command += ["--tokens", "1000000000", "--report-every", "1"]
    command += ["--checkpoints", "run", "--save-every", "1"]
    with pccl.MasterNode("127.0.0.1:0") as master, Crowd(tmp_path) as crowd:

        def begin(at_least: int) -> None:
            crowd.begin(command, PCCL_MASTER=master.address, PCCL_MIN_PEERS=str(at_least))

        begin(2)
        begin(2)
        crowd.hear("begins at 0 tokens")
        crowd.hear("begins at 0 tokens")
        begin(1)
        crowd.hear("begins at [1-9]")
        crowd.hear('"members": 3')


@pytest.mark.timeout(600)
@pytest.mark.parametrize("printed", [True, False])
def test_a_byte_gpt_that_trains_writes_text_elsewhere(tmp_path: Path, printed: bool) -> None:
    pytest.importorskip("torch")
    sizes = ["--width", "32", "--context", "32"]
    small = [*sizes, "--layers", "1", "--test-examples", "16", "--sync-every", "8"]
    train = [str(EXAMPLES / "byte_gpt.py"), *small, "--tokens", str(10**9), "--publish"]
    serve = [str(EXAMPLES / "serve_text.py"), *sizes, "--layers", "1"]
    serve += ["--length", "5", *(["--print", "2"] if printed else ["--port", "0"])]
    with pccl.MasterNode("127.0.0.1:0") as master, Crowd(tmp_path) as crowd:
        crowd.fine = (0,)
        if printed:
            join = {"PCCL_MASTER": master.address}
            for _ in range(2):
                crowd.begin(train, PCCL_MIN_PEERS="2", **join)
        else:
            pccl_run = [sys.executable, "-m", "pccl", "run", "-n", "2", "--show-join", "--"]
            crowd.begin([*pccl_run, sys.executable, *train])
            shown = dict(re.findall(r"(\w+)=(\S+)", crowd.hear("to join: .*")))
            join = {name: shown[name] for name in ("PCCL_MASTER", "PCCL_SECRET")}
        crowd.begin(serve, **join)
        if printed:
            # repr uses double quotes for a text that has an apostrophe
            written = r"""revision \d+: ['"]def main\(.*['"]"""
            first, second = (crowd.hear(written) for _ in range(2))
            assert first.split(":")[0] != second.split(":")[0]
            return
        address = crowd.hear(r"http://127.0.0.1:\d+")
        with urllib.request.urlopen(f"{address}/?prompt=import%20os", timeout=60) as answer:
            assert answer.read().decode().startswith("import os")
            assert int(answer.headers["X-Revision"]) > 0


@pytest.mark.timeout(400)  # two runs
def test_byte_gpt_trains_alone_without_pccl(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    script = [str(EXAMPLES / "byte_gpt.py"), *SMALL_GPT, "--method", "local"]
    script += ["--checkpoints", "run", "--save-every", "1000"]
    [shown] = run_together(tmp_path, [*script, "--tokens", "4000"])
    assert "begins at 0 tokens" in shown and "ends with parameters" in shown
    # The checkpoint has more tokens than that: nothing is left to do.
    [shown] = run_together(tmp_path, [*script, "--tokens", "3000"])
    begins = re.search(r"begins at (\d+) tokens", shown)
    assert begins and int(begins[1]) >= 3000
    assert f'"tokens": {begins[1]}' in shown and "train_bits" not in shown
    assert "ends with parameters" in shown


@pytest.mark.timeout(400)  # two runs
@pytest.mark.parametrize("options", [["--method", "ddp"], ["--mode", "streaming"]])
def test_byte_gpt_starts_with_the_parameters_it_is_given(
    tmp_path: Path, options: list[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    script = [str(EXAMPLES / "byte_gpt.py"), *SMALL_GPT]
    made = ["--method", "local", "--tokens", "1000", "--result", "made.safetensors"]
    [first] = run_together(tmp_path, [*script, *made])
    with pccl.MasterNode("127.0.0.1:0") as master:
        start = [*options, "--start", "made.safetensors", "--tokens", "0"]
        [second] = run_together(tmp_path, [*script, *start], PCCL_MASTER=master.address)
    ends = [re.findall(r'"bits": ([\d.]+)', shown)[-1] for shown in (first, second)]
    assert ends[0] == ends[1]
    checksums = [re.findall(r"ends with parameters (\w+)", shown) for shown in (first, second)]
    assert checksums[0] == checksums[1]


PACKAGES = {"orbax": "orbax-checkpoint"}  # pip's name, where it is another than Python's
OURS = {"numpy", "pccl", "rich"}  # pccl, and what is installed with it
ARGUMENTS = {"flax_orbax": 1, "fsdp_replicas": 1, "jax_replicas": 4, "trackers": 1}  # if any
INTEGRATIONS = sorted((EXAMPLES / "integrations").glob("*.py"))


def foreign_imports(path: Path) -> set[str]:
    """The top-level packages that a program imports and that pccl does not bring along."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names - OURS


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda p: p.stem)
def test_an_integration_says_what_it_needs(path: Path, tmp_path: Path) -> None:
    needs = foreign_imports(path)
    assert needs
    for name in needs:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})\n")
    done = subprocess.run(
        [sys.executable, str(path), *["1"] * ARGUMENTS.get(path.stem, 0)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2 and not done.stdout, done.stdout + done.stderr
    sentence = re.fullmatch(r"(\w+) is missing: pip install (.*)\n", done.stderr)
    assert sentence and sentence[1] in needs, done.stderr
    named = re.split(r"[^\w-]+", sentence[2])
    assert {PACKAGES.get(name, name) for name in needs} <= set(named), done.stderr


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_integration_without_its_arguments_says_how_to_call_it(name: str) -> None:
    path = EXAMPLES / "integrations" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1 and not done.stdout, done.stderr
    assert re.fullmatch(rf"usage: .*{name}\.py( [A-Z]+)+\n", done.stderr), done.stderr


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda p: p.stem)
def test_an_integration_looks_for_all_that_it_needs_before_it_begins(path: Path) -> None:
    first = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Try))
    guarded = ast.unparse(first)
    for name in foreign_imports(path):
        assert re.search(rf"(import|from) {name}\b", guarded), name


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda p: p.stem)
def test_an_example_of_an_integration_has_at_most_40_lines(path: Path) -> None:
    guard = 4 + 2 * (path.stem in ARGUMENTS)  # lines that name a missing package, and the usage
    assert len(path.read_text().splitlines()) <= 40 + guard
