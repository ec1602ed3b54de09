"""Facts about float formats that several value codecs need."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..tensor import Values


@lru_cache
def limits(dtype: np.dtype[Any]) -> Any:
    """`numpy.finfo`, for bfloat16 too."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def at_least_32_bits(values: Values) -> Values:
    """The values in a format that kernels have: float32 for those of 16 bits, the others as they are."""
    return values.astype(np.float32) if values.itemsize == 2 else values


def peak(values: Values) -> float:
    """The largest magnitude; NaN where there is one, so that it is not below any limit.

    >>> peak(np.float32([1, -3])), peak(np.float32([1, np.nan]))
    (3.0, nan)
    """
    with np.errstate(invalid="ignore"):  # bfloat16 warns of NaN
        return max(float(values.max(initial=0)), -float(values.min(initial=0))) + 0.0  # not -0


def round_up(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    """The least float32 that is not below each number; infinite where there is none.

    >>> round_up(np.array([0.5, 1e-60]))
    array([5.e-01, 1.e-45], dtype=float32)
    """
    with np.errstate(over="ignore"):
        rounded = numbers.astype(np.float32)
        return np.where(rounded < numbers, np.nextafter(rounded, np.float32(np.inf)), rounded)
