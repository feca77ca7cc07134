"""A GPT on bytes, trained on the sources of Python's standard library by machines that come and go.

    pccl run -n 4 -- python examples/byte_gpt.py --plot loss.svg
    pccl run -n 4 --elastic -- python examples/byte_gpt.py --quantize int8 --checkpoints run

Every process is a member. Kill one, and the others go on; what it had taken of the data is taken by
others. Start one more with the same PCCL_MASTER, and it receives everything at the end of the
round. Kill all, start again with the same `--checkpoints`, and the run goes on. `--method ddp`
averages gradients after every step instead, for comparison, and `--method local` is one process
without pccl.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import sysconfig
import time
import zlib
from pathlib import Path

import numpy as np

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ModuleNotFoundError as error:
    print(
        f"{error.name} is missing: pip install 'pccl-collectives[torch,checkpoint]'",
        file=sys.stderr,
    )
    sys.exit(2)

import pccl
from pccl import checkpoint
from pccl.adapters.torch import DiLoCo
from pccl.data import ElasticSampler
from pccl.diloco import Robust, Sparse


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """All modules of the standard library that are one file, in order of their names; every 16th is
    held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = files[8::16]
    texts = [b"".join(f.read_bytes() for f in files if (f in held_out) == out) for out in (0, 1)]
    return np.frombuffer(texts[0], np.uint8), np.frombuffer(texts[1], np.uint8)


def windows(text: np.ndarray, context: int) -> np.ndarray:
    """Examples: `context` bytes and the one after them; they overlap by that one."""
    count = (len(text) - 1) // context
    return np.lib.stride_tricks.sliding_window_view(text, context + 1)[: count * context : context]


@functools.cache
def turns(length: int, size: int, device: torch.device) -> torch.Tensor:
    """By how much each place turns each pair of a head's numbers: rotary embeddings (arXiv
    2104.09864)."""
    speeds = 1000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(length), speeds)
    return torch.polar(torch.ones_like(angles), angles).to(device)


