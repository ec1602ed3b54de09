"""The largest magnitudes in one pass: a sample says where to look, and what is selected does not depend on it.

A threshold is guessed from a sample so that a little more than what is wanted lies above it. One pass collects these candidates and their
bits; the largest of them are the largest of all, if they are enough.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import trailing_zeros
from .jit import kernel

Positions = NDArray[np.int64]
Bits = NDArray[Any]

_RUN = 64  # neighbours: a few lines of a cache, as each place that is read costs more than what is read there
_RUNS = 256
_WORD = 64
_FEW, _MANY = 4, 4


@kernel
def _guess(bits: Bits, mask: int, infinity: int, count: int) -> Any:
    """A pattern with a few more than `count` elements above it, as far as runs all over the tensor can tell."""
    apart = max(_RUN, bits.size // _RUNS)
    sample = np.empty((bits.size // apart + 1) * _RUN, bits.dtype)
    n = 0
    for start in range(0, bits.size - _RUN + 1, apart):
        for i in range(start, start + _RUN):
            sample[n] = bits[i] & mask
            n += 1
    expected = n * (count / bits.size)
    above = min(n - 1, int(expected + 4 * np.sqrt(expected)) + _FEW)
    return min(max(np.partition(sample[:n], n - 1 - above)[n - 1 - above], bits.dtype.type(1)), infinity)


@kernel
def _candidates(bits: Bits, mask: int, least: int, positions: Positions, found: Bits) -> int:
    """Write all positions from `least` on, and what is there; return how many they are, or -1 if they are too many."""
    room, n = positions.size - 2 * _WORD, 0
    full = bits.size // _WORD * _WORD
    for start in range(0, full, _WORD):
        word = np.uint64(0)  # a bit for each of 64 elements: compilers make few instructions of that
        for i in range(_WORD):
            word |= np.uint64((bits[start + i] & mask) >= least) << np.uint64(i)
        if n > room:
            return -1
        while word:
            i = start + trailing_zeros(word)
            positions[n] = i
            found[n] = bits[i]
            n += 1
            word &= word - np.uint64(1)
    for i in range(full, bits.size):
        if (bits[i] & mask) >= least:
            positions[n] = i
            found[n] = bits[i]
            n += 1
    return n


@kernel
def _strongest(mask: int, infinity: int, count: int, positions: Positions, found: Bits) -> int:
    """Move the `count` largest, and everything from `infinity` on, to the front; return how many they are, or -1 if there are too few."""
    keys = found & mask
    not_finite = 0
    for key in keys:
        not_finite += key >= infinity
    wanted = max(count, not_finite)
    if keys.size <= wanted:
        return keys.size if keys.size == wanted else -1
    least = np.partition(keys, keys.size - wanted)[keys.size - wanted]
    ties = wanted
    for key in keys:
        ties -= key > least
    n = 0
    for i in range(keys.size):
        tied = (keys[i] == least) & (ties > 0)
        ties -= tied
        positions[n] = positions[i]
        found[n] = found[i]
        n += (keys[i] > least) | tied
    return n


def largest(bits: Bits, mask: Any, infinity: Any, count: int) -> tuple[Positions, Bits] | None:
    """Return the positions of the `count` largest masked bits, and the bits; None if the guess was no good.

    Ties go to the lower position; everything from `infinity` on is taken, even if it is more than `count`.
    """
    positions = np.empty(_MANY * (count + _RUN) + 2 * _WORD, np.int64)
    found = np.empty(positions.size, bits.dtype)
    if 2 * positions.size > bits.size:
        return None
    # Three calls, as the loop over all elements is not vectorized if it is compiled together with the others.
    n = _candidates(bits, mask, _guess(bits, mask, infinity, count), positions, found)
    n = n if n < 0 else _strongest(mask, infinity, count, positions[:n], found[:n])
    return None if n < 0 else (positions[:n], found[:n])
