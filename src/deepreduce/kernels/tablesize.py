"""About the size of a table in bytes, without writing it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .adaptive import CONTEXTS, LENGTHS, context_of
from .bits import bit_length
from .jit import kernel
from .logs import log2
from .rangecoder import FLUSH_BYTES

Counts = NDArray[np.int64]


@kernel
def _log_factorial(number: int | np.int64) -> np.int64:
    """Stirling's formula for log2(number!), in parts of 2**16."""
    if number < 2:
        return np.int64(0)
    return ((2 * number + 1) * (log2(np.uint64(number)) >> 8) >> 1) - number * 94548 + 86884 + 7879 // number


@kernel
def _learned_cost(counts: Counts) -> np.int64:
    """Symbols that occur so often, under frequencies that are learned on the way."""
    total, used, cost = np.int64(0), np.int64(0), np.int64(0)
    for number in counts:
        total += number
        used += min(number, 1)
        cost -= _log_factorial(number)
    return cost + _log_factorial(total + used) - _log_factorial(used)


@kernel
def _rows_cost(row_counts: Counts) -> np.int64:
    """The least of: as learned numbers; as a learned length with two bits and the rest raw, for all rows or by the row before."""
    each = np.zeros(row_counts.max() + 1, np.int64)
    seen, raw_bits, count_before = np.zeros((1 + CONTEXTS, 4 * LENGTHS), np.int64), 0, 0
    for number in row_counts:
        length = bit_length(np.uint64(number))
        raw = max(length - 3, 0)
        symbol = number if length < 4 else 4 * (length - 2) + (number >> raw & 3)
        each[number] += 1
        seen[0, symbol] += 1
        seen[context_of(count_before), symbol] += 1
        raw_bits += raw
        count_before = number
    by_context = np.int64(0)
    for context in range(1, 1 + CONTEXTS):
        by_context += _learned_cost(seen[context])
    return min(_learned_cost(each), (np.int64(raw_bits) << 16) + min(_learned_cost(seen[0]), by_context))


@kernel
def _cost(row_counts: Counts, column_counts: Counts) -> np.int64:
    columns = np.int64(column_counts.size)
    full, selected, cost = np.int64(0), np.int64(0), np.int64(0)
    for number in row_counts:
        full += number == columns
    for number in column_counts:  # a full row tells nothing about its columns, and costs nothing
        selected += number - full
        cost -= _log_factorial(number - full)
    cost += _log_factorial(selected + columns - 1) - _log_factorial(columns - 1) - selected * (log2(np.uint64(columns)) >> 8)
    whole = _log_factorial(columns)
    for number in row_counts:
        if number:
            cost += whole - _log_factorial(number) - _log_factorial(columns - number)
    return _rows_cost(row_counts) + cost


def size_bytes(row_counts: Counts, column_counts: Counts) -> int:
    """About what `encode` takes, row by row, from what `count` returns; exchanged, column by column.

    The rows as if the numbers in them were learned, the columns as if all rows were drawn from weights that are learned.
    """
    return FLUSH_BYTES + (max(int(_cost(row_counts, column_counts)), 0) >> 19)
