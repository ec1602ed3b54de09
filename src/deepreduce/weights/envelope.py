"""The bytes around the header and the sections of a patch: those of every message. In memory, or in a file that is never held whole."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Protocol

from .. import message
from ..errors import CorruptError, FormatError, TruncatedError
from ..reader import Reader, varint
from . import records
from .records import Header

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CRC_BYTES = 4
_FRONT_BYTES = 32
_BLOCK_BYTES = 1 << 20


class Sections(Protocol):
    """The bytes after the header."""

    def take(self, offset: int, size_bytes: int) -> memoryview:
        """Some of them."""


class _Memory:
    def __init__(self, view: memoryview) -> None:
        self._view = view

    def take(self, offset: int, size_bytes: int) -> memoryview:
        return self._view[offset : offset + size_bytes]


class _File:
    def __init__(self, file: IO[bytes], start: int) -> None:
        self._file, self._start = file, start

    def take(self, offset: int, size_bytes: int) -> memoryview:
        self._file.seek(self._start + offset)
        return memoryview(self._file.read(size_bytes))


def front(header: Header, section_bytes: int) -> bytes:
    """All that stands before the sections."""
    stored, deflated = message.squeeze(records.write(header))
    lead = varint(2 * len(stored) + deflated) + stored
    return message.MAGIC + bytes((message.VERSION,)) + varint(len(lead) + section_bytes + _CRC_BYTES) + lead


def join(header: Header, sections: Iterable[bytes]) -> bytes:
    """The patch as bytes."""
    parts = list(sections)
    body = b"".join([front(header, sum(map(len, parts))), *parts])
    return body + zlib.crc32(body).to_bytes(_CRC_BYTES, "little")


def split(blob: Buffer) -> tuple[Header, Sections]:
    """The header and the sections of a patch in memory; the checksum is checked."""
    reader = message.open_body(blob)
    header = _read_header(reader, reader.remaining)
    sections = reader.rest()
    _check_sizes(header, len(sections))
    return header, _Memory(sections)


def split_file(file: IO[bytes]) -> tuple[Header, Sections]:
    """The header and the sections of a patch in a file, which is read once to check its checksum, and not held."""
    size_bytes = file.seek(0, 2)
    file.seek(0)
    start = file.read(_FRONT_BYTES)
    announced = message.message_bytes(start)
    if announced != size_bytes:
        problem = f"a message of {announced} bytes in a file of {size_bytes}"
        raise TruncatedError(problem) if announced > size_bytes else CorruptError(f"{problem}: bytes after its end")
    _check_file(file, size_bytes)
    reader = Reader(start)
    reader.take(len(message.MAGIC) + 1)
    reader.varint()
    coded_size = reader.varint(limit=2 * size_bytes)
    file.seek(reader.offset - len(varint(coded_size)))
    lead = file.read(len(varint(coded_size)) + coded_size // 2)
    header = _read_header(Reader(lead), len(lead))
    section_start = reader.offset + coded_size // 2
    _check_sizes(header, size_bytes - _CRC_BYTES - section_start)
    return header, _File(file, section_start)


def begins_as_patch(file: IO[bytes]) -> bool:
    """Whether a file begins as a patch does; False for anything else."""
    try:
        reader = Reader(file.read(_FRONT_BYTES))
        if bytes(reader.take(len(message.MAGIC))) != message.MAGIC:
            return False
        reader.byte()
        reader.varint()
        coded_size = reader.varint()
        file.seek(reader.offset)
        stored = file.read(min(coded_size // 2, _BLOCK_BYTES))
    except FormatError:
        return False
    if coded_size % 2:
        try:
            stored = zlib.decompressobj().decompress(stored, 1)
        except zlib.error:
            return False
    return stored[:1] == bytes((records.KIND,))


def write_file(file: IO[bytes], header: Header, spools: Sequence[IO[bytes]]) -> None:
    """Write a patch whose sections lie in other files, one after the other."""
    lead = front(header, sum(spool.seek(0, 2) for spool in spools))
    file.write(lead)
    checksum = zlib.crc32(lead)
    for spool in spools:
        spool.seek(0)
        while block := spool.read(_BLOCK_BYTES):
            file.write(block)
            checksum = zlib.crc32(block, checksum)
    file.write(checksum.to_bytes(_CRC_BYTES, "little"))


def _read_header(reader: Reader, available: int) -> Header:
    coded_size = reader.varint(limit=2 * available + 1)
    stored = reader.take(coded_size // 2)
    return records.read(Reader(message.inflate(stored) if coded_size % 2 else stored))


def _check_sizes(header: Header, section_bytes: int) -> None:
    announced = sum(header.group_sizes) + sum(sum(record.sizes) for record in header.tensors)
    if announced != section_bytes:
        raise CorruptError(f"sections of {announced} bytes announced, {section_bytes} found")


def _check_file(file: IO[bytes], size_bytes: int) -> None:
    file.seek(0)
    left, checksum = size_bytes - _CRC_BYTES, 0
    while left > 0:
        block = file.read(min(_BLOCK_BYTES, left))
        checksum = zlib.crc32(block, checksum)
        left -= len(block)
        if not block:
            raise TruncatedError(f"the file ends {left} bytes early")
    if left < 0 or checksum != int.from_bytes(file.read(_CRC_BYTES), "little"):
        raise CorruptError("checksum does not match: the message was changed on its way")
