"""Where two arrays of bit patterns differ, and by how many steps.

Patterns are unsigned integers of 8 to 64 bits. The key of a pattern orders numbers as their values do: for floats, `flip` is the mask of
all bits but the sign, for integers it is 0. A step is the difference of two keys, modulo the width of the pattern. It travels as
``2 * (abs(step) - 1) + (step < 0)``, its code, so that small steps are small numbers; a code has the width of its pattern.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import count_ones, trailing_zeros
from .jit import inline, kernel
from .vectors import LANES, prefetch_to_read, prefetch_to_write, unequal

Patterns = NDArray[Any]
Positions = NDArray[np.uint32]
Codes = NDArray[Any]

_0, _1, _LANES = np.uint64(0), np.uint64(1), np.uint64(LANES)
_AT_ONCE, _CHUNK = np.uint64(4), np.uint64(64 * LANES)
_CHANGES_AHEAD, _BYTES_AHEAD, _LINE = np.uint64(16), 2048, 64


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


@inline
def _write_set_bits(bits: np.uint64, start: np.uint64, positions: Positions, count: np.uint64) -> np.uint64:
    """Write start + j for every set bit j to `positions` from `count` on; returns the count after them.

    Four are written at once, however many are left, as a branch for each would often be mispredicted.
    """
    after = count + np.uint64(count_ones(bits))
    while True:
        for i in range(_AT_ONCE):
            positions[count + i] = np.uint32(start + trailing_zeros(bits))
            bits &= bits - _1
        count += _AT_ONCE
        if not bits:
            return after


@inline
def _prefetch_block(patterns: Patterns, block: int) -> None:
    """Prefetch the block 2 kB after this one: the processor by itself does not look as far ahead, and not beyond a page."""
    for line in range(0, LANES * patterns.itemsize, _LINE):
        prefetch_to_read(patterns, np.uint64(block) + np.uint64((_BYTES_AHEAD + line) // patterns.itemsize))


@kernel
def find(old: Patterns, new: Patterns, bounds: tuple[int, int], flip: np.uint64, positions: Positions, codes: Codes, count: int) -> int:
    """Write the positions between two bounds where the patterns differ, and the codes of the steps, to the outputs from `count` on.

    Returns the count after them. Both outputs are at least as long as the patterns, and `count` is not above the first bound. The codes of
    a chunk of 4,096 patterns are written right after its positions, while the patterns are in the nearest cache.
    """
    top = np.uint64(8 * old.itemsize - 1)
    mask = ((_1 << top) - _1) << _1 | _1
    found = coded = np.uint64(count)
    start, stop = np.uint64(bounds[0]), np.uint64(bounds[1])
    for chunk in range(start, stop, _CHUNK):
        end = min(chunk + _CHUNK, stop)
        whole = end - (end - chunk) % _LANES
        for block in range(chunk, whole, _LANES):
            _prefetch_block(old, block)
            _prefetch_block(new, block)
            found = _write_set_bits(unequal(old, new, block), np.uint64(block), positions, found)
        for at in range(whole, end):
            positions[found] = np.uint32(at)
            found += np.uint64(old[at] != new[at])
        for i in range(coded, found):
            changed = np.uint64(positions[i])
            codes[i] = code_of(np.uint64(old[changed]), np.uint64(new[changed]), flip, top, mask)
        coded = found
    return int(np.int64(found))


@inline
def _move(patterns: Patterns, positions: Positions, codes: Codes, flip: np.uint64, back: np.uint64) -> None:
    top = np.uint64(8 * patterns.itemsize - 1)
    mask = ((_1 << top) - _1) << _1 | _1
    last = np.uint64(positions.size) - _1
    for i in range(np.uint64(positions.size)):
        prefetch_to_write(patterns, np.uint64(positions[min(i + _CHANGES_AHEAD, last)]))
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
