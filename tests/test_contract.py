"""One contract for every registered codec; a new codec joins by its line in the registry (and in samples.py)."""

import dataclasses
import inspect as python_inspect
import pkgutil
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepreduce as dr
from deepreduce import indices, reorder, sparsify, specs, values
from deepreduce.reader import Reader
from deepreduce.registry import INDEX_STAGE, SPARSIFIER_STAGE, STAGES, VALUE_STAGE
from deepreduce.source import Space, as_source

from . import arrays
from .samples import SAMPLES, codecs_of
from .tensors import fixed_gradients, gradients, same_bits, supports

ALL_SAMPLES = [
    pytest.param(stage, codec, id=f"{stage.group.split('.')[1]}-{piece}") for stage in STAGES for piece, codec in codecs_of(stage)
]
SPARSIFIERS = [pytest.param(codec, id=piece) for piece, codec in codecs_of(SPARSIFIER_STAGE)]
INDICES = [pytest.param(codec, id=piece) for piece, codec in codecs_of(INDEX_STAGE)]
VALUES = [pytest.param(codec, id=piece) for piece, codec in codecs_of(VALUE_STAGE)]


# The registry


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.title)
def test_every_name_has_a_sample_and_ids_are_unique(stage):
    assert {piece.partition(":")[0] for piece in SAMPLES[stage]} == {entry.name for entry in stage.table}
    ids = [entry.wire_id for entry in stage.table]
    assert len(set(ids)) == len(ids)
    assert all(0 < wire_id < 256 for wire_id in ids)


@pytest.mark.parametrize(("stage", "package"), [(SPARSIFIER_STAGE, sparsify), (INDEX_STAGE, indices), (VALUE_STAGE, values)])
def test_every_codec_class_is_registered_and_public(stage, package):
    classes = set()
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        for _, member in python_inspect.getmembers(import_module(module.name), python_inspect.isclass):
            if issubclass(member, stage.base) and dataclasses.is_dataclass(member) and not python_inspect.isabstract(member):
                classes.add(member)
    assert classes == {entry.codec for entry in stage.table}
    assert all(getattr(dr, codec.__name__) is codec for codec in classes)


@pytest.mark.parametrize(("stage", "codec"), ALL_SAMPLES)
def test_spec_wire_arguments_and_repr_round_trip(stage, codec):
    text = specs.format_codec(stage, codec)
    number = STAGES.index(stage)
    pieces = ["none", "raw", "raw"]
    pieces[number] = text
    assert dr.parse("/".join(pieces)).stages[number] == codec
    assert specs.from_wire_arguments(stage.by_codec(codec), codec.argument_text) == codec
    assert eval(repr(codec), {type(codec).__name__: type(codec)}) == codec
    assert dataclasses.is_dataclass(codec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.anything = 1
    assert type(codec).__doc__


# Sparsifiers


@pytest.mark.parametrize("codec", SPARSIFIERS)
@given(gradient=gradients(), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_sparsifier(codec, gradient, seed):
    before = gradient.copy()
    kept = codec.select(as_source(gradient), seed).positions
    assert kept.dtype == np.int64
    assert np.all(np.diff(kept) > 0)
    assert kept.size == 0 or (kept[0] >= 0 and kept[-1] < gradient.size)
    assert np.array_equal(kept, codec.select(as_source(gradient), seed).positions)
    assert same_bits(before, gradient)
    sparse = dr.decode_sparse(dr.parse("nonzero/raw/raw").encode(gradient))
    on_sparse = codec.select(as_source(sparse), seed).positions
    assert np.all(np.diff(on_sparse) > 0)


# Index codecs


@pytest.mark.parametrize("codec", INDICES)
@given(support=supports(), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=120, deadline=None)
def test_index_codec(codec, support, seed):
    kept, shape = support
    space = Space(shape)
    before = kept.copy()
    chosen = arrays.choose(codec, kept, space)
    part, announced = arrays.encode(chosen, kept, space, seed)
    assert isinstance(part, bytes)
    assert np.array_equal(kept, before)
    assert (part, announced.tolist()) == (lambda again: (again[0], again[1].tolist()))(arrays.encode(chosen, kept, space, seed))
    reader = Reader(part)
    seen = arrays.decode(chosen, reader, announced.size, space)
    reader.expect_end()
    assert seen.dtype == np.int64
    assert seen.size == announced.size
    if not codec.slips:
        assert np.array_equal(seen, announced)
    if codec.lossless:
        assert np.array_equal(announced, kept)
    assert np.all(np.diff(seen) > 0)
    assert seen.size == 0 or (seen[0] >= 0 and seen[-1] < space.numel)
    assert len(part) <= chosen.max_bytes(announced.size, space)


@pytest.mark.parametrize("codec", INDICES)
def test_index_codec_refuses_every_prefix_of_its_section(codec):
    space = Space((40, 25))
    kept = np.flatnonzero(np.random.default_rng(3).random(1000) < 0.1)
    codec = arrays.choose(codec, kept, space)
    part, support = arrays.encode(codec, kept, space, seed=5)
    for cut in range(len(part)):
        with pytest.raises(dr.FormatError):
            arrays.decode(codec, Reader(part[:cut]), support.size, space)


# Value codecs


def _within(codec, values, decoded):
    error = np.abs(values.astype(np.float64) - decoded.astype(np.float64))
    return np.all(error <= np.asarray(codec.error_bound(values)) * (1 + 1e-6))


def check_value_codec(codec, values, seed):
    before = values.copy()
    chosen = codec.choose(values)
    part, order = chosen.encode(values, seed)
    assert isinstance(part, bytes)
    assert same_bits(before, values)
    assert part == chosen.encode(values, seed)[0]
    reader = Reader(part)
    sorted_values = chosen.decode(reader, values.size, values.dtype)
    reader.expect_end()
    assert sorted_values.dtype == values.dtype
    assert sorted_values.shape == values.shape
    decoded = reorder.restore(sorted_values, None if order is None else order.permutation)
    if chosen.lossless:
        assert same_bits(decoded, values)
    else:
        finite = np.isfinite(values.astype(np.float64))
        assert np.array_equal(values[~finite], decoded[~finite], equal_nan=True)
        assert _within(chosen, values[finite], decoded[finite])
    assert len(part) <= chosen.max_bytes(values.size, values.dtype)


@pytest.mark.parametrize("codec", VALUES)
@given(gradient=gradients(max_side=20), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=120, deadline=None)
def test_value_codec(codec, gradient, seed):
    check_value_codec(codec, gradient.reshape(-1).copy(), seed)


@pytest.mark.parametrize("codec", VALUES)
@pytest.mark.parametrize("number", range(len(fixed_gradients())))
def test_value_codec_on_fixed_tensors(codec, number):
    check_value_codec(codec, fixed_gradients()[number].reshape(-1), seed=number)


@pytest.mark.parametrize("codec", VALUES)
def test_value_codec_refuses_every_prefix_of_its_section(codec):
    values = np.random.default_rng(3).standard_normal(100).astype(np.float32)
    codec = codec.choose(values)
    part, _ = codec.encode(values, seed=5)
    for cut in range(len(part)):
        with pytest.raises(dr.FormatError):
            codec.decode(Reader(part[:cut]), values.size, values.dtype)
