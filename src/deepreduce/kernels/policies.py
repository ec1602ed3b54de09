"""Choosing some of the positives of a Bloom filter, the same for writer and reader."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bloom import STEP, bit_of
from .draw import below, number
from .jit import inline, kernel

Positions = NDArray[np.int64]
Flags = NDArray[np.bool_]
Sizes = NDArray[Any]
Keys = NDArray[np.uint64]

_MOST = 255
_BIT_BITS = 32
_DIGIT = np.uint64(2047)
_NO_KEY = np.uint64(2**64 - 1)


@kernel
def _some_of(positions: Positions, wanted: int, start: np.uint64) -> Positions:
    # Knuth's algorithm S: each is taken with the share that is still wanted of those that are left.
    out = np.empty(wanted, np.int64)
    taken = 0
    for i in range(positions.size):
        if below(start, i, positions.size - i) < wanted - taken:
            out[taken] = positions[i]
            taken += 1
    return out


def some_of(positions: Positions, wanted: int, start: np.uint64) -> Positions:
    """`wanted` of the positions (all, if they are fewer), each subset equally likely, in their order."""
    return _some_of(positions, min(wanted, positions.size), start)


@kernel
def _set_sizes(positives: Positions, hashes: int, salt: np.uint64, sizes: Sizes, most: int) -> None:
    """Count the positives that probe each bit, up to `most`."""
    size_bits = sizes.size
    bits, grown = np.empty(hashes, np.int64), np.empty_like(sizes[:1].repeat(hashes))
    for position in positives:
        hashed = number(salt, position)
        for i in range(hashes):
            bits[i] = bit_of(hashed, np.uint64(size_bits))
            grown[i] = sizes[bits[i]] + (sizes[bits[i]] < most)
            hashed *= STEP
        for i in range(hashes):  # read all, then write all: a position with two probes at one bit is counted there once
            sizes[bits[i]] = grown[i]


@kernel
def _alone_somewhere(positives: Positions, sizes: Sizes, hashes: int, salt: np.uint64) -> Flags:
    certain = np.zeros(positives.size, np.bool_)
    for p in range(positives.size):
        hashed = number(salt, positives[p])
        for _ in range(hashes):
            certain[p] |= sizes[bit_of(hashed, np.uint64(sizes.size))] == 1
            hashed *= STEP
    return certain


@inline
def _distinct_bits(position: int, size_bits: np.uint64, salt: np.uint64, bits: Positions) -> int:
    """The bits that a position probes, each once, to the front of `bits`, which has room for one per probe."""
    hashed = number(salt, position)
    count = 0
    for _ in range(bits.size):
        bits[count] = bit_of(hashed, size_bits)
        hashed *= STEP
        new = True
        for i in range(count):
            new &= bits[i] != bits[count]
        count += new
    return count


@kernel
def _memberships(positives: Positions, chosen: Flags, sizes: Sizes, hashes: int, salt: np.uint64) -> tuple[Keys, Positions]:
    """For every positive that is not chosen, the sets it is in: (size, bit) as one sortable number, and the number of the positive."""
    room = hashes * (positives.size - np.count_nonzero(chosen))
    keys, items = np.empty(room, np.uint64), np.empty(room, np.int64)
    bits = np.empty(hashes, np.int64)
    n = 0
    for p in range(positives.size):
        if not chosen[p]:
            for i in range(_distinct_bits(positives[p], np.uint64(sizes.size), salt, bits)):
                keys[n] = np.uint64(sizes[bits[i]]) << np.uint64(_BIT_BITS) | np.uint64(bits[i])
                items[n] = p
                n += 1
    return keys[:n], items[:n]


@kernel
def _sorted(keys: Keys, items: Positions, key_bits: int) -> tuple[Keys, Positions]:
    """Both by ascending key, equal keys in their order: counting sort by 11 bits at a time."""
    moved_keys, moved_items = np.empty_like(keys), np.empty_like(items)
    for shift in range(0, key_bits, 11):
        places = np.zeros(2049, np.int64)
        for key in keys:
            places[np.int64((key >> np.uint64(shift)) & _DIGIT) + 1] += 1
        places = places.cumsum()
        for i in range(keys.size):
            digit = np.int64((keys[i] >> np.uint64(shift)) & _DIGIT)
            moved_keys[places[digit]] = keys[i]
            moved_items[places[digit]] = items[i]
            places[digit] += 1
        keys, items, moved_keys, moved_items = moved_keys, moved_items, keys, items
    return keys, items


@kernel
def _draw_in_rounds(items: Positions, starts: Positions, chosen: Flags, wanted: int, start: np.uint64) -> None:
    """One random item of every set a round, until `wanted` more are chosen. Set s is items[starts[s]:starts[s + 1]].

    An item that is drawn leaves its set; if another set had chosen it before, the draw is repeated. So what is chosen is uniform over
    what remains, and all rounds together draw every item of every set once at most.
    """
    left = np.diff(starts)
    sets = np.arange(left.size)
    count, draws = left.size, 0
    while wanted > 0 and count > 0:
        visited, count = count, 0
        for v in range(visited):
            s = sets[v]
            open_ = True
            while open_ and left[s] > 0:
                pick = starts[s] + below(start, draws, left[s])
                draws += 1
                left[s] -= 1
                item = items[pick]
                items[pick] = items[starts[s] + left[s]]
                open_ = chosen[item]
                chosen[item] = True
            wanted -= not open_
            if wanted == 0:
                break
            sets[count] = s
            count += left[s] > 0


def by_conflict_sets(
    positives: Positions, wanted: int, size_bits: int, hashes: int, salt: int, start: np.uint64, exact: bool = False
) -> Positions:
    """`wanted` of the positives of a filter by the paper's Algorithm 1, increasing; all, if they are fewer.

    The conflict set of a bit holds the positives that probe it. Who is alone in a set was surely inserted. Then the sets, by ascending
    size and bit, give one random remaining item per round each. Unless `exact`, sets of 255 items or more count as equally large: a size
    then takes one byte instead of four.
    """
    if wanted >= positives.size:
        return positives
    salt64 = np.uint64(salt)
    sizes: Sizes = np.zeros(size_bits, np.uint32 if exact else np.uint8)
    _set_sizes(positives, hashes, salt64, sizes, positives.size if exact else _MOST)
    chosen = _alone_somewhere(positives, sizes, hashes, salt64)
    missing = wanted - int(np.count_nonzero(chosen))
    if missing > 0:
        keys, items = _memberships(positives, chosen, sizes, hashes, salt64)
        keys, items = _sorted(keys, items, _BIT_BITS + int(sizes.max()).bit_length())
        starts = np.flatnonzero(np.diff(keys, prepend=_NO_KEY, append=_NO_KEY))
        _draw_in_rounds(items, starts, chosen, missing, start)
    return positives[chosen][:wanted]
