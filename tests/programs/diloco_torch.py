"""Members of a DiLoCo run around a torch model, which do what the test tells them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import pccl
from programs.diloco_member import REJOIN, multiply, rounds
from programs.peer import peer_id, say, start
from programs.shell import obey

FORKED = True  # workers.start: its processes have imported torch already

diloco: Any
model: Any
inner: Any
data: Any


def serve() -> NoReturn:
    """Joins, and waits for calls of the functions below."""
    import pccl.adapters.torch  # noqa: F401  # takes long: before the run waits for this peer

    start()
    say(event="in", peer=peer_id())
    obey()


def _adam(parameters: Any) -> Any:
    import torch

    return torch.optim.Adam(parameters, 1e-2)


def _sgd(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, 0.7, 0.9)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {"adam": _adam, "sgd": _sgd}


def make(
    number: int,
    *,
    dtype: str = "float32",
    outer_optimizer: str | None = None,
    rejoin: str | None = None,
    spoil: float | None = None,
    **options: Any,
) -> None:
    """Makes the DiLoCo around a small model.

    `outer_optimizer`: a key of OPTIMIZERS. `rejoin`: one of REJOIN. `spoil`: this member's
    pseudo-gradients are multiplied by that.
    """
    global diloco, model, inner, data
    import torch

    from pccl.adapters.torch import DiLoCo

    torch.manual_seed(number)
    torch.set_num_threads(1)
    layers = torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers).to(getattr(torch, dtype))
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.Generator().manual_seed(number)
    if outer_optimizer is not None:
        options["outer_optimizer"] = OPTIMIZERS[outer_optimizer]
    diloco = DiLoCo(model, inner, rejoin=None if rejoin is None else REJOIN[rejoin], **options)
    if spoil is not None:
        multiply(diloco, spoil)
    say(event="made", round=diloco.outer_step)


def digest(tensors: Iterable[Any]) -> str:
    """A hash of these tensors."""
    import torch

    raw = (tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(raw)).hexdigest()


def go(count: int, *, until: int = 0) -> None:
    """Trains through rounds, as diloco_member.rounds says. Newcomers that watch take no part."""

    def info() -> pccl.ReduceInfo | None:
        found: pccl.ReduceInfo | None = diloco.info
        return None if diloco.observers else found

    say(event="went", log=rounds(count, until, info, step))


def step() -> dict[str, Any] | None:
    """An inner step. Returns what to log at a round's end."""
    import torch

    x = torch.randn(32, 9, generator=data).to(model[0].weight.dtype)
    loss = ((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean()
    loss.backward()
    inner.step()
    inner.zero_grad()
    if not diloco.step(tokens=32):
        return None
    return {
        "round": diloco.outer_step,
        "loss": loss.item(),
        "outer": digest(diloco.parameters.values()),
        "inner": digest(model.parameters()),
        "contributors": None if diloco.info is None else sorted(diloco.info.contributors),
        "size": pccl.world_size(),
        "steps": diloco.round_steps,
        "limited": list(diloco.limited),
    }


def begin() -> None:
    """Makes the first inner step, which compiles. It must not be the last one of a round."""
    assert step() is None
    say(event="begun")
