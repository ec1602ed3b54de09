import pytest

import deepreduce as dr
from deepreduce import registry


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("topr:0.01/raw", r"a spec is sparsifier/index/value or one of the presets .*dense.*; got 'topr:0.01/raw' with 2 part"),
        ("denze", "a spec is sparsifier/index/value"),
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


@pytest.mark.parametrize("name", registry.PRESETS)
def test_presets_are_whole_specs(name):
    assert str(dr.parse(name)) == str(dr.parse(registry.PRESETS[name]))


def test_specs_are_safe_in_a_shell():
    import shlex

    for spec in ("chunktopr:32,chunk=1024/raw/bf16", "topr:0.01/bitmap/fp16"):
        assert shlex.quote(spec) == spec


def test_wrong_types_in_python_are_refused():
    with pytest.raises(dr.ConfigError, match="topr takes a ratio"):
        dr.TopR("0.1")
    with pytest.raises(dr.ConfigError, match="index codec must be a IndexCodec"):
        dr.DeepReduce(dr.TopR(0.1), dr.FP16(), dr.RawIndex())
    with pytest.raises(dr.ConfigError, match="a spec is a string"):
        dr.parse(3)
