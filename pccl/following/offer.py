"""Offers of publishers, and the requests of followers.

A request is two integers: what is asked for, and an index.

| request | first | answer |
|---|---|---|
| NEWS | - | the offer of a revision that this pair has not had, as JSON; nothing after a second |
| PIECE | its index in the latest offer | the piece; nothing if it is no longer kept |
| END | - | none: both leave |

Before each answer comes its length.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pccl.errors import Refused
from pccl.following.snapshot import Snapshot
from pccl.frameworks import Array

NEWS, PIECE, END = range(3)
NEWS_SECONDS = 1.0  # after which a publisher answers although nothing is new
PIECE_BYTES = 1 << 20
MOST_OFFER = 64 << 20  # bytes of its JSON


def digest_of(piece: Array) -> bytes:
    """Tells whether two pieces are the same."""
    return hashlib.blake2b(piece.data, digest_size=16).digest()


class Published:
    """A revision of a state. *any thread*"""

    def __init__(self, revision: int, snapshot: Snapshot) -> None:
        self.revision = revision
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
            whole = all(type(number) is int and number >= 0 for number in (revision, *sizes))
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise Refused.because(func, f"an offer that cannot be read: {error!r}") from None
        if not whole or len(pieces) != -(-sum(sizes) // PIECE_BYTES):
            raise Refused.because(func, "an offer whose numbers make no sense")
        return cls(revision, given["entries"], pieces, sum(sizes), digest_of(told))


class Assembly:
    """The pieces of an offer that have come, and those that are missing. *one thread at a time*

    Args:
        offer: Whose pieces these are.
        known: An earlier one that is complete, to take from it what is the same.
    """

    def __init__(self, offer: Offer, known: Assembly | None) -> None:
        self.offer = offer
        self.data = np.empty(offer.size, np.uint8)
        self.received = 0  # bytes
        self._left: list[int] = []  # pieces that nobody is asked for, the last first
        self._asked: set[int] = set()
        for index, digest in enumerate(offer.pieces):
            same = known is not None and known.has(index, digest, self.place(index).size)
            if known is not None and same:
                self.place(index)[...] = known.place(index)
            else:
                self._left.append(index)
        self._left.reverse()

    def place(self, index: int) -> Array:
        """Where a piece belongs."""
        return self.data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]

    def has(self, index: int, digest: bytes, size: int) -> bool:
        """Whether that piece is here. REQUIRES: complete."""
        known = self.offer.pieces
        return index < len(known) and known[index] == digest and self.place(index).size == size

    @property
    def complete(self) -> bool:
        return not self._left and not self._asked

    @property
    def busy(self) -> bool:
        """Whether somebody is asked for a piece."""
        return bool(self._asked)

    def take(self) -> int | None:
        """A piece to ask for; None: all are here or asked for."""
        if not self._left:
            return None
        index = self._left.pop()
        self._asked.add(index)
        return index

    def put_back(self, index: int) -> None:
        """That piece has not come, and somebody else is asked for it."""
        self._asked.discard(index)
        self._left.append(index)

    def put(self, index: int) -> None:
        """That piece is in its place, and checked."""
        self._asked.discard(index)
        self.received += self.place(index).size
