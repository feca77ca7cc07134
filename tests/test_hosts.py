"""Several ranks on each of several hosts: right results, and no more bytes between hosts than with one rank each."""

import pytest
from namespaces import Host, namespaces, running_on

# Reduces until the plan knows who shares a host (with several ranks on one: the second epoch), then
# as it is told.
REDUCE = """
import zlib
start()
info = pccl.ReduceInfo()
while os.environ["TEST_PLANNED"] == "1" and info.epoch < 2:
    _, info = pccl.allreduce(x(10), return_info=True)
say(event="in")
for line in sys.stdin:
    count = json.loads(line)
    if count == 0:
        break
    total, info = pccl.allreduce(x(count), return_info=True)
    half = pccl.allreduce((x(count) % 7).astype("float16"))
    say(event="done", ok=bool((total == expected(info)).all()), size=info.world_size, half=zlib.crc32(half))
pccl.shutdown()
"""


def sent_by_each(hosts: list[Host], ranks: list[int], count: int, **env: str) -> list[int]:
    """Bytes that left each host for one all-reduce over `ranks[i]` ranks on host i."""
    world = sum(ranks)
    with running_on(hosts[0], **env) as run:
        peers = [
            run.peer(REDUCE, host, PCCL_MIN_PEERS=str(world), TEST_PLANNED=str(int(max(ranks) > 1)))
            for host, here in zip(hosts, ranks, strict=True)
            for _ in range(here)
        ]
        for peer in peers:
            peer.expect("in", 60)
        before = [host.sent() for host in hosts]
        for peer in peers:
            peer.tell(count)
        answers = [peer.expect("done", 60) for peer in peers]
        after = [host.sent() for host in hosts]
        assert all(answer["ok"] and answer["size"] == world for answer in answers)
        assert len({answer["half"] for answer in answers}) == 1
        for peer in peers:
            peer.tell(0)
        for peer in peers:
            assert peer.ends() == 0
    return [b - a for a, b in zip(before, after, strict=True)]


@pytest.mark.root
def test_bytes_between_hosts_do_not_grow_with_ranks_per_host() -> None:
    count = 1_000_000  # of int64, and of float16, whose partial results are twice as wide
    with namespaces(2) as hosts:
        alone = sent_by_each(hosts, [1, 1], count)
        for ranks in ([2, 2], [4, 4]):
            sent = sent_by_each(hosts, ranks, count)
            # Half of the array as partial results, half of it as final ones.
            assert all(total < 1.1 * (8 + 3) * count for total in sent)
            assert max(sent) < 1.1 * max(alone) + 3 * count


@pytest.mark.root
@pytest.mark.parametrize("count", [7, 5_000, 300_001])
def test_uneven_hosts_reduce_every_size(count: int) -> None:
    with namespaces(3) as hosts:
        sent_by_each(hosts, [3, 1, 2], count)


@pytest.mark.root
@pytest.mark.parametrize("ranks", [[1, 3, 1], [2, 1, 2]])
def test_windows_of_one_segment_let_everything_through(ranks: list[int]) -> None:
    small = {"PCCL_SEGMENT_BYTES": "4096", "PCCL_BUFFER_BYTES": "16384"}
    with namespaces(3) as hosts:
        sent_by_each(hosts, ranks, 1_000_003, **small)
