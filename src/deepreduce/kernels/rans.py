"""Range asymmetric numeral systems (rANS) with a fixed table: symbols of a byte at close to their entropy.

Four states take turns, so that a processor works on four symbols at once. Frequencies add up to 2**12; a state has 32 bits, a word 16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import kernel

Symbols = NDArray[np.uint8]
Frequencies = NDArray[np.uint32]
Words = NDArray[np.uint16]

TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
STATES = 4
LOWEST = 1 << 16
"""No state is below this between two symbols; all start here, and a decoder must find them here at the end."""

WRONG_END = -1

_MASK = np.uint32(TOTAL - 1)


@kernel
def count(symbols: Symbols, counts: NDArray[np.int64]) -> None:
    """Add to `counts` how often each symbol occurs."""
    for i in range(np.uint64(symbols.size)):
        counts[symbols[i]] += 1


@kernel
def encode(symbols: Symbols, frequencies: Frequencies, states: NDArray[np.uint32], words: Words) -> int:
    """Write words from the end of `words` towards its front, last symbol first; returns the index of the first one written.

    There is room for one word per symbol. No frequency is TOTAL, and none of a symbol that occurs is 0.
    """
    starts = np.zeros(257, np.uint32)
    for symbol in range(256):
        starts[symbol + 1] = starts[symbol] + frequencies[symbol]
    states[:] = LOWEST
    at = words.size
    for i in range(symbols.size - 1, -1, -1):
        symbol = symbols[i]
        frequency = frequencies[symbol]
        state = states[i & 3]
        if np.uint64(state) >= np.uint64(frequency) << np.uint64(32 - TOTAL_BITS):
            at -= 1
            words[at] = np.uint16(state)
            state = np.uint32(state >> np.uint32(16))
        quotient = np.uint32(state // frequency)
        states[i & 3] = np.uint32((quotient << np.uint32(TOTAL_BITS)) + np.uint32(state - quotient * frequency) + starts[symbol])
    return at


@kernel
def table_of(frequencies: Frequencies) -> NDArray[np.uint32]:
    """For every slot its symbol (bits 0 to 7), the frequency of that (8 to 19) and the place of the slot in its range (20 to 31)."""
    table, slot = np.empty(TOTAL, np.uint32), 0
    for symbol in range(frequencies.size):
        for place in range(frequencies[symbol]):
            table[slot] = np.uint32(symbol | frequencies[symbol] << 8 | place << 20)
            slot += 1
    return table


@kernel
def decode(words: Words, size: int, table: NDArray[np.uint32], states: NDArray[np.uint32], out: Symbols) -> int:
    """Fill `out`; returns the words used, or `WRONG_END` where they are not `size` or the states do not end as they began.

    Four spare words follow the `size` that are meant.
    """
    a, b, c, d = np.uint64(states[0]), np.uint64(states[1]), np.uint64(states[2]), np.uint64(states[3])
    at, last = np.uint64(0), np.uint64(size)
    lowest, mask, bits = np.uint64(LOWEST), np.uint64(TOTAL - 1), np.uint64(TOTAL_BITS)
    m8, m12, s8, s16, s20, one = np.uint64(255), np.uint64(4095), np.uint64(8), np.uint64(16), np.uint64(20), np.uint64(1)
    i, whole = np.uint64(0), np.uint64(out.size - out.size % 4)
    while i < whole:
        if at > last:
            return WRONG_END
        entry = np.uint64(table[a & mask])
        out[i] = np.uint8(entry & m8)
        a = (entry >> s8 & m12) * (a >> bits) + (entry >> s20)
        entry = np.uint64(table[b & mask])
        out[i + one] = np.uint8(entry & m8)
        b = (entry >> s8 & m12) * (b >> bits) + (entry >> s20)
        entry = np.uint64(table[c & mask])
        out[i + np.uint64(2)] = np.uint8(entry & m8)
        c = (entry >> s8 & m12) * (c >> bits) + (entry >> s20)
        entry = np.uint64(table[d & mask])
        out[i + np.uint64(3)] = np.uint8(entry & m8)
        d = (entry >> s8 & m12) * (d >> bits) + (entry >> s20)
        if a < lowest:
            a = a << s16 | np.uint64(words[at])
            at += one
        if b < lowest:
            b = b << s16 | np.uint64(words[at])
            at += one
        if c < lowest:
            c = c << s16 | np.uint64(words[at])
            at += one
        if d < lowest:
            d = d << s16 | np.uint64(words[at])
            at += one
        i += np.uint64(4)
    while i < np.uint64(out.size):
        if at > last:
            return WRONG_END
        entry = np.uint64(table[a & mask])
        out[i] = np.uint8(entry & m8)
        a = (entry >> s8 & m12) * (a >> bits) + (entry >> s20)
        if a < lowest:
            a = a << s16 | np.uint64(words[at])
            at += one
        a, b, c, d = b, c, d, a
        i += one
    if a != lowest or b != lowest or c != lowest or d != lowest or at != last:
        return WRONG_END
    return np.int64(at)
