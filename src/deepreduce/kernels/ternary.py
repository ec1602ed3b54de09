"""Ternary digits: five per byte, and runs of zero bytes (3LC)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import Bytes
from .jit import kernel

Digits = NDArray[np.int8]

DIGITS_PER_BYTE = 5
ZERO = 121
"""Five zeros: 1 + 3 + 9 + 27 + 81, as a digit d is written as d + 1."""
FIRST_RUN, LONGEST_RUN = 243, 14
"""Byte 243 stands for two zero bytes, and so on up to byte 255 for fourteen."""


@kernel
def _digits(values: NDArray[Any], half: float, out: Digits) -> None:
    for i in range(out.size):
        out[i] = np.int8(values[i] > half) - np.int8(values[i] < -half)


def digits(values: NDArray[Any], scale: float) -> Digits:
    """The nearest of -1, 0 and 1 to each value / scale; what lies in the middle becomes 0.

    >>> digits(np.array([0.9, -0.6, 0.5, 0.0]), 1.0)
    array([ 1, -1,  0,  0], dtype=int8)
    """
    out = np.empty(values.size, np.int8)
    _digits(values, scale / 2, out)
    return out


@kernel
def _fold(digits: Digits, out: Bytes) -> None:
    for b in range(out.size):
        byte = 0
        for i in range(DIGITS_PER_BYTE * b, DIGITS_PER_BYTE * (b + 1)):
            digit = int(digits[i]) if i < digits.size else 0
            byte = 3 * byte + digit + 1
        out[b] = np.uint8(byte)


@kernel
def _unfold(folded: Bytes, out: Digits) -> None:
    for b in range(folded.size):
        byte = int(folded[b])
        for i in range(DIGITS_PER_BYTE * (b + 1) - 1, DIGITS_PER_BYTE * b - 1, -1):
            if i < out.size:
                out[i] = np.int8(byte % 3 - 1)
            byte //= 3


@kernel
def _squeeze(folded: Bytes, out: Bytes) -> int:
    """Runs of zero bytes in one byte each; `out` is as long as `folded`. Returns how much of it is used."""
    used = 0
    run = 0
    for b in range(folded.size + 1):
        zero = b < folded.size and folded[b] == ZERO
        if run > 0 and (run == LONGEST_RUN or not zero):
            out[used] = np.uint8(ZERO if run == 1 else FIRST_RUN + run - 2)
            used += 1
            run = 0
        if zero:
            run += 1
        elif b < folded.size:
            out[used] = folded[b]
            used += 1
    return used


@kernel
def _stretch(squeezed: Bytes, out: Bytes) -> int:
    """The inverse of `_squeeze`; returns how many bytes there are, of which those beyond `out` are not written."""
    size = 0
    for b in range(squeezed.size):
        byte = int(squeezed[b])
        run = byte - FIRST_RUN + 2 if byte >= FIRST_RUN else 1
        for i in range(size, min(size + run, out.size)):
            out[i] = np.uint8(ZERO if byte >= FIRST_RUN else byte)
        size += run
    return size


def pack(digits: Digits) -> bytes:
    """Digits as bytes: five each in base 3, the first one in front, the last byte filled with zeros; then runs of zero bytes.

    >>> pack(np.int8([1, 0, 0, 0, -1] + [0] * 70)).hex()
    'c9ff'
    """
    folded = np.empty(-(-digits.size // DIGITS_PER_BYTE), np.uint8)
    _fold(digits, folded)
    squeezed = np.empty_like(folded)
    return squeezed[: _squeeze(folded, squeezed)].tobytes()


def unpack(packed: bytes | memoryview, count: int) -> Digits | None:
    """The `count` digits; None where the bytes do not stand for exactly so many and the zeros after them.

    >>> unpack(bytes.fromhex("c9ff"), 75)[:6]
    array([ 1,  0,  0,  0, -1,  0], dtype=int8)
    """
    size_bytes = -(-count // DIGITS_PER_BYTE)
    if size_bytes > LONGEST_RUN * len(packed):
        return None
    folded = np.empty(size_bytes, np.uint8)
    if _stretch(np.frombuffer(packed, np.uint8), folded) != size_bytes:
        return None
    padding = 3 ** (size_bytes * DIGITS_PER_BYTE - count)
    if size_bytes and folded[-1] % padding != ZERO % padding:
        return None
    digits = np.empty(count, np.int8)
    _unfold(folded, digits)
    return digits
