"""The tensors of one message between ranks: encoded together, and decoded as what was expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
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
from .threads import ONE_THREAD, Threads

AS_STORED = parse("none/raw/raw")
"""Sends the stored elements of a sparse tensor as they are."""


class OutgoingTensor(NamedTuple):
    """One tensor of a message and its codec. `selected` fixes the positions beforehand; one that `is_unused` is zero, and not sent."""

    name: str
    content: Array | SparseTensor
    codec: DeepReduce
    source: Source
    """The content as the pipeline reads it."""
    selected: Support | None = None
    is_unused: bool = False

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

    def holding(self, content: Array | SparseTensor, selected: Support | None = None) -> OutgoingTensor:
        """Return another tensor with this name, codec and `is_unused`."""
        return OutgoingTensor(self.name, content, self.codec, step_source(content), selected, self.is_unused)

    def seed(self, seed: StepSeed) -> int:
        """Return the seed of this tensor; where positions follow from it, all ranks share it, so that their sum has no more."""
        return seed.of(self.name, shared=type(self.codec.index) is Seeded)

    def to_send(self) -> tuple[DeepReduce, Source, Support | None]:
        """Return the codec, the source and what was selected of it, for the pipeline.

        Of an unused tensor nothing is sent. A NaN or an infinity reaches every rank, whatever the sparsifier: where it might select none of
        them, only the first one is sent, as the step is lost anyhow.
        """
        if self.is_unused:
            return AS_STORED, SparseSource(SparseTensor(np.empty(0, np.int64), np.empty(0, self.dtype), self.shape)), None
        if not self.codec.sends_nonfinite and (nonfinite := self._first_nonfinite()) is not None:
            return AS_STORED, SparseSource(nonfinite), None
        return self.codec, self.source, self.selected

    def _first_nonfinite(self) -> SparseTensor | None:
        if not isinstance(self.content, SparseTensor):
            return self.arrays.first_nonfinite(self.content)
        found = np.flatnonzero(~np.isfinite(self.content.values))[:1]
        return SparseTensor(self.content.indices[found], self.content.values[found], self.shape) if found.size else None


@dataclass(frozen=True, eq=False)
class EncodedMessage:
    """A message: the tensors it is for, the record of each, the bytes of all of it, and the rank that made it."""

    tensors: Sequence[OutgoingTensor]
    records: Sequence[Record]
    blob: bytes | memoryview
    sender: int


def step_source(content: Array | SparseTensor) -> Source:
    """Return a tensor as the pipeline reads it."""
    if type(content) is np.ndarray:
        return DenseSource(content)
    return SparseSource(content) if isinstance(content, SparseTensor) else arrays_of(content).source(content)


def select(tensors: Sequence[OutgoingTensor], seed: StepSeed, threads: Threads = ONE_THREAD) -> list[Support]:
    """Return the positions that the sparsifiers select, of those of one codec and dtype together; none of an unused tensor."""
    return threads.share(list(map(_CONTENT, tensors)), partial(_selected, tensors, seed))


def _selected(all_tensors: Sequence[OutgoingTensor], seed: StepSeed, part: slice) -> list[Support]:
    tensors = all_tensors[part]
    groups: dict[tuple[int, np.dtype[Any]], list[OutgoingTensor]] = {}
    for tensor in tensors:
        if not tensor.is_unused:
            groups.setdefault((id(tensor.codec), tensor.dtype), []).append(tensor)
    found: dict[int, Support] = {}
    for group in groups.values():
        selected = group[0].codec.sparsifier.select_batch([tensor.source for tensor in group], [tensor.seed(seed) for tensor in group])
        found.update(zip(map(id, group), selected, strict=True))
    return [Support.none(tensor.numel) if tensor.is_unused else found[id(tensor)] for tensor in tensors]


def encode(groups: Sequence[Sequence[OutgoingTensor]], seed: StepSeed, threads: Threads = ONE_THREAD) -> list[EncodedMessage]:
    """Return a message of each group of tensors, all encoded together: the same bytes with any number of threads.

    Tensors are named by their index: parameter names would cost more than some of the tensors.
    """
    tensors, messages = list(chain.from_iterable(groups)), []
    records = iter(threads.share(list(map(_CONTENT, tensors)), partial(_records, tensors, seed)))
    for group in groups:
        own = list(islice(records, len(group)))
        messages.append(EncodedMessage(group, own, message.write(own, _names(len(own))), seed.rank))
    return messages


def _records(tensors: Sequence[OutgoingTensor], seed: StepSeed, part: slice) -> list[Record]:
    """Encode a part of the tensors together. An error names the tensor."""
    codecs, sources, selected, seeds, names = [], [], [], [], [""]
    try:
        for tensor in tensors[part]:
            names.append(tensor.name)
            codec, source, support = tensor.to_send()
            codecs.append(codec)
            sources.append(source)
            selected.append(support)
            seeds.append(tensor.seed(seed))
    except Exception as error:
        raise_named(error, names[-1])
    return encode_batch(codecs, sources, seeds, names[1:], selected)


def decode(messages: Sequence[EncodedMessage], threads: Threads = ONE_THREAD) -> list[list[SparseTensor]]:
    """Return the tensors of each message, all decoded together. An error names the rank and the tensor."""
    records: list[Record] = []
    names: list[str] = []
    spaces: list[Space] = []
    contents: list[Array | SparseTensor] = []
    for each in messages:
        records += each.records
        spaces += map(_SPACE, each.tensors)
        contents += map(_CONTENT, each.tensors)
        names += map(f"{{0.name}} of rank {each.sender}".format, each.tensors)
    decoded = iter(threads.share(contents, lambda part: decode_batch(records[part], spaces[part], names[part])))
    rows = []
    for each in messages:
        rows.append(list(islice(decoded, len(each.tensors))))
    return rows


def read_all(blobs: Sequence[memoryview], expected: Sequence[Sequence[OutgoingTensor]], own: EncodedMessage) -> list[EncodedMessage]:
    """Return the messages of all ranks, each of which must be for its tensors. The rank's own message is at hand: it is not read again."""
    messages = []
    for sender, (blob, tensors) in enumerate(zip(blobs, expected, strict=True)):
        messages.append(own if sender == own.sender else read(blob, tensors, sender))
    return messages


