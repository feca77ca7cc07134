"""Offers of publishers, and the requests of followers.

A request is two integers: what is asked for, and an index.

| request | first | answer |
|---|---|---|
| NEWS | - | the offer of a revision that this pair has not had, as JSON; nothing after a second |
| PIECE | its index in the latest offer | the piece; nothing if it is no longer kept; LATER |
| END | - | none: both leave |

Before each answer comes its length, or LATER: the member rests from sending. Ask again.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np

from pccl.errors import Refused
from pccl.following.snapshot import Snapshot
from pccl.frameworks import Array

NEWS, PIECE, END = range(3)
LATER = -1
NEWS_SECONDS = 1.0  # after which a publisher answers although nothing is new
PIECE_BYTES = 1 << 20
MOST_OFFER = 64 << 20  # bytes of its JSON
_MOST_ASKED = 2  # publishers, for one piece
_SLOW_SECONDS = 2.0  # without a piece, after which a second one is asked


def digest_of(piece: Array) -> bytes:
    """Tells whether two pieces are the same."""
    return hashlib.blake2b(piece.data, digest_size=16).digest()


class Published:
    """A revision of a state. *any thread*

    Attributes:
        number: How many were published up to it.
    """

    def __init__(self, revision: int, snapshot: Snapshot, number: int = 1) -> None:
        self.revision = revision
        self.number = number
        self._snapshot = snapshot
        self._offer: Array | None = None
        self._lock = threading.Lock()  # while it is made: it costs the digests of all pieces

    def offer(self) -> Array:
        """For `Offer.read`. Made when it is wanted for the first time."""
        with self._lock:
            if self._offer is None:
                told = {
                    "revision": self.revision,
                    "entries": self._snapshot.listed,
                    "pieces": [digest_of(self.piece(at)).hex() for at in range(self.pieces)],
                }
                self._offer = np.array(bytearray(json.dumps(told).encode()))
            return self._offer

    def piece(self, index: int) -> Array:
        """REQUIRES: there is one of that index."""
        first = index * PIECE_BYTES
        return self._snapshot.read(first, min(PIECE_BYTES, self._snapshot.size - first))

    @property
    def pieces(self) -> int:
        return -(-self._snapshot.size // PIECE_BYTES)


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0


def _is_entry(entry: Any) -> bool:
    """Whether it is as `Snapshot.listed` has them."""
    name, kind, shape, hint, _ = entry
    texts = all(isinstance(text, str) for text in (name, kind, hint))
    return texts and isinstance(shape, list) and all(map(_is_count, shape))


class Offer(NamedTuple):
    """A revision as a follower is told of it.

    Attributes:
        revision: Its number.
        entries: What it consists of: see `Snapshot.listed`.
        pieces: Digests of its pieces.
        size: Bytes of all entries.
        digest: Of all this: equal offers are of the same bytes.
    """

    revision: int
    entries: Sequence[Any]
    pieces: Sequence[bytes]
    size: int
    digest: bytes

    @classmethod
    def read(cls, told: Array, func: str) -> Offer:
        """From what `Published.offer` has made.

        Raises:
            Refused: It makes no sense.
        """
        try:
            given = json.loads(told.tobytes())
            pieces = [bytes.fromhex(piece) for piece in given["pieces"]]
            sizes = [entry[4] for entry in given["entries"]]
            revision = given["revision"]
            whole = all(map(_is_count, (revision, *sizes))) and all(
                map(_is_entry, given["entries"])
            )
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise Refused.because(func, f"an offer that cannot be read: {error!r}") from None
        if not whole or len(pieces) != -(-sum(sizes) // PIECE_BYTES):
            raise Refused.because(func, "an offer whose numbers make no sense")
        return cls(revision, given["entries"], pieces, sum(sizes), digest_of(told))


class Assembly:
    """The pieces of an offer that have come, and those that are missing. *one thread at a time*

    Args:
        offer: Whose pieces these are.
        known: Earlier ones, to take from them what is the same.
    """

    def __init__(self, offer: Offer, known: Sequence[Assembly]) -> None:
        self.offer = offer
        self.data = np.empty(offer.size, np.uint8)
        self.received = 0  # bytes
        self.changed = time.monotonic()  # when the last piece came
        self._here = [False] * len(offer.pieces)
        self._missing = len(offer.pieces)
        self._asked: Counter[int] = Counter()  # how many are asked for a piece
        for index in range(len(offer.pieces)):
            place = self._place(index)
            source = next((one for one in known if one.has(index, offer, place.size)), None)
            if source is not None:
                place[...] = source._place(index)
                self._here[index] = True
                self._missing -= 1
        # Those that nobody is asked for, the last first.
        self._left = [at for at in reversed(range(len(self._here))) if not self._here[at]]

    def _place(self, index: int) -> Array:
        return self.data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]

    def size_of(self, index: int) -> int:
        """Bytes of a piece."""
        return self._place(index).size

    def has(self, index: int, offer: Offer, size: int) -> bool:
        """Whether that piece of another offer is here."""
        known = self.offer.pieces
        same = index < len(known) and known[index] == offer.pieces[index]
        return same and self._here[index] and self._place(index).size == size

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def take(self, asked: Container[int]) -> int | None:
        """A piece to ask for; None: there is none to ask this publisher for.

        When somebody is asked for each, and none has come for a while, those that are missing are
        asked for a second time: one publisher may be slow, or hang.

        Args:
            asked: Pieces that this publisher is not to be asked for.
        """
        if self._left:
            index = self._left.pop()
        elif time.monotonic() - self.changed < _SLOW_SECONDS:
            return None
        else:
            waiting = (at for at in self._asked if not self._here[at] and at not in asked)
            found = next((at for at in waiting if self._asked[at] < _MOST_ASKED), None)
            if found is None:
                return None
            index = found
        self._asked[index] += 1
        return index

    def put_back(self, index: int) -> None:
        """That piece has not come from one that was asked."""
        self._asked[index] -= 1
        if self._asked[index] <= 0:
            del self._asked[index]
            if not self._here[index]:
                self._left.append(index)

    def put(self, index: int, piece: Array) -> None:
        """That piece has come, and is right."""
        self._asked[index] -= 1
        if self._asked[index] <= 0:
            del self._asked[index]
        if self._here[index]:
            return
        self._place(index)[...] = piece
        self._here[index] = True
        self._missing -= 1
        self.received += piece.size
        self.changed = time.monotonic()
