"""DiLoCo among real processes: the algebra against plain NumPy in one process, bit for bit, through joins and deaths.

Peers are shells: they run the lines that the test tells them. What a member "learns" is a function of its number and of
the parameters, so that the test can say what every round must give, whoever took part in it.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from workers import Worker, running, wait_until_asleep

import pccl
from pccl import diloco
from pccl.training.diloco.options import cut

Array = npt.NDArray[Any]
Model = dict[str, Array]
Answer = dict[str, Any]

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (300,), "c": (), "d": (7, 11), "e": (64, 2)}


def fresh(seed: int = 0) -> Model:
    random = np.random.default_rng(seed)
    return {
        name: np.array(random.standard_normal(shape), np.float32) for name, shape in SHAPES.items()
    }


def train(model: Model, number: int) -> None:
    """An inner step: the member with that number pulls the parameters toward its own place."""
    for name, target in fresh(1000 + number).items():
        model[name][...] -= np.float32(0.1) * (model[name] - target)


SHELL = (
    f"""
Model = dict
SHAPES = {SHAPES}

{inspect.getsource(fresh)}

{inspect.getsource(train)}
"""
    """
import hashlib
from pccl import diloco as module
from pccl.errors import PCCLError

def digest(tree):
    whole = hashlib.sha256()
    def walk(part):
        if isinstance(part, dict):
            for key in sorted(part):
                whole.update(key.encode())
                walk(part[key])
        elif isinstance(part, (list, tuple)):
            for child in part:
                walk(child)
        elif hasattr(part, "state_dict"):
            walk(part.state_dict())
        else:
            whole.update(np.ascontiguousarray(part).tobytes())
    walk(tree)
    return whole.hexdigest()

def look():
    info = diloco.info
    return {
        "round": diloco.outer_step,
        "outer": digest([diloco.parameters, [made.state() for made in diloco._optimizers]]),
        "inner": digest(model),
        "size": pccl.world_size(),
        "contributors": None if info is None else sorted(info.contributors),
    }

def make(own_number, seed=None, **options):
    # Every peer begins with other parameters, unless it is told a seed.
    global diloco, model, number
    number = own_number
    model = fresh(own_number if seed is None else seed)
    if options.get("mode") == "async":
        options.setdefault("overlap", options["sync_every"])
    diloco = module.DiLoCo(model, **options)
    say(event="made", **look())

def go(rounds=0, until=0, tokens=None, die=None):
    # Rounds: until so many took part in the reduction applied last, then so many more. All members see that in the same
    # round. `die`: killed after that many of the inner steps.
    def full():
        return not until or (diloco.info is not None and len(diloco.info.contributors) >= until)
    log, left, steps = [], rounds, 0
    reached = full()
    while not (reached and left == 0):
        train(model, number)
        steps += 1
        if steps == die:
            os.kill(os.getpid(), signal.SIGKILL)
        if diloco.step(tokens):
            log.append(look())
            left -= reached
            reached = reached or full()
    say(event="went", log=log)

def show():
    held = {name[2:-2]: array.tolist() for name, array in diloco.parameters.items()}  # ['a']
    say(event="shown", **held)

comm = start()
say(event="in", peer=pccl.init_peer)
while True:
    exec(hear(), globals())
"""
)


# Failure detection in a second instead of six; the ratio between the settings is that of the defaults.
FAST = {
    "PCCL_HEARTBEAT_INTERVAL": "0.2",
    "PCCL_HEARTBEAT_TIMEOUT": "1.5",
    "PCCL_LINK_TIMEOUT": "0.8",
    "PCCL_RECONNECT_TIMEOUT": "2",
}


class Peers(list[Worker]):
    """Workers and their peer ids."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(workers)
        self.ids = [worker.expect("in", 60)["peer"] for worker in workers]


def tell(peers: Sequence[Worker], code: str) -> None:
    for peer in peers:
        peer.tell(textwrap.dedent(code))


def make(peers: Sequence[Worker], options: str, first: int = 0) -> None:
    for number, peer in enumerate(peers):
        tell([peer], f"make({first + number}, {options})")


def made(peers: Sequence[Worker]) -> list[Answer]:
    return [peer.expect("made", 60) for peer in peers]


def went(peers: Sequence[Worker], *, inner: bool = True) -> list[list[Answer]]:
    """Each one's rounds; what members hold after the same round is the same."""
    logs: list[list[Answer]] = [peer.expect("went", 60)["log"] for peer in peers]
    held: dict[int, Answer] = {}
    for log in logs:
        for one in log:
            same = held.setdefault(one["round"], one)
            for key in ("outer", "inner") if inner else ("outer",):
                assert one[key] == same[key], (key, logs)
            # A newcomer knows nothing of what the others applied before its first.
            if one["contributors"] and same["contributors"]:
                assert one["contributors"] == same["contributors"], logs
    return logs


def go(peers: Sequence[Worker], code: str, *, inner: bool = True) -> list[list[Answer]]:
    tell(peers, code)
    return went(peers, inner=inner)


def shown(peers: Sequence[Worker]) -> Model:
    tell(peers, "show()")
    answers = [peer.expect("shown") for peer in peers]
    assert all(answer == answers[0] for answer in answers)
    return {name: np.array(answers[0][name], np.float32) for name in SHAPES}


def connections(pid: int) -> int:
    """How many TCP connections a process has."""
    sockets = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return sum(words[3] == "01" and f"socket:[{words[9]}]" in sockets for words in lines)


def asked(worker: Worker) -> None:
    """Returns when a newcomer has a link to a member, and its main thread sleeps: it waits to be let in."""
    deadline = time.monotonic() + 60
    while connections(worker.pid) < 2:  # to the master, and to a member
        assert time.monotonic() < deadline, worker.stderr()
        time.sleep(0.01)
    wait_until_asleep(worker)


# What must come out, in one process.


def outer_step(theta: Model, velocity: Model, gradients: Model) -> None:
    lr, momentum = np.float32(0.7), np.float32(0.9)
    for name, gradient in gradients.items():
        velocity[name] = np.asarray(momentum * velocity[name] + gradient)
        theta[name] = np.asarray(theta[name] - lr * (gradient + momentum * velocity[name]))


