"""The seam between the walk and the place where a gradient lives.

Only a few steps touch all `numel` elements: selecting, Bloom membership and gathering. They are methods of a `Source` (a gradient) and
of its `Space` (the positions it has), so that a tensor on another device runs them there; codecs see the selected elements only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import kernels, ragged
from .errors import InputError
from .tensor import Positions, Shape, SparseTensor, Support, Values, float_dtype


class Space:
    """The positions of a tensor of this shape, flat and row-major.

    >>> Space((64, 3, 3)).numel
    576
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.numel = prod(shape)

    def members(self, packed: NDArray[np.uint8], hashes: int, salt: int, at_most: int) -> Positions:
        """The first `at_most` positions that a Bloom filter holds, increasing, on the host; `kernels.bloom` defines the hash."""
        return kernels.bloom.members(packed, hashes, salt, self.numel, at_most)


class Source(ABC):
    """A gradient as the sparsifiers and the walk see it."""

    space: Space
    dtype: np.dtype[Any]

    @property
    def numel(self) -> int:
        """Number of elements of the dense gradient."""
        return self.space.numel

    @abstractmethod
    def all(self) -> Support:
        """Every position that is given: all of a dense gradient, the stored ones of a sparse one."""

    @abstractmethod
    def nonzero(self) -> Support:
        """Positions of what is not zero; -0.0 is zero, NaN is not."""

    @abstractmethod
    def top(self, count: int) -> Support:
        """The `count` largest magnitudes, ties by position; NaN and Inf are always among them, even if they are more than `count`."""

    @abstractmethod
    def above(self, threshold: float) -> Support:
        """Positions with a magnitude of at least `threshold`, and NaN."""

    @abstractmethod
    def chunk_top(self, chunk: int, count: int) -> Support:
        """`top` inside every run of `chunk` consecutive positions."""

    @abstractmethod
    def gather(self, support: Support) -> Values:
        """The values at these positions as a host array; zero where a sparse gradient stores none.

        It may share its memory with the gradient, so it must not be written to.
        """


_NOTHING = np.empty(0)
_BITS: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


class DenseSource(Source):
    """A numpy array. It is read, never written; made contiguous only if it is not."""

    def __init__(self, array: Values) -> None:
        self._gathered: tuple[Support | None, Values] = None, _NOTHING  # what `top` saw of the elements that it selected
        self.space = Space(array.shape)
        self.dtype = float_dtype(array.dtype)
        self._flat = np.ascontiguousarray(array, self.dtype).reshape(-1)
        self._bits = self._flat.view(_BITS[self.dtype.itemsize])

    def all(self) -> Support:
        return Support.all(self.numel)

    def nonzero(self) -> Support:
        return self._selected(kernels.selection.at_least(self._bits, kernels.selection.MAGNITUDE[self.dtype.itemsize], 1))

    def top(self, count: int) -> Support:
        if count >= self.space.numel:
            return self.all()
        positions, found = kernels.selection.top_found(self._bits, self.dtype, count)
        selected = Support.trusted(positions, self.space.numel)
        self._gathered = selected, found.view(self.dtype)
        return selected

    def above(self, threshold: float) -> Support:
        return self._selected(kernels.selection.above(self._bits, self.dtype, threshold))

    def chunk_top(self, chunk: int, count: int) -> Support:
        bounds = np.append(np.arange(0, self.numel, chunk), self.numel)
        return self._selected(kernels.selection.top_between(self._bits, self.dtype, bounds, count))

    def gather(self, support: Support) -> Values:
        if support is self._gathered[0]:
            return self._gathered[1]
        if not support.is_all:
            return self._flat[support.positions]
        # To a compiler of kernels, memory that cannot be written is another type: it would compile all of them once more.
        return self._flat if self._flat.flags.writeable else self._flat.copy()

    def _selected(self, positions: Positions) -> Support:
        return Support.trusted(positions, self.space.numel)


