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


@kernel
def add_ragged(dense: Dense, bounds: Positions, positions: Positions, ends: Positions, values: Dense, divisor: Any) -> None:
    """Add the values of many tensors, divided by a number, to their ranges of an array.

    Tensor t has the values from ends[t] to ends[t + 1]. Where these are as many as its range is long there are no positions for them.
    """
    at = 0
    for t in range(bounds.size - 1):
        low, first, nnz = bounds[t], ends[t], ends[t + 1] - ends[t]
        if nnz == bounds[t + 1] - low:
            for i in range(nnz):
                dense[low + i] += values[first + i] / divisor
        else:
            for i in range(nnz):
                dense[low + positions[at + i]] += values[first + i] / divisor
            at += nnz


@kernel
def compensate_ragged(
    gradients: Dense, residuals: Dense, bounds: Positions, factor: Any, largest: Any, out: Dense, unused: NDArray[np.bool_]
) -> int:
    """Write gradient + factor * residual to `out`, range by range, and the residual alone where the gradient is zero: that one is unused.

    Returns how many of the sums are not finite.
    """
    beyond = 0
    for t in range(bounds.size - 1):
        own = slice(bounds[t], bounds[t + 1])  # numba makes vector instructions of loops over slices only
        unused[t] = _is_zero(gradients[own])
        if unused[t]:
            out[own] = residuals[own]
        else:
            beyond += plus_scaled(gradients[own], residuals[own], factor, largest, out[own])
    return beyond


@kernel
def _is_zero(array: Dense) -> bool:
    for element in array:  # noqa: SIM110 (numba has no all())
        if element != 0:
            return False
    return True