def mean(gradients: Sequence[Model], weights: Sequence[float] | None = None) -> Model:
    scale = [np.float32(weight) for weight in weights or [1.0] * len(gradients)]
    return {
        name: np.asarray(
            sum(w * g[name] for w, g in zip(scale, gradients, strict=True)) / sum(scale)
        )
        for name in gradients[0]
    }


def trained(theta: Model, number: int, steps: int) -> Model:
    """A member's parameters after so many inner steps from `theta`."""
    model = {name: array.copy() for name, array in theta.items()}
    for _ in range(steps):
        train(model, number)
    return model


def less(theta: Model, model: Model) -> Model:
    return {name: np.asarray(theta[name] - model[name]) for name in theta}


def reference(
    mode: str,
    every: int,
    reductions: Sequence[Sequence[int]],
    weights: Sequence[float] | None = None,
) -> Model:
    """The outer parameters after these reductions: which members' pseudo-gradients counted in each.

    In "async" the last one is still in flight.
    """
    theta = fresh(0)
    velocity = {name: np.zeros_like(array) for name, array in theta.items()}
    flying: Model | None = None
    own: dict[int, Model] = {}  # where members are, if not at the outer parameters
    for members in reductions:
        begun = {number: own.get(number, theta) for number in members}
        ends = {number: trained(model, number, every) for number, model in begun.items()}
        gradients = {number: less(begun[number], ends[number]) for number in members}
        result = mean(list(gradients.values()), weights) if members else None
        if mode == "async":
            result, flying = flying, result
            own = ends
        if result is not None:
            outer_step(theta, velocity, result)
            if mode == "async":
                own = {number: less(theta, gradient) for number, gradient in gradients.items()}
    return theta


def equal(found: Model, want: Model) -> bool:
    return all(found[name].tobytes() == want[name].tobytes() for name in want)


def close(found: Model, want: Model) -> bool:
    return all(np.allclose(found[name], want[name], rtol=1e-5, atol=1e-6) for name in want)


MODES = ["sync", "async"]
MORE = [*MODES, "overlapped", "streaming"]


def how(mode: str) -> str:
    """A mode's arguments. In "overlapped" a mean is applied in the middle of a round."""
    return "mode='async', overlap=2" if mode == "overlapped" else f"mode={mode!r}"


@pytest.mark.parametrize("mode", MODES)
def test_rounds_are_those_of_the_paper_bit_for_bit(mode: str) -> None:
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, f"seed=0, sync_every=4, mode={mode!r}")
        made(peers)
        go(peers, "go(5)", inner=mode != "async")
        assert equal(shown(peers), reference(mode, 4, [[0, 1]] * 5))
        # What was in flight comes with finish, and the model is the outer one.
        tell(
            peers,
            """
            diloco.finish()
            same = all((model[name[2:-2]] == outer).all() for name, outer in diloco.parameters.items())
            say(event="same", same=bool(same))
            """,
        )
        assert all(peer.expect("same")["same"] for peer in peers)
        want = (
            reference(mode, 4, [[0, 1]] * 5) if mode == "sync" else reference(mode, 4, [[0, 1]] * 6)
        )
        assert equal(shown(peers), want)


@pytest.mark.parametrize("mode", MORE)
def test_founders_with_different_parameters_begin_with_the_same(mode: str) -> None:
    with running() as run:
        peers = Peers(run.peers(3, SHELL))
        make(peers, f"sync_every=6, {how(mode)}")
        first = made(peers)
        assert len({(one["outer"], one["inner"]) for one in first}) == 1
        logs = go(peers, "go(3)", inner=mode == "sync")
        assert [one["size"] for one in logs[0]] == [3, 3, 3]


@pytest.mark.parametrize("mode", MODES)
def test_parameters_of_float64_stay_so(mode: str) -> None:
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, "seed=0, sync_every=4, join=False")
        tell(
            peers,
            f"""
            model = {{name: array.astype(np.float64) for name, array in model.items()}}
            diloco = module.DiLoCo(model, sync_every=4, {how(mode)}, overlap={4 if mode == "async" else None})
            """,
        )
        made(peers)
        go(peers, "go(3)", inner=mode == "sync")
        assert close(shown(peers), reference(mode, 4, [[0, 1]] * 3))
        tell(peers, "say(event='kept', dtypes=[str(a.dtype) for a in diloco.parameters.values()])")
        assert all(set(peer.expect("kept")["dtypes"]) == {"float64"} for peer in peers)


@pytest.mark.parametrize("mode", MODES)
def test_a_world_of_one_trains_on(mode: str) -> None:
    with running() as run:
        peers = Peers([run.peer(SHELL)])
        make(peers, f"seed=0, sync_every=3, mode={mode!r}")
        made(peers)
        go(peers, "go(4)")
        assert equal(shown(peers), reference(mode, 3, [[0]] * 4))


@pytest.mark.parametrize(
    ("mode", "like"),
    [
        ("'sync'", "sync"),
        ("'async'", "async"),
        ("'streaming', fragments=1, overlap=0, mixing=0.0", "sync"),
    ],
)
def test_members_weigh_by_their_tokens(mode: str, like: str) -> None:
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, f"seed=0, sync_every=2, mode={mode}")
        made(peers)
        for peer, tokens in zip(peers, (150, 50), strict=True):
            tell([peer], f"go(3, tokens={tokens})")
        inner = like == "sync"
        went(peers, inner=inner)
        assert equal(shown(peers), reference(like, 2, [[0, 1]] * 3, [300, 100]))
        # Nobody has seen anything: nothing moves, once what is in flight has come, and nobody fails.
        go(peers, "go(1, tokens=0)", inner=inner)
        before = shown(peers)
        go(peers, "go(1, tokens=0)", inner=inner)
        assert equal(shown(peers), before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2])
