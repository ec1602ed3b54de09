"""Canonical Huffman codes: their lengths from counts, the lengths as bytes, symbols to bits and back by a table.

A code is known by the lengths of its words alone (0: the symbol is not used). Words are numbered by length, then by symbol. They stand in
the stream first bit first, so that the low bits of what comes next, taken as they are, name the entry of the decoding table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .bits import Words, bit_length, get, put, to_bytes, to_words, zero_words
from .codes import ENDS_EARLY, INVALID, LEFT_OVER
from .jit import kernel

Counts = NDArray[np.int64]
Lengths = NDArray[np.uint8]
Codes = NDArray[np.uint64]
Table = NDArray[np.int32]
Symbols = NDArray[np.uint16]

DEFAULT_LIMIT = 12
"""The longest word unless told otherwise: the decoding table then fits the first-level cache."""

LONGEST = 16
"""The longest word there can be, so that four fit in 64 bits; symbols are below 2**16."""

_LENGTH_BITS = 11  # the most that one length takes in a table


# Lengths from counts


def code_lengths(counts: Counts, limit: int = DEFAULT_LIMIT) -> Lengths:
    """The lengths of the best prefix code with no word above `limit` bits: 0 for a count of 0, and 1 for a symbol that stands alone.

    At most 2**limit of the counts are not 0; their sum is below 2**58.

    >>> code_lengths(np.array([10, 0, 2, 1, 1]))
    array([1, 0, 2, 3, 3], dtype=uint8)
    """
    used = int(np.count_nonzero(counts))
    if counts.size > 2**LONGEST or limit > LONGEST or used > 2**limit:
        raise ValueError(f"no code with words of at most {limit} bits for {used} of {counts.size} symbols")
    return lengths_of(counts.astype(np.int64, copy=False), limit)


@kernel
def lengths_of(counts: Counts, limit: int) -> Lengths:
    """`code_lengths`, unchecked. Of symbols with the same count, the later one has the shorter word."""
    lengths = np.zeros(counts.size, np.uint8)
    used = np.flatnonzero(counts)
    if used.size < 2:
        for symbol in used:
            lengths[symbol] = 1
        return lengths
    rising = used[np.argsort(counts[used], kind="mergesort")]
    found = _package_merge(counts[rising], limit)
    for i in range(rising.size):
        lengths[rising[i]] = found[i]
    return lengths


@kernel
def _package_merge(weights: Counts, limit: int) -> Lengths:
    """The algorithm of Larmore and Hirschberg, for two weights or more, rising.

    Every level is the weights merged with the paired-up items of the level below. Of the top level the cheapest 2n - 2 items are taken;
    a pair stands for two items below it. How often a weight is taken is its length.
    """
    n = weights.size
    is_weight = np.zeros((limit, 2 * n), np.bool_)
    below, items = np.empty(2 * n, np.int64), np.empty(2 * n, np.int64)
    pairs = 0
    for level in range(limit):
        weight = pair = 0
        for i in range(n + pairs):
            paired = below[2 * pair] + below[2 * pair + 1] if pair < pairs else np.int64(0)
            if weight < n and (pair == pairs or weights[weight] <= paired):
                is_weight[level, i] = True
                items[i] = weights[weight]
                weight += 1
            else:
                items[i] = paired
                pair += 1
        below, items = items, below
        pairs = (n + pairs) // 2
    lengths = np.zeros(n, np.uint8)
    taken = 2 * n - 2
    for level in range(limit - 1, -1, -1):
        weight = 0
        for i in range(taken):
            weight += is_weight[level, i]
        for i in range(weight):
            lengths[i] += np.uint8(1)
        taken = 2 * (taken - weight)
    return lengths


# Lengths as bytes


def pack_lengths(lengths: Lengths) -> bytes:
    """The lengths, each as its difference from the one before in a few bits; unused symbols at the end cost nothing.

    >>> pack_lengths(np.uint8([2, 2, 2, 2])).hex()
    'e4'
    """
    words = zero_words(_LENGTH_BITS * lengths.size)
    size_bits = _put_lengths(lengths, np.flatnonzero(lengths).max(initial=-1) + 1, words)
    return to_bytes(words, size_bits)


def unpack_lengths(packed: bytes | memoryview, count: int) -> Lengths | None:
    """The lengths for symbols 0 to count - 1; None for bytes that `pack_lengths` never writes, or lengths that make no code."""
    lengths = np.zeros(count, np.uint8)
    return lengths if _get_lengths(to_words(packed), 8 * len(packed), lengths) and is_code(lengths) else None


def is_code(lengths: Lengths) -> bool:
    """Whether the words fill the tree exactly (Kraft's sum is 1), or one stands alone, or there are none."""
    used = lengths[lengths > 0]
    if used.size < 2:
        return bool(np.all(used == 1))
    return int(used.max()) <= LONGEST and int(np.sum(1 << (LONGEST - used.astype(np.int64)))) == 1 << LONGEST


@kernel
def packed_lengths_bytes(lengths: Lengths) -> int:
    """The length of what `pack_lengths` returns."""
    bits = bits_to_last = before = 0
    for length in lengths:
        step = length - before
        before += step
        bits += 2 * bit_length(np.uint64(2 * step if step > 0 else 1 - 2 * step)) - 1
        if length:
            bits_to_last = bits
    return (bits_to_last + 7) >> 3


@kernel
def _put_lengths(lengths: Lengths, count: int, words: Words) -> int:
    """Elias' gamma code of the differences, signs folded: 1 bit for the same, 3 for one more or one less."""
    at, before = 0, 0
    for i in range(count):
        step = lengths[i] - before
        before += step
        folded = 2 * step if step > 0 else 1 - 2 * step
        width = bit_length(np.uint64(folded)) - 1
        # The zeros that tell the width, a one, and the bits below the highest.
        put(words, at + width, np.uint64(2 * folded - (2 << width) + 1))
        at += 2 * width + 1
    return at


@kernel
def _get_lengths(words: Words, size_bits: int, lengths: Lengths) -> bool:
    """Fill the front of the lengths; zeros up to the end of the bits are the end. False for what `_put_lengths` never writes."""
    at, before = 0, np.int64(0)
    for i in range(lengths.size):
        width = 0
        while at + width < size_bits and get(words, at + width) & np.uint64(1) == 0:
            width += 1
        if at + width >= size_bits:
            return width < 8
        if width > 5 or at + 2 * width >= size_bits:
            return False
        folded = np.int64(get(words, at + width + 1) & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))) + (1 << width)
        before += folded // 2 if folded % 2 == 0 else -(folded // 2)
        if before < 0 or before > LONGEST:
            return False
        lengths[i] = before
        at += 2 * width + 1
    return size_bits - at < 8 and get(words, at) == 0


