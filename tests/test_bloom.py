"""The Bloom index codec: what its policies promise, and what it refuses."""

from itertools import pairwise
from math import log

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.indices.bloom import Filter
from deepreduce.reader import Reader, varint
from deepreduce.source import Space

from . import arrays
from .tensors import same_bits

POLICIES = ["naive", "p0", "p1", "p2", "leftmost", "middle", "rightmost"]
EXACT_COUNT = ["p1", "p2", "leftmost", "middle", "rightmost"]

NUMEL, KEPT, FPR = 2_560_000, 25_600, 1e-3


def gradient(numel=100_000, seed=0):
    return np.random.default_rng(seed).standard_normal(numel, np.float32)


def squared_error(dense, blob):
    return float(np.sum((dense - dr.decode(blob)) ** 2, dtype=np.float64))


@pytest.fixture(scope="module")
def large():
    """Kept positions of a large gradient, scattered, and the space they lie in."""
    return np.sort(np.random.default_rng(1).choice(NUMEL, KEPT, replace=False)), Space((NUMEL,))


# Names and parameters


@pytest.mark.parametrize("piece", ["bloom:p2,fpr=0.001", "bloom:p0", "bloom:naive,fpr=1e-05"])
def test_the_spec_is_given_back(piece):
    spec = f"topr:0.01/{piece}/raw"
    assert str(dr.parse(spec)) == spec


def test_the_policy_is_always_spelled():
    assert str(dr.parse("topr:0.01/bloom/raw")) == "topr:0.01/bloom:p0/raw"
    assert dr.parse("topr:0.01/bloom:fpr=0.01/raw").index == dr.Bloom("p0", fpr=0.01)


@pytest.mark.parametrize("arguments", [("p3",), ("p0", 0.0), ("p0", 1.0), ("p0", -1.0), ("p0", float("nan")), ("p0", 1e-16)])
def test_impossible_parameters_are_refused(arguments):
    with pytest.raises(dr.ConfigError, match=r"(?i)bloom"):
        dr.Bloom(*arguments)


# The filter


def test_size_of_the_filter(large):
    kept, space = large
    part, _ = arrays.encode(dr.Bloom("leftmost", FPR), kept, space, seed=0)
    assert 8 * len(part) == pytest.approx(-KEPT * log(FPR) / log(2) ** 2, rel=0.01)


@pytest.mark.parametrize("rate", [0.5, 0.6, 0.9])
def test_high_rates_as_the_paper_uses_for_ncf(rate):
    kept, space = np.arange(0, 200_000, 4), Space((200_000,))
    positives = arrays.encode(dr.Bloom("p0", rate), kept, space, seed=1)[1]
    assert (positives.size - kept.size) / (space.numel - kept.size) == pytest.approx(rate, abs=0.01)


def test_the_rate_that_is_chosen_needs_the_fewest_bytes():
    for keep in (0.001, 0.01, 0.1):
        dense = gradient()
        chosen = len(dr.parse(f"topr:{keep}/bloom:p0/raw").encode(dense))
        others = [len(dr.parse(f"topr:{keep}/bloom:p0,fpr={fpr}/raw").encode(dense)) for fpr in np.geomspace(1e-6, 0.5, 25)]
        assert chosen <= 1.01 * min(others)


def test_the_bytes_are_the_same_on_every_machine():
    kept = np.array([3, 5, 40, 41, 90, 99])
    coded = {policy: arrays.encode(dr.Bloom(policy, 0.2), kept, Space((100,)), seed=300) for policy in ("p1", "p2")}
    assert {part.hex() for part, _ in coded.values()} == {"ac0202030a7918"}
    assert coded["p1"][1].tolist() == [3, 5, 33, 39, 90, 93]
    assert coded["p2"][1].tolist() == [3, 5, 18, 59, 90, 99]


# Policies


@pytest.mark.parametrize("policy", EXACT_COUNT)
def test_as_many_positions_as_were_kept(large, policy):
    kept, space = large
    _, support = arrays.encode(dr.Bloom(policy, FPR), kept, space, seed=5)
    assert support.size == KEPT


def test_p0_keeps_everything_that_was_kept(large):
    kept, space = large
    _, support = arrays.encode(dr.Bloom("p0", FPR), kept, space, seed=5)
    assert np.all(np.isin(kept, support))


