"""The loops of `deepreduce.weights` against slow and obvious versions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepreduce import kernels
from deepreduce.kernels import hazard, hazardcoder, rans, steps, tokens
from deepreduce.kernels.jit import kernel


@kernel
def chances(hazards, out):
    for i in range(hazards.size):
        out[i] = hazard.chance(hazards[i])


@kernel
def guesses(slots, out):
    for i in range(slots.size):
        out[i] = hazard.guess(slots[i])


def test_chance_increases_and_is_what_its_name_says():
    sums = np.unique(np.concatenate([np.arange(5000), np.linspace(0, hazard.LIMIT, 200_001).astype(np.int64)]))
    found = np.empty_like(sums)
    chances(sums, found)
    assert (np.diff(found) > 0).all()
    assert found[0] == 0
    assert np.allclose(found / 2**hazard.CHANCE_BITS, 1 - 2.0 ** (-sums / hazard.OCTAVE), atol=1e-6)


def test_guess_is_close_and_never_above():
    top = 2**hazard.CHANCE_BITS - (2**hazard.CHANCE_BITS >> hazard.OCTAVES)
    slots = np.unique(np.concatenate([np.arange(2000), np.linspace(0, top - 1, 300_001).astype(np.int64), top - 1 - np.arange(2000)]))
    low, at, after = (np.empty_like(slots) for _ in range(3))
    guesses(slots, low)
    chances(low, at)
    chances(np.minimum(low + 8, hazard.LIMIT), after)
    assert (at <= slots).all()
    assert (slots < after).all()


def test_tables_do_not_depend_on_the_last_bit_of_a_logarithm():
    exact = 2.0 ** (hazard.CHANCE_BITS - np.arange(513) / 512)
    assert np.abs(exact - np.floor(exact) - 0.5)[1:-1].min() > 1e-5


def random_group(size: int, seed: int):
    """Patterns of 8 classes, a hazard for each, and changes that follow them."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 8, size).astype(np.uint8)
    share = np.array([0, 0.001, 0.01, 0.05, 0.2, 0.5, 0.9, 0.999])
    positions = np.flatnonzero(rng.random(size) < share[patterns]).astype(np.uint32)
    hazards = np.zeros(256, np.uint32)
    hazards[:8] = np.round(-np.log2(1 - np.minimum(share, 0.995)) * hazard.OCTAVE)
    return patterns, positions, hazards


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1023, 1024, 1025, 5000, 100_003])
def test_hazard_coding_round_trips(size):
    mask, shift = np.uint64(255), np.uint64(0)
    patterns, positions, hazards = random_group(size, size)
    starts, widths, escapes = (np.empty(positions.size, np.uint32) for _ in range(3))
    hazardcoder.intervals(patterns, mask, shift, hazards, positions, starts, widths, escapes)
    words = np.zeros(positions.size + int(escapes.sum()) // 4 + 8, np.uint32)
    first, *states = hazardcoder.encode(starts, widths, escapes, words)
    coded = np.append(words[first:], np.uint32(0))
    found, classes = np.empty_like(positions), np.empty(positions.size, np.uint8)
    arguments = (patterns, mask, shift, hazards, coded, coded.size - 1, tuple(map(np.uint64, states)))
    assert hazardcoder.decode(*arguments, found, classes) == 0
    assert (found == positions).all()
    assert (classes == patterns[positions]).all()


def test_hazard_coding_is_close_to_the_entropy():
    patterns, positions, hazards = random_group(1 << 20, 0)
    share = np.bincount(patterns[positions], minlength=8) / np.bincount(patterns, minlength=8)
    inside = (share > 0) & (share < 1)
    entropy = -(share * np.log2(share, where=inside, out=np.zeros(8)) + (1 - share) * np.log2(1 - share, where=inside, out=np.zeros(8)))
    starts, widths, escapes = (np.empty(positions.size, np.uint32) for _ in range(3))
    mask, shift = np.uint64(255), np.uint64(0)
    hazardcoder.intervals(patterns, mask, shift, hazards, positions, starts, widths, escapes)
    words = np.zeros(positions.size + int(escapes.sum()) // 4 + 8, np.uint32)
    first, *_ = hazardcoder.encode(starts, widths, escapes, words)
    assert 32 * (words.size - first) < 1.02 * (entropy * np.bincount(patterns, minlength=8)).sum()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("is_float", [True, False])
def test_steps_are_differences_of_ordered_keys(dtype, is_float):
    width = 8 * np.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    old = np.frombuffer(rng.bytes(200 * width // 8), dtype)
    new = old.copy()
    new[::3] = np.frombuffer(rng.bytes(200 * width // 8), dtype)[::3]
    flip = np.uint64(2 ** (width - 1) - 1 if is_float else 0)
    positions, codes = np.empty(200, np.uint32), np.empty(200, dtype)
    count = steps.find(old, new, (0, 70), flip, positions, codes, 0)
    count = steps.find(old, new, (70, 200), flip, positions, codes, count)
    assert positions[:count].tolist() == np.flatnonzero(old != new).tolist()

    def key(pattern: int) -> int:
        signed = pattern - (pattern >> (width - 1) << width)
        return signed ^ int(flip) if is_float and signed < 0 else signed

    half = 2 ** (width - 1)
    expected = [(key(int(new[i])) - key(int(old[i])) + half) % 2**width - half for i in positions[:count]]
    assert codes[:count].tolist() == [2 * (abs(step) - 1) + (step < 0) for step in expected]
    moved = old.copy()
    steps.move(moved, positions[:count], codes[:count], flip)
    assert (moved == new).all()
    steps.move_back(moved, positions[:count], codes[:count], flip)
    assert (moved == old).all()


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_tokens_round_trip(numbers):
    given_numbers = np.array(numbers, np.uint64)
    found = np.empty(given_numbers.size, np.uint8)
    size_bits = tokens.split(given_numbers, found)
    words = kernels.bits.zero_words(size_bits)
    tokens.pack_extras(given_numbers, found, words)
    packed = kernels.gaps.padded(kernels.bits.to_bytes(words, size_bits))
    out = np.empty_like(given_numbers)
    assert tokens.join(found, packed, size_bits, out) == size_bits
    assert (out == given_numbers).all()


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
def test_rans_round_trips_with_contexts(size):
    rng = np.random.default_rng(size)
    symbols, contexts = rng.integers(0, 5, size).astype(np.uint8), rng.integers(0, 2, size).astype(np.uint8)
    frequencies = np.zeros((2, 256), np.uint32)
    frequencies[0, :5], frequencies[1, :5] = (4000, 90, 4, 1, 1), (819, 819, 819, 819, 820)
    states, words = np.empty(4, np.uint32), np.empty(size + 1, np.uint16)
    first = rans.encode(symbols, contexts, frequencies, states, words)
    coded = np.concatenate([words[first:], np.zeros(4, np.uint16)])
    out = np.empty_like(symbols)
    assert rans.decode(coded, coded.size - 4, rans.table_of(frequencies), contexts, states, out) == coded.size - 4
    assert (out == symbols).all()
