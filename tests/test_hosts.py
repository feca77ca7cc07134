"""Several ranks per host reduce exactly, and send no more between hosts than one rank does."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import programs.hosts
import pytest
from namespaces import Host, Lab, running_on
from workers import Worker

pytestmark = pytest.mark.shared_memory  # the plans wait until ranks of a host share memory


@contextmanager
def reducing(hosts: list[Host], ranks: list[int], **env: str) -> Iterator[list[Worker]]:
    """`ranks[i]` workers on host i, under a plan that knows where they are."""
    with running_on(hosts[0], **env) as run:
        program = partial(programs.hosts.reduce, planned=max(ranks) > 1)
        peers = [
            run.peer(program, host, PCCL_MIN_PEERS=str(sum(ranks)))
            for host, here in zip(hosts, ranks, strict=True)
            for _ in range(here)
        ]
        for peer in peers:
            peer.expect("in", 60)
        yield peers


def reduce(peers: list[Worker], count: int) -> None:
    for peer in peers:
        peer.tell(count)
    answers = [peer.expect("done", 60) for peer in peers]
    assert all(answer["ok"] and answer["size"] == len(peers) for answer in answers), answers
    assert len({answer["half"] for answer in answers}) == 1


def sent_by_each(hosts: list[Host], ranks: list[int], count: int, **env: str) -> list[int]:
    """Bytes that left each host for one all-reduce."""
    with reducing(hosts, ranks, **env) as peers:
        before = [host.sent() for host in hosts]
        reduce(peers, count)
        after = [host.sent() for host in hosts]
        for peer in peers:
            peer.tell(0)
        for peer in peers:
            assert peer.ends() == 0
    return [b - a for a, b in zip(before, after, strict=True)]


@pytest.mark.root
def test_bytes_between_hosts_do_not_grow_with_ranks_per_host(lab: Lab) -> None:
    count = 1_000_000  # of int64, and of float16, whose partial results are twice as wide
    hosts = lab(2)
    alone = sent_by_each(hosts, [1, 1], count)
    for ranks in ([2, 2], [4, 4]):
        sent = sent_by_each(hosts, ranks, count)
        # Half of the array as partial results, half of it as final ones.
        assert all(total < 1.1 * (8 + 3) * count for total in sent)
        assert max(sent) < 1.1 * max(alone) + 3 * count


@pytest.mark.root
@pytest.mark.parametrize("count", [7, 5_000, 300_001])
def test_uneven_hosts_reduce_every_size(lab: Lab, count: int) -> None:
    hosts = lab(3)
    sent_by_each(hosts, [3, 1, 2], count)


@pytest.mark.root
@pytest.mark.parametrize("ranks", [[1, 3, 1], [2, 1, 2]])
def test_windows_of_one_segment_let_everything_through(lab: Lab, ranks: list[int]) -> None:
    small = {"PCCL_SEGMENT_BYTES": "4096", "PCCL_BUFFER_BYTES": "16384"}
    hosts = lab(3)
    sent_by_each(hosts, ranks, 1_000_003, **small)


@pytest.mark.root
def test_ranks_of_one_host_of_several_exchange_through_memory(lab: Lab) -> None:
    count = 1_000_000
    hosts = lab(2)
    with reducing(hosts, [2, 1]) as peers:
        deadline = time.monotonic() + 30
        while True:
            before = hosts[0].sent("lo")
            reduce(peers, count)
            # Over TCP it would be more than one array.
            if hosts[0].sent("lo") - before < count:
                break
            assert time.monotonic() < deadline


@pytest.mark.root
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_others_go_on_when_a_rank_of_several_hosts_is_killed(lab: Lab, victim: int) -> None:
    hosts = lab(2)
    with reducing(hosts, [2, 2]) as peers:
        reduce(peers, 2_000_000)
        for peer in peers:
            peer.tell(2_000_000)
        peers[victim].signal(signal.SIGKILL)
        rest = [peer for peer in peers if peer is not peers[victim]]
        for peer in rest:
            assert peer.expect("done", 60)["ok"]
        reduce(rest, 300_000)
