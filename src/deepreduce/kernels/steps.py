"""Where two arrays of bit patterns differ, and by how many steps.

Patterns are unsigned integers of 8 to 64 bits. The key of a pattern orders numbers as their values do: for floats, `flip` is the mask of
all bits but the sign, for integers it is 0. A step is the difference of two keys, modulo the width of the pattern. It travels as
``2 * (abs(step) - 1) + (step < 0)``, its code, so that small steps are small numbers; a code has the width of its pattern.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import trailing_zeros
from .jit import inline, kernel
from .vectors import LANES, prefetch, unequal

Patterns = NDArray[Any]
Positions = NDArray[np.uint32]
Codes = NDArray[Any]

_0, _1, _LANES = np.uint64(0), np.uint64(1), np.uint64(LANES)
_AHEAD = np.uint64(16)


@inline
def key(pattern: np.uint64, flip: np.uint64, top: np.uint64) -> np.uint64:
    """The key of a pattern, and the pattern of a key; `top` is the number of the sign bit."""
    return pattern ^ ((_0 - (pattern >> top)) & flip)


@inline
def code_of(old: np.uint64, new: np.uint64, flip: np.uint64, top: np.uint64, mask: np.uint64) -> np.uint64:
    """The code of the step between two patterns that differ."""
    step = (key(new, flip, top) - key(old, flip, top)) & mask
    negative = step >> top
    magnitude = (step ^ (_0 - negative)) + negative & mask
    return ((magnitude - _1) << _1) + negative


@inline
def moved(old: np.uint64, code: np.uint64, flip: np.uint64, top: np.uint64, mask: np.uint64) -> np.uint64:
    """The pattern that lies this step away."""
    negative = code & _1
    step = ((code >> _1) + _1 ^ (_0 - negative)) + negative
    return key((key(old, flip, top) + step) & mask, flip, top)


@kernel
def find(old: Patterns, new: Patterns, flip: np.uint64, positions: Positions, codes: Codes) -> int:
    """Write the positions that differ, and the codes of their steps; returns how many. Both outputs have room for all of them."""
    top = np.uint64(8 * old.itemsize - 1)
    mask = ((_1 << top) - _1) << _1 | _1
    count, size = _0, np.uint64(old.size)
    whole = size - size % _LANES
    for block in range(_0, whole, _LANES):
        differ = unequal(old, new, block)
        while differ:
            at = block + trailing_zeros(differ)
            differ &= differ - _1
            positions[count] = np.uint32(at)
            codes[count] = code_of(np.uint64(old[at]), np.uint64(new[at]), flip, top, mask)
            count += _1
    for at in range(whole, size):
        if old[at] != new[at]:
            positions[count] = np.uint32(at)
            codes[count] = code_of(np.uint64(old[at]), np.uint64(new[at]), flip, top, mask)
            count += _1
    return int(np.int64(count))


@inline
def _move(patterns: Patterns, positions: Positions, codes: Codes, flip: np.uint64, back: np.uint64) -> None:
    top = np.uint64(8 * patterns.itemsize - 1)
    mask = ((_1 << top) - _1) << _1 | _1
    last = np.uint64(positions.size) - _1
    for i in range(np.uint64(positions.size)):
        prefetch(patterns, np.uint64(positions[min(i + _AHEAD, last)]))
        at = np.uint64(positions[i])
        patterns[at] = moved(np.uint64(patterns[at]), np.uint64(codes[i]) ^ back, flip, top, mask)


@kernel
def move(patterns: Patterns, positions: Positions, codes: Codes, flip: np.uint64) -> None:
    """Take the steps of these codes, in place; positions are below the size of `patterns`."""
    _move(patterns, positions, codes, flip, _0)


@kernel
def move_back(patterns: Patterns, positions: Positions, codes: Codes, flip: np.uint64) -> None:
    """Undo `move`."""
    _move(patterns, positions, codes, flip, _1)


@kernel
def narrow(positions: NDArray[np.int64], size: int, out: Positions) -> bool:
    """Copy positions to 32 bits; False where they do not increase from 0 or more to below `size`."""
    before, fine = np.int64(-1), np.bool_(True)
    for i in range(np.uint64(positions.size)):
        fine &= positions[i] > before
        before = positions[i]
        out[i] = np.uint32(before)
    return bool(fine and before < size)
