"""How likely an element changes, by what a reader knows of it: its class, and how often elements of this class change.

Every element has a hazard, that of its class: the negative logarithm of the chance that it does not change. Add them up along the array,
from zero after every change, and the sum at which the next change comes is distributed as 2**-sum, whatever the classes are. So one number
per change is coded, whose interval is as wide as the element is likely, and all that is done for an unchanged element is one addition.

Hazards are integers: OCTAVE of them halve the chance that nothing changed yet. Where the sum passes LIMIT an escape is coded and LIMIT
subtracted. `hazardcoder` codes the intervals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import inline, kernel
from .vectors import leading_zeros, prefetch_to_read

Patterns = NDArray[Any]
Hazards = NDArray[np.uint32]
Positions = NDArray[np.uint32]
Bytes = NDArray[np.uint8]

CLASSES = 256
OCTAVE_BITS = 18
OCTAVE = 1 << OCTAVE_BITS
OCTAVES = 8
LIMIT = OCTAVES * OCTAVE
CHANCE_BITS = 28

_SEGMENT_BITS = 9
_LOW = (1 << _SEGMENT_BITS) - 1
_CHANCES = np.array([round(2 ** (CHANCE_BITS - i / 2**_SEGMENT_BITS)) for i in range(2**_SEGMENT_BITS + 1)], np.int64)
_GUESS_BITS = 8
_GUESSES = np.array([int(-np.log2(1 - i / 2 ** (_GUESS_BITS + 1)) * OCTAVE) for i in range(2**_GUESS_BITS + 1)], np.int64)
_GUESS_SHIFT = CHANCE_BITS - 1 - _GUESS_BITS
_GUESS_ERROR = 3
_ONE = 1 << CHANCE_BITS
_1, _AHEAD = np.uint64(1), np.uint64(64)


@inline
def chance(hazard: Any) -> Any:
    """The chance, in units of 2**-CHANCE_BITS, that a change comes before the sum is `hazard`; strictly increasing from 0 to LIMIT."""
    segment = np.uint64((hazard & (OCTAVE - 1)) >> (OCTAVE_BITS - _SEGMENT_BITS))
    high, low = _CHANCES[segment], _CHANCES[segment + _1]
    still = high - ((high - low) * (hazard & _LOW) >> _SEGMENT_BITS)
    return _ONE - (still >> (hazard >> OCTAVE_BITS))


@inline
def guess(slot: Any) -> Any:
    """A hazard that is not above any whose `chance` is `slot`, and close to it; `slot` is below that of LIMIT."""
    still = _ONE - slot
    octaves = np.int64(leading_zeros(np.uint64(still - 1))) - (64 - CHANCE_BITS)
    gone = _ONE - (still << octaves)
    i = np.uint64(gone >> _GUESS_SHIFT)
    inside = (_GUESSES[i + _1] - _GUESSES[i]) * (gone & ((1 << _GUESS_SHIFT) - 1)) >> _GUESS_SHIFT
    return max(octaves * OCTAVE + _GUESSES[i] + inside - _GUESS_ERROR, 0)


@inline
def class_of(pattern: int, mask: np.uint64, shift: np.uint64) -> np.uint64:
    """The class of a pattern: the bits of `mask`, moved down."""
    return (np.uint64(pattern) & mask) >> shift


@kernel
def count_classes(patterns: Patterns, mask: np.uint64, shift: np.uint64, stride: int, counts: NDArray[np.int64]) -> None:
    """Add to `counts` the classes of every block of 64 elements in `stride` such blocks, each `stride` times."""
    for start in range(np.uint64(0), np.uint64(patterns.size), np.uint64(64 * stride)):
        for i in range(start, min(np.uint64(patterns.size), start + np.uint64(64))):
            counts[class_of(patterns[i], mask, shift)] += stride


@kernel
def count_changed(
    patterns: Patterns,
    mask: np.uint64,
    shift: np.uint64,
    positions: Positions,
    tokens: Bytes,
    classes: Bytes,
    counts: NDArray[np.int64],
) -> None:
    """Write the class of every change; add to `counts` how many changes a class has, and how many of them have a token above 1."""
    last = np.uint64(positions.size) - _1
    for i in range(np.uint64(positions.size)):
        prefetch_to_read(patterns, np.uint64(positions[min(i + _AHEAD, last)]))
        own = class_of(patterns[np.uint64(positions[i])], mask, shift)
        classes[i] = np.uint8(own)
        counts[own, 0] += 1
        counts[own, 1] += np.int64(tokens[i] > 1)
