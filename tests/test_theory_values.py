"""The paper's lemmas on curve fitting (sections 5, 10.6 and 10.7), as checks on curves and on recorded gradients.

Lemmas 9 and 10 say that a good spline *exists*; the tests build the spline of the proof and measure it, then check that least squares
on the same knots, which is what `fitpoly` does, has an L2 error within sqrt(d) times the bound (Remark 5).
"""

import math
from itertools import pairwise

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.kernels import fit
from deepreduce.lab.data import load

POINTS = 20_001
X = np.linspace(0, 1, POINTS)

# Descending curves on [0, 1] with their derivatives: decaying, a tail of a power law, steep at both ends as a whole sorted gradient, bent.
CURVES = {
    "exponential": (np.exp(-3 * X), -3 * np.exp(-3 * X)),
    "power": (1 / (1 + 20 * X), -20 / (1 + 20 * X) ** 2),
    "two tails": ((1 - 2 * X) ** 5 + 0.3 * (1 - 2 * X), -10 * (1 - 2 * X) ** 4 - 0.6),
    "bent": (np.cos(math.pi * X) * 4, -4 * math.pi * np.sin(math.pi * X)),
}
KNOTS = [1, 2, 3, 5, 8, 13, 40]
ROUNDING = 1 + 1e-6


def variation(samples):
    return float(np.sum(np.abs(np.diff(samples))))


def equal_shares(cumulative, knots):
    """Indices that cut a non-decreasing curve into knots + 1 pieces of equal growth."""
    shares = np.arange(1, knots + 1) / (knots + 1) * cumulative[-1]
    return np.searchsorted(cumulative, shares)


def constant_spline(samples, knots):
    """The spline of Lemma 9: pieces of equal variation, each at the middle of its range."""
    grown = np.concatenate([[0], np.cumsum(np.abs(np.diff(samples)))])
    bounds = np.concatenate([[0], equal_shares(grown, knots), [samples.size]])
    spline = np.empty(samples.size)
    for start, stop in pairwise(bounds):
        if start < stop:
            spline[start:stop] = (samples[start:stop].min() + samples[start:stop].max()) / 2
    return spline, bounds


def linear_spline(curve, slope, knots):
    """The spline of Lemma 10: the integral of Lemma 9's spline of the slope, started anew on the curve at half of the knots."""
    half = knots // 2
    steps, breaks = constant_spline(slope, half)
    missed = np.concatenate([[0], np.cumsum(np.abs(slope - steps)[:-1]) / (POINTS - 1)])
    anchors = np.concatenate([[0], equal_shares(missed, half)])
    risen = np.concatenate([[0], np.cumsum(steps[:-1]) / (POINTS - 1)])
    last = np.searchsorted(anchors, np.arange(POINTS), side="right") - 1
    return curve[anchors][last] + risen - risen[anchors][last], np.unique(np.concatenate([breaks, anchors]))


def least_squares_error(samples, bounds, degree):
    """The L2 error of our fit of this degree on the segments between these bounds."""
    values = samples.astype(np.float32)
    squared = 0.0
    for start, stop in pairwise(bounds):
        if start < stop:
            squared += fit._project(values, start, stop, min(degree + 1, stop - start), np.empty(degree + 1))
    return math.sqrt(squared)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("p", KNOTS)
def test_lemma_9_a_constant_spline_errs_by_at_most_m_over_2p_plus_2(name, p):
    curve, _ = CURVES[name]
    bound = variation(curve) / (2 * p + 2)
    spline, bounds = constant_spline(curve, p)
    assert len(bounds) == p + 2
    assert np.max(np.abs(spline - curve)) <= bound * ROUNDING
    assert least_squares_error(curve, bounds, degree=0) <= math.sqrt(POINTS) * bound


@pytest.mark.parametrize("p", KNOTS)
def test_lemma_9_is_tight_for_a_straight_line(p):
    line = 1 - X
    spline, _ = constant_spline(line, p)
    assert np.max(np.abs(spline - line)) == pytest.approx(1 / (2 * p + 2), rel=0.01)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("p", KNOTS)