def test_newcomers_get_what_the_members_have_and_count_from_their_first_round(
    mode: str, count: int
) -> None:
    with running() as run:
        peers = Peers(run.peers(1, SHELL))
        make(peers, f"seed=0, sync_every=4, mode={mode!r}")
        made(peers)
        go(peers, "go(2)", inner=mode == "sync")
        late = Peers([run.peer(SHELL) for _ in range(count)])
        make(late, f"sync_every=4, mode={mode!r}", first=1)
        for worker in late:
            asked(worker)  # so that they enter together
        size = 1 + count
        tell(peers, f"go(3, until={size})")
        assert {one["round"] for one in made(late)} == {3}
        tell(late, f"go(3, until={size})")
        last = went([*peers, *late], inner=mode == "sync")[-1][-1]["round"]
        alone, together = [[0]] * 3, [list(range(size))] * (last - 3)
        found, want = shown([*peers, *late]), reference(mode, 4, alone + together)
        assert equal(found, want) if size == 2 else close(found, want)


@pytest.mark.parametrize("mode", MODES)
def test_newcomers_come_while_members_run_and_everybody_agrees(mode: str) -> None:
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, f"seed=0, sync_every=5, mode={mode!r}")
        made(peers)
        tell(peers, "go(4, until=5)")
        late = Peers([run.peer(SHELL) for _ in range(3)])
        make(late, f"sync_every=5, mode={mode!r}", first=2)
        tell(late, "go(4, until=5)")
        entered = {number: one["round"] for number, one in enumerate(made(late), 2)}
        logs = went([*peers, *late], inner=mode == "sync")
        everybody = [
            [0, 1] + [number for number, at in entered.items() if at < round]
            for round in range(1, logs[0][-1]["round"] + 1)
        ]
        assert close(shown([*peers, *late]), reference(mode, 5, everybody))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [2, 5])
def test_a_member_that_is_killed_costs_the_others_nothing(mode: str, steps: int) -> None:
    # Killed in its second inner step, and in async with its first reduction under way.
    with running() as run:
        peers = Peers(run.peers(3, SHELL))
        make(peers, f"seed=0, sync_every=4, mode={mode!r}")
        made(peers)
        tell(peers[:2], "go(4)")
        tell(peers[2:], f"go(4, die={steps})")
        log = went(peers[:2], inner=mode == "sync")[0]
        assert log[-1]["size"] == 2
        # An info tells of the reduction that was applied last: of the round before, in async.
        applied = [one["contributors"] for one in log]
        if mode == "async":
            applied = [*applied[1:], peers.ids[:2]]
        took_part = [[peers.ids.index(peer) for peer in ids] for ids in applied]
        assert all(sorted(ids)[:2] == [0, 1] for ids in took_part)
        assert close(shown(peers[:2]), reference(mode, 4, took_part))


@pytest.mark.parametrize("mode", MORE)
def test_a_member_is_killed_in_the_round_that_lets_newcomers_in(mode: str) -> None:
    # After the newcomers have the state, before its own part of the reduction begins.
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, f"seed=0, sync_every=4, {how(mode)}")
        made(peers)
        inner = mode == "sync"
        go(peers, "go(2)", inner=inner)
        late = Peers([run.peer(SHELL) for _ in range(2)])
        make(late, f"sync_every=4, {how(mode)}", first=2)
        for worker in late:
            asked(worker)
        tell(
            peers[1:],
            """
            begin = diloco._start
            def start_or_die(*what):
                if pccl.world_size() > 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                begin(*what)
            diloco._start = start_or_die
            """,
        )
        tell([*peers, *late], "go(2, until=3)")
        entered = {number: one["round"] for number, one in enumerate(made(late), 2)}
        logs = went([peers[0], *late], inner=inner)
        assert logs[0][-1]["size"] == 3
        found = shown([peers[0], *late])
        if mode in MODES:
            took_part = [
                [0]
                + [1] * (round < min(entered.values()))
                + [number for number, at in entered.items() if at < round]
                for round in range(1, logs[0][-1]["round"] + 1)
            ]
            assert close(found, reference(mode, 4, took_part))


@pytest.mark.parametrize("mode", MORE)
def test_newcomers_go_on_when_all_that_counted_are_killed(mode: str) -> None:
    with running() as run:
        peers = Peers(run.peers(1, SHELL))
        make(peers, f"seed=0, sync_every=4, {how(mode)}")
        made(peers)
        go(peers, "go(2)", inner=mode == "sync")
        late = Peers([run.peer(SHELL) for _ in range(2)])
        make(late, f"sync_every=4, {how(mode)}", first=1)
        for worker in late:
            asked(worker)
        tell(peers, "diloco._start = lambda *_: os.kill(os.getpid(), signal.SIGKILL); go(3)")
        made(late)
        go(late, "go(2)", inner=mode == "sync")
        found = shown(late)
        if mode in MODES:
            # Nobody's pseudo-gradient of the third round is left.
            assert equal(found, reference(mode, 4, [[0], [0], [], [1, 2], [1, 2]]))


