"""Frequencies of symbols in a few bytes: logarithms in quarters of an octave cost hardly anything against exact counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError
from ..reader import Reader, varint

Counts = NDArray[np.int64]
Frequencies = NDArray[np.uint32]

_SYMBOLS = 256
_TOTAL_BITS = 12
_TOP_LEVEL = 4 * _TOTAL_BITS + 1
_WEIGHTS = np.array([0, *(round(2 ** (8 + level / 4)) for level in range(_TOP_LEVEL))], np.int64)


def levels_of(counts: Counts) -> NDArray[np.uint8]:
    """The level of each symbol: 0 where it does not occur, up to 49 for one that has all. Each row of counts is a table of its own."""
    total = np.maximum(counts.sum(-1, keepdims=True), 1)
    levels = np.rint(4 * (np.log2(np.maximum(counts, 1)) + _TOTAL_BITS - np.log2(total))) + 1
    return np.where(counts > 0, np.clip(levels, 1, _TOP_LEVEL), 0).astype(np.uint8)


def frequencies_of(tables: Sequence[NDArray[np.uint8]]) -> Frequencies:
    """A row for each table of levels, that adds up to 2**12: at least 1 for every symbol with a level, and never all for one.

    >>> frequencies_of([np.uint8([45, 45, 1])])[:, :4].tolist()
    [[2048, 2047, 1, 0]]
    """
    weights = np.zeros((len(tables), _SYMBOLS), np.int64)
    for row, levels in zip(weights, tables, strict=True):
        row[: levels.size] = _WEIGHTS[levels]
        if np.count_nonzero(levels) < 2:
            only = row.argmax()
            row[only], row[(only + 1) % _SYMBOLS] = _WEIGHTS[-1], 1
    used = weights > 0
    shares = weights * ((1 << _TOTAL_BITS) - used.sum(1, keepdims=True)) // weights.sum(1, keepdims=True)
    frequencies = np.where(used, 1 + shares, 0)
    frequencies[np.arange(len(tables)), frequencies.argmax(1)] += (1 << _TOTAL_BITS) - frequencies.sum(1)
    return frequencies.astype(np.uint32)


def write_levels(levels: NDArray[np.uint8]) -> bytes:
    """The levels from the first to the last one that is not 0, with how many there are, and how many zeros before them, in front.

    >>> write_levels(np.uint8([0, 0, 7, 0, 9, 0])).hex()
    '0302070009'
    """
    used = np.flatnonzero(levels)
    if not used.size:
        return varint(0)
    kept = levels[used[0] : used[-1] + 1]
    return varint(kept.size) + varint(int(used[0])) + kept.tobytes()


def read_levels(reader: Reader, alphabet: int, top_level: int = _TOP_LEVEL) -> NDArray[np.uint8]:
    """The inverse of `write_levels`, for up to `alphabet` symbols."""
    count = reader.varint(limit=alphabet)
    if not count:
        return np.empty(0, np.uint8)
    lead = reader.varint(limit=alphabet - count)
    kept: NDArray[Any] = reader.array("u1", count)
    if kept.max() > top_level or kept[0] == 0 or kept[-1] == 0:
        raise CorruptError(f"a level above {top_level}, or a first or last one of 0")
    return np.concatenate([np.zeros(lead, np.uint8), kept])
