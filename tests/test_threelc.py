"""3LC on examples that were computed by hand."""

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.lab.data import load
from deepreduce.reader import Reader

# 0.5 is half of M and becomes 0; digits 0 -1 0 1 0 are 1 0 1 2 1 in base 3 with 1 added: 81 + 0 + 9 + 6 + 1 = 97. Then two zero bytes.
GRADIENT = np.array([0.5, -1.0, 0.2, 0.9, -0.4] + 10 * [0.01], np.float32)


def test_the_bound_holds_for_subnormals_of_float16():
    values, codec = np.full(4, 5.96e-8, np.float16), dr.ThreeLC(1.9)
    decoded = codec.decode(Reader(codec.encode(values, seed=0)[0]), 4, values.dtype)
    assert np.abs(decoded.astype(np.float64) - values.astype(np.float64)).max() <= codec.error_bound(values)


@pytest.mark.parametrize(
    ("s", "scale", "section", "decoded"),
    [
        (1.0, 1.0, "0000803f" + "61" + "f3", [0, -1, 0, 1, 0]),
        (1.5, 1.5, "0000c03f" + "61" + "f3", [0, -1.5, 0, 1.5, 0]),
        # M = 1.875: only -1.0 is beyond 0.9375, so that the digits are 1 0 1 1 1: 81 + 0 + 9 + 3 + 1 = 94.
        (1.875, 1.875, "0000f03f" + "5e" + "f3", [0, -1.875, 0, 0, 0]),
    ],
)
def test_the_example_by_hand(s, scale, section, decoded):
    codec = dr.ThreeLC(s)
    part, order = codec.encode(GRADIENT, seed=0)
    assert part.hex() == section
    assert order is None
    values = codec.decode(Reader(part), GRADIENT.size, GRADIENT.dtype)
    assert values.tolist() == decoded + 10 * [0]
    assert np.abs(values - GRADIENT).max() <= scale / 2
    assert GRADIENT.nbytes / len(part) == 10


def test_the_squared_error_by_hand():
    decoded = dr.decode(dr.encode(GRADIENT, "none/all/threelc:s=1"))
    assert np.sum((decoded - GRADIENT.astype(np.float64)) ** 2) == pytest.approx(0.5**2 + 0.2**2 + 0.1**2 + 0.4**2 + 10 * 0.01**2, rel=1e-6)


def test_the_best_ratio_is_280():
    part, _ = dr.ThreeLC().encode(np.zeros(70_000, np.float32), seed=0)
    assert len(part) == 4 + 1000


def test_specs_and_preset():
    assert dr.parse("none/all/threelc:s=1").value == dr.ThreeLC(1.0)
    assert str(dr.parse("none/all/threelc:s=1.5")) == "none/all/threelc:1.5"
    assert dr.parse("threelc") == dr.parse("none/all/threelc:s=1")


@pytest.mark.parametrize("s", [0.99, 2.0, np.nan])
def test_multipliers_outside_the_range_are_refused(s):
    with pytest.raises(dr.ConfigError, match="sparsity multiplier"):
        dr.ThreeLC(s)


def test_a_larger_multiplier_takes_fewer_bytes():
    layer = load("resnet20")["l.8.c2.weight"]
    sizes = [dr.inspect(dr.encode(layer, f"none/all/threelc:s={s}")).value_bytes for s in (1.0, 1.3, 1.9)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < layer.nbytes / 100


def test_error_feedback_delivers_what_one_step_leaves_out():
    gradient = np.float32([1.0, 0.3, -0.2, 0.05])
    residual, delivered = np.zeros(4, np.float32), np.zeros(4, np.float64)
    for step in range(200):
        decoded = dr.decode(dr.encode(gradient + residual, "threelc", seed=step))
        residual += gradient - decoded
        delivered += decoded
    assert delivered / 200 == pytest.approx(gradient, abs=0.02)


@pytest.mark.parametrize("part", ["", "000080", "0000807f79", "0000c0ff79", "000080bf79", "0000803f", "0000803ff3", "0000803f7979"])
def test_sections_that_are_not_five_values_are_refused(part):
    with pytest.raises(dr.FormatError):
        dr.ThreeLC().decode(Reader(bytes.fromhex(part)), 5, np.dtype(np.float32))


def test_float16_never_becomes_infinite():
    gradient = np.float16([60000, -3])
    assert np.array_equal(dr.decode(dr.encode(gradient, "none/all/threelc:s=1.9")), gradient)