def test_lemma_10_a_linear_spline_errs_by_at_most_2m_over_p_squared(name, p):
    """On an axis of length 1, as `fitpoly` has it; `slope` is with respect to that axis."""
    curve, slope = CURVES[name]
    bound = 2 * variation(slope) / p**2
    spline, bounds = linear_spline(curve, slope, p)
    quadrature = variation(slope) / (POINTS - 1)
    assert len(bounds) <= p + 2
    assert np.max(np.abs(spline - curve)) <= bound + quadrature
    assert least_squares_error(curve, bounds, degree=1) <= math.sqrt(POINTS) * bound


def test_lemma_10_needs_the_unit_axis():
    """On [1, d], as the paper writes it, the integral of the slope's error brings a factor d - 1, which its proof leaves out.

    The parabola f(x) = -(x - 1)^2 / 2 has Var f' = M = d - 1. Every spline with p knots is one line over a stretch of (d - 1) / (p + 1) or
    more, and is off there by more than 2 M / p^2 once d is large. With the factor the lemma holds.
    """
    d, p = 1001, 8
    change = d - 1
    x = np.linspace(0, (d - 1) / (p + 1), 1001)
    from_chord = -(x**2) / 2 + x * x[-1] / 2
    best = np.ptp(from_chord) / 2  # the chord of a parabola, moved to the middle of what it misses, is the best line there is
    assert best > 2 * change / p**2
    assert best <= (d - 1) * 2 * change / p**2


@pytest.mark.parametrize("name", CURVES)
def test_the_papers_cuts_do_not_lag_far_behind_equal_variation(name):
    """The greedy cuts are not those of the proof. With p knots, `fitpoly` keeps Remark 5's bound all the same on these curves."""
    curve, slope = CURVES[name]
    values = curve.astype(np.float32)
    for p in KNOTS:
        bounds = np.empty(p + 2, np.int64)
        count = fit.cut(values, 0, POINTS, 1, p + 1, bounds)
        assert least_squares_error(curve, bounds[: count + 1], degree=1) <= math.sqrt(POINTS) * 2 * variation(slope) / p**2


# Lemma 11: fitted gradients are bounded


def squared(values):
    return float(np.sum(values.astype(np.float64) ** 2))


@pytest.mark.parametrize("value", ["fitpoly", "fitpoly:2,degree=1", "fitpoly:paper,degree=0"])
def test_lemma_11_a_fitted_top_r_gradient_is_bounded(value):
    """The biased case: E|C(g)|^2 <= 2 (2 - delta) |g|^2 + terms that are not negative.

    Least squares is a projection, and so is the flattening after it: the fit is never longer than what it fits.
    """
    for name, gradient in load("resnet20").items():
        if gradient.size < 1000:
            continue
        sent = dr.decode_sparse(dr.parse(f"topr:0.01/raw/{value}").encode(gradient))
        delta = sent.nnz / gradient.size
        kept = gradient.reshape(-1)[sent.indices]
        assert squared(gradient) - squared(kept) <= (1 - delta) * squared(gradient), name
        assert squared(sent.values) <= squared(kept) * ROUNDING, name
        assert squared(sent.values) <= 2 * (2 - delta) * squared(gradient), name


def test_lemma_11_a_fitted_unbiased_gradient_is_bounded():
    """The unbiased case, with elements kept by a coin of probability q and scaled by 1 / q: a compressor with delta = 2 - 1 / q."""
    gradient, q = load("resnet20")["l.8.c2.weight"].reshape(-1), 0.8
    delta, codec, rng = 2 - 1 / q, dr.parse("nonzero/bitmap/fitpoly"), np.random.default_rng(0)
    lengths = []
    for _ in range(20):
        compressed = np.where(rng.random(gradient.size) < q, gradient / np.float32(q), np.float32(0))
        lengths.append(squared(dr.decode(codec.encode(compressed))))
    assert np.mean(lengths) <= 2 * (2 - delta) * squared(gradient)
    assert np.mean(lengths) >= 0.9 * squared(gradient)
