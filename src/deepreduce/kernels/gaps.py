"""Gaps between increasing positions, bit-packed in blocks of 64 numbers of one width."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .bits import Bytes, Words, bit_length, put
from .codes import BEYOND_LIMIT, ENDS_EARLY
from .jit import inline, kernel

Positions = NDArray[np.int64]
Numbers = NDArray[np.uint64]
Widths = NDArray[np.uint8]

BLOCK = 64
MAX_WIDTH_BITS = 56
"""The widest number that lies in 8 bytes wherever it begins; it also keeps the sum of a block below 2**63."""

_1, _3, _7 = np.uint64(1), np.uint64(3), np.uint64(7)
_BEFORE_0 = np.uint64(0xFFFFFFFFFFFFFFFF)


@inline
def load(packed: Bytes, at: np.uint64) -> np.uint64:
    """At least 56 bits from bit `at` on; 8 bytes must exist from its byte on.

    The compiler makes one unaligned load of this on every little-endian machine. The index is unsigned, so that numba need not look
    for a negative one.
    """
    i = at >> _3
    low = np.uint64(packed[i]) | np.uint64(packed[i + np.uint64(1)]) << np.uint64(8)
    low |= np.uint64(packed[i + np.uint64(2)]) << np.uint64(16) | np.uint64(packed[i + np.uint64(3)]) << np.uint64(24)
    high = np.uint64(packed[i + np.uint64(4)]) << np.uint64(32) | np.uint64(packed[i + np.uint64(5)]) << np.uint64(40)
    high |= np.uint64(packed[i + np.uint64(6)]) << np.uint64(48) | np.uint64(packed[i + np.uint64(7)]) << np.uint64(56)
    bits: np.uint64 = (low | high) >> (at & _7)
    return bits


def padded(packed: bytes | memoryview) -> Bytes:
    """A copy of the bytes in whole words, with the spare one that `load` needs."""
    out = np.zeros((len(packed) + 15) // 8 * 8, np.uint8)
    out[: len(packed)] = np.frombuffer(packed, np.uint8)
    return out


@kernel
def between(positions: Positions) -> Numbers:
    """How many positions are skipped before each of the positions, which increase from 0 or more.

    >>> between(np.array([0, 1, 7]))
    array([0, 0, 5], dtype=uint64)
    """
    gaps = np.empty(positions.size, np.uint64)
    before = np.int64(-1)
    for i in range(positions.size):
        gaps[i] = np.uint64(positions[i] - before - 1)
        before = positions[i]
    return gaps


@kernel
def joined_slices(positions: Positions, starts: Positions, length: int) -> Positions:
    """Positions with the gaps of the slices of `positions` that begin at these indices, one slice after another.

    >>> joined_slices(np.array([3, 5, 6, 90, 92, 93]), np.array([0, 4]), 2)
    array([3, 5, 7, 8])
    """
    out = np.empty(starts.size * length, np.int64)
    last, n = np.int64(-1), 0
    for start in starts:
        before = positions[start - 1] if start else np.int64(-1)
        for i in range(start, start + length):
            last += positions[i] - before
            before = positions[i]
            out[n] = last
            n += 1
    return out


@kernel
def sum_widths(positions: Positions) -> int:
    """The bits that all gaps need, and one more for each."""
    total, before = positions.size, np.int64(-1)
    for position in positions:
        total += bit_length(np.uint64(position - before - 1))
        before = position
    return total


@kernel
def count_adjacent(positions: Positions) -> int:
    """How many positions directly follow another one."""
    count = 0
    for i in range(1, positions.size):
        count += positions[i] == positions[i - 1] + 1
    return count


@kernel
def widths(gaps: Numbers) -> Widths:
    """The bits that the widest number of each block needs."""
    out = np.zeros((gaps.size + BLOCK - 1) // BLOCK, np.uint8)
    for b in range(out.size):
        used = np.uint64(0)
        for i in range(b * BLOCK, min(gaps.size, (b + 1) * BLOCK)):
            used |= gaps[i]
        out[b] = bit_length(used)
    return out


def packed_bits(widths: Widths, count: int) -> int:
    """Bits of `count` numbers in blocks of these widths, without the widths; the last block may be short."""
    return BLOCK * int(widths.sum(dtype=np.int64)) - (widths.size * BLOCK - count) * int(widths[-1])


@kernel
def pack(gaps: Numbers, widths: Widths, width_bits: int, words: Words) -> None:
    """Write the widths in `width_bits` each, then the numbers in the width of their block, to zeroed words of `bits.zero_words`."""
    for b in range(widths.size):
        put(words, b * width_bits, np.uint64(widths[b]))
    at = widths.size * width_bits
    for b in range(widths.size):
        for i in range(b * BLOCK, min(gaps.size, (b + 1) * BLOCK)):
            put(words, at, gaps[i])
            at += widths[b]


@kernel
def unpack(packed: Bytes, size_bits: int, width_bits: int, numel: int, out: Numbers) -> int:
    """The positions whose gaps were packed. Returns the bits that were used, or `ENDS_EARLY` or `BEYOND_LIMIT`.

    `packed` is `padded` and holds `size_bits`, the widths among them; `numel` is at most 2**MAX_WIDTH_BITS.
    """
    blocks = (out.size + BLOCK - 1) // BLOCK
    position, at = _BEFORE_0, np.uint64(blocks * width_bits)
    width_mask = (_1 << np.uint64(width_bits)) - _1
    for b in range(blocks):
        start, end = b * BLOCK, min(out.size, (b + 1) * BLOCK)
        width = load(packed, np.uint64(b * width_bits)) & width_mask
        if width > np.uint64(MAX_WIDTH_BITS):
            return BEYOND_LIMIT
        if at + np.uint64(end - start) * width > np.uint64(size_bits):
            return ENDS_EARLY
        mask = (_1 << width) - _1
        for i in range(start, end):
            position += (load(packed, at) & mask) + _1
            out[np.uint64(i)] = position
            at += width
        if position >= np.uint64(numel):
            return BEYOND_LIMIT
    return int(np.int64(at))  # numba would make a float of uint64 beside a negative code
