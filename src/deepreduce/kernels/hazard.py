"""Which elements changed, coded with what the reader knows of each: a class, and how often elements of this class change.

Every element has a hazard, that of its class: the negative logarithm of the chance that it does not change. Add them up along the array,
from zero after every change, and the sum at which the next change comes is distributed as 2**-sum, whatever the classes are. So one number per
change is coded, whose interval is as wide as the element is likely, and all that is done for an unchanged element is one addition.

Hazards are integers: OCTAVE of them halve the chance that nothing changed yet. Where the sum passes LIMIT an escape is coded and LIMIT
subtracted. Intervals and steps go through one rANS state of 64 bits with words of 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import inline, kernel
from .rans import TOTAL_BITS as STEP_BITS
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
_BLOCK = 2048

_ONE = 1 << CHANCE_BITS
_ESCAPE = _ONE - (_ONE >> OCTAVES)
_0, _1, _8, _32 = np.uint64(0), np.uint64(1), np.uint64(8), np.uint64(32)


@inline
def chance(hazard: int) -> int:
    """The chance, in units of 2**-CHANCE_BITS, that a change comes before the sum is `hazard`; strictly increasing from 0 to LIMIT."""
    segment = (hazard & (OCTAVE - 1)) >> (OCTAVE_BITS - _SEGMENT_BITS)
    high, low = _CHANCES[segment], _CHANCES[segment + 1]
    still = high - ((high - low) * (hazard & _LOW) >> _SEGMENT_BITS)
    return _ONE - (still >> (hazard >> OCTAVE_BITS))


@inline
def guess(slot: int) -> int:
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
    patterns: Patterns, mask: np.uint64, shift: np.uint64, positions: Positions, tokens: Bytes, counts: NDArray[np.int64]
) -> None:
    """Add to `counts`, by class and token, the changes at these positions."""
    for i in range(np.uint64(positions.size)):
        counts[class_of(patterns[np.uint64(positions[i])], mask, shift), tokens[i]] += 1


@kernel
def intervals(
    patterns: Patterns,
    mask: np.uint64,
    shift: np.uint64,
    hazards: Hazards,
    positions: Positions,
    starts: Numbers,
    widths: Numbers,
    escapes: Numbers,
    classes: Bytes,
) -> None:
    """For every change: the start and the width of its interval, the escapes before it, and its class.

    The hazard of every class that changes is above 0.
    """
    sums = np.empty(_BLOCK, np.uint64)
    total, origin, first, filled = _0, _0, _0, _0
    for k in range(np.uint64(positions.size)):
        at = np.uint64(positions[k])
        while at >= filled:
            first = filled
            filled = min(first + np.uint64(_BLOCK), np.uint64(patterns.size))
            for i in range(filled - first):
                sums[i] = total
                total += np.uint64(hazards[class_of(patterns[first + i], mask, shift)])
        own = class_of(patterns[at], mask, shift)
        before, hazard, skipped = np.int64(sums[at - first] - origin), np.int64(hazards[own]), 0
        origin = sums[at - first] + np.uint64(hazards[own])
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
        classes[k] = own


@kernel
def encode(
    starts: Numbers,
    widths: Numbers,
    escapes: Numbers,
    contexts: Bytes,
    tokens: Bytes,
    step_frequencies: NDArray[np.uint32],
    words: NDArray[np.uint32],
) -> tuple[int, np.uint64]:
    """Write words from the end of `words` to its front; returns the index of the first one, and the state.

    There is room for two words per change and one per eight escapes. `step_frequencies` has one row per context.
    """
    step_starts = np.zeros((step_frequencies.shape[0], 257), np.uint32)
    for context in range(step_frequencies.shape[0]):
        for token in range(step_frequencies.shape[1]):
            step_starts[context, token + 1] = step_starts[context, token] + step_frequencies[context, token]
    state, at = np.uint64(LOWEST), words.size
    for k in range(starts.size - 1, -1, -1):
        frequency = np.uint64(step_frequencies[contexts[k], tokens[k]])
        if state >= frequency << np.uint64(63 - STEP_BITS):
            at -= 1
            words[at] = np.uint32(state)
            state >>= _32
        quotient = state // frequency
        state = (quotient << np.uint64(STEP_BITS)) + (state - quotient * frequency) + np.uint64(step_starts[contexts[k], tokens[k]])
        frequency = np.uint64(widths[k])
        if state >= frequency << np.uint64(63 - CHANCE_BITS):
            at -= 1
            words[at] = np.uint32(state)
            state >>= _32
        quotient = state // frequency
        state = (quotient << np.uint64(CHANCE_BITS)) + (state - quotient * frequency) + np.uint64(starts[k])
        for _ in range(escapes[k]):
            frequency = np.uint64(_ONE - _ESCAPE)
            if state >= frequency << np.uint64(63 - CHANCE_BITS):
                at -= 1
                words[at] = np.uint32(state)
                state >>= _32
            quotient = state // frequency
            state = (quotient << np.uint64(CHANCE_BITS)) + (state - quotient * frequency) + np.uint64(_ESCAPE)
    return at, state


@kernel
def decode(
    patterns: Patterns,
    mask: np.uint64,
    shift: np.uint64,
    hazards: Hazards,
    contexts: Bytes,
    step_tables: NDArray[np.uint32],
    words: NDArray[np.uint32],
    size: int,
    state: np.uint64,
    positions: Positions,
    tokens: Bytes,
) -> int:
    """Fill `positions` and `tokens`; returns 0, or `CORRUPT`. `contexts` are those of the classes; two spare words follow `size` words."""
    at, used, numel, last = _0, _0, np.uint64(patterns.size), np.uint64(size)
    slots, step_slots = np.uint64(_ONE - 1), np.uint64((1 << STEP_BITS) - 1)
    lowest = np.uint64(LOWEST)
    for k in range(np.uint64(positions.size)):
        before = 0
        while True:
            slot = np.int64(state & slots)
            if slot < _ESCAPE:
                break
            state = np.uint64(_ONE - _ESCAPE) * (state >> np.uint64(CHANCE_BITS)) + np.uint64(slot - _ESCAPE)
            before -= LIMIT
            if state < lowest:
                if used >= last:
                    return CORRUPT
                state = state << _32 | np.uint64(words[used])
                used += _1
        left = np.uint64(guess(slot) - before)
        total = left
        while at + _8 <= numel:
            part = _0
            for j in range(_8):
                part += np.uint64(hazards[class_of(patterns[at + j], mask, shift)])
            if part > left:
                break
            left -= part
            at += _8
        if at + _8 <= numel:
            reached, part, steps = _0, _0, _0
            for j in range(_8):
                part += np.uint64(hazards[class_of(patterns[at + j], mask, shift)])
                inside = part <= left
                reached = part if inside else reached
                steps += np.uint64(inside)
            at += steps
            left -= reached
        else:
            while at < numel and np.uint64(hazards[class_of(patterns[at], mask, shift)]) <= left:
                left -= np.uint64(hazards[class_of(patterns[at], mask, shift)])
                at += _1
            if at >= numel:
                return CORRUPT
        hazard = np.uint64(hazards[class_of(patterns[at], mask, shift)])
        before += np.int64(total - left)
        # The guess is a little low: the interval of the slot is this one, or soon after.
        end = chance(min(before + np.int64(hazard), LIMIT))
        while slot >= end:
            before += np.int64(hazard)
            at += _1
            if at >= numel or before >= LIMIT:
                return CORRUPT
            hazard = np.uint64(hazards[class_of(patterns[at], mask, shift)])
            end = chance(min(before + np.int64(hazard), LIMIT))
        start = chance(max(before, 0))
        if slot < start:
            return CORRUPT
        state = np.uint64(end - start) * (state >> np.uint64(CHANCE_BITS)) + np.uint64(slot - start)
        if state < lowest:
            state = state << _32 | np.uint64(words[used])
            used += _1
        entry = np.uint64(step_tables[np.uint64(contexts[class_of(patterns[at], mask, shift)]), state & step_slots])
        state = (entry >> _8 & np.uint64(4095)) * (state >> np.uint64(STEP_BITS)) + (entry >> np.uint64(20))
        if state < lowest:
            state = state << _32 | np.uint64(words[used])
            used += _1
        if used > last:
            return CORRUPT
        positions[k] = np.uint32(at)
        tokens[k] = np.uint8(entry & np.uint64(255))
        at += _1
    if state != lowest or used != last:
        return CORRUPT
    return 0
