"""The paper's statements about Bloom filters for indices (sections 10.2 to 10.5), as far as they hold.

Notation: d positions, r of them kept (the set S), P the positives of the filter, eps its false positive rate. Some of the lemmas are
equalities about an expectation that the paper does not spell out; each test says over what it is taken. Where a lemma is not true as it
stands, the test shows what is true instead, and a case that contradicts the words.
"""

from math import ceil, exp, log, sqrt

import numpy as np
import pytest

import deepreduce as dr
from deepreduce import kernels
from deepreduce.indices.bloom import Filter
from deepreduce.lab.data import load
from deepreduce.source import Space

NUMEL, KEPT, FPR = 2_560_000, 25_600, 1e-3


def recorded(name):
    """All parameters of a recorded gradient, one after the other."""
    return np.concatenate([array.reshape(-1) for array in load(name).values()])


def synthetic(numel=100_000):
    """Heavy tails, as gradients have."""
    return (np.random.default_rng(3).standard_normal(numel) ** 3).astype(np.float32)


DENSE = {"synthetic": synthetic, "resnet20": lambda: recorded("resnet20"), "gpt": lambda: recorded("gpt")}
SPARSE = {"synthetic": lambda: synthetic() * (np.arange(100_000) % 97 == 5), "ncf": lambda: recorded("ncf")}


def energy(array):
    return float(np.sum(np.asarray(array, np.float64) ** 2))


def error(dense, spec, seed):
    """The squared error of a round trip, and the positions that were sent."""
    blob = dr.parse(spec).encode(dense, seed=seed)
    return energy(dense.astype(np.float64) - dr.decode(blob)), dr.decode_sparse(blob).indices


def scattered(numel, kept, seed=0):
    return np.sort(np.random.default_rng(seed).choice(numel, kept, replace=False))


def positives_of(kept, numel, fpr, seed):
    return Filter.holding(kept, fpr, seed).all_positives(Space((numel,)))


# Lemma 2 and remark 2: the false positive rate


@pytest.mark.parametrize(("bits_each", "hashes"), [(14.3776, 10), (8, 3), (9.6, 7), (4, 3), (20, 6)])
def test_lemma_2_rate_for_any_size_and_number_of_hashes(bits_each, hashes):
    """eps = (1 - exp(-k r / m))^k, on average over salts, whatever m and k."""
    numel, kept = 400_000, 8000
    inserted = scattered(numel, kept)
    size_bytes = round(bits_each * kept / 8)
    found = []
    for seed in range(8):
        salt = int(kernels.draw.state(seed, kernels.draw.HASHING))
        packed = kernels.bloom.insert(size_bytes, hashes, salt, inserted)
        found.append(kernels.bloom.members(packed, hashes, salt, numel, numel).size - kept)
    expected = (1 - exp(-hashes * kept / (8 * size_bytes))) ** hashes * (numel - kept)
    assert np.mean(found) == pytest.approx(expected, abs=5 * sqrt(expected / len(found)), rel=0.02)