def streamed(
    every: int, fragments: Sequence[Sequence[str]], overlap: int, mixing: float, steps: int
) -> tuple[Model, list[Model]]:
    """Streaming DiLoCo of two members, in one process: the outer parameters, and each member's own."""
    theta = fresh(0)
    velocity = {name: np.zeros_like(array) for name, array in theta.items()}
    models = [fresh(0), fresh(0)]
    flying: dict[int, tuple[int, Model]] = {}
    for step in range(1, steps + 1):
        for number, model in enumerate(models):
            train(model, number)
        leaving = []
        for index, names in enumerate(fragments):
            if (step - index * every // len(fragments)) % every == 0:
                given = [{n: np.asarray(theta[n] - model[n]) for n in names} for model in models]
                # A member counts by the steps since it last gave this fragment: equal for all here.
                leaving.append((index, (step + overlap, mean(given))))
        flying.update([one for one in leaving if overlap == 0])
        for index in [index for index, (due, _) in flying.items() if due == step]:
            _, gradients = flying.pop(index)
            outer_step(theta, velocity, gradients)
            for name, model in [(name, model) for name in gradients for model in models]:
                own = np.float32(mixing) * model[name] + np.float32(1 - mixing) * theta[name]
                model[name][...] = own if mixing else theta[name]
        flying.update(leaving if overlap else [])
    return theta, models


def overlapped(every: int, overlap: int, rounds: int) -> tuple[Model, list[Model]]:
    """Asynchronous DiLoCo of two members, in one process: the outer parameters, and each member's own."""
    theta = fresh(0)
    velocity = {name: np.zeros_like(array) for name, array in theta.items()}
    models = [fresh(0), fresh(0)]
    origins = [theta, theta]  # what members have learned is measured from there
    for number in range(rounds):
        steps = every - overlap if number else every
        models = [trained(model, member, steps) for member, model in enumerate(models)]
        gradients = [less(a, b) for a, b in zip(origins, models, strict=True)]
        if number == rounds - 1:
            break
        ends = [trained(model, member, overlap) for member, model in enumerate(models)]
        learned = [less(model, end) for model, end in zip(models, ends, strict=True)]
        outer_step(theta, velocity, mean(gradients))
        models = [less(theta, gradient) for gradient in learned]
        origins = [theta, theta]
    return theta, models


@pytest.mark.parametrize("overlap", [1, 3, 7])
def test_async_moves_to_the_mean_after_the_overlap_bit_for_bit(overlap: int) -> None:
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, f"seed=0, sync_every=8, mode='async', overlap={overlap}")
        made(peers)
        go(peers, "go(3)", inner=False)
        theta, models = overlapped(8, overlap, 3)
        assert equal(shown(peers), theta)
        tell(peers, "say(event='own', **{name: array.tolist() for name, array in model.items()})")
        for peer, model in zip(peers, models, strict=True):
            own = peer.expect("own")
            assert equal({name: np.array(own[name], np.float32) for name in SHAPES}, model)


@pytest.mark.parametrize(
    ("overlap", "mixing"), [(0, 0.0), (0, 0.5), (1, 0.5), (2, 0.25), (5, 0.5), (7, 0.0)]
)
def test_fragments_go_in_turn_bit_for_bit(overlap: int, mixing: float) -> None:
    # Two in flight at once from an overlap of 4 on.
    fragments = [["a", "d"], ["b", "c", "e"]]
    names = [[f"['{name}']" for name in fragment] for fragment in fragments]
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        options = f"fragments={names}, overlap={overlap}, mixing={mixing}"
        make(peers, f"seed=0, sync_every=8, mode='streaming', {options}")
        made(peers)
        go(peers, "go(3)", inner=False)
        theta, models = streamed(8, fragments, overlap, mixing, 24)
        assert equal(shown(peers), theta)
        tell(peers, "say(event='own', **{name: array.tolist() for name, array in model.items()})")
        for peer, model in zip(peers, models, strict=True):
            own = peer.expect("own")
            assert equal({name: np.array(own[name], np.float32) for name in SHAPES}, model)


@pytest.mark.parametrize(
    ("mode", "overlap"),
    [*(("'streaming', fragments=3", n) for n in (0, 1, 5, 7)), ("'async'", 1), ("'async'", 7)],
)
def test_newcomers_enter_between_reductions_in_flight(mode: str, overlap: int) -> None:
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        options = f"sync_every=8, mode={mode}, overlap={overlap}, verify_every=1"
        make(peers, f"seed=0, {options}")
        made(peers)
        go(peers, "go(2)", inner=False)
        late = Peers([run.peer(SHELL) for _ in range(2)])
        make(late, options, first=2)
        # A comparison each round, in which all have the same, what is in flight included.
        tell([*peers, *late], "go(4, until=4)")
        made(late)
        logs = went([*peers, *late], inner=False)
        assert logs[0][-1]["size"] == 4
        tell(peers, "say(event='diverged', who=list(diloco.sync_info.diverged))")
        assert [peer.expect("diverged")["who"] for peer in peers] == [[], []]
        shown([*peers, *late])


@pytest.mark.parametrize("mode", MORE)
@pytest.mark.parametrize("feedback", [False, True])
def test_quantized_members_still_agree_and_come_near(mode: str, feedback: bool) -> None:
    with running(PCCL_SHM="0") as run:  # in memory of one host nothing is quantized
        peers = Peers(run.peers(2, SHELL))
        options = (
            f"sync_every=4, {how(mode)}, quantize=pccl.Quantize('int8', error_feedback={feedback})"
        )
        make(peers, f"seed=0, {options}")
        made(peers)
        go(peers, "go(2)", inner=mode == "sync")
        late = Peers([run.peer(SHELL)])
        make(late, options, first=2)
        tell([*peers, *late], "go(3, until=3)")
        made(late)
        logs = went([*peers, *late], inner=mode == "sync")
        found = shown([*peers, *late])
        if mode == "sync":
            rounds, together = (
                logs[0][-1]["round"],
                sum(len(one["contributors"]) == 3 for one in logs[0]),
            )
            # In the first round with three the newcomer did not count.
            took_part = [[0, 1]] * (rounds - together + 1) + [[0, 1, 2]] * (together - 1)
            want = reference("sync", 4, took_part)
            assert not equal(found, want)
            assert all(np.allclose(found[name], want[name], atol=0.1) for name in want)


def test_a_member_that_was_put_out_comes_back_by_itself() -> None:
    with running(**FAST) as run:
        peers = Peers(run.peers(3, SHELL))
        make(peers, "sync_every=3, mode='async', rejoin=pccl.init")
        made(peers)
        go(peers, "go(2)", inner=False)
        peers[2].signal(signal.SIGSTOP)
        try:
            # Without it: the others wait for it until it counts as dead.
            logs = go(peers[:2], "go(2)", inner=False)
            assert logs[0][-1]["size"] == 2
        finally:
            peers[2].signal(signal.SIGCONT)
        tell(peers[2:], "diloco.info = None")  # of a reduction of three, before it froze
        tell(peers, "go(2, until=3)")
        assert went(peers, inner=False)[0][-1]["size"] == 3


