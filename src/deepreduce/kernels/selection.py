"""Selecting by magnitude, on the bit patterns.

The bits of |x| read as an unsigned number sort like |x| itself, with Inf and then NaN on top: an exact order for every float, in which
non-finite values come first and are never lost.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import sampled
from .jit import kernel

Positions = NDArray[np.int64]
Bits = NDArray[Any]

MAGNITUDE = {n: 2 ** (8 * n - 1) - 1 for n in (2, 4, 8)}
"""All bits of a float of n bytes but the sign."""
_BIN_BITS = 15
SMALL = 1 << 15
"""Below this, the table of bins costs more than the elements."""
_BLOCK = 32


@lru_cache
def _infinity(dtype: np.dtype[Any]) -> int:
    """The bit pattern of +Inf: the least one that is not finite."""
    return int(np.array(np.inf, dtype).view(f"u{dtype.itemsize}"))


@kernel
def _histogram(bits: Bits, shift: int, bins: int) -> NDArray[np.int64]:
    counts = np.zeros((4, bins), np.int64)
    mask = bins - 1
    full = bits.size // 4 * 4
    # Four tables, because neighbours often fall into one bin and would wait for each other's store.
    for i in range(0, full, 4):
        counts[0, (bits[i] >> shift) & mask] += 1
        counts[1, (bits[i + 1] >> shift) & mask] += 1
        counts[2, (bits[i + 2] >> shift) & mask] += 1
        counts[3, (bits[i + 3] >> shift) & mask] += 1
    for i in range(full, bits.size):
        counts[0, (bits[i] >> shift) & mask] += 1
    total: NDArray[np.int64] = counts.sum(axis=0)
    return total


@kernel
def _count(bits: Bits, mask: int, least: int) -> int:
    count = 0
    for i in range(bits.size):
        count += (bits[i] & mask) >= least
    return count


@kernel
def _compact(bits: Bits, mask: int, least: int, count: int) -> Positions:
    out = np.empty(count + 1, np.int64)  # one spare, so that the store needs no branch
    n = 0
    for i in range(bits.size):
        out[n] = i
        n += (bits[i] & mask) >= least
    return out[:count]


@kernel
def _keep(bits: Bits, candidates: Positions, mask: int, least: int, ties: int) -> Positions:
    """Candidates above `least`, and the first `ties` of those equal to it."""
    out = np.empty(candidates.size, np.int64)
    n = 0
    for i in range(candidates.size):
        key = bits[candidates[i]] & mask
        tied = key == least and ties > 0
        ties -= tied
        if key > least or tied:
            out[n] = candidates[i]
            n += 1
    return out[:n]


def _typed(number: int, bits: Bits) -> Any:
    """The number in the dtype of the bits: one kernel per width, and no promotion inside the loop."""
    return bits.dtype.type(number)


@lru_cache
def _masks(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """All bits but the sign, and those of +Inf, typed as `_typed` does."""
    unsigned = np.dtype(f"u{dtype.itemsize}").type
    return unsigned(MAGNITUDE[dtype.itemsize]), unsigned(_infinity(dtype))


def at_least(bits: Bits, mask: int, least: int) -> Positions:
    """Positions where the masked bits are at least `least`."""
    mask, least = _typed(mask, bits), _typed(least, bits)
    return _compact(bits, mask, least, _count(bits, mask, least))


def above(bits: Bits, dtype: np.dtype[Any], threshold: float) -> Positions:
    """Positions with |x| >= threshold, and NaN."""
    return at_least(bits, MAGNITUDE[dtype.itemsize], pattern_of(threshold, dtype))


def pattern_of(threshold: float, dtype: np.dtype[Any]) -> int:
    """The least bit pattern of a number of at least `threshold`, which is compared exactly and not rounded to the dtype.

    >>> hex(pattern_of(1.0, np.dtype(np.float16))), hex(pattern_of(1.0001, np.dtype(np.float16)))
    ('0x3c00', '0x3c01')
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.abs(np.array(threshold, np.float64).astype(dtype))  # -0.0 has another bit pattern than 0.0
    return int(rounded.view(f"u{dtype.itemsize}")) + int(float(rounded) < threshold)


