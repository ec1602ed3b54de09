"""The pipeline: how a gradient becomes a message, step by step, and how a message becomes a gradient again.

::

    dense ─ sparsify ─ index.encode ─ gather at the support ─ value.encode ─ reorder ─ message.write
    dense ─ scatter  ─ index.decode ─                       ─ value.decode ─ restore ─ message.read
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from . import message, registry, reorder, specs
from .codec import IndexCodec, Sparsifier, ValueCodec
from .errors import ConfigError, CorruptError, DeepReduceError, FormatError, InputError
from .indices.all import All
from .layouts import codecs_of, layout_of
from .message import DEFAULT_MAX_NUMEL, DEFAULT_MAX_TENSORS, Layout, Record
from .parameters import shown
from .reader import Part, Reader
from .seeds import mix
from .source import Source, Space, as_source
from .tensor import Positions, SparseTensor, Support, Values, as_support

if TYPE_CHECKING:
    from typing_extensions import Buffer

Encodable = Any  # a numpy array, a SparseTensor, or a Source of an adapter


@dataclass(frozen=True)
class DeepReduce:
    """A sparsifier, an index codec and a value codec: a whole way to send gradients.

    >>> import deepreduce as dr, numpy as np
    >>> codec = dr.DeepReduce(sparsifier=dr.TopR(2), index=dr.Bitmap(), value=dr.FP16())
    >>> print(codec)
    topr:2/bitmap/fp16
    >>> blob = codec.encode(np.float32([[0.5, -4], [2, 0]]))
    >>> dr.decode(blob)
    array([[ 0., -4.],
           [ 2.,  0.]], dtype=float32)
    """

    sparsifier: Sparsifier
    index: IndexCodec
    value: ValueCodec

    def __post_init__(self) -> None:
        for stage, codec in zip(registry.STAGES, self.stages, strict=True):
            if not isinstance(codec, stage.base):
                raise ConfigError(f"{stage.title} must be a {stage.base.__name__}, got {codec!r}")

    @property
    def stages(self) -> specs.Codecs:
        """The three codecs, in the order of the pipeline."""
        return self.sparsifier, self.index, self.value

    @cached_property
    def sends_nonfinite(self) -> bool:
        """Whether every NaN and infinity of a gradient is always among what the reader sees."""
        return self.sparsifier.selects_nonfinite and (self.index.lossless or isinstance(self.index, All))

    def __str__(self) -> str:
        """The spec: ``parse(str(codec)) == codec``."""
        return specs.format_spec(self.stages)

    def encode(self, gradient: Encodable, seed: int = 0) -> bytes:
        """One self-describing message. The same gradient and seed give the same bytes on every machine.

        Takes a numpy array of any shape and layout (float16, bfloat16, float32, float64) or a `SparseTensor`; never changes it.
        """
        return message.write([self.record(as_source(gradient), check_seed(seed))])

    def encode_many(self, gradients: Mapping[str, Encodable], seed: int = 0) -> bytes:
        """One message for many tensors, each with its name, shape and dtype.

        >>> import deepreduce as dr, numpy as np
        >>> blob = dr.parse("dense").encode_many({"w": np.ones((2, 2), np.float32), "b": np.zeros(2, np.float16)})
        >>> dr.decode_many(blob)["b"]
        array([0., 0.], dtype=float16)
        """
        return encode_many(lambda name, source: self, gradients, seed)

    def record(self, source: Source, seed: int, selected: Support | None = None) -> Record:
        """Encode a gradient as part of a message; with `selected`, at positions that were selected before."""
        if selected is None:
            selected = as_support(self.sparsifier.select(source, seed), source.numel)
        index = self.index.choose(selected, source.space)
        index_part, announced = index.encode(selected, source.space, seed)
        support = as_support(announced, source.numel)
        values = source.gather(support)
        value = self.value.choose(values)
        return self._record(source, (index, index_part, support), (value, *value.encode(values, seed)))

    def records(self, sources: Sequence[Source], seeds: Sequence[int], selected: Sequence[Support] | None = None) -> list[Record]:
        """Encode many gradients of one dtype at once: the same records."""
        if selected is None:
            selected = self.sparsifier.select_batch(sources, seeds)
        indexed = self.index.encode_batch(selected, list(map(_SPACE, sources)), seeds)
        values = []
        for source, (_, _, support) in zip(sources, indexed, strict=True):
            values.append(source.gather(support))
        coded = self.value.encode_batch(values, seeds)
        return list(map(self._record, sources, indexed, coded))

    def _record(
        self, source: Source, indexed: tuple[IndexCodec, Part, Support], coded: tuple[ValueCodec, Part, reorder.Order | None]
    ) -> Record:
        """Return the record of a gradient from its encoded positions and its encoded values."""
        (index, index_part, support), (value, value_part, order), order_part = indexed, coded, b""
        if order is not None:
            index_part, order_part = index.attach(index_part, support, order, source.space)
        own = index is self.index and value is self.value
        layout = self._own_layout if own else layout_of((self.sparsifier, index, value))
        return Record(source.space.shape, source.dtype, support.nnz, layout, index_part, order_part, value_part)

    @cached_property
    def _own_layout(self) -> Layout:
        return layout_of(self.stages)


def parse(spec: str) -> DeepReduce:
    """The codec of a spec string or of a preset.

    >>> import deepreduce as dr
    >>> dr.parse("topr:0.01/raw/fp16")
    DeepReduce(sparsifier=TopR(amount=0.01), index=RawIndex(), value=FP16())
    """
    if not isinstance(spec, str):
        raise ConfigError(f"a spec is a string such as 'topr:0.01/raw/fp16', got {shown(spec)}")
    return DeepReduce(*specs.parse_stages(spec))


def encode(gradient: Encodable, spec: str | DeepReduce, seed: int = 0) -> bytes:
    """`parse(spec).encode(gradient, seed)` in one call.

    >>> import deepreduce as dr, numpy as np
    >>> len(dr.encode(np.ones(16, np.float32), "dense"))
    90
    """
    return (spec if isinstance(spec, DeepReduce) else parse(spec)).encode(gradient, seed)


def encode_many(codec_for: Callable[[str, Source], DeepReduce], gradients: Mapping[str, Encodable], seed: int = 0) -> bytes:
    """One message in which every tensor goes by the codec that `codec_for(name, source)` returns, with a seed of its own."""
    seed = check_seed(seed)
    codecs, sources, seeds = [], [], []
    for name, gradient in gradients.items():
        if not isinstance(name, str):
            raise InputError(f"tensors are named by strings, got {name!r}")
        try:
            sources.append(as_source(gradient))
            codecs.append(codec_for(name, sources[-1]))
        except InputError as error:
            raise_named(error, f"tensor {name!r}")
        seeds.append(mix(seed, name))
    names = tuple(gradients)
    return message.write(encode_batch(codecs, sources, seeds, [f"tensor {name!r}" for name in names], [None] * len(names)), names)


def check_seed(seed: int) -> int:
    """Seeds travel as numbers below 2**63."""
    number = _whole(seed, "a seed")
    if not 0 <= number < 2**63:
        raise InputError(f"a seed lies between 0 and 2**63 - 1, got {shown(number)}")
    return number


def _whole(number: object, what: str) -> int:
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(f"{what} is a whole number, got {shown(number)}") from error


# Decoding


def decode(blob: Buffer, max_numel: int = DEFAULT_MAX_NUMEL) -> Values:
    """The dense tensor of a message, with its shape and dtype.

    The bytes may come from anyone: what is not a valid message is refused with a `FormatError`, and one of more than `max_numel` elements
    before anything is allocated for them.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode(dr.encode(np.float32([1, -3, 2]), "topr:1/raw/raw"))
    array([ 0., -3.,  0.], dtype=float32)
    """
    return _dense(decode_sparse(blob, max_numel))


def decode_sparse(blob: Buffer, max_numel: int = DEFAULT_MAX_NUMEL) -> SparseTensor:
    """The tensor of a message without its zeros: ``.indices .values .shape``.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode_sparse(dr.encode(np.float32([0, 3, 0]), "nonzero/raw/raw")).values
    array([3.], dtype=float32)
    """
    return restore(read_single(blob, max_numel))


def decode_many(blob: Buffer, max_numel: int = DEFAULT_MAX_NUMEL, max_tensors: int = DEFAULT_MAX_TENSORS) -> dict[str, Values]:
    """All tensors of a message of `encode_many`, by name.

    A message of more than `max_tensors` tensors, or of more than `max_numel` elements in all of them together, is refused.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode_many(dr.parse("dense").encode_many({"w": np.float32([1, 2])}))
    {'w': array([1., 2.], dtype=float32)}
    """
    return {name: _dense(tensor) for name, tensor in decode_many_sparse(blob, max_numel, max_tensors).items()}


def decode_many_sparse(blob: Buffer, max_numel: int = DEFAULT_MAX_NUMEL, max_tensors: int = DEFAULT_MAX_TENSORS) -> dict[str, SparseTensor]:
    """`decode_many` without the zeros.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode_many_sparse(dr.parse("nonzero/raw/raw").encode_many({"w": np.float32([0, 2])}))["w"].indices
    array([1])
    """
    return {name: restore(record) for name, record in read_named(blob, max_numel, max_tensors).items()}


def restore(record: Record, space: Space | None = None) -> SparseTensor:
    """Decode one tensor of a message. An adapter gives the space in which its device enumerates positions."""
    space = Space(record.shape) if space is None else space
    _, index, value = codecs_of(record.layout)
    index_part, value_part = Reader(record.index_part), Reader(record.value_part)
    values = value.decode(value_part, record.nnz, record.dtype)
    value_part.expect_end()
    positions = index.decode(index_part, record.nnz, space)
    index_part.expect_end()
    return _restored(record, space, positions, values)


def _sorted_support(positions: Support | Positions, numel: int) -> tuple[Support, Positions | None]:
    """The support, and the order that its values have to be put in."""
    try:
        return (as_support(positions, numel), None) if isinstance(positions, Support) else Support.sorting(positions, numel)
    except InputError as error:
        raise CorruptError(f"the message decodes to no valid tensor: {error}") from error


def _dense(tensor: SparseTensor) -> Values:
    """The dense tensor; no copy where all its values are there and in memory of their own: that of a message cannot be written."""
    own = tensor.support.is_all and tensor.values.flags.writeable
    return tensor.values.reshape(tensor.shape) if own else tensor.to_dense()


def read_single(blob: Buffer, max_numel: int) -> Record:
    """The record of a message of `encode`."""
    whole = message.read(blob, _whole(max_numel, "max_numel"))
    if whole.names is not None:
        raise FormatError(f"the message holds {len(whole.names)} named tensors: decode_many reads it")
    return whole.records[0]


def read_named(blob: Buffer, max_numel: int, max_tensors: int = DEFAULT_MAX_TENSORS) -> dict[str, Record]:
    """The records of a message of `encode_many`."""
    whole = message.read(blob, _whole(max_numel, "max_numel"), _whole(max_tensors, "max_tensors"))
    if whole.names is None:
        raise FormatError("the message holds one tensor without a name: decode reads it")
    return dict(zip(whole.names, whole.records, strict=True))


# Many tensors of one message


def encode_batch(
    codecs: Sequence[DeepReduce],
    sources: Sequence[Source],
    seeds: Sequence[int],
    names: Sequence[str],
    selected: Sequence[Support | None],
) -> list[Record]:
    """Encode many gradients, each by its codec and with its seed; `selected` has the supports of those that were selected before.

    Those of one codec and dtype are encoded together. An error names the gradient.

    >>> import numpy as np
    >>> sources = [as_source(np.float32([1, -4, 2])), as_source(np.float32([0, 3]))]
    >>> codecs = [parse("topr:2/raw/raw"), parse("nonzero/raw/raw")]
    >>> [record.nnz for record in encode_batch(codecs, sources, [7, 8], ["a", "b"], [None, None])]
    [2, 1]
    """
    groups: dict[tuple[int, np.dtype[Any], bool], list[int]] = {}
    for number, (codec, source, support) in enumerate(zip(codecs, sources, selected, strict=True)):
        groups.setdefault((id(codec), source.dtype, support is None), []).append(number)
    records: dict[int, Record] = {}
    for group in groups.values():
        codec = codecs[group[0]]
        known: list[Any] | None = None if selected[group[0]] is None else list(map(selected.__getitem__, group))
        try:
            made = codec.records(list(map(sources.__getitem__, group)), list(map(seeds.__getitem__, group)), known)
            records.update(zip(group, made, strict=True))
        except Exception:
            for i in group:  # one by one, to find the gradient
                try:
                    codec.record(sources[i], seeds[i], selected[i])
                except Exception as error:
                    raise_named(error, names[i])
            raise
    return list(map(records.__getitem__, range(len(codecs))))


def decode_batch(records: Sequence[Record], spaces: Sequence[Space], names: Sequence[str]) -> list[SparseTensor]:
    """Decode many tensors, each in its space, where its device enumerates positions; an error names the tensor.

    >>> import numpy as np
    >>> records = encode_batch([parse("nonzero/rice/raw")], [as_source(np.float32([0, 3]))], [0], ["w"], [None])
    >>> decode_batch(records, [Space((2,))], ["w"])[0].to_dense()
    array([0., 3.], dtype=float32)
    """
    groups: dict[tuple[Layout, np.dtype[Any]], list[int]] = {}
    before, group = None, []
    for number, record in enumerate(records):
        if before is None or record.layout is not before.layout or record.dtype is not before.dtype:
            before, group = record, groups.setdefault((record.layout, record.dtype), [])
        group.append(number)
    tensors: dict[int, SparseTensor] = {}
    for group in groups.values():
        try:
            own = list(map(records.__getitem__, group)), list(map(spaces.__getitem__, group))
            tensors.update(zip(group, restore_batch(*own), strict=True))
        except FormatError:
            for i in group:  # one by one, to find the tensor
                try:
                    restore(records[i], spaces[i])
                except FormatError as error:
                    raise_named(error, names[i])
            raise
    return list(map(tensors.__getitem__, range(len(records))))


def restore_batch(records: Sequence[Record], spaces: Sequence[Space]) -> list[SparseTensor]:
    """Decode many tensors of one layout and dtype at once: the same tensors."""
    _, index, value = codecs_of(records[0].layout)
    counts = list(map(_NNZ, records))
    values = value.decode_batch(list(map(_VALUE_PART, records)), counts, records[0].dtype)
    positions = index.decode_batch(list(map(_INDEX_PART, records)), counts, spaces)
    return list(map(_restored, records, spaces, positions, values))


_SPACE, _NNZ, _INDEX_PART, _VALUE_PART = map(operator.attrgetter, ("space", "nnz", "index_part", "value_part"))


def _restored(record: Record, space: Space, positions: Support | Positions, values: Values) -> SparseTensor:
    """The tensor of what its index and its value section decode to."""
    if len(record.order_part):
        values = reorder.restore(values, reorder.decode(Reader(record.order_part), record.nnz))
    if isinstance(positions, Support) and positions.numel == space.numel:
        support, order = positions, None
    else:
        support, order = _sorted_support(positions, space.numel)
    if support.nnz != record.nnz or (values.dtype, values.shape) != (record.dtype, (record.nnz,)):
        raise CorruptError(f"{support.nnz} positions and {values.dtype} values of shape {values.shape}, the header says {record.nnz}")
    return SparseTensor.trusted(support, values if order is None else values[order], record.shape)


def raise_named(error: Exception, name: str) -> NoReturn:
    """Raise an error of deepreduce again, with the name of its tensor; any other error gets a note.

    >>> raise_named(InputError("QSGD takes float values, got int32"), "layer.weight")
    Traceback (most recent call last):
        ...
    deepreduce.errors.InputError: layer.weight: QSGD takes float values, got int32
    """
    if isinstance(error, DeepReduceError):
        raise type(error)(f"{name}: {error}") from error
    error.add_note(f"while sending {name}")
    raise error
