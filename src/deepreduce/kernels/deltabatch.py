"""Gaps of many tensors at once: the same bits as `gaps.pack`, tensor after tensor, each from a whole byte on."""

from __future__ import annotations

import numpy as np

from .bits import Bytes, Words, bit_length, put
from .gaps import BLOCK, Numbers, Positions, between, unpack, widths
from .jit import kernel


@kernel
def _width_bits(numel: int) -> int:
    """Bits for the width of a block: no gap is wider than the last position."""
    return bit_length(np.uint64(bit_length(np.uint64(numel - 1))))


@kernel
def encode(positions: Positions, numels: Positions, bounds: Positions, ends: Positions) -> Words:
    """The sections of tensors whose positions lie between two bounds each; where each section ends, in bytes, is written to `ends`.

    A tensor without positions has an empty section.
    """
    count = bounds.size - 1
    found = np.empty(positions.size // BLOCK + count, np.uint8)
    end = first = 0
    for t in range(count):
        size = bounds[t + 1] - bounds[t]
        if size:
            own = widths(between(positions[bounds[t] : bounds[t + 1]]))
            found[first : first + own.size] = own
            first += own.size
            size_bits = own.size * _width_bits(numels[t]) - (own.size * BLOCK - size) * np.int64(own[-1])
            for width in own:
                size_bits += BLOCK * np.int64(width)
            end += (size_bits + 7) >> 3
        ends[t] = end
    words = np.zeros(end // 8 + 2, np.uint64)
    start = first = 0
    for t in range(count):
        gaps = between(positions[bounds[t] : bounds[t + 1]])
        blocks = (gaps.size + BLOCK - 1) // BLOCK
        width_bits = _width_bits(numels[t])
        at = 8 * start + blocks * width_bits
        for b in range(blocks):
            put(words, 8 * start + b * width_bits, np.uint64(found[first + b]))
            for i in range(b * BLOCK, min(gaps.size, (b + 1) * BLOCK)):
                put(words, at, gaps[i])
                at += found[first + b]
        first += blocks
        start = ends[t]
    return words


@kernel
def decode(packed: Bytes, ends: Positions, numels: Positions, bounds: Positions, out: Numbers) -> bool:
    """Write the positions of all sections to `out`; return whether they are as a writer makes them.

    Section t ends at byte ends[t]; 16 spare bytes follow the last. It holds bounds[t + 1] - bounds[t] positions below numels[t].
    """
    start = 0
    for t in range(ends.size):
        own = out[bounds[t] : bounds[t + 1]]
        section = packed[start:]
        size_bytes = ends[t] - start
        used_bits = 0
        if own.size:
            width_bits = _width_bits(numels[t])
            if ((own.size + BLOCK - 1) // BLOCK) * width_bits > 8 * size_bytes:
                return False
            used_bits = unpack(section, 8 * size_bytes, width_bits, numels[t], own)
        if used_bits < 0 or (used_bits + 7) >> 3 != size_bytes:
            return False
        if used_bits & 7 and section[size_bytes - 1] >> np.uint8(used_bits & 7):
            return False
        start = ends[t]
    return True
