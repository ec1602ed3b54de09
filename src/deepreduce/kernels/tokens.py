"""Numbers as tokens of a byte and extra bits: small numbers are their own token, larger ones are known to a quarter of an octave by theirs.

Numbers below 16 are tokens without extra bits. A larger one of n + 1 bits has the token ``16 + 4 * (n - 4)`` plus the two bits after its
highest, and n - 2 extra bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import Bytes, Words, put
from .gaps import load
from .jit import inline, kernel
from .vectors import leading_zeros

Numbers = NDArray[Any]
Tokens = NDArray[np.uint8]

DIRECT = 16
ENDS_EARLY = -1

_1, _ALL = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)


@inline
def token_of(number: np.uint64) -> np.uint8:
    """The token of a number."""
    if number < np.uint64(DIRECT):
        return np.uint8(number)
    n = 63 - np.int64(leading_zeros(number))
    return np.uint8(DIRECT + 4 * (n - 4) + np.int64(number >> np.uint64(n - 2) & np.uint64(3)))


@inline
def extra_bits(token: np.uint8) -> int:
    """How many bits follow a token."""
    return 0 if token < DIRECT else int(np.int64(token) - DIRECT >> 2) + 2


@kernel
def split(numbers: Numbers, tokens: Tokens) -> int:
    """Write the token of each number; returns the extra bits of all."""
    total = 0
    for i in range(np.uint64(numbers.size)):
        token = token_of(np.uint64(numbers[i]))
        tokens[i] = token
        total += extra_bits(token)
    return total


@kernel
def pack_extras(numbers: Numbers, tokens: Tokens, words: Words) -> None:
    """Write the extra bits of all numbers to zeroed words of `bits.zero_words`."""
    at = 0
    for i in range(np.uint64(numbers.size)):
        if tokens[i] >= DIRECT:
            width = extra_bits(tokens[i])
            put(words, at, np.uint64(numbers[i]) & ((_1 << np.uint64(width)) - _1))
            at += width


@kernel
def join(tokens: Tokens, packed: Bytes, size_bits: int, numbers: Numbers) -> int:
    """The inverse of `split` and `pack_extras`; returns the bits used, or `ENDS_EARLY`, also where a number is too large for `numbers`.

    `packed` is `gaps.padded` and holds `size_bits`.
    """
    at = 0
    limit = _ALL >> np.uint64(64 - 8 * numbers.itemsize)
    for i in range(np.uint64(tokens.size)):
        token = tokens[i]
        if token < DIRECT:
            numbers[i] = token
            continue
        width = extra_bits(token)
        if at + width > size_bits:
            return ENDS_EARLY
        low = load(packed, np.uint64(at))
        if width > 56:
            low = low & ((_1 << np.uint64(32)) - _1) | load(packed, np.uint64(at + 32)) << np.uint64(32)
        at += width
        lead = np.uint64(4 + (token & np.uint8(3))) << np.uint64(width)
        number = lead | low & ((_1 << np.uint64(width)) - _1)
        if number > limit:
            return ENDS_EARLY
        numbers[i] = number
    return at