def test_a_member_that_is_ahead_of_a_run_that_began_again_goes_back_with_it() -> None:
    with running(**FAST) as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, "sync_every=3, rejoin=pccl.init")
        made(peers)
        go(peers, "go(2)")
        peers[1].signal(signal.SIGSTOP)
        try:
            go(peers[:1], "go(1)")
            tell(peers[:1], "pccl.shutdown(); pccl.init(min_peers=1); make(7, sync_every=3)")
            assert made(peers[:1])[0]["round"] == 0
        finally:
            peers[1].signal(signal.SIGCONT)
        tell(peers[1:], "diloco.info = None")
        tell(peers, "go(2, until=2)")
        assert went(peers)[1][-1]["size"] == 2


def test_a_rank_of_a_replica_does_not_come_back_alone() -> None:
    with running(**FAST) as run:
        start = "start(replica_id=os.environ['NAME'], ranks_per_replica=1, min_peers=2)"
        code = SHELL.replace("start()", start)
        peers = Peers([run.peer(code, NAME=name) for name in "ab"])
        make(peers, "sync_every=3, rejoin=pccl.init")
        made(peers)
        go(peers, "go(1)")
        peers[1].signal(signal.SIGSTOP)
        try:
            go(peers[:1], "go(2)")
        finally:
            peers[1].signal(signal.SIGCONT)
        tell(
            peers[1:],
            """
            try:
                go(1)
            except PCCLError as error:
                say(event="told", advice=error.advice)
            """,
        )
        assert peers[1].expect("told")["advice"] == "rejoin"


# Counts in the parameters how often each example was seen. A mean over n members times n is what they have counted
# together, and n shows in the places where each member adds a one of its own.
COUNTS = """
from pccl.data import ElasticSampler
from pccl.diloco import DiLoCo

class Add:
    def __init__(self, arrays):
        self.arrays = arrays
    def state(self):
        return {}
    def step(self, parameters, gradients):
        counts, places = parameters
        n = round(1 / float(np.abs(gradients[1]).max()))
        counts -= np.rint(gradients[0] * n)

start()
own = int(os.environ["OWN"])
dies_at = int(os.environ.get("DIES_AT", "-1"))
model = {"counts": np.zeros(500, np.float32), "places": np.zeros(8, np.float32)}
sampler = ElasticSampler(500, batch_size=5, seed=1, remainder="short")
mode = json.loads(os.environ["MODE"])
diloco = DiLoCo(model, sync_every=3, **mode, outer_optimizer=Add, data=sampler)
say(event="in")
steps, met = 0, False
while sampler.epoch < 3 or sampler.in_flight:
    # Nobody goes far before the one that comes late is there.
    met = met or (sampler.committed > 300 and pccl.world_size() == 3)
    if sampler.epoch < 3 and (met or sampler.committed <= 300):
        np.add.at(model["counts"], sampler.take(), 1)
    model["places"][own] += 1 / 3
    steps += 1
    if steps == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    diloco.step()
diloco.finish()
counts = diloco.parameters["['counts']"].tolist()
say(event="done", counts=counts, steps=steps, committed=sampler.committed)
"""


# Instead of start(), in these: a communicator that is not the process's, a thread that hears when to go on, and one
# that says how many there are.
COMMUNICATOR = """
made = []
def fresh():
    global comm
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    comm.connect()
    made.append(comm)
    return comm
def listen():
    hear()
    told.set()
def look(counts=iter((3, 2))):
    for count in counts:
        while pccl.world_size(comm) != count:
            pause.wait(0.01)
        say(event=f"{count} members")
told, pause = threading.Event(), threading.Event()
looker = threading.Thread(target=look, daemon=True)
fresh()
threading.Thread(target=listen, daemon=True).start()
"""


KEPT: list[dict[str, Any]] = [{}, {"mode": "async"}, {"mode": "async", "overlap": 3}]


@pytest.mark.parametrize("mode", [*KEPT, {"mode": "streaming", "fragments": 1, "overlap": 1}])
def test_members_are_killed_and_come_and_each_example_is_learned_from_once(
    mode: dict[str, Any],
) -> None:
    with running(MODE=json.dumps(mode)) as run:
        peers = [run.peer(COUNTS, PCCL_MIN_PEERS="3", OWN=str(i)) for i in range(2)]
        peers.append(run.peer(COUNTS, PCCL_MIN_PEERS="3", OWN="2", DIES_AT="7"))
        for peer in peers:
            peer.expect("in", 60)
        assert peers[2].ends() == -signal.SIGKILL
        late = run.peer(COUNTS, OWN="3")
        late.expect("in", 60)
        ends = [peer.expect("done", 60) for peer in (*peers[:2], late)]
        assert [end["committed"] for end in ends] == [1500] * 3
        assert ends[0]["counts"] == ends[1]["counts"] == ends[2]["counts"]
        # In "streaming" a share of a member's own parameters counts once more, by its definition.
        assert mode.get("mode") == "streaming" or ends[0]["counts"] == [3] * 500


@pytest.mark.parametrize("mode", KEPT)
def test_a_run_that_resumes_from_a_checkpoint_learns_from_each_example_once(
    mode: dict[str, Any], tmp_path: Path
) -> None:
    saves = COUNTS
    for old, new in (
        (
            "    diloco.step()\n",
            "    if diloco.step() and diloco.outer_step == 4:\n        break\n",
        ),
        (
            "diloco.finish()\n",
            "import pickle\n"
            "saved = {'diloco': diloco.state_dict(), 'sampler': sampler.state_dict()}\n"
            "open(os.environ['FILE'], 'wb').write(pickle.dumps(saved))\n"
            "diloco.finish()\n",
        ),
    ):
        assert saves.count(old) == 1
        saves = saves.replace(old, new)
    alone = ("pccl.world_size() == 3", "True")
    resumes = COUNTS.replace("data=sampler)", "data=sampler, join=False)").replace(
        'say(event="in")\n',
        "import pickle\n"
        "saved = pickle.loads(open(os.environ['FILE'], 'rb').read())\n"
        "diloco.load_state_dict(saved['diloco'])\n"
        "sampler.load_state_dict(saved['sampler'])\n"
        "diloco.join()\n"
        'say(event="in")\n',
    )
    for code in (saves.replace(*alone), resumes.replace(*alone)):
        with running(MODE=json.dumps(mode), FILE=str(tmp_path / "checkpoint")) as run:
            peer = run.peer(code, OWN="0")
            peer.expect("in", 60)
            counts = peer.expect("done", 60)["counts"]
    assert counts == [3] * 500


