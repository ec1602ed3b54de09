from dataclasses import dataclass, fields

import numpy as np
import pytest

import deepreduce as dr
from deepreduce import presets


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("topr:0.01/raw", r"a spec is sparsifier/index/value or one of the presets .*dense.*; got 'topr:0.01/raw' with 2 part"),
        ("denze", "a spec is sparsifier/index/value.*got 'denze' with 1 part.*: did you mean 'dense'"),
        ("topq:0.01/raw/raw", "unknown sparsifier 'topq': did you mean 'topr'.* allowed: .*nonzero"),
        ("topr:0.01/raw/zzz", "unknown value codec 'zzz'; allowed: .*bf16"),
        ("topr/raw/raw", r"topr needs amount; it takes amount=int\|float"),
        ("topr:/raw/raw", "has a ':' but no argument"),
        ("topr:many/raw/raw", r"topr's amount is int\|float, got 'many'"),
        ("topr:0/raw/raw", "count of at least 1, got 0"),
        ("topr:1.5/raw/raw", "ratio above 0 and at most 1.0, got 1.5"),
        ("topr:nan/raw/raw", "got nan"),
        ("topr:0.1,0.2/raw/raw", r"topr takes amount=int\|float, got '0.2'"),
        ("topr:0.1,amount=0.2/raw/raw", "topr got 'amount' twice"),
        ("topr:amont=0.1/raw/raw", "topr has no parameter 'amont'"),
        ("none/raw:1/raw", "raw takes no parameters, got '1'"),
        ("chunktopr:8,chunk=4/raw/raw", "1 <= count <= chunk"),
        ("threshold:-1/raw/raw", "finite level of at least 0, got -1.0"),
        ("topr:1_0/raw/raw", "got '1_0'"),
        ("topr: 1/raw/raw", "got ' 1'"),
    ],
)
def test_a_wrong_spec_is_refused_with_a_reason(spec, complaint):
    with pytest.raises(dr.ConfigError, match=complaint):
        dr.parse(spec)


def test_the_complaint_points_at_the_offending_part():
    with pytest.raises(dr.ConfigError) as caught:
        dr.parse("topr:0.01/raw/fp61")
    _, spec, caret = str(caught.value).splitlines()
    assert spec[caret.index("^") : caret.rindex("^") + 1] == "fp61"
    with pytest.raises(dr.ConfigError) as caught:
        dr.parse("chunktopr:64,chink=4096/raw/raw")
    _, spec, caret = str(caught.value).splitlines()
    assert spec[caret.index("^") : caret.rindex("^") + 1] == "chink=4096"


@pytest.mark.parametrize(
    "spec", ["topr:0.01/raw/fp16", "topr:100/bitmap/raw", "chunktopr:32,chunk=1024/raw/bf16", "none/all/raw", "threshold:0.5/raw/raw"]
)
def test_spec_round_trip(spec):
    codec = dr.parse(spec)
    assert str(codec) == spec
    assert dr.parse(str(codec)) == codec


def test_positional_and_named_arguments_are_the_same():
    assert dr.parse("topr:amount=0.01/raw/raw") == dr.parse("topr:0.01/raw/raw")
    assert dr.parse("topr:1/raw/raw").sparsifier == dr.TopR(1)
    assert dr.parse("topr:1.0/raw/raw").sparsifier == dr.TopR(1.0)
    assert str(dr.TopR(1.0)) != str(dr.TopR(1))


@pytest.mark.parametrize(("name", "codec"), [("topr", dr.TopR), ("randomr", dr.RandomR)])
def test_a_count_is_not_a_ratio(name, codec):
    assert codec(1) != codec(1.0)
    assert dr.parse(f"{name}:1/raw/raw") != dr.parse(f"{name}:1.0/raw/raw")
    assert codec(0.5) == codec(np.float64(0.5)) != codec(0.25)
    assert len({codec(2), codec(np.int8(2)), codec(1), codec(1.0)}) == 3
    assert codec(1) != dr.FitDExp()
    blobs = [dr.encode(np.ones(4, np.float32), codec) for codec in (f"{name}:1/raw/raw", f"{name}:1.0/raw/raw")]
    assert [dr.inspect(blob).spec for blob in blobs] == [f"{name}:1/raw/raw", f"{name}:1.0/raw/raw"]


