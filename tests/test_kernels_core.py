"""Selection, drawing and bit packing against slow, obvious versions. Run a second time with bounds checking."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepreduce.kernels import bits, draw
from deepreduce.source import DenseSource

from .tensors import BF16, gradients


def obvious_top(array, count):
    """Sort by magnitude, NaN above Inf, ties by position; all non-finite ones in any case."""
    flat = array.reshape(-1).astype(np.float64)
    count = min(max(count, int((~np.isfinite(flat)).sum())), flat.size)
    order = np.lexsort((np.arange(flat.size), -np.abs(flat), ~np.isnan(flat)))  # the last key counts first
    return np.sort(order[:count])


def unlike_nans(array):
    """NaNs of different payload have an order of their own: make them one."""
    copy = np.array(array)
    copy[np.isnan(copy.astype(np.float64))] = np.nan
    return np.abs(copy) if copy.size else copy


@given(gradient=gradients(), count=st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_top(gradient, count):
    gradient = unlike_nans(gradient)
    assert np.array_equal(DenseSource(gradient).top(count).positions, obvious_top(gradient, count))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_top_of_many_ties(dtype):
    rng = np.random.default_rng(1)
    for values in (rng.integers(-3, 4, 5000), np.zeros(5000), rng.standard_normal(5000), rng.standard_normal(5000) * 1e-4):
        array = values.astype(dtype)
        for count in (1, 7, 50, 2500, 4999, 5000, 9999):
            assert np.array_equal(DenseSource(array).top(count).positions, obvious_top(array, count))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BF16])
def test_top_of_a_large_tensor(dtype):
    rng = np.random.default_rng(2)
    spoiled = rng.standard_normal(40_000)
    spoiled[[5, 39_999]] = [np.nan, -np.inf]
    for values in (rng.standard_normal(40_000) * 1e-4, rng.integers(-3, 4, 40_000), np.zeros(40_000), spoiled):
        array = values.astype(dtype)
        for count in (1, 400, 20_000):
            assert np.array_equal(DenseSource(array).top(count).positions, obvious_top(array, count))


@given(gradient=gradients(), threshold=st.one_of(st.floats(0, 200), st.sampled_from([0.0, 1.0, 1e-6, 1e-320, 1e300])))
@settings(max_examples=150, deadline=None)
def test_above(gradient, threshold):
    flat = gradient.reshape(-1).astype(np.float64)
    wanted = np.flatnonzero((np.abs(flat) >= threshold) | np.isnan(flat))
    assert np.array_equal(DenseSource(gradient).above(threshold).positions, wanted)


@given(gradient=gradients(), chunk=st.integers(1, 40), count=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_chunk_top(gradient, chunk, count):
    gradient = unlike_nans(gradient).reshape(-1)
    wanted = [obvious_top(gradient[at : at + chunk], count) + at for at in range(0, gradient.size, chunk)]
    assert np.array_equal(DenseSource(gradient).chunk_top(chunk, count).positions, np.concatenate([np.empty(0, np.int64), *wanted]))


@given(gradient=gradients())
@settings(max_examples=50, deadline=None)
def test_nonzero(gradient):
    flat = gradient.reshape(-1).astype(np.float64)
    assert np.array_equal(DenseSource(gradient).nonzero().positions, np.flatnonzero(flat))


def obvious_sample(numel, count, seed):
    """Floyd's algorithm with a set, on the documented stream of splitmix64."""
    wrap = 2**64 - 1

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & wrap
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & wrap
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix(mix((seed + golden) & wrap) ^ (draw.POSITIONS * 0xBF58476D1CE4E5B9 & wrap))
    chosen = set()
    for j in range(numel - count, numel):
        pick = int((mix((state + (j + 1) * golden) & wrap) >> 11) * 2.0**-53 * (j + 1))
        chosen.add(j if pick in chosen else pick)
    return sorted(chosen)


@given(data=st.data(), numel=st.integers(0, 500), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=100, deadline=None)
def test_sample(data, numel, seed):
    count = data.draw(st.integers(0, numel))
    assert draw.sample(numel, count, seed).tolist() == obvious_sample(numel, count, seed)


def test_sample_is_uniform():
    counts = np.zeros(20)
    for seed in range(4000):
        counts[draw.sample(20, 5, seed)] += 1
    expected, deviation = 4000 * 5 / 20, np.sqrt(4000 * 0.25 * 0.75)
    assert np.abs(counts - expected).max() < 4.5 * deviation


@given(data=st.data(), width=st.integers(0, 63), count=st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_pack_and_unpack(data, width, count):
    numbers = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=count, max_size=count))
    packed = bits.pack(np.array(numbers, np.uint64), width)
    whole = sum(number << (i * width) for i, number in enumerate(numbers))
    assert packed == whole.to_bytes((count * width + 7) // 8, "little")
    assert bits.unpack(packed, width, count).tolist() == numbers
    if width <= 8:
        assert bits.pack(np.array(numbers, np.uint8), width) == packed
        assert bits.unpack(packed, width, count, np.uint8).tolist() == numbers
