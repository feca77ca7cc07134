"""Sparse codes that owners reduce, beside codes that members gather, simulated.

    python benchmarks/training/owners.py --members 8 --seeds 0 1 2
    python benchmarks/training/owners.py --members 16 --more 1 2 4
    python benchmarks/training/owners.py --quick

Members train the GPT of schedules.py in one process, with the library's own codes. All forms begin
with the same parameters, which the program makes with `--pretrain` steps of data-parallel training,
and see the same examples. `above` is the mean of the seeds' ratios to the first form. `bytes` are
what a member sends in a round, without headers. `--more`: an owner sends so many times the elements
of each chunk that a member sends. Default: what the library does with so many members.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))

import byte_gpt
import torch
from report import announce
from schedules import Models, data, order_of

from pccl.diloco import Sparse
from pccl.training.diloco.owners import Owners
from pccl.training.diloco.sparse import Sparsifier, plain_shares

Outer = dict[str, np.ndarray]


class Form(NamedTuple):
    """How members reduce; `more` 0: they gather. None: they reduce gradients in every step."""

    name: str
    more: int | None


class Group:
    """The members' codes of one run."""

    def __init__(self, like: Sequence[np.ndarray], members: int, more: int) -> None:
        self._members = [Sparsifier(Sparse(), like) for _ in range(members)]
        self._owners = None
        self.bytes = (members - 1) * self._members[0].size
        if more:
            self._owners = Owners(self._members[0], members, more)
            self.bytes = (members - 1) * (self._owners.part_bytes + self._owners.code_bytes)

    def mean(self, gradients: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """The mean that all members get from the pseudo-gradients of each."""
        each = zip(self._members, gradients, strict=True)
        codes = np.stack([member.encode(one) for member, one in each])
        weights = [1.0] * len(codes)
        if self._owners is None:
            return self._members[0].mean(codes, weights).arrays
        parts = np.stack([self._owners.parts(code) for code in codes], axis=1)
        shares = plain_shares(weights).shares
        made = [self._owners.reduce(rank, part, shares) for rank, part in enumerate(parts)]
        return self._owners.mean(np.stack(made))


def train(
    args: argparse.Namespace, form: Form, seed: int, steps: int, begun: Outer | None
) -> tuple[float, int, Outer]:
    """One run. Returns the bits per byte, the bytes of a member in a round, and the parameters."""
    examples, test = data(args)
    models = Models(args, ddp=form.more is None)
    with torch.no_grad():
        for name, array in models.arrays.items():
            if begun is not None:
                array.copy_(torch.from_numpy(begun[name]).expand_as(array))
    outer = {name: array[0].detach().numpy().copy() for name, array in models.arrays.items()}
    group = Group(list(outer.values()), args.members, form.more or 0)
    args.steps = steps
    order = torch.from_numpy(order_of(args, 100 + seed, len(examples)))
    for step in range(1, steps + 1):
        models.rows.copy_(examples[order[step - 1]])
        models.lr.fill_(args.lr * byte_gpt.rate_at((step - 1) / steps))
        models.step()
        if form.more is None or step % args.every:
            continue
        own = [models.arrays[name].detach().numpy() for name in outer]
        begun_at = list(outer.values())
        gradients = [
            [was - mine[member] for was, mine in zip(begun_at, own, strict=True)]
            for member in range(args.members)
        ]
        for name, mean in zip(outer, group.mean(gradients), strict=True):
            outer[name] = outer[name] - np.float32(args.outer_lr) * mean
        with torch.no_grad():
            for name, array in models.arrays.items():
                array.copy_(torch.from_numpy(outer[name]).expand_as(array))
    if form.more is None:
        outer = {name: array[0].detach().numpy().copy() for name, array in models.arrays.items()}
    bits = models.evaluate(models.arrays, test)[0]
    return bits, group.bytes, outer


def start_of(args: argparse.Namespace) -> Outer:
    """The parameters that all runs begin with, kept in the file of `--start`, if there is one."""
    if args.start and args.start.exists():
        return dict(np.load(args.start))
    bits, _, begun = train(args, Form("", None), 1000, args.pretrain, None)
    print(f"all start with {bits:.3f} bits per byte", flush=True)
    if args.start:
        np.savez(args.start, **begun)
    return begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--more", type=int, nargs="*")
    parser.add_argument("--ddp", action="store_true", help="data-parallel training, too")
    parser.add_argument("--every", type=int, default=25, help="steps a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pretrain", type=int, default=1000, help="steps before")
    parser.add_argument("--start", type=Path, help="keeps the parameters after these, .npz")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--outer-lr", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tiny model, and few steps")
    args = parser.parse_args()
    args.heads, args.device, args.test_examples = 4, "cpu", 256
    if args.quick:
        args.width, args.layers, args.context, args.test_examples = 32, 1, 32, 16
        args.every, args.rounds, args.pretrain, args.seeds = 5, 3, 5, args.seeds[:1]
    torch.set_num_threads(args.threads)
    seeds, args.seeds = args.seeds, 1  # of `Models`: one run at a time
    announce(["torch"])
    begun = start_of(args)
    chosen = [args.members] if args.more is None else args.more
    forms = [Form("gathered", 0), *(Form(f"owners, {more} times", more) for more in chosen)]
    if args.ddp:
        forms.append(Form("data-parallel", None))
    print("| form | bits per byte | | above gathered | bytes | s |\n|---|---|---|---|---|---|")
    first: list[float] = []
    for form in forms:
        began = time.perf_counter()
        runs = [train(args, form, seed, args.rounds * args.every, begun) for seed in seeds]
        bits = [run[0] for run in runs]
        first = first or bits
        above = statistics.mean(100 * (a / b - 1) for a, b in zip(bits, first, strict=True))
        spread = (max(bits) - min(bits)) / 2
        sent = f"{runs[0][1]:,}" if form.more is not None else ""
        took = time.perf_counter() - began
        print(
            f"| {form.name} | {statistics.mean(bits):.3f} | ± {spread:.3f} | {above:+.1f} % "
            f"| {sent} | {took:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
