"""Rice codes of the gaps of many tensors at once: the same bits as `rice`, tensor after tensor, each from a whole byte on."""

from __future__ import annotations

import numpy as np

from .bits import Bytes, Words, put
from .gaps import MAX_WIDTH_BITS, Numbers, Positions, between, load
from .jit import kernel
from .rice import ONE_BLOCK, PARAMETER_BITS, Parameters, ceil8, plan, unpack

_1, _63 = np.uint64(1), np.uint64(ONE_BLOCK - 1)


@kernel
def _write(gaps: Numbers, shift: int, parameters: Parameters, low_bits: int, words: Words, at: int) -> None:
    """Write one section from bit `at` on: the front, the low bits, the unary ends."""
    if shift:
        put(words, at, np.uint64(ONE_BLOCK + shift))
        for b in range(parameters.size):
            put(words, at + 8 + PARAMETER_BITS * b, np.uint64(parameters[b]))
        at += 8 + 8 * ceil8(PARAMETER_BITS * parameters.size)
    else:
        put(words, at, np.uint64(parameters[0]))
        at += 8
    block = 1 << shift if shift else gaps.size
    low_at, unary_at = at, at + low_bits
    for b in range(parameters.size):
        k = np.uint64(parameters[b])
        mask = (_1 << k) - _1
        for i in range(b * block, min(gaps.size, (b + 1) * block)):
            put(words, low_at, gaps[i] & mask)
            low_at += parameters[b]
            unary_at += int(np.int64(gaps[i] >> k))
            words[unary_at >> 6] |= _1 << np.uint64(unary_at & 63)
            unary_at += 1


@kernel
def encode(positions: Positions, bounds: Positions, ends: Positions) -> Words:
    """The sections of tensors whose positions lie between two bounds each; where each section ends, in bytes, is written to `ends`.

    A tensor without positions has an empty section.
    """
    count = bounds.size - 1
    shifts, lows = np.zeros(count, np.int64), np.zeros(count, np.int64)
    tables = np.zeros(count + 1, np.int64)
    parameters = np.empty(positions.size + count, np.uint8)
    end = 0
    for t in range(count):
        if bounds[t] < bounds[t + 1]:
            shift, best, low, unary = plan(between(positions[bounds[t] : bounds[t + 1]]))
            parameters[tables[t] : tables[t] + best.size] = best
            tables[t + 1] = tables[t] + best.size
            shifts[t], lows[t] = shift, low
            end += 1 + (ceil8(PARAMETER_BITS * best.size) if shift else 0) + ceil8(low + unary)
        else:
            tables[t + 1] = tables[t]
        ends[t] = end
    words = np.zeros(end // 8 + 2, np.uint64)
    start = 0
    for t in range(count):
        if bounds[t] < bounds[t + 1]:
            gaps = between(positions[bounds[t] : bounds[t + 1]])
            _write(gaps, shifts[t], parameters[tables[t] : tables[t + 1]], lows[t], words, 8 * start)
        start = ends[t]
    return words


@kernel
def _read(packed: Bytes, size_bytes: int, limit: int, out: Numbers) -> bool:
    """Whether `packed`, padded as `rice.unpack` wants it, is exactly the section of so many positions below `limit`, which go to `out`."""
    if size_bytes < 1:
        return False
    first = np.int64(packed[0])
    block, front = out.size, 1
    if first < ONE_BLOCK:
        parameters = np.full(1, packed[0], np.uint8)
    else:
        shift = first - ONE_BLOCK
        if shift != 5 and shift != 6 and shift != 8 and shift != 10:
            return False
        block = 1 << shift  # type: ignore[assignment]
        table_bits = PARAMETER_BITS * ((out.size + block - 1) // block)
        front += ceil8(table_bits)
        if front > size_bytes or (table_bits & 7 and packed[front - 1] >> np.uint8(table_bits & 7)):
            return False
        parameters = np.empty((out.size + block - 1) // block, np.uint8)
        for b in range(parameters.size):
            parameters[b] = load(packed, np.uint64(8 + PARAMETER_BITS * b)) & _63
    low_bits = 0
    for b in range(parameters.size):
        if parameters[b] > MAX_WIDTH_BITS:
            return False
        low_bits += np.int64(parameters[b]) * min(block, out.size - b * block)  # type: ignore[assignment]
    body_bytes = size_bytes - front
    if low_bits > 8 * body_bytes:
        return False
    body = packed[front : front + ((body_bytes + 15) >> 3 << 3)]
    used_bits = unpack(body, parameters, block, low_bits, limit, out)
    if used_bits < 0 or ceil8(used_bits) != body_bytes:
        return False
    return not (used_bits & 7 and body[body_bytes - 1] >> np.uint8(used_bits & 7))


@kernel
def decode(packed: Bytes, ends: Positions, limits: Positions, bounds: Positions, out: Numbers) -> bool:
    """Write the positions of all sections to `out`; return whether they are as a writer makes them.

    Section t ends at byte ends[t]; 16 spare bytes follow the last. It holds bounds[t + 1] - bounds[t] positions below limits[t].
    """
    start = 0
    for t in range(ends.size):
        own = out[bounds[t] : bounds[t + 1]]
        size_bytes = ends[t] - start
        if own.size:
            # A copy, so that the bytes of the next section are not read as part of this one.
            section = np.zeros((size_bytes + 23) >> 3 << 3, np.uint8)
            section[:size_bytes] = packed[start : ends[t]]
            if own.size > 8 * size_bytes or not _read(section, size_bytes, limits[t], own):
                return False
        elif size_bytes:
            return False
        start = ends[t]
    return True
