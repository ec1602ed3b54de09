"""The means that stand for many values, at the beginning of a section."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import CorruptError
from ..reader import Reader
from ..tensor import Values
from .floats import peak
from .raw import RawValue


def mean_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which means of values of a dtype travel."""
    return dtype if dtype.itemsize == 2 else np.dtype(np.float32)


def read_means(part: Reader, count: int, dtype: np.dtype[Any]) -> Values:
    """Return means in the dtype of the values; they must be finite."""
    means = RawValue().decode(part, count, mean_dtype(dtype))
    if not peak(means) < np.inf:
        raise CorruptError("a mean is not finite")
    return means.astype(dtype, copy=False)
