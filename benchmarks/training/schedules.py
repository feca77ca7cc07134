"""When to reduce in a run from random parameters: data-parallel training and DiLoCo, simulated.

    python benchmarks/training/schedules.py                     # a GPU, four minutes
    python benchmarks/training/schedules.py --lr 0.002 --every 50 --warm-up 0 7 14 28
    python benchmarks/training/schedules.py --quick --device cpu

The model, data, learning rate schedule and inner optimizer are those of examples/byte_gpt.py with
four members. The members of three seeds are one batch of models on one device, and nothing is sent:
a run takes seconds. `DiLoCo`'s own plan says after which steps members reduce. Each learning rate
is tried with each schedule. `to ddp` is the ratio to the best learning rate of ddp, which is the
same program with the mean of the gradients in every step.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))

import byte_gpt
from report import announce

from pccl.training.diloco.options import Options, Plan

BATCH = 2
Arrays = dict[str, torch.Tensor]


class Models:
    """GPTs of the same shape, one for each member of each seed. All arrays begin with that axis.

    `step` is one training step of all of them, as one CUDA graph where there is CUDA.
    """

    def __init__(self, args: argparse.Namespace, *, ddp: bool) -> None:
        self._ddp, self._seeds, self._members = ddp, args.seeds, args.members
        self._width, self._layers, self._heads = args.width, args.layers, args.heads
        self._device = torch.device(args.device)
        begun = []
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            model = byte_gpt.ByteGPT(args.width, args.layers, args.heads)
            begun += [dict(model.named_parameters())] * args.members
        self._begun = {
            name: torch.stack([one[name].detach() for one in begun]).to(self._device)
            for name in begun[0]
        }
        self.arrays = {name: a.clone().requires_grad_() for name, a in self._begun.items()}
        # Of AdamW: two means and the number of steps.
        self._first = [torch.zeros_like(a) for a in self._begun.values()]
        self._second = [torch.zeros_like(a) for a in self._begun.values()]
        self._steps = torch.zeros((), device=self._device)
        self.lr = torch.zeros((), device=self._device)
        shape = (args.seeds * args.members, BATCH, args.context + 1)
        self.rows = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._graph: Any = None
        if self._device.type == "cuda":
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream().wait_stream(beside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()

    @torch.no_grad()
    def reset(self) -> None:
        """All begin as their seed says."""
        for name, array in self.arrays.items():
            array.copy_(self._begun[name])
        for mean in (*self._first, *self._second, self._steps):
            mean.zero_()

    def mean(self, array: torch.Tensor) -> torch.Tensor:
        """Each member gets its group's mean."""
        groups = array.unflatten(0, (self._seeds, self._members))
        return groups.mean(1, keepdim=True).expand_as(groups).flatten(0, 1)

    def losses(self, arrays: Arrays, rows: torch.Tensor) -> torch.Tensor:
        """Each model's mean loss, as byte_gpt.ByteGPT computes it."""
        models, batch, length = rows.shape[0], rows.shape[1], rows.shape[2] - 1
        heads = (models * batch, length, 3, self._heads, self._width // self._heads)

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            x = functional.layer_norm(x, x.shape[-1:])
            return x * arrays[f"{name}.weight"][:, None] + arrays[f"{name}.bias"][:, None]

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            weight, bias = arrays[f"{name}.weight"], arrays[f"{name}.bias"]
            return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))

        places = rows[:, :, :-1].reshape(models, -1, 1).expand(-1, -1, self._width)
        x = torch.gather(arrays["bytes.weight"], 1, places)
        for layer in range(self._layers):
            block = f"blocks.{layer}"
            mixed = linear(norm(x, f"{block}.norm1"), f"{block}.qkv").view(heads)
            q, k, v = mixed.permute(2, 0, 3, 1, 4)
            q, k = byte_gpt.turned(q), byte_gpt.turned(k)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(x.shape)
            x = x + linear(mixed, f"{block}.out")
            wide = functional.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.0"))
            x = x + linear(wide, f"{block}.mlp.2")
        logits = norm(x, "norm") @ arrays["bytes.weight"].transpose(1, 2)
        each = functional.cross_entropy(
            logits.flatten(0, 1), rows[:, :, 1:].flatten(), reduction="none"
        )
        return each.view(models, -1).mean(1)

    @torch.no_grad()
    def evaluate(self, arrays: Arrays, test: torch.Tensor) -> list[float]:
        """Bits per byte of each seed, of its first member."""
        own = {name: array[:: self._members] for name, array in arrays.items()}
        total = torch.zeros(self._seeds, device=self._device)
        for part in test.split(16):
            total += self.losses(own, part.expand(self._seeds, -1, -1)) * len(part)
        return [float(bits) for bits in total / len(test) / math.log(2)]

    def step(self) -> None:
        """Trains all models on `rows` with `lr`."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        arrays = list(self.arrays.values())
        gradients = torch.autograd.grad(self.losses(self.arrays, self.rows).sum(), arrays)
        with torch.no_grad():
            if self._ddp:
                gradients = tuple(map(self.mean, gradients))
            length = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
            scale = (1.0 / (length + 1e-6)).clamp(max=1.0)
            clipped = [g * scale.view(-1, *[1] * (g.dim() - 1)) for g in gradients]
            self._steps += 1
            for array, gradient, first, second in zip(
                arrays, clipped, self._first, self._second, strict=True
            ):
                first.lerp_(gradient, 0.1)
                second.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
                deviation = (second / (1 - 0.95**self._steps)).sqrt() + 1e-8
                array.mul_(1 - 0.1 * self.lr)
                array.sub_(self.lr / (1 - 0.9**self._steps) * first / deviation)


def train(
    args: argparse.Namespace, models: Models, lr: float, plan: Plan | None
) -> tuple[list[float], int]:
    """One run; `plan`: of DiLoCo. Returns the bits per byte of each seed, and the reductions."""
    examples, test = data(args)
    models.reset()
    orders = [order_of(args, 100 + seed, len(examples)) for seed in range(args.seeds)]
    order = torch.from_numpy(np.concatenate(orders, axis=1)).to(args.device)
    outer = {name: array.detach().clone() for name, array in models.arrays.items()}
    velocity = {name: torch.zeros_like(array) for name, array in outer.items()}
    reductions = 0
    for step in range(1, args.steps + 1):
        models.rows.copy_(examples[order[step - 1]])
        models.lr.fill_(lr * byte_gpt.rate_at((step - 1) / args.steps))
        models.step()
        if plan is None or not plan.leaving(step):
            continue
        reductions += 1
        plain = plan.is_plain(step) and not args.momentum_from_the_start
        with torch.no_grad():
            for name, array in models.arrays.items():
                change = outer[name] - models.mean(array)
                if not plain:
                    velocity[name].mul_(args.outer_momentum).add_(change)
                    change = args.outer_lr * (change + args.outer_momentum * velocity[name])
                outer[name] -= change
                array.copy_(outer[name])
    return models.evaluate(models.arrays if plan is None else outer, test), reductions


def order_of(args: argparse.Namespace, seed: int, examples: int) -> np.ndarray:
    """The examples of each step, member and row."""
    random = np.random.default_rng(seed)
    count = args.steps * args.members * BATCH
    epochs = [random.permutation(examples) for _ in range(count // examples + 1)]
    return np.concatenate(epochs)[:count].reshape(args.steps, args.members, BATCH)


@functools.cache
def _text() -> tuple[np.ndarray, np.ndarray]:
    return byte_gpt.load_text()


def data(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples to train on, and held-out ones."""
    examples, test = (
        torch.from_numpy(byte_gpt.windows(text, args.context).astype(np.int64)).to(args.device)
        for text in _text()
    )
    return examples, test[:: max(1, len(test) // args.test_examples)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--every", type=int, nargs="+", default=[10, 20, 50], help="steps a round")
    parser.add_argument("--warm-up", type=int, nargs="+", default=[0, 14], help="rounds")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--momentum-from-the-start", action="store_true", help="no plain means")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model, and few steps")
    args = parser.parse_args()
    args.width, args.layers, args.heads, args.context, args.test_examples = 128, 5, 4, 128, 256
    if args.quick:
        args.width, args.layers, args.context, args.test_examples, args.steps = 32, 1, 32, 16, 40
        args.lr, args.every, args.warm_up = args.lr[:1], [10], [0, 2]
    torch.set_num_threads(1)  # the arrays of a step are small, where there is no GPU
    announce(["torch"])
    print("| schedule | learning rate | bits per byte | | to ddp | reductions | s |")
    print("|---|---|---|---|---|---|---|")
    schedules: list[tuple[str, Plan | None]] = [("ddp", None)]
    for every in args.every:
        for rounds in args.warm_up:
            plan = Plan.of(Options(every, warm_up=rounds), ["parameters"], [1])
            warm_up = f", warm_up={rounds}" if rounds else ""
            schedules.append((f"sync_every={every}{warm_up}", plan))
    best = math.inf
    made = {ddp: Models(args, ddp=ddp) for ddp in (True, False)}
    for name, plan in schedules:
        for lr in args.lr:
            began = time.perf_counter()
            bits, reductions = train(args, made[plan is None], lr, plan)
            mean, spread = statistics.mean(bits), (max(bits) - min(bits)) / 2
            best = min(best, mean) if plan is None else best
            more = "" if plan is None else f"{100 * (mean / best - 1):+.1f} %"
            took = time.perf_counter() - began
            print(
                f"| {name} | {lr:g} | {mean:.3f} | ± {spread:.3f} | {more} "
                f"| {reductions or args.steps} | {took:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
