"""The wire format (docs/format.md is normative): tensors with their codecs, in one checked message.

Nothing else knows byte offsets. Reading bounds every size before anything is allocated, and refuses what is not exactly one message.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .codec import IndexCodec, Sparsifier, ValueCodec
from .errors import ConfigError, CorruptError, FormatError, InputError, TruncatedError, VersionError
from .parameters import shown
from .registry import NAMED, STAGES, Stage, from_wire_arguments, wire_arguments
from .sparse import FLOAT_DTYPES, Shape
from .wire import MAX_TEXT_BYTES, Part, Reader, text, varint

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"\x9dDR"
VERSION = 1
DEFAULT_MAX_NUMEL = 2**28
"""Elements that a message may ask for by default: 1 GiB of float32."""

_CRC_BYTES = 4
_SINGLE, _NAMED_TENSORS, _PATCH = 0, 1, 2
_MAX_HEADER_BYTES = 2**24
_MAX_DIMENSIONS = 32
_MAX_LAYOUTS = 4096
_DEFLATE_FROM_BYTES = 48

Stages = tuple[Sparsifier, IndexCodec, ValueCodec]


@dataclass(frozen=True, eq=False)
class Record:
    """One tensor of a message: what it is, which codecs were used, and their three sections."""

    shape: Shape
    dtype: np.dtype[Any]
    nnz: int
    stages: Stages
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
    """One message of these records."""
    check_writable(records, names)
    header, deflated = squeeze(_header(records, names))
    sections = [section for record in records for section in record.sections]
    size_bytes = sum(len(section) for section in sections)
    lead = varint(2 * len(header) + deflated) + header
    front = MAGIC + bytes((VERSION,)) + varint(len(lead) + size_bytes + _CRC_BYTES) + lead
    body = b"".join([front, *sections])
    return b"".join([body, zlib.crc32(body).to_bytes(_CRC_BYTES, "little")])


def check_writable(records: Sequence[Record], names: Sequence[str] | None) -> None:
    """Refuse what every reader would refuse."""
    for number, record in enumerate(records):
        if len(record.shape) > _MAX_DIMENSIONS:
            who = "a tensor" if names is None else f"tensor {shown(names[number])}"
            raise InputError(f"{who} has {len(record.shape)} dimensions, at most {_MAX_DIMENSIONS} are allowed")
    for name in names or ():
        try:
            size_bytes = len(name.encode())
        except UnicodeEncodeError as error:
            raise InputError(f"tensor {shown(name)}: the name cannot be written in UTF-8") from error
        if size_bytes > MAX_TEXT_BYTES:
            raise InputError(f"tensor {shown(name)}: the name has {size_bytes} bytes of UTF-8, at most {MAX_TEXT_BYTES} are allowed")


def read(blob: Buffer, max_numel: int = DEFAULT_MAX_NUMEL) -> Message:
    """The message in these bytes; sections are views of them."""
    reader = open_body(blob)
    coded_size = reader.varint()
    header = reader.take(coded_size // 2)
    names, heads, sizes = _read_header(Reader(inflate(header) if coded_size % 2 else header), max_numel)
    if sum(map(sum, sizes)) != reader.remaining:
        raise CorruptError(f"sections of {sum(map(sum, sizes))} bytes announced, {reader.remaining} found")
    records = tuple(Record(*head, *(reader.take(size) for size in triple)) for head, triple in zip(heads, sizes, strict=True))
    return Message(names, records)


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


def _header(records: Sequence[Record], names: Sequence[str] | None) -> bytes:
    layouts = [_layout(record.dtype, record.stages) for record in records]
    table = list(dict.fromkeys(layouts))
    parts = [bytes((_SINGLE if names is None else _NAMED_TENSORS,)), varint(len(table)), *table]
    if names is not None:
        parts += [varint(len(names)), *(text(name) for name in names)]
    if len(table) > _MAX_LAYOUTS:
        raise InputError(f"a message has at most {_MAX_LAYOUTS} different codecs with their arguments, got {len(table)}")
    numbers = {layout: varint(number) for number, layout in enumerate(table)}
    for record, layout in zip(records, layouts, strict=True):
        sizes = (len(section) for section in record.sections)
        parts.append(numbers[layout])
        parts += [varint(n) for n in (len(record.shape), *record.shape, record.nnz, *sizes)]
    return b"".join(parts)


def _layout(dtype: np.dtype[Any], stages: Stages) -> bytes:
    return _spelled_layout(dtype, stages, repr(stages))


@lru_cache(maxsize=1024)
def _spelled_layout(dtype: np.dtype[Any], stages: Stages, spelling: str) -> bytes:
    """The layout. `spelling` tells apart what Python holds to be equal, as 1 and 1.0."""
    coded = (_coded(stage, codec) for stage, codec in zip(STAGES, stages, strict=True))
    return bytes((FLOAT_DTYPES.index(dtype),)) + b"".join(coded)


def _coded(stage: Stage, codec: object) -> bytes:
    entry = stage.by_codec(codec)
    name = text(entry.name) if entry.wire_id == NAMED else b""
    return bytes((entry.wire_id,)) + name + text(wire_arguments(codec))


def _read_header(reader: Reader, max_numel: int) -> tuple[Any, list[Any], list[tuple[int, int, int]]]:
    kind = reader.byte()
    if kind == _PATCH:
        raise CorruptError("this is a patch of weights, not a message of tensors: see deepreduce.weights")
    if kind not in (_SINGLE, _NAMED_TENSORS):
        raise CorruptError(f"message of kind {kind}, known are {_SINGLE} and {_NAMED_TENSORS}")
    layouts = [_read_layout(reader) for _ in range(reader.varint(limit=_MAX_LAYOUTS))]
    names = _read_names(reader) if kind == _NAMED_TENSORS else None
    heads, sizes, numel, used = [], [], 0, set()
    for _ in range(1 if names is None else len(names)):
        number = reader.varint()
        if number >= len(layouts):
            raise CorruptError(f"layout {number} of {len(layouts)}")
        used.add(number)
        shape = tuple(reader.varint() for _ in range(reader.varint(limit=_MAX_DIMENSIONS)))
        numel += prod(max(n, 1) for n in shape)
        if numel > max_numel:
            raise CorruptError(f"the message asks for {numel} elements or more, max_numel allows {max_numel}")
        heads.append((shape, layouts[number][0], reader.varint(limit=prod(shape)), layouts[number][1]))
        sizes.append((reader.varint(), reader.varint(), reader.varint()))
    reader.expect_end()
    if len(used) != len(layouts):
        raise CorruptError(f"{len(layouts)} layouts, of which {len(used)} are used")
    return names, heads, sizes


def _read_names(reader: Reader) -> tuple[str, ...]:
    names = tuple(reader.text() for _ in range(reader.varint(limit=reader.remaining)))
    if len(set(names)) != len(names):
        raise CorruptError("a message holds two tensors of one name")
    return names


def _read_layout(reader: Reader) -> tuple[np.dtype[Any], Stages]:
    code = reader.byte()
    if code >= len(FLOAT_DTYPES):
        raise CorruptError(f"dtype code {code}, known are 0 to {len(FLOAT_DTYPES) - 1}")
    sparsifier, index, value = (_read_coded(stage, reader) for stage in STAGES)
    return FLOAT_DTYPES[code], (sparsifier, index, value)


def _read_coded(stage: Stage, reader: Reader) -> Any:
    wire_id = reader.byte()
    name = reader.text() if wire_id == NAMED else None
    try:
        entry = stage.by_id(wire_id) if name is None else stage.by_name(name)
    except ConfigError as error:
        raise VersionError(f"the message needs a codec that is broken here: {error}") from error
    if entry is None:
        raise VersionError(f"the message needs {stage.title} {name or wire_id!r}, which is not installed here")
    arguments = reader.text()
    try:
        return from_wire_arguments(entry, arguments)
    except ConfigError as error:
        raise CorruptError(f"the message has a {stage.title} that cannot be: {error}") from error


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
