from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepreduce as dr
from deepreduce import reorder
from deepreduce.reader import Reader


@given(count=st.integers(0, 300), block=st.integers(1, 400), seed=st.integers(0, 99))
def test_round_trip_and_size(count, block, seed):
    rng = np.random.default_rng(seed)
    starts = range(0, count, block)
    permutation = np.concatenate([np.empty(0, np.int64), *(s + rng.permutation(min(block, count - s)) for s in starts)])
    part = reorder.encode(reorder.Order(permutation, block))
    decoded = reorder.decode(Reader(part), count)
    values = rng.standard_normal(count)
    assert np.array_equal(reorder.restore(values[permutation], decoded if count > 1 else None), values)
    if count > 1:
        bits = count * ceil(log2(min(block, count)))
        assert len(part) <= bits / 8 + 3


def test_no_order_costs_nothing():
    assert reorder.encode(None) == b""
    assert reorder.decode(Reader(b""), 5) is None


@pytest.mark.parametrize("part", [b"\x00", b"\x06\x00\x00", b"\x04\x00", b"\x04\x1b\x00", b"\x03\x3f", b"\x02\x0f"])
def test_what_is_no_permutation_is_refused(part):
    with pytest.raises(dr.FormatError):
        reorder.decode(Reader(part), 4)
