"""Owners: ranks that add up what others send for a tensor, or for a range of it, and send the sum to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..indices.seeded import Seeded
from ..source import top_batch
from ..tensor import SparseTensor, Support
from . import items, sums
from .arrays import arrays_of
from .frame import Failure
from .items import Encoded, Item
from .residual import Gradient, ResidualMemory
from .trip import Trip


@dataclass(frozen=True)
class Owner:
    """What a rank makes of the messages it was sent for the tensors it owns."""

    message: Encoded
    compensated: Sequence[Gradient]
    owned: ResidualMemory | None

    @classmethod
    def reduce(cls, own: Encoded, received: Sequence[memoryview], trip: Trip, allowed: Sequence[int | None]) -> Owner | Failure:
        """Return the mean of what was received, plus the residual of this owner, as one message; or why there is none."""
        try:
            with trip.watch("decode"):
                columns = list(zip(*items.decode(items.read_all(received, [own.items] * len(received), own)), strict=True))
            with trip.watch("encode"):
                means = [_mean(column, tensor, trip.divisor) for column, tensor in zip(columns, own.items, strict=True)]
                if trip.owned is not None:
                    means = [trip.owned.compensate(tensor.name, mean) for tensor, mean in zip(own.items, means, strict=True)]
                outgoing = list(map(_outgoing, own.items, means))
                supports = zip(outgoing, _selected(outgoing, columns, allowed), strict=True)
                selected = [tensor._replace(selected=support) for tensor, support in supports]
                return cls(items.encode([selected], trip.seed)[0], means, trip.owned)
        except Exception as error:
            return Failure(error)

    def update(self, sent: Sequence[SparseTensor]) -> None:
        """Store what was not sent as the owner's residual."""
        if self.owned is not None:
            for tensor, compensated, part in zip(self.message.items, self.compensated, sent, strict=True):
                self.owned.remember(tensor.name, compensated, part)


def _mean(parts: Sequence[SparseTensor], tensor: Item, divisor: int) -> Gradient:
    if isinstance(tensor.content, SparseTensor):
        return sums.combined([sums.divided(part, divisor) for part in parts])
    return tensor.arrays.total(parts, tensor.content, divisor)


def _outgoing(tensor: Item, mean: Gradient) -> Item:
    """The mean in the dtype of the tensor; it is sent even where this rank did not use the tensor itself."""
    if isinstance(mean, SparseTensor):
        content: Gradient = SparseTensor.trusted(mean.support, arrays_of(mean.values).narrow(mean.values, tensor.dtype), mean.shape)
    else:
        content = tensor.arrays.narrow(mean, tensor.dtype)
    return Item(tensor.name, content, tensor.codec, items.source_of(content))


def _selected(tensors: Sequence[Item], columns: Sequence[Sequence[SparseTensor]], allowed: Sequence[int | None]) -> list[Support]:
    """What an owner sends of each sum: the positions it got, or as many of the strongest elements, and at most as many as allowed."""
    counts = list(map(_count, tensors, columns, allowed))
    strongest = [(tensor.source, count) for tensor, count in zip(tensors, counts, strict=True) if count]
    found = iter(top_batch(*zip(*strongest, strict=True)) if strongest else ())
    return [next(found) if count else _received(tensor, parts) for tensor, parts, count in zip(tensors, columns, counts, strict=True)]


def _count(tensor: Item, parts: Sequence[SparseTensor], most: int | None) -> int:
    """How many of the strongest elements are sent; 0 for the positions that were received."""
    if tensor.codec.sparsifier.lossless or isinstance(tensor.codec.index, Seeded):
        return 0
    if most is not None and most <= max(part.nnz for part in parts):
        return most
    received = sums.union(parts).nnz
    return received if most is None else min(received, most)


def _received(tensor: Item, parts: Sequence[SparseTensor]) -> Support:
    if isinstance(tensor.codec.index, Seeded):
        drawn = np.arange(max(part.nnz for part in parts))  # as many as a rank sent are drawn again, at the same positions
        return Support.trusted(drawn, tensor.numel)
    return sums.union(parts)
