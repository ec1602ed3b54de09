"""Curves through sorted values: cutting them into segments, least squares on each, and the way back (paper, section 5).

Sorted values come in blocks, each descending: a positive part, zeros, a negative part. A *run* is a stretch of one part with one curve
through it. Everything is computed one operation after the other in float64, without reassociation or library functions, so that writer
and reader on any two machines agree to the last bit.

Polynomials stand in the basis of Gram: orthonormal over the equispaced points of their segment. Least squares is then one inner product a
coefficient, no system is solved, and no coefficient exceeds the root mean square of the values.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from . import dexp
from .jit import inline, kernel

Positions = NDArray[np.int64]
Singles = NDArray[np.float32]
Doubles = NDArray[np.float64]

ZEROS, POSITIVE, NEGATIVE, POSITIVE_DEXP, NEGATIVE_DEXP = 0, 1, 2, 3, 4
"""Kinds of runs: no curve, a polynomial through positive or negative values, a double exponential through them."""

MAX_SEGMENTS = 255
"""Segments a part is cut into at most."""

PAPER, TARGET = 0, -1
"""In place of a number of segments: the paper's heuristic, and as many as it takes to reach `TARGET_ERROR`."""

TARGET_ERROR = 0.03
"""Relative L2 error of a part."""


# Sorting


@kernel
def _keys(bits: NDArray[np.uint32], block: int) -> NDArray[np.uint64]:
    """Numbers that ascend as the floats descend, equal floats by their index in the block."""
    keys = np.empty(bits.size, np.uint64)
    place = 0
    for i in range(bits.size):
        word = np.uint64(bits[i])
        # Of negative floats the bits ascend as they descend; of the others, all bits but the sign do so when flipped.
        key = word if word >> np.uint64(31) else word ^ np.uint64(0x7FFFFFFF)
        keys[i] = (key << np.uint64(32)) | np.uint64(place)
        place += 1
        if place == block:
            place = 0
    return keys


@kernel
def _sorted(bits: NDArray[np.uint32], keys: NDArray[np.uint64], block: int) -> tuple[NDArray[np.uint32], Positions]:
    found, permutation = np.empty(keys.size, np.uint32), np.empty(keys.size, np.int64)
    for start in range(0, keys.size, block):
        for i in range(start, min(start + block, keys.size)):
            permutation[i] = start + np.int64(keys[i] & np.uint64(0xFFFFFFFF))
            found[i] = bits[permutation[i]]
    return found, permutation


def descending(values: Singles, block: int) -> tuple[Singles, Positions]:
    """The values in descending order inside each block, equal ones by position, and the position each of them had.

    >>> descending(np.float32([1, 3, 2, -1, 5]), block=3)
    (array([ 3.,  2.,  1.,  5., -1.], dtype=float32), array([1, 2, 0, 4, 3]))
    """
    bits = (values + np.float32(0)).view(np.uint32)  # -0 becomes 0
    keys = _keys(bits, block)
    whole = keys.size // block * block
    keys[:whole].reshape(-1, block).sort(axis=1)
    keys[whole:].sort()
    found, permutation = _sorted(bits, keys, block)
    return found.view(np.float32), permutation


# Least squares


@inline
def _gram(count: int, terms: int, squares: Doubles) -> None:
    """The recurrence t_(k+1) = x t_k - squares[k] t_(k-1) of monic polynomials orthogonal over `count` equispaced points of [-1, 1].

    The mean square of t_k over the points is squares[1] ... squares[k].
    """
    squares[0] = 0.0
    for k in range(1, terms):
        square = np.float64(k) * k
        squares[k] = square * (np.float64(count) * count - square) / ((4.0 * square - 1.0) * (count - 1.0) * (count - 1.0))


@kernel
def _project(values: Singles, start: int, stop: int, terms: int, coefficients: Doubles) -> float:
    """The coefficients of the polynomial of best fit in the orthonormal basis; returns the squared error that it leaves."""
    count = stop - start
    squares = np.empty(terms, np.float64)
    _gram(count, terms, squares)
    coefficients[:terms] = 0.0
    energy = 0.0
    for i in range(count):
        y, x = np.float64(values[start + i]), (2.0 * i - (count - 1)) / max(count - 1, 1)
        energy += y * y
        coefficients[0] += y
        before, t = 0.0, 1.0
        for k in range(1, terms):
            before, t = t, x * t - squares[k - 1] * before
            coefficients[k] += y * t
    norm, explained = 1.0, 0.0
    for k in range(terms):
        if k:
            norm *= squares[k]
        coefficients[k] /= count * math.sqrt(norm)
        explained += coefficients[k] * coefficients[k]
    return max(energy - count * explained, 0.0)


