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
from .exchange import ExchangeContext
from .frame import Failure
from .items import EncodedMessage, OutgoingTensor
from .residual import Gradient, ResidualMemory


@dataclass(frozen=True)
class Owner:
    """What a rank makes of the messages it was sent for the tensors it owns."""

    message: EncodedMessage
    compensated: Sequence[Gradient]
    owned: ResidualMemory | None

    @classmethod
    def reduce(
        cls, own: EncodedMessage, received: Sequence[memoryview], context: ExchangeContext, allowed: Sequence[int | None]
    ) -> Owner | Failure:
        """Return the mean of what was received, plus the residual of this owner, as one message; or why there is none."""
        try:
            with context.watch("decode"):
                messages = items.read_all(received, [own.tensors] * len(received), own)
                columns = list(zip(*items.decode(messages, context.threads), strict=True))
            with context.watch("encode"):
                means = [_mean(column, tensor, context.divisor) for column, tensor in zip(columns, own.tensors, strict=True)]
                if context.owned is not None:
                    means = [context.owned.compensate(tensor.name, mean) for tensor, mean in zip(own.tensors, means, strict=True)]
                outgoing = list(map(_outgoing, own.tensors, means))
                supports = zip(outgoing, _selected(outgoing, columns, allowed), strict=True)
                selected = [tensor._replace(selected=support) for tensor, support in supports]
                return cls(items.encode([selected], context.seed, context.threads)[0], means, context.owned)
        except Exception as error:
            return Failure(error)

    def update(self, sent: Sequence[SparseTensor]) -> None:
        """Store what was not sent as the owner's residual."""
        if self.owned is not None:
            for tensor, compensated, part in zip(self.message.tensors, self.compensated, sent, strict=True):
                self.owned.update_(tensor.name, compensated, part)


def _mean(parts: Sequence[SparseTensor], tensor: OutgoingTensor, divisor: int) -> Gradient:
    if isinstance(tensor.content, SparseTensor):
        return sums.combined([sums.divided(part, divisor) for part in parts])
    return tensor.arrays.total(parts, tensor.content, divisor)


def _outgoing(tensor: OutgoingTensor, mean: Gradient) -> OutgoingTensor:
    """The mean in the dtype of the tensor; it is sent even where this rank did not use the tensor itself."""
    if isinstance(mean, SparseTensor):
        values = arrays_of(mean.values).cast_saturating(mean.values, tensor.dtype)
        content: Gradient = SparseTensor.trusted(mean.support, values, mean.shape)
    else:
        content = tensor.arrays.cast_saturating(mean, tensor.dtype)
    return OutgoingTensor(tensor.name, content, tensor.codec, items.step_source(content))


def _selected(tensors: Sequence[OutgoingTensor], columns: Sequence[Sequence[SparseTensor]], allowed: Sequence[int | None]) -> list[Support]:
    """What an owner sends of each sum: the positions it got, or as many of the strongest elements, and at most as many as allowed."""
    counts = list(map(_count, tensors, columns, allowed))
    strongest = [(tensor.source, count) for tensor, count in zip(tensors, counts, strict=True) if count]
    found = iter(top_batch(*zip(*strongest, strict=True)) if strongest else ())
    return [next(found) if count else _received(tensor, parts) for tensor, parts, count in zip(tensors, columns, counts, strict=True)]


def _count(tensor: OutgoingTensor, parts: Sequence[SparseTensor], most: int | None) -> int:
    """How many of the strongest elements are sent; 0 for the positions that were received."""
    if tensor.codec.sparsifier.lossless or isinstance(tensor.codec.index, Seeded):
        return 0
    if most is not None and most <= max(part.nnz for part in parts):
        return most
    received = sums.union(parts).nnz
    return received if most is None else min(received, most)


def _received(tensor: OutgoingTensor, parts: Sequence[SparseTensor]) -> Support:
    if isinstance(tensor.codec.index, Seeded):
        drawn = np.arange(max(part.nnz for part in parts))  # as many as a rank sent are drawn again, at the same positions
        return Support.trusted(drawn, tensor.numel)
    return sums.union(parts)
