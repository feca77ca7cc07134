"""Schedules played out symbolically, and the cut checked piece by piece."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import _testing

if TYPE_CHECKING:
    from pccl._testing import ChunkFlow  # exists in the stub only

WORLD_SIZES = range(1, 34)
ELEMENT_SIZES = [1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8]  # by DataType
AVERAGE_SIZES = [8] * 6 + [16] * 2 + [4, 4, 4, 8]  # of partial sums under avg
SUM_SIZES = [1, 1, 2, 2, 4, 4, 8, 8, 4, 4, 4, 8]
SUM, AVG = 0, 1


def check_chunk(flows: list[ChunkFlow]) -> int:
    """Plays one chunk's flows, by rank, to the end. Returns its owner."""
    owners = [rank for rank, flow in enumerate(flows) if flow["owner"]]
    assert len(owners) == 1
    (owner,) = owners

    # Everything sent is awaited by its receiver, and nothing else is.
    sent = {(rank, flow["partial_to"]) for rank, flow in enumerate(flows) if rank != owner}
    awaited = [(source, rank) for rank, flow in enumerate(flows) for source, _ in flow["sources"]]
    assert set(awaited) == sent
    assert len(awaited) == len(set(awaited))
    passed_on = [(rank, to) for rank, flow in enumerate(flows) for to in flow["final_to"]]
    finals = {(flow["final_from"], rank) for rank, flow in enumerate(flows) if rank != owner}
    assert set(passed_on) == finals
    assert len(passed_on) == len(set(passed_on))
    assert flows[owner]["partial_to"] is None
    assert flows[owner]["final_from"] is None

    # Partial results: who is in each, in the order of combination.
    partials: dict[int, list[int]] = {}
    while len(partials) < len(flows):
        ready = [
            rank
            for rank, flow in enumerate(flows)
            if rank not in partials and all(source in partials for source, _ in flow["sources"])
        ]
        assert ready, "a rank waits for itself"
        for rank in ready:
            partials[rank] = [rank]
            for source, accumulated in flows[rank]["sources"]:
                assert accumulated == bool(flows[source]["sources"])
                partials[rank] += partials[source]
    assert sorted(partials[owner]) == list(range(len(flows)))

    # Final bytes reach everybody.
    have, frontier = {owner}, [owner]
    while frontier:
        for to in flows[frontier.pop()]["final_to"]:
            assert to not in have
            have.add(to)
            frontier.append(to)
    assert have == set(range(len(flows)))
    return owner


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_a_ring_reduces_every_chunk_once_per_member_and_brings_it_to_all(n: int) -> None:
    order = list(range(n))
    random.Random(n).shuffle(order)
    ranks = [_testing.ring(order, rank) for rank in range(n)]
    assert all(shares == [1] * n for _, shares in ranks)
    for chunk in range(n):
        assert check_chunk([flows[chunk] for flows, _ in ranks]) == order[chunk]


@pytest.mark.parametrize("n", range(2, 34))
def test_on_a_ring_everybody_talks_only_to_its_neighbours(n: int) -> None:
    order = list(range(n))
    random.Random(n).shuffle(order)
    for position, rank in enumerate(order):
        previous, following = order[position - 1], order[(position + 1) % n]
        flows, _ = _testing.ring(order, rank)
        for flow in flows:
            assert {source for source, _ in flow["sources"]} <= {previous}
            assert flow["final_from"] in (previous, None)
            assert flow["partial_to"] in (following, None)
            assert set(flow["final_to"]) <= {following}
        assert sum(flow["partial_to"] is not None for flow in flows) == n - 1
        assert sum(len(flow["final_to"]) for flow in flows) == n - 1


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_direct_reduces_every_chunk_at_its_owner_in_rank_order(n: int) -> None:
    shares = [random.Random(n).randrange(3) for _ in range(n - 1)] + [1]
    ranks = [_testing.direct(shares, rank) for rank in range(n)]
    assert all(returned == shares for _, returned in ranks)
    for chunk in range(n):
        assert check_chunk([flows[chunk] for flows, _ in ranks]) == chunk
        others = [rank for rank in range(n) if rank != chunk]
        assert ranks[chunk][0][chunk]["sources"] == [(rank, False) for rank in others]


@pytest.mark.parametrize("n", range(3, 10))
def test_through_a_hub_everybody_talks_only_to_it(n: int) -> None:
    for hub in range(n):
        ranks = [_testing.through(hub, n, rank)[0] for rank in range(n)]
        for chunk in range(n):
            flows = [flows[chunk] for flows in ranks]
            assert check_chunk(flows) == chunk
            for rank, flow in enumerate(flows):
                peers = {source for source, _ in flow["sources"]} | set(flow["final_to"])
                peers |= {flow["partial_to"], flow["final_from"]} - {None}
                assert rank == hub or peers == {hub}


