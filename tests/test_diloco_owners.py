"""SparseLoCo in larger groups: owners reduce the codes of their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from diloco_run import (
    Peers,
    asked,
    comes_back_late,
    equal,
    go,
    less,
    made,
    make,
    shown,
    tell,
    trained,
    went,
)
from hypothesis import given
from hypothesis import strategies as st
from members import Members, results
from programs import diloco_member as member
from programs import diloco_owners as shell
from programs import diloco_watching as watching
from programs.diloco_member import fresh
from test_diloco_quorum import QUORUM
from test_diloco_sparse import LISTS, SETTINGS
from workers import Run, Worker

import pccl
from pccl import diloco
from pccl.diloco import Sparse
from pccl.training.diloco import presets
from pccl.training.diloco.owners import Owners, owners_for
from pccl.training.diloco.sparse import Sparsifier, plain_shares, take_largest

Array = npt.NDArray[Any]


def flat(parts: Sequence[Array]) -> Array:
    return np.concatenate([part.reshape(-1) for part in parts])


def reduced(how: Owners, codes: Sequence[Array], weights: Sequence[float]) -> list[Array]:
    """The mean that all members get, by way of all owners' bytes."""
    parts = np.stack([how.parts(code) for code in codes], axis=1)
    assert parts.shape == (how.members, how.members, how.part_bytes)
    shares = plain_shares(weights).shares
    made = [how.reduce(rank, part, shares) for rank, part in enumerate(parts)]
    return how.mean(np.stack(made))


# ---- codes


