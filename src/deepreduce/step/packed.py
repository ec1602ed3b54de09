"""The small gradients of a bucket in one flat array, so that one call serves all of them.

For a model of hundreds of small tensors, calls cost more than elements. Residuals stay what they are elsewhere, an array for each name: the
arrays of small ones are parts of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import kernels, ragged
from ..source import DenseSource, Source
from ..tensor import Positions, SparseTensor, Values
from .arrays import Array, largest_of

SMALL = 1 << 15
_DTYPE = np.dtype(np.float32)
_LARGEST = np.float32(largest_of(_DTYPE))


@dataclass(eq=False)
class Flat:
    """Arrays of float32 one after another in memory: the whole of it, each of them, and each as the pipeline reads it."""

    whole: Values
    parts: list[Values]
    sources: list[DenseSource]

    @classmethod
    def like(cls, arrays: Sequence[Values], bounds: Positions) -> Flat:
        """Return room for arrays of these shapes."""
        whole, shapes = np.empty(bounds[-1], _DTYPE), [array.shape for array in arrays]
        parts = [part.reshape(shape) for part, shape in zip(ragged.cut(whole, bounds), shapes, strict=True)]
        return cls(whole, parts, DenseSource.between(whole, bounds, shapes))


class Compensated(NamedTuple):
    """A gradient plus its residual, in the accumulation dtype; what is sent of it, in its own dtype; and whether it was not used."""

    total: Array | SparseTensor
    content: Array | SparseTensor
    source: Source
    is_unused: bool


@dataclass(eq=False)
class Packed:
    """Small gradients plus their residuals: which gradients of the bucket these are, and which of them were not used in this step."""

    indices: Sequence[int]
    names: tuple[str, ...]
    bounds: Positions
    compensated: Flat
    unused: Sequence[bool]
    means: Flat
    """Memory for the means."""

    def compensated_of(self, gradients: Sequence[Array | SparseTensor]) -> list[Compensated]:
        """Return the small ones of these gradients, compensated.

        Of one that was not used, the total is its residual alone, and its zeros are the content.
        """
        totals = self.compensated.parts
        contents: list[Array | SparseTensor] = list(totals)
        for at in np.flatnonzero(self.unused).tolist():
            contents[at] = gradients[self.indices[at]]
        return list(map(Compensated, totals, contents, self.compensated.sources, self.unused))

    def fill_(self, gradients: Sequence[Any], parts: Sequence[Sequence[SparseTensor]], divisor: int) -> None:
        """Write the means over the small ones among these gradients: the sums of their parts, each divided by a number."""
        self.means.whole.fill(0)
        for column in zip(*map(parts.__getitem__, self.indices), strict=True):
            kernels.scatter.add_ragged(self.means.whole, self.bounds, *_joined(column), np.float32(divisor))
        for index, mean in zip(self.indices, self.means.parts, strict=True):
            gradients[index][...] = mean

    def subtract_(self, sent: Sequence[SparseTensor]) -> None:
        """Leave what was not sent."""
        kernels.scatter.add_ragged(self.compensated.whole, self.bounds, *_joined(sent), np.float32(-1))


@dataclass(eq=False)
class Residuals:
    """The residuals of the small gradients of one bucket, and memory for the next ones."""

    bounds: Positions
    held: Flat
    spare: Flat
    gradients: Flat
    """Memory for the gradients of a step, side by side, and then for their means."""

    @classmethod
    def of(cls, held: Sequence[Values | None], like: Sequence[Values]) -> Residuals:
        """Return residuals that are known, or zero where there is none yet."""
        bounds = ragged.bounds_of([array.size for array in like])
        residuals = cls(bounds, *(Flat.like(like, bounds) for _ in range(3)))
        for own, known in zip(residuals.held.parts, held, strict=True):
            own[...] = 0 if known is None else known
        return residuals

    def compensate(self, indices: Sequence[int], names: tuple[str, ...], gradients: Sequence[Values], decay: float) -> Packed | None:
        """Return gradients plus residuals times `decay`; None where shapes differ, or a sum of finite numbers might not be finite."""
        if [gradient.shape for gradient in gradients] != [held.shape for held in self.held.parts]:
            return None
        np.concatenate([gradient.reshape(-1) for gradient in gradients], out=self.gradients.whole)
        unused = np.empty(len(names), np.bool_)
        given: tuple[Any, ...] = self.bounds, np.float32(decay), _LARGEST, self.spare.whole, unused
        if kernels.scatter.compensate_ragged(self.gradients.whole, self.held.whole, *given):
            return None
        return Packed(indices, names, self.bounds, self.spare, unused.tolist(), self.gradients)

    def replace(self, compensated: Flat) -> None:
        """Take over what is left of the compensated gradients."""
        self.held, self.spare = compensated, self.held


def small_ones(gradients: Sequence[Array | SparseTensor]) -> list[int]:
    """Return which gradients are small arrays of float32 in the order of memory."""
    return [
        index
        for index, gradient in enumerate(gradients)
        if type(gradient) is np.ndarray and gradient.dtype == _DTYPE and 0 < gradient.size < SMALL and gradient.flags.c_contiguous
    ]


def _joined(tensors: Sequence[SparseTensor]) -> tuple[Positions, Positions, Values]:
    """The positions of all tensors that have not all, where the values of each tensor end, and all values."""
    positions = [tensor.support.positions for tensor in tensors if tensor.support.nnz < tensor.support.numel]
    values = [tensor.values for tensor in tensors]
    return ragged.joined(positions or [_NONE]), ragged.bounds_of(list(map(len, values))), ragged.joined(values)


_NONE = np.empty(0, np.int64)
