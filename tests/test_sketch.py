"""Quantile bins: equal shares, their means, one sign per bin, and the MinMaxSketch over them."""

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.lab.data import load
from deepreduce.reader import Reader


@pytest.fixture(scope="module")
def values():
    gradient = np.concatenate([array.reshape(-1) for array in load("gpt").values()])
    return dr.decode_sparse(dr.encode(gradient, "topr:0.05/raw/raw")).values


def round_trip(codec, values):
    part, order = codec.encode(values, seed=0)
    assert order is None
    reader = Reader(part)
    decoded = codec.decode(reader, values.size, values.dtype)
    reader.expect_end()
    return decoded, len(part)


@pytest.mark.parametrize("bits", [1, 6, 7, 8])
def test_bins_hold_equal_shares_and_decode_to_their_means(values, bits):
    decoded, size_bytes = round_trip(dr.Sketch(bits), values)
    assert size_bytes == 4 * 2**bits + -(-values.size * bits // 8)
    means, ids, counts = np.unique(decoded, return_inverse=True, return_counts=True)
    assert means.size == 2**bits
    assert counts.max() <= 1.1 * values.size / 2**bits + 2
    sums = np.bincount(ids, values.astype(np.float64))
    assert means == pytest.approx(sums / counts, rel=1e-6)
    assert np.all(np.diff(means[ids[np.argsort(values, kind="stable")]]) >= 0)


@pytest.mark.parametrize("codec", [dr.Sketch(1), dr.Sketch(6), dr.Sketch(6, groups=8), dr.Sketch(8, groups=2)])
def test_no_value_changes_its_sign(values, codec):
    decoded, _ = round_trip(codec, values)
    assert np.array_equal(np.sign(decoded), np.sign(values))


def test_more_bits_are_closer(values):
    errors = [np.linalg.norm(round_trip(dr.Sketch(bits), values)[0] - values) for bits in range(1, 9)]
    assert errors == sorted(errors, reverse=True)


def test_huffman_changes_the_size_and_nothing_else(values):
    plain, plain_bytes = round_trip(dr.Sketch(7), values)
    coded, coded_bytes = round_trip(dr.Sketch(7, huffman=True), values)
    assert np.array_equal(plain, coded)
    assert abs(coded_bytes - plain_bytes) < 0.02 * plain_bytes


def test_huffman_pays_where_many_values_are_equal(values):
    mostly_one = np.where(np.arange(values.size) % 10 == 0, values, np.float32(0.5))
    _, plain_bytes = round_trip(dr.Sketch(7), mostly_one)
    _, coded_bytes = round_trip(dr.Sketch(7, huffman=True), mostly_one)
    assert coded_bytes < plain_bytes / 2


def test_the_minmax_sketch_is_smaller_and_errs_towards_zero_inside_the_group(values):
    plain, plain_bytes = round_trip(dr.Sketch(8), values)
    grouped, grouped_bytes = round_trip(dr.Sketch(8, groups=8), values)
    assert grouped_bytes < 0.75 * plain_bytes
    ids = dr.Sketch(8, groups=8)._quantise(values)
    assert np.all(np.abs(grouped) <= np.abs(ids[1][ids[0]]))
    coarse, _ = round_trip(dr.Sketch(2), values)
    assert np.linalg.norm(plain - values) < np.linalg.norm(grouped - values) < np.linalg.norm(coarse - values)


def test_few_values_are_sent_raw_as_that_is_smaller():
    gradient = np.linspace(-1, 1, 60, dtype=np.float32)
    blob = dr.encode(gradient, "none/all/sketch:6")
    assert dr.inspect(blob).spec == "none/all/raw"
    assert np.array_equal(dr.decode(blob), gradient)


@pytest.mark.parametrize("sample", [np.ones(500), -np.ones(500), np.zeros(500), np.r_[np.zeros(499), -3.0], np.r_[np.zeros(499), 3.0]])
def test_values_with_few_distinct_numbers_come_back_exactly(sample):
    gradient = sample.astype(np.float32)
    for spec in ("sketch:1", "sketch:5", "sketch:5,huffman=true", "sketch:5,groups=4"):
        assert np.array_equal(dr.decode(dr.encode(gradient, f"none/all/{spec}")), gradient)


@pytest.mark.parametrize(
    "arguments",
    ["0", "9", "6,groups=3", "6,groups=64", "6,groups=1", "6,rows=0", "6,columns=nan", "6,huffman=true,groups=8"],
)
def test_wrong_parameters_are_refused(arguments):
    with pytest.raises(dr.ConfigError):
        dr.parse(f"none/all/sketch:{arguments}")


def test_means_that_are_not_finite_are_refused():
    part = np.float32([1, np.nan]).tobytes() + b"\0"
    with pytest.raises(dr.CorruptError, match="finite"):
        dr.Sketch(1).decode(Reader(part), 8, np.dtype(np.float32))
