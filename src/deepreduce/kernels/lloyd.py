"""Lloyd's algorithm on sorted values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import inline, kernel


@inline
def _count_below(rising: NDArray[Any], edge: float) -> int:
    """How many of the sorted values are below an edge."""
    low, high = 0, rising.size
    while low < high:
        middle = (low + high) // 2
        if np.float64(rising[middle]) < edge:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def edges(rising: NDArray[Any], levels: int, rounds: int) -> NDArray[np.float64]:
    """Return the values halfway between neighbouring levels, which begin as quantiles of the sorted values and become means of the nearest.

    >>> edges(np.float32([-3, -2, -1, 1, 2, 3]), 2, 16)
    array([0.])
    """
    found = np.zeros(levels - 1)
    if rising.size == 0:
        return found
    below = np.empty(rising.size + 1)
    below[0] = 0.0
    for i in range(rising.size):
        below[i + 1] = below[i] + np.float64(rising[i])
    centres = np.empty(levels)
    for level in range(levels):
        centres[level] = rising[(2 * level + 1) * rising.size // (2 * levels)]
    for _ in range(rounds):
        for level in range(levels - 1):
            found[level] = (centres[level + 1] + centres[level]) / 2
        start, moved = 0, False
        for level in range(levels):
            end = _count_below(rising, found[level]) if level < levels - 1 else rising.size
            centre = (below[end] - below[start]) / (end - start) if end > start else centres[level]
            if level > 0:
                centre = max(centre, centres[level - 1])
            moved = moved or centre != centres[level]
            centres[level] = centre
            start = end
        if not moved:  # nor would it in the rounds to come
            break
    for level in range(levels - 1):
        found[level] = (centres[level + 1] + centres[level]) / 2
    return found
