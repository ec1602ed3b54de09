"""Small messages that would keep a reader busy, or fill its memory, and other things that only look equal."""

import sys
import tracemalloc
import zlib

import numpy as np
import pytest

import deepreduce as dr
from deepreduce import message
from deepreduce.layouts import layout_of
from deepreduce.reader import varint
from deepreduce.step.stats import Stats, StepStats

DENSE = np.float32([1, -2, 0, 3])


def test_a_filter_that_no_writer_makes_is_refused():
    ones = b"\0" + bytes([50]) + varint(64) + b"\xff" * 64  # 50 hashes, and every position is a positive
    layout = layout_of((dr.Keep(), dr.Bloom("p2"), dr.RawValue()))
    blob = message.write([message.Record((2**20,), np.dtype(np.float32), 1, layout, ones, b"", bytes(4))])
    dr.decode(dr.encode(np.ones(100, np.float32), "topr:0.1/bloom:p2,fpr=0.1/raw"))  # compiles
    tracemalloc.start()
    with pytest.raises(dr.CorruptError, match="no writer makes that"):
        dr.decode(blob)
    assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("fpr", [0.99, 0.5, 0.36, 0.3535, 0.01, 1e-15])
@pytest.mark.parametrize("share", [0.001, 0.3, 1.0])
def test_every_filter_that_is_written_is_read(fpr, share):
    gradient = np.random.default_rng(3).standard_normal(20_000, np.float32)
    blob = dr.encode(gradient, f"topr:{share}/bloom:p2,fpr={fpr}/raw", seed=5)
    assert dr.decode_sparse(blob).nnz == max(1, round(share * 20_000))


@pytest.mark.parametrize("policy", ["p2", "p2exact"])
@pytest.mark.parametrize("fpr", [0.3, 0.3535, 0.178, 0.0885])
def test_no_writer_refuses_its_own_small_filter(policy, fpr):
    gradient = np.zeros(20_000, np.float32)
    for count in (1, 2, 3, 7):
        gradient[np.arange(count) * 2_003 + 5] = 1
        for seed in range(30):
            blob = dr.encode(gradient, f"nonzero/bloom:{policy},fpr={fpr}/raw", seed=seed)
            assert dr.decode_sparse(blob).nnz == count


def test_a_small_filter_of_a_large_tensor_is_read():
    gradient = np.zeros(10**6, np.float32)
    gradient[[5, 100_008, 200_011]] = 1
    assert dr.decode_sparse(dr.encode(gradient, "nonzero/bloom:p2,fpr=0.3/raw", seed=17)).nnz == 3


