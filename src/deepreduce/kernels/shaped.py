"""Positions of a tensor that is seen as a table: row by row or column by column, through the model of `table`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import table
from .adaptive import fresh_model
from .codes import ENDS_EARLY
from .jit import kernel
from .rangecoder import FLUSH_BYTES

Counts = NDArray[np.int64]
Positions = NDArray[np.int64]

MAX_COLUMNS = 2**20 - 1
"""The most columns that a row may have: each gets one part or more of the 2**28 that the range is cut in."""

MAX_ROWS_PER_BYTE = 2**14
"""A row takes 2**-11 bits or more, as no choice of two is surer than 32 parts in 2**16."""


@kernel
def _count(positions: Positions, columns: int, row_counts: Counts, column_counts: Counts) -> None:
    for position in positions:
        row = position // columns
        row_counts[row] += 1
        column_counts[position - row * columns] += 1


@kernel
def _columns_by_row(positions: Positions, columns: int, out: Counts) -> None:
    for i in range(positions.size):
        out[i] = positions[i] % columns


@kernel
def _rows_by_column(positions: Positions, columns: int, column_counts: Counts, out: Counts) -> None:
    ends = np.cumsum(column_counts)
    for i in range(positions.size - 1, -1, -1):
        row = positions[i] // columns
        column = positions[i] - row * columns
        ends[column] -= 1
        out[ends[column]] = row


@kernel
def _join_rows(row_counts: Counts, selected_columns: Counts, columns: int, out: Positions) -> None:
    i = 0
    for row in range(row_counts.size):
        for _ in range(row_counts[row]):
            out[i] = row * columns + selected_columns[i]
            i += 1


@kernel
def _join_columns(column_counts: Counts, selected_rows: Counts, rows: int, out: Positions) -> None:
    starts = np.zeros(rows + 1, np.int64)
    for row in selected_rows:
        starts[row + 1] += 1
    starts = np.cumsum(starts)
    i = 0
    for column in range(column_counts.size):
        for _ in range(column_counts[column]):
            row = selected_rows[i]
            out[starts[row]] = row * column_counts.size + column
            starts[row] += 1
            i += 1


def count(positions: Positions, rows: int, columns: int) -> tuple[Counts, Counts]:
    """How many positions every row and every column has.

    >>> count(np.array([0, 5, 6]), rows=3, columns=3)
    (array([1, 1, 1]), array([2, 0, 1]))
    """
    row_counts, column_counts = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
    _count(positions, columns, row_counts, column_counts)
    return row_counts, column_counts


def encode(positions: Positions, rows: int, columns: int, by_column: bool) -> bytes:
    """The positions of a table, row by row, or column by column. A row, or else a column, has at most `MAX_COLUMNS` elements."""
    outer_counts, inner_counts = count(positions, rows, columns)
    inner = np.empty(positions.size, np.int64)
    if by_column:
        _rows_by_column(positions, columns, inner_counts, inner)
        outer_counts, inner_counts = inner_counts, outer_counts
    else:
        _columns_by_row(positions, columns, inner)
    out = np.empty(max_bytes(positions.size, outer_counts.size), np.uint8)
    size_bytes = table.encode_rows(outer_counts, inner, inner_counts.size, fresh_model(), out)
    return out[:size_bytes].tobytes()


def max_bytes(nnz: int, rows: int) -> int:
    """A bound on the size: a choice of two takes less than 12 bits, the number of an empty row is one such choice, of any other row at
    most 41, and a column takes less than 29 bits."""
    return FLUSH_BYTES + 2 * rows + 66 * nnz


def decode(packed: bytes | memoryview, nnz: int, rows: int, columns: int, by_column: bool) -> tuple[Positions, int]:
    """The inverse of `encode`, `nnz` increasing positions below rows * columns, and 0; a code below 0 for bytes that it would not write.

    >>> positions = np.array([3, 4, 70])
    >>> decode(encode(positions, 8, 10, by_column=True), 3, 8, 10, by_column=True)
    (array([ 3,  4, 70]), 0)
    """
    outer, inner = (columns, rows) if by_column else (rows, columns)
    if outer > MAX_ROWS_PER_BYTE * len(packed):
        return np.empty(0, np.int64), ENDS_EARLY
    outer_counts, selected_inner, positions = np.empty(outer, np.int64), np.empty(nnz, np.int64), np.empty(nnz, np.int64)
    problem = table.decode_rows(np.frombuffer(packed, np.uint8), inner, fresh_model(), outer_counts, selected_inner)
    if problem == 0 and by_column:
        _join_columns(outer_counts, selected_inner, rows, positions)
    elif problem == 0:
        _join_rows(outer_counts, selected_inner, columns, positions)
    return positions, problem
