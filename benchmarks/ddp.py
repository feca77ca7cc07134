"""Step times of DDP on this host: backend "pccl" against "gloo", interleaved in one run.

    python benchmarks/ddp.py                     # world sizes 2 and 4, two models, a table
    python benchmarks/ddp.py --quick --json build/ddp.json

All ranks are processes of this host. Each has two copies of the model, one on a group of each
backend, and trains them in turn, a block of steps each; a block's time is that of its slowest rank.
`alone` is a step without any exchange (DDP's no_sync), with all ranks computing at once.
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
from together import ratio_quartiles, run_ranks

PATIENCE = timedelta(seconds=300)
BACKENDS = ("gloo", "pccl")


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
        times: dict[str, list[float]] = {"alone": [], **{backend: [] for backend in BACKENDS}}
        for block in range(args.blocks + 1):  # the first one warms up
            order = BACKENDS if block % 2 else BACKENDS[::-1]
            for backend in order:
                times[backend].append(steps(nets[backend], make, args.steps, alone=False))
            times["alone"].append(steps(nets["gloo"], make, args.steps, alone=True))
        ours, theirs = (
            torch.cat([p.detach().flatten() for p in nets[backend].parameters()])
            for backend in BACKENDS
        )
        if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3):
            raise SystemExit(f"{name}: the two backends trained different models")
        if args.rank == 0:
            parameters = sum(p.numel() for p in net.parameters())
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
        outputs = run_ranks([[*command, "--rank", str(rank)] for rank in range(world)], env)
    return [{"world": world, **json.loads(line)} for line in outputs[0].splitlines()]


def table(found: list[dict[str, Any]]) -> str:
    """Medians over blocks; `pccl / gloo` is the median of the blocks' ratios, with its
    quartiles."""
    lines = [
        "| model | parameters | world | alone ms | gloo ms | pccl ms | pccl / gloo | quartiles |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ms = row["ms"]
        alone, gloo, ours = (statistics.median(ms[kind]) for kind in ("alone", "gloo", "pccl"))
        low, middle, high = ratio_quartiles(ms["pccl"], ms["gloo"])
        lines.append(
            f"| {row['model']} | {row['parameters'] / 1e6:.1f} M | {row['world']} | {alone:.0f} | {gloo:.0f} | "
            f"{ours:.0f} | {middle:.2f} | {low:.2f} - {high:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="per block")
    parser.add_argument("--quick", action="store_true", help="two blocks of one step")
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
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
