"""Small messages that would keep a reader busy, or fill its memory, and other things that only look equal."""

import tracemalloc
import zlib

import numpy as np
import pytest

import deepreduce as dr
from deepreduce import message
from deepreduce.accounting import Stats, StepStats
from deepreduce.layouts import layout_of
from deepreduce.reader import varint

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
