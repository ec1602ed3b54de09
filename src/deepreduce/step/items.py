"""The tensors of one message between ranks: encoded together, and decoded as what was expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from .. import message
from ..errors import CorruptError, FormatError
from ..indices.seeded import Seeded
from ..message import Record
from ..pipeline import DeepReduce, decode_batch, encode_batch, parse, raise_named
from ..source import DenseSource, Source, Space, SparseSource
from ..tensor import Shape, SparseTensor, Support
from .arrays import Array, Arrays, arrays_of
from .seeds import StepSeed

LITERAL = parse("none/raw/raw")
"""Sends the stored elements of a sparse tensor as they are."""


class Item(NamedTuple):
    """One tensor of a message and its codec. `selected` fixes the positions beforehand; an `idle` tensor is zero, and nothing is sent."""

    name: str
    content: Array | SparseTensor
    codec: DeepReduce
    source: Source
    """The content as the pipeline reads it."""
    selected: Support | None = None
    idle: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return self.source.space.shape

    @property
    def numel(self) -> int:
        """The number of elements of the dense tensor."""
        return self.source.space.numel

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tensor, as numpy calls it."""
        return self.source.dtype

    @property
    def arrays(self) -> Arrays:
        """The operations for the content, which is dense."""
        return arrays_of(self.content)

    def holding(self, content: Array | SparseTensor, selected: Support | None = None) -> Item:
        """Return an item of the same name and codec for another tensor, which is not idle if it was not."""
        return Item(self.name, content, self.codec, source_of(content), selected, self.idle)

    def seed(self, seed: StepSeed) -> int:
        """Return the seed of this tensor; where positions follow from it, all ranks share it, so that their sum has no more."""
        return seed.of(self.name, shared=type(self.codec.index) is Seeded)

    def to_send(self) -> tuple[DeepReduce, Source, Support | None]:
        """Return the codec, the source and what was selected of it, for the pipeline.

        Of an idle tensor nothing is sent. A NaN or an infinity reaches every rank, whatever the sparsifier: where it might select none of
        them, only the first one is sent, as the step is lost anyhow.
        """
        if self.idle:
            return LITERAL, SparseSource(SparseTensor(np.empty(0, np.int64), np.empty(0, self.dtype), self.shape)), None
        if not self.codec.sends_nonfinite and (nonfinite := self._first_nonfinite()) is not None:
            return LITERAL, SparseSource(nonfinite), None
        return self.codec, self.source, self.selected

    def _first_nonfinite(self) -> SparseTensor | None:
        if not isinstance(self.content, SparseTensor):
            return self.arrays.first_nonfinite(self.content)
        found = np.flatnonzero(~np.isfinite(self.content.values))[:1]
        return SparseTensor(self.content.indices[found], self.content.values[found], self.shape) if found.size else None


@dataclass(frozen=True, eq=False)
class Encoded:
    """A message: the items it is for, what each of them became, the bytes of all of it, and the rank that made it."""

    items: Sequence[Item]
    records: Sequence[Record]
    blob: bytes | memoryview
    sender: int


def source_of(content: Array | SparseTensor) -> Source:
    """Return a tensor as the pipeline reads it."""
    if type(content) is np.ndarray:
        return DenseSource(content)
    return SparseSource(content) if isinstance(content, SparseTensor) else arrays_of(content).source(content)


def select(items: Sequence[Item], seed: StepSeed) -> list[Support]:
    """Return the positions that the sparsifiers select, of those of one codec and dtype together; none of an idle tensor."""
    groups: dict[tuple[int, np.dtype[Any]], list[Item]] = {}
    for item in items:
        if not item.idle:
            groups.setdefault((id(item.codec), item.dtype), []).append(item)
    found: dict[int, Support] = {}
    for group in groups.values():
        selected = group[0].codec.sparsifier.select_batch([item.source for item in group], [item.seed(seed) for item in group])
        found.update(zip(map(id, group), selected, strict=True))
    return [Support.none(item.numel) if item.idle else found[id(item)] for item in items]


def encode(groups: Sequence[Sequence[Item]], seed: StepSeed) -> list[Encoded]:
    """Return a message of each group of items, all encoded together.

    Tensors are named by their index: parameter names would cost more than some of the tensors.
    """
    codecs, sources, selected, seeds, names = [], [], [], [], [""]
    try:
        for item in chain.from_iterable(groups):
            names.append(item.name)
            codec, source, support = item.to_send()
            codecs.append(codec)
            sources.append(source)
            selected.append(support)
            seeds.append(item.seed(seed))
    except Exception as error:
        raise_named(error, names[-1])
    records, messages = iter(encode_batch(codecs, sources, seeds, names[1:], selected)), []
    for group in groups:
        own = list(islice(records, len(group)))
        messages.append(Encoded(group, own, message.write(own, _names(len(own))), seed.rank))
    return messages


def decode(messages: Sequence[Encoded]) -> list[list[SparseTensor]]:
    """Return the tensors of each message, all decoded together. An error names the rank and the tensor."""
    records: list[Record] = []
    names: list[str] = []
    spaces: list[Space] = []
    for each in messages:
        records += each.records
        spaces += map(_SPACE, each.items)
        names += map(f"{{0.name}} of rank {each.sender}".format, each.items)
    tensors, rows = iter(decode_batch(records, spaces, names)), []
    for each in messages:
        rows.append(list(islice(tensors, len(each.items))))
    return rows


def read_all(blobs: Sequence[memoryview], expected: Sequence[Sequence[Item]], own: Encoded) -> list[Encoded]:
    """Return the messages of all ranks, each of which must be for its items. The rank's own message is at hand: it is not read again."""
    messages = []
    for sender, (blob, items) in enumerate(zip(blobs, expected, strict=True)):
        messages.append(own if sender == own.sender else read(blob, items, sender))
    return messages


def read(blob: memoryview, items: Sequence[Item], sender: int) -> Encoded:
    """Return the message of a rank, which must be for these items."""
    try:
        return Encoded(items, _read(blob, items), blob, sender)
    except FormatError as error:
        raise type(error)(f"message of rank {sender} for {summary([item.name for item in items])}: {error}") from error


def summary(names: Sequence[str]) -> str:
    """Return a few names for an error message.

    >>> summary(["a", "b", "c", "d"])
    'a, b and 2 more'
    """
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _read(blob: memoryview, items: Sequence[Item]) -> Sequence[Record]:
    received = message.read(blob, max_numel=sum([item.numel for item in items]), max_tensors=len(items))
    if received.names != _names(len(items)):
        raise CorruptError(f"it is not for the {len(items)} tensor(s) {summary([item.name for item in items])}")
    for item, record in zip(items, received.records, strict=True):
        if (record.shape, record.dtype) != (item.shape, item.dtype):
            raise CorruptError(f"{item.name} is {record.dtype} of shape {record.shape}, here {item.dtype} of shape {item.shape}")
    return received.records


_SPACE: Callable[[Item], Space] = attrgetter("source.space")


@lru_cache(maxsize=64)
def _names(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
