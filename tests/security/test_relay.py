"""The master relays for members, and refuses strangers, used tokens and ends that never read."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from attackers import connect, send
from reports import JOIN, OPEN_RELAY, PUT_THROUGH, control
from workers import Run, running

from pccl import _testing

A, B, C = (bytes([i]) * 16 for i in (1, 2, 3))
ONE, OTHER = b"1" * 16, b"2" * 16
THROUGH = control(PUT_THROUGH)
# An upper bound on what the kernel holds for two connections on this machine.
KERNEL_BYTES = 16 << 20
HELD_BYTES = 128 << 10


@contextlib.contextmanager
def ends(
    count: int, buffers: int | None = None
) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Connections: the peer's end, and the master's."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = []
        for _ in range(count):
            near = stack.enter_context(socket.create_connection(listener.getsockname()))
            far = stack.enter_context(listener.accept()[0])
            for each in (near, far):
                each.setblocking(False)
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if buffers else ():
                    each.setsockopt(socket.SOL_SOCKET, option, buffers or 0)
            made.append((near, far))
        yield made


def enter(desk: _testing.RelayDesk, token: bytes, far: socket.socket) -> bool:
    return desk.enter(token, far.detach())


def hear(desk: _testing.RelayDesk, end: socket.socket, wanted: int) -> bytes:
    """So many bytes, or fewer if it ends."""
    heard = b""
    deadline = time.monotonic() + 20
    while len(heard) < wanted:
        assert time.monotonic() < deadline, heard[:100]
        desk.run(0.002)
        try:
            more = end.recv(wanted - len(heard))
        except BlockingIOError:
            continue
        except ConnectionError:
            break
        if not more:
            break
        heard += more
    return heard


def test_what_one_end_says_is_what_the_other_hears() -> None:
    desk = _testing.RelayDesk()
    desk.expect(A, B, ONE, OTHER)
    with ends(2) as [(a, far_a), (b, far_b)]:
        assert enter(desk, OTHER, far_b)
        assert enter(desk, ONE, far_a)
        for end in (a, b):
            assert hear(desk, end, len(THROUGH)) == THROUGH
        for end, other in ((a, b), (b, a)):
            words = bytes(range(256)) * 4096
            sent = 0
            heard = b""
            while len(heard) < len(words):
                with contextlib.suppress(BlockingIOError):
                    sent += end.send(words[sent : sent + 50_000])
                heard += hear(desk, other, sent - len(heard))
            assert heard == words
        # Where one goes the other's connection ends, after what was said.
        a.sendall(b"the last words")
        a.close()
        assert hear(desk, b, 100) == b"the last words"


def test_a_token_is_good_once_for_one_end_and_for_a_few_seconds() -> None:
    desk = _testing.RelayDesk()
    with ends(7) as made:
        assert not enter(desk, b"guessed" * 2, made[0][1])
        desk.expect(A, B, ONE, OTHER)
        assert enter(desk, ONE, made[1][1])
        assert not enter(desk, ONE, made[2][1])  # who has heard it is not put through to its owner
        assert enter(desk, OTHER, made[3][1])
        for end in (made[1][0], made[3][0]):
            assert hear(desk, end, len(THROUGH)) == THROUGH
        assert not enter(desk, ONE, made[4][1]) and not enter(desk, OTHER, made[5][1])
        desk.expect(A, B, ONE, OTHER)
        desk.wait(6)
        assert not enter(desk, ONE, made[6][1])


def test_who_waits_for_an_end_that_does_not_come_is_let_go() -> None:
    desk = _testing.RelayDesk()
    desk.expect(A, B, ONE, OTHER)
    with ends(1) as [(a, far)]:
        assert enter(desk, ONE, far)
        desk.wait(6)
        assert hear(desk, a, 1) == b""


def test_there_are_so_many_at_most_and_old_tokens_make_room() -> None:
    desk = _testing.RelayDesk(most_open=1)
    with ends(5) as made:
        for i in range(2):
            tokens = bytes([10 + i]) * 16, bytes([20 + i]) * 16
            desk.expect(A, B, *tokens)
            entered = [enter(desk, tokens[side], made[2 * i + side][1]) for side in (0, 1)]
            assert entered == ([True, True] if i == 0 else [False, False])
        for i in range(2000):
            stranger = (9000 + i).to_bytes(16, "little")
            desk.expect(A, stranger, i.to_bytes(16, "little"), (5000 + i).to_bytes(16, "little"))
        assert not enter(desk, (3).to_bytes(16, "little"), made[4][1])


def test_ends_that_wait_count_and_a_pair_has_eight_at_most() -> None:
    tokens = [(bytes([10 + i]) * 16, bytes([100 + i]) * 16) for i in range(9)]
    with ends(3) as made:
        desk = _testing.RelayDesk(most_open=2)
        for pair in tokens[:3]:
            desk.expect(A, B, *pair)
        taken = [enter(desk, token, made[i][1]) for i, (token, _) in enumerate(tokens[:3])]
        assert taken == [True, True, False]
    with ends(9) as made:
        desk = _testing.RelayDesk()
        for pair in tokens:
            desk.expect(A, B, *pair)
        taken = [enter(desk, token, made[i][1]) for i, (token, _) in enumerate(tokens)]
        assert taken == [True] * 8 + [False]


def test_an_end_that_never_reads_costs_what_is_said_and_no_more() -> None:
    desk = _testing.RelayDesk()
    desk.expect(A, B, ONE, OTHER)
    with ends(2, buffers=16 << 10) as [(a, far_a), (b, far_b)]:
        assert enter(desk, ONE, far_a) and enter(desk, OTHER, far_b)
        assert hear(desk, a, len(THROUGH)) == THROUGH
        sent = idle = 0
        while idle < 20:
            try:
                sent += a.send(bytes(64 << 10))
                idle = 0
                assert sent < KERNEL_BYTES
            except BlockingIOError:
                idle += 1
            desk.run(0.002)
        # Four kernel buffers (which are at least twice what was asked) and what the relay holds.
        assert sent <= HELD_BYTES + 4 * 4 * (16 << 10) + (256 << 10), sent
        # The way back is open meanwhile.
        b.sendall(b"still here")
        assert hear(desk, a, 10) == b"still here"
        desk.wait(20)
        # And nothing is lost when it reads at last.
        heard = hear(desk, b, len(THROUGH) + sent)
        assert len(heard) == len(THROUGH) + sent


def test_what_an_end_does_not_take_for_half_a_minute_is_given_up() -> None:
    desk = _testing.RelayDesk()
    desk.expect(A, B, ONE, OTHER)
    with ends(2, buffers=16 << 10) as [(a, far_a), (_, far_b)]:
        assert enter(desk, ONE, far_a) and enter(desk, OTHER, far_b)
        assert hear(desk, a, len(THROUGH)) == THROUGH
        idle = 0
        while idle < 20:
            try:
                a.send(bytes(64 << 10))
                idle = 0
            except BlockingIOError:
                idle += 1
            desk.run(0.002)
        desk.wait(45)
        assert hear(desk, a, 1) == b""


def test_a_pair_that_is_not_relayed_any_more_is_cut_and_others_are_not() -> None:
    desk = _testing.RelayDesk()
    with ends(4) as made:
        for i, other in enumerate((B, C)):
            tokens = bytes([10 + i]) * 16, bytes([20 + i]) * 16
            desk.expect(A, other, *tokens)
            for side in (0, 1):
                assert enter(desk, tokens[side], made[2 * i + side][1])
        for near, _ in made:
            assert hear(desk, near, len(THROUGH)) == THROUGH
        desk.end(B, A)
        assert [hear(desk, near, 1) for near, _ in made[:2]] == [b"", b""]
        made[2][0].sendall(b"x")
        assert hear(desk, made[3][0], 1) == b"x"


def test_no_more_is_relayed_than_the_rate_allows() -> None:
    rate = 1_000_000
    desk = _testing.RelayDesk(rate=rate)
    desk.expect(A, B, ONE, OTHER)
    with ends(2) as [(a, far_a), (b, far_b)]:
        assert enter(desk, ONE, far_a) and enter(desk, OTHER, far_b)
        assert hear(desk, b, len(THROUGH)) == THROUGH
        words = bytes(400_000)
        began = time.monotonic()
        sent = 0
        heard = 0
        while heard < len(words):
            with contextlib.suppress(BlockingIOError):
                sent += a.send(words[sent:])
            desk.run(0.005)
            with contextlib.suppress(BlockingIOError):
                heard += len(b.recv(1 << 20))
            assert time.monotonic() < began + 30
        assert time.monotonic() - began > (len(words) - 0.15 * rate) / rate


def test_two_that_have_much_to_say_share_the_rate() -> None:
    desk = _testing.RelayDesk(rate=1_000_000)
    with ends(4) as made:
        for i, other in enumerate((B, C)):
            tokens = bytes([10 + i]) * 16, bytes([20 + i]) * 16
            desk.expect(A, other, *tokens)
            for side in (0, 1):
                assert enter(desk, tokens[side], made[2 * i + side][1])
        heard = [0, 0]
        began = time.monotonic()
        while sum(heard) < 400_000:
            assert time.monotonic() < began + 30
            for i in (0, 1):
                with contextlib.suppress(BlockingIOError):
                    made[2 * i][0].send(bytes(100_000))
            desk.run(0.005)
            for i in (0, 1):
                with contextlib.suppress(BlockingIOError):
                    heard[i] += len(made[2 * i + 1][0].recv(1 << 20))
        # The first one may use up the whole burst at the beginning.
        assert min(heard) > 100_000, heard


@pytest.fixture(scope="module", params=["plain", "secret"])
def master(request: pytest.FixtureRequest) -> Iterator[Run]:
    env = (
        {"PCCL_SECRET": "correct horse battery staple, and so on"}
        if request.param == "secret"
        else {}
    )
    with running(**env) as run:
        yield run


def address(run: Run) -> tuple[str, int]:
    host, _, port = run.address.rpartition(":")
    return host, int(port)


def test_a_token_that_nobody_was_told_ends_the_connection(master: Run) -> None:
    for token in (bytes(16), ONE):
        assert send(address(master), control(OPEN_RELAY, token)) == b""
    # The master reads no message that comes with it, and no other message in the clear.
    join = control(JOIN, bytes(200))
    assert THROUGH not in send(address(master), control(OPEN_RELAY, ONE) + join)
    if "PCCL_SECRET" in master.env:
        assert b"needs its secret" in send(address(master), join)


def test_one_that_does_not_say_its_token_is_closed_in_time(master: Run) -> None:
    whole = control(OPEN_RELAY, ONE)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        slow = []
        for size in (1, 5, 6, 31, 32, len(whole) - 1):
            slow.append(stack.enter_context(connect(address(master))))
            slow[-1].sendall(whole[:size])
        for stranger in slow:
            stranger.settimeout(20)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(1 << 16):
                    pass
    # 5 s for TLS, where there is any, and 5 s for the first message; and some for a busy machine.
    assert time.monotonic() - began < 5 + 5 + 5


def test_half_a_hello_costs_no_processor_time(master: Run) -> None:
    with contextlib.ExitStack() as stack:
        before = master.master.cpu_seconds()
        for end in (False, True):
            stranger = stack.enter_context(connect(address(master)))
            stranger.sendall(b"PC")
            if end:
                stranger.shutdown(socket.SHUT_WR)
        stranger = stack.enter_context(connect(address(master)))
        stranger.sendall(b"PCC")
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionError):
            stranger.recv(1)  # closed for saying no more
        assert master.master.cpu_seconds() - before < 1
