"""One receiver's transfer of a shared state, frame by frame: requests, frames, lost sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl import _testing

CHUNK = 1 << 20
OK, PEER_LOST = 0, 9
WINDOW = 16
FIRST_PAYLOAD = 1 << 20  # wire::kMaxFirstPayload


def noise(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def receiver(
    old: list[bytes],
    new: list[bytes],
    holders: int = 1,
    *,
    writable: bool = True,
    overwrite: bool = False,
) -> _testing.Receiver:
    return _testing.Receiver(old, new, holders, writable, overwrite)


def give(it: _testing.Receiver, number: int, holder: int, chunk: int | None) -> str:
    """A whole frame."""
    kind = it.begins(number, holder, chunk)
    if kind == "store":
        it.fill(number)
        it.arrived(number)
    return kind


def asked(it: _testing.Receiver, holder: int) -> list[int]:
    chunks: list[int] = []
    while (fetch := it.next(holder)) is not None:
        assert not fetch[0]
        chunks += fetch[1]
    return chunks


def with_manifest(it: _testing.Receiver, holder: int = 1) -> _testing.Receiver:
    assert it.next(holder) == (True, [])
    assert give(it, 0, holder, None) == "store"
    return it


def test_a_second_copy_of_a_chunk_cannot_spoil_the_first() -> None:
    old, new = [noise(1, CHUNK + 5)], [noise(2, CHUNK + 5)]
    it = with_manifest(receiver(old, new))
    assert asked(it, 1) == [0, 1]
    assert it.begins(1, 1, 0) == "store"
    assert it.begins(2, 1, 0) == "drain"  # on another connection of the link
    it.fill(1)
    it.arrived(1)
    it.fill(2, spoilt=True)
    assert give(it, 3, 1, 1) == "store"
    assert it.begins(4, 1, 1) == "drain"
    assert it.over() == (OK, "")
    assert it.result() == new


def test_a_chunk_whose_frame_was_given_up_is_taken_from_another_source() -> None:
    old, new = [noise(1, 100)], [noise(2, 100)]
    it = with_manifest(receiver(old, new, holders=2))
    assert (asked(it, 1), asked(it, 2)) == ([0], [])
    assert it.begins(1, 1, 0) == "store"
    it.fill(1, spoilt=True)
    it.voided(1)
    assert asked(it, 2) == [0]
    assert give(it, 2, 2, 0) == "store"
    assert it.result() == new


def test_what_a_broken_link_owes_is_asked_of_the_others_at_once() -> None:
    old, new = [noise(1, 40 * CHUNK)], [noise(2, 40 * CHUNK)]
    it = with_manifest(receiver(old, new, holders=2))
    first, second = asked(it, 1), asked(it, 2)
    assert len(first) == len(second) == WINDOW
    for number, chunk in enumerate(second[:8]):
        assert give(it, 1 + number, 2, chunk) == "store"
    asked(it, 2)
    for number, chunk in enumerate(range(32, 40)):
        give(it, 20 + number, 2, chunk)
    it.begins(40, 1, first[0])
    it.link(1, False)
    assert set(asked(it, 2)) <= set(first)
    for number, chunk in enumerate(second[8:]):
        give(it, 50 + number, 2, chunk)
    assert asked(it, 2)
    assert asked(it, 1) == []


def test_what_differs_is_kept_in_one_block_but_new_arrays_each_in_their_own() -> None:
    old = [noise(1, 2 * CHUNK), noise(2, 100), noise(3, 100), noise(4, 64)]
    new = [old[0][:CHUNK] + noise(5, CHUNK), noise(6, 100), noise(3, 100), noise(7, 64)]
    in_place = with_manifest(receiver(old, new))
    assert in_place.memory() == [CHUNK + 128 + 64]  # of each 64 bytes a place
    assert with_manifest(receiver(old, new, writable=False)).memory() == [2 * CHUNK, 100, 64]
    assert with_manifest(receiver(new, new)).memory() == []


def test_a_source_that_does_not_serve_is_dropped() -> None:
    old, new = [noise(1, 100)], [noise(2, 100)]
    it = receiver(old, new, holders=2)
    assert it.next(1) == (True, [])
    for second in range(10):
        it.tick(second)
    assert it.next(2) is None
    it.tick(10)
    assert it.next(2) == (True, [])  # the next one's manifest
    assert give(it, 0, 2, None) == "store"
    assert asked(it, 2) == [0]
    for second in range(11, 21):
        it.tick(second)
    assert it.over() is None
    it.tick(21)
    code, reason = it.over() or (0, "")
    assert code == PEER_LOST
    assert "does not send" in reason


def test_a_source_that_serves_slowly_is_not_dropped() -> None:
    old, new = [noise(1, 20 * CHUNK)], [noise(2, 20 * CHUNK)]
    it = with_manifest(receiver(old, new))
    for chunk in range(20):
        for second in range(chunk * 9, chunk * 9 + 9):
            it.tick(second)
        assert it.over() is None
        assert give(it, 1 + chunk, 1, chunk) == "store"
        asked(it, 1)
    assert it.over() == (OK, "")
    # Nor are they all when it was this peer that was frozen.
    it = with_manifest(receiver(old, new))
    for second in (*range(8), 60, *range(61, 70)):
        it.tick(second)
    assert it.over() is None
    # Nor is one while a frame of it is on the way: the connection itself is watched.
    it = with_manifest(receiver(old, new))
    it.begins(1, 1, 0)
    for second in range(100):
        it.tick(second)
    assert it.over() is None
    # Nor one that was not asked, or cannot be reached yet.
    it = with_manifest(receiver([noise(1, 100)], [noise(2, 100)], holders=2))
    it.link(1, False)
    it.begins(1, 2, 0)
    for second in range(100):
        it.tick(second)
    assert it.over() is None


def located(it: _testing.Receiver, chunks: list[int], holder: int = 1, memory: int = 0) -> None:
    """The holder's whole array is in that memory."""
    assert it.located(holder, [(chunk, memory, chunk * CHUNK) for chunk in chunks])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_receiver_reads_the_memory_of_a_holder_on_its_host(overwrite: bool) -> None:
    old, new = [noise(1, 20 * CHUNK + 7)], [noise(2, 20 * CHUNK + 7)]
    it = with_manifest(receiver(old, new, overwrite=overwrite))
    it.shared(1, 0, new[0])
    while it.over() is None:
        located(it, asked(it, 1))
        assert it.read()
    assert not it.read()
    assert it.over() == (OK, "")
    assert it.now() == (new if overwrite else old, overwrite, True)
    assert it.result() == new


