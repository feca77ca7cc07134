"""Members of a DiLoCo run, which do what the test tells them.

A member's training is a function of its number and of the parameters, so that the test knows the
right result of every round.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

import pccl
from pccl.diloco import DiLoCo, Sparse
from pccl.errors import PCCLError
from pccl.training.diloco import round_clock
from programs.peer import hear, peer_id, say, start
from programs.shell import obey

Array = npt.NDArray[Any]
Model = dict[str, Array]

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (300,), "c": (), "d": (7, 11), "e": (64, 2)}


def fresh(seed: int = 0) -> Model:
    """Parameters to begin with."""
    random = np.random.default_rng(seed)
    return {
        name: np.array(random.standard_normal(shape), np.float32) for name, shape in SHAPES.items()
    }


def train(model: Model, number: int) -> None:
    """An inner step: the member with that number pulls the parameters toward its own place."""
    for name, target in fresh(1000 + number).items():
        model[name][...] -= np.float32(0.1) * (model[name] - target)


def digest(tree: Any) -> str:
    """A hash of every array of a tree."""
    whole = hashlib.sha256()

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            for key in sorted(part):
                whole.update(key.encode())
                walk(part[key])
        elif isinstance(part, list | tuple):
            for child in part:
                walk(child)
        elif hasattr(part, "state_dict"):
            walk(part.state_dict())
        else:
            whole.update(np.ascontiguousarray(part).tobytes())

    walk(tree)
    return whole.hexdigest()


def rounds(
    count: int,
    until: int,
    info: Callable[[], pccl.ReduceInfo | None],
    step: Callable[[], dict[str, Any] | None],
) -> list[dict[str, Any]]:
    """Takes inner steps until `until` members took part in the reduction applied last (`info`).

    Then it makes `count` rounds more. All members see that in the same round. `step` returns what
    to log at the end of a round. Returns the log.
    """

    def full() -> bool:
        applied = info()
        if applied is None or applied is stale:
            return not until
        return len(applied.contributors) >= until

    def member() -> str:
        found = pccl.membership() if pccl.is_initialized() else None
        return found.peers[found.rank] if found and found.rank >= 0 else ""

    stale: pccl.ReduceInfo | None = None
    log: list[dict[str, Any]] = []
    left, reached, who = count, full(), member()
    while not (reached and left == 0):
        before = info()
        ended = step()
        if member() != who:
            # It was put out and came back. Reductions of before count no more.
            who = member()
            if info() is before:
                stale = before
            if until and reached:
                left, reached = count, False
                log.clear()
        if ended is not None:
            log.append(ended)
            left -= reached
            reached = reached or full()
    return log


class Clock:
    """The time of a member whose inner steps take so many seconds each."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def step(self) -> None:
        """An inner step passes."""
        self._now += self._pace


comm: pccl.Communicator
diloco: DiLoCo
clock: Clock
model: Model
number: int


def serve(**options: Any) -> NoReturn:
    """Joins with these options of pccl.init, and waits for calls of the functions below."""
    global comm
    comm = start(**options)
    say(event="in", peer=peer_id())
    obey()


def look() -> dict[str, Any]:
    """Hashes of the parameters that this member holds after a round, and the members."""
    info = diloco.info
    optimizers = [made.state() for made in diloco._optimizers]
    return {
        "round": diloco.outer_step,
        "outer": digest([diloco.parameters, optimizers, np.array([diloco.world_tokens])]),
        "inner": digest(model),
        "size": pccl.world_size(),
        "contributors": None if info is None else sorted(info.contributors),
    }


def come_back() -> pccl.Communicator:
    """As pccl.init, and says so."""
    made = pccl.init()
    say(event="back")
    return made


def come_back_at_the_second_try() -> pccl.Communicator:
    """As pccl.init, which finds no master the first time."""
    global tried
    tried += 1
    if tried == 1:
        raise pccl.Unreachable.because("init", "no master")
    return pccl.init()


