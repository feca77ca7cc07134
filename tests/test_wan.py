"""The wide-area lab keeps its promises and cleans up behind it, and pccl reduces in it.

Margins are wide: machines that run tests are busy.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lab
import pytest
from lab import Host, Lab, Stats
from programs import wan
from workers import command, eventually

BENCHMARKS = Path(lab.FOLDER)
PRESETS = list(lab.PRESETS)

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(lab.why_not() is not None, reason=str(lab.why_not())),
]


def stats_when(world: Lab, claim: Callable[[Stats], bool]) -> Stats:
    deadline = time.monotonic() + 30
    while not claim(stats := world.stats()):
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)  # the relay needs the core, too
    return stats


def send_datagrams(world: Lab, a: int, b: int, count: int) -> Stats:
    """Returns when all have arrived or are lost. The other end refuses them, which comes back."""

    def all_counted(stats: Stats) -> bool:
        path = stats.paths[a, b]
        return (
            path.delivered + path.lost + path.cut + path.up_full + path.line_full + path.down_full
            >= count
        )

    world.clear()
    world.run(a, command(partial(wan.send_datagrams, world.address(b), count)))
    return stats_when(world, all_counted)


class Stream:
    """A connection between two hosts that carries data, one way."""

    def __init__(self, world: Lab, a: int, b: int, count: int = -1) -> None:
        piped = {"stdout": subprocess.PIPE, "text": True}
        self.receiver = world.popen(b, command(wan.receive), **piped)
        self.port = int(self.receiver.stdout.readline())
        self.sender = world.popen(
            a, command(partial(wan.send, world.address(b), self.port, count)), **piped
        )
        assert self.sender.stdout.readline() == "connected\n"
        assert self.receiver.stdout.readline() == "receiving\n"  # a reset would end it before that

    def ends(self) -> tuple[str, str]:
        """Returns the last lines of the sender and the receiver."""
        sent, _ = self.sender.communicate(timeout=30)
        received, _ = self.receiver.communicate(timeout=30)
        return sent.strip(), received.strip()


def test_round_trips_take_what_was_asked_for() -> None:
    delays = {(0, 1): 5, (1, 0): 15, (0, 2): 40, (2, 0): 40, (1, 2): 0, (2, 1): 0}
    with Lab([Host()] * 3, lambda a, b: delays[a, b]) as world:
        for a, b in world.pairs():
            said = world.run(a, command(partial(wan.be_refused, world.address(b)))).stdout.split()
            rtt = delays[a, b] + delays[b, a]
            assert rtt <= min(map(float, said)) < rtt + 10, (a, b, said)


@pytest.mark.parametrize("rates", [[(40, 0), (0, 0)], [(0, 0), (0, 40)]], ids=["up", "down"])
def test_tcp_gets_the_rate_of_the_slower_link(rates: list[tuple[float, float]]) -> None:
    with Lab([Host(*rate) for rate in rates], delay_ms=5) as world:
        sent, received = Stream(world, 0, 1, 10_000_000).ends()
        assert sent == "sent"
        # Payload is 1448 of the 1500 bytes of a packet.
        # (A receiver that starts counting late finds some of it there already.)
        assert 0.6 < float(received) * 8 / 40e6 < 1.3
        world.rate(0, 160, 160)
        world.rate(1, 160, 160)
        _, received = Stream(world, 0, 1, 20_000_000).ends()
        assert 0.4 < float(received) * 8 / 160e6 < 1.3


def test_hosts_of_a_site_share_its_line_and_do_without_it_among_themselves() -> None:
    with Lab([Host()] * 3, delay_ms=5, sites=[0, 0, 1], line_mbit=40) as world:
        begin = time.perf_counter()
        streams = [Stream(world, 2, to, 8_000_000) for to in (0, 1)]
        sent, rates = zip(*(stream.ends() for stream in streams), strict=True)
        assert sent == ("sent", "sent")
        # Over the whole time, in which their processes also start and end, at most the line's rate.
        assert 16e6 * 8 / (time.perf_counter() - begin) / 40e6 < 1.05
        # Either may go on alone for a while, at twice the rate.
        assert sum(map(float, rates)) * 8 / 40e6 > 0.4
        _, received = Stream(world, 0, 1, 40_000_000).ends()
        assert float(received) * 8 > 60e6


def test_queues_drop_what_does_not_fit() -> None:
    # So slow that the queue is full long before a busy machine has sent all.
    with Lab([Host(0.2, 0.2)] * 2, queue_ms=2500) as world:
        path = send_datagrams(world, 0, 1, 2000).paths[0, 1]
        # 128 bytes each: 62,500 bytes wait, and what leaves while the rest is coming.
        assert path.up_full > 0 and path.lost == path.down_full == path.no_room == 0
        assert path.delivered > 62_500 / 128 * 0.9


def test_losses_are_as_frequent_as_asked_and_repeatable() -> None:
    lost = []
    for seed in (1, 1, 2):
        with Lab([Host()] * 2, delay_ms=1, loss=0.05, seed=seed) as world:
            lost.append(send_datagrams(world, 0, 1, 5000).paths[0, 1].lost)
    assert all(0.03 < count / 5000 < 0.07 for count in lost), lost
    assert lost[0] == lost[1] != lost[2]


def test_tcp_survives_losses_inside_what_it_hands_over_at_once() -> None:
    with Lab([Host(200, 200)] * 2, delay_ms=2, loss=0.01) as world:
        sent, received = Stream(world, 0, 1, 10_000_000).ends()
        assert sent == "sent" and float(received) > 0
        path = world.stats().paths[0, 1]
        assert 0.005 < path.lost / path.delivered < 0.02
        assert path.delivered >= 10_000_000 / 1448


def test_a_cut_lets_nothing_through_one_way_or_both() -> None:
    with Lab([Host()] * 3, delay_ms=1) as world:
        world.cut(0, 1, one_way=True)
        assert send_datagrams(world, 0, 1, 10).paths[0, 1].cut == 10
        assert send_datagrams(world, 1, 0, 10).paths[1, 0].delivered == 10
        assert send_datagrams(world, 0, 2, 10).paths[0, 2].delivered == 10
        world.cut(1, 2)
        assert send_datagrams(world, 1, 2, 10).paths[1, 2].cut == 10
        assert send_datagrams(world, 2, 1, 10).paths[2, 1].cut == 10
        for a, b in ((0, 1), (1, 2)):
            world.heal(a, b)
            assert send_datagrams(world, a, b, 10).paths[a, b].delivered == 10


def test_a_stream_goes_on_after_a_cut() -> None:
    with Lab([Host(50, 50)] * 2, delay_ms=5) as world:
        stream = Stream(world, 0, 1, 10_000_000)
        world.cut(0, 1)
        stats_when(world, lambda stats: stats.total("cut") > 0)
        world.heal(0, 1)
        assert stream.ends()[0] == "sent"


@pytest.mark.parametrize("loss", [0, 0.01])
def test_a_reset_meets_one_connection_at_both_ends(loss: float) -> None:
    with Lab([Host(50, 50)] * 2, delay_ms=10, loss=loss) as world:
        spared = Stream(world, 0, 1)
        other = Stream(world, 0, 1)
        world.reset(0, 1, spare=spared.port)
        assert other.ends() == ("reset", "reset")
        assert world.resets(0, 1) == 1
        before = world.stats().paths[0, 1].delivered
        stats_when(world, lambda stats: stats.paths[0, 1].delivered > before + 100)
        assert spared.sender.poll() is None and spared.receiver.poll() is None
        world.reset(0, 1, port=spared.port)
        assert spared.ends() == ("reset", "reset")
        assert world.resets(0, 1) == 2


def namespaces() -> set[str]:
    folder = Path("/run/netns")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # somebody else's to wait for


def test_nothing_is_left_after_a_failure_in_the_body() -> None:
    with pytest.raises(ZeroDivisionError), Lab([Host()] * 2) as world:
        names = {world.namespace(host) for host in range(2)}
        assert names <= namespaces()
        relay = world._relay
        assert relay is not None
        # A child, and one that it leaves behind.
        script = ["sh", "-c", "sleep 1000 & echo $!; exec sleep 1000"]
        child = world.popen(1, script, stdout=subprocess.PIPE, text=True)
        grandchild = int(child.stdout.readline())
        1 / 0  # noqa: B018
    assert not names & namespaces()
    assert child.poll() is not None and relay.poll() == 0
    eventually(lambda: not is_running(grandchild))  # it was killed
    assert world.last_stats is not None
    child.stdout.close()


def test_nothing_is_left_after_a_failure_while_it_starts() -> None:
    before = {name for name in namespaces() if f"-{os.getpid()}-" in name}
    with pytest.raises(lab.LabError), Lab([Host()] * 2, congestion="no such thing"):
        pass
    assert {name for name in namespaces() if f"-{os.getpid()}-" in name} == before


def test_the_next_lab_removes_what_a_killed_one_left() -> None:
    process = subprocess.Popen(
        command(partial(wan.hold_a_lab, str(BENCHMARKS))),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    relay, *names = process.stdout.readline().split()
    assert set(names) <= namespaces()
    process.kill()
    process.communicate()
    eventually(lambda: not is_running(int(relay)))  # its input ended
    with Lab([Host()] * 2):
        assert not set(names) & namespaces()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_say(name: str) -> None:
    world = lab.preset(name, rates=0.5)
    assert world.hosts[0].up_mbit == lab.PRESETS[name].hosts[0].up_mbit / 2
    rtts = [world.rtt_ms(a, b) for a, b in world.pairs()]
    limits = {
        "europe": (20, 40),
        "transatlantic": (10, 100),
        "world": (80, 300),
        "two_sites": (2, 40),
    }
    least, most = limits.get(name, (20, 100))
    assert least <= min(rtts) <= max(rtts) <= most
    assert len(world.hosts) == (8 if name.startswith("two_") else 4)


def test_an_allreduce_over_four_hosts_is_right_and_not_far_from_the_bound(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--no-gloo", "--json", str(file)]
    done = subprocess.run(
        [*command, "--preset", "transatlantic", "--rates", "0.5", "--mb", "4", "--repeats", "3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [result] = json.loads(file.read_text())["results"]
    assert result["bound"] == pytest.approx(2 * 3 / 4 * (4 << 20) * 8 / 100e6)
    # Steps of a ring, and connections that have to find the rate, take their time at 100 ms.
    assert result["bound"] < min(result["seconds"]["pccl"]) < 8 * result["bound"]
    assert "\n| transatlantic (4) | 4 MiB | 0.50 |" in done.stdout


@pytest.mark.soak
def test_training_is_measured_over_its_links(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    run = Path(lab.__file__).resolve().parent.parent / "training" / "run.py"
    file = tmp_path / "training.json"
    options = ["--quick", "--methods", "async", "--seeds", "0", "--tokens", "10240"]
    options += ["--wan", "10", "100", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(run), *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(file.read_text())["runs"]["async"]
    assert found["members"] == 2 and 0 < found["bytes"] < found["wire"]