def test_a_loss_that_one_member_sees_early_divides_data_alike() -> None:
    # Two reductions are under way. The second one loses a member; one member waits for it alone, for a checkpoint,
    # before all apply the first one.
    code = """
    from pccl.data import ElasticSampler
    from pccl.diloco import DiLoCo
    start()
    model = {name: np.zeros(4, np.float32) for name in "ab"}
    sampler = ElasticSampler(10_000, batch_size=5)
    diloco = DiLoCo(model, sync_every=8, mode="streaming", fragments=2, overlap=6, data=sampler)

    def go(until):
        while diloco.inner_step < until:
            taken = sampler.take()
            diloco.step()
        say(event="went", taken=taken.tolist(), place=sampler.state_dict(), flying=len(diloco._flying))

    def first():
        diloco._flying[0].work.wait()
        say(event="first")

    say(event="in", peer=pccl.init_peer)
    while True:
        exec(hear(), globals())
    """
    with running() as run:
        peers = Peers(run.peers(3, code))
        # The first fragment's left at 8, and is applied at 14; the second's leaves at 12.
        tell(peers, "go(11)")
        for peer in peers:
            peer.expect("went", 60)
        tell(peers, "first()")
        for peer in peers:
            peer.expect("first", 60)
        tell(peers[:2], "go(12)")
        assert [peer.expect("went", 60)["flying"] for peer in peers[:2]] == [2, 2]
        peers[2].signal(signal.SIGKILL)
        tell(peers[:1], "diloco.state_dict(); say(event='saved', members=pccl.world_size())")
        assert peers[0].expect("saved", 60)["members"] == 2
        for step in (15, 17):
            tell(peers[:2], f"go({step})")
            ends = [peer.expect("went", 60) for peer in peers[:2]]
            assert ends[0]["place"] == ends[1]["place"]
            assert not set(ends[0]["taken"]) & set(ends[1]["taken"])
        tell(peers[:2], "go(20); say(event='later', members=len(sampler._phases[-1][-1].peers))")
        for peer in peers[:2]:
            peer.expect("went", 60)
            assert peer.expect("later", 60)["members"] == 2


def test_data_follows_a_member_that_comes_back_with_another_communicator() -> None:
    code = COUNTS
    for old, new in (
        ("start()\n", COMMUNICATOR),
        ('say(event="in")\n', 'say(event="in")\nif own == 0:\n    looker.start()\n'),
        (
            "outer_optimizer=Add",
            "outer_optimizer=Add, comm=comm, rejoin=fresh",
        ),  # the sampler follows
        ("pccl.world_size() == 3", "told.is_set() and pccl.world_size(comm) == 3"),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
    code += 'say(event="came back", times=len(made))'
    with running(**FAST, MODE="{}") as run:
        peers = [run.peer(code, OWN=str(i)) for i in range(3)]
        for peer in peers:
            peer.expect("in", 60)
        peers[0].expect("3 members", 60)
        peers[2].signal(signal.SIGSTOP)
        try:
            peers[0].expect("2 members", 60)
        finally:
            peers[2].signal(signal.SIGCONT)
        for peer in peers:
            peer.tell("go on")
        for peer in peers:
            assert peer.expect("done", 60)["counts"] == [3] * 500
        assert peers[2].expect("came back")["times"] == 2


def test_after_the_end_data_is_for_whoever_is_there() -> None:
    code = (
        COUNTS[: COUNTS.index("steps, met")].replace("outer_optimizer=Add, ", "")
        + """
for _ in range(6):
    sampler.take()
    diloco.step()
diloco.finish()
pccl.shutdown()
alone = sampler.take()
sampler.commit()
say(event="done", taken=len(alone), committed=sampler.committed, left=sampler.in_flight)
"""
    )
    with running(MODE="{}") as run:
        peers = [run.peer(code, PCCL_MIN_PEERS="2", OWN=str(i)) for i in range(2)]
        for peer in peers:
            peer.expect("in", 60)
            end = peer.expect("done", 60)
            assert (end["taken"], end["committed"], end["left"]) == (5, 65, 0)


@pytest.mark.parametrize("rejoin", ["None", "start"])
def test_a_member_interrupted_in_a_step_has_to_leave_first(rejoin: str) -> None:
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, f"sync_every=3, rejoin={rejoin}")
        made(peers)
        go(peers, "go(1)")
        tell(
            peers[:1],
            """
            def interrupted(flight):
                signal.raise_signal(signal.SIGINT)

            reduce, diloco._reduce = diloco._reduce, interrupted  # the other waits for it there
            try:
                go(1)
            except KeyboardInterrupt:
                diloco._reduce = reduce
            try:
                diloco.join()
                say(event="back")
            except pccl.InvalidUsage as error:
                say(event="told", text=str(error))
                pccl.shutdown()
                comm = start()
                diloco.join()
                say(event="back")
            go(2, until=2)
            """,
        )
        tell(peers[1:], "diloco.info = None; go(2, until=2)")
        if rejoin == "None":
            assert "pccl.init(), then join()" in peers[0].expect("told")["text"]
        peers[0].expect("back", 60)
        logs = [peer.expect("went", 60)["log"] for peer in peers]
        assert logs[0][-1]["outer"] == logs[1][-1]["outer"]


