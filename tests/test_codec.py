"""The control protocol's codec and the byte pump of links, with arbitrary values and bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import _testing

HEADER_BYTES = 32
MAX_PAYLOAD = 1 << 24
TYPES = range(_testing.control_types)
LINK_HEADER_BYTES = 72

entropy = st.binary(max_size=400)
pieces = st.lists(st.integers(1, 90), max_size=30)


def decode(
    data: bytes, cuts: list[int] | None = None, max_payload: int = MAX_PAYLOAD
) -> tuple[list[bytes], str]:
    """Frames read, and why the rest was refused.

    Fails when a message takes memory out of proportion.
    """
    frames, error, heaviest = _testing.control_decode(data, cuts or [], max_payload)
    assert heaviest <= 64 * len(data) + 1024
    return frames, error


# Control frames.


@pytest.mark.parametrize("kind", TYPES)
@given(entropy=entropy)
@settings(max_examples=60)
def test_every_message_comes_back_as_it_was(kind: int, entropy: bytes) -> None:
    data, same = _testing.control_round_trip(kind, entropy)
    assert same
    assert decode(data) == ([data], "")


@given(st.lists(st.tuples(st.sampled_from(TYPES), entropy), max_size=6), pieces)
def test_a_stream_of_frames_may_be_cut_anywhere(
    messages: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    frames = [_testing.control_round_trip(kind, entropy)[0] for kind, entropy in messages]
    assert decode(b"".join(frames), cuts) == (frames, "")


@given(st.sampled_from(TYPES), entropy, st.data())
def test_a_truncated_frame_is_waited_for_and_never_read(
    kind: int, entropy: bytes, data: st.DataObject
) -> None:
    frame, _ = _testing.control_round_trip(kind, entropy)
    size = data.draw(st.integers(0, len(frame) - 1))
    assert decode(frame[:size]) == ([], "")


@given(st.sampled_from(TYPES), st.binary(min_size=40, max_size=400), st.data())
@settings(max_examples=300)
def test_a_changed_frame_is_read_or_refused(kind: int, entropy: bytes, data: st.DataObject) -> None:
    frame = bytearray(_testing.control_round_trip(kind, entropy)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frames, _error = decode(bytes(frame))
    for read in frames:
        # An accepted message is one of ours: its own bytes are read the same way again.
        assert decode(read) == ([read], "")


@given(st.binary(max_size=600), pieces)
def test_foreign_bytes_are_refused(data: bytes, cuts: list[int]) -> None:
    frames, error = decode(data, cuts)
    assert not frames
    if len(data) >= 4 and not data.startswith(b"PCCL"):
        assert "control protocol" in error


@given(st.sampled_from(TYPES), st.binary(max_size=600))
@settings(max_examples=300)
def test_arbitrary_payloads_are_read_or_refused(kind: int, payload: bytes) -> None:
    header = bytearray(_testing.control_sample("heartbeat")[:HEADER_BYTES])
    header[5] = kind
    header[8:12] = len(payload).to_bytes(4, "little")
    frames, error = decode(bytes(header) + payload)
    assert bool(frames) != bool(error)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("length", [MAX_PAYLOAD + 1, 2**32 - 1])
def test_an_oversized_frame_is_refused_by_its_header(kind: int, length: int) -> None:
    header = bytearray(_testing.control_sample("heartbeat")[:HEADER_BYTES])
    header[5] = kind
    header[8:12] = length.to_bytes(4, "little")
    frames, error = decode(bytes(header))
    assert not frames
    assert "over the limit" in error


@pytest.mark.parametrize("count", [0xFF, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF])
def test_a_count_that_lies_takes_no_memory(count: int) -> None:
    # A Log message whose list claims `count` entries and has none.
    header = bytearray(_testing.control_sample("verdict")[:HEADER_BYTES])
    header[8:12] = (4).to_bytes(4, "little")
    frames, error = decode(bytes(header) + count.to_bytes(4, "little"))
    assert not frames
    assert "malformed" in error


def test_another_version_is_refused_with_both_numbers() -> None:
    header = bytearray(_testing.control_sample("heartbeat"))
    header[4] = 200
    want = f"protocol version 200 does not match version {_testing.PROTOCOL_VERSION}"
    assert decode(bytes(header))[1] == want


ENVELOPE = "03000000 8877665544332211 2a00000000000000"


@pytest.mark.parametrize(
    ("name", "kind", "payload"),
    [
        (
            "heartbeat",
            10,
            "0500000000000000 0600000000000000 0700000000000000 0800000000000000 01 ee02 09000000",
        ),
        ("enter_round", 4, "02 0700000000000000 0200000000000000 00"),
        (
            "measured",
            4,
            "07 0700000000000000 0200000000000000 04"
            "02000000 0102030405060708090a0b0c0d0e0f10 00 24f40000 a0860100 00000000"
            "0102030405060708090a0b0c0d0e0f10 01 00000000 00000000 00000000 48e80100 03000000",
        ),
        (
            "verdict",
            13,
            "01000000 0900000000000000 01"
            "0700000000000000 01 0500000000000000 0100000000000000"
            "0800000000000000 00 01 00000000000000000000000000000000 00000000 00000000",
        ),
        (
            "abort_request",
            6,
            "00 0700000000000000 00 0000000000000000 0300000000000000"
            "09 0102030405060708090a0b0c0d0e0f10",
        ),
        (
            "log_part",
            29,
            "01000000 0900000000000000 01"
            "0700000000000000 01 0500000000000000 0100000000000000"
            "0800000000000000 00 01 00000000000000000000000000000000 00000000 00000000 01",
        ),
        ("request_log", 28, ""),
        ("ask_status", 30, ""),
        ("status_part", 31, "03000000 010203 01"),
        ("command", 32, "01 01000000 61"),
        ("command_result", 33, "01 02000000 6f6b"),
        ("drain", 34, ""),
        ("not_serving", 35, "01"),
        ("may_found", 36, ""),
        ("ask_promise", 37, ""),
        (
            "promise",
            38,
            "01000000 06000000 0900000000000000 01"
            "0700000000000000 01 0500000000000000 0100000000000000"
            "0800000000000000 00 01 00000000000000000000000000000000 00000000 00000000",
        ),
        (
            "propose",
            39,
            "0900000000000000 01"
            "0700000000000000 01 0500000000000000 0100000000000000"
            "0800000000000000 00 01 00000000000000000000000000000000 00000000 00000000",
        ),
        ("accept", 40, "0900000000000000"),
        (
            "link_report",
            7,
            "0102030405060708090a0b0c0d0e0f10 02 0800000000000000 03000000 776879",
        ),
    ],
)
def test_control_frames_have_these_bytes(name: str, kind: int, payload: str) -> None:
    body = bytes.fromhex(payload)
    header = (
        b"PCCL" + bytes([_testing.PROTOCOL_VERSION, kind, 0, 0]) + len(body).to_bytes(4, "little")
    )
    assert _testing.control_sample(name) == header + bytes.fromhex(ENVELOPE) + body


# Link frames.


def test_link_frame_headers_have_these_bytes() -> None:
    assert _testing.link_sample() == bytes.fromhex(
        "50434631 04 01 00 09 00100000 efbeadde"
        "0700000000000000 01 0500000000000000 0100000000000000"
        "0800000000000000 03000000 00000000 0807060504030201"
        "00 0000 c699bb47"
    )


# (segment, payload); no payload: a heartbeat.
link_frames = st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=200)), max_size=12)


@given(link_frames, pieces, pieces, st.binary(max_size=40))
def test_link_frames_come_through_in_any_pieces(
    frames: list[tuple[int, bytes]], written: list[int], read: list[int], choices: bytes
) -> None:
    data = _testing.link_write(frames, written)
    arrived, control, voided, error = _testing.link_read(data, read, choices)
    assert not error
    assert not voided
    assert len(control) == sum(1 for _, payload in frames if not payload)
    sent = [frame for frame in frames if frame[1]]
    if not choices:  # nothing is drained
        assert arrived == sent
    remaining = iter(sent)
    assert all(frame in remaining for frame in arrived)  # in order, some drained


@given(link_frames, pieces, st.integers(0, 12), pieces)
def test_memory_given_back_while_a_frame_is_half_sent_is_read_no_more(
    frames: list[tuple[int, bytes]], written: list[int], after: int, read: list[int]
) -> None:
    data = _testing.link_write(frames, written, after)
    arrived, _, voided, error = _testing.link_read(data, read, b"")
    assert not error
    assert voided <= 1
    remaining = iter(frames)
    assert all(frame in remaining for frame in arrived)


@given(link_frames, pieces, st.integers(0, 12))
def test_memory_given_back_while_a_frame_is_half_read_is_written_no_more(
    frames: list[tuple[int, bytes]], read: list[int], after: int
) -> None:
    arrived, _, _, error = _testing.link_read(_testing.link_write(frames, []), read, b"", after)
    assert not error
    remaining = iter(frames)
    assert all(frame in remaining for frame in arrived)


@given(link_frames, st.data(), pieces, st.binary(max_size=40))
@settings(max_examples=300)
def test_a_changed_byte_never_becomes_data(
    frames: list[tuple[int, bytes]], data: st.DataObject, read: list[int], choices: bytes
) -> None:
    stream = bytearray(_testing.link_write(frames, []))
    if not stream:
        return
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= data.draw(st.integers(1, 255))
    arrived, _, _, _ = _testing.link_read(bytes(stream), read, choices)
    sent = [frame for frame in frames if frame[1]]
    start = 0
    for segment, payload in frames:
        size = LINK_HEADER_BYTES + (len(payload) + 8 if payload else 0)
        # A zero checksum says "not checked"; a header changed to that is the one byte string we
        # cannot tell from an honest one, and one changed byte does not make it.
        if start <= at < start + size and payload:
            assert (
                (segment, payload) not in arrived
                or sent.count((segment, payload)) > 1
                or (at >= start + size - 8)
            )
        start += size
    assert all(frame in sent for frame in arrived)


@given(st.binary(max_size=800), pieces, st.binary(max_size=40))
def test_foreign_bytes_end_a_stripe(data: bytes, read: list[int], choices: bytes) -> None:
    arrived, control, _, error = _testing.link_read(data, read, choices)
    assert not arrived
    assert not control
    if len(data) >= LINK_HEADER_BYTES:
        assert error


@given(st.binary(min_size=68, max_size=600), pieces, st.binary(max_size=40))
@settings(max_examples=300)
def test_arbitrary_frames_never_crash_a_stripe(
    body: bytes, read: list[int], choices: bytes
) -> None:
    header = bytearray(b"PCF1" + body[:68])
    header[4] %= 8  # a type there is
    header[5] %= 2
    header[6] %= 2
    header[7] = _testing.link_sample()[7]  # the version
    header[8:12] = (int.from_bytes(body[4:8], "little") % 300).to_bytes(4, "little")
    header[16 + 8] %= 2
    sealed = _testing.link_seal(bytes(header))
    arrived, _, _, _ = _testing.link_read(sealed + body[68:], read, choices)
    assert not arrived or sealed[57:65] == bytes(8)  # only what asks not to be checked


def test_a_spoilt_header_is_refused_whatever_byte_it_is() -> None:
    header = _testing.link_sample()
    for at in range(LINK_HEADER_BYTES):
        for bit in range(8):
            spoilt = bytearray(header)
            spoilt[at] ^= 1 << bit
            assert _testing.link_read(bytes(spoilt), [], b"")[3], (at, bit)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ([], "a3817f04ba25a8e66df67214c7550293"),
        ([0x0706050403020100], "3b62a9ba6258f5610f83e264f31497b4"),
    ],
)
def test_a_proof_is_siphash_as_published(about: list[int], expected: str) -> None:
    # Of 0 and of 8 bytes, from the reference implementation's vectors.
    assert _testing.proof(bytes(range(16)), about).hex() == expected


def test_xxh3_is_the_published_hash() -> None:
    for name, short, whole in _testing.xxh3([]):
        assert (short, whole) == (
            0x2D06800538D394C2,
            [0x99AA06D3014798D8, 0x6001C324468D497F],
        ), name


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 1 << 17), max_size=4), seed=st.integers(0, 99))
def test_every_instruction_set_hashes_alike_however_the_bytes_are_cut(
    sizes: list[int], seed: int
) -> None:
    pieces = [random.Random(seed + at).randbytes(size) for at, size in enumerate(sizes)]
    hashes = {(short, *whole) for _, short, whole in _testing.xxh3(pieces)}
    hashes |= {(short, *whole) for _, short, whole in _testing.xxh3([b"".join(pieces)])}
    assert len(hashes) == 1


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 3 << 20),
    writes=st.lists(st.integers(1, 1 << 21), min_size=1, max_size=5),
    reads=st.lists(st.integers(1, 1 << 21), min_size=1, max_size=5),
    pieces=st.integers(1, 5),
)
def test_a_pipe_delivers_every_byte_in_order(
    size: int, writes: list[int], reads: list[int], pieces: int
) -> None:
    # The least that is moved at a time bounds how long this takes.
    writes, reads = [max(w, size // 500) for w in writes], [max(r, size // 500) for r in reads]
    data = random.Random(size).randbytes(size)
    assert _testing.pipe_play(data, writes, reads, pieces) == data


@pytest.mark.parametrize("largest", [1, 7, 4096, 300_000, 3 << 20])
def test_nobody_sleeps_through_what_comes_through_a_pipe(largest: int) -> None:
    # Nothing but a ring ends a sleep here: one that gets lost is a test that hangs.
    slept = sum(
        _testing.pipe_race(min(largest * 3000, 30 << 20), largest, seed) for seed in range(4)
    )
    assert slept > 0
