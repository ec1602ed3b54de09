"""The wire format (docs/format.md is normative): many tensors in one checked message.

Nothing else knows byte offsets. A message names its codecs by wire ids and argument text; which codecs these are, and what is in a section,
is not known here. Reading bounds every size before anything is allocated, and refuses what is not exactly one message.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .errors import CorruptError, FormatError, InputError, TruncatedError, VersionError
from .parameters import shown
from .reader import MAX_TEXT_BYTES, Part, Reader, text, varint, varints
from .tensor import FLOAT_DTYPES, Shape

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"\x9dDR"
VERSION = 1
DEFAULT_MAX_NUMEL = 2**28
"""Elements that a message may ask for by default: 1 GiB of float32."""
DEFAULT_MAX_TENSORS = 10_000
"""Tensors that a message may hold by default: each takes up to a tenth of a millisecond to decode, however few its bytes."""

NAMED = 0
"""The wire id of a codec of another package: its name follows, as ids of other packages could clash."""

_CRC_BYTES = 4
_SINGLE, _NAMED_TENSORS, _PATCH = 0, 1, 2
_MAX_HEADER_BYTES = 2**24
MAX_DIMENSIONS = 32
_MAX_EMPTY = 2**59  # numpy multiplies the sizes that are not 0 with the 8 bytes of a float64
_MAX_LAYOUTS = 4096
_DEFLATE_FROM_BYTES = 48
_MAX_CODEC_TEXT_BYTES = 1024


class CodecId(NamedTuple):
    """One codec as a message names it: the wire id, the name (only if the id is `NAMED`, else empty), and all parameters as text."""

    wire_id: int
    name: str
    arguments: str


Layout = tuple[CodecId, CodecId, CodecId]
"""The sparsifier, the index codec and the value codec of a tensor."""


class Record(NamedTuple):
    """One tensor of a message: what it is, which codecs were used, and their three sections."""

    shape: Shape
    dtype: np.dtype[Any]
    nnz: int
    layout: Layout
    index_part: Part
    order_part: Part
    value_part: Part

    @property
    def sections(self) -> tuple[Part, Part, Part]:
        """The sections in the order they travel."""
        return self.index_part, self.order_part, self.value_part


@dataclass(frozen=True, eq=False)
class Message:
    """All tensors of a message; `names` is None for a single one without a name."""

    names: tuple[str, ...] | None
    records: tuple[Record, ...]


def write(records: Sequence[Record], names: Sequence[str] | None = None) -> bytes:
    """Return one message of these records."""
    for number, record in enumerate(records):
        if len(record.shape) > MAX_DIMENSIONS or 0 in record.shape:
            _check_shape(record.shape, "a tensor" if names is None else f"tensor {shown(names[number])}")
    sections: list[Part] = []
    for record in records:
        sections += (record.index_part, record.order_part, record.value_part)
    sizes = list(map(len, sections))
    header, deflated = squeeze(_header(records, sizes, names))
    lead = varint(2 * len(header) + deflated) + header
    parts = [MAGIC + bytes((VERSION,)) + varints((len(lead) + sum(sizes) + _CRC_BYTES,)) + lead, *filter(len, sections)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([*parts, checksum.to_bytes(_CRC_BYTES, "little")])


def _check_shape(shape: Shape, who: str) -> None:
    """Refuse what every reader would refuse."""
    problem = shape_problem(shape)
    if problem:
        raise InputError(f"{who} {problem}")


def shape_problem(shape: Shape) -> str:
    """What is wrong with a shape, for writers and readers alike."""
    if len(shape) > MAX_DIMENSIONS:
        return f"has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are allowed"
    if 0 in shape and prod(filter(None, shape)) >= _MAX_EMPTY:
        return f"of shape {shape} is empty, but its other sizes multiply to 2**59 or more"
    return ""


def read(blob: Buffer, max_numel: int = DEFAULT_MAX_NUMEL, max_tensors: int = DEFAULT_MAX_TENSORS) -> Message:
    """Return the message in these bytes; sections are views of them. A message of more elements or tensors is refused."""
    reader = open_body(blob)
    coded_size = reader.varint()
    header = reader.take(coded_size // 2)
    names, heads, sizes = _read_header(Reader(inflate(header) if coded_size % 2 else header), max_numel, max_tensors)
    if sum(map(sum, sizes)) != reader.remaining:
        raise CorruptError(f"sections of {sum(map(sum, sizes))} bytes announced, {reader.remaining} found")
    take = reader.take
    records = [Record(*head, take(index), take(order), take(value)) for head, (index, order, value) in zip(heads, sizes, strict=True)]
    return Message(names, tuple(records))


def message_bytes(start: Buffer) -> int:
    """The length of the message that begins here: for streams, and for buffers that are padded.

    >>> import deepreduce as dr, numpy as np
    >>> blob = dr.parse("dense").encode(np.ones(3, np.float32))
    >>> message_bytes(blob + b"padding") == len(blob)
    True
    """
    reader = Reader(start)
    magic = bytes(reader.take(len(MAGIC)))
    if magic != MAGIC:
        raise CorruptError(f"not a deepreduce message: it begins with {magic.hex()}, not {MAGIC.hex()}")
    version = reader.byte()
    if version != VERSION:
        raise VersionError(f"message of format version {version}, this is version {VERSION}")
    rest_bytes = reader.varint()
    return reader.offset + rest_bytes


def open_body(blob: Buffer) -> Reader:
    """A reader of what lies between the length and the checksum, both of which hold."""
    try:
        view = memoryview(blob)
        view = view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast
    except (TypeError, ValueError) as error:
        raise FormatError(f"a message is bytes, bytearray, memoryview or a uint8 array, got {shown(blob)} ({error})") from error
    size_bytes = message_bytes(view)
    if size_bytes > len(view):
        raise TruncatedError(f"a message of {size_bytes} bytes, only {len(view)} are here")
    if size_bytes < len(view):
        raise CorruptError(f"{len(view) - size_bytes} bytes after the end of a message of {size_bytes}")
    start = Reader(view)
    start.take(len(MAGIC) + 1)
    start.varint()
    if size_bytes - start.offset < _CRC_BYTES:
        raise CorruptError(f"a message of {size_bytes} bytes has no room for its checksum")
    body = view[:-_CRC_BYTES]
    if zlib.crc32(body) != int.from_bytes(view[-_CRC_BYTES:], "little"):
        raise CorruptError("checksum does not match: the message was changed on its way")
    return Reader(body[start.offset :])


# The header


def _header(records: Sequence[Record], sizes: Sequence[int], names: Sequence[str] | None) -> bytes:
    table: dict[bytes, int] = {}
    numbers: list[int] = []
    number, before = -1, None
    for at, record in enumerate(records):
        shape, dtype, nnz, layout = record[:4]
        if before is None or layout is not before.layout or dtype is not before.dtype:  # mostly the same, and a hash of it costs
            number, before = table.setdefault(_layout(dtype, layout), len(table)), record
        numbers += (number, len(shape), *shape, nnz, *sizes[3 * at : 3 * at + 3])
    if len(table) > _MAX_LAYOUTS:
        raise InputError(f"a message has at most {_MAX_LAYOUTS} different codecs with their arguments, got {len(table)}")
    kind, named = (_SINGLE, b"") if names is None else (_NAMED_TENSORS, _names(tuple(names)))
    return b"".join([bytes((kind,)), varint(len(table)), *table, named, varints(numbers)])


@lru_cache(maxsize=64)
def _names(names: tuple[str, ...]) -> bytes:
    """How many names there are, and all of them."""
    return b"".join([varint(len(names)), *map(name_text, names)])


def name_text(name: str) -> bytes:
    """Return the name of a tensor as a text; raise `InputError` if every reader would refuse it."""
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise InputError(f"tensor {shown(name)}: the name cannot be written in UTF-8") from error
    if size_bytes > MAX_TEXT_BYTES:
        raise InputError(f"tensor {shown(name)}: the name has {size_bytes} bytes of UTF-8, at most {MAX_TEXT_BYTES} are allowed")
    return text(name)


@lru_cache(maxsize=1024)
def _layout(dtype: np.dtype[Any], layout: Layout) -> bytes:
    return bytes((FLOAT_DTYPES.index(dtype),)) + b"".join(map(_codec_id, layout))


def _codec_id(codec: CodecId) -> bytes:
    name, arguments = text(codec.name) if codec.wire_id == NAMED else b"", text(codec.arguments)
    if max(len(name), len(arguments)) > _MAX_CODEC_TEXT_BYTES:
        raise InputError(f"the name and the arguments of a codec take less than {_MAX_CODEC_TEXT_BYTES} bytes each, got {shown(codec)}")
    return bytes((codec.wire_id,)) + name + arguments


_Head = tuple[Shape, np.dtype[Any], int, Layout]
_Sizes = tuple[int, int, int]


def _read_header(reader: Reader, max_numel: int, max_tensors: int) -> tuple[tuple[str, ...] | None, list[_Head], list[_Sizes]]:
    kind = reader.byte()
    if kind == _PATCH:
        raise CorruptError("this is a patch of weights, not a message of tensors: see deepreduce.weights")
    if kind not in (_SINGLE, _NAMED_TENSORS):
        raise CorruptError(f"message of kind {kind}, known are {_SINGLE} and {_NAMED_TENSORS}")
    layouts = [_read_layout(reader) for _ in range(reader.varint(limit=_MAX_LAYOUTS))]
    names = _read_names(reader, max_tensors) if kind == _NAMED_TENSORS else None
    numbers = reader.varints()
    try:
        heads, sizes, read = _read_tensors(numbers, layouts, 1 if names is None else len(names), max_numel)
    except IndexError:
        raise TruncatedError(f"a header of {len(numbers)} numbers ends before its last tensor") from None
    if read != len(numbers):
        raise CorruptError(f"{len(numbers) - read} unexpected numbers at the end of a header")
    return names, heads, sizes


def _read_tensors(
    numbers: list[int], layouts: list[tuple[np.dtype[Any], Layout]], count: int, max_numel: int
) -> tuple[list[_Head], list[_Sizes], int]:
    """What the header says of each tensor, and how many of the numbers that is."""
    heads: list[_Head] = []
    sizes: list[_Sizes] = []
    at, total, used = 0, 0, set()
    for _ in range(count):
        layout, dimensions = numbers[at], numbers[at + 1]
        if layout >= len(layouts):
            raise CorruptError(f"layout {layout} of {len(layouts)}")
        used.add(layout)
        shape = tuple(numbers[at + 2 : at + 2 + min(dimensions, MAX_DIMENSIONS + 1)])
        problem = shape_problem(shape)
        if problem:
            raise CorruptError(f"a tensor {problem}")
        at += 2 + dimensions
        numel = prod(shape)
        total += numel
        if total > max_numel:
            raise CorruptError(f"the message asks for {total} elements or more, max_numel allows {max_numel}")
        nnz = numbers[at]
        if nnz > numel:
            raise CorruptError(f"{nnz} values for {numel} elements")
        dtype, codecs = layouts[layout]
        heads.append((shape, dtype, nnz, codecs))
        sizes.append((numbers[at + 1], numbers[at + 2], numbers[at + 3]))
        at += 4
    if len(used) != len(layouts):
        raise CorruptError(f"{len(layouts)} layouts, of which {len(used)} are used")
    return heads, sizes, at


def _read_names(reader: Reader, max_tensors: int) -> tuple[str, ...]:
    count = reader.varint()
    if count > max_tensors:
        raise CorruptError(f"the message holds {count} tensors, max_tensors allows {max_tensors}")
    names = tuple(reader.text() for _ in range(count))
    if len(set(names)) != len(names):
        raise CorruptError("a message holds two tensors of one name")
    return names


def _read_layout(reader: Reader) -> tuple[np.dtype[Any], Layout]:
    code = reader.byte()
    if code >= len(FLOAT_DTYPES):
        raise CorruptError(f"dtype code {code}, known are 0 to {len(FLOAT_DTYPES) - 1}")
    return FLOAT_DTYPES[code], (_read_codec_id(reader), _read_codec_id(reader), _read_codec_id(reader))


def _read_codec_id(reader: Reader) -> CodecId:
    wire_id = reader.byte()
    name = reader.text(_MAX_CODEC_TEXT_BYTES) if wire_id == NAMED else ""
    return CodecId(wire_id, name, reader.text(_MAX_CODEC_TEXT_BYTES))


def squeeze(header: bytes) -> tuple[bytes, bool]:
    """The header, deflated where that is shorter: names and shapes of many tensors repeat themselves."""
    if len(header) > _MAX_HEADER_BYTES:
        raise InputError(f"names and shapes take {len(header)} bytes, at most {_MAX_HEADER_BYTES} are allowed: send fewer tensors at once")
    if len(header) < _DEFLATE_FROM_BYTES:
        return header, False
    deflated = zlib.compress(header, 9)
    return (deflated, True) if len(deflated) < len(header) else (header, False)


def inflate(deflated: memoryview) -> bytes:
    """The inverse of `squeeze`, for a header that it deflated."""
    engine = zlib.decompressobj()
    try:
        header = engine.decompress(deflated, _MAX_HEADER_BYTES)
    except zlib.error as error:
        raise CorruptError(f"the header does not inflate: {error}") from error
    if not engine.eof or engine.unused_data:
        raise CorruptError(f"the header does not end where it should, or inflates to over {_MAX_HEADER_BYTES} bytes")
    return header
