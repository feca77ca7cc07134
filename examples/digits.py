"""Trains a network on handwritten digits with four peers, kills one, lets another join, and checks
the outcome.

    python examples/digits.py

The launcher (the lower half of this file) starts a master and five workers (the upper half) as
processes of their own. Four of them begin: `pccl.sync` gives all the same weights, each takes its
share of every batch, `pccl.allreduce` adds up the gradients. Halfway the launcher kills one worker
with SIGKILL; the others finish the step without it and go on. A little later it tells the fifth to
join: that one receives the weights, the momentum and the step, and takes its share from there. In
the end the launcher compares the weights that the four wrote, byte for byte, and measures the
accuracy on digits that nobody trained on. Exit status 0 means that all of this holds.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import pccl

Weights = dict[str, Any]  # name -> float32 array

PEERS = 4
VICTIM = 1  # whom the launcher kills
NEWCOMER = 4  # who joins later
KILL_AT = 0.5  # of all steps
JOIN_AT = 0.7
BATCH = 128  # digits per step, over all peers
HIDDEN = 512
WANTED_ACCURACY = 0.95
PATIENCE_SECONDS = 120


# ---- the model, in plain NumPy
# -------------------------------------------------------------------------------------


def load_digits() -> tuple[Any, Any, Any, Any]:
    """1797 digits of 8 x 8 pixels, the same shuffle everywhere: images and labels to train on, and
    held-out ones."""
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order].astype(np.float32) / 16, labels[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def make_weights(seed: int) -> Weights:
    """Random weights. Every peer starts from others; `pccl.sync` makes them equal."""
    random = np.random.default_rng(seed)
    sizes = [64, HIDDEN, HIDDEN, 10]
    weights = {}
    for layer, (rows, columns) in enumerate(zip(sizes, sizes[1:], strict=False)):
        scale = np.sqrt(2 / rows)
        weights[f"w{layer}"] = (random.standard_normal((rows, columns)) * scale).astype(np.float32)
        weights[f"b{layer}"] = np.zeros(columns, np.float32)
    return weights


def forward(weights: Weights, images: Any) -> list[Any]:
    """The values of every layer, from the images to the scores of the ten classes."""
    values = [images]
    for layer in range(3):
        value = values[-1] @ weights[f"w{layer}"] + weights[f"b{layer}"]
        values.append(np.maximum(value, 0) if layer < 2 else value)
    return values


def gradients(weights: Weights, images: Any, labels: Any) -> tuple[Weights, float]:
    """Gradients and cross-entropy, summed (not averaged) over these digits."""
    values = forward(weights, images)
    scores = values.pop()
    scores = scores - scores.max(axis=1, keepdims=True)
    log_odds = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    back = np.exp(log_odds)
    back[rows, labels] -= 1
    grads = {}
    for layer in (2, 1, 0):
        grads[f"w{layer}"] = values[layer].T @ back
        grads[f"b{layer}"] = back.sum(axis=0)
        if layer:
            back = (back @ weights[f"w{layer}"].T) * (values[layer] > 0)
    return grads, float(-log_odds[rows, labels].sum())


def accuracy(weights: Weights, images: Any, labels: Any) -> float:
    return float((forward(weights, images)[-1].argmax(axis=1) == labels).mean())


# ---- a worker
# ------------------------------------------------------------------------------


def work(number: int, steps: int, digits_file: Path, weights_file: Path) -> None:
    """One peer: trains, reports a JSON line per step on stdout, and writes its weights in the
    end."""
    images, labels, test_images, test_labels = np.load(digits_file).values()
    print(json.dumps({"ready": number}), flush=True)
    if not sys.stdin.readline():  # the launcher says when to begin; or it is gone
        return

    pccl.init()  # the founders: returns when all four are there. The newcomer: at once
    weights = make_weights(number)
    momentum = {name: np.zeros_like(value) for name, value in weights.items()}
    state: dict[str, Any] = {"step": 0, "weights": weights, "momentum": momentum}
    score = 0.0
    while True:
        began = time.perf_counter()
        received = 0
        # Newcomers come in here. It costs nothing while nobody waits.
        if pccl.admit():
            # They receive what the members hold.
            state, synced = pccl.sync(state, return_info=True)
            received = synced.rx_bytes
        if state["step"] == steps:
            break
        weights, momentum, step = state["weights"], state["momentum"], state["step"] + 1

        # Everybody draws the same batch and takes the share of its rank.
        batch = np.random.default_rng(step).choice(len(images), BATCH, replace=False)
        mine = batch[pccl.rank() :: pccl.world_size()]
        grads, loss = gradients(weights, images[mine], labels[mine])

        # One operation for the whole tree. If a peer dies in it, the survivors' sums are made again
        # without that peer, and `count` says of how many digits they are.
        total, info = pccl.allreduce(
            {"grads": grads, "loss": loss, "count": len(mine)}, return_info=True
        )

        for name, value in weights.items():
            momentum[name] = 0.9 * momentum[name] + total["grads"][name] / total["count"]
            value -= 0.05 * momentum[name]
        state["step"] = step
        seconds = time.perf_counter() - began
        if step % 10 == 0 or step == steps:
            score = accuracy(weights, test_images, test_labels)
        report = {
            "step": step,
            "loss": total["loss"] / total["count"],
            "accuracy": score,
            "peers": info.world_size,
            "rate": (info.tx_bytes + info.rx_bytes) / seconds / 1e6,
            "received": received,
        }
        print(json.dumps(report), flush=True)
    weights_file.write_bytes(b"".join(weights[name].tobytes() for name in sorted(weights)))


# ---- the launcher
# ------------------------------------------------------------------------------


class Workers:
    """The worker processes, and what they report."""

    def __init__(self, master: str, steps: int, folder: Path) -> None:
        numbers = [*range(PEERS), NEWCOMER]
        self.files = [folder / f"weights-{number}.bin" for number in numbers]
        self.errors = [folder / f"stderr-{number}.txt" for number in numbers]
        # Each worker would take a second to import scikit-learn.
        self.digits = folder / "digits.npz"
        np.savez(self.digits, *load_digits())
        self.reports: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.processes = []
        environment = os.environ | {
            "PCCL_MASTER": master,
            "PCCL_BIND": "127.0.0.1",
            "OPENBLAS_NUM_THREADS": "1",  # the peers share this machine's cores
            "OMP_NUM_THREADS": "1",
        }
        for number in numbers:
            command = [sys.executable, __file__, "--worker", str(number), "--steps", str(steps)]
            own = {
                "PCCL_MIN_PEERS": str(1 if number == NEWCOMER else PEERS),
                "PCCL_LOCAL_RANK": str(number),  # peer 0's weights are the first that count
            }
            with self.errors[number].open("wb") as errors:
                process = subprocess.Popen(
                    [*command, "--digits", self.digits, "--weights", self.files[number]],
                    env=environment | own,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            self.processes.append(process)
            threading.Thread(target=self._read, args=(number, process), daemon=True).start()

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith(b"\n"):  # a killed worker may leave half a line
                self.reports.put((number, json.loads(line)))
        self.reports.put((number, None))  # it is gone

    def begin(self, number: int) -> None:
        """That worker may join the run. All have loaded what they need long before."""
        stdin = self.processes[number].stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it has failed; its status tells
            stdin.write(b"go\n")
            stdin.flush()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class Display:
    """The table: live in a terminal, plain lines elsewhere."""

    HEAD = ("step", "loss", "accuracy", "peers", "MB/s")

    def __init__(self, steps: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self.steps = steps
        self.rows: list[tuple[str, ...]] = []
        self.now: tuple[str, ...] | None = None
        self.console = Console()
        self.live = (
            Live(console=self.console, refresh_per_second=10) if self.console.is_terminal else None
        )

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        else:
            print("".join(f"{name:>10}" for name in self.HEAD), flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.now = None
        if self.live:
            self.live.update(self.table())
            self.live.stop()

    def show(self, report: dict[str, Any], rate: float) -> None:
        row = (
            f"{report['step']}/{self.steps}",
            f"{report['loss']:.4f}",
            f"{report['accuracy']:.1%}" if report["accuracy"] else "",
            str(report["peers"]),
            f"{rate:.0f}",
        )
        keep = report["step"] % max(1, self.steps // 10) == 0
        if keep:
            self.rows.append(row)
        self.now = None if keep else row
        if self.live:
            self.live.update(self.table())
        elif keep:
            print("".join(f"{cell:>10}" for cell in row), flush=True)

    def note(self, text: str, color: str) -> None:
        self.rows.append((f"[bold {color}]{text}[/]",))
        if not self.live:
            print(text, flush=True)

    def table(self) -> Any:
        from rich.table import Table

        table = Table(title="pccl: handwritten digits, data-parallel", title_style="bold")
        for name in self.HEAD:
            table.add_column(name, justify="right", min_width=9)
        for row in [*self.rows, *([self.now] if self.now else [])]:
            if len(row) == 1:
                table.add_row("", "", row[0], "", "")
            else:
                table.add_row(*row)
        return table


def unpack(data: bytes) -> Weights:
    """The weights that a worker wrote."""
    weights = make_weights(0)
    at = 0
    for name in sorted(weights):
        shape, size = weights[name].shape, weights[name].size
        weights[name] = np.frombuffer(data, np.float32, size, at).reshape(shape)
        at += size * 4
    return weights


def plot(history: list[dict[str, Any]], events: list[tuple[int, str, str]], path: Path) -> None:
    """The training loss and the accuracy. Events: (step, text, color)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = [report["step"] for report in history]
    axis.plot(steps, [report["loss"] for report in history], color="tab:blue", linewidth=1)
    axis.set(xlabel="step", ylabel="training loss", yscale="log")
    axis.set_title("Four peers: one is killed halfway, another joins")
    for step, text, color in events:
        axis.axvline(step, color=f"tab:{color}", linestyle="--")
        axis.annotate(
            f" {text}",
            (step, 0.5),
            (2, 0),
            ("data", "axes fraction"),
            "offset points",
            color=f"tab:{color}",
        )
    right = axis.twinx()
    scored = [report for report in history if report["accuracy"]]
    right.plot(
        [report["step"] for report in scored],
        [report["accuracy"] for report in scored],
        color="tab:green",
    )
    right.set_ylabel("held-out accuracy", color="tab:green")
    right.set_ylim(0, 1.02)
    figure.savefig(path, dpi=150)