class SparseSource(Source):
    """A `SparseTensor`: selecting works on its stored values."""

    def __init__(self, tensor: SparseTensor) -> None:
        self.space = Space(tensor.shape)
        self.dtype = tensor.dtype
        self._support = tensor.support
        self._stored = DenseSource(tensor.values)

    def all(self) -> Support:
        return self._support

    def nonzero(self) -> Support:
        return self._selected(self._stored.nonzero())

    def top(self, count: int) -> Support:
        return self._selected(self._stored.top(count))

    def above(self, threshold: float) -> Support:
        return self._selected(self._stored.above(threshold))

    def chunk_top(self, chunk: int, count: int) -> Support:
        indices = self._support.positions
        bounds = np.append(np.flatnonzero(np.diff(indices // chunk, prepend=-1)), indices.size)
        stored = kernels.selection.top_between(self._stored._bits, self.dtype, bounds, count)
        return self._selected(Support.trusted(stored, indices.size))

    def gather(self, support: Support) -> Values:
        if support is self._support or (support.is_all and self._support.is_all):
            return self._stored.gather(self._stored.all())
        indices, positions = self._support.positions, support.positions
        found = np.searchsorted(indices, positions)
        found[found == indices.size] = 0
        values = np.zeros(positions.size, self.dtype)
        if indices.size:
            hit = indices[found] == positions
            values[hit] = self._stored._flat[found[hit]]
        return values

    def _selected(self, stored: Support) -> Support:
        """The positions of some of the stored values, given by their numbers."""
        return self._support if stored.is_all else Support.trusted(self._support.positions[stored.positions], self.numel)


def as_source(gradient: object) -> Source:
    """The source for what a user gave."""
    if isinstance(gradient, Source):
        return gradient
    if isinstance(gradient, SparseTensor):
        return SparseSource(gradient)
    if isinstance(gradient, np.ndarray | np.generic):
        return DenseSource(np.asarray(gradient))
    raise InputError(f"a gradient is a numpy array or a SparseTensor, got {type(gradient).__name__}")


def top_batch(sources: Sequence[Source], counts: Sequence[int]) -> list[Support]:
    """`top` of many gradients, with a count for each."""
    if len(sources) == 1:
        return [sources[0].top(counts[0])]
    wanted = np.array(counts)
    return _select_batch(
        sources,
        lambda index: sources[index].top(counts[index]),
        lambda bits, dtype, bounds, group: kernels.selection.top_ragged(bits, dtype, bounds, wanted[group]),
    )


def above_batch(sources: Sequence[Source], threshold: float) -> list[Support]:
    """`above` of many gradients."""
    return _select_batch(
        sources,
        lambda index: sources[index].above(threshold),
        lambda bits, dtype, bounds, group: kernels.selection.above_ragged(bits, dtype, bounds, threshold),
    )


def chunk_top_batch(sources: Sequence[Source], chunk: int, count: int) -> list[Support]:
    """`chunk_top` of many gradients."""
    return _select_batch(
        sources,
        lambda index: sources[index].chunk_top(chunk, count),
        lambda bits, dtype, bounds, group: kernels.selection.chunk_top_ragged(bits, dtype, bounds, chunk, count),
    )


_Ragged = Callable[[Values, np.dtype[Any], Positions, list[int]], tuple[Positions, Positions]]


def _select_batch(sources: Sequence[Source], alone: Callable[[int], Support], together: _Ragged) -> list[Support]:
    """Select from small gradients of one dtype in one call of a kernel for ragged arrays, and from every other one alone."""
    if len(sources) == 1:
        return [alone(0)]
    supports = [None if _is_small(source) else alone(index) for index, source in enumerate(sources)]
    for dtype in {source.dtype for source, support in zip(sources, supports, strict=True) if support is None}:
        group = [index for index, support in enumerate(supports) if support is None and sources[index].dtype == dtype]
        bits = [sources[index]._bits for index in group]  # type: ignore[attr-defined]
        positions, ends = together(ragged.joined(bits), dtype, ragged.bounds_of([own.size for own in bits]), group)
        for index, own in zip(group, ragged.cut(positions, ends), strict=True):
            supports[index] = Support.trusted(own, sources[index].numel)
    return [support for support in supports if support is not None]


def _is_small(source: Source) -> bool:
    return type(source) is DenseSource and 0 < source.space.numel < kernels.selection.SMALL