# Symbols to bits and back


def encode(symbols: Symbols, lengths: Lengths) -> bytes:
    """The words of the symbols, one after the other, filled up with zero bits. Every symbol has a length.

    >>> encode(np.uint16([0, 2, 0, 1]), np.uint8([1, 2, 2])).hex()
    '16'
    """
    numbers = symbols.astype(np.uint16, copy=False)
    words = zero_words(int(lengths[numbers].sum(dtype=np.int64)))
    return to_bytes(words, _encode(numbers, lengths, code_words(lengths), words))


def decode(packed: bytes | memoryview, count: int, table: Table, mask: np.uint64) -> tuple[Symbols, int]:
    """The inverse of `encode` by a table of `table_of`, and 0; a code below 0 for bytes that do not hold exactly `count` words, then zeros.

    >>> decode(bytes.fromhex("16"), 4, *table_of(np.uint8([1, 2, 2])))
    (array([0, 2, 0, 1], dtype=uint16), 0)
    """
    if count > 8 * len(packed):  # no word is empty, so that nothing is allocated for more symbols than there are bits
        return np.empty(0, np.uint16), ENDS_EARLY
    symbols = np.empty(count, np.uint16)
    words = to_words(packed)
    return symbols, end_code(words, len(packed), _decode(words, 8 * len(packed), table, mask, symbols))


def end_code(words: Words, size_bytes: int, at: int) -> int:
    """0 where bit `at`, which a decoding kernel returned, is in the last byte and only zeros follow; else a code below 0."""
    if at < 0:
        return at
    if at > 8 * size_bytes:
        return ENDS_EARLY
    return LEFT_OVER if at + 7 < 8 * size_bytes or int(get(words, at)) else 0


@kernel
def code_words(lengths: Lengths) -> Codes:
    """The words, first bit lowest."""
    first = np.zeros(LONGEST + 2, np.int64)
    for length in lengths:
        if length:
            first[length + 1] += 1
    for length in range(1, LONGEST + 1):
        first[length + 1] = (first[length] + first[length + 1]) << 1
    codes = np.zeros(lengths.size, np.uint64)
    for symbol in range(lengths.size):
        length = lengths[symbol]
        code = first[length]
        first[length] += 1
        for _ in range(length):
            codes[symbol] = codes[symbol] << np.uint64(1) | np.uint64(code & 1)
            code >>= 1
    return codes


@kernel
def _fill(codes: Codes, lengths: Lengths, table: Table) -> None:
    for symbol in range(lengths.size):
        if lengths[symbol]:
            for i in range(np.int64(codes[symbol]), table.size, 1 << lengths[symbol]):
                table[i] = symbol << 8 | lengths[symbol]


def table_of(lengths: Lengths) -> tuple[Table, np.uint64]:
    """For every value of the next bits the symbol (from bit 8 on) and its length, 0 where no word begins so; and the mask of those bits."""
    if not is_code(lengths):
        raise ValueError("lengths that make no prefix code")
    table = np.zeros(1 << int(lengths.max(initial=0)), np.int32)
    _fill(code_words(lengths), lengths, table)
    return table, np.uint64(table.size - 1)


@kernel
def _encode(symbols: Symbols, lengths: Lengths, codes: Codes, words: Words) -> int:
    at = 0
    full = symbols.size // 4 * 4
    # Four words fit in 64 bits: one write for all of them.
    for i in range(0, full, 4):
        bits, filled = np.uint64(0), 0
        for j in range(i, i + 4):
            bits |= codes[symbols[j]] << np.uint64(filled)
            filled += lengths[symbols[j]]
        put(words, at, bits)
        at += filled
    for i in range(full, symbols.size):
        put(words, at, codes[symbols[i]])
        at += lengths[symbols[i]]
    return at


@kernel
def _decode(words: Words, size_bits: int, table: Table, mask: np.uint64, symbols: Symbols) -> int:
    """The bit after the last word, which may lie after the end; `INVALID` for bits that begin no word."""
    at = 0
    valid = True
    for i in range(0, symbols.size, 4):
        if at > size_bits:
            return at
        bits = get(words, at)
        for j in range(i, min(i + 4, symbols.size)):
            entry = table[bits & mask]
            symbols[j] = entry >> 8
            length = entry & 255
            valid &= length != 0
            bits >>= np.uint64(length)
            at += length
    return at if valid else INVALID
