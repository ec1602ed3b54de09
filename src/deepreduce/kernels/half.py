"""Rounding to float16 and back, as IEEE 754 says, many times as fast as numpy; and what it loses of small values."""

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
OVERFLOW = np.float32(65520)
"""The least magnitude that rounds to infinity."""
_SIGN, _INFINITY, _NAN = np.uint32(0x8000), np.uint32(0x7C00), np.uint32(0x7E00)
_LEAST_NORMAL_BITS, _INFINITY_BITS = np.uint32(0x38800000), np.uint32(0x7F800000)
_BIAS = np.uint32(0x38000000)
"""The difference between the exponents of the two formats, as float32 has it."""
_UNITS = np.array([2.0**-24, *(2.0 ** (exponent - 25) for exponent in range(1, 31)), np.inf], np.float32)
"""The unit in the last place of float16, by its exponent."""


@kernel
def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest numbers of float16, ties to even; infinities from `OVERFLOW` on, one quiet NaN for each sign.

    >>> rounded(np.float32([0.1, -65519, 65520])).view(np.float16)
    array([ 1.00e-01, -6.55e+04,       inf], dtype=float16)
    """
    bits = values.view(np.uint32)
    out = np.empty(values.size, np.uint16)
    for i in range(values.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        odd = (magnitude >> np.uint32(13)) & np.uint32(1)
        normal = np.uint32(magnitude - _BIAS + np.uint32(0xFFF) + odd) >> np.uint32(13)
        units = np.uint32(np.int32(np.rint(min(abs(values[i]), np.float32(LEAST_NORMAL)) * np.float32(1 / STEP))))
        finite = units if magnitude < _LEAST_NORMAL_BITS else min(normal, _INFINITY)
        half = _NAN if magnitude > _INFINITY_BITS else finite
        out[i] = np.uint16(half | ((bits[i] >> np.uint32(16)) & _SIGN))
    return out


@kernel
def widened(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the numbers of float16 with these bits, exactly.

    >>> widened(np.float16([0.1, -6e-8, np.inf]).view(np.uint16))
    array([ 9.9975586e-02, -5.9604645e-08,            inf], dtype=float32)
    """
    out = np.empty(halves.size, np.float32)
    for i in range(halves.size):
        bits = np.int32(halves[i])
        exponent, fraction = (bits >> 10) & 31, bits & 1023
        magnitude = np.float32(np.int32(fraction + 1024 if exponent else fraction)) * _UNITS[exponent]
        magnitude = np.float32(np.nan) if (exponent == 31) & (fraction > 0) else magnitude
        out[i] = -magnitude if bits & 0x8000 else magnitude
    return out


@kernel
def overflows(values: NDArray[np.float32]) -> bool:
    """Whether a finite value rounds to infinity.

    >>> overflows(np.float32([65519, np.inf])), overflows(np.float32([-65520]))
    (False, True)
    """
    count = 0
    for i in range(values.size):
        magnitude = abs(values[i])
        count += (magnitude >= OVERFLOW) & (magnitude < np.float32(np.inf))
    return count > 0


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
