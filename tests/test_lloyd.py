"""Levels that are fitted to the values: as good as the best ones known, whatever the distribution."""

import numpy as np
import pytest

import deepreduce as dr


def relative_error(values, spec):
    decoded = dr.decode(dr.encode(values, f"none/all/{spec}"))
    return float(((decoded - values) ** 2).mean() / (values**2).mean())


@pytest.mark.parametrize(
    ("draw", "bits", "best"),
    [("standard_normal", 1, 0.3634), ("standard_normal", 2, 0.1175), ("standard_normal", 3, 0.03454), ("laplace", 2, 0.1762)],
)
def test_the_error_is_that_of_the_best_quantiser(draw, bits, best):
    """The least distortions for these densities are those of Max (1960) and of Paez and Glisson (1972)."""
    values = getattr(np.random.default_rng(0), draw)(size=300_000).astype(np.float32)
    assert relative_error(values, f"lloyd:{bits}") == pytest.approx(best, rel=0.03)


@pytest.mark.parametrize("values", [np.r_[np.zeros(900), np.arange(100)], np.r_[np.full(500, -1.0), np.full(500, 3.0)], np.full(1000, 7.0)])
def test_values_that_stand_apart_have_levels_of_their_own(values):
    assert relative_error(values.astype(np.float32), "lloyd:2") <= relative_error(values.astype(np.float32), "sketch:2")


def test_outliers_do_not_take_the_levels_of_all_others():
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    values[0] = 1e30
    decoded = dr.decode(dr.encode(values, "none/all/lloyd:3"))
    assert decoded[0] == values[0]
    assert ((decoded[1:] - values[1:]) ** 2).mean() < 0.2


def test_short_tensors_are_sent_raw():
    assert dr.inspect(dr.encode(np.float32([1, 2, 3]), "none/all/lloyd:2")).spec == "none/all/raw"


def test_bits_have_bounds():
    with pytest.raises(dr.ConfigError, match="between 1 and 8"):
        dr.Lloyd(9)
