"""What float16 loses of small values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import kernel

LEAST_NORMAL = 2.0**-14
STEP = 2.0**-24
"""The distance between numbers of float16 below the normal ones."""
MOST_LOST = 2.0**-22
"""Of the sum of squares: 2**-11 of the norm."""


@kernel
def loses_small_values(values: NDArray[Any], bounds: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether rounding to float16 loses more than 2**-11 of the norm in what is below its normal numbers, between two bounds each.

    Sums are added up one by one, so that they do not depend on the machine. Only what is finite counts.

    >>> loses_small_values(np.float32([1e-8, 1.0, 1e-8]), np.array([0, 2, 3]))
    array([False,  True])
    """
    out = np.zeros(bounds.size - 1, np.bool_)
    for t in range(out.size):
        lost = total = 0.0
        for i in range(bounds[t], bounds[t + 1]):
            value = np.float64(values[i])
            if not np.isfinite(value):
                continue
            total += value * value
            if abs(value) < LEAST_NORMAL:
                error = value - np.rint(value / STEP) * STEP
                lost += error * error
        out[t] = lost > total * MOST_LOST
    return out