@given(LISTS, SETTINGS, st.integers(1, 9), st.none() | st.integers(1, 3), st.integers(0, 1000))
def test_owners_send_the_largest_elements_of_the_mean(
    like: list[Array], sparse: Sparse, members: int, times: int | None, seed: int
) -> None:
    random = np.random.default_rng(seed)
    each = [[np.asarray(a * random.standard_normal(a.shape), a.dtype) for a in like]] * members
    makers = [Sparsifier(sparse, like) for _ in each]
    codes = np.stack([made.encode(one) for made, one in zip(makers, each, strict=True)])
    weights = random.integers(0, 3, members).astype(float).tolist()
    found = reduced(Owners(makers[0], members, times), codes, weights)
    assert [one.shape for one in found] == [one.shape for one in like]
    left = flat(makers[0].mean(codes, weights).arrays)
    want = left.copy()
    more = members if times is None else times
    runs = [run._replace(sent=min(more * run.sent, run.length)) for run in makers[0].runs]
    take_largest(left, runs)
    # Subtraction rounds; the members' own bytes are compared below.
    assert np.allclose(flat(found), want - left, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_members_send_what_the_guide_says() -> None:
    sparsifier = Sparsifier(Sparse(), [np.zeros((1024, 1024), np.float32)])
    sent: dict[int, float] = {}
    for members in WRITTEN:
        made = owners_for(sparsifier, members)
        each = sparsifier.size if made is None else made.part_bytes + made.code_bytes
        sent[members] = (members - 1) * each / (1 << 20)
    assert sent == pytest.approx(WRITTEN, rel=0.02)
    assert owners_for(sparsifier, 1) is None
    for members in range(presets._LEAST_OWNERS, 33):  # more would be few chunks for each
        made = owners_for(sparsifier, members)
        width = next(width for most, width in presets._OWNED if members <= most)
        assert made is not None
        assert members * (made.part_bytes + made.code_bytes) < 1.05 * width * (1 << 20)


# Bytes for each parameter, by members, with the defaults.
WRITTEN = {2: 0.056, 4: 0.167, 5: 0.223, 6: 0.156, 8: 0.197, 16: 0.328, 64: 0.529}


def test_a_code_that_makes_no_sense_is_an_error_of_all_members() -> None:
    sparsifier = Sparsifier(Sparse(), [np.zeros(9000, np.float32)])
    how = Owners(sparsifier, 3)
    codes = [sparsifier.encode([np.full(9000, rank, np.float32)]) for rank in range(3)]
    parts = np.stack([how.parts(code) for code in codes], axis=1)
    parts[1, 2] = 255  # what rank 2 sends to rank 1
    made = np.stack([how.reduce(rank, part, [0.5, 0.0, 0.5]) for rank, part in enumerate(parts)])
    with pytest.raises(pccl.InvalidArgument, match="rank 2 names a place outside its chunk"):
        how.mean(made)
    again = [how.reduce(rank, part, [0.5, 0.5, 0.0]) for rank, part in enumerate(parts)]
    how.mean(np.stack(again))  # a part of no weight is not looked at
    again[1][4:] = 255
    with pytest.raises(pccl.InvalidArgument, match="rank 1 names"):
        how.mean(np.stack(again))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    gradient = np.ones(9000, np.float32)
    gradient[123] = bad
    maker = Sparsifier(Sparse(), [gradient])
    codes = np.stack([maker.encode([gradient])] * 2)
    (found,) = reduced(Owners(maker, 2), codes, [1.0, 1.0])
    assert not np.isfinite(found[:4096]).all() and np.isfinite(found[4096:]).all()


# ---- members

SPARSE = {"density": 1 / 8, "chunk": 64}
HOW = Sparse(**SPARSE)  # type: ignore[arg-type]


class Reference:
    """The run in one process, whose members reduce by owners."""

    def __init__(self) -> None:
        self.theta = fresh(0)
        self._kept: dict[int, Sparsifier] = {}

    def codes(self, counted: Sequence[int]) -> dict[int, Array]:
        """Those that these members send next. A member that is new begins with nothing left."""
        for number in set(self._kept) - set(counted):
            del self._kept[number]
        made = {}
        for number in counted:
            like = list(self.theta.values())
            kept = self._kept.setdefault(number, Sparsifier(HOW, like))
            gradients = less(self.theta, trained(self.theta, number, 4))
            made[number] = kept.encode(list(gradients.values()))
        return made

    def apply(self, codes: dict[int, Array], more: int = 0) -> None:
        """`more`: members after these, whose learning does not count."""
        kept = self._kept[next(iter(codes))]
        weights = [1.0] * len(codes) + [0.0] * more
        sent = [*codes.values(), *[kept.nothing()] * more]
        means = reduced(Owners(kept, len(sent)), sent, weights)
        for name, mean in zip(self.theta, means, strict=True):
            self.theta[name] = np.asarray(self.theta[name] - np.float32(1.0) * mean)

    def round(self, counted: Sequence[int], more: int = 0) -> None:
        self.apply(self.codes(counted), more)


def prepared(run: Run, count: int) -> Peers:
    """Members that reduce by owners, however few they are."""
    peers = Peers(run.peers(count, member.serve))
    tell(peers, shell.always)
    tell(peers, shell.count_exchanges)
    return peers


def begun(run: Run, count: int, **options: Any) -> Peers:
    peers = prepared(run, count)
    make(peers, seed=0, sync_every=4, sparse=SPARSE, **options)
    made(peers)
    return peers


def exchanged(peers: Sequence[Worker]) -> list[int]:
    """How many reductions of each were by owners."""
    tell(peers, shell.show_exchanges)
    return [len(peer.expect("exchanges")["sent"]) for peer in peers]


@pytest.mark.parametrize("shm", ["0", "1"])
def test_rounds_are_those_of_the_owners_codes_bit_for_bit(run: Run, shm: str) -> None:
    run.env["PCCL_SHM"] = shm
    peers = begun(run, 3)
    go(peers, 4)
    want = Reference()
    for _ in range(4):
        want.round([0, 1, 2])
    assert equal(shown(peers), want.theta)
    assert exchanged(peers) == [4, 4, 4]


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_member_that_is_killed_in_a_reduction_is_left_out(run: Run, where: str) -> None:
    """Before the first call, between the two, or after the second one, where all have its part."""
    peers = begun(run, 4)
    left = peers[:3]
    go(peers, 1)
    want = Reference()
    want.round([0, 1, 2, 3])
    tell(peers[3:], partial(shell.die, where))
    tell(peers, partial(member.go, 1))
    peers[3].ends()
    went(left)
    codes = want.codes([0, 1, 2, 3])
    if where != "after":
        del codes[3]
    want.apply(codes)
    assert equal(shown(left), want.theta)
    go(left, 1)
    want.round([0, 1, 2])
    assert equal(shown(left), want.theta)
    assert exchanged(left) == [3, 3, 3]


def test_a_member_that_is_interrupted_between_the_calls_has_to_leave_first(run: Run) -> None:
    peers = begun(run, 3)
    go(peers, 1)
    tell(peers[:1], shell.be_interrupted_between)
    tell(peers[1:], member.forget_info)
    tell(peers[1:], partial(member.go, 2, until=3))
    assert "pccl.init(), then join()" in peers[0].expect("told", 60)["text"]
    peers[0].expect("back", 60)
    logs = [peer.expect("went", 60)["log"] for peer in peers]
    assert len({log[-1]["outer"] for log in logs}) == 1


def test_a_newcomer_owns_its_part_before_it_counts(run: Run) -> None:
    peers = begun(run, 2)
    go(peers, 1)
    late = prepared(run, 1)
    make(late, 2, sync_every=4, sparse=SPARSE)
    tell([*peers, *late], partial(member.go, 2, until=3))
    made(late)
    logs = went([*peers, *late])
    full = sum(len(one["contributors"]) == 3 for one in logs[0])
    want = Reference()
    for _ in range(1 + len(logs[0]) - full):
        want.round([0, 1])
    want.round([0, 1], more=1)
    for _ in range(full - 1):
        want.round([0, 1, 2])
    assert equal(shown([*peers, *late]), want.theta)


def test_a_newcomer_that_watches_holds_the_same_bytes(run: Run) -> None:
    options: dict[str, Any] = {"background_join": True}
    peers = begun(run, 3, **options)
    go(peers, 1)
    late = prepared(run, 1)
    options |= {"sync_every": 4, "sparse": SPARSE}
    tell(late, partial(watching.make_late, 3, 2, **options))
    asked(late[0])
    tell(peers, partial(watching.go_until_newcomers_count, 2))
    tell(late, partial(member.go, 2))
    made(late)
    logs = went([*peers, *late])
    assert logs[0][-1]["size"] == 4
    shown([*peers, *late])


def test_what_a_late_member_has_learned_counts(run: Run) -> None:
    peers = prepared(run, 4)
    make(peers, seed=0, **QUORUM, sparse=SPARSE)
    made(peers)
    go(peers, 1, tokens=8)
    counts = comes_back_late(peers, tokens=8)
    assert counts == [*[3] * (len(counts) - 2), 4, 4]
    shown(peers)
    tell(peers, member.show_world_tokens)
    learned = 3 * 8 * (4 + sum(counts))
    assert [peer.expect("tokens")["tokens"] for peer in peers] == [learned] * 4


OVERLAPPED = [{"mode": "async"}, {"mode": "streaming", "overlap": 1}, {"robust": "clip"}]


@pytest.mark.parametrize("options", OVERLAPPED)
def test_members_gather_in_the_background_and_with_robust(
    run: Run, options: dict[str, Any]
) -> None:
    peers = begun(run, 3, **options)
    go(peers, 2, inner=False)
    assert exchanged(peers) == [0, 0, 0]


def test_streaming_without_overlap_reduces_by_owners(run: Run) -> None:
    peers = begun(run, 3, mode="streaming", overlap=0, fragments=2)
    go(peers, 2, inner=False)
    shown(peers)
    assert exchanged(peers) == [4, 4, 4]


@pytest.mark.parametrize(("count", "by_owners"), [(5, False), (8, True)])
def test_the_size_alone_decides(
    members: Members, monkeypatch: pytest.MonkeyPatch, count: int, by_owners: bool
) -> None:
    monkeypatch.setenv("PCCL_SHM", "0")

    def train(rank: int, comm: pccl.Communicator) -> tuple[bytes, int, int]:
        model = {"w": np.zeros((200, 500), np.float32)}
        made = diloco.DiLoCo(model, sync_every=1, compression="sparse", comm=comm)
        random = np.random.default_rng(rank)
        while made.outer_step < 3:
            model["w"] -= random.standard_normal((200, 500)).astype(np.float32)
            made.step()
        assert made.info is not None
        assert made.info.bytes == (
            count * (part + 16) + code if by_owners else sparsifier.size + 16
        )
        return made.parameters["['w']"].tobytes(), made.tx_bytes, made.info.world_size

    sparsifier = Sparsifier(Sparse(), [np.zeros((200, 500), np.float32)])
    how = Owners(sparsifier, count)
    part, code = how.part_bytes, how.code_bytes
    told = results(members(count), train)
    sent = part + 16 + code if by_owners else sparsifier.size + 16
    assert told == [(told[0][0], 3 * (count - 1) * sent, count)] * count


# ---- convergence


@pytest.mark.parametrize("members", [6, 12])
def test_owners_learn_what_gathering_learns(members: int) -> None:
    """Members pull toward places of their own: the outer parameters go to the mean of these."""
    random = np.random.default_rng(0)
    targets = random.standard_normal((members, 8192)).astype(np.float32)
    targets += 3 * random.standard_normal(8192).astype(np.float32)
    middle = targets.mean(axis=0)

    def distance(by_owners: bool) -> float:
        theta = np.zeros_like(middle)
        kept = [Sparsifier(Sparse(), [theta]) for _ in range(members)]
        weights = [1.0] * members
        for _ in range(60):
            codes = [
                one.encode([np.float32(0.3) * (theta - target)])
                for one, target in zip(kept, targets, strict=True)
            ]
            if by_owners:
                (mean,) = reduced(Owners(kept[0], members), codes, weights)
            else:
                (mean,) = kept[0].mean(np.stack(codes), weights).arrays
            theta = theta - mean
        return float(np.linalg.norm(theta - middle) / np.linalg.norm(middle))

    assert distance(True) < 1.1 * distance(False) < 0.15
