"""Gaps between increasing positions as a Huffman-coded prefix and the rest of their bits as they are.

The prefix of a number is its bit length and its `finer` bits after the highest. Numbers below 2**(finer + 1) are their own prefix.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import huffman
from .bits import Words, bit_length, get, put, to_bytes, to_words, zero_words
from .codes import BEYOND_LIMIT, ENDS_EARLY, INVALID
from .huffman import Codes, Counts, Lengths, Table
from .jit import inline, kernel
from .logs import log2

Numbers = NDArray[np.uint64]
Positions = NDArray[np.int64]

_NEAR_BITS = 64 - huffman.LONGEST  # a rest of so many bits is in the same 64 as the word before it


def alphabet(finer: int) -> int:
    """How many prefixes there are for numbers below 2**63.

    >>> alphabet(0), alphabet(2)
    (64, 248)
    """
    return (64 - finer) << finer


@inline
def _rest_bits(number: np.uint64, finer: int) -> int:
    return max(bit_length(number) - 1 - finer, 0)


@inline
def _prefix(number: np.uint64, rest_bits: int, finer: int) -> np.int64:
    return (rest_bits << finer) + np.int64(number >> np.uint64(rest_bits))


@inline
def _rest_bits_after(prefix: int, finer: int) -> int:
    return max((prefix >> finer) - 1, 0)


@inline
def _least(prefix: int, finer: int) -> np.uint64:
    rest_bits = _rest_bits_after(prefix, finer)
    return np.uint64(prefix - (rest_bits << finer)) << np.uint64(rest_bits)


@inline
def _low(number: np.uint64, width_bits: int) -> np.uint64:
    return number & ((np.uint64(1) << np.uint64(width_bits)) - np.uint64(1))


# Counting


@kernel
def prefix_counts(positions: Positions, finer: int) -> Counts:
    """How often each prefix of a gap occurs.

    >>> prefix_counts(np.array([2, 6]), 1)[:4]
    array([0, 0, 1, 1])
    """
    counts = np.zeros((64 - finer) << finer, np.int64)
    before = np.int64(-1)
    for position in positions:
        gap = np.uint64(position - before - 1)
        counts[_prefix(gap, _rest_bits(gap, finer), finer)] += 1
        before = position
    return counts


@kernel
def coarser_counts(counts: Counts, finer: int) -> Counts:
    """How often each prefix of the next lower fineness occurs, where those of this one occur so often."""
    coarser = np.zeros((65 - finer) << (finer - 1), np.int64)
    for prefix in range(counts.size):
        if counts[prefix]:
            least = _least(prefix, finer)
            coarser[_prefix(least, _rest_bits(least, finer - 1), finer - 1)] += counts[prefix]
    return coarser


@kernel
def size_bits(counts: Counts, lengths: Lengths, finer: int) -> int:
    """The size of `encode` where the prefixes occur so often."""
    total = 0
    for prefix in range(counts.size):
        total += counts[prefix] * (lengths[prefix] + _rest_bits_after(prefix, finer))
    return total


@kernel
def plan(positions: Positions, finest: int) -> tuple[int, Lengths, int, int]:
    """The fineness, up to `finest`, that takes the fewest bytes: itself, the lengths of its code, the bits of all gaps, and the bytes of
    gaps and packed lengths. Of two, the coarser one."""
    best, best_bits, best_bytes = -1, 0, 0
    counts = prefix_counts(positions, finest)
    best_lengths = np.zeros(0, np.uint8)
    for finer in range(finest, -1, -1):
        lengths = huffman.lengths_of(counts, huffman.DEFAULT_LIMIT)
        bits, table_bytes = size_bits(counts, lengths, finer), huffman.packed_lengths_bytes(lengths)
        size_bytes = table_bytes + (1 if table_bytes < 128 else 2) + (bits + 7) // 8  # the size of the table is a varint
        if best < 0 or size_bytes <= best_bytes:
            best, best_lengths, best_bits, best_bytes = finer, lengths, bits, size_bytes
        if finer:
            counts = coarser_counts(counts, finer)
    return best, best_lengths, best_bits, best_bytes


@kernel
def entropy_bits(positions: Positions, finer: int) -> tuple[int, int]:
    """What all gaps take if their prefixes are coded at their entropy, without any table; and how many prefixes occur."""
    counts = prefix_counts(positions, finer)
    whole = log2(np.uint64(positions.size))
    bits, used = np.int64(0), 0
    for prefix in range(counts.size):
        if counts[prefix]:
            bits += counts[prefix] * (whole - log2(np.uint64(counts[prefix])) + (_rest_bits_after(prefix, finer) << 24))
            used += 1
    return int(bits >> 24), used


# Positions to bits and back


@kernel
def _encode(positions: Positions, lengths: Lengths, codes: Codes, finer: int, words: Words) -> int:
    at, before = 0, np.int64(-1)
    for position in positions:
        gap = np.uint64(position - before - 1)
        before = position
        rest_bits = _rest_bits(gap, finer)
        prefix = _prefix(gap, rest_bits, finer)
        put(words, at, codes[prefix])
        at += lengths[prefix]
        put(words, at, _low(gap, rest_bits))
        at += rest_bits
    return at


@kernel
def _decode(words: Words, end: int, table: Table, mask: np.uint64, least: Numbers, numel: np.uint64, out: Positions) -> int:
    """The bit after the last gap, which may lie after `end`; `INVALID` for no word, `BEYOND_LIMIT` for a position too far."""
    at, after = 0, np.uint64(0)
    for i in range(out.size):
        if at > end:
            return at
        bits = get(words, at)
        entry = table[bits & mask]
        if entry == 0:
            return INVALID
        length, rest_bits = entry & 255, entry >> 8 & 255
        # A word that runs past the end is seen in the next round; its rest is read from where there are bits.
        rest = bits >> np.uint64(length) if rest_bits <= _NEAR_BITS else get(words, min(at + length, end))
        at += length + rest_bits
        after += least[entry >> 16] + _low(rest, rest_bits)
        if after >= numel:
            return BEYOND_LIMIT
        out[i] = np.int64(after)
        after += np.uint64(1)
    return at


@kernel
def _numbers_after(finer: int, rest_bits: NDArray[np.int32], least: Numbers) -> None:
    for prefix in range(least.size):
        rest_bits[prefix] = _rest_bits_after(prefix, finer)
        least[prefix] = _least(prefix, finer)


def _table(lengths: Lengths, finer: int) -> tuple[Table, np.uint64, Numbers]:
    """The table of the code with the bits of the rest in it, from bit 8 on, and the prefix from bit 16 on; its mask; the least number of
    each prefix. So the next word is found with one look at the table."""
    rest_bits, least = np.empty(lengths.size, np.int32), np.empty(lengths.size, np.uint64)
    _numbers_after(finer, rest_bits, least)
    table, mask = huffman.table_of(lengths)
    prefixes = table >> 8
    return prefixes << 16 | rest_bits[prefixes] << 8 | table & 255, mask, least


def encode(positions: Positions, lengths: Lengths, finer: int, size_bits: int) -> bytes:
    """For each gap the word of its prefix, then the rest of its bits; the whole takes `size_bits` bits, then zeros to the next byte."""
    words = zero_words(size_bits)
    _encode(positions, lengths, huffman.code_words(lengths), finer, words)
    return to_bytes(words, size_bits)


def decode(packed: bytes | memoryview, lengths: Lengths, finer: int, count: int, numel: int) -> tuple[Positions, int]:
    """The inverse of `encode`, and 0; or a code below 0, if the bytes do not hold exactly `count` positions below `numel`, then zeros.

    >>> positions, finer = np.array([3, 4, 4000]), 1
    >>> counts = prefix_counts(positions, finer)
    >>> lengths = huffman.code_lengths(counts)
    >>> decode(encode(positions, lengths, finer, size_bits(counts, lengths, finer)), lengths, finer, count=3, numel=5000)
    (array([   3,    4, 4000]), 0)
    """
    if count > 8 * len(packed):
        return np.empty(0, np.int64), ENDS_EARLY
    positions, words = np.empty(count, np.int64), to_words(packed)
    at = _decode(words, 8 * len(packed), *_table(lengths, finer), np.uint64(numel), positions)
    return positions, huffman.end_code(words, len(packed), at)