def test_a_chunk_is_read_when_its_memory_is_here() -> None:
    old, new = [noise(1, 3 * CHUNK)], [noise(2, 3 * CHUNK)]
    it = with_manifest(receiver(old, new))
    assert asked(it, 1) == [0, 1, 2]
    located(it, [1], memory=4)
    assert it.located(1, [(0, 4, 0), (1, 6, 0), (1, 5, 0)])  # the last place counts
    assert not it.read()
    it.shared(1, 5, new[0][CHUNK:])
    assert it.read()
    assert not it.read()
    assert give(it, 1, 1, 1) == "drain"  # it was read
    assert give(it, 2, 1, 0) == "store"  # and a chunk may come as bytes nevertheless
    it.shared(1, 4, new[0])
    assert not it.read()
    assert it.over() is None
    located(it, [2], memory=4)
    assert it.read()
    assert it.over() == (OK, "")
    assert it.result() == new


def test_memory_that_cannot_be_mapped_or_does_not_come_is_asked_for_as_bytes() -> None:
    old, new = [noise(1, 4 * CHUNK)], [noise(2, 4 * CHUNK)]
    it = with_manifest(receiver(old, new))
    assert asked(it, 1) == [0, 1, 2, 3]
    assert not it.asked_for_bytes()
    located(it, [0], memory=1)
    it.shared(1, 1, b"")
    assert it.read()
    assert (asked(it, 1), it.asked_for_bytes()) == ([0], True)
    located(it, [1, 2], memory=2)
    for second in range(3):
        it.tick(second)
        assert asked(it, 1) == []
    it.tick(3)
    assert (asked(it, 1), it.asked_for_bytes()) == ([1, 2], True)
    for chunk in range(4):
        assert give(it, 1 + chunk, 1, chunk) == "store"
    assert it.result() == new