@pytest.mark.parametrize(
    ("saved", "loads", "words"),
    [
        ({"sync_every": 50}, {"sync_every": 100}, "sync_every=50, not 100"),
        ({"outer_momentum": 0.0}, {}, "another outer optimizer, or of one with another momentum"),
        ({"mode": "streaming", "fragments": 2}, {"mode": "streaming", "fragments": 1}, "fragments"),
        (
            {"mode": "streaming", "fragments": [["['a']"], ["['b']"]]},
            {"mode": "streaming", "fragments": [["['b']"], ["['a']"]]},
            "other fragments",
        ),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused_before_anything_is_changed(
    saved: dict[str, Any], loads: dict[str, Any], words: str
) -> None:
    def made_with(options: dict[str, Any], value: float) -> tuple[Model, Any]:
        model = {name: np.full(4, value, np.float32) for name in "ab"}
        return model, diloco.DiLoCo(model, **{"sync_every": 8, **options}, join=False)

    model, target = made_with(loads, 1.0)
    with pytest.raises(pccl.InvalidArgument, match=words):
        target.load_state_dict(made_with(saved, 2.0)[1].state_dict())
    with pytest.raises(pccl.InvalidArgument, match="no DiLoCo's state"):
        target.load_state_dict({"parameters": {}})
    assert all(np.all(array == 1) for array in [*model.values(), *target.parameters.values()])
    target.load_state_dict(made_with(loads, 3.0)[1].state_dict())
    assert all(np.all(array == 3) for array in model.values())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"a": np.zeros(4), "b": np.zeros(4, np.float32)},
            r"float32\[4\] there, float64\[4\] here",
        ),
        (
            {"a": np.zeros(5, np.float32), "b": np.zeros(4, np.float32)},
            r"\[4\] there, float32\[5\]",
        ),
        ({"a": np.zeros(4, np.float32)}, r"\['b'\] is float32\[4\] there, none here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(model: dict[str, Any], words: str) -> None:
    saved = diloco.DiLoCo(
        {name: np.zeros(4, np.float32) for name in "ab"}, sync_every=8, join=False
    )
    with pytest.raises(pccl.InvalidArgument, match=words):
        diloco.DiLoCo(model, sync_every=8, join=False).load_state_dict(saved.state_dict())


def test_without_rejoin_the_exception_says_so_and_join_comes_back() -> None:
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, "sync_every=3")
        made(peers)
        go(peers, "go(1)")
        tell(
            peers[1:],
            """
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
            """,
        )
        tell(peers[:1], "diloco.info = None; go(2, until=2)")
        assert peers[1].expect("failed")["kind"] == "NotInitialized"
        assert "join()" in peers[1].expect("failed")["kind"]
        went(peers)


@pytest.mark.parametrize("mode", MORE)
def test_a_checkpoint_of_one_member_resumes_the_run_on_all(mode: str) -> None:
    options = f"sync_every=4, {how(mode)}"
    inner = mode == "sync"
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, f"seed=0, {options}")
        made(peers)
        go(peers, "go(3)", inner=inner)
        tell(
            peers[:1],
            """
            import pickle
            saved = diloco.state_dict()
            say(event="saved", state=pickle.dumps(saved).hex())
            """,
        )
        saved = peers[0].expect("saved")["state"]
        # Whoever goes on has what the checkpoint has: what was in flight is in it, too.
        want: Model | None = None
        if mode in MODES:
            want = reference(mode, 4, [[0, 1]] * (3 + (mode == "async")))
    with running() as run:
        peers = Peers(run.peers(2, SHELL))
        make(peers, f"{options}, join=False")
        tell(
            peers[1:],
            f"import pickle; diloco.load_state_dict(pickle.loads(bytes.fromhex('{saved}')))",
        )
        for peer in peers:
            tell([peer], "diloco.join(); say(event='joined', **look())")
        rounds = [peer.expect("made")["round"] for peer in peers]
        joined = [peer.expect("joined") for peer in peers]
        assert rounds == [0, 0] and [one["round"] for one in joined] == [3, 3]
        assert joined[0]["outer"] == joined[1]["outer"] and joined[0]["inner"] == joined[1]["inner"]
        if want is not None:
            assert equal(shown(peers), want)
        go(peers, "go(2)", inner=inner)


def test_a_checkpoint_is_loaded_before_joining() -> None:
    with running() as run:
        peers = Peers([run.peer(SHELL)])
        make(peers, "sync_every=4")
        made(peers)
        tell(
            peers,
            """
            try:
                diloco.load_state_dict(diloco.state_dict())
            except pccl.InvalidUsage as error:
                say(event="told", text=str(error))
            """,
        )
        assert "join=False" in peers[0].expect("told")["text"]
        go(peers, "go(1)")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("sync_every=5", ["sync_every=5", "sync_every=3"]),
        ("sync_every=3, quantize='int8'", ["reduced as int8 (min_max)", "reduced exactly"]),
    ],
)
def test_a_newcomer_with_other_settings_is_told(options: str, words: list[str]) -> None:
    with running() as run:
        peers = Peers(run.peers(1, SHELL))
        make(peers, "sync_every=3")
        made(peers)
        late = run.peer(SHELL)
        late.expect("in")
        tell(
            [late],
            f"""
            try:
                make(1, {options})
            except pccl.InvalidArgument as error:
                say(event="refused", text=str(error))
            """,
        )
        asked(late)
        tell(peers, "go(3)")
        text = late.expect("refused")["text"]
        assert all(word in text for word in words), text
        went(peers)  # though that process lives


class Unjoined(diloco.DiLoCo):
    """One that knows no run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(fresh(), join=False, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync_every": 0}, "sync_every"),
        ({"sync_every": 2, "mode": "eager"}, "mode"),
        ({"sync_every": 2, "quantize": "int9"}, "quantize"),
        ({"sync_every": 2, "overlap": 1}, "streaming"),
        ({"sync_every": 2, "mode": "async", "overlap": 0}, "overlap"),
        ({"sync_every": 2, "mode": "async", "overlap": 3}, "at most sync_every"),
        ({"sync_every": 2, "mode": "async", "mixing": 0.5}, "streaming"),
        ({"sync_every": 2, "mode": "streaming", "overlap": 2}, "overlap"),
        ({"sync_every": 2, "mode": "streaming", "fragments": 3}, "take turns"),
        ({"sync_every": 9, "mode": "streaming", "fragments": 6}, "cut"),
        ({"sync_every": 9, "mode": "streaming", "fragments": [["a"]]}, "each parameter once"),
        ({"sync_every": 9, "mode": "streaming", "mixing": 1.5}, "mixing"),
        ({"sync_every": 9, "verify_every": -1}, "verify_every"),
    ],
)
def test_arguments_that_make_no_sense_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(pccl.InvalidArgument, match=words):
        Unjoined(**options)


def test_a_step_without_having_joined_says_what_to_call() -> None:
    with pytest.raises(pccl.InvalidUsage, match=r"join\(\)"):
        Unjoined(sync_every=2).step()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_fragments_have_every_parameter_once_in_order_and_none_is_empty(
    sizes: list[int], data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    runs = cut(sizes, parts)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    assert len(runs) == parts and all(runs)


# Around a torch model.

TORCH_SHELL = """
import hashlib
import torch
from pccl.adapters.torch import DiLoCo

