"""Supports: all positions, or a sorted array, checked once; and what dense messages take in memory."""

import copy
import pickle
import tracemalloc

import numpy as np
import pytest

import deepreduce as dr
from deepreduce import message, pipeline
from deepreduce import source as sources
from deepreduce import tensor as tensors
from deepreduce.source import Space, as_source
from deepreduce.tensor import Support

NUMEL = 4_000_000


def test_a_support_is_all_or_an_array():
    some, whole, none = Support([1, 5], 6), Support([0, 1, 2], 3), Support([], 4)
    assert (some.nnz, some.numel, some.is_all, some.positions.tolist()) == (2, 6, False, [1, 5])
    assert (whole.nnz, whole.is_all, whole.positions.tolist()) == (3, True, [0, 1, 2])
    assert (none.nnz, none.is_all, none.positions.dtype) == (0, False, np.int64)
    assert (Support.all(0).is_all, Support.all(2**62).nnz) == (True, 2**62)
    assert [repr(support) for support in (some, whole, none)] == ["Support([1, 5], numel=6)", "Support.all(3)", "Support([], numel=4)"]


@pytest.mark.parametrize(
    ("positions", "complaint"),
    [
        ([1, 1], "increase and be unique"),
        ([2, 1], "increase and be unique"),
        ([0, 4], "run from 0 to 4, allowed are 0 to 3"),
        ([-1, 2], "run from -1"),
        ([0.0, 1.0], "indices are integers, got float64"),
        ([[0, 1]], "flat array"),
        (np.uint64([0, 2**63]), "below"),
    ],
)
def test_what_is_no_support_is_refused(positions, complaint):
    with pytest.raises(dr.InputError, match=complaint):
        Support(np.array(positions), 4)


def test_a_sparse_tensor_takes_a_support_and_gives_it_back():
    support = Support([1, 5], 6)
    tensor = dr.SparseTensor(support, np.float32([3, 4]), (2, 3))
    assert tensor.support is support
    assert tensor.to_dense().tolist() == [[0, 3, 0], [0, 0, 4]]
    with pytest.raises(dr.InputError, match="a support of a tensor of 6 elements, not 8"):
        dr.SparseTensor(support, np.float32([3, 4]), (8,))
    with pytest.raises(dr.InputError, match=r"as many indices as values, got \(2,\) and \(3,\)"):
        dr.SparseTensor(support, np.float32([3, 4, 5]), (6,))
    whole = dr.SparseTensor(Support.all(4), np.float32([1, 2, 3, 4]), (2, 2))
    assert (whole.nnz, whole.indices.tolist(), whole.to_dense().tolist()) == (4, [0, 1, 2, 3], [[1, 2], [3, 4]])
    for again in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert (again.indices.tolist(), again.values.tolist(), again.shape) == ([1, 5], [3, 4], (2, 3))


def test_what_an_own_codec_returns_is_checked():
    class Backwards(dr.Sparsifier):
        def select(self, source, seed):
            return np.array([3, 1])

    with pytest.raises(dr.InputError, match="increase and be unique"):
        dr.DeepReduce(Backwards(), dr.RawIndex(), dr.RawValue()).encode(np.ones(4, np.float32))


@pytest.mark.parametrize(
    "spec", ["dense", "topr:0.1/rice/qsgd", "topr:0.1/bloom:p0,fpr=0.01/raw", "nonzero/auto/fp16", "randomr:0.1/seeded/raw"]
)
def test_positions_of_our_own_are_not_checked_again(spec, monkeypatch):
    checks = []
    monkeypatch.setattr(tensors, "_increases", lambda array: checks.append(array.size))
    gradient = np.random.default_rng(0).standard_normal((50, 40), np.float32)
    dr.decode_sparse(dr.encode(gradient, spec))
    assert checks == []