def bytes_between(hosts: list[int], flows: list[ChunkFlow]) -> dict[int, int]:
    """How often one chunk's bytes leave each host."""
    leaving = dict.fromkeys(hosts, 0)
    for rank, flow in enumerate(flows):
        to = [*flow["final_to"], *([] if flow["partial_to"] is None else [flow["partial_to"]])]
        leaving[hosts[rank]] += sum(hosts[peer] != hosts[rank] for peer in to)
    return leaving


@pytest.mark.parametrize("around", [True, False])
@settings(max_examples=200, deadline=None)
@given(hosts=st.lists(st.integers(0, 4), min_size=1, max_size=16))
def test_hosts_combine_at_home_and_send_each_chunk_once(around: bool, hosts: list[int]) -> None:
    n = len(hosts)
    ranks = [_testing.by_hosts(hosts, around, rank) for rank in range(n)]
    for chunk in range(n):
        flows = [flows[chunk] for flows, _ in ranks]
        assert check_chunk(flows) == chunk
        leaving = bytes_between(hosts, flows)
        others = len(leaving) - 1
        home = leaving.pop(hosts[chunk])
        if around:
            # A partial result and a final one; the last host passes nothing on.
            assert home == min(others, 1)
            assert sorted(leaving.values()) == [1] * min(others, 1) + [2] * (others - 1)
        else:
            assert home == others
            assert all(count == 1 for count in leaving.values())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=14), st.data())
def test_regions_send_each_other_each_chunk_once(hosts: list[int], data: st.DataObject) -> None:
    n = len(hosts)
    region_of = {host: data.draw(st.integers(0, 2)) for host in sorted(set(hosts))}
    regions = [region_of[host] for host in hosts]
    ranks = [_testing.by_regions(hosts, regions, rank) for rank in range(n)]
    for chunk in range(n):
        flows = [flows[chunk] for flows, _ in ranks]
        assert check_chunk(flows) == chunk
        others = len(set(regions)) - 1
        leaving = bytes_between(regions, flows)
        assert leaving.pop(regions[chunk]) == others
        assert all(count == 1 for count in leaving.values())
        # And a host sends its own region nothing twice: its ranks' elements are combined first.
        for host, count in bytes_between(hosts, flows).items():
            others = len({h for h in hosts if region_of[h] == region_of[host]}) - 1
            assert count <= 1 + others + len(leaving)


@pytest.mark.parametrize("per_region", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 3])
def test_by_regions_a_rank_sends_no_more_than_straight_to_all(count: int, per_region: int) -> None:
    regions = [region for region in range(count) for _ in range(per_region)]
    n = len(regions)
    ranks = [_testing.by_regions(list(range(n)), regions, rank)[0] for rank in range(n)]
    for flows in ranks:
        sent = sum(len(flow["final_to"]) + (flow["partial_to"] is not None) for flow in flows)
        assert sent == 2 * (n - 1)


