"""Rice codes: the low `k` bits of a number as they are, the rest in unary. All low bits come first, then all unary numbers.

The low bits have fixed places then, and the end of the next unary number is the next set bit: neither waits for the code before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import Bytes, Words, bit_length, trailing_zeros
from .codes import BEYOND_LIMIT, ENDS_EARLY
from .gaps import Numbers, load
from .jit import inline, kernel
from .vectors import FEW, count_with_bit

Parameters = NDArray[np.uint8]

PARAMETER_BITS = 6
ONE_BLOCK = 1 << PARAMETER_BITS
BLOCK_SHIFTS = (5, 6, 8, 10)
FINEST = FEW

_0, _1, _6, _63, _64 = np.uint64(0), np.uint64(1), np.uint64(6), np.uint64(63), np.uint64(64)
_ALL = _BEFORE_0 = np.uint64(0xFFFFFFFFFFFFFFFF)


@kernel
def quotients(numbers: NDArray[Any], count: int) -> NDArray[np.int64]:
    """For each block of FINEST numbers and each k below `count`: the sum of number >> k.

    This is what the unary ends cost beyond one bit each. It is twice the sum for k + 1, and one more for each number whose bit k is set.
    There are whole blocks, and every number has less than `count` bits.
    """
    out = np.zeros((numbers.size // FINEST, count), np.int64)
    for b in range(np.uint64(out.shape[0])):
        total = _0
        for k in range(count - 2, -1, -1):
            total = (total << _1) + count_with_bit(numbers, b * np.uint64(FINEST), _1 << np.uint64(k))
            out[b, np.uint64(k)] = np.int64(total)
    return out


@kernel
def merged(quotients: NDArray[np.int64], times: int) -> NDArray[np.int64]:
    """The sums of `times` blocks each; the last ones may be fewer."""
    rows, widths = np.uint64(quotients.shape[0]), np.uint64(quotients.shape[1])
    out = np.zeros(((quotients.shape[0] + times - 1) // times, quotients.shape[1]), np.int64)
    for b in range(np.uint64(out.shape[0])):
        for row in range(b * np.uint64(times), min(rows, (b + _1) * np.uint64(times))):
            for k in range(widths):
                out[b, k] += quotients[row, k]
    return out


@kernel
def cheapest(quotients: NDArray[np.int64], block: int, count: int) -> tuple[Parameters, int, int]:
    """The best parameter for each block of `block` numbers, and the low and the unary bits of all `count` numbers.

    The bits that one more in the parameter saves never increase with it: the first one that saves none ends the search.
    """
    parameters = np.empty(quotients.shape[0], np.uint8)
    low_bits = unary_bits = 0
    for b in range(parameters.size):
        size = min(block, count - b * block)
        best = 0
        while best + 1 < quotients.shape[1] and quotients[b, best + 1] + size < quotients[b, best]:
            best += 1
        parameters[b] = best
        low_bits += best * size
        unary_bits += quotients[b, best] + size
    return parameters, low_bits, unary_bits


@inline
def ceil8(bits: int) -> int:
    """Bytes that so many bits take."""
    return (bits + 7) >> 3


@inline
def _copied(numbers: Numbers, out: NDArray[Any]) -> np.uint64:
    """Copy the numbers to the first of `out`, cut to its bits; returns the bits that they use."""
    used = _0
    for i in range(np.uint64(numbers.size)):
        out[i] = numbers[i]
        used |= numbers[i]
    return used


@kernel
def plan(numbers: Numbers) -> tuple[int, Parameters, int, int]:
    """The shift of the block size (0: one block) and the parameters that take the fewest bytes, with their low and unary bits.

    There must be a number.
    """
    blocks = (numbers.size + FINEST - 1) // FINEST
    narrow = np.zeros(blocks * FINEST, np.uint16)  # eight times as many at once as of 64 bits
    widths = 1 + bit_length(_copied(numbers, narrow))
    if widths <= 1 + 16:
        table = quotients(narrow, widths)
    else:
        wide = np.zeros(blocks * FINEST, np.uint64)
        _copied(numbers, wide)
        table = quotients(wide, widths)
    best_shift, best_bytes, shift_before = 0, numbers.size * 64, BLOCK_SHIFTS[0]  # one block never takes as many bytes
    best, best_low, best_unary = np.empty(0, np.uint8), 0, 0
    for shift in BLOCK_SHIFTS:
        if numbers.size > 1 << shift:
            table = merged(table, 1 << shift - shift_before) if shift > shift_before else table
            parameters, low, unary = cheapest(table, 1 << shift, numbers.size)
            size_bytes = 1 + ceil8(PARAMETER_BITS * parameters.size) + ceil8(low + unary)
            if size_bytes < best_bytes:
                best_shift, best, best_low, best_unary, best_bytes = shift, parameters, low, unary, size_bytes
            shift_before = shift
    parameters, low, unary = cheapest(merged(table, table.shape[0]), numbers.size, numbers.size)
    if 1 + ceil8(low + unary) <= best_bytes:
        best_shift, best, best_low, best_unary = 0, parameters, low, unary
    return best_shift, best, best_low, best_unary


@kernel
def pack(numbers: Numbers, parameters: Parameters, block: int, low_bits: int, words: Words) -> None:
    """Write both streams to zeroed words with the spare ones of `bits.zero_words`; block b has parameters[b].

    Each stream has an open word, which is written when it is full: they share the one where the low bits end.
    """
    low_word, low_bit, lows = _0, _0, _0
    unary_word, unary_at, ends = np.uint64(low_bits) >> _6, np.uint64(low_bits), _0
    for b in range(parameters.size):
        k = np.uint64(parameters[b])
        mask = (_1 << k) - _1
        for i in range(np.uint64(b * block), np.uint64(min(numbers.size, (b + 1) * block))):
            low = numbers[i] & mask
            lows |= low << low_bit
            low_bit += k
            if low_bit >= _64:
                words[low_word] |= lows
                low_word += _1
                low_bit -= _64
                lows = low >> (k - low_bit)
            unary_at += numbers[i] >> k
            if unary_at >> _6 != unary_word:
                words[unary_word] |= ends
                unary_word, ends = unary_at >> _6, _0
            ends |= _1 << (unary_at & _63)
            unary_at += _1
    words[low_word] |= lows
    words[unary_word] |= ends


@kernel
def unpack(packed: Bytes, parameters: Parameters, block: int, low_bits: int, limit: int, out: Numbers) -> int:
    """Running sums of (number + 1), less 1: the positions whose gaps were packed. Returns the bits that were used.

    `ENDS_EARLY` where there are less numbers, `BEYOND_LIMIT` where a sum is not below `limit`. `packed` is `gaps.padded` and
    holds `low_bits`; no parameter is above `gaps.MAX_WIDTH_BITS`, and no limit above 2 to its power.
    """
    position, low_at, last = _BEFORE_0, _0, np.uint64(low_bits) - _1
    word, words = np.uint64(low_bits >> 6), np.uint64(packed.size >> 3)
    ends = load(packed, word << _6) & (_ALL << np.uint64(low_bits & 63))
    for b in range(parameters.size):
        k = np.uint64(parameters[b])
        mask = (_1 << k) - _1
        most = np.uint64(limit) >> k
        for i in range(b * block, min(out.size, (b + 1) * block)):
            while ends == _0:
                word += _1
                if word >= words:
                    return ENDS_EARLY
                ends = load(packed, word << _6)
            end = (word << _6) + trailing_zeros(ends)
            ends &= ends - _1
            quotient = end - last - _1
            last = end
            position += (quotient << k | load(packed, low_at) & mask) + _1
            low_at += k
            if quotient > most or position >= np.uint64(limit):
                return BEYOND_LIMIT
            out[np.uint64(i)] = position
    return int(np.int64(last + _1))  # numba would make a float of uint64 beside a negative code
