"""A member keeps what its followers receive, and sends in its free time. Without connections."""

from __future__ import annotations

import random
import time

import pytest

import pccl
from pccl.following import publisher as publishing
from pccl.following.publisher import Publisher, _Follower
from pccl.following.snapshot import Snapshot


class Reader:
    """A follower of a publisher, without a connection."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.one = _Follower(pair=None)  # type: ignore[arg-type]
        publisher._followers.add(self.one)

    def news(self) -> int | None:
        found = self.publisher.news(self.one)
        return None if found is None else found.revision

    def holds(self) -> int | None:
        found = self.publisher.held(self.one)
        return None if found is None else found.revision


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    monkeypatch.setattr(publishing, "NEWS_SECONDS", 0.0)
    monkeypatch.setattr(Publisher, "_open", lambda self: None)
    return Publisher(pccl.Communicator("127.0.0.1:1"))


def test_slow_followers_end_what_they_have_begun(publisher: Publisher) -> None:
    snapshot = Snapshot({}, "publish")
    readers = [Reader(publisher) for _ in range(5)]
    for revision in range(1, 5):
        publisher.publish(revision, snapshot)
        if revision <= 3:
            assert readers[revision].news() == revision
    assert readers[0].news() == 3  # as many are kept as may be
    assert readers[4].news() == 3
    publisher.publish(5, snapshot)
    assert [reader.holds() for reader in readers] == [3, 1, 2, 3, 3]
    assert readers[0].news() is None  # it has that one
    assert readers[1].news() == 5  # there is room again
    assert readers[0].news() == 5
    assert [reader.holds() for reader in readers] == [5, 5, 2, 3, 3]


def test_no_more_revisions_are_kept_than_a_member_may(publisher: Publisher) -> None:
    chance = random.Random(1)
    snapshot = Snapshot({}, "publish")
    readers = [Reader(publisher) for _ in range(8)]
    for revision in range(1, 500):
        publisher.publish(revision, snapshot)
        for reader in readers:
            if chance.random() < 0.4:
                reader.news()
            if chance.random() < 0.3:
                reader.one.waits = not reader.one.waits
        kept = {one.holds for one in publisher._followers if one.holds} - {publisher._latest}
        assert len(kept) <= 3


def test_a_follower_that_waits_keeps_nothing_from_others(publisher: Publisher) -> None:
    snapshot = Snapshot({}, "publish")
    reader, waiting = Reader(publisher), [Reader(publisher) for _ in range(5)]
    for revision in range(1, 6):
        publisher.publish(revision, snapshot)
        assert waiting[revision - 1].news() == revision
        publisher.publish(10 + revision, snapshot)
        assert reader.news() == 10 + revision
        assert waiting[revision - 1].news() == 10 + revision
        assert waiting[revision - 1].news() is None
        waiting[revision - 1].one.waits = True
    kept = {one.holds for one in publisher._followers} - {None}
    assert len(kept) <= 4


def test_a_busy_member_sends_for_a_tenth_of_the_time(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = True
    monkeypatch.setattr(publishing, "_MOST_REST", 0.05)
    monkeypatch.setattr(publishing.Publisher, "_is_busy", lambda self: busy)
    assert publisher.may_send()  # the first piece
    began = time.monotonic()
    publisher.sent(1.0)
    publisher.sent(1.0)  # to another follower at the same time
    assert publisher._rests_until >= began + 18
    assert not publisher.may_send()
    busy = False
    assert publisher.may_send()
    busy = True
    publisher.stop()
    assert publisher.may_send()  # to end at once