def test_memory_that_keeps_coming_is_waited_for() -> None:
    old, new = [noise(1, 12 * CHUNK)], [noise(2, 12 * CHUNK)]
    it = with_manifest(receiver(old, new))
    chunks = asked(it, 1)
    located(it, chunks[:1], memory=0)
    for second, (chunk, following) in enumerate(zip(chunks, chunks[1:], strict=False)):
        it.tick(second)
        it.shared(1, chunk, new[0])
        located(it, [following], memory=following)
        assert it.read()
    # Nor did it come too late when this peer was frozen meanwhile.
    it.tick(1000)
    assert asked(it, 1) == []
    it.shared(1, chunks[-1], new[0])
    assert it.read()
    assert it.over() == (OK, "")
    assert it.result() == new


def test_a_holder_that_is_asked_for_bytes_has_time_to_send_them() -> None:
    it = with_manifest(receiver([noise(1, CHUNK)], [noise(2, CHUNK)]))
    assert asked(it, 1) == [0]
    located(it, [0])
    for second in (0, 3, 6, 9, 12):
        it.tick(second)
    assert (asked(it, 1), it.asked_for_bytes()) == ([0], True)
    assert it.over() is None


def test_places_do_not_outlive_a_link() -> None:
    old, new = [noise(1, 2 * CHUNK)], [noise(2, 2 * CHUNK)]
    it = with_manifest(receiver(old, new))
    assert asked(it, 1) == [0, 1]
    located(it, [0, 1], memory=3)
    it.link(1, False)
    it.link(1, True)
    it.shared(1, 3, noise(3, 2 * CHUNK))
    assert not it.read()
    it.shared(1, 4, new[0])
    located(it, asked(it, 1), memory=4)
    assert it.read()
    assert it.over() == (OK, "")
    assert it.result() == new


@pytest.mark.parametrize("fault", ["outside", "other bytes"])
def test_a_holder_whose_memory_is_wrong_is_not_used_any_more(fault: str) -> None:
    old, new = [noise(1, 3 * CHUNK)], [noise(2, 3 * CHUNK)]
    it = with_manifest(receiver(old, new, holders=2))
    assert (asked(it, 1), asked(it, 2)) == ([0, 1, 2], [])
    it.shared(1, 0, new[0][: 2 * CHUNK - 1] + (b"" if fault == "outside" else noise(3, CHUNK)))
    located(it, [0, 1])
    assert it.read()
    left = asked(it, 2)
    assert sorted(left) == [1, 2]
    for number, chunk in enumerate(left):
        assert give(it, 1 + number, 2, chunk) == "store"
    assert it.result() == new


def test_places_of_chunks_that_nobody_asked_for_mean_nothing() -> None:
    old, new = [noise(1, 2 * CHUNK)], [noise(2, 2 * CHUNK)]
    it = receiver(old, new, holders=2)
    it.shared(1, 0, noise(3, 2 * CHUNK))
    it.shared(2, 0, new[0])
    located(it, [0, 1])
    assert not it.read()
    with_manifest(it)
    assert (asked(it, 1), asked(it, 2)) == ([0, 1], [])
    located(it, [0, 1], holder=2)
    located(it, [0], holder=5)
    assert it.located(1, [(7, 0, 0)])
    assert not it.read()
    assert not it.located(1, [(0, 0, 0)] * (WINDOW + 1))
    it.link(1, False)  # what it said before counts no more
    it.link(1, True)
    located(it, asked(it, 2), holder=2)
    assert it.read()
    assert it.over() == (OK, "")
    assert it.result() == new


def test_a_holder_names_places_only_to_peers_that_can_read_them() -> None:
    it = receiver([noise(1, 2 * CHUNK), noise(1, 100)], [b"", b""])
    it.let_read(9)
    for peer, places in ((8, []), (9, [(0, 0, 0), (1, 0, CHUNK), (2, 1, 0)])):
        it.asked(peer, peer, [0, 1, 2])
        sent = it.serves(peer, peer)
        assert sent == ([] if places else [0, 1, 2])
        assert it.serves_more(peer, peer, [1], False) == ([] if places else [1], places[1:2])
    # It says that it cannot read them after all.
    assert it.serves_more(9, 9, [1], True) == ([1], [])
    assert it.serves_more(9, 9, [2], False) == ([2], [])


def test_a_receiver_serves_nobody() -> None:
    it = with_manifest(receiver([noise(1, 100)], [noise(2, 100)]))
    assert asked(it, 1) == [0]
    assert it.asked(1, 0, [0])
    assert it.next(1) is None