@pytest.mark.parametrize("layout", ["scattered", "run", "stride"])
def test_remark_2_measured_rate_at_the_size_of_the_paper(layout):
    """With m = -r ln(eps) / ln(2)^2 and k = -log2(eps) the rate is eps, however the kept positions lie."""
    kept = {"scattered": scattered(NUMEL, KEPT), "run": np.arange(KEPT), "stride": np.arange(0, NUMEL, NUMEL // KEPT)}[layout]
    rates = [(positives_of(kept, NUMEL, FPR, seed).size - KEPT) / (NUMEL - KEPT) for seed in range(5)]
    assert np.mean(rates) == pytest.approx(FPR, rel=0.05)


def test_remark_2_no_other_number_of_hashes_is_better():
    numel, kept, size_bytes = 400_000, 8000, 9600
    inserted = scattered(numel, kept)
    positives = {}
    for hashes in (3, 5, 7, 9, 12):  # 9.6 bits each: the best is 9.6 ln(2) = 6.7
        packed = kernels.bloom.insert(size_bytes, hashes, 1, inserted)
        positives[hashes] = kernels.bloom.members(packed, hashes, 1, numel, numel).size
    assert min(positives, key=positives.get) == 7


# Lemma 5: how many positives there are


def test_lemma_5_is_the_expected_number_of_positives():
    """r <= |P| always, as there are no false negatives. The lemma's upper bound r + eps (d - r) is the mean over salts, not a bound: about
    half of all filters have more. Five standard deviations above it, there are none.
    """
    numel, kept, fpr, filters = 200_000, 2000, 0.01, 40
    inserted = scattered(numel, kept)
    sizes = np.array([positives_of(inserted, numel, fpr, seed).size for seed in range(filters)])
    expected = ceil(kept + fpr * (numel - kept))
    deviation = sqrt(fpr * (numel - kept)) * 2  # twice, as the number of set bits varies too
    assert sizes.min() >= kept
    assert sizes.mean() == pytest.approx(expected, abs=5 * deviation / sqrt(filters))
    assert sizes.max() <= expected + 5 * deviation
    assert filters // 5 < np.count_nonzero(sizes > expected) < filters - filters // 5


def test_lemma_5_only_what_was_kept_remains_as_the_rate_goes_to_zero():
    inserted = scattered(200_000, 2000)
    sizes = [positives_of(inserted, 200_000, fpr, 0).size for fpr in (1e-1, 1e-2, 1e-3, 1e-5, 1e-12)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 2000


# Lemma 6: policy P0


@pytest.mark.parametrize("name", SPARSE)
def test_lemma_6_i_p0_is_exact_for_gradients_that_are_sparse_by_themselves(name):
    """Always, not in expectation: beta = delta = 1."""
    dense = SPARSE[name]()
    for seed in range(3):
        assert error(dense, "nonzero/bloom:p0,fpr=0.01/raw", seed)[0] == 0


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("sparsifier", ["topr:0.01", "randomr:0.01"])
def test_lemma_6_ii_p0_is_never_worse_than_the_sparsifier(name, sparsifier):
    """Always, as P contains S and every value in it is sent: the error is exactly the energy outside of P."""
    dense = DENSE[name]()
    for seed in range(3):
        without, kept = error(dense, f"{sparsifier}/raw/raw", seed)
        with_p0, positives = error(dense, f"{sparsifier}/bloom:p0,fpr=0.01/raw", seed)
        assert np.all(np.isin(kept, positives))
        assert with_p0 <= without
        outside = np.delete(dense, positives)
        assert with_p0 == pytest.approx(energy(outside))


@pytest.mark.parametrize("name", DENSE)
def test_lemma_6_ii_with_beta_from_the_number_of_positives(name):
    """The proof's beta = |P| / d bounds the error of Top-r: what is left out has less energy each than what is sent."""
    dense = DENSE[name]()
    for seed in range(3):
        missed, positives = error(dense, "topr:0.01/bloom:p0,fpr=0.01/raw", seed)
        assert missed <= (1 - positives.size / dense.size) * energy(dense)


def turned(dense):
    """The gradient in all its rotations. Over them, every value stands at every position once: an exact expectation over positions."""
    return [np.roll(dense, shift) for shift in range(dense.size)]


def test_lemma_6_remark_3_for_random_r_is_an_equality():
    """(1 - |P| / d) ||g||^2 in expectation over where the values stand, as Random-r does not look at them."""
    dense = synthetic(300)
    results = [error(g, "randomr:30/bloom:p0,fpr=0.05/raw", seed=5) for g in turned(dense)]
    positives = results[0][1]
    assert positives.size > 30
    assert np.mean([missed for missed, _ in results]) == pytest.approx((1 - positives.size / 300) * energy(dense))


# Lemma 7: deterministic policies


@pytest.mark.parametrize("policy", ["leftmost", "middle", "rightmost"])
def test_lemma_7_i_for_values_in_any_order_on_a_sparse_support(policy):
    """E||g - C(g)||^2 = (1 - |I1| / r) ||g||^2, over all orders of the values of g on its support (here: all rotations)."""
    support = scattered(4000, 80, seed=1)
    values = synthetic(80) + np.float32(20)  # none is zero
    errors = []
    for rotated in turned(values):
        dense = np.zeros(4000, np.float32)
        dense[support] = rotated
        missed, sent = error(dense, f"nonzero/bloom:{policy},fpr=0.02/raw", seed=2)
        errors.append(missed)
    true_positives = np.isin(sent, support).sum()
    assert 0 < true_positives < 80
    assert np.mean(errors) == pytest.approx((1 - true_positives / 80) * energy(values))


def test_lemma_7_i_says_nothing_about_one_gradient():
    """With the large values at the end, leftmost loses far more than the lemma's expectation and rightmost far less."""
    support = scattered(4000, 80, seed=1)
    dense = np.zeros(4000, np.float32)
    dense[support] = np.linspace(0.1, 5, 80) ** 3
    for policy, worse in (("leftmost", True), ("rightmost", False)):
        missed, sent = error(dense, f"nonzero/bloom:{policy},fpr=0.02/raw", seed=2)
        expectation = (1 - np.isin(sent, support).sum() / 80) * energy(dense)
        assert missed > 1.5 * expectation if worse else missed < expectation / 1.5


@pytest.mark.parametrize("policy", ["leftmost", "middle", "rightmost"])
def test_lemma_7_ii_where_the_sparsifier_does_not_look_at_the_values(policy):
    """E||g - C(g)||^2 = (1 - r / d) ||g||^2, over all positions of the values (here: all rotations), for Random-r."""
    dense = synthetic(300)
    errors = [error(g, f"randomr:30/bloom:{policy},fpr=0.05/raw", seed=5)[0] for g in turned(dense)]
    assert np.mean(errors) == pytest.approx((1 - 30 / 300) * energy(dense))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("policy", ["leftmost", "middle", "rightmost", "p1", "p2"])
def test_lemma_7_ii_and_equation_8_are_loose_for_top_r(name, policy):
    """For Top-r both are bounds only: most of what is sent is of the largest magnitude, and the error far below that of Random-r."""
    dense = DENSE[name]()
    missed, sent = error(dense, f"topr:0.01/bloom:{policy},fpr=0.001/raw", seed=1)
    assert missed < 0.95 * (1 - sent.size / dense.size) * energy(dense)


# Lemma 8 and equations 8 and 9: the random policy


@pytest.fixture(scope="module")
def draws():
    """A filter with its positives, and many draws of policy P1 from them."""
    kept = scattered(5000, 100, seed=4)
    positives = positives_of(kept, 5000, 0.01, seed=6)
    assert positives.size > 120
    chosen = [kernels.policies.some_of(positives, 100, kernels.draw.state(seed, kernels.draw.POLICY)) for seed in range(3000)]
    return kept, positives, chosen


def vanishes(differences):
    """Whether their mean is zero, within four standard errors."""
    return abs(np.mean(differences)) < 4 * np.std(differences) / sqrt(len(differences))


def light(numel, seed=9):
    """Values of similar size: means over draws settle soon."""
    return np.random.default_rng(seed).standard_normal(numel) + 3


def split_errors(g, draws):
    """For every draw: the shares k1 / r and k2 / (|P| - r), and the errors against g_P of sending I1, I2, and both."""
    kept, positives, chosen = draws
    whole, rows = energy(g[positives]), []
    for sent in chosen:
        true = np.isin(sent, kept)
        first, second = energy(g[sent[true]]), energy(g[sent[~true]])
        shares = true.sum() / kept.size, (~true).sum() / (positives.size - kept.size)
        rows.append((*shares, whole - first, whole - second, whole - first - second))
    return np.array(rows).T


def test_lemma_8_with_the_energies_told_apart(draws):
    """Given k1, P1's true positives are a random subset of S and its false ones of P - S. So, over the draws,

        E1 = ||g_P||^2 - k1 / r ||g_S||^2        E2 = ||g_P||^2 - k2 / (|P| - r) ||g_{P-S}||^2

    which is what the proof's sums give. The lemma has ||g_P||^2 in the last terms too, as if values of S and of P - S were alike.
    """
    kept, positives, _ = draws
    g = light(5000)
    g[kept] *= 2
    share_1, share_2, error_1, error_2, _ = split_errors(g, draws)
    whole, on_kept = energy(g[positives]), energy(g[kept])
    assert vanishes(error_1 - (whole - share_1 * on_kept))
    assert vanishes(error_2 - (whole - share_2 * (whole - on_kept)))
    assert not vanishes(error_1 - (1 - share_1) * whole)
    assert not vanishes(error_2 - (1 - share_2) * whole)


def test_lemma_8_iii_holds_for_every_draw(draws):
    """E <= E1 + E2: in fact E = E1 + E2 - ||g_P||^2. It holds with the lemma's own E1 and E2, too, in the mean."""
    kept, positives, _ = draws
    g = light(5000)
    g[kept] *= 2
    share_1, share_2, error_1, error_2, both = split_errors(g, draws)
    whole = energy(g[positives])
    assert np.allclose(both, error_1 + error_2 - whole)
    assert np.all(both <= error_1 + error_2)
    assert np.mean(both) <= np.mean((2 - share_1 - share_2) * whole)


def test_p1_keeps_the_same_share_of_everything(draws):
    """Over the draws, E = (1 - r / |P|) ||g_P||^2, whatever g: the total that follows from lemma 8 without conditions."""
    kept, positives, _ = draws
    g = light(5000)
    both = split_errors(g, draws)[4]
    assert vanishes(both - (1 - kept.size / positives.size) * energy(g[positives]))


def test_equation_9_for_gradients_that_are_sparse_by_themselves(draws):
    """E||g - C(g)||^2 = (1 - k1 / r) ||g||^2 given k1, over the draws: here lemma 8 (i) is right as it stands."""
    kept, _, _ = draws
    g = np.zeros(5000)
    g[kept] = light(100)
    share_1, _, error_1, _, both = split_errors(g, draws)
    assert np.allclose(error_1, both)
    assert vanishes(both - (1 - share_1) * energy(g))


def test_equation_8_is_an_equality_for_random_r():
    """E||g - C(g)||^2 = (1 - r / d) ||g||^2 for P1 after Random-r, over all positions of the values (here: all rotations)."""
    dense = synthetic(300)
    errors = [error(g, "randomr:30/bloom:p1,fpr=0.05/raw", seed=5)[0] for g in turned(dense)]
    assert np.mean(errors) == pytest.approx((1 - 30 / 300) * energy(dense))


def test_the_rate_of_fewest_bytes_is_where_the_derivative_vanishes():
    """Bits of P0: r ln(1 / eps) / ln(2)^2 for the filter and v (r + eps (d - r)) for the values. The codec's choice is its minimum."""
    numel, kept, value_bits = 1_000_000, 10_000, 32

    def total_bits(rate):
        return -kept * log(rate) / log(2) ** 2 + value_bits * (kept + rate * (numel - kept))

    chosen = dr.Bloom("p0")._rate(kept, numel)
    assert chosen == pytest.approx(2.08 * kept / (value_bits * (numel - kept)), rel=0.001)
    assert all(total_bits(chosen) < total_bits(chosen * factor) for factor in (0.5, 0.9, 1.1, 2))
