"""The range coder of tables: against the model that its page describes, and against bytes that it never wrote."""

from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepreduce as dr
from deepreduce.kernels import codes, logs, shaped, table, tablesize
from deepreduce.reader import expect_decoded

from .tensors import supports


def decode(packed, nnz, rows, columns, by_column):
    """The positions; an error for what is no table."""
    positions, code = shaped.decode(packed, nnz, rows, columns, by_column)
    expect_decoded(code, "a table")
    return positions


def positions_in(rows, columns, density, seed=0):
    """Positions whose rows and columns are of very unlike weight."""
    rng = np.random.default_rng(seed)
    weights = np.outer(rng.gamma(0.5, size=rows), rng.gamma(0.5, size=columns)).reshape(-1)
    return np.flatnonzero(rng.random(weights.size) < weights * density / weights.mean())


@pytest.mark.parametrize("by_column", [False, True])
@given(support=supports(), columns=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_tables_come_back(by_column, support, columns):
    kept, shape = support
    rows = -(-int(np.prod(shape)) // columns)
    packed = shaped.encode(kept, rows, columns, by_column)
    assert len(packed) <= shaped.max_bytes(kept.size, columns if by_column else rows)
    assert np.array_equal(decode(packed, kept.size, rows, columns, by_column), kept)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 5000), (5000, 1), (300, 700), (2, 200_000), (200_000, 2)])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.9])
def test_tables_of_all_sides_come_back(rows, columns, density):
    kept = positions_in(rows, columns, density)
    for by_column in (False, True):
        packed = shaped.encode(kept, rows, columns, by_column)
        assert np.array_equal(decode(packed, kept.size, rows, columns, by_column), kept)


def test_many_messages_come_back_whatever_is_carried():
    for seed in range(300):
        kept = positions_in(12, 30, 0.2, seed)
        assert np.array_equal(decode(shaped.encode(kept, 12, 30, False), kept.size, 12, 30, False), kept)


# The model


