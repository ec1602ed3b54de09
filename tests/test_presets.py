"""The paper's methods by name: each one runs on a recorded layer and is smaller than it."""

import numpy as np
import pytest

import deepreduce as dr
from deepreduce import registry
from deepreduce.data import load
from deepreduce.presets import TABLE_3

PLAIN_TOP_R = 0.02


@pytest.fixture(scope="module")
def layer():
    return load("resnet20")["l.8.c2.weight"]


def relative_volume(spec, gradient):
    blob = dr.encode(gradient, spec, seed=1)
    decoded = dr.decode(blob)
    assert (decoded.shape, decoded.dtype) == (gradient.shape, gradient.dtype)
    assert np.linalg.norm(decoded - gradient) < 1.5 * np.linalg.norm(gradient)
    return len(blob) / gradient.nbytes


@pytest.mark.parametrize("name", [name for name in TABLE_3 if name.startswith("DR")])
def test_every_instantiation_sends_less_than_plain_top_r(layer, name):
    assert relative_volume(TABLE_3[name], layer) < PLAIN_TOP_R


@pytest.mark.parametrize(("name", "most"), [("threelc", 0.06), ("sketchml", 0.5), ("skcompress", 0.5)])
def test_stand_alone_methods_take_the_whole_gradient(layer, name, most):
    assert relative_volume(name, layer) < most
    assert registry.parse_stages(name)[0] in (dr.Keep(), dr.NonZero())


def test_table_and_presets_agree():
    for method, preset in (("3LC", "threelc"), ("SketchML", "sketchml"), ("SKCompress", "skcompress")):
        assert dr.parse(TABLE_3[method]) == dr.parse(preset)
