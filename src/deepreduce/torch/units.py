"""One tensor of a message: between a gradient and the walk of the core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from ..message import Record
from ..pipeline import DeepReduce
from ..source import Source, SparseSource
from ..sparsify.none import Keep
from ..steps import LITERAL, Seed
from ..tensor import Positions, Shape, SparseTensor, Support, Values, as_support
from .source import numpy_dtype, source_of

Content = torch.Tensor | SparseTensor
"""What is sent of a gradient: a dense tensor on any device, or the stored part of a sparse one."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One tensor of a message, its codec, and a number of its own for the seed; `kept` fixes the positions beforehand."""

    label: str
    number: int
    content: Content
    codec: DeepReduce
    kept: Positions | None = None

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return tuple(self.content.shape)

    @property
    def numel(self) -> int:
        """Elements of the dense tensor."""
        return prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tensor, as numpy calls it."""
        return self.content.dtype if isinstance(self.content, SparseTensor) else numpy_dtype(self.content.dtype)

    @property
    def device(self) -> torch.device:
        """Where the tensor lives."""
        return torch.device("cpu") if isinstance(self.content, SparseTensor) else self.content.device

    def seed(self, seed: Seed) -> int:
        """The seed of this tensor."""
        return seed.of(self.number, self.codec)

    def select(self, seed: Seed) -> Positions:
        """What the sparsifier keeps."""
        return as_support(self.codec.sparsifier.select(as_source(self.content), self.seed(seed)), self.numel).positions

    def record(self, seed: Seed) -> Record:
        """The tensor as part of a message.

        If there is a NaN or an Inf in it, only the first of them is sent: every rank sees it, whatever the sparsifier, and the step is
        lost anyhow. Of a tensor that is zero throughout, nothing is sent.
        """
        exception = _exception(self.content)
        if exception is not None:
            return LITERAL.record(SparseSource(exception), 0)
        source = as_source(self.content)
        if self.kept is None:
            return self.codec.record(source, self.seed(seed))
        codec = replace(self.codec, sparsifier=Keep())
        return codec.record(Preselected(source, self.kept), self.seed(seed))


def as_source(content: Content) -> Source:
    """The gradient as the walk of the core sees it."""
    return SparseSource(content) if isinstance(content, SparseTensor) else source_of(content)


def _exception(content: Content) -> SparseTensor | None:
    """What is sent in place of a tensor that is zero, or not finite; None for an ordinary one."""
    if isinstance(content, SparseTensor):
        strange = np.flatnonzero(~np.isfinite(content.values))[:1]
        return SparseTensor(content.indices[strange], content.values[strange], content.shape) if strange.size else None
    if content.numel() == 0:
        return None
    low, high = (float(bound) for bound in torch.aminmax(content))
    shape, dtype = tuple(content.shape), numpy_dtype(content.dtype)
    if low == high == 0:
        return SparseTensor(np.empty(0, np.int64), np.empty(0, dtype), shape)
    if np.isfinite(low) and np.isfinite(high):
        return None
    flat = content.reshape(-1)
    first = int(torch.isfinite(flat).logical_not().to(torch.uint8).argmax())
    return SparseTensor(np.array([first]), np.array([float(flat[first])], dtype), shape)


class Preselected(Source):
    """A gradient of which `kept` was selected before: that is all there is for the sparsifier `none`. Lossy index codecs see the rest."""

    def __init__(self, source: Source, kept: Positions) -> None:
        self.space, self.dtype = source.space, source.dtype
        self._source, self._kept = source, kept

    def all(self) -> Support:
        return Support.trusted(self._kept, self.numel)

    def nonzero(self) -> Support:
        return self._source.nonzero()

    def top(self, count: int) -> Support:
        return self._source.top(count)

    def above(self, threshold: float) -> Support:
        return self._source.above(threshold)

    def chunk_top(self, chunk: int, count: int) -> Support:
        return self._source.chunk_top(chunk, count)

    def gather(self, support: Support) -> Values:
        return self._source.gather(support)
