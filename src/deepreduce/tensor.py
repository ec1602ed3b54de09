"""Supports and sparse tensors: checked once, where they enter."""

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
_NATIVE = frozenset(FLOAT_DTYPES)


def float_dtype(dtype: Any, what: str = "gradient") -> np.dtype[Any]:
    """The native-endian form of a supported dtype.

    >>> float_dtype(">f4")
    dtype('float32')
    """
    if isinstance(dtype, np.dtype) and dtype in _NATIVE:
        return dtype
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


class Support:
    """Some positions of a tensor of `numel` elements: all of them, or an int64 array, increasing and unique.

    It is checked when it is made, and never again. The array is kept as given where it already fits (no copy) and never written to.

    >>> Support([1, 5], numel=6).positions
    array([1, 5])
    >>> Support.all(10**15).nnz
    1000000000000000
    >>> Support([5, 1], numel=6)
    Traceback (most recent call last):
        ...
    deepreduce.errors.InputError: indices must increase and be unique (SparseTensor.from_unsorted sorts them)
    """

    __slots__ = ("_positions", "nnz", "numel")

    numel: int
    nnz: int

    def __init__(self, positions: Any, numel: int) -> None:
        array = _int64(positions)
        if not _increases(array):
            raise InputError("indices must increase and be unique (SparseTensor.from_unsorted sorts them)")
        self.numel, self.nnz = numel, _in_range(array, numel).size
        self._positions = None if self.nnz == numel else array

    @classmethod
    def all(cls, numel: int) -> Support:
        """Every position; no array is made for them."""
        return cls.trusted(None, numel)

    @classmethod
    def none(cls, numel: int) -> Support:
        """No position."""
        return cls.trusted(np.empty(0, np.int64), numel)

    @classmethod
    def trusted(cls, positions: Positions | None, numel: int) -> Support:
        """A support of positions that are known to be int64, increasing and in range, as selections are: nothing is looked at."""
        support = object.__new__(cls)
        support.numel = numel
        support.nnz = nnz = numel if positions is None else positions.size
        support._positions = None if nnz == numel else positions  # increasing and in range, so many are all
        return support

    @classmethod
    def sorting(cls, positions: Any, numel: int) -> tuple[Support, Positions | None]:
        """The support of positions in any order, and the order that sorts them; None where they increase already. Refuses duplicates."""
        array = _int64(positions)
        if _increases(array):
            return cls.trusted(_in_range(array, numel), numel), None
        order = np.argsort(array, kind="stable")
        return cls(array[order], numel), order

    @property
    def is_all(self) -> bool:
        """Whether it is every position."""
        return self.nnz == self.numel

    @property
    def positions(self) -> Positions:
        """The positions as an array; for all of them a new one at every call."""
        return np.arange(self.numel, dtype=np.int64) if self._positions is None else self._positions

    def __repr__(self) -> str:
        return f"Support.all({self.numel})" if self.is_all else f"Support({shown(self.positions.tolist())}, numel={self.numel})"


def as_support(positions: Support | Positions, numel: int) -> Support:
    """The support that a codec returned, or the support of the array that it returned, which is checked."""
    if not isinstance(positions, Support):
        return Support(positions, numel)
    if positions.numel != numel:
        raise InputError(f"a support of a tensor of {positions.numel} elements, not {numel}")
    return positions


def _int64(positions: Any) -> Positions:
    array = np.asarray(positions)
    if array.ndim != 1:
        raise InputError(f"indices are a flat array, got one of shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"indices are integers, got {array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise InputError(f"indices lie below 2**63, got {int(array.max())}")
    return array.astype(np.int64, copy=False)


def _increases(array: Positions) -> bool:
    return bool(np.all(array[1:] > array[:-1]))


def _in_range(array: Positions, numel: int) -> Positions:
    if array.size and not (array[0] >= 0 and array[-1] < numel):
        raise InputError(f"indices run from {array[0]} to {array[-1]}, allowed are 0 to {numel - 1}")
    return array


_put = object.__setattr__


@dataclass(frozen=True, eq=False, init=False, slots=True)
class SparseTensor:
    """Some elements of a tensor: flat row-major positions, increasing and unique, and one value for each.

    The arrays are kept as given where they already fit (no copy) and are never written to. `indices` may be a `Support`.

    >>> tensor = SparseTensor([1, 5], np.float32([0.5, -2]), shape=(2, 3))
    >>> tensor.to_dense()
    array([[ 0. ,  0.5,  0. ],
           [ 0. ,  0. , -2. ]], dtype=float32)
    """

    support: Support
    values: Values
    shape: Shape

    def __init__(self, indices: Any, values: Any, shape: Shape) -> None:
        shape, values = _shape(shape), np.asarray(values)
        native = values.astype(float_dtype(values.dtype, "sparse tensor"), copy=False)
        shape_of_indices = (indices.nnz,) if isinstance(indices, Support) else np.shape(indices)
        if len(shape_of_indices) != 1 or values.shape != shape_of_indices:
            raise InputError(f"need as many indices as values, got {shape_of_indices} and {values.shape}")
        _put(self, "support", as_support(indices, prod(shape)))
        _put(self, "values", native)
        _put(self, "shape", shape)

    @classmethod
    def trusted(cls, support: Support, values: Values, shape: Shape) -> SparseTensor:
        """A tensor of parts that are known to fit each other: nothing is looked at."""
        tensor = object.__new__(cls)
        _put(tensor, "support", support)
        _put(tensor, "values", values)
        _put(tensor, "shape", shape)
        return tensor

    @classmethod
    def from_unsorted(cls, indices: Any, values: Any, shape: Shape) -> SparseTensor:
        """The same from positions in any order; duplicates are refused.

        >>> SparseTensor.from_unsorted([5, 1], np.float32([-2, 0.5]), (6,)).indices
        array([1, 5])
        """
        values = np.asarray(values)
        if np.shape(indices) != values.shape or values.ndim != 1:
            return cls(indices, values, shape)  # refuses it
        support, order = Support.sorting(indices, prod(_shape(shape)))
        return cls(support, values if order is None else values[order], shape)

    @property
    def indices(self) -> Positions:
        """The positions as an array; where they are all, a new one at every call."""
        return self.support.positions

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def numel(self) -> int:
        """Number of elements of the dense tensor."""
        return self.support.numel

    @property
    def nnz(self) -> int:
        """Number of elements that are stored."""
        return self.support.nnz

    def to_dense(self) -> Values:
        """The dense tensor, zero elsewhere: a new array."""
        if self.support.is_all:
            return self.values.reshape(self.shape).copy()
        dense = np.zeros(self.numel, self.dtype)
        dense[self.support.positions] = self.values
        return dense.reshape(self.shape)
