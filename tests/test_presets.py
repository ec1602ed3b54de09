"""The paper's methods by name: each one runs on a recorded layer and is smaller than it."""

import numpy as np
import pytest

import deepreduce as dr
from deepreduce import specs
from deepreduce.lab.data import load
from deepreduce.presets import TABLE_3
from deepreduce.step.policy import policy_of

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
    assert specs.parse_stages(name)[0] in (dr.Keep(), dr.NonZero())


def test_table_and_presets_agree():
    for method, preset in (("3LC", "threelc"), ("SketchML", "sketchml"), ("SKCompress", "skcompress")):
        assert dr.parse(TABLE_3[method]) == dr.parse(preset)


def test_the_methods_of_the_paper_are_as_published():
    methods = {name: dr.parse(spec) for name, spec in TABLE_3.items()}
    assert methods["DR[raw, Deflate]"].value == dr.Deflate(shuffle=False)
    assert {methods[name].value for name in methods if "QSGD" in name} == {dr.QSGD(7, 512, "l2")}
    assert {methods[name].index.policy for name in methods if "BF-P2" in name} == {"p2exact"}
    assert methods["SketchML"].value == dr.Sketch(bits=6, groups=8)
    assert methods["SKCompress"].value == dr.Sketch(bits=7, huffman=True)  # the paper leaves the MinMaxSketch out there


@pytest.mark.parametrize("wrong", [None, 3, b"dense", dr.TopR(1), dr.Rice(), dr.FP16(), dr.BySize, object()])
def test_what_is_no_spec_is_refused(wrong):
    with pytest.raises(
        dr.ConfigError, match=r"a spec is a string, a DeepReduce, a Schedule or an object with codec_for\(name, source\), got"
    ):
        policy_of(wrong, 1024)


def test_policies_take_specs_as_text():
    assert dr.BySize(10, "dense", "topr:1/raw/raw") == dr.BySize(np.int64(10), dr.parse("dense"), dr.parse("topr:1/raw/raw"))
    assert policy_of("dense", 5) == policy_of(dr.parse("dense"), 5) == dr.BySize(5, "dense", "dense")
    policy = dr.BySize(10, "dense", "dense")
    assert policy_of(policy, 1024) is policy


@pytest.mark.parametrize("wrong", [3, None, dr.TopR(1), "dence"])
def test_policies_by_size_refuse_what_is_no_codec(wrong):
    for codecs in ((wrong, "dense"), ("dense", wrong)):
        with pytest.raises(dr.ConfigError, match="a spec is"):
            dr.BySize(10, *codecs)


@pytest.mark.parametrize("wrong", [-1, 1.0, "3", None, True])
def test_sizes_are_whole_numbers(wrong):
    with pytest.raises(dr.ConfigError, match="BySize's numel is an int of at least 0, got"):
        dr.BySize(wrong, "dense", "dense")
    with pytest.raises(dr.ConfigError, match="small_tensor_numel is an int of at least 0, got"):
        policy_of("dense", wrong)
