"""Which elements changed, coded with their hazards (see `hazard`).

The intervals go through two rANS states of 64 bits with words of 32 bits. Changes take turns, so that a processor decodes two at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .hazard import CHANCE_BITS, LIMIT, OCTAVES, Bytes, Hazards, Patterns, Positions, chance, class_of, guess
from .jit import inline, kernel
from .vectors import SPAN, count_up_to

Numbers = NDArray[np.uint32]

LOWEST = 1 << 31
"""Both states before the first change is encoded, and after the last one is decoded."""

CORRUPT = -1
"""What `decode` returns for words that no encoder writes for this array."""

_TILE = 1024
_ONE = 1 << CHANCE_BITS
_ESCAPE = _ONE - (_ONE >> OCTAVES)
_0, _1, _32 = np.uint64(0), np.uint64(1), np.uint64(32)


@inline
def _fill(patterns: Patterns, mask: np.uint64, shift: np.uint64, hazards: Hazards, first: np.uint64, sums: Numbers) -> np.uint64:
    """Write to `sums` the hazards of the tile from `first` on, added up from 0, and their total to all that follows; returns the total."""
    size = min(np.uint64(patterns.size) - first, np.uint64(_TILE))
    running = np.uint32(0)
    for i in range(size):
        sums[i] = running
        running = np.uint32(running + hazards[class_of(patterns[first + i], mask, shift)])
    for i in range(size, np.uint64(sums.size)):
        sums[i] = running
    return np.uint64(running)


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
) -> None:
    """For every change: the start and the width of its interval, and the escapes before it.

    The hazard of every class that changes is above 0.
    """
    sums = np.empty(_TILE + 1, np.uint32)
    first, filled, total = _0, _0, _0
    origin: Any = 0  # the sum after the last change, from the start of the tile
    for k in range(np.uint64(positions.size)):
        at = np.uint64(positions[k])
        while at >= filled:
            origin -= np.int64(total)
            first = filled
            total = _fill(patterns, mask, shift, hazards, first, sums)
            filled = first + np.uint64(_TILE)
        before = np.int64(sums[at - first]) - origin
        end = np.int64(sums[at - first + _1]) - origin
        origin += end
        skipped: Any = 0
        if end > LIMIT:
            skipped = before // LIMIT
            before -= skipped * LIMIT
            end -= skipped * LIMIT
            beyond = min(end - LIMIT, LIMIT)
            if beyond > 0 and chance(beyond) >> OCTAVES > _ESCAPE - chance(before):
                before -= LIMIT
                end -= LIMIT
                skipped += 1
        start = chance(max(before, 0))
        starts[k] = start
        widths[k] = chance(min(end, LIMIT)) - start
        escapes[k] = skipped


@inline
def _push(state: np.uint64, start: np.uint64, width: np.uint64, words: Numbers, at: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The state with one more interval, and the index of the last word written.

    The next word is written in any case, and kept where the state is full: a branch would often be mispredicted.
    """
    full = state >= width << np.uint64(63 - CHANCE_BITS)
    words[at - _1] = np.uint32(state)
    at -= np.uint64(full)
    state = state >> _32 if full else state
    quotient = state // width
    return (quotient << np.uint64(CHANCE_BITS)) + (state - quotient * width) + start, at


@kernel
def encode(starts: Numbers, widths: Numbers, escapes: Numbers, words: NDArray[np.uint32]) -> tuple[int, np.uint64, np.uint64]:
    """Write words from the end of `words` to its front; returns the index of the first one, and the states of the first two changes.

    There is room for one word per change and one per four escapes, and for a spare one in front of them, which is overwritten.
    """
    at, k = np.uint64(words.size), np.uint64(starts.size)
    state, other = np.uint64(LOWEST), np.uint64(LOWEST)
    while k:
        k -= _1
        state, other = other, state
        state, at = _push(state, np.uint64(starts[k]), np.uint64(widths[k]), words, at)
        for _ in range(escapes[k]):
            state, at = _push(state, np.uint64(_ESCAPE), np.uint64(_ONE - _ESCAPE), words, at)
    return int(np.int64(at)), state, other


@kernel
def decode(
    patterns: Patterns,
    mask: np.uint64,
    shift: np.uint64,
    hazards: Hazards,
    words: NDArray[np.uint32],
    size: int,
    states: tuple[np.uint64, np.uint64],
    positions: Positions,
    classes: Bytes,
) -> int:
    """Fill `positions`, and `classes` with those of the elements there; returns 0, or `CORRUPT`. A spare word follows `size` words."""
    state, other = states
    used, last, numel = _0, np.uint64(size), np.uint64(patterns.size)
    slots, lowest = np.uint64(_ONE - 1), np.uint64(LOWEST)
    sums = np.empty(_TILE + SPAN, np.uint32)
    first, inside, total = _0 - np.uint64(_TILE), _0, np.int64(0)
    origin: Any = 0  # the sum after the last change, from the start of the tile
    for k in range(np.uint64(positions.size)):
        slot = np.int64(state & slots)
        while slot >= _ESCAPE:
            state = np.uint64(_ONE - _ESCAPE) * (state >> np.uint64(CHANCE_BITS)) + np.uint64(slot - _ESCAPE)
            origin += LIMIT
            if state < lowest:
                if used >= last:
                    return CORRUPT
                state = state << _32 | np.uint64(words[used])
                used += _1
            slot = np.int64(state & slots)
        target = origin + guess(slot)
        while True:
            while target >= total:
                first += np.uint64(_TILE)
                if first >= numel:
                    return CORRUPT
                origin -= total
                target -= total
                total = np.int64(_fill(patterns, mask, shift, hazards, first, sums))
                inside = _0
            passed = np.uint64(SPAN)
            while passed == np.uint64(SPAN):
                passed = count_up_to(sums, inside + _1, np.uint32(target))
                inside += passed
            before = np.int64(sums[inside]) - origin
            end = np.int64(sums[inside + _1]) - origin
            high = chance(min(end, LIMIT))
            if slot < high:
                break
            # The guess was a little low: look at the next element.
            if end >= LIMIT:
                return CORRUPT
            target = origin + end
        low = chance(max(before, 0))
        if slot < low:
            return CORRUPT
        origin += end
        state = np.uint64(high - low) * (state >> np.uint64(CHANCE_BITS)) + np.uint64(slot - low)
        word, is_low = np.uint64(words[used]), state < lowest
        state = state << _32 | word if is_low else state
        used += np.uint64(is_low)
        if used > last:
            return CORRUPT
        positions[k] = np.uint32(first + inside)
        classes[k] = np.uint8(class_of(patterns[first + inside], mask, shift))
        state, other = other, state
    if state != lowest or other != lowest or used != last:
        return CORRUPT
    return 0
