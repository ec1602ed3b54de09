"""SparseTensor: positions, values and a shape, checked once."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .parameters import shown

Shape = tuple[int, ...]
Positions = NDArray[np.int64]
Values = NDArray[Any]

FLOAT_DTYPES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


def float_dtype(dtype: Any, what: str = "gradient") -> np.dtype[Any]:
    """The native-endian form of a supported dtype.

    >>> float_dtype(">f4")
    dtype('float32')
    """
    native: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    if native not in FLOAT_DTYPES:
        raise InputError(f"a {what} holds float16, bfloat16, float32 or float64, got {np.dtype(dtype)}")
    return native


def _shape(given: Any) -> Shape:
    try:
        if not isinstance(given, list | tuple | np.ndarray):
            raise TypeError(type(given))
        shape = tuple(operator.index(n) for n in given)
    except TypeError as error:
        raise InputError(f"a shape is a tuple of whole numbers, got {shown(given)}") from error
    if any(n < 0 for n in shape):
        raise InputError(f"sizes are not negative, got shape {shown(given)}")
    if prod(max(n, 1) for n in shape) >= 2**63:
        raise InputError(f"a tensor has fewer than 2**63 elements, got shape {shown(given)}")
    return shape


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """Some elements of a tensor: flat row-major positions, increasing and unique, and one value for each.

    The arrays are kept as given where they already fit (no copy) and are never written to.

    >>> tensor = SparseTensor([1, 5], np.float32([0.5, -2]), shape=(2, 3))
    >>> tensor.to_dense()
    array([[ 0. ,  0.5,  0. ],
           [ 0. ,  0. , -2. ]], dtype=float32)
    """

    indices: Positions
    values: Values
    shape: Shape

    def __post_init__(self) -> None:
        indices, values = np.asarray(self.indices), np.asarray(self.values)
        if indices.size and indices.dtype.kind not in "iu":
            raise InputError(f"indices are integers, got {indices.dtype}")
        if indices.dtype == np.uint64 and indices.size and int(indices.max()) >= 2**63:
            raise InputError(f"indices lie below 2**63, got {int(indices.max())}")
        object.__setattr__(self, "indices", indices.astype(np.int64, copy=False))
        object.__setattr__(self, "values", values.astype(float_dtype(values.dtype, "sparse tensor"), copy=False))
        object.__setattr__(self, "shape", _shape(self.shape))
        self._check()

    def _check(self) -> None:
        indices, values = self.indices, self.values
        if indices.ndim != 1 or values.shape != indices.shape:
            raise InputError(f"need as many indices as values, got {indices.shape} and {values.shape}")
        if indices.size and not (indices[0] >= 0 and indices[-1] < self.numel):
            raise InputError(f"indices run from {indices[0]} to {indices[-1]}, allowed are 0 to {self.numel - 1}")
        if indices.size > 1 and not bool(np.all(indices[1:] > indices[:-1])):
            raise InputError("indices must increase and be unique (SparseTensor.from_unsorted sorts them)")

    @classmethod
    def from_unsorted(cls, indices: Any, values: Any, shape: Shape) -> SparseTensor:
        """The same from positions in any order; duplicates are refused.

        >>> SparseTensor.from_unsorted([5, 1], np.float32([-2, 0.5]), (6,)).indices
        array([1, 5])
        """
        indices, values = np.asarray(indices), np.asarray(values)
        if indices.ndim == 1 and indices.shape == values.shape and not bool(np.all(indices[1:] > indices[:-1])):
            order = np.argsort(indices, kind="stable")
            indices, values = indices[order], values[order]
        return cls(indices, values, shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def numel(self) -> int:
        """Number of elements of the dense tensor."""
        return prod(self.shape)

    @property
    def nnz(self) -> int:
        """Number of elements that are kept."""
        return self.indices.size

    def to_dense(self) -> Values:
        """The dense tensor, zero elsewhere: a new array."""
        if self.nnz == self.numel:
            return self.values.reshape(self.shape).copy()
        dense = np.zeros(self.numel, self.dtype)
        dense[self.indices] = self.values
        return dense.reshape(self.shape)
