"""Deflate and pco: every bit comes back, smaller where it can be, and hostile bytes are refused."""

import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import deepreduce as dr
from deepreduce.lab.data import load
from deepreduce.reader import Reader
from deepreduce.tensor import FLOAT_DTYPES

from .tensors import same_bits

CODECS = [dr.Deflate(1), dr.Deflate(9, shuffle=False), dr.PcoValue(), dr.PcoValue(0)]


@pytest.fixture(scope="module")
def gradient():
    return np.concatenate([array.reshape(-1) for array in load("gpt").values()])


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_bit_pattern_comes_back(codec, dtype, data):
    bits = data.draw(hnp.arrays(f"u{dtype.itemsize}", st.integers(0, 400)))
    values = bits.view(dtype)
    part, order = codec.encode(values, seed=0)
    assert order is None
    assert same_bits(codec.decode(Reader(part), values.size, dtype), values)


@pytest.mark.parametrize("codec", [dr.Deflate(1), dr.PcoValue()], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_all_numbers_of_16_bits_come_back(codec, dtype):
    values = np.random.default_rng(0).permutation(2**16).astype(np.uint16).view(dtype)
    part, _ = codec.encode(values, seed=0)
    assert same_bits(codec.decode(Reader(part), values.size, values.dtype), values)


def test_more_values_than_a_chunk_of_pcodec_holds():
    values = np.random.default_rng(0).standard_normal(2**18 + 5).astype(np.float32)
    part, _ = dr.PcoValue().encode(values, seed=0)
    assert same_bits(dr.PcoValue().decode(Reader(part), values.size, values.dtype), values)


@pytest.mark.parametrize("value", ["deflate", "pco"])
def test_gradients_become_smaller(gradient, value):
    assert dr.inspect(dr.encode(gradient, f"none/all/{value}")).value_bytes < 0.86 * gradient.nbytes


def test_shuffled_bytes_beat_plain_zlib_at_its_best(gradient):
    assert dr.inspect(dr.encode(gradient, "none/all/deflate")).value_bytes < 0.95 * len(zlib.compress(gradient.tobytes(), 9))


def test_pco_finds_that_values_were_bfloat16(gradient):
    held = gradient.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert dr.inspect(dr.encode(held, "none/all/pco")).value_bytes < 0.4 * held.nbytes


def test_deflate_shuffles_where_that_pays(gradient):
    rng = np.random.default_rng(0)
    few_patterns = rng.choice(rng.standard_normal(50).astype(np.float32), 2000)
    assert dr.Deflate().choose(gradient) == dr.Deflate(6, shuffle=True)
    assert dr.Deflate().choose(few_patterns) == dr.Deflate(6, shuffle=False)
    assert dr.Deflate(3, shuffle=False).choose(gradient) == dr.Deflate(3, shuffle=False)


@pytest.mark.parametrize("spec", ["deflate:0", "deflate:10", "pco:-1", "pco:13"])
def test_levels_are_checked(spec):
    with pytest.raises(dr.ConfigError, match="level"):
        dr.parse(f"none/all/{spec}")


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_changed_bytes_are_refused_or_decode_to_as_many_values(codec, data):
    values = np.linspace(-1, 1, 50, dtype=np.float32)
    part = bytearray(codec.encode(values, seed=0)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode(Reader(bytes(part)), values.size, values.dtype)
    except dr.FormatError:
        return
    assert (decoded.size, decoded.dtype) == (values.size, values.dtype)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("more", [-1, 1])
def test_another_number_of_values_is_refused(codec, more):
    values = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    part, _ = codec.encode(values, seed=0)
    with pytest.raises(dr.FormatError):
        codec.decode(Reader(part), values.size + more, values.dtype)


def test_a_deflate_bomb_stops_at_the_announced_size():
    part, _ = dr.Deflate(9, shuffle=False).encode(np.zeros(10**6, np.float32), seed=0)
    with pytest.raises(dr.CorruptError, match="40 bytes"):
        dr.Deflate(9, shuffle=False).decode(Reader(part), 10, np.dtype(np.float32))