@kernel
def _curve(coefficients: Singles, at: int, terms: int, out: Doubles) -> None:
    """The polynomial with these coefficients at its out.size points, by Clenshaw's sum."""
    count = out.size
    squares, monic = np.empty(terms, np.float64), np.empty(terms, np.float64)
    _gram(count, terms, squares)
    norm = 1.0
    for k in range(terms):
        if k:
            norm *= squares[k]
        monic[k] = coefficients[at + k] / math.sqrt(norm)
    for i in range(count):
        x = (2.0 * i - (count - 1)) / max(count - 1, 1)
        y, after = monic[terms - 1], 0.0
        for k in range(terms - 2, -1, -1):
            y, after = monic[k] + x * y - squares[k + 1] * after, y
        out[i] = y


# Cutting


@inline
def _farthest(values: Singles, start: int, stop: int, least: int) -> tuple[float, int]:
    """The largest squared distance from the chord, and where; only cuts that leave `least` values on both sides count."""
    best, at = 0.0, -1
    if stop - start >= 2 * least:
        first = np.float64(values[start])
        slope = (np.float64(values[stop - 1]) - first) / max(stop - 1 - start, 1)
        for i in range(start + least, stop - least + 1):
            distance = first + slope * (i - start) - values[i]
            if distance * distance > best:
                best, at = distance * distance, i
    return best, at


@inline
def _heuristic(values: Singles, start: int, stop: int, degree: int) -> int:
    """The paper's number of segments: ceil(2 sqrt(M)), or by its Remark 4 ceil(M / sqrt(2) - 1) for constants."""
    if stop - start < 2:
        return 1
    change = abs((np.float64(values[start]) - values[start + 1]) - (np.float64(values[stop - 2]) - values[stop - 1]))
    wanted = math.ceil(change / math.sqrt(2.0) - 1.0) if degree == 0 else math.ceil(2.0 * math.sqrt(change))
    return int(min(max(wanted, 1.0), float(MAX_SEGMENTS)))


@kernel
def cut(values: Singles, start: int, stop: int, degree: int, segments: int, bounds: Positions) -> int:
    """Cut one part where it is farthest from the chord, the farthest of all segments first.

    Until there are `segments` of them; PAPER: as many as the paper's heuristic says; TARGET: until the fit errs by at most `TARGET_ERROR`.
    Writes the bounds of the segments, one more than there are, and returns their number. Every segment that was cut off has more values
    than the degree, and no more than MAX_SEGMENTS are made.
    """
    wanted = segments if segments > 0 else _heuristic(values, start, stop, degree) if segments == PAPER else MAX_SEGMENTS
    distances, places, errors = np.empty(wanted + 1), np.empty(wanted + 1, np.int64), np.zeros(wanted + 1)
    scratch = np.empty(degree + 1, np.float64)
    bounds[0], bounds[1] = start, stop
    allowed, error = -1.0, 0.0  # never reached, where the number of segments decides
    if segments == TARGET:
        allowed = 0.0
        for i in range(start, stop):
            allowed += np.float64(values[i]) * values[i] * (TARGET_ERROR * TARGET_ERROR)
        errors[0] = error = _project(values, start, stop, min(degree + 1, stop - start), scratch)
    if error <= allowed or wanted == 1:
        return 1
    distances[0], places[0] = _farthest(values, start, stop, degree + 1)
    count = 1
    while count < wanted:
        widest = 0
        for s in range(1, count):
            if distances[s] > distances[widest]:
                widest = s
        if distances[widest] == 0.0:
            break
        for s in range(count, widest, -1):
            bounds[s + 1], distances[s], places[s], errors[s] = bounds[s], distances[s - 1], places[s - 1], errors[s - 1]
        bounds[widest + 1] = places[widest]
        error -= errors[widest]
        count += 1
        for s in range(widest, widest + 2):
            distances[s], places[s] = _farthest(values, bounds[s], bounds[s + 1], degree + 1)
            if segments == TARGET:
                errors[s] = _project(values, bounds[s], bounds[s + 1], degree + 1, scratch)
                error += errors[s]
        if error <= allowed:
            break
    return count


# The whole way


@inline
def _magnitudes(values: Singles, start: int, stop: int, negative: bool) -> Doubles:
    """One part as descending magnitudes, the direction in which double exponentials decay."""
    out = np.empty(stop - start, np.float64)
    for i in range(out.size):
        out[i] = -np.float64(values[stop - 1 - i]) if negative else np.float64(values[start + i])
    return out


@inline
def _signs(values: Singles, start: int, stop: int) -> tuple[int, int]:
    """Where the zeros of a descending block begin and end."""
    zeros = start
    while zeros < stop and values[zeros] > 0:
        zeros += 1
    negatives = zeros
    while negatives < stop and values[negatives] == 0:
        negatives += 1
    return zeros, negatives


