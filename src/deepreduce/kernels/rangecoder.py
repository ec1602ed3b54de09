"""A range coder on 64 bits: a number in the range that is left is chosen part by part.

From `LOW` on, `RANGE` is left of the numbers that begin with the first `AT` bytes. A reader has in `CODE` the number behind `LOW`, and sets
`WRONG` where it lies outside of the range.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import inline, kernel

Bytes = NDArray[np.uint8]
State = NDArray[np.uint64]

LOW, RANGE, AT, CODE, WRONG = range(5)
STATE_SIZE = 5

FLUSH_BYTES = 2
"""What is written is never shorter."""

FULL_RANGE = np.uint64(2**64 - 1)
FLUSH_STEP = np.uint64((1 << 48) - 1)

_0, _1, _8 = np.uint64(0), np.uint64(1), np.uint64(8)
_TOP_BYTE = np.uint64(56)
_LEAST_RANGE = np.uint64(1 << 56)
_FLUSHED_BITS = np.uint64(48)


@kernel
def _carry(out: Bytes, at: int) -> None:
    at -= 1
    while out[at] == 255:
        out[at] = 0
        at -= 1
    out[at] += 1


@inline
def narrow(state: State, out: Bytes, start: np.uint64, size: np.uint64, parts_bits: np.uint64) -> None:
    """Write a choice: of 2**parts_bits parts of the range, the `size` ones from `start` on are left."""
    part = state[RANGE] >> parts_bits
    low = state[LOW] + start * part
    if low < state[LOW]:
        _carry(out, int(np.int64(state[AT])))
    left, at = size * part, state[AT]
    while left < _LEAST_RANGE:
        out[at] = low >> _TOP_BYTE
        at += _1
        low <<= _8
        left <<= _8
    state[LOW], state[RANGE], state[AT] = low, left, at


@kernel
def flush(state: State, out: Bytes) -> int:
    """Two bytes after which all continuations are inside the range: so what is written is never the beginning of something else."""
    low, at = state[LOW] + FLUSH_STEP, int(np.int64(state[AT]))
    if low < state[LOW]:
        _carry(out, at)
    out[at], out[at + 1] = low >> _TOP_BYTE, low >> _FLUSHED_BITS
    return at + FLUSH_BYTES


@kernel
def open_stream(state: State, packed: Bytes) -> None:
    """Begin to read."""
    state[RANGE], state[AT] = FULL_RANGE, _8
    for i in range(8):
        state[CODE] = state[CODE] << _8 | (np.uint64(packed[i]) if i < packed.size else _0)


@inline
def follow(state: State, packed: Bytes, start: np.uint64, size: np.uint64, parts_bits: np.uint64) -> None:
    """The mirror of `narrow`; `code` is the number behind `low`. There are zeros after the last byte."""
    part = state[RANGE] >> parts_bits
    code, left, at = state[CODE] - start * part, size * part, state[AT]
    if code >= left:
        state[WRONG] = _1
    while left < _LEAST_RANGE:
        code = code << _8 | (np.uint64(packed[at]) if at < np.uint64(packed.size) else _0)
        at += _1
        left <<= _8
    state[CODE], state[RANGE], state[AT] = code, left, at
