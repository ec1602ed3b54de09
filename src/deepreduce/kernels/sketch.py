"""Bins of values by quantiles, and the MinMaxSketch that holds a number per key in fewer cells than there are keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import draw
from .draw import below
from .jit import kernel

Doubles = NDArray[np.float64]
Ids = NDArray[np.uint8]
Counts = NDArray[np.int64]

_BLOCK = 256
_FEW_EDGES = 15


@kernel
def _count_edges(values: NDArray[Any], edges: NDArray[Any], out: Ids) -> None:
    # One edge after another over blocks of values: the processor compares many values at once.
    for start in range(np.uint64(0), np.uint64(values.size), np.uint64(_BLOCK)):
        end = min(start + np.uint64(_BLOCK), np.uint64(values.size))
        for i in range(start, end):
            out[i] = 0
        for edge in edges:
            for i in range(start, end):
                out[i] += np.uint8(edge <= values[i])


@kernel
def _assign(values: NDArray[Any], edges: NDArray[Any], out: Ids) -> None:
    # Step by step over blocks of values, because a search to its end for each value waits for branches that nobody can predict.
    found = np.empty(_BLOCK, np.int64)
    for start in range(0, values.size, _BLOCK):
        count = min(_BLOCK, values.size - start)
        found[:] = 0
        step = (edges.size + 1) // 2
        while step > 0:
            for i in range(count):
                found[i] += step * np.int64(edges[found[i] + step - 1] <= values[start + i])
            step >>= 1
        for i in range(count):
            out[start + i] = np.uint8(found[i])


def assign(values: NDArray[Any], edges: NDArray[Any]) -> Ids:
    """How many of the edges are not above each value. There are 2**b - 1 edges, b at most 8, that do not fall.

    >>> assign(np.array([0.5, 2.0, 9.0]), np.array([1.0, 2.0, 3.0]))
    array([0, 2, 3], dtype=uint8)
    """
    out = np.empty(values.size, np.uint8)
    if edges.size <= _FEW_EDGES:
        _count_edges(values, edges, out)
    else:
        _assign(values, edges, out)
    return out


@kernel
def look_up(table: NDArray[Any], ids: Ids) -> NDArray[Any]:
    """The entry of each of the ids, all of which are below the size of the table.

    >>> look_up(np.float32([7, 8]), np.uint8([1, 0, 1]))
    array([8., 7., 8.], dtype=float32)
    """
    out = np.empty(ids.size, table.dtype)
    for i in range(np.uint64(ids.size)):
        out[i] = table[np.uint64(ids[i])]
    return out


@kernel
def _sums(values: NDArray[Any], ids: Ids, sums: Doubles, counts: Counts) -> None:
    for i in range(values.size):
        sums[ids[i]] += values[i]
        counts[ids[i]] += 1


def means(values: NDArray[Any], ids: Ids, bins: int) -> Doubles:
    """The mean of each bin, 0 for an empty one; summed in order, so that it is the same on every machine."""
    sums, counts = np.zeros(bins), np.zeros(bins, np.int64)
    _sums(values, ids, sums, counts)
    return sums / np.maximum(counts, 1)


@kernel
def _insert(groups: Ids, numbers: Ids, first: Counts, columns: Counts, rows: int, start: np.uint64, cells: Ids) -> None:
    for i in range(groups.size):
        group = groups[i]
        for row in range(rows):
            cell = first[group] + row * columns[group] + below(start, i * rows + row, columns[group])
            cells[cell] = min(cells[cell], numbers[i])


@kernel
def _query(groups: Ids, first: Counts, columns: Counts, rows: int, start: np.uint64, cells: Ids, out: Ids) -> None:
    for i in range(groups.size):
        group = groups[i]
        found = np.uint8(0)
        for row in range(rows):
            found = max(found, cells[first[group] + row * columns[group] + below(start, i * rows + row, columns[group])])
        out[i] = found


def _layout(groups: Ids, group_count: int, rows: int, share: float) -> tuple[Counts, Counts, int]:
    """Where the cells of each group begin, how many columns it has, and how many cells there are in all."""
    columns = np.ceil(np.bincount(groups, minlength=group_count) * share).astype(np.int64)
    ends = np.cumsum(columns * rows)
    return ends - columns * rows, columns, int(ends[-1])


def minmax_cells(groups: Ids, group_count: int, rows: int, share: float) -> int:
    """The number of cells that `minmax_insert` fills for these keys."""
    return _layout(groups, group_count, rows, share)[2]


def minmax_insert(groups: Ids, numbers: Ids, group_count: int, rows: int, share: float, largest: int) -> Ids:
    """One sketch per group: `rows` rows of share * (keys in it) cells. A key is its index in `groups`.

    Each row keeps, in the cell that the key hashes to, the least of the numbers that meet there.
    """
    first, columns, size = _layout(groups, group_count, rows, share)
    cells = np.full(size, largest, np.uint8)
    _insert(groups, numbers, first, columns, rows, draw.state(0, draw.HASHING), cells)
    return cells


def minmax_query(groups: Ids, cells: Ids, group_count: int, rows: int, share: float) -> Ids:
    """The largest that the rows say for each key: the number inserted, or one below it that met it in every row.

    >>> groups, numbers = np.uint8([0, 0, 1, 1]), np.uint8([3, 2, 0, 1])
    >>> minmax_query(groups, minmax_insert(groups, numbers, 2, rows=2, share=1.0, largest=3), 2, rows=2, share=1.0)
    array([3, 2, 0, 1], dtype=uint8)
    """
    first, columns, _ = _layout(groups, group_count, rows, share)
    out = np.empty(groups.size, np.uint8)
    _query(groups, first, columns, rows, draw.state(0, draw.HASHING), cells, out)
    return out