def top(bits: Bits, dtype: np.dtype[Any], count: int) -> Positions:
    """The `count` largest |x| of more than so many, ties by position, and every non-finite element.

    Two passes over all elements (a histogram of the leading bits; compaction of what lies in the last needed bin or above), then
    exact selection among those candidates.
    """
    mask, infinity = MAGNITUDE[dtype.itemsize], _infinity(dtype)
    if bits.size < SMALL:
        count = max(count, int(_count(bits, _typed(mask, bits), _typed(infinity, bits))))
        return _top_of(bits, mask, np.arange(bits.size, dtype=np.int64), count)
    shift = 8 * dtype.itemsize - 1 - _BIN_BITS
    above_or_in = _histogram(bits, _typed(shift, bits), 1 << _BIN_BITS)[::-1].cumsum()[::-1]
    # No value straddles: Inf begins a bin in every dtype, as the bin holds at least the exponent.
    count = max(count, int(above_or_in[infinity >> shift]))
    lowest_bin = int(np.searchsorted(-above_or_in, -count, side="right")) - 1
    candidates = _compact(bits, _typed(mask, bits), _typed(lowest_bin << shift, bits), int(above_or_in[lowest_bin]))
    return _top_of(bits, mask, candidates, count)


def top_found(bits: Bits, dtype: np.dtype[Any], count: int) -> tuple[Positions, Bits]:
    """`top`, mostly in one pass, and the bits at these positions."""
    selected = sampled.largest(bits, *_masks(dtype), count) if bits.size >= SMALL else None
    if selected is None:
        positions = top(bits, dtype, count)
        selected = positions, bits[positions]
    return selected


def _top_of(bits: Bits, mask: int, candidates: Positions, count: int) -> Positions:
    if candidates.size <= count:
        return candidates
    keys = bits[candidates] & _typed(mask, bits)
    least = np.partition(keys, keys.size - count)[keys.size - count]
    ties = count - int(np.count_nonzero(keys > least))
    return _keep(bits, candidates, _typed(mask, bits), least, ties)


@kernel
def _top_between(bits: Bits, mask: int, infinity: int, bounds: Positions, count: int) -> Positions:
    out = np.empty(bits.size, np.int64)
    total = 0
    for c in range(bounds.size - 1):
        keys = bits[bounds[c] : bounds[c + 1]] & mask
        not_finite = 0
        for key in keys:
            not_finite += key >= infinity
        wanted = min(max(count, not_finite), keys.size)
        least = np.partition(keys, keys.size - wanted)[keys.size - wanted]
        ties = wanted
        for key in keys:
            ties -= key > least
        for i in range(bounds[c], bounds[c + 1]):
            key = bits[i] & mask
            tied = key == least and ties > 0
            ties -= tied
            if key > least or tied:
                out[total] = i
                total += 1
    return out[:total].copy()


def top_between(bits: Bits, dtype: np.dtype[Any], bounds: Positions, count: int) -> Positions:
    """`top` inside each of the ranges bounds[i] to bounds[i + 1], none of which is empty."""
    if bits.size == 0:
        return np.empty(0, np.int64)
    mask = _typed(MAGNITUDE[dtype.itemsize], bits)
    return _top_between(bits, mask, _typed(_infinity(dtype), bits), bounds, count)


@kernel
def _raise(maxima: Bits, bits: Bits, mask: int) -> None:
    """Raise each of the maxima to the element beside it; there are as many elements as maxima, or fewer."""
    for i in range(bits.size):
        maxima[i] = max(maxima[i], bits[i] & mask)


@kernel
def _has(bits: Bits, mask: int, least: int) -> bool:
    """Whether the masked bits are at least `least` anywhere. No early end: so the compiler looks at eight elements at once."""
    found = False
    for i in range(bits.size):
        found |= (bits[i] & mask) >= least
    return found


