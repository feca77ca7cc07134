"""Members of a run of torchft's Manager on pccl, which do what the test tells them.

A member's gradients are functions of its number, so that the test knows every mean.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pccl
from pccl.errors import PCCLError
from programs.peer import say, say_when_calling
from programs.shell import obey

FORKED = True  # workers.start: its processes have imported torch already
SIZES = (3, 700)  # elements of the two gradients

manager: Any
model: Any
optimizer: Any
number: int
deviation = ""  # how the next step differs: see `deviate`


def serve(
    own: int, *, timeout: float | None = None, mode: str = "DYNAMIC", **options: Any
) -> NoReturn:
    """Joins with these options of the Manager, and waits for calls of the functions below."""
    global manager, model, optimizer, number
    import torch

    from pccl.adapters.torchft import Manager, WorldSizeMode

    torch.set_num_threads(1)
    torch.manual_seed(own)
    number = own
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size)) for size in SIZES])
    optimizer = torch.optim.SGD(model.parameters(), 0.125, momentum=0.5)
    if timeout is not None:
        options["timeout"] = timedelta(seconds=timeout)
    manager = Manager(world_size_mode=WorldSizeMode[mode], **options)
    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)
    say(event="in", step=manager.current_step())
    obey()


def digest() -> str:
    """A hash of the model's and the optimizer's state."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().numpy().tobytes())
        momentum = optimizer.state[parameter].get("momentum_buffer")
        whole.update(b"none" if momentum is None else momentum.numpy().tobytes())
    return whole.hexdigest()


def deviate(how: str) -> None:
    """The next step is another one.

    "die": killed before its first reduction. "die between": killed when that is over. "stop":
    stopped before its first reduction. "report": it reports an error. "report early": between its
    reductions, and does not make the second. "other sizes": its tensors are longer. "sum": its op
    is SUM.
    """
    global deviation
    deviation = how


def step() -> dict[str, Any]:
    """One step, and what is to be known of it."""
    global deviation
    import torch

    how, deviation = deviation, ""
    manager.start_quorum()
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    size, rank = manager.num_participants(), manager.participating_rank()
    before = manager.batches_committed()
    works = []
    for index, parameter in enumerate(model.parameters()):
        extra = int(how == "other sizes")
        parameter.grad = None
        gradient = torch.full((len(parameter) + extra,), float(number * (index + 1)))
        op = {"reduce_op": torch.distributed.ReduceOp.SUM} if how == "sum" else {}
        works.append((manager.allreduce(gradient, **op), gradient))
        if how == "die between":
            works[0][0].wait()
            os.kill(os.getpid(), signal.SIGKILL)
        if how.startswith("report"):
            manager.report_error(ValueError("a bad batch"))
        if how == "report early":
            break
    done = [work.wait() for work, _ in works]
    error = manager.errored()
    committed = manager.should_commit()
    if committed:
        for parameter, (_, gradient) in zip(model.parameters(), works, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return {
        "committed": committed,
        "step": manager.current_step(),
        "batches": manager.batches_committed(),
        "counted": manager.batches_committed() - before,
        "size": size,
        "rank": rank,
        "done": done,
        "error": type(error).__name__ if error else None,
        "means": [float(gradient[0]) for _, gradient in works],
        "state": digest(),
    }


def go(count: int, *, until: int = 0) -> None:
    """Takes steps until `count` of them counted `until` members, and says all of them."""
    log: list[dict[str, Any]] = []
    left = count
    while left:
        log.append(step())
        left -= log[-1]["counted"] >= until
    say(event="went", log=log)


def go_and_fail(count: int) -> None:
    """As `go`, where an exception is to come: says it."""
    try:
        for _ in range(count):
            step()
    except (PCCLError, RuntimeError) as error:
        say(event="failed", kind=type(error).__name__, text=str(error))


def be_interrupted() -> None:
    """Ctrl-C comes while it waits for the others in a step. It goes on."""
    say_when_calling(pccl.api._use(None, ""), 1)
    try:
        step()
    except KeyboardInterrupt:
        say(event="interrupted")


def train_alone(value: float) -> None:
    """An inner step as LocalSGD makes it: the parameters become this member's own."""
    import torch

    manager.disallow_state_dict_read()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    manager.allow_state_dict_read()


def sync_alone(until: int) -> None:
    """Says the first parameter after each `start_quorum` until there are so many members."""
    import torch

    found = []
    while True:
        manager.start_quorum()
        found.append(float(model[0][0].detach()))
        mean = torch.zeros(1)
        manager.allreduce(mean)
        assert manager.should_commit()
        if manager.num_participants() >= until:
            break
    say(event="synced", found=found, step=manager.current_step())


def wrap(fail: bool) -> None:
    """Says what a wrapped future has, and the error that it left."""
    import torch

    manager.start_quorum()
    given: Any = torch.futures.Future()
    made = manager.wrap_future(given, torch.zeros(1))
    outcome: Callable[[], object] = (
        (lambda: given.set_exception(ValueError("lost")))
        if fail
        else (lambda: given.set_result(torch.ones(1)))
    )
    outcome()
    value = float(made.wait())
    say(event="wrapped", value=value, error=str(manager.errored()), ok=manager.should_commit())


def load(step: int) -> None:
    """Takes over a checkpoint's counts."""
    manager.load_state_dict({"step": step, "batches_committed": 2 * step})


def leave() -> None:
    """Leaves the run."""
    manager.shutdown()
    say(event="left", joined=pccl.is_initialized())