def test_requests_that_come_early_are_kept_and_no_peer_can_spoil_anothers() -> None:
    it = receiver([noise(1, 100)], [noise(2, 100)])
    for later in (3, 9, 1, 2**30):
        assert it.asked(8, later, [0])  # a hostile one: ids that will never be
    assert not it.asked(8, 2**30, [0] * 100)
    assert it.asked(9, 1, [0])
    assert it.asked(9, 2, [0])
    assert it.asked(9, 1, [0])  # overtaken: of the sync before
    assert it.serves(2, 9) == [0]
    assert it.serves(3, 8) == []


@given(
    st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=3),
    st.sets(st.integers(0, 8)),
    st.booleans(),
    st.booleans(),
)
def test_a_receiver_ends_with_the_bytes_of_the_holders(
    sizes: list[int], changed: set[int], writable: bool, overwrite: bool
) -> None:
    new = [noise(seed, size) for seed, size in enumerate(sizes)]
    old: list[Any] = [bytearray(data) for data in new]
    at = 0
    for data in old:
        for chunk in range(0, len(data), CHUNK):
            if at in changed:
                data[chunk] ^= 1
            at += 1
    before = [bytes(data) for data in old]
    it = with_manifest(receiver(before, new, writable=writable, overwrite=overwrite))
    wanted = asked(it, 1)
    assert set(wanted) == {chunk for chunk in range(at) if chunk in changed}
    for number, chunk in enumerate(wanted):
        assert give(it, 1 + number, 1, chunk) == "store"
    assert it.over() == (OK, "")
    assert it.now()[0] == (new if writable and overwrite else before)
    assert it.result() == new


def test_nothing_is_overwritten_before_the_caller_can_take_the_rest() -> None:
    old, new = [noise(1, 100)], [noise(2, 100), noise(3, 200)]
    it = _testing.Receiver(old, new, 1, True, overwrite=True, waits=True)
    with_manifest(it)
    assert asked(it, 1) == []
    it.go_on()
    assert asked(it, 1) == [0, 1]
    # Without an entry to be made, nothing waits.
    it = _testing.Receiver(old, new[:1], 1, True, overwrite=True, waits=True)
    assert asked(with_manifest(it), 1) == [0]


chunk_of = st.integers(0, 2)  # which of three contents a chunk has


@given(
    st.lists(st.tuples(chunk_of, chunk_of, chunk_of), min_size=1, max_size=6),
    st.lists(st.sampled_from(["whole", "spoilt", "begun", "given up"]), max_size=6),
)
def test_an_overwritten_state_knows_what_it_has_whatever_is_elected_next(
    chunks: list[tuple[int, int, int]], frames: list[str]
) -> None:
    contents = [noise(seed, CHUNK) for seed in range(3)]
    old, first, second = ([b"".join(contents[c[i]] for c in chunks)] for i in range(3))
    it = with_manifest(receiver(old, first, overwrite=True))
    wanted = asked(it, 1)
    assert it.memory() == []
    assert it.now() == (old, False, True)
    placed = list(zip(wanted, frames, strict=False))
    for number, (chunk, kind) in enumerate(placed):
        assert it.begins(1 + number, 1, chunk) == "store"
        if kind == "begun":
            continue
        it.fill(1 + number, spoilt=kind == "spoilt")
        if kind == "given up":
            it.voided(1 + number)
        else:
            it.arrived(1 + number)
        if kind in ("given up", "spoilt"):
            break  # its source is not used any more
    _, mixed, right = it.now()
    assert (mixed, right) == (bool(placed), True)
    it.again(second, 1)
    with_manifest(it)
    has = it.now()[0][0]
    wanted = asked(it, 1)
    for chunk, (_, _, meant) in enumerate(chunks):
        if has[chunk * CHUNK : (chunk + 1) * CHUNK] != contents[meant]:
            assert chunk in wanted
    for number, chunk in enumerate(wanted):
        assert give(it, 100 + number, 1, chunk) == "store"
    assert it.over() == (OK, "")
    assert it.now() == (second, bool(placed) or bool(wanted), True)
    assert it.result() == second


@pytest.mark.parametrize(("entries", "name_bytes"), [(1, 10), (400, 100), (900, 1024), (1001, 1)])
def test_a_member_comes_back_in_the_middle_of_a_sync_whatever_the_size_of_its_list(
    entries: int, name_bytes: int
) -> None:
    first, later = _testing.rejoin_sizes(entries, name_bytes)
    assert first < FIRST_PAYLOAD / 2
    # Entries that do not fit come in messages of their own, once the master knows the peer again.
    assert max([first, *later]) > entries * name_bytes
