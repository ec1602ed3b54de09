"""Logarithms and roots of integers in fixed point, by tables; nearly exact, and the same on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .bits import bit_length
from .jit import inline

Counts = NDArray[np.int64]

_Q32 = np.uint64(32)


def _log_table() -> Counts:
    """log2(1 + i / 256) in parts of 2**24, rounded down; bit by bit, by squaring."""
    number = (256 + np.arange(256, dtype=np.uint64)) << np.uint64(23)
    log = np.zeros(256, np.int64)
    for _ in range(24):
        number = number * number >> np.uint64(31)
        bit = number >> _Q32
        number >>= bit
        log = 2 * log + bit.astype(np.int64)
    return np.append(log, 1 << 24)


_LOG = _log_table()
_EXP = (np.exp2(np.arange(257) / -256) * 2**32).astype(np.int64)


@inline
def log2(number: np.uint64) -> np.int64:
    """In parts of 2**24, nearly; the number is not 0, and below 2**48."""
    high = bit_length(number) - 1
    behind = np.int64(number << np.uint64(48 - high)) & ((1 << 48) - 1)
    i, rest = behind >> 40, behind >> 16 & 0xFFFFFF
    log: np.int64 = (high << 24) + _LOG[i] + ((_LOG[i + 1] - _LOG[i]) * rest >> 24)
    return log


@inline
def root(fraction: np.uint64, degree: int) -> np.uint64:
    """In parts of 2**32, nearly; the fraction is not 0."""
    fall = ((32 << 24) - log2(fraction)) // degree
    i, rest = fall >> 16 & 255, fall & 0xFFFF
    return np.uint64((_EXP[i] + ((_EXP[i + 1] - _EXP[i]) * rest >> 16)) >> (fall >> 24))
