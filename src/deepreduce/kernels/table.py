"""The model of a table: how full its rows are and how popular its columns.

Row by row, a range coder takes the number of selected columns under an adaptive model of such numbers, then the columns, increasing, under
weights learned from the rows before. With k columns still to come and W(c) the sum of the weights from column c on, the next one is c
or a later one with probability (W(c) / W(first))**k, as it is for the least of k independent draws. Half of the weight of the other
k - 1 is taken from both sums, which makes this nearly exact for draws without replacement. A power of a fraction needs only products:
all arithmetic is in integers, and the same on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .adaptive import Model, context_of, read_count, write_count
from .codes import ENDS_EARLY, INVALID
from .jit import inline, kernel
from .logs import root
from .rangecoder import AT, CODE, FLUSH_BYTES, FLUSH_STEP, FULL_RANGE, RANGE, STATE_SIZE, WRONG, Bytes, flush, follow, narrow, open_stream

Counts = NDArray[np.int64]
Sums = NDArray[np.uint64]

_0, _1 = np.uint64(0), np.uint64(1)
_COLUMN_BITS = np.uint64(28)
_COLUMN_PARTS = np.uint64(1 << 28)
_ONE_Q32 = np.uint64(1 << 32)
_Q32 = np.uint64(32)
_ONE_Q62 = np.uint64(1 << 62)
_Q62_TO_Q32 = np.uint64(30)
_SEEN_WEIGHT = np.uint64(4)  # of a column for each time it was selected, besides 1
_MAX_SUM = np.uint64(1 << 28)

_MOST_LOOKS = 16


# The weights of the columns, and the parts of the range that they get


@kernel
def _sum_weights(counts: Sums, sums: Sums) -> None:
    """sums[c] becomes the sum of the weights from column c on. Counts are halved after it grew above `_MAX_SUM`."""
    total = _0
    for column in range(counts.size - 1, -1, -1):
        total += _SEEN_WEIGHT * counts[column] + _1
        sums[column] = total
    if total > _MAX_SUM:
        for column in range(counts.size):
            counts[column] >>= _1


@inline
def _is_time_to_sum(unsummed: int, seen: int, columns: int) -> bool:
    """Often while little is known, then after a quarter of the columns, and at last so seldom that it costs nothing."""
    return unsummed > 0 and 4 * unsummed >= min(columns, seen) and 16 * unsummed >= seen


@inline
def _half_of_others(sums: Sums, first: int, left: int) -> np.uint64:
    half: np.uint64 = sums[first] * np.uint64(left - 1) // np.uint64(2 * (sums.size - 1 - first))
    return half


@inline
def _power(fraction: np.uint64, exponent: int) -> np.uint64:
    """In parts of 2**32, rounded down; a smaller fraction never has the greater power, as all products are rounded alike."""
    power = _ONE_Q32
    while exponent > 1:
        if exponent & 1:
            power = power * fraction >> _Q32
        fraction = fraction * fraction >> _Q32
        exponent >>= 1
    return power * fraction >> _Q32


@inline
def _start_of(step: int, steps: int, left: int, weight: np.uint64, others: np.uint64, reciprocal: np.uint64) -> np.uint64:
    """The first part of column `first + step`, from which on there is `weight`; each of the `steps` columns has one part or more."""
    if step == 0:
        return _0
    if step == steps:
        return _COLUMN_PARTS
    later = _0
    if weight > others:
        later = _power((weight - others) * reciprocal >> _Q62_TO_Q32, left)
    return ((_ONE_Q32 - later) * (_COLUMN_PARTS - np.uint64(steps)) >> _Q32) + np.uint64(step)


@kernel
def encode_rows(row_counts: Counts, selected_columns: Counts, columns: int, model: Model, out: Bytes) -> int:
    """Write how many columns each row has, and which; returns the bytes that it took."""
    state = np.zeros(STATE_SIZE, np.uint64)
    state[RANGE] = FULL_RANGE
    counts, sums = np.zeros(columns, np.uint64), np.zeros(columns + 1, np.uint64)
    _sum_weights(counts, sums)
    begin, unsummed, count_before = 0, 0, 0
    for count in row_counts:
        write_count(state, out, model, context_of(count_before), count)
        first, end = 0, begin + count
        for i in range(begin, end):
            column, left = selected_columns[i], end - i
            steps = columns - first - left + 1
            if steps > 1:
                others = _half_of_others(sums, first, left)
                reciprocal = _ONE_Q62 // (sums[first] - others)
                start = _start_of(column - first, steps, left, sums[column], others, reciprocal)
                stop = _start_of(column - first + 1, steps, left, sums[column + 1], others, reciprocal)
                narrow(state, out, start, stop - start, _COLUMN_BITS)
            counts[column] += _1
            first = column + 1
        begin, unsummed, count_before = end, unsummed + count, count
        if _is_time_to_sum(unsummed, begin, columns):
            _sum_weights(counts, sums)
            unsummed = 0
    return flush(state, out)


# A reader guesses the column, then looks at the parts around its guess: only its speed depends on the guess


@kernel
def _point_to_columns(sums: Sums, guide: Counts) -> np.uint64:
    """guide[sum >> shift] becomes a column at which, or not far after which, the sum of the weights is so much; returns the shift."""
    shift = _0
    while sums[0] >> shift >= np.uint64(guide.size):
        shift += _1
    column = 0
    for cell in range(np.int64(sums[0] >> shift), -1, -1):
        while sums[column + 1] >> shift > np.uint64(cell):
            column += 1
        guide[cell] = column
    return shift


@inline
def _guess(target: np.uint64, first: int, steps: int, left: int, sums: Sums, others: np.uint64, guide: Counts, shift: np.uint64) -> int:
    later = _ONE_Q32 - (target << (_Q32 - _COLUMN_BITS))
    weight = others + ((sums[first] - others) * (root(later, left) if left > 1 else later) >> _Q32)
    column = max(guide[weight >> shift], first)
    last_look = min(first + steps - 1, column + _MOST_LOOKS)
    while column < last_look and sums[column + 1] >= weight:
        column += 1
    return int(max(column - first, 1))


@kernel
def decode_rows(packed: Bytes, columns: int, model: Model, row_counts: Counts, selected_columns: Counts) -> int:
    """Fills both arrays. Returns 0 or one of the negative codes."""
    state = np.zeros(STATE_SIZE, np.uint64)
    open_stream(state, packed)
    all_read = np.uint64(packed.size + 8 - FLUSH_BYTES)
    counts, sums, guide = np.zeros(columns, np.uint64), np.zeros(columns + 1, np.uint64), np.zeros(2 * columns, np.int64)
    _sum_weights(counts, sums)
    shift = _point_to_columns(sums, guide)
    begin, unsummed, count_before = 0, 0, 0
    for row in range(row_counts.size):
        count = read_count(state, packed, model, context_of(count_before))
        if state[AT] > all_read:
            return ENDS_EARLY
        if state[WRONG] or count > min(columns, selected_columns.size - begin):
            return INVALID
        first, end = 0, begin + count
        for i in range(begin, end):
            left = end - i
            steps = columns - first - left + 1
            step = 0
            if steps > 1:
                target = state[CODE] // (state[RANGE] >> _COLUMN_BITS)
                if target >= _COLUMN_PARTS:
                    return INVALID
                others = _half_of_others(sums, first, left)
                reciprocal = _ONE_Q62 // (sums[first] - others)
                start, stop, beyond, stride = _0, _COLUMN_PARTS, steps, 1
                probe = _guess(target, first, steps, left, sums, others, guide, shift)
                while beyond - step > 1:
                    if probe <= step or probe >= beyond:
                        probe = (step + beyond) >> 1
                    at = _start_of(probe, steps, left, sums[first + probe], others, reciprocal)
                    if at <= target:
                        step, start = probe, at
                        probe += stride
                    else:
                        beyond, stop = probe, at
                        probe -= stride
                    stride *= 2
                follow(state, packed, start, stop - start, _COLUMN_BITS)
            selected_columns[i] = first + step
            counts[first + step] += _1
            first += step + 1
        row_counts[row] = count
        begin, unsummed, count_before = end, unsummed + count, count
        if _is_time_to_sum(unsummed, begin, columns):
            _sum_weights(counts, sums)
            shift = _point_to_columns(sums, guide)
            unsummed = 0
    if state[AT] > all_read:
        return ENDS_EARLY
    as_flushed = not state[WRONG] and state[CODE] <= FLUSH_STEP
    return 0 if as_flushed and state[AT] == all_read and begin == selected_columns.size else INVALID