@kernel
def _encode_polynomials(
    values: Singles,
    start: int,
    stop: int,
    degree: int,
    segments: int,
    bounds: Positions,
    lengths: Positions,
    coefficients: Singles,
    used: int,
) -> tuple[int, int]:
    """The runs of one part. Returns how many there are, and how many coefficients are used now."""
    fitted = np.empty(degree + 1, np.float64)
    count = cut(values, start, stop, degree, segments, bounds)
    for s in range(count):
        lengths[s] = bounds[s + 1] - bounds[s]
        terms = min(degree + 1, lengths[s])
        _project(values, bounds[s], bounds[s + 1], terms, fitted)
        for k in range(terms):
            coefficients[used + k] = np.float32(fitted[k])
        used += terms
    return count, used


@kernel
def _encode(
    values: Singles, block: int, degree: int, segments: int, exponential: bool, lengths: Positions, kinds: Positions, coefficients: Singles
) -> tuple[int, int]:
    runs, used = 0, 0
    bounds = np.empty((segments if segments > 0 else MAX_SEGMENTS) + 1, np.int64)
    for first in range(0, values.size, block):
        last = min(first + block, values.size)
        zeros, negatives = _signs(values, first, last)
        for start, stop, kind in ((first, zeros, POSITIVE), (zeros, negatives, ZEROS), (negatives, last, NEGATIVE)):
            if start == stop:
                continue
            count = 1
            lengths[runs] = stop - start
            if kind != ZEROS:
                fits = exponential and stop - start > dexp.PARAMETERS
                if fits and dexp.fit(_magnitudes(values, start, stop, kind == NEGATIVE), coefficients, used):
                    kind += POSITIVE_DEXP - POSITIVE
                    used += dexp.PARAMETERS
                else:
                    count, used = _encode_polynomials(values, start, stop, degree, segments, bounds, lengths[runs:], coefficients, used)
            kinds[runs : runs + count] = kind
            runs += count
    return runs, used


def encode(values: Singles, block: int, degree: int, segments: int, exponential: bool = False) -> tuple[Positions, Positions, Singles]:
    """Lengths, kinds and coefficients of the runs through values that `descending` gave."""
    capacity = min(values.size, -(-values.size // block) * (2 * (segments if segments > 0 else MAX_SEGMENTS) + 1))
    lengths, kinds = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    coefficients = np.empty(values.size, np.float32)
    runs, used = _encode(values, block, degree, segments, exponential, lengths, kinds, coefficients)
    return lengths[:runs], kinds[:runs], coefficients[:used]


def terms(lengths: Positions, kinds: Positions, degree: int) -> Positions:
    """How many coefficients each run has."""
    count = np.where(kinds >= POSITIVE_DEXP, dexp.PARAMETERS, np.minimum(lengths, degree + 1))
    count[kinds == ZEROS] = 0
    return count


@kernel
def _flatten(out: Doubles, start: int, stop: int, means: Doubles, counts: Positions) -> None:
    """Replace a part by the nearest non-increasing one, in the sense of least squares (pool adjacent violators).

    What was sent is non-increasing, so this can only lessen the error.
    """
    ordered = True
    for i in range(start + 1, stop):
        ordered &= out[i] <= out[i - 1]
    if ordered:
        return
    pools = 0
    for i in range(start, stop):
        means[pools], counts[pools] = out[i], 1
        while pools and means[pools] > means[pools - 1]:
            total = counts[pools - 1] + counts[pools]
            means[pools - 1] += (means[pools] - means[pools - 1]) * counts[pools] / total
            counts[pools - 1] = total
            pools -= 1
        pools += 1
    i = start
    for pool in range(pools):
        for _ in range(counts[pool]):
            out[i] = means[pool]
            i += 1


@kernel
def _decode(lengths: Positions, kinds: Positions, terms: Positions, coefficients: Singles, block: int, out: Doubles) -> None:
    at, start, part = 0, 0, 0
    means, counts = np.empty(min(block, out.size), np.float64), np.empty(min(block, out.size), np.int64)
    for r in range(lengths.size):
        stop, kind = start + lengths[r], kinds[r]
        if kind == ZEROS:
            out[start:stop] = 0.0
        elif kind >= POSITIVE_DEXP:
            dexp.curve(coefficients, at, out[start:stop])
            if kind == NEGATIVE_DEXP:
                out[start:stop] = -out[start:stop][::-1].copy()
        else:
            _curve(coefficients, at, terms[r], out[start:stop])
        for i in range(start, stop):
            out[i] = min(out[i], 0.0) if kind in (NEGATIVE, NEGATIVE_DEXP) else max(out[i], 0.0)
        at, start = at + terms[r], stop
        if r + 1 == lengths.size or kinds[r + 1] != kind or stop % block == 0:
            _flatten(out, part, stop, means, counts)
            part = stop


def decode(lengths: Positions, kinds: Positions, terms: Positions, coefficients: Singles, block: int) -> Doubles:
    """The values of the runs: non-increasing in each part, none of the wrong sign.

    The caller has checked that no run is empty or leaves its block, that `terms` is what `terms` says and sums up to the number of
    coefficients, and that all of them are finite.
    """
    out = np.empty(int(lengths.sum()), np.float64)
    _decode(lengths, kinds, terms, coefficients, block, out)
    return out
