"""QSGD: its size, that it is unbiased, and the bound on its variance."""

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.lab.data import load
from deepreduce.reader import Reader

REPEATS = 2000


@pytest.fixture(scope="module")
def top_values():
    layer = load("resnet20")["l.8.c2.weight"]
    return dr.decode_sparse(dr.encode(layer, "topr:0.01/raw/raw")).values


def decodes(codec, values, repeats):
    for seed in range(repeats):
        part, _ = codec.encode(values, seed)
        yield codec.decode(Reader(part), values.size, values.dtype).astype(np.float64)


@pytest.mark.parametrize(("count", "group"), [(0, 512), (1, 512), (511, 512), (512, 512), (513, 512), (36_864, 512), (1000, 7)])
@pytest.mark.parametrize("bits", [2, 7, 8])
def test_size_is_bits_per_value_and_a_norm_per_group(bits, group, count):
    part, order = dr.QSGD(bits, group).encode(np.linspace(-1, 1, count, dtype=np.float32), seed=1)
    assert len(part) == -(-count * bits // 8) + 4 * -(-count // group)
    assert order is None


@pytest.mark.parametrize("spec", ["none/all/qsgd", "none/all/qsgd:norm=l2", "none/all/threelc", "none/all/threelc:1.5"])
def test_the_largest_numbers_go_without_a_warning(spec):
    for dtype in (np.float16, np.float32, np.float64):
        largest = np.full(4, np.finfo(dtype).max, dtype)
        assert np.array_equal(dr.decode(dr.encode(largest, spec)), largest)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [3, 7])
def test_the_mean_of_many_decodes_is_the_input(top_values, bits, norm):
    codec = dr.QSGD(bits, 128, norm)
    mean = sum(decodes(codec, top_values, REPEATS)) / REPEATS
    step = codec.error_bound(top_values)
    upwards = np.abs(top_values) / step % 1
    standard_error = step * np.sqrt(upwards * (1 - upwards) / REPEATS)
    assert np.all(np.abs(mean - top_values) <= 4 * standard_error + 1e-6 * np.abs(top_values))


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 7])
def test_variance_is_within_the_bound_of_qsgd(top_values, bits, norm):
    group = top_values[:256]
    codec = dr.QSGD(bits, group.size, norm)
    error = np.mean([np.sum((decoded - group) ** 2) for decoded in decodes(codec, group, 200)])
    n, s = group.size, codec.levels
    assert error <= min(n / s**2, np.sqrt(n) / s) * np.sum(group.astype(np.float64) ** 2)


def test_the_largest_norm_is_closer_than_the_euclidean_one(top_values):
    def error(norm):
        return np.linalg.norm(next(decodes(dr.QSGD(7, 512, norm), top_values, 1)) - top_values)

    assert error("max") < error("l2") / 4


def test_values_on_a_level_come_back_exactly():
    values = np.float32([63, -63, 0, 1, -1, 31, -0.0])
    assert np.array_equal(next(decodes(dr.QSGD(), values, 1)), values)


def test_seeds_round_differently_and_repeat():
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    codec = dr.QSGD()
    assert codec.encode(values, 1) == codec.encode(values, 1)
    assert codec.encode(values, 1) != codec.encode(values, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_values_beyond_float32_are_sent_raw(value):
    gradient = np.array([1.0, value, -2.0])
    blob = dr.encode(gradient, "none/all/qsgd")
    assert np.array_equal(dr.decode(blob), gradient, equal_nan=True)
    assert dr.inspect(blob).spec == "none/all/raw"


def test_float16_never_becomes_infinite():
    gradient = np.full(600, 60000, np.float16)
    for norm in ("max", "l2"):
        assert np.all(np.isfinite(dr.decode(dr.encode(gradient, f"none/all/qsgd:3,norm={norm}"))))


@pytest.mark.parametrize("norm", [np.float32(-1), np.float32(np.nan), np.float32(np.inf)])
def test_norms_that_cannot_be_are_refused(norm):
    part = norm.tobytes() + b"\0"
    with pytest.raises(dr.CorruptError, match="norm"):
        dr.QSGD(8).decode(Reader(part), 1, np.dtype(np.float32))


@pytest.mark.parametrize("spec", ["qsgd:1", "qsgd:9", "qsgd:7,group=0", "qsgd:7,norm=l3"])
def test_wrong_parameters_are_named(spec):
    with pytest.raises(dr.ConfigError, match="qsgd"):
        dr.parse(f"none/all/{spec}")
    with pytest.raises(dr.ConfigError, match="norm"):
        dr.QSGD(norm="l3")
