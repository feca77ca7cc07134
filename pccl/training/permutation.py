"""The order of an epoch: a permutation that is computed where it is needed, not stored."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["permuted"]

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8  # of the cipher: each half is changed four times
_MIN_BITS = 6  # with fewer, a round has too little to mix


def permuted(places: npt.ArrayLike, length: int, seed: int, epoch: int) -> Indices:
    """The examples at these places of an epoch's order.

    A permutation of range(length), computed on demand in integers alone: it needs no memory beyond
    the result, and is the same everywhere and with every NumPy. It is a Feistel network over the
    least sufficient power of two (Luby and Rackoff 1988; both halves stay in place). Results
    outside the range are sent through again (cycle walking, Black and Rogaway 2002).

    Args:
        places: Integers in [0, length).
        length: Number of examples.
        seed: Any integer.
        epoch: Any integer.
    """
    keys = _round_keys(seed, epoch)
    bits = max(_MIN_BITS, (length - 1).bit_length())
    found = np.array(places, np.uint64).reshape(-1)
    outside = np.arange(found.size)
    while outside.size:
        found[outside] = _cipher(found[outside], bits, keys)
        outside = outside[found[outside] >= length]
    return found.astype(np.int64).reshape(np.shape(places))


def _round_keys(seed: int, epoch: int) -> _Words:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _cipher(words: _Words, bits: int, keys: _Words) -> _Words:
    """A permutation of [0, 2**bits)."""
    low_bits = np.uint64(bits - bits // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits // 2)) - 1)
    high, low = words >> low_bits, words & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            low ^= _mix(high, key) & low_mask
        else:
            high ^= _mix(low, key) & high_mask
    joined: _Words = high << low_bits | low
    return joined


def _mix(words: _Words, key: np.uint64) -> _Words:
    """Every bit of the result depends on every bit of word and key. Constants: MurmurHash3's."""
    shift = np.uint64(33)
    mixed: _Words = words ^ key
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed ^= mixed >> shift
        mixed *= np.uint64(factor)
    mixed ^= mixed >> shift
    return mixed
