"""Sparse sums into dense arrays, in one pass over what is added."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import kernel

Positions = NDArray[np.int64]
Dense = NDArray[Any]


@kernel
def add(dense: Dense, positions: Positions, values: Dense, divisor: Any) -> None:
    """Add each value, divided by a number of the same dtype, at its position."""
    for i in range(positions.size):
        dense[positions[i]] += values[i] / divisor


@kernel
def subtract(dense: Dense, positions: Positions, values: Dense) -> None:
    """Subtract each value at its position."""
    for i in range(positions.size):
        dense[positions[i]] -= values[i]


@kernel
def plus_scaled(array: Dense, term: Dense, factor: Any, largest: Any, out: Dense) -> int:
    """Write array + factor * term to `out`, all flat and of one dtype. Returns how many of the sums are not finite."""
    beyond = 0
    for i in range(out.size):
        total = array[i] + factor * term[i]
        out[i] = total
        beyond += not (abs(total) <= largest)
    return beyond
