"""Range asymmetric numeral systems (rANS) with fixed tables, one per context: symbols of a byte at close to their entropy.

Four states take turns, so that a processor works on four symbols at once. Frequencies add up to 2**12; a state has 32 bits, a word 16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import inline, kernel

Symbols = NDArray[np.uint8]
Frequencies = NDArray[np.uint32]
Words = NDArray[np.uint16]
Contexts = NDArray[np.uint8]

TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
STATES = 4
LOWEST = 1 << 16
"""No state is below this between two symbols; all start here, and a decoder must find them here at the end."""

WRONG_END = -1


@kernel
def count(symbols: Symbols, contexts: Contexts, counts: NDArray[np.int64]) -> None:
    """Add to `counts` how often each symbol occurs in each context.

    Neighbours are counted apart: where they are equal, as most are, one would wait for the other to be written.
    """
    others, one = np.zeros_like(counts), np.uint64(1)
    for i in range(one, np.uint64(symbols.size), np.uint64(2)):
        counts[np.uint64(contexts[i - one]), np.uint64(symbols[i - one])] += 1
        others[np.uint64(contexts[i]), np.uint64(symbols[i])] += 1
    if symbols.size % 2:
        counts[np.uint64(contexts[-1]), np.uint64(symbols[-1])] += 1
    counts += others


@inline
def _push(state: np.uint64, interval: np.uint64, words: Words, at: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The state with one more symbol, and the index of the last word written; `interval` is its frequency and, above 16 bits, its start."""
    frequency = interval & np.uint64(0xFFFF)
    full = state >= frequency << np.uint64(32 - TOTAL_BITS)
    words[at - np.uint64(1)] = np.uint16(state)
    at -= np.uint64(full)
    state = state >> np.uint64(16) if full else state
    quotient = np.uint64(np.uint32(state) // np.uint32(frequency))
    return (quotient << np.uint64(TOTAL_BITS)) + (state - quotient * frequency) + (interval >> np.uint64(16)), at


@kernel
def encode(symbols: Symbols, contexts: Contexts, frequencies: Frequencies, states: NDArray[np.uint32], words: Words) -> int:
    """Write words from the end of `words` towards its front, last symbol first; returns the index of the first one written.

    There is room for one word more than symbols. No frequency is TOTAL, and none of a symbol that occurs is 0.
    """
    intervals = np.zeros((frequencies.shape[0], 256), np.uint64)
    for context in range(frequencies.shape[0]):
        start = np.uint64(0)
        for symbol in range(256):
            frequency = np.uint64(frequencies[context, symbol])
            intervals[context, symbol] = start << np.uint64(16) | frequency
            start += frequency
    at, one = np.uint64(words.size), np.uint64(1)
    a = b = c = d = np.uint64(LOWEST)
    i = np.uint64(symbols.size)
    while i % np.uint64(STATES):
        i -= one
        a, b, c, d = d, a, b, c
        a, at = _push(a, intervals[np.uint64(contexts[i]), np.uint64(symbols[i])], words, at)
    while i:
        i -= np.uint64(STATES)
        d, at = _push(d, intervals[np.uint64(contexts[i + np.uint64(3)]), np.uint64(symbols[i + np.uint64(3)])], words, at)
        c, at = _push(c, intervals[np.uint64(contexts[i + np.uint64(2)]), np.uint64(symbols[i + np.uint64(2)])], words, at)
        b, at = _push(b, intervals[np.uint64(contexts[i + one]), np.uint64(symbols[i + one])], words, at)
        a, at = _push(a, intervals[np.uint64(contexts[i]), np.uint64(symbols[i])], words, at)
    states[0], states[1], states[2], states[3] = np.uint32(a), np.uint32(b), np.uint32(c), np.uint32(d)
    return int(np.int64(at))


@kernel
def table_of(frequencies: Frequencies) -> NDArray[np.uint32]:
    """For every context and slot its symbol (bits 0 to 7), its frequency (8 to 19) and the place of the slot in its range (20 to 31)."""
    table, slot = np.empty(TOTAL * frequencies.shape[0], np.uint32), 0
    for context in range(frequencies.shape[0]):
        for symbol in range(frequencies.shape[1]):
            for place in range(frequencies[context, symbol]):
                table[slot] = np.uint32(symbol | frequencies[context, symbol] << 8 | place << 20)
                slot += 1
    return table


@inline
def _step(state: np.uint64, context: np.uint8, table: NDArray[np.uint32]) -> tuple[np.uint64, np.uint8]:
    """The state after the next symbol, and the symbol."""
    entry = np.uint64(table[np.uint64(context) << np.uint64(TOTAL_BITS) | state & np.uint64(TOTAL - 1)])
    after = (entry >> np.uint64(8) & np.uint64(TOTAL - 1)) * (state >> np.uint64(TOTAL_BITS)) + (entry >> np.uint64(20))
    return after, np.uint8(entry & np.uint64(255))


@kernel
def decode(words: Words, size: int, table: NDArray[np.uint32], contexts: Contexts, states: NDArray[np.uint32], out: Symbols) -> int:
    """Fill `out`; returns the words used, or `WRONG_END` where they are not `size` or the states do not end as they began.

    Four spare words follow the `size` that are meant.
    """
    a, b, c, d = np.uint64(states[0]), np.uint64(states[1]), np.uint64(states[2]), np.uint64(states[3])
    at, last, lowest = np.uint64(0), np.uint64(size), np.uint64(LOWEST)
    bits, one = np.uint64(16), np.uint64(1)
    i, whole = np.uint64(0), np.uint64(out.size - out.size % STATES)
    while i < whole:
        if at > last:
            return WRONG_END
        a, out[i] = _step(a, contexts[i], table)
        b, out[i + one] = _step(b, contexts[i + one], table)
        c, out[i + np.uint64(2)] = _step(c, contexts[i + np.uint64(2)], table)
        d, out[i + np.uint64(3)] = _step(d, contexts[i + np.uint64(3)], table)
        if a < lowest:
            a = a << bits | np.uint64(words[at])
            at += one
        if b < lowest:
            b = b << bits | np.uint64(words[at])
            at += one
        if c < lowest:
            c = c << bits | np.uint64(words[at])
            at += one
        if d < lowest:
            d = d << bits | np.uint64(words[at])
            at += one
        i += np.uint64(STATES)
    while i < np.uint64(out.size):
        if at > last:
            return WRONG_END
        a, out[i] = _step(a, contexts[i], table)
        if a < lowest:
            a = a << bits | np.uint64(words[at])
            at += one
        a, b, c, d = b, c, d, a
        i += one
    if a != lowest or b != lowest or c != lowest or d != lowest or at != last:
        return WRONG_END
    return int(np.int64(at))
