"""Gradients and what they owe, on the host: dense arrays, and the touched rows of an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..steps import narrow, wide_dtype
from ..tensor import Positions, Shape, SparseTensor, Values


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense gradient with what is owed added to it."""

    wide: Values
    owed: Values | None
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, gradient: Values, owed: Values | None) -> Dense:
        """Add what is owed, in a dtype to add up in; nothing is changed."""
        wide = gradient.astype(wide_dtype(gradient.dtype), copy=False)
        return cls(wide if owed is None else wide + owed, owed, gradient.dtype)

    @property
    def content(self) -> Values:
        """What is to be sent."""
        return narrow(self.wide, self.dtype)

    def total(self, parts: Sequence[SparseTensor]) -> list[Values]:
        """The sum of what all workers sent, in their order and so with the same bits everywhere."""
        total = np.zeros(self.wide.shape, self.wide.dtype)
        for part in parts:
            total.reshape(-1)[part.indices] += part.values.astype(total.dtype, copy=False)
        return [narrow(total, self.dtype)]

    def rest(self, sent: SparseTensor | None) -> list[Values]:
        """What is owed after this was sent; None for a step that is lost."""
        if self.owed is None or sent is None:
            return [] if self.owed is None else [self.owed]
        rest = self.wide.copy()
        rest.reshape(-1)[sent.indices] -= sent.values.astype(rest.dtype, copy=False)
        return [rest]


@dataclass(frozen=True, eq=False)
class Rows:
    """The touched rows of a gradient, each once, with what these rows are owed. The debt of other rows waits until they are touched."""

    rows: Positions
    wide: Values
    owed: Values | None
    shape: Shape
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, values: Values, indices: Positions, owed: Values | None, shape: Shape) -> Rows:
        """The rows of an `IndexedSlices`, whose duplicates are summed.

        >>> Rows.of(np.float32([[1, 1], [2, 2], [4, 4]]), np.array([3, 0, 3]), None, (5, 2)).content.values
        array([2., 2., 5., 5.], dtype=float32)
        """
        rows, places = np.unique(indices.astype(np.int64), return_inverse=True)
        wide = np.zeros((rows.size, *shape[1:]), wide_dtype(values.dtype))
        np.add.at(wide, places, values.astype(wide.dtype, copy=False))
        return cls(rows, wide if owed is None else wide + owed[rows], owed, shape, values.dtype)

    @property
    def content(self) -> SparseTensor:
        """What is to be sent."""
        width = prod(self.shape[1:])
        positions = (self.rows[:, None] * width + np.arange(width)).reshape(-1)
        return SparseTensor(positions, narrow(self.wide.reshape(-1), self.dtype), self.shape)

    def total(self, parts: Sequence[SparseTensor]) -> list[Values]:
        """The rows of which any worker sent something, and their sums."""
        rows = np.unique(np.concatenate([self._rows_of(part) for part in parts]))
        total = np.zeros((rows.size, *self.shape[1:]), self.wide.dtype)
        for part in parts:
            total.reshape(-1)[self._places(part, rows)] += part.values.astype(total.dtype, copy=False)
        return [rows, narrow(total, self.dtype)]

    def rest(self, sent: SparseTensor | None) -> list[Values]:
        """The rows whose debt changed, and what they are owed now; a lossy index codec may have sent something of untouched rows."""
        if self.owed is None or sent is None:
            return [] if self.owed is None else [self.rows[:0], self.owed[:0]]
        rows = np.union1d(self.rows, self._rows_of(sent))
        rest = self.owed[rows]
        rest[np.searchsorted(rows, self.rows)] = self.wide
        rest.reshape(-1)[self._places(sent, rows)] -= sent.values.astype(rest.dtype, copy=False)
        return [rows, rest]

    def _rows_of(self, part: SparseTensor) -> Positions:
        return part.indices // max(1, prod(self.shape[1:]))

    def _places(self, part: SparseTensor, rows: Positions) -> Positions:
        """Where the elements of a part lie among these rows alone."""
        width = max(1, prod(self.shape[1:]))
        places: Positions = np.searchsorted(rows, self._rows_of(part)) * width + part.indices % width
        return places
