"""The tensors of one message between ranks: encoded together, and decoded as what was expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from .. import message
from ..errors import CorruptError, DeepReduceError, FormatError
from ..indices.all import All
from ..indices.seeded import Seeded
from ..message import Record
from ..pipeline import DeepReduce, decode_batch, encode_batch, parse
from ..source import Source, Space, SparseSource
from ..tensor import Shape, SparseTensor, Support, as_support
from .arrays import Array, Arrays, arrays_of
from .seeds import StepSeed

LITERAL = parse("none/raw/raw")
"""Sends the stored elements of a sparse tensor as they are."""


@dataclass(frozen=True, eq=False)
class Item:
    """One tensor of a message and its codec. `selected` fixes the positions beforehand; an `idle` tensor is zero, and nothing is sent."""

    name: str
    content: Array | SparseTensor
    codec: DeepReduce
    selected: Support | None = None
    idle: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return tuple(self.content.shape)

    @property
    def numel(self) -> int:
        """The number of elements of the dense tensor."""
        return prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tensor, as numpy calls it."""
        return self.content.dtype if isinstance(self.content, SparseTensor) else self.arrays.dtype(self.content)

    @property
    def arrays(self) -> Arrays:
        """The operations for the content, which is dense."""
        return arrays_of(self.content)

    @property
    def source(self) -> Source:
        """The tensor as the pipeline reads it."""
        return self.source_of(self.content)

    @staticmethod
    def source_of(content: Array | SparseTensor) -> Source:
        """Return a tensor as the pipeline reads it."""
        return SparseSource(content) if isinstance(content, SparseTensor) else arrays_of(content).source(content)

    @property
    def space_of(self) -> Callable[[Shape], Space]:
        """How positions are enumerated where the tensor lives."""
        return Space if isinstance(self.content, SparseTensor) else self.arrays.space_of(self.content)

    def seed(self, seed: StepSeed) -> int:
        """Return the seed of this tensor; where positions follow from it, all ranks share it, so that their sum has no more."""
        return seed.of(self.name, shared=isinstance(self.codec.index, Seeded))

    def select(self, seed: StepSeed) -> Support:
        """Return the positions that the sparsifier selects."""
        return as_support(self.codec.sparsifier.select(self.source, self.seed(seed)), self.numel)

    def to_send(self) -> tuple[DeepReduce, Source, Support | None]:
        """Return the codec, the source and what was selected of it, for the pipeline.

        Of an idle tensor nothing is sent. A NaN or an infinity reaches every rank, whatever the sparsifier: where it might select none of
        them, only the first one is sent, as the step is lost anyhow.
        """
        if self.idle:
            return LITERAL, SparseSource(SparseTensor(np.empty(0, np.int64), np.empty(0, self.dtype), self.shape)), None
        if not self._sends_nonfinite and (nonfinite := self._first_nonfinite()) is not None:
            return LITERAL, SparseSource(nonfinite), None
        return self.codec, self.source, self.selected

    @property
    def _sends_nonfinite(self) -> bool:
        """Whether every NaN and infinity is always among what the reader sees."""
        return self.codec.sparsifier.selects_nonfinite and (self.codec.index.lossless or isinstance(self.codec.index, All))

    def _first_nonfinite(self) -> SparseTensor | None:
        if not isinstance(self.content, SparseTensor):
            return self.arrays.first_nonfinite(self.content)
        found = np.flatnonzero(~np.isfinite(self.content.values))[:1]
        return SparseTensor(self.content.indices[found], self.content.values[found], self.shape) if found.size else None


@dataclass(frozen=True, eq=False)
class Encoded:
    """The items of a message, what each of them became, and the bytes of all of it."""

    items: Sequence[Item]
    records: Sequence[Record]
    blob: bytes

    def decoded(self, rank: int) -> list[SparseTensor]:
        """Return what every reader of this message of `rank` sees."""
        return _decoded(self.records, self.items, rank)


def encode(items: Sequence[Item], seed: StepSeed) -> Encoded:
    """Return one message. Its tensors are named by their index: parameter names would cost more than some of the tensors."""
    to_send = []
    for item in items:
        with naming(item.name):
            to_send.append(item.to_send())
    codecs, sources, selected = zip(*to_send, strict=True) if to_send else ((), (), ())
    records = encode_batch(codecs, sources, [item.seed(seed) for item in items], [item.name for item in items], selected)
    return Encoded(items, records, message.write(records, _names(len(records))))


def decode(blob: memoryview, items: Sequence[Item], sender: int) -> list[SparseTensor]:
    """Return the tensors of a message, which must be for these items. An error names the rank and the tensor."""
    try:
        records = _read(blob, items)
    except FormatError as error:
        raise type(error)(f"message of rank {sender} for {summary([item.name for item in items])}: {error}") from error
    return _decoded(records, items, sender)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Let an error of deepreduce name the tensor, and keep its type; any other error gets a note.

    >>> from deepreduce import InputError
    >>> with naming("layer.weight"):
    ...     raise InputError("QSGD takes float values, got int32")
    Traceback (most recent call last):
        ...
    deepreduce.errors.InputError: layer.weight: QSGD takes float values, got int32
    """
    try:
        yield
    except DeepReduceError as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        error.add_note(f"while sending {name}")
        raise


def summary(names: Sequence[str]) -> str:
    """Return a few names for an error message.

    >>> summary(["a", "b", "c", "d"])
    'a, b and 2 more'
    """
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _read(blob: memoryview, items: Sequence[Item]) -> Sequence[Record]:
    limit = sum(prod(max(n, 1) for n in item.shape) for item in items)
    received = message.read(blob, max_numel=limit)
    if received.names != _names(len(items)):
        raise CorruptError(f"it is not for the {len(items)} tensor(s) {summary([item.name for item in items])}")
    for item, record in zip(items, received.records, strict=True):
        if (record.shape, record.dtype) != (item.shape, item.dtype):
            raise CorruptError(f"{item.name} is {record.dtype} of shape {record.shape}, here {item.dtype} of shape {item.shape}")
    return received.records


def _decoded(records: Sequence[Record], items: Sequence[Item], sender: int) -> list[SparseTensor]:
    names = [f"{item.name} of rank {sender}" for item in items]
    return decode_batch(records, [item.space_of for item in items], names)


def _names(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