@pytest.mark.parametrize("per_host", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_leaves_a_host_does_not_grow_with_its_ranks(count: int, per_host: int) -> None:
    hosts = [host for host in range(count) for _ in range(per_host)]
    n = len(hosts)
    ranks = [_testing.by_hosts(hosts, True, rank)[0] for rank in range(n)]
    total = dict.fromkeys(hosts, 0)
    for chunk in range(n):
        for host, chunks in bytes_between(hosts, [flows[chunk] for flows in ranks]).items():
            total[host] += chunks
    # A host sends 2(h - 1)/h of the array, and each of its ranks an equal part.
    assert all(chunks * count == 2 * (count - 1) * n for chunks in total.values())
    carried = [
        sum(
            sum(
                hosts[peer] != hosts[rank]
                for peer in [*flow["final_to"], flow["partial_to"]]
                if peer is not None
            )
            for flow in ranks[rank]
        )
        for rank in range(n)
    ]
    assert len(set(carried)) == 1


def test_alone_there_is_nothing_to_send_or_receive() -> None:
    alone: ChunkFlow = {
        "sources": [],
        "partial_to": None,
        "final_from": None,
        "final_to": [],
        "owner": True,
    }
    assert _testing.ring([0], 0) == ([alone], [1])
    assert _testing.direct([7], 0) == ([alone], [7])


def check_cut(
    arrays: list[tuple[int, int]], op: int, shares: list[int], segment_bytes: int
) -> list[int]:
    """Checks every promise of `cut`. Returns the chunks' sizes in bytes."""
    pieces, segments = _testing.cut(arrays, op, shares, segment_bytes)
    assert (pieces, segments) == _testing.cut(arrays, op, shares, segment_bytes)
    wide = AVERAGE_SIZES if op == AVG else SUM_SIZES

    # Every element once, in line order.
    line = [(index, 0, count) for index, (count, _) in enumerate(arrays) if count]
    joined: list[tuple[int, int, int]] = []
    for array, first, count in pieces:
        assert count > 0
        size = ELEMENT_SIZES[arrays[array][1]]
        assert first * size % 64 == 0
        if joined and joined[-1][0] == array and joined[-1][2] == first:
            joined[-1] = (array, joined[-1][1], first + count)
        else:
            joined.append((array, first, first + count))
    assert joined == line

    # Segments own consecutive pieces and know their sizes.
    next_piece, last_chunk = 0, 0
    chunk_bytes = [0] * len(shares)
    for chunk, first_piece, piece_count, raw_bytes, accumulated_bytes in segments:
        assert chunk >= last_chunk
        assert first_piece == next_piece
        assert piece_count > 0
        own = [
            (count, arrays[array][1])
            for array, _, count in pieces[first_piece : first_piece + piece_count]
        ]
        assert raw_bytes == sum(count * ELEMENT_SIZES[dtype] for count, dtype in own)
        assert accumulated_bytes == sum(count * wide[dtype] for count, dtype in own)
        assert raw_bytes <= segment_bytes
        chunk_bytes[chunk] += raw_bytes
        next_piece, last_chunk = first_piece + piece_count, chunk
    assert next_piece == len(pieces)

    # Boundaries are where the shares put them, to the nearest permitted cut.
    total = sum(count * ELEMENT_SIZES[dtype] for count, dtype in arrays)
    for boundary, share_sum in zip(accumulate(chunk_bytes), accumulate(shares), strict=True):
        assert abs(boundary - total * share_sum // sum(shares)) <= 32
    for size, share in zip(chunk_bytes, shares, strict=True):
        assert share or not size
    return chunk_bytes


any_shares = st.lists(st.sampled_from([0, 1, 1, 2, 7, 1000, 2**32 - 1]), min_size=1, max_size=9)
any_shares = any_shares.filter(any)
any_segment_bytes = st.one_of(st.sampled_from([64, 4096, 2**18, 2**24]), st.integers(64, 5000))


@settings(max_examples=300, deadline=None)
@given(
    arrays=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 11)), max_size=40),
    op=st.integers(0, 4),
    shares=any_shares,
    segment_bytes=any_segment_bytes,
)
def test_many_small_arrays_are_cut_completely_and_in_proportion(
    arrays: list[tuple[int, int]], op: int, shares: list[int], segment_bytes: int
) -> None:
    check_cut(arrays, op, shares, segment_bytes)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), dtype=st.integers(0, 11), shares=any_shares, bytes_=any_segment_bytes)
def test_one_large_array_is_cut_into_the_fewest_segments(
    data: st.DataObject, dtype: int, shares: list[int], bytes_: int
) -> None:
    count = data.draw(st.integers(0, bytes_ * 20))
    chunks = check_cut([(count, dtype)], AVG, shares, bytes_)
    _, segments = _testing.cut([(count, dtype)], AVG, shares, bytes_)
    limit = bytes_ // 64 * 64
    for chunk, size in enumerate(chunks):
        sizes = [raw for of, _, _, raw, _ in segments if of == chunk]
        assert len(sizes) <= -(-size // limit)
        assert len(set(sizes[:-1])) <= 1
        assert not sizes or sizes[-1] <= max(sizes)


def test_thousands_of_small_arrays_share_segments() -> None:
    arrays = [(1 + index % 7, 10) for index in range(5000)]
    check_cut(arrays, SUM, [1, 1, 1], 4096)
    _, segments = _testing.cut(arrays, SUM, [1, 1, 1], 4096)
    total = sum(count * 4 for count, _ in arrays)
    assert len(segments) <= 2 * (total // 4096 + 3)


def test_terabytes_are_cut_without_overflow() -> None:
    shares = [2**32 - 1] * 15
    arrays = [(2**40, 10), (2**40, 11)]
    _, segments = _testing.cut(arrays, SUM, shares, 2**24)
    chunk_bytes = [0] * len(shares)
    for chunk, _, _, raw_bytes, _ in segments:
        chunk_bytes[chunk] += raw_bytes
    assert sum(chunk_bytes) == 12 * 2**40
    assert max(chunk_bytes) - min(chunk_bytes) <= 64


def test_fewer_elements_than_ranks_leave_chunks_empty() -> None:
    chunks = check_cut([(5, 10)], SUM, [1] * 4, 4096)
    assert sorted(chunks) == [0, 0, 0, 20]
    assert check_cut([(1, 0)], SUM, [1] * 33, 64).count(0) == 32


def test_an_operation_without_elements_has_no_segments() -> None:
    assert _testing.cut([], SUM, [1, 2], 64) == ([], [])
    assert _testing.cut([(0, 10), (0, 3)], SUM, [1, 2], 64) == ([], [])


def test_empty_arrays_among_others_yield_no_pieces() -> None:
    pieces, _ = _testing.cut([(0, 10), (3, 10), (0, 0), (2, 9), (0, 1)], SUM, [1], 64)
    assert pieces == [(1, 0, 3), (3, 0, 2)]