def read(blob: memoryview, tensors: Sequence[OutgoingTensor], sender: int) -> EncodedMessage:
    """Return the message of a rank, which must be for these tensors."""
    try:
        return EncodedMessage(tensors, _read(blob, tensors), blob, sender)
    except FormatError as error:
        raise type(error)(f"message of rank {sender} for {summary([tensor.name for tensor in tensors])}: {error}") from error


def summary(names: Sequence[str]) -> str:
    """Return a few names for an error message.

    >>> summary(["a", "b", "c", "d"])
    'a, b and 2 more'
    """
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _read(blob: memoryview, tensors: Sequence[OutgoingTensor]) -> Sequence[Record]:
    received = message.read(blob, max_numel=sum([tensor.numel for tensor in tensors]), max_tensors=len(tensors))
    if received.names != _names(len(tensors)):
        raise CorruptError(f"it is not for the {len(tensors)} tensor(s) {summary([tensor.name for tensor in tensors])}")
    for tensor, record in zip(tensors, received.records, strict=True):
        if (record.shape, record.dtype) != (tensor.shape, tensor.dtype):
            raise CorruptError(f"{tensor.name} is {record.dtype} of shape {record.shape}, here {tensor.dtype} of shape {tensor.shape}")
    return received.records


_SPACE: Callable[[OutgoingTensor], Space] = attrgetter("source.space")
_CONTENT: Callable[[OutgoingTensor], Array | SparseTensor] = attrgetter("content")


@lru_cache(maxsize=64)
def _names(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