def make(number, dtype=torch.float32, **options):
    global diloco, model, inner, data
    torch.manual_seed(number)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(dtype)
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.Generator().manual_seed(number)
    diloco = DiLoCo(model, inner, **options)
    say(event="made", round=diloco.outer_step)

def digest(tensors):
    raw = b"".join(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(raw).hexdigest()

def go(rounds, until=0):
    def full():
        return not until or (diloco.info is not None and len(diloco.info.contributors) >= until)
    log, left, reached = [], rounds, full()
    while not (reached and left == 0):
        x = torch.randn(32, 9, generator=data).to(model[0].weight.dtype)
        loss = ((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean()
        loss.backward()
        inner.step()
        inner.zero_grad()
        if diloco.step(tokens=32):
            log.append({"round": diloco.outer_step, "loss": loss.item(), "outer": digest(diloco.parameters.values()),
                        "inner": digest(model.parameters()), "contributors": None})
            left -= reached
            reached = reached or full()
    say(event="went", log=log)

comm = start()
say(event="in", peer=pccl.init_peer)
while True:
    exec(hear(), globals())
"""


@pytest.mark.parametrize(
    "options",
    [
        "mode='sync'",
        "mode='async'",
        "mode='async', overlap=2, dtype=torch.bfloat16",
        "mode='streaming', fragments=2, overlap=1",
        "dtype=torch.bfloat16",
        "outer_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2)",
        "mode='async', outer_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2)",
        "mode='streaming', fragments=2, outer_optimizer=lambda p: torch.optim.SGD(p, 0.7, 0.9)",
    ],
)
def test_torch_models_are_trained_and_newcomers_get_the_outer_optimizers_state(
    options: str,
) -> None:
    pytest.importorskip("torch")
    with running() as run:
        peers = Peers(run.peers(2, TORCH_SHELL))
        make(peers, f"sync_every=5, {options}")
        made(peers)
        inner = "async" not in options and "streaming" not in options
        first = go(peers, "go(3)", inner=inner)
        late = Peers([run.peer(TORCH_SHELL)])
        make(late, f"sync_every=5, {options}", first=2)
        tell([*peers, *late], "go(8, until=3)")
        made(late)
        logs = went([*peers, *late], inner=inner)
        # How many rounds that are depends on when the newcomer is in, so there is no loss to come to.
        assert all(np.isfinite(entry["loss"]) for log in [*first, *logs] for entry in log)


def test_an_outer_sgd_of_torch_does_what_ours_does() -> None:
    torch = pytest.importorskip("torch")
    parameters = [np.array(array) for array in fresh(1).values()]
    tensors = [torch.from_numpy(array.copy()) for array in parameters]
    for nesterov in (True, False):
        ours = diloco.SGD(parameters, 0.7, 0.9, nesterov)
        theirs = torch.optim.SGD(tensors, 0.7, 0.9, nesterov=nesterov)
        for seed in range(5):
            gradients = list(fresh(seed).values())
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = torch.from_numpy(gradient.copy())
            ours.step(parameters, gradients)
            theirs.step()
        for array, tensor in zip(parameters, tensors, strict=True):
            assert np.allclose(array, tensor.numpy(), rtol=1e-5, atol=1e-5)


# Around a JAX program.


def test_jax_parameters_are_replaced_and_a_newcomer_gets_the_runs() -> None:
    pytest.importorskip("jax")
    shell = """
    import jax, jax.numpy as jnp, hashlib
    from pccl.adapters.jax import diloco

    def make(number, dtype="float32", **options):
        global outer, state, params, target
        key = jax.random.key(number)
        params = {"w": jax.random.normal(key, (40, 3), dtype), "b": jnp.float32(number)}
        target = jax.tree.map(lambda p: p + number, params)
        outer = diloco(**options)
        state = outer.init(params)
        params = state.params
        say(event="made", round=state.core.outer_step)

    def digest(tree):
        raw = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
        return hashlib.sha256(raw).hexdigest()

    def full(until):
        return not until or (state.core.info is not None and len(state.core.info.contributors) >= until)

    def go(rounds, until=0):
        global params, state
        log, left, reached = [], rounds, full(until)
        while not (reached and left == 0):
            params = jax.tree.map(lambda p, t: (p - 0.1 * (p - t)).astype(p.dtype), params, target)
            params, state = outer.update(params, state, tokens=8)
            if state.core.inner_step % 3 == 0:
                log.append({"round": state.core.outer_step, "inner": digest(params), "contributors": None,
                            "outer": digest(state.core.parameters), "dtype": str(params["w"].dtype)})
                left -= reached
                reached = reached or full(until)
        say(event="went", log=log)

    start()
    say(event="in", peer=pccl.init_peer)
    while True:
        exec(hear(), globals())
    """
    with running(JAX_PLATFORMS="cpu") as run:
        for dtype, mode, more in (("float32", "sync", ""), ("bfloat16", "async", ", overlap=2")):
            peers = Peers(run.peers(2, shell))
            options = f"dtype={dtype!r}, sync_every=3, mode={mode!r}{more}"
            make(peers, options)
            made(peers)
            go(peers, "go(2)", inner=mode == "sync")
            late = Peers([run.peer(shell)])
            make(late, options, first=2)
            tell([*peers, *late], "go(2, until=3)")
            made(late)
            assert went([*peers, *late], inner=mode == "sync")[2][-1]["dtype"] == dtype
            for worker in [*peers, *late]:
                worker.destroy()
