"""QSGD of many tensors at once: the same bits as `quantise`, tensor after tensor, each from a whole byte on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import Bytes, Words, put
from .draw import ROUNDING, _state, number
from .gaps import Positions, load
from .jit import kernel
from .quantise import _UNIT, Floats

_STREAM = np.uint64(ROUNDING)


@kernel
def _round_up(number: float) -> np.float32:
    rounded = np.float32(number)
    return np.nextafter(rounded, np.float32(np.inf)) if np.float64(rounded) < number else rounded


@kernel
def peak(values: NDArray[Any]) -> float:
    """The largest magnitude; NaN where there is one, 0 where there is nothing."""
    highest = 0.0
    for value in values:
        magnitude = abs(np.float64(value))
        if not magnitude <= highest:
            highest = magnitude
            if np.isnan(highest):
                break
    return highest


@kernel
def encode(
    values: NDArray[Any], bounds: Positions, group: int, euclidean: bool, width_bits: int, seeds: NDArray[np.uint64]
) -> tuple[Words, Positions]:
    """The sections of tensors whose values lie between two bounds each, and where each section ends, in bytes.

    A section holds the norm of each `group` values as a float32, then all signs and levels.
    """
    count = bounds.size - 1
    ends = np.zeros(count, np.int64)
    end = groups = 0
    for t in range(count):
        size = bounds[t + 1] - bounds[t]
        groups += (size + group - 1) // group
        end += 4 * ((size + group - 1) // group) + (size * width_bits + 7) // 8
        ends[t] = end
    words = np.zeros(end // 8 + 2, np.uint64)
    norms = np.zeros(groups, np.float32)
    bits = norms.view(np.uint32)
    levels, sign_bit = np.int64((1 << (width_bits - 1)) - 1), np.uint64(width_bits - 1)
    at = g = 0
    for t in range(count):
        first, last = bounds[t], bounds[t + 1]
        own_groups = (last - first + group - 1) // group
        code_at = 8 * at + 32 * own_groups
        stream = _state(seeds[t], _STREAM)
        for b in range(own_groups):
            low, high = first + b * group, min(first + (b + 1) * group, last)
            peak = square = 0.0
            for i in range(low, high):
                magnitude = abs(np.float64(values[i]))
                peak = max(peak, magnitude)
                square += magnitude * magnitude
            norms[g] = _round_up(max(peak, np.sqrt(square)) if euclidean else peak)
            put(words, 8 * at + 32 * b, np.uint64(bits[g]))
            norm = np.float64(norms[g])
            scale = levels / norm if norm > 0.0 else 0.0
            for i in range(low, high):
                scaled = abs(np.float64(values[i])) * scale
                below = np.int64(scaled)
                chance = np.float64(number(stream, i - first) >> np.uint64(11)) * _UNIT
                level = min(below + np.int64(chance < scaled - below), levels)
                negative = np.uint64((values[i] < 0.0) & (level > 0))
                put(words, code_at, np.uint64(level) | (negative << sign_bit))
                code_at += width_bits
            g += 1
        at = ends[t]
    return words, ends


@kernel
def decode(packed: Bytes, ends: Positions, bounds: Positions, group: int, width_bits: int, largest: float, out: NDArray[Any]) -> bool:
    """Write the values of all sections to `out`; return whether they are as a writer makes them.

    Section t ends at byte ends[t]; 16 spare bytes follow the last.
    """
    levels, sign_bit = np.uint64((1 << (width_bits - 1)) - 1), np.uint64(width_bits - 1)
    norm_bits = np.zeros(1, np.uint32)
    norms: Floats = norm_bits.view(np.float32)
    start = 0
    for t in range(ends.size):
        first, last = bounds[t], bounds[t + 1]
        groups, used_bits = (last - first + group - 1) // group, (last - first) * width_bits
        if ends[t] - start != 4 * groups + (used_bits + 7) // 8:
            return False
        if used_bits & 7 and packed[ends[t] - 1] >> np.uint8(used_bits & 7):
            return False
        at = np.uint64(8 * (start + 4 * groups))
        for b in range(groups):
            norm_bits[0] = np.uint32(load(packed, np.uint64(8 * start + 32 * b)) & np.uint64(0xFFFFFFFF))
            norm = np.float64(norms[0])
            if not (norm >= 0.0 and norm <= largest):
                return False
            step = norm / np.float64(levels)
            for i in range(first + b * group, min(first + (b + 1) * group, last)):
                code = load(packed, at)
                sign = 1.0 - 2.0 * np.float64((code >> sign_bit) & np.uint64(1))
                out[i] = sign * (step * np.float64(code & levels))
                at += np.uint64(width_bits)
        start = ends[t]
    return True
