"""Random numbers that are the same on every machine: splitmix64, with one stream per purpose."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import inline, kernel

Positions = NDArray[np.int64]

# A seed and a stream give independent numbers, so that the positions and the rounding of one tensor are not correlated.
POSITIONS, ROUNDING, POLICY, HASHING = 1, 2, 3, 4

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


@inline
def mix(x: np.uint64) -> np.uint64:
    """The finaliser of splitmix64: a bijection of 64 bits that scatters them."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


@inline
def number(state: np.uint64, i: int) -> np.uint64:
    """The i-th 64-bit number of a stream: any of them can be had without the ones before."""
    return mix(state + np.uint64(i + 1) * _GOLDEN)


@inline
def below(state: np.uint64, i: int, limit: int) -> np.int64:
    """The i-th number of a stream, scaled to 0 <= n < limit (limit at most 2**53)."""
    return np.int64((number(state, i) >> np.uint64(11)) * (1.0 / 9007199254740992.0) * limit)


@kernel
def _state(seed: np.uint64, stream: np.uint64) -> np.uint64:
    return mix(mix(seed + _GOLDEN) ^ (stream * _MIX_A))


def state(seed: int, stream: int) -> np.uint64:
    """The start of a stream."""
    return np.uint64(_state(np.uint64(seed), np.uint64(stream)))


@kernel
def _sample(numel: int, count: int, start: np.uint64) -> Positions:
    # Floyd's algorithm: `count` draws, each with a fallback that is surely new.
    words = np.zeros((numel + 63) // 64, np.uint64)
    one = np.uint64(1)
    for j in range(numel - count, numel):
        pick = below(start, j, j + 1)
        if (words[pick >> 6] >> np.uint64(pick & 63)) & one:
            pick = np.int64(j)
        words[pick >> 6] |= one << np.uint64(pick & 63)
    out = np.empty(count, np.int64)
    n = 0
    for w in range(words.size):
        word = words[w]
        bit = 0
        while word:
            if word & one:
                out[n] = w * 64 + bit
                n += 1
            word >>= one
            bit += 1
    return out


def sample(numel: int, count: int, seed: int) -> Positions:
    """`count` of 0..numel-1 without repetition, each subset equally likely, increasing."""
    return _sample(numel, count, state(seed, POSITIONS))
