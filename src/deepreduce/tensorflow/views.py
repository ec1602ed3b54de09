"""Gradients and residuals of TensorFlow as a step sees them: host arrays, and the touched rows of an embedding as sparse tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..step.arrays import HOST, accumulation_dtype
from ..step.reducer import ErrorFeedback
from ..step.residual import Gradient, ResidualMemory
from ..tensor import Positions, Shape, SparseTensor, Values


@dataclass(frozen=True)
class Slot:
    """What the graph knows of a gradient beforehand, and so which arrays it gives and takes.

    It gives the gradient, as values and row indices if it is `sliced`; its residual; and the residual of the range that this replica owns.
    """

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    sliced: bool
    has_residual: bool
    has_owned: bool

    def take(self, arrays: list[Any]) -> View:
        """Return this gradient, from the front of the list."""
        values = arrays.pop(0)
        gradient = touched_rows(values, arrays.pop(0), self.shape) if self.sliced else values
        residual = arrays.pop(0) if self.has_residual else None
        return View(self, gradient, residual, arrays.pop(0) if self.has_owned else None)


@dataclass(frozen=True, eq=False)
class View:
    """A gradient and the variables that belong to it, which are never written to. `owned` has room for the largest range of any rank."""

    slot: Slot
    gradient: Gradient
    residual: Values | None
    owned: Values | None

    def load_residuals(self, memory: ErrorFeedback, owned_numel: int) -> None:
        """Give the memory the residuals; of an embedding those of the touched rows, so that those of all other rows wait."""
        if self.residual is not None and memory.own is not None:
            memory.own.residuals[self.slot.name] = self._touched(self.residual)
        if self.owned is not None and memory.owned is not None and owned_numel:
            held = np.array(self.owned[:owned_numel])
            memory.owned.residuals[self.slot.name] = _sparse(held) if self.slot.sliced else held

    def _touched(self, residual: Values) -> Gradient:
        if isinstance(self.gradient, SparseTensor):
            return SparseTensor.trusted(self.gradient.support, residual.reshape(-1)[self.gradient.indices], self.gradient.shape)
        return np.array(residual)

    def results(self, total: Gradient, memory: ErrorFeedback) -> list[Values]:
        """Return what the graph takes: the sum, and the residuals from now on; rows for an embedding."""
        found = slices(total, self.slot.dtype) if isinstance(total, SparseTensor) else [total]
        if self.residual is not None:
            found += self._kept(self.residual, _held(memory.own, self.slot.name))
        return found if self.owned is None else [*found, self._kept_owned(self.owned, _held(memory.owned, self.slot.name))]

    def _kept(self, residual: Values, after: Any) -> list[Values]:
        """The residual, or its rows that changed; a lossy index codec may have sent something of rows that were not touched."""
        if not (isinstance(after, SparseTensor) and isinstance(self.gradient, SparseTensor)):
            return [after]
        width = _width(self.slot.shape)
        rows = np.union1d(self.gradient.indices // width, after.indices // width)
        changed = residual[rows]
        flat = changed.reshape(-1)
        flat[_offsets(self.gradient.indices, rows, width)] = 0
        flat[_offsets(after.indices, rows, width)] += after.values
        return [rows, changed]

    def _kept_owned(self, owned: Values, after: Any) -> Values:
        if after is None:
            return owned
        kept = np.zeros_like(owned)
        if isinstance(after, SparseTensor):
            kept[after.indices] = after.values
        else:
            kept[: after.size] = after.reshape(-1)
        return kept


def touched_rows(values: Values, indices: Positions, shape: Shape) -> SparseTensor:
    """Return the rows of an `IndexedSlices`, whose duplicates are summed.

    >>> touched_rows(np.float32([[1, 1], [2, 2], [4, 4]]), np.array([3, 0, 3]), (5, 2)).values
    array([2., 2., 5., 5.], dtype=float32)
    """
    rows, inverse = np.unique(indices.astype(np.int64), return_inverse=True)
    total = np.zeros((rows.size, *shape[1:]), accumulation_dtype(values.dtype))
    np.add.at(total, inverse, values.astype(total.dtype, copy=False))
    width = prod(shape[1:])
    positions = (rows[:, None] * width + np.arange(width)).reshape(-1)
    return SparseTensor(positions, HOST.cast_saturating(total.reshape(-1), values.dtype), shape)


def slices(tensor: SparseTensor, dtype: np.dtype[Any]) -> list[Values]:
    """Return the indices of the rows that a sparse tensor has something of, and these rows.

    >>> slices(SparseTensor([4, 5, 9], np.float32([1, 2, 3]), (5, 2)), np.dtype(np.float32))
    [array([2, 4]), array([[1., 2.],
           [0., 3.]], dtype=float32)]
    """
    width = _width(tensor.shape)
    rows = np.unique(tensor.indices // width)
    values = np.zeros((rows.size, *tensor.shape[1:]), dtype)
    values.reshape(-1)[_offsets(tensor.indices, rows, width)] = HOST.cast_saturating(tensor.values, dtype)
    return [rows, values]


def _width(shape: Shape) -> int:
    return max(1, prod(shape[1:]))


def _offsets(positions: Positions, rows: Positions, width: int) -> Positions:
    """Return the positions in an array that has these rows only."""
    offsets: Positions = np.searchsorted(rows, positions // width) * width + positions % width
    return offsets


def _sparse(flat: Values) -> SparseTensor:
    found = np.flatnonzero(flat)
    return SparseTensor(found, flat[found], flat.shape)


def _held(memory: ResidualMemory | None, name: str) -> Any:
    return None if memory is None else memory.residuals.get(name)