tried = 0
REJOIN: dict[str, Callable[[], pccl.Communicator]] = {
    "init": pccl.init,
    "start": start,
    "told": come_back,
    "second try": come_back_at_the_second_try,
}


def make(
    own_number: int,
    *,
    seed: int | None = None,
    dtype: str = "float32",
    rejoin: str | None = None,
    quantize: str | dict[str, Any] | None = None,
    sparse: dict[str, Any] | None = None,
    pace: float = 0.0,
    spoil: float | None = None,
    **options: Any,
) -> None:
    """Makes the DiLoCo. Every member begins with other parameters, unless it is told a seed.

    `rejoin`: a key of REJOIN. `quantize`: may be the arguments of pccl.Quantize. `sparse`: those of
    pccl.diloco.Sparse. `pace`: seconds of an inner step, by a clock of its own. `spoil`: its
    pseudo-gradients are multiplied by that.
    """
    global diloco, model, number, clock
    number = own_number
    round_clock.now = clock = Clock(pace)
    begun = fresh(own_number if seed is None else seed)
    model = {name: array.astype(dtype) for name, array in begun.items()}
    if options.get("mode") == "async":
        options.setdefault("overlap", options["sync_every"])
    if isinstance(quantize, dict):
        options["quantize"] = pccl.Quantize(**quantize)
    elif quantize is not None:
        options["quantize"] = quantize
    if sparse is not None:
        options["compression"] = Sparse(**sparse)
    diloco = DiLoCo(model, rejoin=None if rejoin is None else REJOIN[rejoin], **options)
    if spoil is not None:
        multiply(diloco, spoil)
    say(event="made", **look())


def multiply(diloco: DiLoCo, factor: float) -> None:
    """From now on: this member's pseudo-gradients are multiplied by that."""
    true = diloco._difference
    diloco._difference = lambda fragment: [  # type: ignore[method-assign]
        np.asarray(np.float32(factor) * one) for one in true(fragment)
    ]


def make_what_is_refused(own_number: int, **options: Any) -> None:
    """Makes a DiLoCo that the run refuses, and says why."""
    try:
        make(own_number, **options)
    except pccl.InvalidArgument as error:
        say(event="refused", text=str(error))


def go(
    count: int = 0, *, until: int = 0, tokens: int | None = None, die: int | None = None
) -> None:
    """Trains through rounds, as `rounds` says. `die`: killed after that many of the inner steps."""
    steps = 0

    def step() -> dict[str, Any] | None:
        nonlocal steps
        train(model, number)
        clock.step()
        steps += 1
        if steps == die:
            os.kill(os.getpid(), signal.SIGKILL)
        return look() if diloco.step(tokens) else None

    say(event="went", log=rounds(count, until, lambda: diloco.info, step))


def show() -> None:
    """Says the outer parameters."""
    held = {name[2:-2]: array.tolist() for name, array in diloco.parameters.items()}  # ['a']
    say(event="shown", **held)


def show_own() -> None:
    """Says this member's own parameters."""
    say(event="own", **{name: array.tolist() for name, array in model.items()})


def show_steps() -> None:
    """Says how many inner steps this member made in its latest round."""
    say(event="steps", steps=diloco.round_steps)


def show_world_tokens() -> None:
    """Says the number of tokens that the run has learned from."""
    say(event="tokens", tokens=diloco.world_tokens)


def break_the_model() -> None:
    """The next inner steps learn from a NaN."""
    for array in model.values():
        array[...] = np.nan


def show_limited() -> None:
    """Says whose part in the latest reduction was limited."""
    say(event="limited", who=list(diloco.limited))


def show_types() -> None:
    """Says the types of the outer parameters."""
    say(event="kept", dtypes=[str(array.dtype) for array in diloco.parameters.values()])


def show_diverged() -> None:
    """Says which members the latest comparison found to be different."""
    assert diloco.sync_info is not None
    say(event="diverged", who=list(diloco.sync_info.diverged))


def finish() -> None:
    """Applies what is in flight, and says whether the model is the outer one then."""
    diloco.finish()
    same = all((model[name[2:-2]] == outer).all() for name, outer in diloco.parameters.items())
    say(event="same", same=bool(same))


