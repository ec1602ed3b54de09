"""The seam between the walk and the place where a gradient lives.

Only a few steps touch all `numel` elements: selecting, Bloom membership and gathering. They are methods of a `Source` (a gradient) and
of its `Space` (the positions it has), so that a tensor on another device runs them there; codecs see the kept elements only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .errors import InputError
from .tensor import Positions, Shape, SparseTensor, Values, float_dtype


@dataclass(frozen=True)
class Space:
    """The positions of a tensor of this shape, flat and row-major.

    >>> Space((64, 3, 3)).numel
    576
    """

    shape: Shape

    @property
    def numel(self) -> int:
        """Number of positions."""
        return prod(self.shape)

    def members(self, packed: NDArray[np.uint8], hashes: int, salt: int, at_most: int) -> Positions:
        """The first `at_most` positions that a Bloom filter holds, increasing, on the host; `kernels.bloom` defines the hash."""
        return kernels.bloom.members(packed, hashes, salt, self.numel, at_most)


class Source(ABC):
    """A gradient as the sparsifiers and the walk see it. All positions come back increasing."""

    space: Space
    dtype: np.dtype[Any]

    @property
    def numel(self) -> int:
        """Number of elements of the dense gradient."""
        return self.space.numel

    @abstractmethod
    def all(self) -> Positions:
        """Every position that is given: all of a dense gradient, the stored ones of a sparse one."""

    @abstractmethod
    def nonzero(self) -> Positions:
        """Positions whose bits are not all zero (so -0.0 is kept, and a round trip is exact)."""

    @abstractmethod
    def top(self, count: int) -> Positions:
        """The `count` largest magnitudes, ties by position; NaN and Inf are always among them, even if they are more than `count`."""

    @abstractmethod
    def above(self, threshold: float) -> Positions:
        """Positions with a magnitude of at least `threshold`, and NaN."""

    @abstractmethod
    def chunk_top(self, chunk: int, count: int) -> Positions:
        """`top` inside every run of `chunk` consecutive positions."""

    @abstractmethod
    def gather(self, positions: Positions) -> Values:
        """The values at these positions as a new host array; zero where a sparse gradient stores none."""


class DenseSource(Source):
    """A numpy array. It is read, never written; made contiguous only if it is not."""

    def __init__(self, array: Values) -> None:
        self.space = Space(array.shape)
        self.dtype = float_dtype(array.dtype)
        self._flat = np.ascontiguousarray(array, self.dtype).reshape(-1)
        self._bits = self._flat.view(f"u{self.dtype.itemsize}")

    def all(self) -> Positions:
        return np.arange(self.numel, dtype=np.int64)

    def nonzero(self) -> Positions:
        return kernels.selection.at_least(self._bits, kernels.selection.ALL_BITS[self.dtype.itemsize], 1)

    def top(self, count: int) -> Positions:
        return kernels.selection.top(self._bits, self.dtype, count)

    def above(self, threshold: float) -> Positions:
        return kernels.selection.above(self._bits, self.dtype, threshold)

    def chunk_top(self, chunk: int, count: int) -> Positions:
        bounds = np.append(np.arange(0, self.numel, chunk), self.numel)
        return kernels.selection.top_between(self._bits, self.dtype, bounds, count)

    def gather(self, positions: Positions) -> Values:
        return self._flat[positions]


class SparseSource(Source):
    """A `SparseTensor`: selecting works on its stored values."""

    def __init__(self, tensor: SparseTensor) -> None:
        self.space = Space(tensor.shape)
        self.dtype = tensor.dtype
        self._indices = tensor.indices
        self._stored = DenseSource(tensor.values)

    def all(self) -> Positions:
        return self._indices

    def nonzero(self) -> Positions:
        return self._indices[self._stored.nonzero()]

    def top(self, count: int) -> Positions:
        return self._indices[self._stored.top(count)]

    def above(self, threshold: float) -> Positions:
        return self._indices[self._stored.above(threshold)]

    def chunk_top(self, chunk: int, count: int) -> Positions:
        starts = np.flatnonzero(np.diff(self._indices // chunk, prepend=-1))
        bounds = np.append(starts, self._indices.size)
        return self._indices[kernels.selection.top_between(self._stored._bits, self.dtype, bounds, count)]

    def gather(self, positions: Positions) -> Values:
        found = np.searchsorted(self._indices, positions)
        found[found == self._indices.size] = 0
        values = np.zeros(positions.size, self.dtype)
        if self._indices.size:
            hit = self._indices[found] == positions
            values[hit] = self._stored.gather(found[hit])
        return values


class Selected(Source):
    """A gradient of which positions were selected before: the sparsifier `none` selects these; lossy index codecs see the rest."""

    def __init__(self, source: Source, selected: Positions) -> None:
        self.space, self.dtype = source.space, source.dtype
        self._source, self._selected = source, selected

    def all(self) -> Positions:
        return self._selected

    def nonzero(self) -> Positions:
        return self._source.nonzero()

    def top(self, count: int) -> Positions:
        return self._source.top(count)

    def above(self, threshold: float) -> Positions:
        return self._source.above(threshold)

    def chunk_top(self, chunk: int, count: int) -> Positions:
        return self._source.chunk_top(chunk, count)

    def gather(self, positions: Positions) -> Values:
        return self._source.gather(positions)


def as_source(gradient: object) -> Source:
    """The source for what a user gave."""
    if isinstance(gradient, Source):
        return gradient
    if isinstance(gradient, SparseTensor):
        return SparseSource(gradient)
    if isinstance(gradient, np.ndarray | np.generic):
        return DenseSource(np.asarray(gradient))
    raise InputError(f"a gradient is a numpy array or a SparseTensor, got {type(gradient).__name__}")
