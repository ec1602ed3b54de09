"""Codecs of the user, registered by a call in the same process: as in a notebook."""

import sys
from dataclasses import dataclass

import numpy as np
import pytest

import deepreduce as dr
from deepreduce import registry
from deepreduce.layouts import codecs_of, layout_of
from deepreduce.step.budget import expected_bytes

GRADIENT = np.float32([0.5, -4, 2, 0])


@pytest.fixture(autouse=True)
def forget():
    """Leave the registry as it was."""
    before = [dict(stage.added) for stage in registry.STAGES]
    yield
    for stage, added in zip(registry.STAGES, before, strict=True):
        stage.added.clear()
        stage.added.update(added)


def signs():
    """A new class at every call, as a notebook cell makes one every time it runs."""

    @dataclass(frozen=True)
    class Signs(dr.LossyValueCodec):
        """`signs`: one bit per value."""

        scale: int | float = 1

        def encode(self, values, seed):
            return np.packbits(values < 0).tobytes(), None

        def decode(self, part, nnz, dtype):
            negative = np.unpackbits(part.array(np.uint8, (nnz + 7) // 8), count=nnz)
            return np.where(negative, -self.scale, self.scale).astype(dtype)

        def error_bound(self, values):
            return np.abs(values) + self.scale

    return Signs


def test_an_own_codec_travels_by_its_name_without_a_package():
    Signs = signs()
    dr.register("signs", Signs)
    codec = dr.DeepReduce(dr.TopR(2), dr.RawIndex(), Signs(3))
    blob = codec.encode(GRADIENT)
    assert str(codec) == dr.inspect(blob).spec == "topr:2/raw/signs:3"
    assert dr.parse(str(codec)) == codec
    assert dr.decode(blob).tolist() == [0, -3, 3, 0]
    assert b"\x05signs" in blob


def test_all_three_stages_are_found_by_the_base_class():
    @dataclass(frozen=True)
    class Odd(dr.Sparsifier):
        def select(self, source, seed):
            return np.arange(1, source.numel, 2)

    @dataclass(frozen=True)
    class Wide(dr.IndexCodec):
        def encode(self, selected, space, seed):
            return selected.positions.astype("<u8").tobytes(), selected

        def decode(self, part, nnz, space):
            return part.array("<u8", nnz).astype(np.int64)

    dr.register("odd", Odd)
    dr.register("wide", Wide)
    dr.register("signs", signs())
    assert dr.decode(dr.encode(GRADIENT, "odd/wide/signs:2")).tolist() == [0, -2, 0, 2]


def test_counts_and_ratios_of_an_own_codec_are_not_confused():
    Signs = signs()
    dr.register("signs", Signs)
    assert Signs(1) == Signs(1.0)  # Python says so
    for scale in (1, 1.0, 1):
        info = dr.inspect(dr.DeepReduce(dr.TopR(2), dr.RawIndex(), Signs(scale)).encode(GRADIENT))
        assert info.spec == ("topr:2/raw/signs" if type(scale) is int else "topr:2/raw/signs:1.0")


def test_a_codec_that_is_not_registered_is_refused_with_the_remedy():
    with pytest.raises(dr.ConfigError, match=r"Signs is not a registered value codec: deepreduce.register\(name, Signs\) adds it"):
        dr.DeepReduce(dr.TopR(2), dr.RawIndex(), signs()()).encode(GRADIENT)


def test_a_name_is_taken_once():
    Signs = signs()
    dr.register("signs", Signs)
    dr.register("signs", Signs)
    for name, codec in (("raw", Signs), ("qsgd", Signs)):
        with pytest.raises(dr.ConfigError, match=f"value codec '{name}' is deepreduce.values.* already: take another name"):
            dr.register(name, codec)

    @dataclass(frozen=True)
    class Other(dr.RawValue):
        pass

    with pytest.raises(dr.ConfigError, match=r"value codec 'signs' is .*Signs already"):
        dr.register("signs", Other)
    dr.register("raw", dr.RawValue)
    assert registry.VALUE_STAGE.by_name("raw").wire_id == 1


def test_a_cell_that_runs_twice_replaces_its_class():
    dr.register("signs", signs())
    blob = dr.encode(GRADIENT, "topr:2/raw/signs:3")
    dr.register("signs", again := signs())
    assert isinstance(dr.parse("topr:2/raw/signs:3").value, again)
    assert dr.decode(blob).tolist() == [0, -3, 3, 0]
    assert dr.encode(GRADIENT, dr.DeepReduce(dr.TopR(2), dr.RawIndex(), again(3))) == blob


def plain_class():
    class Plain(dr.RawValue):
        pass

    return Plain


def thawed():
    @dataclass
    class Thawed(dr.LossyValueCodec):
        def encode(self, values, seed):
            return b"", None

        def decode(self, part, nnz, dtype):
            return np.zeros(nnz, dtype)

    return Thawed


def half():
    @dataclass(frozen=True)
    class Half(dr.ValueCodec):
        def encode(self, values, seed):
            return b"", None

    return Half


def texts():
    @dataclass(frozen=True)
    class Texts(dr.RawValue):
        title: str = ""

    return Texts


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (plain_class, "Plain is not a frozen dataclass: write @dataclass"),
        (thawed, "Thawed is not a frozen dataclass"),
        (half, "Half lacks decode"),
        (texts, "Texts's title is declared"),
        (lambda: int, "a codec is a class derived from Sparsifier, IndexCodec or ValueCodec, got <class 'int'>"),
        (lambda: dr.QSGD(4), r"a codec is a class derived from .*, got QSGD\(bits=4"),
    ],
)
def test_what_is_no_codec_is_refused(make, complaint):
    with pytest.raises(dr.ConfigError, match=complaint):
        dr.register("mine", make())


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "a,b", "a b", "é", "1st", 3, None, "x" * 101])
def test_a_name_fits_into_a_spec(name):
    with pytest.raises(dr.ConfigError, match="a codec has a name of"):
        dr.register(name, signs())


def test_layouts_are_resolved_once():
    codecs = dr.parse("topr:0.01/rice/qsgd").stages
    layout = layout_of(codecs)
    assert codecs_of(layout) == codecs
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        layout_of(codecs)
        codecs_of(layout)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 20  # that the codecs are equal to known ones has to be seen


def test_an_own_sparsifier_takes_part_in_budgets_and_schedules():
    @dataclass(frozen=True)
    class Leading(dr.Sparsifier):
        """`leading`: the first elements."""

        share: float

        def select(self, source, seed):
            return np.arange(self.expected_nnz(source.numel))

        def expected_nnz(self, numel):
            return round(self.share * numel)

        @property
        def density(self):
            return self.share

        def with_density(self, density):
            return Leading(density)

    dr.register("leading", Leading)
    codec = dr.parse("leading:0.125/bitmap/fp16")
    assert expected_bytes(codec, 8000) == pytest.approx(len(codec.encode(np.ones(8000, np.float32))), abs=40)
    assert str(dr.Schedule(codec, steps=100, start=0.5).codec_at(0)) == "leading:0.5/bitmap/fp16"
