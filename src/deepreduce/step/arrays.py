"""The seam between a training step and the place where its dense tensors live.

Only these operations touch all elements of a tensor. `HostArrays` has them for numpy arrays; an adapter adds its own for tensors of a
device by `register_arrays`, so that nothing of a gradient's size leaves the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from .. import kernels
from ..errors import InputError
from ..source import DenseSource, Source
from ..tensor import Positions, Shape, SparseTensor, Values, float_dtype

Array = Any
"""A dense tensor of some framework; its `Arrays` know how to handle it."""

_START = 1024


def accumulation_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the accumulation dtype: float32 for the half precisions.

    >>> accumulation_dtype(ml_dtypes.bfloat16), accumulation_dtype(np.float64)
    (dtype('float32'), dtype('float64'))
    """
    return np.dtype(np.float32) if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)


@lru_cache
def largest_of(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a dtype."""
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


class Arrays(ABC):
    """Operations on dense tensors. Those that end in ``_`` work in place; none of the others changes what it is given."""

    @abstractmethod
    def dtype(self, array: Array) -> np.dtype[Any]:
        """Return the numpy dtype of a tensor of floats; `InputError` for any other."""

    @abstractmethod
    def source(self, array: Array) -> Source:
        """Return the tensor as the pipeline reads it."""

    @abstractmethod
    def to_accumulation_dtype(self, array: Array) -> Array:
        """Return the tensor in the accumulation dtype: itself, if it has it."""

    @abstractmethod
    def add_scaled(self, array: Array, terms: Sequence[tuple[Array, float]], out: Array | None = None) -> Array:
        """Return array plus each term times its factor, in the accumulation dtype: a new tensor, finite where all inputs are.

        `out` is a tensor of that kind that nobody needs any more: the sum may be written to it.
        """

    @abstractmethod
    def cast_saturating(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Cast to a dtype; finite values beyond its range become its largest finite value. The tensor itself, if it has that dtype."""

    @abstractmethod
    def nonzero_where(self, array: Array, pattern: Array) -> Array:
        """Return the tensor where `pattern` is not zero, and zero elsewhere: a new one."""

    @abstractmethod
    def zeros(self, like: Array) -> Array:
        """Return zeros of the shape of a tensor, in the accumulation dtype."""

    @abstractmethod
    def add_(self, array: Array, part: SparseTensor, divisor: int = 1) -> None:
        """Add a sparse tensor divided by a number; the array is contiguous."""

    @abstractmethod
    def subtract_(self, array: Array, part: SparseTensor) -> None:
        """Subtract a sparse tensor; the array is contiguous."""

    @abstractmethod
    def clear_(self, array: Array, positions: Positions) -> None:
        """Set the elements at these positions to zero; the array is contiguous."""

    @abstractmethod
    def scale_(self, array: Array, factor: float) -> None:
        """Multiply by a factor."""

    @abstractmethod
    def assign_(self, array: Array, total: Array) -> None:
        """Write a sum over a tensor, in the dtype of the tensor."""

    @abstractmethod
    def is_zero(self, array: Array) -> bool:
        """Return whether all elements are zero."""

    @abstractmethod
    def norm(self, array: Array) -> float:
        """Return the Euclidean norm."""

    @abstractmethod
    def first_nonfinite(self, array: Array) -> SparseTensor | None:
        """Return the first element that is NaN or infinite, or None."""

    @abstractmethod
    def between(self, array: Array, low: int, high: int, shape: Shape) -> Array:
        """Return the elements from `low` to `high`, counted row by row, in this shape."""

    @abstractmethod
    def concatenate(self, arrays: Sequence[Array]) -> Array:
        """Return the elements of all tensors, one after another."""

    @abstractmethod
    def copy(self, array: Array) -> Array:
        """Return a contiguous copy."""

    @abstractmethod
    def moved(self, held: Array, like: Array) -> Array:
        """Return a tensor of any kind as one of this kind, where `like` lives."""

    def total(self, parts: Sequence[SparseTensor], like: Array, divisor: int = 1) -> Array:
        """Return the sum of sparse tensors, each divided by a number, in the order given and so with the same bits everywhere."""
        total = self.zeros(like)
        for part in parts:
            self.add_(total, part, divisor)
        return total

    def fill_(self, array: Array, parts: Sequence[SparseTensor], divisor: int) -> None:
        """Write the sum of sparse tensors, each divided by a number, over a tensor."""
        self.assign_(array, self.total(parts, array, divisor))


class HostArrays(Arrays):
    """numpy arrays.

    >>> HOST.cast_saturating(np.float32([1e6, 1]), np.dtype(np.float16))
    array([6.55e+04, 1.00e+00], dtype=float16)
    """

    def dtype(self, array: Array) -> np.dtype[Any]:
        return float_dtype(array.dtype)

    def source(self, array: Array) -> Source:
        return DenseSource(array)

    def to_accumulation_dtype(self, array: Array) -> Array:
        return array.astype(accumulation_dtype(self.dtype(array)), copy=False)

    def add_scaled(self, array: Array, terms: Sequence[tuple[Array, float]], out: Array | None = None) -> Array:
        if len(terms) == 1 and _are_plain(array, terms[0][0]):
            total = np.empty_like(array) if out is None else out
            scalar, (term, factor) = array.dtype.type, terms[0]
            flats = array.reshape(-1), term.reshape(-1), scalar(factor), scalar(largest_of(array.dtype)), total.reshape(-1)
            if kernels.scatter.plus_scaled(*flats) == 0:
                return total
        total = np.array(array, accumulation_dtype(self.dtype(array)), order="C")
        with np.errstate(over="ignore", invalid="ignore"):
            for term, factor in terms:
                total += term if factor == 1 else term * total.dtype.type(factor)
        if terms and not np.isfinite(total).all():
            finite = np.isfinite(array) & np.logical_and.reduce([np.isfinite(term) for term, _ in terms])
            np.copyto(total, np.copysign(largest_of(total.dtype), total), where=np.isinf(total) & finite)
        return total

    def cast_saturating(self, array: Array, dtype: np.dtype[Any]) -> Array:
        if array.dtype == dtype:
            return array
        largest = largest_of(dtype)
        return np.where(np.isfinite(array), np.clip(array, -largest, largest), array).astype(dtype)

    def nonzero_where(self, array: Array, pattern: Array) -> Array:
        return np.where(pattern != 0, array, array.dtype.type(0))

    def zeros(self, like: Array) -> Array:
        return np.zeros(like.shape, accumulation_dtype(self.dtype(like)))

    def add_(self, array: Array, part: SparseTensor, divisor: int = 1) -> None:
        flat, values, scalar = array.reshape(-1), part.values.astype(array.dtype, copy=False), array.dtype.type
        if part.support.nnz == array.size:
            flat += values if divisor == 1 else values / scalar(divisor)
        elif array.dtype not in _PLAIN:
            flat[part.indices] += values / scalar(divisor)
        else:
            kernels.scatter.add(flat, part.support.positions, values, scalar(divisor))

    def subtract_(self, array: Array, part: SparseTensor) -> None:
        flat, values = array.reshape(-1), part.values.astype(array.dtype, copy=False)
        if part.support.nnz == array.size:
            flat -= values
        elif array.dtype not in _PLAIN:
            flat[part.indices] -= values
        else:
            kernels.scatter.subtract(flat, part.support.positions, values)

    def clear_(self, array: Array, positions: Positions) -> None:
        array.reshape(-1)[positions] = 0

    def scale_(self, array: Array, factor: float) -> None:
        array *= array.dtype.type(factor)

    def assign_(self, array: Array, total: Array) -> None:
        array[...] = self.cast_saturating(total, array.dtype)

    def fill_(self, array: Array, parts: Sequence[SparseTensor], divisor: int) -> None:
        if array.dtype not in _PLAIN or not array.flags.c_contiguous:
            super().fill_(array, parts, divisor)
            return
        array.fill(0)
        for part in parts:
            self.add_(array, part, divisor)

    def is_zero(self, array: Array) -> bool:
        flat = array.reshape(-1) if array.flags.c_contiguous else array
        if flat.ndim == 1 and flat.size and flat[0]:
            return False
        start = flat[:_START]  # hardly ever zero in a tensor that is not, and much less to read
        return not np.logical_or.reduce(start, axis=None) and not np.any(flat)

    def norm(self, array: Array) -> float:
        return float(np.linalg.norm(array.astype(np.float64, copy=False)))

    def first_nonfinite(self, array: Array) -> SparseTensor | None:
        flat = array.reshape(-1)
        found = np.flatnonzero(~np.isfinite(flat))[:1]
        return SparseTensor(found, flat[found], array.shape) if found.size else None

    def between(self, array: Array, low: int, high: int, shape: Shape) -> Array:
        return array.reshape(-1)[low:high].reshape(shape)

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate([array.reshape(-1) for array in arrays])

    def copy(self, array: Array) -> Array:
        return np.array(array, order="C")

    def moved(self, held: Array, like: Array) -> Array:
        return np.asarray(held)


def _are_plain(array: Values, term: Values) -> bool:
    """Whether a kernel can add these two as they are. (To a compiler, memory that cannot be written is of another type.)"""
    one, other = array.flags, term.flags
    return array.dtype in _PLAIN and one.c_contiguous and one.writeable and other.c_contiguous and other.writeable


_PLAIN = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
HOST = HostArrays()


_KINDS: dict[type, Arrays] = {np.ndarray: HOST, np.generic: HOST}


def arrays_of(array: object) -> Arrays:
    """Return the operations for a tensor, by its type."""
    return _KINDS.get(type(array)) or _inherited(type(array))


def register_arrays(kind: type, arrays: Arrays) -> None:
    """Let `arrays_of` return these operations for tensors of a type and of its subclasses; adapters register theirs."""
    _KINDS[kind] = arrays


def _inherited(kind: type) -> Arrays:
    for base in kind.__mro__:
        if base in _KINDS:
            return _KINDS.setdefault(kind, _KINDS[base])
    raise InputError(f"a gradient is a numpy array or a tensor of a framework whose adapter is imported, got {kind.__name__}")
