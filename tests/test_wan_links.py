"""Connections and paths between hosts that break while peers reduce, in the wide-area lab."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lab
import namespaces
import pytest
from lab import Host, Lab
from programs import wan_links
from workers import Worker, eventually

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(lab.why_not() is not None, reason=str(lab.why_not())),
]

MASTER_PORT = 48148  # namespaces.py's: each namespace has its own


def hosts_of(world: Lab) -> list[namespaces.Host]:
    return [namespaces.Host(world.namespace(i), world.address(i)) for i in range(len(world.hosts))]


@contextmanager
def reducing(world: Lab, **env: str) -> Iterator[list[Worker]]:
    """A worker on every host of the lab; all have reduced with each other."""
    hosts = hosts_of(world)
    with namespaces.running_on(hosts[0], **env) as run:
        peers = [
            run.peer(wan_links.reduce_as_told, host, PCCL_MIN_PEERS=str(len(hosts)))
            for host in hosts
        ]
        for peer in peers:
            peer.expect("in", 60)
        yield peers


def begin(peers: list[Worker], count: int) -> None:
    for peer in peers:
        peer.tell(count)


def ends(peers: list[Worker], timeout: float = 60) -> list[int]:
    """Waits for all of them; how often each had to run it."""
    answers = [peer.expect("done", timeout) for peer in peers]
    assert all(answer["right"] and answer["size"] == len(peers) for answer in answers), answers
    return [answer["attempts"] for answer in answers]


def has_bbr() -> bool:
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return known.exists() and "bbr" in known.read_text().split()


@pytest.mark.parametrize(
    ("delay_ms", "setting", "names"),
    [
        pytest.param(10, "", ["bbr"] * 6, id="long"),
        pytest.param(10, "system", ["cubic"] * 16, id="the system's"),
        pytest.param(0.2, "bbr", ["bbr"] * 6, id="by name"),
        pytest.param(10, "reno", ["reno"] * 16, id="another name"),
    ],
)
@pytest.mark.skipif(not has_bbr(), reason="the kernel has no BBR")
def test_long_paths_have_bbr(delay_ms: float, setting: str, names: list[str]) -> None:
    with Lab([Host(200, 200)] * 2, delay_ms=delay_ms, congestion="cubic") as world:
        hosts = hosts_of(world)
        with namespaces.running_on(hosts[0], PCCL_TCP_CONGESTION=setting) as run:
            settings = {"PCCL_MIN_PEERS": "2", "NAMES": " ".join(names)}
            peers = [run.peer(wan_links.await_congestion, host, **settings) for host in hosts]
            for peer in peers:
                peer.expect("congestion", 60)


def test_resets_cost_no_attempt() -> None:
    with Lab([Host(200, 200)] * 3, delay_ms=10) as world, reducing(world) as peers:
        over = threading.Event()

        def reset() -> None:
            pairs = [(0, 1), (1, 2), (2, 0)]
            turn = 0
            while not over.wait(0.2):
                world.reset(*pairs[turn % 3], spare=MASTER_PORT)
                turn += 1

        thread = threading.Thread(target=reset)
        thread.start()
        try:
            attempts = []
            for _ in range(6):
                begin(peers, 2_000_000)
                attempts += ends(peers)
        finally:
            over.set()
            thread.join()
        assert set(attempts) == {1}
        assert sum(world.resets(*pair) for pair in [(0, 1), (1, 2), (2, 0)]) >= 5


def test_a_cut_that_heals_within_three_seconds_costs_nothing_but_time() -> None:
    with Lab([Host(100, 100)] * 4, delay_ms=10) as world, reducing(world) as peers:
        begin(peers, 6_000_000)  # some three seconds without the cut
        world.cut(1, 2)
        assert not threading.Event().wait(3)  # this is what is tested
        world.heal(1, 2)
        assert set(ends(peers)) == {1}


def test_a_path_that_works_again_is_found_although_tcp_waits() -> None:
    # TCP tries again 0.3, 0.9, 2.1 and 4.5 s after the cut began. By then the link would be dead.
    settings = {"PCCL_HEARTBEAT_INTERVAL": "0.5", "PCCL_HEARTBEAT_TIMEOUT": "3.5"}
    with Lab([Host(100, 100)] * 3, delay_ms=40) as world, reducing(world, **settings) as peers:
        begin(peers, 6_000_000)
        world.cut(1, 2)
        assert not threading.Event().wait(2.5)  # this is what is tested
        world.heal(1, 2)
        assert set(ends(peers)) == {1}


def test_a_member_that_was_cut_off_from_its_master_is_heard_soon() -> None:
    with Lab([Host(200, 200)] * 3, delay_ms=40) as world:
        hosts = hosts_of(world)
        with namespaces.running_on(hosts[0]) as run:
            peers = [
                run.peer(wan_links.reduce_as_told, host, PCCL_MIN_PEERS="2") for host in hosts[1:]
            ]
            for peer in peers:
                peer.expect("in", 60)
            world.cut(0, 1)
            begin(peers, 1_000_000)
            # TCP would try 0.3, 0.9, 2.1 and 4.5 s after it had something to send.
            assert not threading.Event().wait(2.5)  # this is what is tested
            world.heal(0, 1)
            healed = time.monotonic()
            assert set(ends(peers)) == {1}
            assert time.monotonic() - healed < 1.3


@pytest.mark.parametrize("one_way", [False, True])
def test_a_longer_cut_is_planned_around(one_way: bool) -> None:
    settings = {
        "PCCL_HEARTBEAT_INTERVAL": "0.3",
        "PCCL_HEARTBEAT_TIMEOUT": "2",
        "PCCL_LINK_TIMEOUT": "1",
    }
    with Lab([Host(100, 100)] * 4, delay_ms=10) as world, reducing(world, **settings) as peers:
        begin(peers, 6_000_000)
        world.cut(1, 2, one_way)
        assert max(ends(peers)) >= 2  # all four are still there
        begin(peers, 1_000_000)
        ends(peers)


@pytest.mark.timeout(400)
def test_a_link_that_becomes_slow_is_found_by_transfers_alone() -> None:
    # All stop at the same reduction: each says in it what it sees.
    with Lab([Host(100, 100)] * 4, delay_ms=15) as world:
        hosts = hosts_of(world)
        with namespaces.running_on(hosts[0], PCCL_REPLAN_INTERVAL="1") as run:
            slow = run.peer(wan_links.find_a_slow_link, hosts[3], PCCL_MIN_PEERS="4", SLOW="1")
            peers = [
                slow,
                *(
                    run.peer(wan_links.find_a_slow_link, host, PCCL_MIN_PEERS="4")
                    for host in hosts[:3]
                ),
            ]
            for peer in peers:
                assert None not in peer.expect("measured", 60)["up"]
            world.rate(3, 20, 20)
            for peer in peers:
                peer.tell("go")
            answers = [peer.expect("done", 300) for peer in peers]
    for answer in answers:
        assert answer["right"] and answer["found"], answer


def test_who_prepares_a_call_sends_before_it_and_the_sum_is_right() -> None:
    with Lab([Host(100, 100)] * 2, delay_ms=40) as world:
        hosts = hosts_of(world)
        with namespaces.running_on(hosts[0]) as run:
            peers = [
                run.peer(wan_links.prepare_as_told, host, PCCL_MIN_PEERS="2") for host in hosts
            ]
            for peer in peers:
                peer.expect("in", 60)

            def sent() -> tuple[int, int]:
                """The bytes that each host sends after it was told to prepare itself."""
                world.clear()
                peers[0].tell("prepare")
                peers[0].expect("prepared")
                # The most that a call may be late, and the half second.
                assert not threading.Event().wait(1.5)
                paths = world.stats().paths
                return paths[0, 1].bytes, paths[1, 0].bytes

            # The connection has shown its round trip.
            there, back = eventually(lambda: (told := sent())[0] > 1_000_000 and told)
            # 6.25 MB/s, as the rate is not known, and 80 ms: 0.5 MB are on the way. There are five
            # portions, and headers. 100 Mbit/s would carry 18 MB in this time.
            assert there < 4_000_000 and back < there / 10
            for peer in peers:
                peer.tell("call")
            assert all(peer.expect("done", 60)["right"] for peer in peers)


def test_a_slow_run_measures_its_links_by_itself() -> None:
    with Lab([Host(100, 100)] * 3 + [Host(20, 20)], delay_ms=15) as world:
        hosts = hosts_of(world)
        with namespaces.running_on(hosts[0]) as run:
            slow = run.peer(wan_links.admit_and_reduce, hosts[3], PCCL_MIN_PEERS="4", SLOW="1")
            peers = [
                slow,
                *(
                    run.peer(wan_links.admit_and_reduce, host, PCCL_MIN_PEERS="4")
                    for host in hosts[:3]
                ),
            ]
            answers = [peer.expect("done", 100) for peer in peers]
    for answer in answers:
        assert answer["shares"][1:] == [0, 0], answer  # after the first, which was slow
        assert None not in answer["up"], answer


def test_who_has_a_slow_link_owns_nothing() -> None:
    world = Lab([Host(100, 100)] * 3 + [Host(25, 25)], delay_ms=15)
    with world:
        hosts = hosts_of(world)
        with namespaces.running_on(hosts[0]) as run:
            peers = [
                run.peer(wan_links.reduce_with_a_slow_link, host, PCCL_MIN_PEERS="4")
                for host in hosts
            ]
            answers = [peer.expect("done", 60) for peer in peers]
    assert all(answer["right"] for answer in answers)
    assert [answer["slow"] for answer in answers] == [False, False, False, True]
    for answer in answers:
        assert None not in answer["up"] + answer["down"], answer
        rates = sorted(answer["up"])
        assert 1e6 < rates[0] < 5e6 and rates[3] < 20e6, rates
        assert all(0.025 < rtt < 0.2 for rtt in answer["rtt"])
        assert answer["share"] == 0


@pytest.mark.parametrize("founders", [4, 1])
def test_connections_show_who_is_near(founders: int) -> None:
    # A busy machine delays connections between near hosts, but not for as long as that.
    world = Lab([Host(100, 100)] * 4, lambda a, b: 0.2 if a % 2 == b % 2 else 60)
    with world:
        hosts = hosts_of(world)
        with namespaces.running_on(hosts[0], PCCL_REPLAN_INTERVAL="3600") as run:
            settings = {"PCCL_MIN_PEERS": str(founders), "ALL": "4"}
            peers = [
                run.peer(wan_links.find_the_near_ones, host, SITE=str(at % 2), **settings)
                for at, host in enumerate(hosts)
            ]
            # Nothing was measured, and no plan was looked at a second time.
            assert all(peer.expect("found", 60)["rates"] == [] for peer in peers)


@pytest.mark.timeout(400)
def test_sites_that_share_a_line_send_each_other_an_array_once() -> None:
    array = 4_000_000
    world = Lab([Host(100, 100)] * 4, lambda a, b: 1 if a % 2 == b % 2 else 15,
                sites=[0, 1, 0, 1], line_mbit=15)  # fmt: skip
    with world:
        hosts = hosts_of(world)
        with namespaces.running_on(hosts[0]) as run:
            peers = [
                run.peer(wan_links.reduce_between_sites, host, PCCL_MIN_PEERS="4") for host in hosts
            ]
            kinds = {peer.expect("planned", 60)["kind"] for peer in peers}
            assert kinds == {"regional"}
            for part in (None, 1.0, 0.26):  # of float32's bytes
                world.clear()
                for peer in peers:
                    peer.tell("go")
                answers = [peer.expect("done", 60) for peer in peers]
                assert len({answer["crc"] for answer in answers}) == 1
                assert all(answer["error"] < 1e-5 for answer in answers), answers
                if part is None:  # behind it came what was left of measuring
                    continue
                paths = world.stats().paths
                for side in (0, 1):
                    crossed = sum(
                        path.bytes for (a, b), path in paths.items() if a % 2 == side != b % 2
                    )
                    # Headers, acknowledgements, what was lost; `direct` and a ring send more.
                    assert part * array < crossed < 1.35 * part * array


def test_around_a_ring_quantized_results_are_equal_everywhere() -> None:
    settings = {"PCCL_LINK_TIMEOUT": "1", "PCCL_HEARTBEAT_INTERVAL": "0.3"}
    with Lab([Host(100, 100)] * 5, delay_ms=2) as world:
        # No peer reaches all others, so only a ring is left. The master is on a host of its own.
        world.cut(0, 1)
        world.cut(2, 3)
        hosts = hosts_of(world)
        with namespaces.running_on(hosts[4], **settings) as run:
            peers = [
                run.peer(wan_links.reduce_quantized_with_feedback, host, PCCL_MIN_PEERS="4")
                for host in hosts[:4]
            ]
            answers = [peer.expect("done", 60) for peer in peers]
    for answer in answers:
        assert (answer["kinds"], answer["size"]) == (["ring"], 4)
        assert answer["crcs"] == answers[0]["crcs"]
        # A step of the result's range is about 0.016. Error feedback adds the rest to the next one.
        assert answer["worst"] < 0.03
        assert answer["together"] < answer["mean"] / 2
