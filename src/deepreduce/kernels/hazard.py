"""Which elements changed, coded with what the reader knows of each: a class, and how often elements of this class change.

Every element has a hazard, that of its class: the negative logarithm of the chance that it does not change. Add them up along the array,
from zero after every change, and the sum at which the next change comes is distributed as 2**-sum, whatever the classes are. So one number
per change is coded, whose interval is as wide as the element is likely, and all that is done for an unchanged element is one addition.

Hazards are integers: OCTAVE of them halve the chance that nothing changed yet. Where the sum passes LIMIT an escape is coded and LIMIT
subtracted. Intervals go through one rANS state of 64 bits with words of 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import inline, kernel
from .vectors import leading_zeros

Patterns = NDArray[Any]
Hazards = NDArray[np.uint32]
Positions = NDArray[np.uint32]
Numbers = NDArray[np.uint32]
Bytes = NDArray[np.uint8]

CLASSES = 256
OCTAVE_BITS = 18
OCTAVE = 1 << OCTAVE_BITS
OCTAVES = 8
LIMIT = OCTAVES * OCTAVE
CHANCE_BITS = 28
LOWEST = 1 << 31
"""The state before the first change is encoded, and after the last one is decoded."""

CORRUPT = -1
"""What `decode` returns for words that no encoder writes for this array."""

_SEGMENT_BITS = 9
_LOW = (1 << _SEGMENT_BITS) - 1
_CHANCES = np.array([round(2 ** (CHANCE_BITS - i / 2**_SEGMENT_BITS)) for i in range(2**_SEGMENT_BITS + 1)], np.int64)
_GUESS_BITS = 8
_GUESSES = np.array([int(-np.log2(1 - i / 2 ** (_GUESS_BITS + 1)) * OCTAVE) for i in range(2**_GUESS_BITS + 1)], np.int64)
_GUESS_SHIFT = CHANCE_BITS - 1 - _GUESS_BITS
_GUESS_ERROR = 3
_TILE = 1024
_BLOCK = 8

_ONE = 1 << CHANCE_BITS
_ESCAPE = _ONE - (_ONE >> OCTAVES)
_0, _1, _8, _32 = np.uint64(0), np.uint64(1), np.uint64(8), np.uint64(32)


@inline
def chance(hazard: Any) -> Any:
    """The chance, in units of 2**-CHANCE_BITS, that a change comes before the sum is `hazard`; strictly increasing from 0 to LIMIT."""
    segment = (hazard & (OCTAVE - 1)) >> (OCTAVE_BITS - _SEGMENT_BITS)
    high, low = _CHANCES[segment], _CHANCES[segment + 1]
    still = high - ((high - low) * (hazard & _LOW) >> _SEGMENT_BITS)
    return _ONE - (still >> (hazard >> OCTAVE_BITS))


@inline
def guess(slot: Any) -> Any:
    """A hazard that is not above any whose `chance` is `slot`, and close to it; `slot` is below that of LIMIT."""
    still = _ONE - slot
    octaves = np.int64(leading_zeros(np.uint64(still - 1))) - (64 - CHANCE_BITS)
    gone = _ONE - (still << octaves)
    i = gone >> _GUESS_SHIFT
    inside = (_GUESSES[i + 1] - _GUESSES[i]) * (gone & ((1 << _GUESS_SHIFT) - 1)) >> _GUESS_SHIFT
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
    for i in range(np.uint64(positions.size)):
        own = class_of(patterns[np.uint64(positions[i])], mask, shift)
        classes[i] = np.uint8(own)
        counts[own, 0] += 1
        counts[own, 1] += np.int64(tokens[i] > 1)


@kernel
def intervals(
    patterns: Patterns,
    mask: np.uint64,
    shift: np.uint64,
    hazards: Hazards,
    positions: Positions,
    classes: Bytes,
    starts: Numbers,
    widths: Numbers,
    escapes: Numbers,
) -> None:
    """For every change, whose classes are given: the start and the width of its interval, and the escapes before it.

    The hazard of every class that changes is above 0.
    """
    sums = np.empty(_TILE, np.uint32)
    base, total, origin, first, filled = _0, _0, _0, _0, _0
    for k in range(np.uint64(positions.size)):
        at = np.uint64(positions[k])
        while at >= filled:
            first, base = filled, base + total
            filled = min(first + np.uint64(_TILE), np.uint64(patterns.size))
            running = np.uint32(0)
            for i in range(filled - first):
                sums[i] = running
                running = np.uint32(running + hazards[class_of(patterns[first + i], mask, shift)])
            total = np.uint64(running)
        reached = base + np.uint64(sums[at - first])
        before, hazard = np.int64(reached - origin), np.int64(hazards[classes[k]])
        skipped: Any = 0
        origin = reached + np.uint64(hazards[classes[k]])
        if before >= LIMIT:
            skipped = before // LIMIT
            before -= skipped * LIMIT
        if before + hazard > LIMIT:
            beyond = min(before + hazard - LIMIT, LIMIT)
            if chance(beyond) >> OCTAVES > _ESCAPE - chance(before):
                before -= LIMIT
                skipped += 1
        start = chance(max(before, 0))
        starts[k] = start
        widths[k] = chance(min(before + hazard, LIMIT)) - start
        escapes[k] = skipped


@kernel
def encode(starts: Numbers, widths: Numbers, escapes: Numbers, words: NDArray[np.uint32]) -> tuple[int, np.uint64]:
    """Write words from the end of `words` to its front; returns the index of the first one, and the state.

    There is room for one word per change and one per four escapes, and one more.
    """
    state, at = np.uint64(LOWEST), words.size
    for k in range(starts.size - 1, -1, -1):
        width = np.uint64(widths[k])
        if state >= width << np.uint64(63 - CHANCE_BITS):
            at -= 1
            words[at] = np.uint32(state)
            state >>= _32
        quotient = state // width
        state = (quotient << np.uint64(CHANCE_BITS)) + (state - quotient * width) + np.uint64(starts[k])
        for _ in range(escapes[k]):
            width = np.uint64(_ONE - _ESCAPE)
            if state >= width << np.uint64(63 - CHANCE_BITS):
                at -= 1
                words[at] = np.uint32(state)
                state >>= _32
            quotient = state // width
            state = (quotient << np.uint64(CHANCE_BITS)) + (state - quotient * width) + np.uint64(_ESCAPE)
    return at, state


@inline
def _fill(patterns: Patterns, mask: np.uint64, shift: np.uint64, hazards: Hazards, first: np.uint64, each: Numbers, sums: Numbers) -> None:
    """The hazards of a tile of elements and the sums of its blocks; 0 for what lies after the last element."""
    size = min(np.uint64(patterns.size) - first, np.uint64(_TILE))
    whole = size // np.uint64(_BLOCK)
    for b in range(whole):
        i = b * np.uint64(_BLOCK)
        h0 = hazards[class_of(patterns[first + i], mask, shift)]
        h1 = hazards[class_of(patterns[first + i + _1], mask, shift)]
        h2 = hazards[class_of(patterns[first + i + np.uint64(2)], mask, shift)]
        h3 = hazards[class_of(patterns[first + i + np.uint64(3)], mask, shift)]
        h4 = hazards[class_of(patterns[first + i + np.uint64(4)], mask, shift)]
        h5 = hazards[class_of(patterns[first + i + np.uint64(5)], mask, shift)]
        h6 = hazards[class_of(patterns[first + i + np.uint64(6)], mask, shift)]
        h7 = hazards[class_of(patterns[first + i + np.uint64(7)], mask, shift)]
        each[i] = h0
        each[i + _1] = h1
        each[i + np.uint64(2)] = h2
        each[i + np.uint64(3)] = h3
        each[i + np.uint64(4)] = h4
        each[i + np.uint64(5)] = h5
        each[i + np.uint64(6)] = h6
        each[i + np.uint64(7)] = h7
        sums[b] = np.uint32(((h0 + h1) + (h2 + h3)) + ((h4 + h5) + (h6 + h7)))
    for b in range(whole, np.uint64(_TILE // _BLOCK)):
        total = np.uint32(0)
        for j in range(np.uint64(_BLOCK)):
            i = b * np.uint64(_BLOCK) + j
            each[i] = hazards[class_of(patterns[first + i], mask, shift)] if i < size else np.uint32(0)
            total = np.uint32(total + each[i])
        sums[b] = total


@kernel
def decode(
    patterns: Patterns,
    mask: np.uint64,
    shift: np.uint64,
    hazards: Hazards,
    words: NDArray[np.uint32],
    size: int,
    state: np.uint64,
    positions: Positions,
    classes: Bytes,
) -> int:
    """Fill `positions`, and `classes` with those of the elements there; returns 0, or `CORRUPT`. A spare word follows `size` words."""
    used, last, numel = _0, np.uint64(size), np.uint64(patterns.size)
    slots, lowest = np.uint64(_ONE - 1), np.uint64(LOWEST)
    each, sums = np.empty(_TILE, np.uint32), np.empty(_TILE // _BLOCK, np.uint32)
    first, block, blocks = _0, _0, np.uint64(_TILE // _BLOCK)
    if numel:
        _fill(patterns, mask, shift, hazards, first, each, sums)
    before: Any = 0  # the sum at the start of the block, of which that up to the last change is subtracted
    for k in range(np.uint64(positions.size)):
        slot = np.int64(state & slots)
        while slot >= _ESCAPE:
            state = np.uint64(_ONE - _ESCAPE) * (state >> np.uint64(CHANCE_BITS)) + np.uint64(slot - _ESCAPE)
            before -= LIMIT
            if state < lowest:
                if used >= last:
                    return CORRUPT
                state = state << _32 | np.uint64(words[used])
                used += _1
            slot = np.int64(state & slots)
        left: Any = guess(slot) - before
        while True:
            while block == blocks or np.int64(sums[block]) <= left:
                if block == blocks:
                    first += np.uint64(_TILE)
                    if first >= numel:
                        return CORRUPT
                    _fill(patterns, mask, shift, hazards, first, each, sums)
                    block = _0
                else:
                    left -= np.int64(sums[block])
                    before += np.int64(sums[block])
                    block += _1
            inside: Any = block * np.uint64(_BLOCK)
            reached: Any = 0
            part: Any = 0
            for j in range(np.uint64(_BLOCK)):
                part += np.int64(each[block * np.uint64(_BLOCK) + j])
                passed = part <= left
                reached = part if passed else reached
                inside += np.uint64(passed)
            hazard = np.int64(each[inside])
            end = chance(min(before + reached + hazard, LIMIT))
            if slot < end:
                break
            # The guess was a little low: look at the next element.
            left = reached + hazard
            if before + left >= LIMIT:
                return CORRUPT
        start = chance(max(before + reached, 0))
        if slot < start:
            return CORRUPT
        before = -(reached + hazard)
        state = np.uint64(end - start) * (state >> np.uint64(CHANCE_BITS)) + np.uint64(slot - start)
        if state < lowest:
            state = state << _32 | np.uint64(words[used])
            used += _1
        if used > last:
            return CORRUPT
        positions[k] = np.uint32(first + inside)
        classes[k] = np.uint8(class_of(patterns[first + inside], mask, shift))
    if state != lowest or used != last:
        return CORRUPT
    return 0
