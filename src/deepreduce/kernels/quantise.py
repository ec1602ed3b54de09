"""QSGD: values as a few signed levels of the norm of their group, rounded up or down at random."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import bits, draw
from .bits import Words, get, put
from .draw import number
from .jit import kernel

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]

_UNIT = 1.0 / 9007199254740992.0  # 53 random bits times this lie in [0, 1)


@kernel
def _norms(values: NDArray[Any], group: int, euclidean: bool, out: Doubles) -> None:
    for b in range(out.size):
        peak = 0.0
        square = 0.0
        for i in range(b * group, min((b + 1) * group, values.size)):
            magnitude = abs(np.float64(values[i]))
            peak = max(peak, magnitude)
            square += magnitude * magnitude
        # The sum of squares of tiny numbers underflows: the norm is never below the largest of them.
        out[b] = max(peak, np.sqrt(square)) if euclidean else peak


def norms(values: NDArray[Any], group: int, euclidean: bool) -> Doubles:
    """The Euclidean or the largest norm of each group; the last group may be shorter.

    >>> norms(np.array([3.0, -4.0, 0.5]), 2, True)
    array([5. , 0.5])
    """
    out = np.empty(-(-values.size // group))
    _norms(values, group, euclidean, out)
    return out


@kernel
def _quantise(values: NDArray[Any], norms: Floats, group: int, width_bits: int, start: np.uint64, words: Words) -> None:
    levels = np.int64((1 << (width_bits - 1)) - 1)
    sign_bit = np.uint64(width_bits - 1)
    for b in range(norms.size):
        norm = np.float64(norms[b])
        scale = levels / norm if norm > 0.0 else 0.0
        for i in range(b * group, min((b + 1) * group, values.size)):
            scaled = abs(np.float64(values[i])) * scale
            below = np.int64(scaled)
            chance = np.float64(number(start, i) >> np.uint64(11)) * _UNIT
            level = min(below + np.int64(chance < scaled - below), levels)
            negative = np.uint64((values[i] < 0.0) & (level > 0))
            put(words, i * width_bits, np.uint64(level) | (negative << sign_bit))


def quantise(values: NDArray[Any], norms: Floats, group: int, width_bits: int, seed: int) -> bytes:
    """Sign and level of each value (float32 or float64) in `width_bits` bits; the level is drawn so that its mean is the value."""
    size_bits = values.size * width_bits
    words = bits.zero_words(size_bits)
    _quantise(values, norms, group, width_bits, draw.state(seed, draw.ROUNDING), words)
    return bits.to_bytes(words, size_bits)


@kernel
def _restore(words: Words, norms: Floats, group: int, width_bits: int, out: NDArray[Any]) -> None:
    levels = np.uint64((1 << (width_bits - 1)) - 1)
    sign_bit = np.uint64(width_bits - 1)
    for b in range(norms.size):
        step = np.float64(norms[b]) / np.float64(levels)
        for i in range(b * group, min((b + 1) * group, out.size)):
            code = get(words, i * width_bits)
            sign = 1.0 - 2.0 * np.float64((code >> sign_bit) & np.uint64(1))
            out[i] = sign * (step * np.float64(code & levels))


def restore(packed: bytes | memoryview, norms: Floats, group: int, width_bits: int, out: NDArray[Any]) -> None:
    """The inverse of `quantise` into `out` (float32 or float64), whose size is that of the values. The padding is not looked at."""
    _restore(bits.to_words(packed), norms, group, width_bits, out)