def bits_of_columns(kept, columns):
    """What the columns of each row take under the model: one pass in floating point, all weights summed anew for each column."""
    seen, weights = np.zeros(columns), np.ones(columns)
    begun, unsummed, bits = 0, 0, 0.0
    for row in range(int(kept[-1]) // columns + 1):
        chosen = kept[kept // columns == row] % columns
        first = 0
        for i, column in enumerate(chosen):
            left = chosen.size - i
            others = weights[first:].sum() * (left - 1) / 2 / (columns - first)
            later = [max(weights[c:].sum() - others, 0) / (weights[first:].sum() - others) for c in (column, column + 1)]
            is_last = column == columns - left
            bits -= log2(later[0] ** left - (0 if is_last else later[1] ** left) + 2**-28)
            first = column + 1
        seen[chosen] += 1
        begun, unsummed = begun + chosen.size, unsummed + chosen.size
        if unsummed and 4 * unsummed >= min(columns, begun) and 16 * unsummed >= begun:
            weights, unsummed = 4 * seen + 1, 0
    return bits


def test_columns_take_the_bits_of_the_model():
    rows, columns = 60, 50
    rng = np.random.default_rng(1)
    weights = rng.gamma(0.5, size=columns)
    kept = np.concatenate([row * columns + np.sort(rng.choice(columns, 8, False, weights / weights.sum())) for row in range(rows)])
    size_bits = 8 * len(shaped.encode(kept, rows, columns, False))
    numbers_bits = 20 + 16  # all rows are alike, which the model learns soon; the end of the message
    assert 0 <= size_bits - bits_of_columns(kept, columns) <= numbers_bits


def test_every_column_has_a_part_of_the_range_and_no_two_share_one():
    rng = np.random.default_rng(2)
    for columns, left in ((5, 1), (5, 5), (300, 7), (300, 150), (3000, 2900)):
        counts, sums = rng.integers(0, 10 ** rng.integers(1, 6), columns).astype(np.uint64), np.zeros(columns + 1, np.uint64)
        table._sum_weights(counts, sums)
        others = np.uint64(table._half_of_others(sums, 0, left))
        steps = columns - left + 1
        reciprocal = np.uint64(2**62 // int(sums[0] - others))
        starts = [int(table._start_of(step, steps, left, sums[step], others, reciprocal)) for step in range(steps + 1)]
        assert starts[0] == 0
        assert starts[-1] == 2**28
        assert np.diff(starts).min() >= 1


def test_counts_are_halved_before_their_sum_is_too_large():
    counts, sums = np.uint64([2**27, 5, 0]), np.zeros(4, np.uint64)
    table._sum_weights(counts, sums)
    assert sums.tolist() == [2**29 + 23, 22, 1, 0]
    assert counts.tolist() == [2**26, 2, 0]


def test_logarithms_are_near():
    for number in (1, 2, 3, 100, 255, 256, 257, 10**6 + 1, 2**32 - 1, 2**47 + 12345):
        assert logs.log2(np.uint64(number)) / 2**24 == pytest.approx(log2(number), abs=1e-5)
    assert tablesize._log_factorial(20) / 2**16 == pytest.approx(61.077, abs=1e-3)


@pytest.mark.parametrize("density", [0.003, 0.05])
def test_sizes_are_estimated(density):
    kept = positions_in(400, 300, density)
    row_counts, column_counts = shaped.count(kept, 400, 300)
    assert tablesize.size_bytes(row_counts, column_counts) == pytest.approx(len(shaped.encode(kept, 400, 300, False)), rel=0.1)
    assert tablesize.size_bytes(column_counts, row_counts) == pytest.approx(len(shaped.encode(kept, 400, 300, True)), rel=0.1)


# Hostile bytes


def refused_or_valid(packed, nnz, rows, columns, by_column):
    try:
        positions = decode(packed, nnz, rows, columns, by_column)
    except dr.FormatError:
        return False
    assert positions.size == nnz
    assert np.all(np.diff(positions) > 0)
    assert nnz == 0 or (positions[0] >= 0 and positions[-1] < rows * columns)
    return True


@pytest.mark.parametrize("seed", range(20))
def test_no_message_is_the_beginning_of_another(seed):
    kept = positions_in(20, 15, 0.1 + 0.04 * seed, seed)
    for by_column in (False, True):
        packed = shaped.encode(kept, 20, 15, by_column)
        for cut in range(len(packed)):
            with pytest.raises(dr.FormatError):
                decode(packed[:cut], kept.size, 20, 15, by_column)
        for more in (b"\0", b"\xff", b"\1\2\3"):
            with pytest.raises(dr.FormatError):
                decode(packed + more, kept.size, 20, 15, by_column)


@given(packed=st.binary(max_size=60), nnz=st.integers(0, 300), columns=st.sampled_from([1, 2, 17, 1000]), by_column=st.booleans())
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_or_valid(packed, nnz, columns, by_column):
    refused_or_valid(packed, nnz, 25, columns, by_column)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_accepted_is_what_would_be_written(data):
    kept = positions_in(8, 9, 0.3, data.draw(st.integers(0, 9)))
    packed = bytearray(shaped.encode(kept, 8, 9, False))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    nnz = data.draw(st.sampled_from([kept.size, kept.size + 1, 72]))
    if refused_or_valid(bytes(packed), nnz, 8, 9, False):
        positions = decode(bytes(packed), nnz, 8, 9, False)
        assert shaped.encode(positions, 8, 9, False) == bytes(packed)


def test_rows_that_so_few_bytes_cannot_hold_are_refused_before_they_are_allocated():
    assert shaped.decode(b"\0\0\0", 1, 2**50, 2, False)[1] == codes.ENDS_EARLY
    with pytest.raises(dr.TruncatedError, match="a table: the bytes end too early"):
        decode(b"\0\0\0", 1, 2**50, 2, False)
