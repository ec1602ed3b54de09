"""Owners: ranks that add up what others send for a tensor, or for a range of it, and send the sum to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..indices.seeded import Seeded
from ..tensor import SparseTensor, Support
from . import items, sums
from .arrays import arrays_of
from .frame import Failure
from .items import Item
from .residual import Gradient, ResidualMemory
from .trip import Trip


@dataclass(frozen=True)
class Owner:
    """What a rank makes of the messages it was sent for the tensors it owns."""

    tensors: Sequence[Item]
    compensated: Sequence[Gradient]
    blob: bytes
    owned: ResidualMemory | None

    @classmethod
    def reduce(cls, tensors: Sequence[Item], received: Sequence[memoryview], trip: Trip, allowed: Sequence[int | None]) -> Owner | Failure:
        """Return the mean of what was received, plus the residual of this owner, as one message; or why there is none."""
        try:
            with trip.watch("decode"):
                by_rank = [items.decode(blob, tensors, rank) for rank, blob in enumerate(received)]
                columns = list(zip(*by_rank, strict=True))
            with trip.watch("encode"):
                means = [_mean(column, tensor, trip.divisor) for column, tensor in zip(columns, tensors, strict=True)]
                if trip.owned is not None:
                    means = [trip.owned.compensate(tensor.name, mean) for tensor, mean in zip(tensors, means, strict=True)]
                outgoing = [_outgoing(*given) for given in zip(tensors, means, columns, allowed, strict=True)]
                return cls(outgoing, means, items.encode(outgoing, trip.seed).blob, trip.owned)
        except Exception as error:
            return Failure(error)

    def update(self, sent: Sequence[SparseTensor]) -> None:
        """Store what was not sent as the owner's residual."""
        if self.owned is not None:
            for tensor, compensated, part in zip(self.tensors, self.compensated, sent, strict=True):
                self.owned.remember(tensor.name, compensated, part)


def _mean(parts: Sequence[SparseTensor], tensor: Item, divisor: int) -> Gradient:
    if isinstance(tensor.content, SparseTensor):
        return sums.combined([sums.divided(part, divisor) for part in parts])
    return tensor.arrays.total(parts, tensor.content, divisor)


def _outgoing(tensor: Item, mean: Gradient, parts: Sequence[SparseTensor], most: int | None) -> Item:
    if isinstance(mean, SparseTensor):
        content: Gradient = SparseTensor.trusted(mean.support, arrays_of(mean.values).narrow(mean.values, tensor.dtype), mean.shape)
    else:
        content = tensor.arrays.narrow(mean, tensor.dtype)
    outgoing = Item(tensor.name, content, tensor.codec, items.source_of(content))
    return outgoing._replace(selected=_selected(outgoing, parts, most))


def _selected(tensor: Item, parts: Sequence[SparseTensor], most: int | None) -> Support:
    """What an owner sends of a sum: the positions it got, or as many of the strongest elements, and at most `most`."""
    if isinstance(tensor.codec.index, Seeded):
        drawn = np.arange(max(part.nnz for part in parts))  # as many as a rank sent are drawn again, at the same positions
        return Support.trusted(drawn, tensor.numel)
    received = sums.union(parts)
    if tensor.codec.sparsifier.lossless:
        return received
    limit = received.nnz if most is None else min(received.nnz, most)
    return tensor.source.top(limit) if limit else received
