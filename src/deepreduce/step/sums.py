"""Sparse tensors added up, cut and joined along their positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from math import prod
from typing import Any

import numpy as np

from .. import ragged
from ..tensor import Positions, Shape, SparseTensor, Support, Values
from .arrays import HOST

_LARGE = 1 << 14


def scaled(tensor: SparseTensor, factor: float) -> SparseTensor:
    """Return the tensor times a factor, in the accumulation dtype.

    >>> scaled(SparseTensor([2], np.float16([3]), (4,)), 0.5).values
    array([1.5], dtype=float32)
    """
    values = HOST.to_accumulation_dtype(tensor.values)
    return SparseTensor.trusted(tensor.support, values if factor == 1 else values * values.dtype.type(factor), tensor.shape)


def divided(tensor: SparseTensor, divisor: int) -> SparseTensor:
    """Return the tensor divided by a number, in the accumulation dtype."""
    values = HOST.to_accumulation_dtype(tensor.values)
    return SparseTensor.trusted(tensor.support, values if divisor == 1 else values / values.dtype.type(divisor), tensor.shape)


def combined(parts: Sequence[SparseTensor]) -> SparseTensor:
    """Return the sum of sparse tensors of one shape, without the elements that cancel out; finite where all are.

    >>> combined([SparseTensor([1, 5], np.float32([1, 2]), (6,)), SparseTensor([1, 3], np.float32([-1, 4]), (6,))]).indices
    array([3, 5])
    """
    indices = np.concatenate([part.indices for part in parts])
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], np.concatenate([part.values for part in parts])[order]
    starts = np.flatnonzero(np.diff(indices, prepend=-1))
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.add.reduceat(values, starts) if starts.size else values
    if np.isinf(sums).any():
        finite = np.logical_and.reduceat(np.isfinite(values), starts)
        np.copyto(sums, np.copysign(np.finfo(sums.dtype).max, sums), where=np.isinf(sums) & finite)
    left = np.flatnonzero(sums)
    return SparseTensor(indices[starts][left], sums[left], parts[0].shape)


def at(tensor: SparseTensor, positions: Positions) -> SparseTensor:
    """Return the elements of a sparse tensor at these positions, which increase; those it does not hold are left out.

    >>> at(SparseTensor([1, 5], np.float32([7, 8]), (9,)), np.array([0, 5])).values
    array([8.], dtype=float32)
    """
    held = np.isin(tensor.indices, positions, assume_unique=True)
    return SparseTensor(tensor.indices[held], tensor.values[held], tensor.shape)


def without(tensor: SparseTensor, positions: Positions) -> SparseTensor:
    """Return the elements of a sparse tensor at all other positions."""
    held = ~np.isin(tensor.indices, positions, assume_unique=True)
    return SparseTensor(tensor.indices[held], tensor.values[held], tensor.shape)


def is_finite(parts: Sequence[SparseTensor]) -> bool:
    """Return whether there is no NaN and no infinity in any of these."""
    small: dict[np.dtype[Any], list[Values]] = {}
    for part in parts:
        if part.values.size < _LARGE:
            small.setdefault(part.values.dtype, []).append(part.values)
        elif not np.logical_and.reduce(np.isfinite(part.values)):
            return False
    together = map(np.isfinite, map(ragged.joined, small.values()))  # as each call costs more than their numbers
    return all(map(np.logical_and.reduce, together))


def union(parts: Sequence[SparseTensor]) -> Support:
    """Return the positions that any of these has.

    >>> union([SparseTensor([0, start, 99], np.ones(3, np.float32), (100,)) for start in (10, 20)])
    Support([0, 10, 20, 99], numel=100)
    """
    largest = max(parts, key=lambda part: part.nnz).support
    if len(parts) == 1 or largest.is_all:
        return largest
    positions = np.sort(np.concatenate([part.indices for part in parts]), kind="stable")  # sorted runs: they are only merged
    return Support.trusted(positions[np.flatnonzero(np.diff(positions, prepend=-1))], largest.numel)


# Ranges


def bounds(numel: int, count: int) -> list[int]:
    """Return where `count` ranges of nearly the same size begin and end.

    >>> bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [numel * index // count for index in range(count + 1)]


def range_shape(shape: Shape, low: int, high: int) -> Shape:
    """Return the shape of a range: whole rows where it falls so, as index codecs make use of the shape.

    >>> range_shape((8, 3, 3), 18, 36), range_shape((7, 3), 5, 10)
    ((2, 3, 3), (5,))
    """
    row = prod(shape[1:]) if shape else 1
    whole = len(shape) > 1 and row > 0 and low % row == 0 and high % row == 0
    return ((high - low) // row, *shape[1:]) if whole else (high - low,)


def between(tensor: SparseTensor, low: int, high: int, shape: Shape) -> SparseTensor:
    """Return the part of a sparse tensor from position `low` to `high`, in this shape."""
    if tensor.support.is_all:
        return SparseTensor.trusted(Support.all(high - low), tensor.values[low:high], shape)
    first, last = np.searchsorted(tensor.indices, [low, high])
    return SparseTensor.trusted(Support.trusted(tensor.indices[first:last] - low, high - low), tensor.values[first:last], shape)


def split(tensor: SparseTensor, shapes: Sequence[Shape]) -> list[SparseTensor]:
    """Return the tensors of these shapes that were put one after another.

    >>> split(SparseTensor([1, 5], np.float32([1, 2]), (6,)), [(2, 2), (2,)])[1].indices
    array([1])
    """
    if [tensor.shape] == list(shapes):
        return [tensor]
    ends = np.cumsum([prod(shape) for shape in shapes]).tolist()
    return [between(tensor, end - prod(shape), end, shape) for shape, end in zip(shapes, ends, strict=True)]


def joined(columns: Sequence[Sequence[SparseTensor]], shapes: Sequence[Shape]) -> list[SparseTensor]:
    """Return the tensors of these shapes, the ranges of which follow one another in the parts of each column.

    >>> halves = [SparseTensor([1], np.float32([5]), (2,)), SparseTensor([0], np.float32([6]), (2,))]
    >>> joined([halves], [(2, 2)])[0].indices
    array([1, 2])
    """
    parts = list(chain.from_iterable(columns))
    if len(columns) > 1 and (any(part.support.is_all for part in parts) or len({part.dtype for part in parts}) > 1):
        return [joined([column], [shape])[0] for column, shape in zip(columns, shapes, strict=True)]
    values = np.concatenate([part.values for part in parts])
    if all(part.support.is_all for part in parts):
        return [SparseTensor.trusted(Support.all(values.size), values, shapes[0])]
    positions = np.concatenate([part.support.positions for part in parts])
    starts = [start for column in columns for start in accumulate([part.numel for part in column[:-1]], initial=0)]
    positions += np.repeat(starts, [part.nnz for part in parts])
    ends = ragged.bounds_of([sum([part.nnz for part in column]) for column in columns])
    supports = map(Support.trusted, ragged.cut(positions, ends), map(prod, shapes))
    return list(map(SparseTensor.trusted, supports, ragged.cut(values, ends), shapes))
