"""DiLoCo among real processes: the algebra against plain NumPy in one process, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from diloco_run import (
    MODES,
    MORE,
    Peers,
    close,
    equal,
    go,
    how,
    less,
    made,
    make,
    mean,
    outer_step,
    reference,
    shown,
    tell,
    trained,
    went,
)
from hypothesis import given
from hypothesis import strategies as st
from programs import diloco_member as member
from programs.diloco_member import SHAPES, Model, fresh, train
from workers import Run

import pccl
from pccl import diloco
from pccl.training.diloco.options import cut


@pytest.mark.parametrize("mode", MODES)
def test_rounds_are_those_of_the_paper_bit_for_bit(run: Run, mode: str) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, sync_every=4, mode=mode)
    made(peers)
    go(peers, 5, inner=mode != "async")
    assert equal(shown(peers), reference(mode, 4, [[0, 1]] * 5))
    # A finish applies the reduction in flight, and the model is the outer one.
    tell(peers, member.finish)
    assert all(peer.expect("same")["same"] for peer in peers)
    want = reference(mode, 4, [[0, 1]] * 5) if mode == "sync" else reference(mode, 4, [[0, 1]] * 6)
    assert equal(shown(peers), want)


@pytest.mark.parametrize("mode", MORE)
def test_founders_with_different_parameters_begin_with_the_same(run: Run, mode: str) -> None:
    peers = Peers(run.peers(3, member.serve))
    make(peers, sync_every=6, **how(mode))
    first = made(peers)
    assert len({(one["outer"], one["inner"]) for one in first}) == 1
    logs = go(peers, 3, inner=mode == "sync")
    assert [one["size"] for one in logs[0]] == [3, 3, 3]


@pytest.mark.parametrize("mode", MODES)
def test_parameters_of_float64_stay_so(run: Run, mode: str) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, sync_every=4, dtype="float64", mode=mode)
    made(peers)
    go(peers, 3, inner=mode == "sync")
    assert close(shown(peers), reference(mode, 4, [[0, 1]] * 3))
    tell(peers, member.show_types)
    assert all(set(peer.expect("kept")["dtypes"]) == {"float64"} for peer in peers)


@pytest.mark.parametrize("mode", MODES)
def test_a_world_of_one_trains_on(run: Run, mode: str) -> None:
    peers = Peers([run.peer(member.serve)])
    make(peers, seed=0, sync_every=3, mode=mode)
    made(peers)
    go(peers, 4)
    assert equal(shown(peers), reference(mode, 3, [[0]] * 4))


@pytest.mark.parametrize(
    ("mode", "like"),
    [
        ({"mode": "sync"}, "sync"),
        ({"mode": "async"}, "async"),
        ({"mode": "streaming", "fragments": 1, "overlap": 0, "mixing": 0.0}, "sync"),
    ],
)
def test_members_weigh_by_their_tokens(run: Run, mode: dict[str, Any], like: str) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, sync_every=2, **mode)
    made(peers)
    for peer, tokens in zip(peers, (150, 50), strict=True):
        tell([peer], partial(member.go, 3, tokens=tokens))
    inner = like == "sync"
    went(peers, inner=inner)
    assert equal(shown(peers), reference(like, 2, [[0, 1]] * 3, [300, 100]))
    # Nobody has seen anything: nothing moves, once what is in flight has come, and nobody fails.
    go(peers, 1, tokens=0, inner=inner)
    before = shown(peers)
    go(peers, 1, tokens=0, inner=inner)
    assert equal(shown(peers), before)


def streamed(
    every: int, fragments: Sequence[Sequence[str]], overlap: int, mixing: float, steps: int
) -> tuple[Model, list[Model]]:
    """Streaming DiLoCo of two members, in one process: the outer parameters and each one's own."""
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
    """Asynchronous DiLoCo of two members, in one process: outer parameters and each one's own."""
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


def hold(peers: Peers, theta: Model, models: Sequence[Model]) -> None:
    """Refuses other outer parameters, and other ones of each member's own."""
    assert equal(shown(peers), theta)
    tell(peers, member.show_own)
    for peer, model in zip(peers, models, strict=True):
        own = peer.expect("own")
        assert equal({name: np.array(own[name], np.float32) for name in SHAPES}, model)


@pytest.mark.parametrize("overlap", [1, 3, 7])
def test_async_moves_to_the_mean_after_the_overlap_bit_for_bit(run: Run, overlap: int) -> None:
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, sync_every=8, mode="async", overlap=overlap)
    made(peers)
    go(peers, 3, inner=False)
    theta, models = overlapped(8, overlap, 3)
    hold(peers, theta, models)


@pytest.mark.parametrize(
    ("overlap", "mixing"), [(0, 0.0), (0, 0.5), (1, 0.5), (2, 0.25), (5, 0.5), (7, 0.0)]
)
def test_fragments_go_in_turn_bit_for_bit(run: Run, overlap: int, mixing: float) -> None:
    # Two in flight at once from an overlap of 4 on.
    fragments = [["a", "d"], ["b", "c", "e"]]
    names = [[f"['{name}']" for name in fragment] for fragment in fragments]
    peers = Peers(run.peers(2, member.serve))
    options = {"fragments": names, "overlap": overlap, "mixing": mixing}
    make(peers, seed=0, sync_every=8, mode="streaming", **options)
    made(peers)
    go(peers, 3, inner=False)
    theta, models = streamed(8, fragments, overlap, mixing, 24)
    hold(peers, theta, models)


@pytest.mark.parametrize("mode", MORE)
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.env(PCCL_SHM="0")
def test_quantized_members_still_agree_and_come_near(run: Run, mode: str, feedback: bool) -> None:
    # in memory of one host nothing is quantized
    peers = Peers(run.peers(2, member.serve))
    quantize = {"dtype": "int8", "error_feedback": feedback}
    options = how(mode) | {"sync_every": 4, "quantize": quantize}
    make(peers, seed=0, **options)
    made(peers)
    go(peers, 2, inner=mode == "sync")
    late = Peers([run.peer(member.serve)])
    make(late, 2, **options)
    tell([*peers, *late], partial(member.go, 3, until=3))
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
        ({"sync_every": 9, "warm_up": -1}, "warm_up"),
        ({"sync_every": 9, "warm_up": 2, "round_seconds": 1.0}, "round_seconds"),
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