def with_layouts(count):
    """A message of one element, whose header has `count` layouts."""
    plain = dr.encode(np.ones(1, np.float32), "dense")
    reader = dr.Reader(plain[4:-4])
    reader.varint()
    header = bytes(reader.take(reader.varint() // 2))
    layout, tensor = header[2:-7], header[-7:]
    crowded = header[:1] + varint(count) + layout * count + tensor
    deflated = zlib.compress(crowded, 9)
    lead = varint(2 * len(deflated) + 1) + deflated + bytes(4)
    message = b"\x9dDR\x01" + varint(len(lead) + 4) + lead
    return message + zlib.crc32(message).to_bytes(4, "little")


@pytest.mark.parametrize(("count", "match"), [(200_000, "4096"), (2, "2 layouts, of which 1 are used")])
def test_layouts_that_nobody_needs_are_refused(count, match):
    with pytest.raises(dr.CorruptError, match=match):
        dr.decode(with_layouts(count))


# Many tensors in few bytes


def bomb(count, codecs, shapes, nnz, index=b"", value=b""):
    """A message of `count` tensors, most of which is taken by none of them."""
    layout = layout_of(codecs)
    record = [message.Record(shape, np.dtype(np.float32), nnz, layout, index, b"", value) for shape in shapes]
    return message.write((record * -(-count // len(record)))[:count], [str(number) for number in range(count)])


def cost_of(read):
    """How many functions were called, and the most memory that was in use at a time."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        read()
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return calls, peak


def test_thousands_of_tiny_tensors_are_cheap():
    blob = bomb(7700, (dr.Keep(), dr.HuffmanIndex(), dr.RawValue()), [(size,) for size in range(1, 258)], 0)
    assert len(blob) < 20_000
    dr.decode(dr.encode(np.ones(9, np.float32), "topr:1/huffman/raw"))  # compiles
    calls, peak = cost_of(lambda: dr.decode_many(blob, max_numel=10**6))
    assert calls < 100 * 7700
    assert peak < 100 * 2**20


def test_a_million_scalars_are_refused_unless_they_are_asked_for():
    blob = bomb(1_000_000, (dr.Keep(), dr.All(), dr.RawValue()), [()], 1, value=bytes(4))

    def read():
        with pytest.raises(dr.CorruptError, match="the message holds 1000000 tensors, max_tensors allows 10000"):
            dr.decode_many(blob, max_numel=10**6)

    calls, peak = cost_of(read)
    assert calls < 1000
    assert peak < 100 * 2**20
    with pytest.raises(dr.CorruptError, match="max_tensors"):
        dr.inspect(blob)


def test_the_limit_of_tensors_is_the_readers_choice():
    tensors = {str(number): np.float32([number, 0, -number]) for number in range(12_000)}
    blob = dr.parse("none/all/raw").encode_many(tensors)
    with pytest.raises(dr.CorruptError, match="12000 tensors, max_tensors allows 10000"):
        dr.decode_many(blob)
    assert len(dr.decode_many(blob, max_tensors=12_000)) == len(dr.inspect(blob, max_tensors=12_000).tensors) == 12_000
    small = dict(list(tensors.items())[:5000])
    decoded = dr.decode_many(dr.parse("nonzero/rice/raw").encode_many(small))
    assert all(np.array_equal(decoded[name], small[name]) for name in small)
    with pytest.raises(dr.CorruptError, match="5000 tensors, max_tensors allows 4999"):
        dr.decode_many_sparse(dr.parse("dense").encode_many(small), max_tensors=4999)
    with pytest.raises(dr.InputError, match=r"max_tensors is a whole number, got 1\.5"):
        dr.decode_many(blob, max_tensors=1.5)


# Empty tensors


@pytest.mark.parametrize("shape", [(0, 2**29), (2**29, 0), (0, 2**30, 2**28), (0,), (3, 0, 5), (2**58, 0)])
@pytest.mark.parametrize("spec", ["dense", "topr:0.1/rice/qsgd", "nonzero/auto/raw"])
def test_an_empty_tensor_comes_back_whatever_its_other_sizes(shape, spec):
    decoded = dr.decode(dr.encode(np.zeros(shape, np.float32), spec))
    assert (decoded.shape, decoded.dtype) == (shape, np.float32)


def test_an_empty_tensor_that_numpy_cannot_make_is_refused_on_both_sides():
    tensor = dr.SparseTensor([], np.float32([]), (0, 2**59))
    with pytest.raises(dr.InputError, match=r"a tensor of shape \(0, 576460752303423488\) is empty, but"):
        dr.encode(tensor, "dense")
    plain = dr.encode(np.zeros((0, 2), np.float32), "dense")
    changed = plain.replace(bytes([2, 0, 2, 0]), bytes([2, 0]) + varint(2**59) + bytes([0]))
    body = changed[:4] + bytes([changed[4] + 8]) + bytes([changed[5] + 16]) + changed[6:-4]
    with pytest.raises(dr.CorruptError, match=r"a tensor of shape .* is empty, but"):
        dr.decode(body + zlib.crc32(body).to_bytes(4, "little"))


def test_what_python_holds_to_be_equal_has_its_own_spelling():
    dr.encode(DENSE, "topr:1/raw/raw")
    info = dr.inspect(dr.encode(DENSE, "topr:1.0/raw/raw"))
    assert (info.spec, info.nnz) == ("topr:1.0/raw/raw", 4)
    assert dr.inspect(dr.encode(DENSE, "topr:1/raw/raw")).spec == "topr:1/raw/raw"


def test_minus_zero_is_a_threshold_of_zero():
    assert dr.decode_sparse(dr.encode(DENSE, "threshold:-0.0/raw/raw")).nnz == 4


def test_a_step_is_listed_once_however_its_buckets_end():
    stats = Stats(history=10)
    stats.add(StepStats(step=0, sent_bytes=1), last=True)
    stats.add(StepStats(step=0, sent_bytes=2), last=False)  # counted late
    stats.add(StepStats(step=1, sent_bytes=4), last=False)
    stats.add(StepStats(step=1, sent_bytes=8), last=True)
    stats.add(StepStats(step=1, sent_bytes=16), last=True)  # the step was taken again
    assert [(step.step, step.sent_bytes) for step in stats.steps] == [(0, 3), (1, 12), (1, 16)]