def test_deterministic_policies_are_runs_of_the_positives(large):
    kept, space = large
    support = {policy: arrays.encode(dr.Bloom(policy, FPR), kept, space, seed=5)[1] for policy in [*EXACT_COUNT, "p0"]}
    positives = support["p0"]
    extra = positives.size - KEPT
    assert np.array_equal(support["leftmost"], positives[:KEPT])
    assert np.array_equal(support["middle"], positives[extra // 2 : extra // 2 + KEPT])
    assert np.array_equal(support["rightmost"], positives[extra:])
    assert all(np.all(np.isin(chosen, positives)) for chosen in support.values())


def test_p2_finds_more_of_what_was_kept_than_p1(large):
    kept, space = large
    for seed in range(6):
        hits = [np.isin(arrays.encode(dr.Bloom(policy, FPR), kept, space, seed)[1], kept).sum() for policy in ("p1", "p2")]
        assert hits[0] < hits[1]
        assert hits[1] > 0.99 * KEPT


@pytest.mark.parametrize("policy", ["p1", "p2"])
def test_random_policies_follow_the_seed(policy):
    kept = np.arange(0, 20_000, 37)
    supports = [arrays.encode(dr.Bloom(policy, 0.05), kept, Space((20_000,)), seed)[1] for seed in (1, 1, 2)]
    assert np.array_equal(supports[0], supports[1])
    assert not np.array_equal(supports[0], supports[2])


def test_errors_are_ordered_as_in_the_paper():
    """P0 is at least as good as the sparsifier, then P2, then P1; naive is worse than to send nothing."""
    dense = gradient(NUMEL) ** 3
    codecs = {policy: dr.parse(f"topr:0.01/bloom:{policy},fpr=0.001/raw") for policy in POLICIES}
    error = {policy: squared_error(dense, codec.encode(dense, seed=1)) for policy, codec in codecs.items()}
    top_r = squared_error(dense, dr.parse("topr:0.01/raw/raw").encode(dense))
    nothing = float(np.sum(dense**2, dtype=np.float64))
    assert error["p0"] < top_r < error["p2"] < error["p1"] < nothing
    assert error["p2"] < 1.01 * top_r
    assert error["naive"] > max(nothing, 2 * max(error[policy] for policy in POLICIES if policy != "naive"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kept", [[], [0], [99], range(100)], ids=["none", "first", "last", "all"])
def test_few_and_all_positions(policy, kept):
    dense = np.zeros(100, np.float32)
    dense[list(kept)] = 1.5
    blob = dr.parse(f"nonzero/bloom:{policy},fpr=1e-09/raw").encode(dense, seed=3)
    assert np.array_equal(dr.decode(blob), dense)


@pytest.mark.parametrize("policy", POLICIES)
def test_empty_tensors(policy):
    assert dr.decode(dr.encode(np.zeros((0, 3), np.float32), f"none/bloom:{policy}/raw")).shape == (0, 3)


def test_p0_gives_a_sparse_tensor_back():
    """A position that was not stored comes back as an explicit zero at worst."""
    rng = np.random.default_rng(2)
    indices = np.sort(rng.choice(50_000, 600, replace=False))
    tensor = dr.SparseTensor(indices, rng.standard_normal(600).astype(np.float32), (500, 100))
    back = dr.decode_sparse(dr.parse("none/bloom:p0,fpr=0.01/raw").encode(tensor, seed=8))
    stored = back.values != 0
    assert back.nnz > tensor.nnz
    assert np.array_equal(back.indices[stored], tensor.indices)
    assert same_bits(back.values[stored], tensor.values)


# Bytes from a peer


SPACE = Space((1000,))
KEPT_SMALL = np.arange(0, 1000, 17)


def section(hashes=7, bits=None, seed=4):
    bits = Filter.holding(KEPT_SMALL, 0.01, seed).bits.tobytes() if bits is None else bits
    return Reader(varint(seed) + bytes((hashes,)) + varint(len(bits)) + bits)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hand_made_section_is_read(policy):
    codec = dr.Bloom(policy, 0.01)
    _, support = arrays.encode(codec, KEPT_SMALL, SPACE, seed=4)
    assert arrays.decode(codec, section(), support.size, SPACE).size == support.size


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("hashes", [0, 51, 255])
def test_impossible_numbers_of_hashes_are_refused(policy, hashes):
    with pytest.raises(dr.CorruptError, match="hashes"):
        arrays.decode(dr.Bloom(policy, 0.01), section(hashes=hashes), KEPT_SMALL.size, SPACE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bits", [b"", bytes(40)], ids=["no bits", "no bit set"])
def test_a_filter_with_too_few_positives_is_refused(policy, bits):
    with pytest.raises(dr.CorruptError, match="the header says"):
        arrays.decode(dr.Bloom(policy, 0.01), section(bits=bits), KEPT_SMALL.size, SPACE)


def test_p0_refuses_too_many_positives():
    with pytest.raises(dr.CorruptError, match="the header says"):
        arrays.decode(dr.Bloom("p0"), section(bits=bytes([255] * 40)), 999, SPACE)
    assert arrays.decode(dr.Bloom("p0"), section(bits=bytes([255] * 40)), 1000, SPACE).size == 1000


@pytest.mark.parametrize("policy", [*EXACT_COUNT, "naive"])
@pytest.mark.parametrize("nnz", [0, 1, 999, 1000])
def test_a_full_filter_gives_the_number_asked_for(policy, nnz):
    support = arrays.decode(dr.Bloom(policy), section(bits=bytes([255] * 40)), nnz, SPACE)
    assert support.size == nnz
    assert all(a < b for a, b in pairwise(support.tolist()))


def test_a_size_that_was_not_sent_is_refused_before_it_is_allocated():
    for size, error in ((2**29, dr.CorruptError), (2**29 - 1, dr.TruncatedError)):
        with pytest.raises(error):
            arrays.decode(dr.Bloom("p0"), Reader(b"\x01\x07" + varint(size) + b"\xff"), 5, SPACE)