def test_keys_of_a_message_are_checked_once(monkeypatch):
    checks, increases = [], tensors._increases
    monkeypatch.setattr(tensors, "_increases", lambda array: checks.append(array.size) or increases(array))
    dr.decode_sparse(dr.encode(np.arange(100, dtype=np.float32), "topr:10/raw/raw"))
    assert checks == [10]


@pytest.mark.parametrize("spec", ["dense", "none/all/fp16", "topr:1.0/rice/raw", "none/auto/qsgd"])
def test_dense_messages_make_no_positions(spec, monkeypatch):
    def refuse(support):
        raise AssertionError("positions of everything")

    monkeypatch.setattr(Support, "positions", property(refuse))
    gradient = np.random.default_rng(0).standard_normal(5000, np.float32)
    assert dr.decode(dr.encode(gradient, spec)).shape == gradient.shape


def peak_of(run):
    run()  # compiles, and fills caches
    tracemalloc.start()
    try:
        result = run()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_memory_of_a_dense_message(dtype):
    gradient = np.random.default_rng(0).standard_normal(NUMEL).astype(dtype).reshape(2000, 2000)
    codec = dr.parse("dense")
    encoding, blob = peak_of(lambda: codec.encode(gradient))
    decoding, decoded = peak_of(lambda: dr.decode(blob))
    assert np.array_equal(decoded, gradient)
    assert encoding <= 2.05 * gradient.nbytes
    assert decoding <= 1.05 * gradient.nbytes


def test_what_is_gathered_of_everything_is_not_copied():
    gradient = np.ones((3, 4), np.float32)
    assert np.shares_memory(as_source(gradient).gather(Support.all(12)), gradient)
    gradient.flags.writeable = False
    assert as_source(gradient).gather(Support.all(12)).flags.writeable
    assert sources.SparseSource(dr.SparseTensor([1], np.float32([2]), (3,))).gather(Support.all(3)).tolist() == [0, 2, 0]


def test_a_decoded_tensor_never_shares_memory_with_its_message():
    for blob in (bytearray(dr.encode(np.ones(8, np.float32), "dense")),):
        decoded, sparse = dr.decode(blob), dr.decode_sparse(blob)
        decoded[:] = 5
        assert dr.decode(blob).tolist() == sparse.to_dense().tolist() == [1] * 8


def test_a_batch_is_its_tensors_one_by_one():
    rng = np.random.default_rng(0)
    specs = ["topr:0.1/rice/qsgd", "none/all/raw", "nonzero/auto/fp16", "randomr:0.1/seeded/sketch"]
    gradients = [rng.standard_normal((40, size)).astype(np.float32) for size in (1, 30, 25, 60)]
    codecs = [dr.parse(spec) for spec in specs]
    records = pipeline.encode_batch(codecs, [as_source(gradient) for gradient in gradients], [3, 4, 5, 6], list("abcd"), [None] * 4)
    for number, (codec, gradient, record) in enumerate(zip(codecs, gradients, records, strict=True)):
        assert message.write([record]) == codec.encode(gradient, seed=3 + number)
    received, spaces = message.read(message.write(records, list("abcd"))).records, [Space(gradient.shape) for gradient in gradients]
    decoded = pipeline.decode_batch(received, spaces, list("abcd"))
    for codec, gradient, tensor, seed in zip(codecs, gradients, decoded, (3, 4, 5, 6), strict=True):
        assert np.array_equal(tensor.to_dense(), dr.decode(codec.encode(gradient, seed)))
    with pytest.raises(ValueError, match="zip"):
        pipeline.encode_batch(codecs, [], [], [], [])


def test_what_was_selected_before_is_sent():
    gradient, chosen = np.float32([5, 4, 3, 2, 1]), Support([1, 3], 5)
    codec = dr.parse("topr:1/rice/raw")
    (record,) = pipeline.encode_batch([codec], [as_source(gradient)], [0], ["w"], [chosen])
    assert pipeline.decode_batch([record], [Space(gradient.shape)], ["w"])[0].to_dense().tolist() == [0, 4, 0, 2, 0]
