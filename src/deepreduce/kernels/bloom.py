"""The classic Bloom filter over positions: inserting some, and finding all that it holds.

The hash of position i under a salt, in unsigned arithmetic modulo 2**64, is the i-th number of the random stream (`draw.number`):

    x = salt + (i + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    h = x ^ (x >> 31)

Probe j looks at one bit of the filter of `m` bits (m below 2**32), bit b being bit b % 8 of byte b // 8:

    bit(j) = ((h * 0xD1342543DE82EF95**j >> 32) * m) >> 32

so every probe has 32 bits of its own multiple of h, scaled to 0..m-1 without a division. (Sums a + j * b, the usual double hashing, send
some pairs of positions to nearly the same bits, which costs extra false positives in small filters.) With signed 64-bit integers, which is
what tensor libraries have, the products are the same bits; a right shift by n must be followed by a mask of the low 64 - n bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .draw import number
from .jit import inline, kernel

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]

MAX_BYTES = 2**29 - 1
"""The largest filter: its number of bits has to fit into 32."""

STEP = np.uint64(0xD1342543DE82EF95)
_HALF = np.uint64(32)
_ONE = np.uint8(1)

# Hashes and survivors of one block stay in the first-level cache: half or twice this is slower.
_BLOCK = 512
_FIRST_ROOM = 4096


@inline
def bit_of(hashed: np.uint64, size_bits: np.uint64) -> np.int64:
    """The bit that a probe with this multiple of the hash looks at."""
    return np.int64(((hashed >> _HALF) * size_bits) >> _HALF)


@inline
def _is_set(packed: Bytes, bit: np.int64) -> int:
    return int(packed[bit >> 3] >> np.uint8(bit & 7)) & 1


@kernel
def _insert(packed: Bytes, hashes: int, salt: np.uint64, positions: Positions) -> None:
    size_bits = np.uint64(8 * packed.size)
    for position in positions:
        hashed = number(salt, position)
        for _ in range(hashes):
            bit = bit_of(hashed, size_bits)
            packed[bit >> 3] |= _ONE << np.uint8(bit & 7)
            hashed *= STEP


@kernel
def _members(packed: Bytes, hashes: int, salt: np.uint64, numel: int, at_most: int) -> Positions:
    size_bits = np.uint64(8 * packed.size)
    hashed = np.empty(_BLOCK, np.uint64)
    offsets = np.empty(_BLOCK, np.int32)
    out = np.empty(_FIRST_ROOM, np.int64)
    found = 0
    for start in range(0, numel, _BLOCK):
        size = min(_BLOCK, numel - start)
        for i in range(size):  # a loop of its own, as it vectorises
            hashed[i] = number(salt, start + i)
            offsets[i] = i
        # Whether a bit is set is a coin toss, so a branch would be mispredicted: every candidate is stored, and overwritten if it failed.
        for _ in range(hashes):
            candidates, size = size, 0
            for i in range(candidates):
                probe, offset = hashed[i], offsets[i]
                hashed[size], offsets[size] = probe * STEP, offset
                size += _is_set(packed, bit_of(probe, size_bits))
        if found + size > out.size:
            grown = np.empty(2 * out.size, np.int64)
            grown[:found] = out[:found]
            out = grown
        for i in range(size):
            out[found + i] = start + offsets[i]
        found += size
        if found >= at_most:
            break
    return out[: min(found, at_most)]


def insert(size_bytes: int, hashes: int, salt: int, positions: Positions) -> Bytes:
    """A filter of this size (at least one byte, if there are positions) that holds these positions.

    >>> insert(2, 3, 7, np.array([4, 9]))
    array([192,  10], dtype=uint8)
    """
    packed = np.zeros(size_bytes, np.uint8)
    if size_bytes:
        _insert(packed, hashes, np.uint64(salt), positions)
    return packed


def members(packed: Bytes, hashes: int, salt: int, numel: int, at_most: int) -> Positions:
    """The first `at_most` of the positions 0..numel-1 that the filter holds: what was inserted, and false positives.

    Probe by probe over blocks of positions, half of which survive each probe. An empty filter holds nothing.

    >>> members(np.array([192, 10], np.uint8), 3, 7, numel=12, at_most=12)  # of `insert` above; 6 is a false positive
    array([4, 6, 9])
    """
    if packed.size == 0 or at_most <= 0:
        return np.empty(0, np.int64)
    return _members(packed, hashes, np.uint64(salt), numel, at_most)
