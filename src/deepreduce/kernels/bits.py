"""Packing numbers into bits, least significant bit first, in little-endian words of 64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from .jit import inline, kernel

Bytes = NDArray[np.uint8]
Unsigned = NDArray[Any]
Words = NDArray[np.uint64]


def _trailing_zeros(typing: Any, number: Any) -> Any:
    """The index of the lowest set bit, 64 for 0: one instruction, for which numba has no name."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zero_is_undefined = context.get_constant(types.boolean, False)
        return builder.cttz(arguments[0], zero_is_undefined)

    return types.uint64(types.uint64), emit


def _leading_zeros(typing: Any, number: Any) -> Any:
    """The zero bits above the highest set one, 64 for 0: one instruction too."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zero_is_undefined = context.get_constant(types.boolean, False)
        return builder.ctlz(arguments[0], zero_is_undefined)

    return types.uint64(types.uint64), emit


def _count_ones(typing: Any, number: Any) -> Any:
    """How many bits of a number are set: one instruction as well."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), emit


trailing_zeros: Any = intrinsic(_trailing_zeros)
leading_zeros: Any = intrinsic(_leading_zeros)
count_ones: Any = intrinsic(_count_ones)


@inline
def bit_length(number: np.uint64) -> int:
    """How many bits the number takes; 0 for 0."""
    return 64 - np.int64(leading_zeros(number))  # type: ignore[return-value]


@inline
def put(words: Words, at: int, number: np.uint64) -> None:
    """Write a number at bit `at` of zeroed words; one word after its last bit must exist."""
    word, bit = at >> 6, np.uint64(at & 63)
    words[word] |= number << bit
    words[word + 1] |= (number >> np.uint64(1)) >> (np.uint64(63) - bit)


@inline
def get(words: Words, at: int) -> np.uint64:
    """The 64 bits from bit `at` on; the word after the one that holds it must exist."""
    word, bit = at >> 6, np.uint64(at & 63)
    bits: np.uint64 = (words[word] >> bit) | ((words[word + 1] << np.uint64(1)) << (np.uint64(63) - bit))
    return bits


def packed_bytes(count: int, width_bits: int) -> int:
    """Bytes that `count` numbers of `width_bits` bits take."""
    return (count * width_bits + 7) // 8


def zero_words(size_bits: int) -> Words:
    """Room for `put`, with its spare words."""
    return np.zeros(size_bits // 64 + 2, np.uint64)


def to_bytes(words: Words, size_bits: int) -> bytes:
    """The first `size_bits` bits of the words, as the wire has them."""
    return words.astype("<u8", copy=False).view(np.uint8)[: (size_bits + 7) // 8].tobytes()


def to_words(packed: bytes | memoryview | Bytes) -> Words:
    """A copy of the bytes as words for `get`, with its spare words."""
    raw = np.frombuffer(packed, np.uint8)
    words = np.zeros(raw.size // 8 + 2, "<u8")
    words.view(np.uint8)[: raw.size] = raw
    return words.astype(np.uint64, copy=False)


@kernel
def _pack(numbers: Unsigned, width_bits: int, words: Words) -> None:
    width, word, bit, bits = np.uint64(width_bits), np.uint64(0), np.uint64(0), np.uint64(0)
    for i in range(np.uint64(numbers.size)):
        number = np.uint64(numbers[i])
        bits |= number << bit
        bit += width
        if bit >= np.uint64(64):
            words[word] = bits
            word += np.uint64(1)
            bit -= np.uint64(64)
            bits = number >> (width - bit)
    words[word] |= bits


@kernel
def _unpack(words: Words, width_bits: int, out: Unsigned) -> None:
    mask = (np.uint64(1) << np.uint64(width_bits)) - np.uint64(1)
    for i in range(out.size):
        out[i] = get(words, i * width_bits) & mask


def pack(numbers: Unsigned, width_bits: int) -> bytes:
    """The low `width_bits` bits (0 to 63) of each number, of any unsigned dtype; higher bits must be zero.

    >>> pack(np.uint64([1, 2, 3]), 4).hex()
    '2103'
    """
    size_bits = numbers.size * width_bits
    words = zero_words(size_bits)
    _pack(numbers, width_bits, words)
    return to_bytes(words, size_bits)


def unpack(packed: bytes | memoryview | Bytes, width_bits: int, count: int, dtype: type[np.unsignedinteger[Any]] = np.uint64) -> Unsigned:
    """The inverse of `pack`; `packed` holds `packed_bytes(count, width_bits)` bytes. The padding is not looked at.

    >>> unpack(bytes.fromhex("2103"), 4, 3)
    array([1, 2, 3], dtype=uint64)
    """
    out = np.empty(count, dtype)
    _unpack(to_words(packed), width_bits, out)
    return out
