"""SparseLoCo: codes of the largest elements, and members that send them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from diloco_run import MORE, Peers, equal, go, how, less, made, make, shown, tell, trained, went
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from members import Members, each
from programs import diloco_member as member
from programs.diloco_member import SHAPES, Model, fresh
from workers import Run

import pccl
from pccl import diloco
from pccl.diloco import Sparse
from pccl.training.diloco.sparse import Sparsifier

Array = npt.NDArray[Any]

FINITE = st.floats(-1e6, 1e6, width=32)
LISTS = st.lists(
    arrays.arrays(np.float32, arrays.array_shapes(max_dims=2, max_side=40), elements=FINITE),
    min_size=1,
    max_size=4,
)
SETTINGS = st.builds(
    Sparse,
    density=st.sampled_from([0.001, 1 / 32, 0.3, 1.0]),
    chunk=st.sampled_from([64, 256, 16384]),
    decay=st.sampled_from([0.0, 0.95, 1.0]),
)


def alone(sparsifier: Sparsifier, gradients: Sequence[Array]) -> list[Array]:
    """The mean of one code of these, decoded from its bytes."""
    code = sparsifier.encode(gradients)
    assert code.dtype == np.uint8 and code.shape == (sparsifier.size,)
    return sparsifier.mean(code[None], [1.0]).arrays


def flat(parts: Sequence[Array]) -> Array:
    return np.concatenate([part.reshape(-1) for part in parts])


# ---- codes


@given(LISTS, SETTINGS)
def test_a_code_and_what_is_left_out_add_up_to_what_was_given(
    gradients: list[Array], sparse: Sparse
) -> None:
    sparsifier = Sparsifier(sparse, gradients)
    left: Array = np.zeros_like(flat(gradients))
    for _ in range(3):
        want = np.float32(sparse.decay) * left + flat(gradients)
        sent = flat(alone(sparsifier, gradients))
        left = sparsifier.feedback.copy()
        assert np.allclose(sent + left, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


@given(LISTS, SETTINGS)
def test_of_each_chunk_the_largest_are_sent(gradients: list[Array], sparse: Sparse) -> None:
    sent = alone(Sparsifier(sparse, gradients), gradients)
    for gradient, part in zip(gradients, sent, strict=True):
        given_, found = gradient.reshape(-1), part.reshape(-1)
        for first in range(0, given_.size, sparse.chunk):
            chunk, there = given_[first : first + sparse.chunk], found[first : first + sparse.chunk]
            count = max(1, round(sparse.density * chunk.size))
            least = np.sort(np.abs(chunk))[-count]
            chosen = np.flatnonzero(there)
            assert len(chosen) <= count
            assert (np.abs(chunk[chosen]) >= least).all()
            assert (np.sign(there[chosen]) == np.sign(chunk[chosen])).all()
            assert len(set(np.abs(there[chosen]).tolist())) <= 2  # two bits: a sign, and one of two


def test_a_code_has_the_size_that_its_density_asks_for() -> None:
    weights = [np.zeros((1024, 1024), np.float32)]
    # 128 of 4096 elements with 12 bits for the place and 2 for the value; two bfloat16 a chunk.
    assert Sparsifier(Sparse(), weights).size == 256 * (128 * 14 // 8 + 4)


def test_all_that_was_given_is_sent_in_the_end() -> None:
    gradient = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    sparsifier = Sparsifier(Sparse(1 / 8, 256, decay=1.0), [gradient])
    total = alone(sparsifier, [gradient])[0]
    for _ in range(60):
        total += alone(sparsifier, [np.zeros_like(gradient)])[0]
    assert np.abs(total - gradient).max() < 0.01


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    gradient = np.ones(1000, np.float32)
    gradient[123] = bad
    (sent,) = alone(Sparsifier(Sparse(chunk=64), [gradient]), [gradient])
    assert not np.isfinite(sent[123])
    assert np.isfinite(sent[:64]).all() and np.isfinite(sent[128:]).all()


def test_members_of_no_weight_are_not_looked_at_and_order_is_that_of_ranks() -> None:
    random = np.random.default_rng(0)
    gradients = [[random.standard_normal((7, 100)).astype(np.float32)] for _ in range(3)]
    like, how = gradients[0], Sparse(0.5, 64)
    codes = np.stack([Sparsifier(how, like).encode(one) for one in gradients])
    each = [Sparsifier(how, like).mean(code[None], [1.0]).arrays[0] for code in codes]
    (found,) = Sparsifier(how, like).mean(codes, [3.0, 0.0, 1.0]).arrays
    assert found.tobytes() == (each[0] * np.float32(0.75) + each[2] * np.float32(0.25)).tobytes()
    codes[1] = 255  # names places that do not exist
    (again,) = Sparsifier(how, like).mean(codes, [3.0, 0.0, 1.0]).arrays
    assert again.tobytes() == found.tobytes()
    with pytest.raises(pccl.InvalidArgument, match="rank 1 names a place outside its chunk"):
        Sparsifier(how, like).mean(codes, [1.0, 1.0, 1.0])
    assert not Sparsifier(how, like).mean(codes, [0.0, 0.0, 0.0]).arrays[0].any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"density": 0}, "density is above 0 and at most 1"),
        ({"density": 1.5}, "density is above 0 and at most 1"),
        ({"density": "a lot"}, "density is a number"),
        ({"density": float("nan")}, "density is above 0 and at most 1"),
        ({"decay": -0.1}, "decay is from 0 to 1"),
        ({"chunk": 100}, "chunk is a power of two"),
        ({"chunk": 32768}, "chunk is a power of two"),
        ({"chunk": True}, "chunk is a power of two"),
    ],
)
def test_settings_that_make_no_sense_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(pccl.InvalidArgument, match=words):
        Sparse(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "top-k"}, 'compression is "sparse" or a Sparse'),
        ({"compression": np.zeros(3)}, 'compression is "sparse" or a Sparse'),
        ({"compression": "sparse", "quantize": "int8"}, "choose one"),
        ({"compression": "sparse", "mode": "streaming", "mixing": 0.5}, "mixing is 0 with"),
    ],
)
def test_arguments_that_make_no_sense_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(pccl.InvalidArgument, match=words):
        diloco.DiLoCo(fresh(), sync_every=2, join=False, **options)


def test_equal_settings_are_equal_however_they_are_written() -> None:
    same = Sparse(density=np.float32(1), chunk=np.int64(64), decay=0)  # type: ignore[arg-type]
    assert repr(same) == repr(Sparse(1.0, 64, 0.0))


def test_values_that_are_large_do_not_become_infinite() -> None:
    gradient = np.full(4096, 3e37, np.float32)
    (sent,) = alone(Sparsifier(Sparse(), [gradient]), [gradient])
    assert np.isfinite(sent).all() and (sent != 0).sum() == 128


# ---- members


@pytest.mark.parametrize("mode", MORE)
def test_what_is_learned_counts_once(members: Members, mode: str) -> None:
    """A model that moves by the same step for ever: so do the outer parameters."""

    def train(_: int, comm: pccl.Communicator) -> float:
        model = {"w": np.zeros(1000, np.float32), "none": np.zeros((0, 3), np.float32)}
        settings = how(mode)
        if mode == "streaming":  # what is learned behind an overlap does not count there
            settings |= {"fragments": 2, "overlap": 0}
        sparse = Sparse(1 / 8, 64, decay=1.0)
        made = diloco.DiLoCo(model, sync_every=4, compression=sparse, comm=comm, **settings)
        while made.outer_step < 60:
            model["w"] -= 0.25
            made.step()
        return float(made.parameters["['w']"].mean())

    (moved,) = each(members(1), train)
    # Without what is in flight, and what has not been sent: 8 rounds.
    assert -60 <= moved <= -50


SPARSE = {"density": 1 / 8, "chunk": 64}
HOW = Sparse(**SPARSE)  # type: ignore[arg-type]


def rounds_of(members: Sequence[Sequence[int]]) -> Model:
    """The outer parameters after these reductions of four steps each, in one process.

    A member that is new in one begins with nothing left over.
    """
    theta = fresh(0)
    kept: dict[int, Sparsifier] = {}
    for counted in members:
        for number in set(kept) - set(counted):
            del kept[number]
        codes = []
        for number in counted:
            made = kept.setdefault(number, Sparsifier(HOW, list(theta.values())))
            gradients = less(theta, trained(theta, number, 4))
            codes.append(made.encode(list(gradients.values())))
        means = kept[counted[0]].mean(np.stack(codes), [1.0] * len(codes)).arrays
        for name, mean in zip(theta, means, strict=True):
            theta[name] = np.asarray(theta[name] - np.float32(1.0) * mean)
    return theta


@pytest.mark.parametrize("shm", ["0", "1"])
def test_rounds_are_those_of_the_codes_bit_for_bit(run: Run, shm: str) -> None:
    run.env["PCCL_SHM"] = shm
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, sync_every=4, sparse=SPARSE)
    made(peers)
    go(peers, 5)
    assert equal(shown(peers), rounds_of([[0, 1]] * 5))


@pytest.mark.parametrize("mode", MORE)
def test_a_newcomer_and_a_loss_leave_all_with_the_same_bytes(run: Run, mode: str) -> None:
    peers = Peers(run.peers(2, member.serve))
    options = how(mode) | {"sync_every": 4, "sparse": SPARSE}
    make(peers, seed=0, **options)
    made(peers)
    go(peers, 2, inner=mode == "sync")
    late = Peers([run.peer(member.serve)])
    make(late, 2, **options)
    together = [*peers, *late]
    tell(together, partial(member.go, 3, until=3))
    made(late)
    logs = went(together, inner=mode == "sync")
    if mode == "sync":
        full = sum(len(one["contributors"]) == 3 for one in logs[0])
        # In the first round with three the newcomer, which has the last rank, did not count.
        members = [[0, 1]] * (2 + len(logs[0]) - full + 1) + [[0, 1, 2]] * (full - 1)
        assert logs[0][-1]["round"] == len(members)
        assert equal(shown(together), rounds_of(members))
    # One is killed in the middle of a round: the others go on with what they have left over.
    tell([peers[0]], partial(member.go, 3, die=2))
    left = [peers[1], *late]
    tell(left, partial(member.go, 3))
    peers[0].ends()
    went(left, inner=mode == "sync")
    shown(left)


def test_members_weigh_by_their_tokens(run: Run) -> None:
    every = {"density": 1.0, "chunk": 64, "decay": 0.0}
    everything = Sparse(**every)  # type: ignore[arg-type]
    peers = Peers(run.peers(2, member.serve))
    make(peers, seed=0, sync_every=2, sparse=every)
    made(peers)
    for peer, tokens in zip(peers, (150, 50), strict=True):
        tell([peer], partial(member.go, 1, tokens=tokens))
    went(peers)
    theta = fresh(0)
    made_ = [Sparsifier(everything, list(theta.values())) for _ in range(2)]
    codes = np.stack(
        [made_[n].encode(list(less(theta, trained(theta, n, 2)).values())) for n in range(2)]
    )
    means = made_[0].mean(codes, [300.0, 100.0]).arrays
    want = {n: np.asarray(theta[n] - np.float32(1) * m) for n, m in zip(SHAPES, means, strict=True)}
    assert equal(shown(peers), want)
    # Nobody has seen anything: nothing moves.
    go(peers, 1, tokens=0)
    assert equal(shown(peers), want)
