"""The seam between the encoding pipeline and the device where a gradient lives.

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
    """A gradient as sparsifiers and the encoding pipeline see it."""

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

    def keep(self, support: Support, values: Values) -> None:
        """Take these as the values at a support, where `gather` would read them once more."""
        return None


_NOTHING = np.empty(0)
_BITS: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


class DenseSource(Source):
    """A numpy array. It is read, never written; made contiguous only if it is not."""

    def __init__(self, array: Values) -> None:
        self._gathered: tuple[Support | None, Values] = None, _NOTHING  # what was selected, and the values there
        self.space = Space(array.shape)
        self.dtype = float_dtype(array.dtype)
        self._flat = np.ascontiguousarray(array, self.dtype).reshape(-1)
        self._bits = self._flat.view(_BITS[self.dtype.itemsize])
        self._memory, self._start = self._bits, 0  # an array in which the bits lie from here on, for `_joined`

    @classmethod
    def between(cls, memory: Values, bounds: Positions, shapes: Sequence[Shape]) -> list[DenseSource]:
        """Return sources of the arrays that lie between two bounds each in one flat array: what is done for many of them copies nothing."""
        bits = memory.view(_BITS[memory.itemsize])
        sources = [cls(own.reshape(shape)) for own, shape in zip(ragged.cut(memory, bounds), shapes, strict=True)]
        for source, start in zip(sources, bounds.tolist()[:-1], strict=True):
            source._memory, source._start = bits, start
        return sources

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

    def keep(self, support: Support, values: Values) -> None:
        self._gathered = support, values

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
    supports: dict[int, Support] = {}
    groups: dict[np.dtype[Any], list[int]] = {}
    for index, source in enumerate(sources):
        if type(source) is DenseSource and 0 < source.space.numel < kernels.selection.SMALL:
            groups.setdefault(source.dtype, []).append(index)
        else:
            supports[index] = alone(index)
    for dtype, group in groups.items():
        members: list[Any] = list(map(sources.__getitem__, group))
        bits, bounds = _joined(members)
        positions, ends = together(bits, dtype, bounds, group)
        found = bits[positions + np.repeat(bounds[:-1], np.diff(ends))].view(dtype)
        for index, source, own, values in zip(group, members, ragged.cut(positions, ends), ragged.cut(found, ends), strict=True):
            supports[index] = selected = Support.trusted(own, source.space.numel)
            source._gathered = selected, values
    return list(map(supports.__getitem__, range(len(sources))))


def _joined(sources: Sequence[DenseSource]) -> tuple[Values, Positions]:
    """The bits of these gradients one after another, and their bounds; no copy where they lie so."""
    bounds = ragged.bounds_of([source.space.numel for source in sources])
    memory, start = sources[0]._memory, sources[0]._start
    starts = [source._start for source in sources if source._memory is memory]
    if len(starts) == len(sources) and np.array_equal(starts, start + bounds[:-1]):
        return memory[start : start + bounds[-1]], bounds
    return np.concatenate([source._bits for source in sources]), bounds