def launch(steps: int, plot_file: Path, svg_file: Path | None) -> int:
    """Starts everything, watches, kills, lets join, and judges. Returns the exit status."""
    history: list[dict[str, Any]] = []  # one report per step, whoever was first
    killed_at = joined_at = received = 0
    ready = 0
    told = False  # the newcomer, to join
    deadline = time.monotonic() + PATIENCE_SECONDS
    with tempfile.TemporaryDirectory() as folder, pccl.MasterNode("127.0.0.1:0") as master:
        workers = Workers(master.address, steps, Path(folder))
        try:
            with Display(steps) as display:
                rate = 0.0
                running = len(workers.processes)
                while running:
                    number, report = workers.reports.get(
                        timeout=max(0.1, deadline - time.monotonic())
                    )
                    if report is None:
                        running -= 1
                        if ready < len(workers.processes):  # it failed to start
                            workers.stop()
                        continue
                    if "ready" in report:
                        ready += 1
                        if ready == len(workers.processes):
                            for founder in range(PEERS):
                                workers.begin(founder)
                        continue
                    if number == NEWCOMER and not joined_at and report["step"] > 1:
                        joined_at, received = report["step"], report["received"]
                        display.note("JOIN", "green")
                    if report["step"] <= len(history):
                        continue
                    history.append(report)
                    rate = report["rate"] if rate == 0 else 0.9 * rate + 0.1 * report["rate"]
                    display.show(report, rate)
                    if not killed_at and report["step"] >= steps * KILL_AT:
                        workers.processes[VICTIM].kill()
                        killed_at = report["step"]
                        display.note("SIGKILL", "red")
                    elif not told and report["peers"] < PEERS and report["step"] >= steps * JOIN_AT:
                        workers.begin(NEWCOMER)
                        told = True
            statuses = [process.wait(10) for process in workers.processes]
        except queue.Empty:
            print(
                f"FAILED: no report for so long that {PATIENCE_SECONDS} s were over",
                file=sys.stderr,
            )
            return 1
        finally:
            workers.stop()

        for number, status in enumerate(statuses):
            if status not in (0, -signal.SIGKILL):
                print(
                    f"worker {number} failed:\n{workers.errors[number].read_text()}",
                    file=sys.stderr,
                )
        survivors = [number for number, status in enumerate(statuses) if status == 0]
        written = [
            workers.files[number].read_bytes()
            for number in survivors
            if workers.files[number].exists()
        ]

    hashes = [hashlib.sha256(data).hexdigest() for data in written]
    _, _, images, labels = load_digits()
    score = accuracy(unpack(written[0]), images, labels) if written else 0.0
    sizes = [peers for peers, _ in itertools.groupby(report["peers"] for report in history)]
    claims = {
        f"peer {VICTIM} was killed at step {killed_at}, the others went on without it": (
            statuses[VICTIM] == -signal.SIGKILL and sizes[:2] == [PEERS, PEERS - 1]
        ),
        f"a newcomer joined at step {joined_at} and received {received / 1e6:.1f} MB": (
            joined_at > 0 and received > 0 and sizes == [PEERS, PEERS - 1, PEERS]
        ),
        f"{len(survivors)} peers finished all {steps} steps": (
            len(survivors) == PEERS and len(history) == steps
        ),
        f"their weights are bit-identical (SHA-256 {hashes[0][:16] if hashes else '-'}...)": (
            len(hashes) == PEERS and len(set(hashes)) == 1
        ),
        f"held-out accuracy {score:.2%}, wanted more than {WANTED_ACCURACY:.0%}": score
        > WANTED_ACCURACY,
    }
    lines = [f"{'yes' if holds else 'NO '}  {claim}" for claim, holds in claims.items()]
    print("\n".join(lines), flush=True)
    if history:
        events = [(killed_at, "SIGKILL", "red"), (joined_at, "join", "purple")]
        plot(history, [event for event in events if event[0]], plot_file)
        print(f"plot: {plot_file}")
    if svg_file:
        from rich.console import Console

        record = Console(record=True, file=io.StringIO(), width=90)
        record.print(display.table())
        record.print("\n".join(lines))
        svg = record.export_svg(title="make demo")
        svg_file.write_text(re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL))  # no web fonts
    return 0 if all(claims.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="batches to train on (default: 400)")
    parser.add_argument("--plot", type=Path, default=Path("digits.png"), help="where the plot goes")
    parser.add_argument("--svg", type=Path, help="also save the table as an SVG picture")
    # Be a worker: which one, where the digits are, and where its weights go.
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--digits", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.steps, options.digits, options.weights)
        return 0
    try:
        import matplotlib  # noqa: F401
        import sklearn.datasets  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"{error.name} is missing: pip install 'pccl-collectives[demo]'", file=sys.stderr)
        return 2
    return launch(options.steps, options.plot, options.svg)


if __name__ == "__main__":
    sys.exit(main())
