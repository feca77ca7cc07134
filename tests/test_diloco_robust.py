"""Bounded influence: what one member can do to the mean of all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from diloco_run import Peers, go, less, made, make, outer_step, shown, tell, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from programs import diloco_member as member
from programs.diloco_member import SHAPES, Model, fresh
from workers import Run

import pccl
from pccl import diloco
from pccl.diloco import Robust, Sparse
from pccl.training.diloco import robust, sparse
from pccl.training.diloco.options import Options, Plan
from pccl.training.diloco.sparse import Sparsifier

# ---- the mean ------------------------------------------------------------------------------------


@given(arrays.arrays(np.float32, st.integers(0, 300), elements=st.floats(-1e3, 1e3, width=32)))
def test_a_length_is_the_norm(array: Any) -> None:
    want = math.sqrt(math.fsum(float(value) ** 2 for value in array))
    assert robust.norm([array[:7], array[7:]]) == pytest.approx(want, rel=1e-12)


def test_a_long_contribution_is_scaled_down_to_the_median() -> None:
    one = np.eye(4, dtype=np.float32)
    gathered = one * np.float32([1, 2, 3, 400])[:, None]
    found = robust.mean(Robust("clip", bound=1.0, drop=math.inf), [gathered], [1.0] * 4)
    assert found.arrays[0].tolist() == [0.25, 0.5, 0.5, 0.5]
    assert (found.present, found.limited) == (True, [2, 3])
    # Members that send nothing do not make the median.
    found = robust.mean(Robust("clip"), [np.float32([[0], [0], [3], [0]])], [1.0] * 4)
    assert (found.arrays[0].tolist(), found.limited) == ([0.75], [])


@pytest.mark.parametrize("how", ["clip", "trimmed"])
def test_a_contribution_many_times_as_long_as_the_median_does_not_count(how: str) -> None:
    bounded = Robust(how, bound=20.0, drop=10.0, trim=0.0)
    gathered = np.float32([[1], [2], [3], [-20.5], [0]])
    found = robust.mean(bounded, [gathered], [1.0, 1.0, 1.0, 5.0, 1.0])
    assert (found.arrays[0].tolist(), found.limited, found.weight) == ([1.5], [3], 4.0)
    # Exactly ten times as long counts. Weights are compared among those that count.
    gathered[3] = 20
    found = robust.mean(bounded, [gathered], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert (found.arrays[0].tolist(), found.limited) == ([pytest.approx(26 / 5)], [])
    # Nobody knows which one of two is wrong.
    found = robust.mean(Robust("trimmed"), [np.float32([[1], [99], [0]])], [1.0, 1.0, 0.0])
    assert (found.arrays[0].tolist(), found.limited) == ([50.0], [])
    # Without the rule all count, also where all are 0.
    endless = Robust(how, bound=20.0, drop=math.inf, trim=0.0)
    found = robust.mean(endless, [np.float32([[1], [1], [19]])], [1.0] * 3)
    assert (found.arrays[0].tolist(), found.limited) == ([7.0], [])
    found = robust.mean(endless, [np.zeros((3, 1), np.float32)], [1.0] * 3)
    assert (found.arrays[0].tolist(), found.present, found.limited) == ([0.0], True, [])


def alike(count: int, *, wrong: float = 1.0) -> Any:
    """So many contributions with a common part, the last one times `wrong`."""
    random = np.random.default_rng(7)
    made = random.standard_normal(500) + 2 * random.standard_normal((count, 500))
    made[-1] *= wrong
    return made.astype(np.float32)


@pytest.mark.parametrize("how", ["clip", "trimmed"])
@pytest.mark.parametrize("wrong", [-1.0, -0.01, -9.0])
def test_a_contribution_against_the_others_does_not_count(how: str, wrong: float) -> None:
    careful = Robust(how, bound=100.0, trim=0.0, against=0.1)
    gathered = alike(8, wrong=wrong)
    found = robust.mean(careful, [gathered[:, :300], gathered[:, 300:]], [1.0] * 8)
    assert (found.limited, found.weight) == ([7], 7.0)
    mean = np.concatenate(found.arrays)
    np.testing.assert_allclose(mean, gathered[:7].mean(0), rtol=1e-4, atol=1e-5)
    # It counts by default, as it does where there are two, or where its direction is that of all.
    found = robust.mean(Robust(how), [gathered], [1.0] * 8)
    assert 7 not in found.limited or wrong == -9.0
    assert robust.mean(careful, [gathered[6:]], [1.0] * 2).limited == []
    assert robust.mean(careful, [alike(8)], [1.0] * 8).limited == []


def test_the_length_and_the_weight_of_one_do_not_turn_the_others() -> None:
    careful = Robust("clip", drop=math.inf, against=0.1)
    found = robust.mean(careful, [alike(8, wrong=-1e6)], [1.0] * 7 + [1e9])
    assert found.limited == [7]
    # Three of eight are a minority.
    gathered = alike(8)
    gathered[5:] *= -1
    assert robust.mean(careful, [gathered], [1.0] * 8).limited == [5, 6, 7]
    # Contributions that cancel out have no direction that the others' sum could be against.
    found = robust.mean(careful, [np.float32([[0, 0], [0, 0], [0, 0]])], [1.0] * 3)
    assert found.limited == []


@settings(max_examples=60)
@given(
    values=arrays.arrays(np.float32, (7, 33), elements=st.floats(-1e6, 1e6, width=32)),
    trim=st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.45]),
)
def test_the_outermost_values_of_each_element_do_not_count(values: Any, trim: float) -> None:
    left_out = Robust("trimmed", trim=trim).trimmed_of(7)
    found = robust.mean(Robust("trimmed", trim=trim, drop=math.inf), [values], [2.0] * 7)
    kept = np.sort(values.astype(np.float64), axis=0)[left_out : 7 - left_out]
    np.testing.assert_allclose(found.arrays[0], kept.mean(axis=0), rtol=1e-6, atol=1e-30)
    assert left_out == {0.0: 0, 0.1: 1, 0.2: 1, 0.3: 2, 0.45: 3}[trim]


def test_the_mean_does_not_depend_on_the_sum_of_this_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Since 3.12 the sum of floats is a compensated one.
    random = np.random.default_rng(0)
    weights = random.random(6).tolist()
    gathered = random.standard_normal((6, 40))
    how = Sparse(density=1.0, chunk=64)
    codes = np.stack([Sparsifier(how, [one]).encode([one]) for one in gathered])

    def means() -> list[bytes]:
        reader = Sparsifier(how, [gathered[0]])
        made = [robust.mean(Robust(how), [gathered], weights) for how in ("clip", "trimmed")]
        made += [reader.mean(codes, weights), reader.mean(codes, weights, Robust())]
        return [one.arrays[0].tobytes() for one in made]

    def compensated(values: Iterable[Any]) -> Any:
        given = list(values)
        return math.fsum(given) if any(isinstance(one, float) for one in given) else sum(given)

    before = means()
    for module in (robust, sparse):
        monkeypatch.setattr(module, "sum", compensated, raising=False)
    assert means() == before


def test_a_trimmed_mean_has_the_weights_of_the_values_that_are_kept() -> None:
    values = np.float32([[1, 8], [2, 4], [3, 6], [100, -100]])
    bounded = Robust("trimmed", trim=0.25, drop=math.inf)
    found = robust.mean(bounded, [values], [1.0, 2.0, 3.0, 4.0])
    assert found.arrays[0].tolist() == pytest.approx([13 / 5, 26 / 5])


@pytest.mark.parametrize("how", ["clip", "trimmed"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_contribution_that_is_not_finite_does_not_count(how: str, wrong: float) -> None:
    gathered = np.float32([[1, 2, 3], [1, wrong, 3], [1, 2, 3]])
    scalars = np.float32([4, 4, 4])
    found = robust.mean(Robust(how), [gathered, scalars], [1.0] * 3)
    assert [one.tolist() for one in found.arrays] == [[1, 2, 3], 4]
    assert (found.present, found.limited) == (True, [1])
    nothing = robust.mean(Robust(how), [gathered[1:2], scalars[1:2]], [1.0])
    assert [one.tolist() for one in nothing.arrays] == [[0, 0, 0], 0]
    assert (nothing.present, nothing.limited) == (False, [0])


@pytest.mark.parametrize("how", ["clip", "trimmed"])
@pytest.mark.parametrize("weight", [5e-324, 1e300, math.nan, -1.0, math.inf])
def test_a_weight_that_no_member_can_have_does_not_count(how: str, weight: float) -> None:
    gathered = [np.array([[0.010, 0.7], [0.012, 0.5], [0.011, 0.6]], np.float32)]
    found = robust.mean(Robust(how, trim=0.125), gathered, [1, 1, weight])
    assert found.limited == [2] and found.weight == 2
    assert np.allclose(found.arrays[0], [0.011, 0.6])


@pytest.mark.parametrize("how", ["clip", "trimmed"])
def test_nobody_weighs_much_more_than_the_others(how: str) -> None:
    gathered = np.float32([[1], [1], [-1]])
    found = robust.mean(Robust(how, weight=2.0, trim=0.0), [gathered], [1.0, 1.0, 1e15])
    assert (found.arrays[0].tolist(), found.limited) == ([0.0], [2])  # 1 + 1 - 2
    endless = robust.mean(Robust(how), [gathered], [1.0, 1.0, math.inf])
    assert (endless.arrays[0].tolist(), endless.limited) == ([1.0], [2])
    # Members of weight 0 are not looked at.
    gathered = np.float32([[1], [math.nan], [1]])
    found = robust.mean(Robust(how), [gathered], [5.0, 0.0, 5.0])
    assert (found.arrays[0].tolist(), found.limited) == ([1.0], [])
    assert not robust.mean(Robust(how), [gathered], [0.0] * 3).present


def test_codes_that_are_long_or_make_no_sense_are_limited() -> None:
    like = [np.zeros(300, np.float32), np.zeros((), np.float32)]
    how = Sparse(density=1.0, chunk=128)
    rising = np.arange(300, dtype=np.float32)
    parts = [
        Sparsifier(how, like).encode([np.float32(scale) * rising, np.float32(scale)])
        for scale in (1, 1, -1000)
    ]
    senseless = np.full_like(parts[0], 0xFF)
    codes = np.stack([*parts, senseless])
    reader = Sparsifier(how, like)
    alone = reader.mean(codes[:1], [1.0])
    for drop, share in ((math.inf, 1 / 3), (10.0, 1.0)):
        found = reader.mean(codes, [1.0] * 4, Robust("clip", bound=1.0, drop=drop))
        assert (found.present, found.limited) == (True, [2, 3])
        for one, honest in zip(found.arrays, alone.arrays, strict=True):
            np.testing.assert_allclose(one, honest * share, rtol=1e-2, atol=1e-5)
    with pytest.raises(pccl.InvalidArgument, match="the code of rank 3 names a place outside"):
        reader.mean(codes, [1.0] * 4)


def test_a_code_against_the_others_does_not_count() -> None:
    how = Sparse(density=0.25, chunk=64)
    gathered = alike(5, wrong=-1.0)
    codes = np.stack([Sparsifier(how, [one]).encode([one]) for one in gathered])
    reader = Sparsifier(how, [gathered[0]])
    found = reader.mean(codes, [1.0] * 5, Robust("clip", bound=100.0, against=0.1))
    assert (found.limited, found.weight) == ([4], 4.0)
    (honest,) = reader.mean(codes[:4], [1.0] * 4).arrays
    np.testing.assert_allclose(found.arrays[0], honest, rtol=1e-5, atol=1e-6)


def test_what_makes_no_sense_is_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"how": "median"},
        {"bound": 0},
        {"bound": math.inf},
        {"bound": True},
        {"trim": 0.5},
        {"trim": -0.1},
        {"weight": 0.5},
        {"weight": "2"},
        {"drop": 0.9},
        {"drop": math.nan},
        {"against": -0.1},
        {"against": 1.5},
        {"against": None},
    ]
    for one in wrong:
        with pytest.raises(pccl.InvalidArgument, match=next(iter(one))):
            Robust(**one)
    model = {"a": np.zeros(3, np.float32)}
    options: list[tuple[dict[str, Any], str]] = [
        ({"robust": "krum"}, '"clip", "trimmed" or a Robust'),
        ({"robust": "clip", "quantize": "int8"}, "quantize adds them up"),
        ({"robust": "trimmed", "compression": "sparse"}, 'robust="clip" only'),
    ]
    for given_, sentence in options:
        with pytest.raises(pccl.InvalidArgument, match=sentence):
            diloco.DiLoCo(model, sync_every=4, join=False, **given_)


def test_members_with_another_rule_have_other_settings() -> None:
    clip, trimmed = (
        str(Plan.of(Options(sync_every=4, robust=how), ["w"], [10])) for how in ("clip", "trimmed")
    )
    assert clip != trimmed and "trimmed (trim=0.125" in trimmed


# ---- runs ----------------------------------------------------------------------------------------


def reference(how: Robust, rounds: int, factors: list[float]) -> Model:
    """The outer parameters after so many rounds of four steps, with gradients times `factors`."""
    theta = fresh(0)
    velocity = {name: np.zeros_like(array) for name, array in theta.items()}
    for _ in range(rounds):
        gradients = [less(theta, trained(theta, own, 4)) for own in range(len(factors))]
        gathered = [
            np.stack([np.float32(f) * g[name] for f, g in zip(factors, gradients, strict=True)])
            for name in SHAPES
        ]
        found = robust.mean(how, gathered, [1.0] * len(factors))
        outer_step(theta, velocity, dict(zip(SHAPES, found.arrays, strict=True)))
        theta = {name: array.copy() for name, array in theta.items()}
    return theta


@pytest.mark.parametrize("how", ["clip", "trimmed"])
@pytest.mark.parametrize("factor", [-100.0, math.nan])
def test_one_of_four_members_is_hostile(run: Run, how: str, factor: float) -> None:
    peers = Peers(run.peers(4, member.serve))
    make(peers[:3], seed=0, sync_every=4, robust=how)
    tell(peers[3:], partial(member.make, 3, seed=0, sync_every=4, robust=how, spoil=factor))
    made(peers)
    # Ranks may come in any order, and the sums are in that of the ranks.
    go(peers, 3)
    want = reference(Robust(how), 3, [1.0, 1.0, 1.0, factor])
    found = shown(peers)
    assert all(np.allclose(found[name], want[name], rtol=1e-5, atol=1e-6) for name in want)
    tell(peers, member.show_limited)
    who = [set(peer.expect("limited")["who"]) for peer in peers]
    assert all(one == who[0] for one in who)
    # One that finds its own part not finite takes part without counting.
    assert (peers.ids[3] in who[0]) == (not math.isnan(factor))


def bounded(mode: str, how: str) -> dict[str, Any]:
    """Options of a DiLoCo. In "sparse" codes are clipped."""
    options: dict[str, Any] = {"sync_every": 4, "mode": mode, "robust": how}
    if how == "sparse":
        options |= {"robust": "clip", "sparse": {"density": 0.25, "chunk": 64}}
    return options


@pytest.mark.parametrize("mode", ["sync", "async", "streaming"])
@pytest.mark.parametrize("how", ["clip", "trimmed", "sparse"])
def test_a_member_whose_training_broke_begins_again(run: Run, mode: str, how: str) -> None:
    options = bounded(mode, how)
    inner = mode == "sync"
    peers = Peers(run.peers(3, member.serve))
    make(peers, seed=0, **options)
    made(peers)
    go(peers, 1, inner=inner)
    tell(peers[:1], member.break_the_model)
    go(peers, 3, inner=inner)
    tell(peers, member.finish)
    assert all(peer.expect("same")["same"] for peer in peers)
    found = shown(peers)
    assert all(np.isfinite(one).all() for one in found.values())
    tell(peers, member.show_limited)
    # Its contributions of the last round are finite again.
    assert all(peers.ids[0] not in peer.expect("limited")["who"] for peer in peers)


@pytest.mark.parametrize("mode", ["sync", "async", "streaming"])
@pytest.mark.parametrize("how", ["clip", "trimmed", "sparse"])
def test_newcomers_and_losses_with_bounded_influence(run: Run, mode: str, how: str) -> None:
    options = bounded(mode, how)
    inner = mode == "sync"
    peers = Peers(run.peers(3, member.serve))
    make(peers, seed=0, **options)
    made(peers)
    go(peers, 2, inner=inner)
    tell(peers[2:], partial(member.go, 2, die=2))
    late = Peers([run.peer(member.serve) for _ in range(2)])
    make(late, 3, **options)
    tell([*peers[:2], *late], partial(member.go, 3, until=4))
    made(late)
    logs = [peer.expect("went", 60)["log"] for peer in (*peers[:2], *late)]
    assert len({log[-1]["outer"] for log in logs}) == 1
    assert logs[0][-1]["size"] == 4
