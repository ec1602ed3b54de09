"""Arrays of bytes and of numbers by rANS with a table of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..errors import CorruptError, TruncatedError
from ..reader import Reader, expect_padding, varint
from .tables import frequencies_of, levels_of, read_levels, write_levels

Symbols = NDArray[np.uint8]
Numbers = NDArray[Any]

_RAW, _CODED = 0, 1


def write_symbols(symbols: Symbols) -> bytes:
    """Bytes, coded with a table of their frequencies, or as they are where that is not longer; all equal ones take the table only."""
    contexts, counts = np.zeros(symbols.size, np.uint8), np.zeros((1, 256), np.int64)
    kernels.rans.count(symbols, contexts, counts)
    levels = levels_of(counts[0])
    front = bytes((_CODED,)) + write_levels(levels)
    whole = front + (write_stream(symbols, contexts, [levels]) if np.count_nonzero(levels) > 1 else b"")
    return whole if len(whole) <= symbols.size else bytes((_RAW,)) + symbols.tobytes()


def read_symbols(reader: Reader, count: int) -> Symbols:
    """The inverse of `write_symbols`."""
    form = reader.byte()
    if form == _RAW:
        return reader.array("u1", count)
    if form != _CODED:
        raise CorruptError(f"symbols of form {form}, known are {_RAW} and {_CODED}")
    levels = read_levels(reader, 256)
    used = np.flatnonzero(levels)
    if used.size < 2:
        if count and not used.size:
            raise CorruptError(f"no table for {count} symbols")
        return np.full(count, used[0] if used.size else 0, np.uint8)
    return read_stream(reader, np.zeros(count, np.uint8), [levels])


def write_stream(symbols: Symbols, contexts: Symbols, levels: Sequence[Symbols]) -> bytes:
    """Symbols with the frequency levels of their contexts, which the reader has already."""
    states, words = np.empty(4, np.uint32), np.empty(symbols.size + 1, np.uint16)
    first = kernels.rans.encode(symbols, contexts, frequencies_of(levels), states, words)
    coded = words[first:].astype("<u2", copy=False)
    return states.astype("<u4").tobytes() + varint(coded.size) + coded.tobytes()


def read_stream(reader: Reader, contexts: Symbols, levels: Sequence[Symbols]) -> Symbols:
    """The inverse of `write_stream`, for one symbol per context given."""
    states = reader.array("<u4", 4).astype(np.uint32, copy=False)
    size = reader.varint(limit=reader.remaining // 2)
    words = np.zeros(size + 4, np.uint16)
    words[:size] = reader.array("<u2", size)
    out = np.empty(contexts.size, np.uint8)
    table = kernels.rans.table_of(frequencies_of(levels))
    if kernels.rans.decode(words, size, table, contexts, states, out) != size:
        raise CorruptError(f"{size} words do not hold {contexts.size} symbols exactly")
    return out


def write_extras(numbers: Numbers, tokens: Symbols, size_bits: int) -> bytes:
    """The extra bits of numbers whose tokens are coded elsewhere."""
    words = kernels.bits.zero_words(size_bits)
    kernels.tokens.pack_extras(numbers, tokens, words)
    return kernels.bits.to_bytes(words, size_bits)


def split(numbers: Numbers) -> tuple[Symbols, int]:
    """The tokens of numbers, and how many extra bits they have."""
    tokens = np.empty(numbers.size, np.uint8)
    return tokens, int(kernels.tokens.split(numbers, tokens))


def join(tokens: Symbols, packed: memoryview, dtype: np.dtype[Any]) -> Numbers:
    """The numbers of these tokens, with the extra bits that `packed` holds exactly."""
    numbers = np.empty(tokens.size, dtype)
    used_bits = int(kernels.tokens.join(tokens, kernels.gaps.padded(packed), 8 * len(packed), numbers))
    if used_bits < 0:
        raise TruncatedError(f"{len(packed)} bytes of extra bits are too few, or make a number that is no {dtype}")
    if (used_bits + 7) // 8 != len(packed):
        raise CorruptError(f"{len(packed)} bytes of extra bits, of which {used_bits} bits are used")
    expect_padding(packed, used_bits)
    return numbers


def write_numbers(numbers: Numbers) -> bytes:
    """Numbers as coded tokens and extra bits.

    >>> part = write_numbers(np.uint16([0, 1, 1, 0, 0, 90]))
    >>> read_numbers(Reader(part), 6, np.dtype(np.uint16))
    array([ 0,  1,  1,  0,  0, 90], dtype=uint16)
    """
    tokens, size_bits = split(numbers)
    return write_symbols(tokens) + write_extras(numbers, tokens, size_bits)


def read_numbers(reader: Reader, count: int, dtype: np.dtype[Any]) -> Numbers:
    """The inverse of `write_numbers`; it takes all that is left of the reader."""
    tokens = read_symbols(reader, count)
    return join(tokens, reader.rest(), dtype)


def write_planes(patterns: NDArray[Any]) -> bytes:
    """Bit patterns as coded planes of bytes, the lowest first: exponents repeat, mantissas do not."""
    planes = patterns.view(np.uint8).reshape(-1, patterns.itemsize)
    parts = [write_symbols(np.ascontiguousarray(planes[:, i])) for i in range(patterns.itemsize)]
    return b"".join(varint(len(part)) + part for part in parts)


def read_planes(reader: Reader, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The inverse of `write_planes`; nothing may follow."""
    parts = [Reader(reader.take(reader.varint())) for _ in range(dtype.itemsize)]
    reader.expect_end()
    out = np.empty((count, dtype.itemsize), np.uint8)
    for i, part in enumerate(parts):
        out[:, i] = read_symbols(part, count)
        part.expect_end()
    return out.reshape(-1).view(dtype)