def test_very_long_specs_are_cut_in_the_complaint():
    for spec in (f"topr:{'x' * 100_000}/raw/raw", f"{'x' * 100_000}/raw/raw", f"topr:1/{'raw' * 50_000}/raw", "x" * 100_000):
        with pytest.raises(dr.ConfigError) as caught:
            dr.parse(spec)
        assert len(str(caught.value)) < 700
        for line in str(caught.value).splitlines()[1:2]:
            caret = str(caught.value).splitlines()[2]
            assert line[caret.index("^")] in "xr"


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_whole_specs(name):
    assert str(dr.parse(name)) == str(dr.parse(presets.PRESETS[name]))


def test_specs_are_safe_in_a_shell():
    import shlex

    for spec in ("chunktopr:32,chunk=1024/raw/bf16", "topr:0.01/bitmap/fp16"):
        assert shlex.quote(spec) == spec


def test_wrong_types_in_python_are_refused():
    with pytest.raises(dr.ConfigError, match="index codec must be a IndexCodec"):
        dr.DeepReduce(dr.TopR(0.1), dr.FP16(), dr.RawIndex())
    with pytest.raises(dr.ConfigError, match="a spec is a string"):
        dr.parse(3)


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: dr.QSGD(7.0), "QSGD's bits is an int, got 7.0"),
        (lambda: dr.QSGD("7"), "QSGD's bits is an int, got '7'"),
        (lambda: dr.QSGD(norm="l3"), "QSGD's norm is 'max' or 'l2', got 'l3'"),
        (lambda: dr.QSGD(10**5000), r"QSGD's bits lies below 2\*\*63"),
        (lambda: dr.ChunkTopR(2.0, 4.0), "ChunkTopR's count is an int, got 2.0"),
        (lambda: dr.Deflate(shuffle="yes"), "Deflate's shuffle is a bool or None, got 'yes'"),
        (lambda: dr.Sketch(huffman=1), "Sketch's huffman is a bool, got 1"),
        (lambda: dr.Sketch(groups=2.0), "Sketch's groups is an int, got 2.0"),
        (lambda: dr.FitPoly(True), "FitPoly's segments is an int, 'paper' or None, got True"),
        (lambda: dr.FitDExp("x"), "FitDExp's block is an int, got 'x'"),
        (lambda: dr.ThreeLC(True), "ThreeLC's s is a float, got True"),
        (lambda: dr.ThreeLC("1"), "ThreeLC's s is a float, got '1'"),
        (lambda: dr.Threshold("a"), "Threshold's level is a float, got 'a'"),
        (lambda: dr.Threshold(10**400), r"Threshold's level lies below 2\*\*63"),
        (lambda: dr.Bloom("p2", fpr="x"), "Bloom's fpr is a float or None, got 'x'"),
        (lambda: dr.Bloom("p9"), "Bloom's policy is 'naive', .* or 'rightmost', got 'p9'"),
        (lambda: dr.PcoValue(None), "PcoValue's level is an int, got None"),
        (lambda: dr.TopR("0.1"), "TopR's amount is an int or a float, got '0.1'"),
        (lambda: dr.TopR(True), "TopR's amount is an int or a float, got True"),
        (lambda: dr.TopR(np.array([5])), "TopR's amount is an int or a float, got array"),
        (lambda: dr.RandomR(None), "RandomR's amount is an int or a float, got None"),
    ],
)
def test_parameters_of_wrong_types_are_refused_when_built(build, complaint):
    with pytest.raises(dr.ConfigError, match=complaint):
        build()


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (dr.TopR(np.int64(5)), dr.TopR(5)),
        (dr.RandomR(np.float64(0.5)), dr.RandomR(0.5)),
        (dr.Threshold(1), dr.Threshold(1.0)),
        (dr.Threshold(-0.0), dr.Threshold(0.0)),
        (dr.QSGD(np.uint8(4), norm=np.str_("l2")), dr.QSGD(4, norm="l2")),
        (dr.Sketch(huffman=np.True_, columns=1), dr.Sketch(huffman=True, columns=1.0)),
        (dr.Bloom(fpr=np.float32(0.5)), dr.Bloom(fpr=0.5)),
    ],
)
def test_numpy_scalars_and_whole_floats_become_plain_values(given, plain):
    assert repr(given) == repr(plain)
    for f in fields(given):
        assert type(getattr(given, f.name)) in (int, float, bool, str, type(None))


def test_a_parameter_of_a_type_that_cannot_travel_is_refused():
    @dataclass(frozen=True)
    class Named(dr.RawValue):
        title: str = "a_b"

    with pytest.raises(dr.ConfigError, match=r"Named's title is declared .*str.*; allowed are int, float, bool"):
        Named()