@kernel
def _candidates(bits: Bits, mask: int, infinity: int, count: int, where: Positions, keys: Bits) -> int:
    """Write the positions and keys of all elements that may be among the `count` largest or are not finite; return how many these are.

    With the elements in rows of `maxima.size`, only those may be that are at least as large as the count-th largest maximum of a column: so
    many of them are.
    """
    maxima = np.zeros(min(bits.size, 2 * count), bits.dtype)
    floor = infinity
    if count:
        for start in range(0, bits.size, maxima.size):
            _raise(maxima, bits[start : start + maxima.size], mask)
        floor = min(infinity, np.partition(maxima, maxima.size - count)[maxima.size - count])
    n = 0
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        if _has(block, mask, floor):
            for i in range(block.size):
                key = block[i] & mask
                where[n], keys[n] = start + i, key
                n += key >= floor
    return n


@kernel
def _top_ragged(bits: Bits, mask: int, infinity: int, bounds: Positions, counts: Positions) -> tuple[Positions, Positions]:
    out = np.empty(counts.sum(), np.int64)
    ends = np.zeros(counts.size + 1, np.int64)
    most = np.diff(bounds).max() + 1
    where, keys = np.empty(most, np.int64), np.empty(most, bits.dtype)
    total = 0
    for t in range(counts.size):
        own = bits[bounds[t] : bounds[t + 1]]
        wanted = min(counts[t], own.size)
        n = _candidates(own, mask, infinity, wanted, where, keys)
        not_finite = 0
        for c in range(n):
            not_finite += keys[c] >= infinity
        wanted = max(wanted, not_finite)
        if wanted > counts[t]:
            out = np.concatenate((out, np.empty(wanted - counts[t], np.int64)))
        if wanted:
            least = np.partition(keys[:n], n - wanted)[n - wanted]
            ties = wanted
            for c in range(n):
                ties -= keys[c] > least
            for c in range(n):
                tied = keys[c] == least and ties > 0
                ties -= tied
                if keys[c] > least or tied:
                    out[total] = where[c]
                    total += 1
        ends[t + 1] = total
    return out, ends


def top_ragged(bits: Bits, dtype: np.dtype[Any], bounds: Positions, counts: Positions) -> tuple[Positions, Positions]:
    """`top` inside each of the ranges bounds[t] to bounds[t + 1], with a count for each: positions inside their range, and new bounds."""
    return _top_ragged(bits, *_masks(dtype), bounds, counts)


def above_ragged(bits: Bits, dtype: np.dtype[Any], bounds: Positions, threshold: float) -> tuple[Positions, Positions]:
    """`above` inside each of the ranges bounds[t] to bounds[t + 1]: positions inside their range, and new bounds."""
    return _inside_ranges(above(bits, dtype, threshold), bounds)


def chunk_top_ragged(bits: Bits, dtype: np.dtype[Any], bounds: Positions, chunk: int, count: int) -> tuple[Positions, Positions]:
    """`top` inside every `chunk` elements of each of the ranges, none of which is empty: positions inside their range, and new bounds."""
    return _inside_ranges(top_between(bits, dtype, _chunk_bounds(bounds, chunk), count), bounds)


@kernel
def _chunk_bounds(bounds: Positions, chunk: int) -> Positions:
    """Where the chunks of all ranges begin, and the end of the last."""
    total = 1
    for t in range(bounds.size - 1):
        total += (bounds[t + 1] - bounds[t] + chunk - 1) // chunk
    out = np.empty(total, np.int64)
    n = 0
    for t in range(bounds.size - 1):
        for start in range(bounds[t], bounds[t + 1], chunk):
            out[n] = start
            n += 1
    out[n] = bounds[-1]
    return out


@kernel
def _inside_ranges(positions: Positions, bounds: Positions) -> tuple[Positions, Positions]:
    """Increasing positions as distances from the beginning of the range that each lies in, and where those of each range end."""
    out, ends = np.empty(positions.size, np.int64), np.zeros(bounds.size, np.int64)
    n = 0
    for t in range(bounds.size - 1):
        while n < positions.size and positions[n] < bounds[t + 1]:
            out[n] = positions[n] - bounds[t]
            n += 1
        ends[t + 1] = n
    return out, ends
