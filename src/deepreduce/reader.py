"""Checked reading and plain writing of little-endian bytes.

Bytes from a peer are hostile: they are touched through a `Reader` only, which bounds every length before it allocates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .errors import CorruptError, TruncatedError
from .kernels import codes

if TYPE_CHECKING:
    from typing_extensions import Buffer

Part = bytes | memoryview

MAX_TEXT_BYTES = 65535


def varint(number: int) -> bytes:
    """LEB128: seven bits per byte, least significant first.

    >>> varint(300).hex()
    'ac02'
    """
    return bytes((number,)) if number < 0x80 else varints((number,))


def varints(numbers: Iterable[int]) -> bytes:
    """`varint` of each number, one after another.

    >>> varints([7, 300]).hex()
    '07ac02'
    """
    out = bytearray()
    for number in numbers:
        while number >= 0x80:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


def text(string: str) -> bytes:
    """UTF-8 with its length in front."""
    raw = string.encode()
    return varint(len(raw)) + raw


class Reader:
    """Reads from the front of a buffer; every length is checked first. Nobody can write to the buffer through it.

    >>> reader = Reader(b"\\x03abc\\x07")
    >>> reader.text(), reader.byte()
    ('abc', 7)
    >>> reader.take(2)
    Traceback (most recent call last):
        ...
    deepreduce.errors.TruncatedError: need 2 bytes at offset 5, have 0
    """

    def __init__(self, buffer: Buffer) -> None:
        self._view = memoryview(buffer).toreadonly().cast("B")
        self._size = len(self._view)
        self.offset = 0

    @property
    def remaining(self) -> int:
        """Bytes not read yet."""
        return self._size - self.offset

    def take(self, size_bytes: int) -> memoryview:
        """The next bytes, as a view."""
        start = self.offset
        if not 0 <= size_bytes <= self._size - start:
            raise TruncatedError(f"need {size_bytes} bytes at offset {start}, have {self.remaining}")
        self.offset = end = start + size_bytes
        return self._view[start:end]

    def rest(self) -> memoryview:
        """All bytes that are left, as a view."""
        return self.take(self.remaining)

    def byte(self) -> int:
        """One byte as a number."""
        if self.offset == self._size:
            raise TruncatedError(f"need 1 byte at offset {self.offset}, have 0")
        self.offset += 1
        return self._view[self.offset - 1]

    def varint(self, limit: int = 2**63 - 1) -> int:
        """A LEB128 number, at most `limit`; the shortest form only."""
        number = 0
        for shift in range(0, 70, 7):
            byte = self.byte()
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    raise CorruptError(f"a number at offset {self.offset} is longer than it needs to be")
                if number > limit:
                    raise CorruptError(f"number {number} before offset {self.offset} is above {limit}")
                return number
        raise CorruptError(f"a number at offset {self.offset} is longer than 10 bytes")

    def varints(self) -> list[int]:
        """All that is left, as LEB128 numbers below 2**63 in their shortest form.

        >>> Reader(bytes.fromhex("07ac0200")).varints()
        [7, 300, 0]
        """
        numbers: list[int] = []
        number = shift = 0
        for byte in self.rest():
            number |= (byte & 0x7F) << shift
            if byte & 0x80:
                shift += 7
                if shift > 56:
                    raise CorruptError(f"number {len(numbers)} of a list is longer than 9 bytes")
            elif byte == 0 and shift:
                raise CorruptError(f"number {len(numbers)} of a list is longer than it needs to be")
            else:
                numbers.append(number)
                number = shift = 0
        if shift:
            raise TruncatedError(f"number {len(numbers)} of a list ends too early")
        return numbers

    def text(self, limit: int = MAX_TEXT_BYTES) -> str:
        """A string with its length in front."""
        raw = bytes(self.take(self.varint(limit)))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CorruptError(f"text before offset {self.offset} is not UTF-8") from error

    def array(self, dtype: Any, count: int) -> NDArray[Any]:
        """`count` items as a new, aligned array; nothing is allocated before the length is known to fit."""
        wanted = np.dtype(dtype)
        return np.frombuffer(self.take(wanted.itemsize * count), np.uint8).copy().view(wanted)

    def packed(self, count: int, width_bits: int, dtype: type[np.unsignedinteger[Any]] = np.uint64) -> NDArray[Any]:
        """`count` numbers of `width_bits` bits each, which the dtype holds, with zero bits up to the next byte.

        >>> Reader(bytes.fromhex("2103")).packed(3, 4)
        array([1, 2, 3], dtype=uint64)
        """
        raw = self.take(kernels.bits.packed_bytes(count, width_bits))
        expect_padding(raw, count * width_bits)
        return kernels.bits.unpack(raw, width_bits, count, dtype)

    def expect_end(self) -> None:
        """Refuse bytes that nobody asked for."""
        if self.remaining:
            raise CorruptError(f"{self.remaining} unexpected bytes at offset {self.offset}")


def expect_padding(packed: Part, used_bits: int) -> None:
    """Refuse bits of the last byte that are not used and not zero; the bytes end with that of the last bit that is used.

    >>> expect_padding(bytes.fromhex("2113"), 12)
    Traceback (most recent call last):
        ...
    deepreduce.errors.CorruptError: bits after the last one, number 11, are not zero
    """
    if used_bits % 8 and packed[-1] >> used_bits % 8:
        raise CorruptError(f"bits after the last one, number {used_bits - 1}, are not zero")


_PROBLEMS = {
    codes.BEYOND_LIMIT: "a number is too large",
    codes.INVALID: "there are bits that stand for nothing",
    codes.LEFT_OVER: "there is more than that",
}


def expect_decoded(code: int, what: str) -> None:
    """Raise the error for the code that a decoding kernel returned, if it is below 0.

    >>> expect_decoded(codes.ENDS_EARLY, "5 gaps in 2 bytes")
    Traceback (most recent call last):
        ...
    deepreduce.errors.TruncatedError: 5 gaps in 2 bytes: the bytes end too early
    """
    if code == codes.ENDS_EARLY:
        raise TruncatedError(f"{what}: the bytes end too early")
    if code < 0:
        raise CorruptError(f"{what}: {_PROBLEMS[code]}")
