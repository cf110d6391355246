"""A pseudo-random permutation of 0 … n-1 that is computed, not stored, and hashes of bytes."""

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]

ROUNDS = 8
"""Number of rounds of the permutation, each with its own key."""


def shuffled(samples: Int64s, n: int, seed: int) -> Int64s:
    """Return the item index (0 to n-1) of each sample number, [k]. Each epoch visits each item once, in a new order."""
    epochs, places = np.divmod(samples, n)
    items = np.empty_like(samples)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        items[here] = permute(places[here], n, random_keys(seed, epoch))
    return items


def evenly_spaced(total: int, n: int = 0) -> list[int]:
    """Return at most n evenly spaced numbers from 0 to `total` - 1; all numbers if n = 0."""
    chosen = min(n or total, total)
    return [place * total // chosen for place in range(chosen)]


def hashed(data: bytes, use: bytes = b"") -> int:
    """Return a hash of `data`, from 0 to 2**64 - 1. Hashes for different uses are independent."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=use).digest(), "big")


@lru_cache(maxsize=64)
def random_keys(*seeds: int) -> Uint64s:
    """Return random numbers [ROUNDS + 1] that depend on the seeds: ROUNDS keys for `permute`, then one more number.

    Leaving out a last seed of 0 gives the same numbers.
    """
    return np.random.SeedSequence(seeds).generate_state(ROUNDS + 1, np.uint64).astype(np.uint64)


def permute(places: Int64s, n: int, keys: Uint64s) -> Int64s:
    """Return the image [k] of each number [k] under a pseudo-random permutation of 0 … n-1.

    A Feistel network permutes the numbers below a power of four, at most 4n. A result of n or more goes through the
    network again until it is below n (cycle walking: Black & Rogaway, 2002).
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> shift, values[outside] & mask
        for key in keys[:ROUNDS]:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        values[outside] = left << shift | right
        outside = values >= n
    return values.astype(np.int64)


def _mix(values: Uint64s) -> Uint64s:
    """Apply SplitMix64's finalizer (Steele, Lea & Flood, 2014): each input bit flips about half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
