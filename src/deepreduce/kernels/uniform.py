"""Whether positions look as if they were drawn at random, from pairs of them in one row or in one column of a table."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from .bits import bit_length
from .jit import kernel
from .logs import log2

Positions = NDArray[np.int64]

_LEAST_EXCESS = 0.02  # so many more pairs make about a hundredth of a bit per position
_DEVIATIONS = 4.0
_MAX_CELLS = 2**47  # for `log2`, and for rows from floats


@kernel
def bound_bits(positions: Positions, starts: Positions, length: int) -> float:
    """What slices that begin at `starts` take at least if each is drawn at random, with a density of its own that is known.

    Nothing is known of a slice of one position, nor of one that is too long.
    """
    bits, drawn = 0.0, length - 1
    if length < 2:
        return bits
    for start in starts:
        cells = positions[start + drawn] - positions[start]
        left = cells - drawn
        if 0 < left < _MAX_CELLS:
            whole = log2(np.uint64(cells))
            bits += drawn * (whole - log2(np.uint64(drawn))) + left * (whole - log2(np.uint64(left)))
    return bits / 2**24 * length / drawn


@kernel
def rice_bits(positions: Positions, starts: Positions, length: int) -> int:
    """What slices that begin at `starts` take as Rice codes with one parameter: the best one for random positions as dense as these."""
    gaps = np.int64(0)
    for start in starts:
        gaps += positions[start + length - 1] - (positions[start - 1] if start else np.int64(-1)) - length
    count = starts.size * length
    # One more in the parameter k saves bits where the mean gap and a half is above 2.078 * 2**k.
    k = max(bit_length(np.uint64((gaps / count + 0.5) / 1.039)) - 1, 0)
    total = np.int64(0)
    for start in starts:
        before = positions[start - 1] if start else np.int64(-1)
        for i in range(start, start + length):
            total += (positions[i] - before - 1) >> k
            before = positions[i]
    return int(total) + count * (k + 1)


@kernel
def _expected(found: int, expected: float) -> bool:
    return abs(found - expected) <= _LEAST_EXCESS * expected + _DEVIATIONS * sqrt(expected)


@kernel
def _pairs(count: int) -> float:
    return 0.5 * count * (count - 1)


@kernel
def looks_uniform(positions: Positions, starts: Positions, length: int, columns: int) -> bool:
    """Whether slices of the positions of a table fill its rows, and its columns, as evenly and as unevenly as chance does.

    The slices begin at `starts`. Between its first and its last position, each position of a slice could be any. Slices that are too short
    to tell do not look uniform, nor do positions that are too large.
    """
    cells = 0.0
    for start in starts:
        cells += positions[start + length - 1] - positions[start] - 1
    if cells < 4 * columns or positions[-1] >= _MAX_CELLS:
        return False
    rows_per_cell = 1 / columns  # a division for each row would take half of the time
    in_column = np.zeros(columns, np.int64)
    row_pairs = column_pairs = 0
    expected_row_pairs = 0.0
    for start in starts:
        first, last = positions[start], positions[start + length - 1]
        row_end, in_row = np.int64(0), 0
        for i in range(np.uint64(start + 1), np.uint64(start + length - 1)):
            if positions[i] >= row_end:
                row_end, in_row = (np.int64((positions[i] + 0.5) * rows_per_cell) + 1) * columns, 0
            row_pairs += in_row
            in_row += 1
            column = np.uint64(positions[i] - row_end + columns)
            column_pairs += in_column[column]
            in_column[column] += 1
        own = last - first - 1
        head, tail = min(columns - 1 - first % columns, own), last % columns
        if first // columns == last // columns:
            tail = 0
        whole = (own - head - tail) // columns
        own_pairs = _pairs(head) + _pairs(tail) + whole * _pairs(columns)
        if own > 1:
            expected_row_pairs += _pairs(length - 2) * own_pairs / _pairs(own)
    drawn = starts.size * (length - 2)
    expected_column_pairs = _pairs(drawn) * (cells / columns - 1) / (cells - 1)
    return _expected(row_pairs, expected_row_pairs) and _expected(column_pairs, expected_column_pairs)
