"""Rice codes: the low `k` bits of a number as they are, the rest in unary. All low bits come first, then all unary numbers.

The low bits have fixed places then, and the end of the next unary number is the next set bit: neither waits for the code before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from .bits import Bytes, Words, put
from .codes import BEYOND_LIMIT, ENDS_EARLY
from .gaps import Numbers, load
from .jit import kernel

Parameters = NDArray[np.uint8]

_0, _1, _6 = np.uint64(0), np.uint64(1), np.uint64(6)
_ALL = _BEFORE_0 = np.uint64(0xFFFFFFFFFFFFFFFF)


def _trailing_zeros(typing: Any, number: Any) -> Any:
    """The place of the lowest set bit of a number that is not 0: one instruction, for which numba has no name."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zero_is_undefined = context.get_constant(types.boolean, True)
        return builder.cttz(arguments[0], zero_is_undefined)

    return types.uint64(types.uint64), emit


trailing_zeros: Any = intrinsic(_trailing_zeros)


@kernel
def quotients(numbers: Numbers, block: int, count: int) -> NDArray[np.int64]:
    """For each block and each k below `count`: the sum of number >> k, which is what the unary ends cost beyond one bit each."""
    out = np.zeros(((numbers.size + block - 1) // block, count), np.int64)
    for b in range(out.shape[0]):
        part = numbers[b * block : (b + 1) * block]
        for k in range(count):
            total = _0
            for i in range(part.size):
                total += part[i] >> np.uint64(k)
            out[b, k] = np.int64(total)
    return out


@kernel
def cheapest(quotients: NDArray[np.int64], block: int, merged: int, count: int) -> tuple[Parameters, int, int]:
    """The best parameter for each `merged` blocks of `quotients` together, and the low and the unary bits of all `count` numbers."""
    parameters = np.empty((quotients.shape[0] + merged - 1) // merged, np.uint8)
    sums = np.empty(quotients.shape[1], np.int64)
    low_bits = unary_bits = 0
    for b in range(parameters.size):
        sums[:] = 0
        for row in range(b * merged, min(quotients.shape[0], (b + 1) * merged)):
            for k in range(sums.size):
                sums[k] += quotients[row, k]
        size = min(merged * block, count - b * merged * block)
        best = 0
        for k in range(1, sums.size):
            if sums[k] + k * size < sums[best] + best * size:
                best = k
        parameters[b] = best
        low_bits += best * size
        unary_bits += sums[best] + size
    return parameters, low_bits, unary_bits


@kernel
def pack(numbers: Numbers, parameters: Parameters, block: int, low_bits: int, words: Words) -> None:
    """Write both streams to zeroed words with the spare ones of `bits.zero_words`; block b has parameters[b]."""
    low_at, unary_at = 0, low_bits
    for b in range(parameters.size):
        k = np.uint64(parameters[b])
        mask = (_1 << k) - _1
        for i in range(b * block, min(numbers.size, (b + 1) * block)):
            put(words, low_at, numbers[i] & mask)
            low_at += parameters[b]
            unary_at += int(np.int64(numbers[i] >> k))
            words[unary_at >> 6] |= _1 << np.uint64(unary_at & 63)
            unary_at += 1


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
