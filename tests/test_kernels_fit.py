"""The kernels of the curve codecs against slow, obvious versions of the same."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepreduce.kernels import dexp, fit


def heavy(count, seed=0):
    return (np.random.default_rng(seed).standard_normal(count) ** 3).astype(np.float32)


def part(count, seed=0):
    """Positive values, descending."""
    return np.sort(np.abs(heavy(count, seed)))[::-1].copy()


# Sorting


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=60), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_descending_is_a_stable_sort_of_every_block(numbers, block):
    values = np.array(numbers, np.float32)
    found, permutation = fit.descending(values, block)
    expected = [
        i for start in range(0, values.size, block) for i in sorted(range(start, min(start + block, values.size)), key=lambda i: -values[i])
    ]
    assert permutation.tolist() == expected
    assert np.array_equal(found, values[expected])


# Least squares


@pytest.mark.parametrize("degree", [0, 1, 2, 5, 9, 15])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 16, 17, 40, 1000])
def test_projection_is_least_squares(degree, count):
    values = part(count)
    terms = min(degree + 1, count)
    coefficients, curve = np.empty(terms), np.empty(count)
    error = fit._project(values, 0, count, terms, coefficients)
    fit._curve(coefficients.astype(np.float32), 0, terms, curve)
    x = np.linspace(-1, 1, count) if count > 1 else np.zeros(1)
    expected = np.polynomial.Chebyshev.fit(x, values.astype(np.float64), terms - 1, domain=[-1, 1])(x)
    assert np.linalg.norm(curve - expected) <= 1e-6 * np.linalg.norm(values)
    assert error == pytest.approx(np.sum((expected - values) ** 2), abs=1e-9 * float(values @ values))


@pytest.mark.parametrize("count", [2, 5, 64, 5000])
def test_no_coefficient_exceeds_the_root_mean_square(count):
    values = np.full(count, np.finfo(np.float32).max, np.float32)
    values[count // 2 :] *= -1
    coefficients = np.empty(min(16, count))
    fit._project(values, 0, count, coefficients.size, coefficients)
    assert np.all(np.abs(coefficients) <= float(np.finfo(np.float32).max) * (1 + 1e-12))


# Cutting


def slow_cuts(values, degree, segments):
    """The greedy rule of the paper, with plain lists."""
    pieces, least = [(0, len(values))], degree + 1
    while len(pieces) < segments:
        candidates = []
        for start, stop in pieces:
            slope = (values[stop - 1] - values[start]) / max(stop - 1 - start, 1)
            for i in range(start + least, stop - least + 1):
                if stop - start >= 2 * least:
                    candidates.append(((values[start] + slope * (i - start) - values[i]) ** 2, -i, start, stop))
        if not candidates or max(candidates)[0] == 0:
            break
        _, at, start, stop = max(candidates)
        pieces.remove((start, stop))
        pieces = sorted([*pieces, (start, -at), (-at, stop)])
    return [start for start, _ in pieces] + [len(values)]


@pytest.mark.parametrize("degree", [0, 1, 5])
@pytest.mark.parametrize("count", [1, 2, 11, 12, 13, 50, 200])
@pytest.mark.parametrize("segments", [1, 2, 3, 8, 60])
def test_cuts_are_at_the_largest_distance_from_the_chord(degree, count, segments):
    values, bounds = part(count, seed=count), np.full(segments + 1, -1)
    found = fit.cut(values, 0, count, degree, segments, bounds)
    assert bounds[: found + 1].tolist() == slow_cuts(values.astype(np.float64), degree, segments)
    if found > 1:
        assert np.all(np.diff(bounds[: found + 1]) > degree)


def test_a_straight_line_is_not_cut():
    bounds = np.empty(9, np.int64)
    assert fit.cut(np.linspace(8, 0, 65).astype(np.float32), 0, 65, 1, 8, bounds) == 1


@pytest.mark.parametrize(
    ("degree", "change", "expected"), [(1, 0.25, 1), (1, 1, 2), (1, 4, 4), (5, 64, 16), (0, 1, 1), (0, 4, 2), (0, 16, 11)]
)
def test_the_papers_number_of_segments(degree, change, expected):
    """ceil(2 sqrt(M)); for constants ceil(M / sqrt(2) - 1), and at least one."""
    values = (np.arange(513, -1, -1) ** 2 * (change / 1024)).astype(np.float32)  # differences from 1025 to 1 times this
    bounds = np.empty(fit.MAX_SEGMENTS + 1, np.int64)
    assert fit.cut(values, 0, values.size, degree, fit.PAPER, bounds) == expected


def error_of(values, bounds):
    """The relative L2 error of polynomials of degree 5 on these segments."""
    squared = sum(fit._project(values, a, b, 6, np.empty(6)) for a, b in pairwise(bounds))
    return math.sqrt(squared) / np.linalg.norm(values.astype(np.float64))


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1, 1e20])
def test_cutting_to_the_target_error_does_not_depend_on_the_scale(scale):
    values = (part(3000) * np.float32(scale)).astype(np.float32)
    bounds, fewer = np.empty(fit.MAX_SEGMENTS + 1, np.int64), np.empty(fit.MAX_SEGMENTS + 1, np.int64)
    count = fit.cut(values, 0, values.size, 5, fit.TARGET, bounds)
    assert 1 < count < 8
    assert error_of(values, bounds[: count + 1]) <= fit.TARGET_ERROR
    assert fit.cut(values, 0, values.size, 5, count - 1, fewer) == count - 1
    assert error_of(values, fewer[:count]) > fit.TARGET_ERROR


# Flattening


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=30))
@settings(max_examples=150, deadline=None)
def test_flattening_is_isotonic_regression(numbers):
    given_values = np.array(numbers, np.float64)
    out, count = given_values.copy(), len(numbers)
    fit._flatten(out, 0, count, np.empty(count), np.empty(count, np.int64))
    # The classical min-max formula, for non-increasing sequences.
    expected = [min(max(given_values[i : j + 1].mean() for j in range(k, count)) for i in range(k + 1)) for k in range(count)]
    assert np.allclose(out, expected, atol=1e-12)
    assert np.all(np.diff(out) <= 0)


# Double exponentials


@pytest.mark.parametrize("x", [-1e9, -800.0, -700.0, -30.0, -1.5, -1e-9, 0.0, 0.3, 1.0, 40.0, 699.0])
def test_exponential(x):
    assert dexp.exponential(x) == pytest.approx(math.exp(x), rel=1e-13, abs=5e-324)


def model(x, a, b, c, d):
    """In the form of the paper."""
    return a * np.exp(b * x) + c * np.exp(d * x)


def test_curve_is_the_double_exponential():
    x = np.linspace(0, 1, 50_000)
    out = np.empty(x.size)
    dexp.curve(np.float32([3, 2, -1, -50]), 0, out)
    assert np.allclose(out, model(x, 1, -1, 2, -50), rtol=1e-9)
    dexp.curve(np.float32([0.5, -1.5, -1, 8]), 0, out)
    assert np.allclose(out, model(x, 2, -1, -1.5 * math.exp(-8), 8), rtol=1e-9)


CURVES = [(1, -1, 2, -50), (5, -0.3, 0.5, -6), (1, -0.5, -1e-3, 4), (0.2, 0.0, 9, -300)]


@pytest.mark.parametrize("curve", CURVES)
def test_integral_equations_find_the_rates(curve):
    y = model(np.linspace(0, 1, 20_000), *curve)
    assert sorted(dexp.rates_by_integrals(y)) == pytest.approx(sorted([curve[1], curve[3]]), rel=0.02, abs=0.02)


@pytest.mark.parametrize("count", [40, 1000])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("curve", CURVES)
def test_a_double_exponential_is_recovered(curve, scale, count):
    y = scale * model(np.linspace(0, 1, count), *curve)
    parameters, out = np.empty(4, np.float32), np.empty(count)
    assert dexp.fit(y, parameters, 0)
    dexp.curve(parameters, 0, out)
    assert np.linalg.norm(out - y) <= 1e-3 * np.linalg.norm(y - y.mean())


def test_a_line_is_close_to_a_limit_of_double_exponentials():
    y = np.linspace(3, 1, 100)
    parameters, out = np.empty(4, np.float32), np.empty(100)
    assert not dexp.fit(y * 1e38, parameters, 0)  # its weights cancel each other, and exceed float32
    assert not dexp.fit(y[:4].copy(), parameters, 0)
    x = np.linspace(0, 1, 100)
    curved = y - 0.2 * x * x
    assert dexp.fit(curved, parameters, 0)
    dexp.curve(parameters, 0, out)
    assert np.linalg.norm(out - curved) <= 0.01 * np.linalg.norm(curved - curved.mean())