def forget_info() -> None:
    """Forgets the members of the reduction that was applied last."""
    diloco.info = None


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_next_reduction() -> None:
    """From now on: killed before its part of a reduction begins."""
    diloco._start = _die  # type: ignore[assignment, method-assign]


def die_in_the_first_reduction_of_three() -> None:
    """From now on: killed before its part of a reduction begins, once there are three members."""
    begin = diloco._start

    def start_or_die(*what: Any) -> None:
        if pccl.world_size() > 2:
            _die()
        begin(*what)

    diloco._start = start_or_die  # type: ignore[assignment, method-assign]


def begin_again() -> None:
    """Leaves, and begins another run alone."""
    pccl.shutdown()
    pccl.init(min_peers=1)
    make(7, sync_every=3)


def go_although_put_out() -> None:
    """Says what the error of a member that was put out advises."""
    try:
        go(1)
    except PCCLError as error:
        say(event="told", advice=error.advice)


def join_although_put_out() -> None:
    """The same, of a peer that was put out before it has joined."""
    try:
        diloco.join()
    except PCCLError as error:
        say(event="told", advice=error.advice)


def _is_interrupted(call: Callable[[], None], where: str = "_reduce") -> None:
    """Makes a call that is interrupted where it calls this method of the DiLoCo.

    The other members wait for this one then.
    """

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    setattr(diloco, where, interrupted)
    try:
        call()
    except KeyboardInterrupt:
        delattr(diloco, where)


def _come_back_after_an_interrupt(join: Callable[[], object], until: int) -> None:
    try:
        join()
        say(event="back")
    except pccl.InvalidUsage as error:
        say(event="told", text=str(error))
        pccl.shutdown()
        start()
        join()
        say(event="back")
    go(2, until=until)


def be_interrupted_in_a_step(where: str) -> None:
    """Is interrupted where it calls this method, and comes back."""
    _is_interrupted(partial(go, 1), where)
    _come_back_after_an_interrupt(diloco.join, 2)


def be_interrupted_and_make_another(**options: Any) -> None:
    """The same, with another DiLoCo of the same communicator."""
    _is_interrupted(partial(go, 1))

    def make_another() -> None:
        global diloco
        diloco = DiLoCo(model, **options)

    _come_back_after_an_interrupt(make_another, 2)


def be_interrupted_while_joining(own_number: int, where: str, **options: Any) -> None:
    """A newcomer that is interrupted in the round that lets it in, where it calls this method."""
    make(own_number, join=False, **options)
    _is_interrupted(diloco.join, where)
    _come_back_after_an_interrupt(diloco.join, 3)


def fail_to_come_back() -> None:
    """Is put out, comes back at the second try, is put out again, and calls `join`."""
    try:
        go(1)
    except pccl.Unreachable:
        say(event="failed")
    for _ in range(2):
        diloco.join()
        say(event="back")
        go(2, until=2)
        hear()


def close_and_join_again() -> None:
    """Closes the communicator under the DiLoCo, says what fails then, and comes back."""
    comm.close()
    try:
        go(1)
    except PCCLError as error:
        say(event="failed", kind=type(error).__name__)
    try:
        diloco.step()
    except pccl.InvalidUsage as error:
        say(event="failed", kind=str(error))
    start()
    diloco.join()
    go(2, until=2)


def save() -> None:
    """Says this member's checkpoint."""
    say(event="saved", state=pickle.dumps(diloco.state_dict()).hex())


def load(saved: str) -> None:
    """Loads what `save` said."""
    diloco.load_state_dict(pickle.loads(bytes.fromhex(saved)))


def join() -> None:
    """Joins the run, and says what this member holds then."""
    diloco.join()
    say(event="joined", **look())


def load_too_late() -> None:
    """Loads a checkpoint after it has joined, and says what it is told."""
    try:
        diloco.load_state_dict(diloco.state_dict())
    except pccl.InvalidUsage as error:
        say(event="told", text=str(error))
