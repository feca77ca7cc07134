"""Step times of DDP on this host: backend "pccl" against "gloo", interleaved in one run.

    python benchmarks/ddp.py                     # world sizes 2 and 4, two models, a table
    python benchmarks/ddp.py --quick --json build/ddp.json
    python benchmarks/ddp.py --tcp               # pccl over TCP, as Gloo

All ranks are processes of this host. Each has two copies of the model, one on a group of each
backend, and trains them in turn, a block of steps each; a block's time is that of its slowest rank.
`alone` is a step without any exchange (DDP's no_sync), with all ranks computing at once. `bound` is
`alone` and one all-reduce of all gradients' bytes in one tensor by backend "pccl", measured in the
same block. The goal: a step of "pccl" takes at most 3 % longer. DDP reduces while it computes, so
it can also be shorter.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install 'pccl-collectives[bench]'", file=sys.stderr)
    sys.exit(2)
from report import by_block, goal, ratio
from together import ratio_quartiles, run_ranks

PATIENCE = timedelta(seconds=300)
BACKENDS = ("gloo", "pccl")
GOAL = 1.03  # times the bound


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The shape of a ResNet-50: 25.6 million parameters in 161 tensors, on small images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if block == 0 else 1))
            inputs = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
    return nn.Sequential(*layers), lambda: torch.randn(2, 3, 64, 64)


def transformer() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A transformer of 12 layers, 768 wide: 85 million parameters in 144 tensors, on short
    sequences."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 12), lambda: torch.randn(1, 32, 768)


MODELS = {"resnet": resnet, "transformer": transformer}


def steps(net: nn.Module, make: Callable[[], torch.Tensor], count: int, *, alone: bool) -> float:
    """Milliseconds for a step, of `count`."""
    assert isinstance(net, DistributedDataParallel)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    inputs = make()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        optimizer.zero_grad(set_to_none=False)
        with net.no_sync() if alone else nullcontext():
            net(inputs).square().mean().backward()
        optimizer.step()
    return slowest_since(begin, count)


def check_gradients(
    nets: dict[str, DistributedDataParallel], make: Callable[[], torch.Tensor], rank: int
) -> None:
    """Both backends average alike, and all ranks have the same bytes."""
    inputs = (1 + rank) * make()
    found = {}
    for backend, net in nets.items():
        net.zero_grad()
        net(inputs).square().mean().backward()
        found[backend] = torch.cat(
            [g.flatten() for p in net.parameters() if (g := p.grad) is not None]
        )
    ours, theirs = (found[backend] for backend in BACKENDS)
    if (ours - theirs).norm() > 1e-4 * theirs.norm():
        raise SystemExit("the two backends have different gradients")
    others = ours.clone()
    dist.broadcast(others, 0)
    if not torch.equal(ours, others):
        raise SystemExit("ranks have different gradients")


def reductions(gradients: torch.Tensor, group: dist.ProcessGroup, count: int) -> float:
    """Milliseconds for an all-reduce of as many bytes as all gradients have, of `count`."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(gradients, group=group)
    return slowest_since(begin, count)


def slowest_since(begin: float, count: int) -> float:
    """Milliseconds for one of `count`, on the slowest rank."""
    took = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return 1000 * took.item() / count


def rank_main(args: argparse.Namespace) -> None:
    import pccl.adapters.torch  # noqa: F401  # makes the backend known

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.world))
    store = dist.FileStore(args.store, args.world)
    dist.init_process_group(
        "gloo", store=store, rank=args.rank, world_size=args.world, timeout=PATIENCE
    )
    groups = {name: dist.new_group(backend=name, timeout=PATIENCE) for name in BACKENDS}
    for name in args.models:
        torch.manual_seed(0)
        net, make = MODELS[name]()
        nets = {
            backend: DistributedDataParallel(copy.deepcopy(net), process_group=groups[backend])
            for backend in BACKENDS
        }
        check_gradients(nets, make, args.rank)
        parameters = sum(p.numel() for p in net.parameters())
        gradients = torch.zeros(parameters)
        times: dict[str, list[float]] = {kind: [] for kind in ("alone", "reduction", *BACKENDS)}
        for block in range(args.blocks + 1):  # the first one warms up
            order = BACKENDS if block % 2 else BACKENDS[::-1]
            for backend in order:
                times[backend].append(steps(nets[backend], make, args.steps, alone=False))
            times["alone"].append(steps(nets["gloo"], make, args.steps, alone=True))
            times["reduction"].append(reductions(gradients, groups["pccl"], args.steps))
        if args.rank == 0:
            found = {kind: values[1:] for kind, values in times.items()}
            print(json.dumps({"model": name, "parameters": parameters, "ms": found}), flush=True)
        del nets
    dist.destroy_process_group()


def run(world: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One world: what its rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--world", str(world), "--store", f"{folder}/store"]
        command += ["--blocks", str(args.blocks), "--steps", str(args.steps)]
        command += ["--models", *args.models]
        env = {**os.environ, "PCCL_BIND": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        env["PCCL_SHM"] = "0" if args.tcp else "1"
        outputs = run_ranks([[*command, "--rank", str(rank)] for rank in range(world)], env)
    about = {"world": world, "transport": "tcp" if args.tcp else "shm"}
    return [{**about, **json.loads(line)} for line in outputs[0].splitlines()]


def bounds(row: dict[str, Any]) -> list[float]:
    """Milliseconds of a step without exchange and of an all-reduce, by block."""
    return [sum(both) for both in zip(row["ms"]["alone"], row["ms"]["reduction"], strict=True)]


def bound_goal(row: dict[str, Any]) -> dict[str, Any]:
    """Prints it."""
    parts = by_block(row["ms"]["pccl"], bounds(row))
    name = f"DDP, {row['model']}, {row['world']} ranks, {row['transport']}: step, of no exchange "
    name += "and an all-reduce"
    return goal(name, statistics.median(parts), parts, ratio, at_most=GOAL)


def table(found: list[dict[str, Any]]) -> str:
    """Medians over blocks; `pccl / gloo` is the median of the blocks' ratios, with its
    quartiles."""
    lines = [
        "| model | parameters | world | alone ms | bound ms | gloo ms | pccl ms | pccl / gloo | "
        "quartiles | pccl / bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ms = row["ms"]
        alone, gloo, ours = (statistics.median(ms[kind]) for kind in ("alone", "gloo", "pccl"))
        low, middle, high = ratio_quartiles(ms["pccl"], ms["gloo"])
        least = statistics.median(bounds(row))
        of_bound = statistics.median(by_block(ms["pccl"], bounds(row)))
        lines.append(
            f"| {row['model']} | {row['parameters'] / 1e6:.1f} M | {row['world']} | {alone:.0f} | {least:.0f} | "
            f"{gloo:.0f} | {ours:.0f} | {middle:.2f} | {low:.2f} - {high:.2f} | {of_bound:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="per block")
    parser.add_argument("--quick", action="store_true", help="two blocks of one step")
    parser.add_argument("--tcp", action="store_true", help="pccl shares no memory: PCCL_SHM=0")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.blocks, args.steps = 2, 1
    if args.rank is not None:
        rank_main(args)
        return
    found = [row for world in args.worlds for row in run(world, args)]
    print(table(found), "\n")
    for row in found:
        row["goal"] = bound_goal(row)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
