"""The paper's preliminaries (section 10.2): remark 1 and lemmas 3 and 4, as far as they hold."""

from itertools import combinations

import numpy as np
import pytest

import deepreduce as dr


def energy(array):
    return float(np.sum(np.asarray(array, np.float64) ** 2))


def error(dense, spec, seed=0):
    return energy(dense.astype(np.float64) - dr.decode(dr.parse(spec).encode(dense, seed=seed)))


GRADIENTS = {
    "normal": lambda draw: draw.standard_normal(400),
    "heavy tails": lambda draw: draw.standard_normal(400) ** 3,
    "equal": lambda draw: np.ones(400),
    "one": lambda draw: np.eye(1, 400, 7)[0],
}


@pytest.fixture(params=GRADIENTS)
def gradient(request):
    return GRADIENTS[request.param](np.random.default_rng(1)).astype(np.float32)


def test_remark_1_random_r_loses_its_share_on_average():
    """E |g - random-r(g)|^2 = (1 - r/d) |g|^2: exactly, over all supports of r elements."""
    dense, kept = np.random.default_rng(0).standard_normal(9), 3
    lost = [energy(np.delete(dense, support)) for support in combinations(range(9), kept)]
    assert np.mean(lost) == pytest.approx((1 - kept / 9) * energy(dense))


def test_remark_1_the_codecs_are_delta_compressors(gradient):
    """Top-r loses at most (1 - r/d) of the energy, always; random-r loses as much on average over seeds."""
    share = 0.1
    bound = (1 - share) * energy(gradient)
    assert error(gradient, f"topr:{share}/raw/raw") <= bound * (1 + 1e-6)
    losses = [error(gradient, f"randomr:{share}/raw/raw", seed) for seed in range(400)]
    deviation = np.std(losses) / np.sqrt(len(losses))
    assert np.mean(losses) == pytest.approx(bound, abs=5 * deviation + 1e-6)
    assert error(gradient, f"topr:{share}/raw/raw") <= np.mean(losses) + 5 * deviation + 1e-6


def test_lemma_3_with_the_square_that_is_missing_on_its_left_side():
    """|x - sorted(x)|^2 = 2 (1 - cos) |x|^2. The lemma prints the norm without its square, which is not true."""
    x = np.random.default_rng(2).standard_normal(50)
    ordered = x[np.argsort(-np.abs(x))]
    cosine = float(x @ ordered) / energy(x)
    assert energy(x - ordered) == pytest.approx(2 * (1 - cosine) * energy(x))
    assert np.sqrt(energy(x - ordered)) != pytest.approx(2 * (1 - cosine) * energy(x), rel=0.1)


@pytest.mark.parametrize("bits", [3, 4, 7])
def test_lemma_4_i_energy_of_an_unbiased_compressor(bits):
    """E |C(g)|^2 <= (2 - delta) |g|^2 with delta = 1 - E |g - C(g)|^2 / |g|^2. QSGD is unbiased: an equality, as in the proof."""
    dense = np.random.default_rng(3).standard_normal(2000).astype(np.float32)
    spec = f"none/all/qsgd:bits={bits}"
    decoded = [dr.decode(dr.parse(spec).encode(dense, seed=seed)).astype(np.float64) for seed in range(60)]
    lost = np.mean([energy(dense - each) for each in decoded]) / energy(dense)
    assert lost < 1
    assert np.mean([energy(each) for each in decoded]) == pytest.approx((1 + lost) * energy(dense), rel=0.01)


def test_lemma_4_ii_energy_of_a_biased_compressor(gradient):
    """E |C(g)|^2 <= 2 (2 - delta) |g|^2. For Top-r it is never more than |g|^2, as nothing is made larger."""
    share = 0.1
    sent = energy(dr.decode(dr.parse(f"topr:{share}/raw/raw").encode(gradient)))
    assert sent <= energy(gradient) * (1 + 1e-6) <= 2 * (2 - share) * energy(gradient)
