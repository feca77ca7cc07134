"""The meeting of members and newcomers where a round ends, and the conclusions from it.

All that are in the meeting have the same records, so all come to the same conclusions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from pccl._core import FIRST_DOOR, FIRST_PAIR
from pccl.errors import PCCLError, RevisionMismatch
from pccl.frameworks import Array
from pccl.training.diloco.options import FUNC, refused

_SETTINGS_BYTES = 512  # of the text, for errors
_MOST_HOLDERS = 4  # that send to one newcomer; each line is a group of the run
# Numbers of groups for the first line of a newcomer; those of its other lines follow.
FIRST_LINE, LAST_LINE = FIRST_PAIR, FIRST_DOOR - _MOST_HOLDERS - 1


class Record(NamedTuple):
    """One peer's part in a meeting.

    Attributes:
        peer: Its id.
        settings: The beginning of its settings, for errors.
        digest: Of its settings, its parameters' layout, and whether it has data. The calls of two
            peers with other digests do not meet.
        steps: The inner step that its state is of.
        holds: It has the run's state.
        counts: Its learning counts. Others are newcomers that watch, or come now.
        leaves: It was asked to leave.
        fetches: It is receiving the state.
        stuck: It does not get the state, or cannot wait for it any longer.
        line: The group of the first line to it.
    """

    peer: str
    settings: str
    digest: bytes
    steps: int
    holds: bool
    counts: bool
    leaves: bool
    fetches: bool
    stuck: bool
    line: int

    def tree(self) -> dict[str, Array]:
        """For an all-gather."""
        settings = np.zeros(_SETTINGS_BYTES, np.uint8)
        text = np.frombuffer(self.settings.encode()[:_SETTINGS_BYTES], np.uint8)
        settings[: text.size] = text
        return {
            "settings": settings,
            "digest": np.array(bytearray(self.digest)),
            "numbers": np.array(self[3:], np.int64),
        }

    def why_refused(self, run: Record) -> PCCLError:
        """The error of a peer that does not fit a run, of which `run` is a member."""
        if self.settings != run.settings:
            return refused(f"this peer has {self.settings}; the run has {run.settings}")
        if self.digest != run.digest:
            return refused(
                "this peer's settings, its parameters' names, shapes and dtypes, or whether it has "
                "data, are not those of the run"
            )
        sentence = f"this peer's state is of inner step {self.steps}; the run is at {run.steps}"
        return RevisionMismatch.because(FUNC, sentence)


class Meeting(NamedTuple):
    """Where a round ends.

    Attributes:
        records: By rank.
        watched: Newcomers that watched before, by id.
    """

    records: Sequence[Record]
    watched: Collection[str]

    @classmethod
    def of(cls, peers: Sequence[str], found: Any, watched: Collection[str]) -> Meeting:
        """From the all-gather's result."""
        records = []
        texts, digests = found["settings"], found["digest"]
        for peer, text, digest, numbers in zip(
            peers, texts, digests, found["numbers"], strict=True
        ):
            steps, holds, counts, leaves, fetches, stuck, line = numbers.tolist()
            settings = text.tobytes().rstrip(b"\0").decode(errors="replace")
            flags = bool(holds), bool(counts), bool(leaves), bool(fetches), bool(stuck)
            records.append(Record(peer, settings, digest.tobytes(), steps, *flags, line))
        return cls(records, watched)

    @property
    def holders(self) -> list[Record]:
        """Those that have the state: the members that count, as long as there is one."""
        return [record for record in self.records if record.holds and record.counts] or [
            record for record in self.records if record.holds
        ]

    @property
    def waits(self) -> bool:
        """Whether nobody has the state, and somebody may still receive it."""
        return not self.holders and any(record.fetches for record in self.records)

    def misfit(self, record: Record) -> bool:
        """Whether a peer cannot take part in this run, and leaves."""
        first = self.holders[0]
        return not record.holds and (record.digest != first.digest or record.steps > first.steps)

    @property
    def behind(self) -> list[Record]:
        """Newcomers that have not received the state."""
        return [one for one in self.records if not one.holds and not self.misfit(one)]

    @property
    def newcomers(self) -> list[Record]:
        """Those that begin to watch."""
        return [record for record in self.behind if record.peer not in self.watched]

    @property
    def graduates(self) -> list[Record]:
        """Newcomers that have received the state, and count from here on."""
        return [record for record in self.records if record.holds and not record.counts]

    @property
    def must_share(self) -> bool:
        """Whether all wait until the newcomers have the state."""
        if not self.behind:
            return False
        leaving = all(record.leaves for record in self.holders)
        return leaving or any(record.stuck for record in self.behind)

    def stays(self, but: str) -> bool:
        """Whether another one than `but` has the state, and is not leaving."""
        return any(not record.leaves and record.peer != but for record in self.holders)

    def lines(self, newcomer: Record) -> list[str]:
        """The holders that the lines of a newcomer lead to.

        The first holder has one more line, which reports steps while the others send pieces.
        """
        holders = [record.peer for record in self.holders]
        turn = self.newcomers.index(newcomer)
        count = min(_MOST_HOLDERS, len(holders))
        found = [holders[(turn + index) % len(holders)] for index in range(count)]
        return [*found, found[0]]