def turned(x: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns(*x.shape[-2:], x.device)).flatten(-2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class ByteGPT(nn.Module):
    """Returns the mean loss in nats per byte of rows of context + 1 bytes."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # what adds to the residual stream begins smaller
                last = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns those of the byte after each one."""
        return self.norm(self.blocks(self.bytes(rows))) @ self.bytes.weight.T

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.logits(rows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, parameters: dict, examples: np.ndarray) -> float:
    """Bits per byte with these parameters; {}: with the model's own."""
    device = next(model.parameters()).device
    parameters = {name: tensor.to(device) for name, tensor in parameters.items()}
    parts = torch.from_numpy(examples.astype(np.int64)).to(device).split(64)
    nats = sum(torch.func.functional_call(model, parameters, (x,)) * len(x) for x in parts)
    return float(nats) / len(examples) / math.log(2)


def inner_optimizers(model: ByteGPT, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices of blocks and AdamW for the rest, as MuLoCo does (arXiv
    2505.23725). Muon's steps are scaled to be as long as AdamW's: one learning rate fits both."""
    named = dict(model.named_parameters())
    muon = {n for n, p in named.items() if n.startswith("blocks.") and p.dim() == 2}
    muon = muon if args.inner == "muon" else set()
    rest = [p for n, p in named.items() if n not in muon]
    made: list = [torch.optim.AdamW(rest, args.lr, betas=(0.9, 0.95), weight_decay=0.1)]
    if muon:
        matrices = [p for n, p in named.items() if n in muon]
        made.append(torch.optim.Muon(matrices, args.lr, adjust_lr_fn="match_rms_adamw"))
    return made


# ---- training
# ------------------------------------------------------------------------------


@torch.no_grad()
def spoil(model: nn.Module, begun: dict, factor: float) -> None:
    """Plays a hostile member: what the model has learned since `begun`, times `factor`."""
    for name, parameter in model.named_parameters():
        before = begun[name].to(parameter.device)
        parameter.copy_(before + factor * (parameter - before))


def rate_at(progress: float) -> float:
    """Learning rate: a warm-up over a twentieth of the tokens, then a cosine to a tenth."""
    return min(20 * progress + 0.01, 0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0)))


def train(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    examples, test = (windows(text, args.context) for text in load_text())
    test = test[:: max(1, len(test) // args.test_examples)]
    model = ByteGPT(args.width, args.layers, args.heads).to(args.device)
    if args.start:
        checkpoint.load(args.start, {"model": model})
    inner = inner_optimizers(model, args)
    sampler = ElasticSampler(len(examples), batch_size=args.batch_size, seed=args.seed)
    state: dict = {"model": model, "optimizers": inner, "sampler": sampler}
    diloco = None
    if args.method != "local":
        pccl.init()
    if args.method == "diloco":
        sparse = None if args.density is None else Sparse(args.density)
        diloco = DiLoCo(
            model,
            inner,
            sync_every=args.sync_every,
            warm_up=args.warm_up,
            round_seconds=args.round_seconds,
            outer_lr=args.outer_lr,
            outer_momentum=args.outer_momentum,
            mode=args.mode,
            overlap=args.overlap,
            quantize=args.quantize,
            compression=sparse,
            robust=args.robust and Robust(args.robust, against=args.against),
            quorum=args.quorum,
            grace_seconds=args.grace_seconds,
            background_join=args.quorum is not None,  # who was late waits alone for the state
            data=sampler,  # its place is shared, and settled by each round's reduction
            rejoin=pccl.init,
            join=False,
        )
        state = {"diloco": diloco, "sampler": sampler}

    if args.checkpoints:
        checkpoint.resume(args.checkpoints, state)

    def tokens_taken() -> int:
        """By all members together; equal on all. In flight is what no reduction has brought in yet;
        nobody knows how much that is in rounds that end by their time."""
        in_flight = 0 if args.round_seconds else sampler.in_flight
        return (sampler.committed + in_flight) * args.context

    def revision() -> int:
        """The state's revision: the highest one counts when the run is resumed."""
        return diloco.outer_step if diloco else tokens_taken()

    if diloco:
        diloco.join()  # a newcomer waits here for the end of a round, and receives everything
    elif args.method == "ddp":
        pccl.sync(state, revision=revision())

    def shared_parameters() -> dict:
        return diloco.parameters if diloco else dict(model.named_parameters())

    def leads() -> bool:
        return args.method == "local" or pccl.rank() == 0

    def report() -> None:
        line = {
            "tokens": tokens_taken(),
            "bits": evaluate(model, shared_parameters(), test),  # per byte
            "members": info.world_size if info else 1,
            "tx_bytes": tx_bytes,  # by this member
            "hidden": diloco.hidden if diloco else 0.0,  # share of the reductions' time
            "seconds": time.perf_counter() - began,
        }
        if loss is not None:
            line["train_bits"] = loss.item() / math.log(2)
        curve.append((line["tokens"], line["bits"]))
        print(json.dumps(line), flush=True)

    def save() -> None:
        """No collective call: a newcomer that was let in at this step does not come here."""
        if leads():
            file = Path(args.checkpoints) / f"{tokens_taken():012}.safetensors"
            checkpoint.save(file, state, revision=revision(), keep=3)

    loss, info, tx_bytes, curve, round_ended = None, None, 0, [], True
    reported = saved = tokens_taken()
    # With a quorum the others may go on while one evaluates. In the last round it would come back
    # to a run that has ended.
    last_report = (0.9 if args.quorum else 1.0) * args.tokens
    waited, stalls = 0.0, 0
    print(f"begins at {saved} tokens", flush=True)
    while tokens_taken() < args.tokens or not round_ended:
        for group in (group for optimizer in inner for group in optimizer.param_groups):
            group["lr"] = args.lr * rate_at(tokens_taken() / args.tokens)
        step_began = time.perf_counter()
        batch = torch.from_numpy(examples[sampler.take()].astype(np.int64)).to(args.device)
        model.zero_grad()
        loss = model(batch)
        loss.backward()
        if args.method == "ddp":
            grads = {name: parameter.grad for name, parameter in model.named_parameters()}
            how: dict = {"out": grads, "quantize": args.quantize, "return_info": True}
            waits = time.perf_counter()
            _, info = pccl.allreduce(grads, "avg", **how)
            waited += time.perf_counter() - waits
            tx_bytes += info.tx_bytes
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in inner:
            optimizer.step()
        if args.step_seconds:
            time.sleep(max(0.0, step_began + args.step_seconds - time.perf_counter()))
        if args.stall and tokens_taken() > args.tokens * (1 + stalls) / 4 and stalls < 2:
            stalls += 1
            print(f"stalls for {args.stall:g} s", flush=True)
            time.sleep(args.stall)
        if diloco:
            if args.spoil is not None and (diloco.inner_step + 1) % args.sync_every == 0:
                spoil(model, diloco.parameters, args.spoil)
            round_ended = diloco.step()
            if diloco.info is not None and diloco.info is not info:
                info, tx_bytes = diloco.info, diloco.tx_bytes
        else:
            sampler.commit(info)
            if args.method == "ddp" and pccl.admit():
                pccl.sync(state, revision=revision())
        now = tokens_taken()
        if round_ended:
            every = max(1, args.report_every)
            due, reported = now // every > reported // every, now
            if due and now < last_report and leads():
                report()
        if round_ended and args.publish:  # for examples/serve_text.py
            pccl.publish(shared_parameters(), revision())
        if round_ended and args.checkpoints:  # a newcomer counts as the others do
            due, saved = now // args.save_every > saved // args.save_every, now
            if due:
                save()

    if diloco:
        diloco.finish()  # applies what is still in flight
        tx_bytes, waited = diloco.tx_bytes, diloco.waited_seconds
    if leads():
        report()
        if args.result:
            checkpoint.save(args.result, {"model": shared_parameters()}, revision=0)
        if args.plot:
            write_plot(args.plot, {args.method: curve}, "tokens", "held-out bits per byte")
    everything = b"".join(p.detach().cpu().numpy().tobytes() for p in shared_parameters().values())
    checksum = f"{zlib.crc32(everything):08x}"
    print(
        f"ends with parameters {checksum}, sent {tx_bytes} bytes, waited {waited:.2f} s", flush=True
    )


def write_plot(path: str | Path, curves: dict, x_name: str, y_name: str) -> None:
    """Lines as SVG: `curves` is name -> list of (x, y)."""
    xs, ys = zip(*(point for curve in curves.values() for point in curve), strict=True)
    left, low = min(xs), min(ys)
    x_scale, y_scale = 620 / (max(xs) - left or 1), 340 / (max(ys) - low or 1)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 430" font-family="sans-serif">',
        '<rect width="720" height="430" fill="white"/><path d="M60 40V380H680" fill="none" stroke="black"/>',
        f'<text x="370" y="420" text-anchor="middle">{x_name}</text><text x="60" y="25">{y_name}</text>',
    ]
    for tick in range(0, 621, 155):
        parts.append(f'<text x="{60 + tick}" y="397">{left + tick / x_scale:.2g}</text>')
    for tick in range(0, 341, 85):
        parts.append(f'<text x="10" y="{384 - tick}">{low + tick / y_scale:.2f}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        color = f"hsl({360 * number / len(curves):.0f} 70% 42%)"
        places = [(60 + (x - left) * x_scale, 380 - (y - low) * y_scale) for x, y in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="520" y="{55 + 18 * number}" fill="{color}">{name}</text>')
    Path(path).write_text("\n".join([*parts, "</svg>\n"]))


def needs_safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is missing: pip install 'pccl-collectives[checkpoint]'", file=sys.stderr
        )
        sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    defaults: dict = {"tokens": 2_000_000, "batch-size": 4, "context": 128, "seed": 0, "threads": 1}
    defaults |= {"width": 128, "layers": 5, "heads": 4, "lr": 3e-3, "test-examples": 256}
    defaults |= {"sync-every": 50, "warm-up": 0, "device": "cpu"}
    defaults |= {"report-every": 50_000, "save-every": 500_000}  # tokens, over all members
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    parser.add_argument("--method", choices=("diloco", "ddp", "local"), default="diloco")
    parser.add_argument("--mode", choices=("sync", "async", "streaming"), default="sync")
    parser.add_argument("--overlap", type=int, help="steps behind which a reduction runs")
    parser.add_argument("--inner", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--quantize", help="int8, int4, ...: fewer bits between hosts")
    parser.add_argument("--density", type=float, help="share of elements to send: SparseLoCo")
    parser.add_argument("--round-seconds", type=float, help="DiLoCo rounds end by time")
    parser.add_argument("--step-seconds", type=float, help="plays a machine with such steps")
    parser.add_argument("--stall", type=float, help="plays one that stalls twice for so long")
    parser.add_argument(
        "--quorum", type=float, help="share of members that waits no longer for others"
    )
    parser.add_argument("--grace-seconds", type=float, help="default: DiLoCo's")
    parser.add_argument("--robust", choices=("clip", "trimmed"), help="bounds each one's influence")
    parser.add_argument("--against", type=float, default=1.0, help="see pccl.diloco.Robust")
    parser.add_argument("--spoil", type=float, help="plays a hostile member: its progress, times")
    parser.add_argument("--outer-lr", type=float, help="default: DiLoCo's")
    parser.add_argument("--outer-momentum", type=float, help="default: DiLoCo's")
    parser.add_argument("--publish", action="store_true", help="for followers: serve_text.py")
    parser.add_argument("--checkpoints", help="folder to save to, and to resume from")
    parser.add_argument("--start", help="file with the parameters to start with")
    parser.add_argument("--result", help="file for the parameters at the end: a later --start")
    parser.add_argument("--plot", help="SVG file for the loss")
    args = parser.parse_args()
    if args.checkpoints or args.start or args.result:
        needs_safetensors()
    train(args)


if __name__ == "__main__":
    main()
