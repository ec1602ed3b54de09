"""Sizes, views and hostile bytes of `shaped`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepreduce as dr
from deepreduce.lab.data import load
from deepreduce.reader import Reader, varint
from deepreduce.source import Space, as_source
from deepreduce.tensor import Support

from . import arrays


def size_bytes(codec, kept, space):
    return len(arrays.encode(codec, kept, space, 0)[0])


def check_round_trip(kept, space):
    part, support = arrays.encode(dr.Shaped(), kept, space, 0)
    assert np.array_equal(support, kept)
    reader = Reader(part)
    assert np.array_equal(arrays.decode(dr.Shaped(), reader, kept.size, space), kept)
    reader.expect_end()
    return part


def view(part):
    """Columns, and whether they are coded one by one."""
    return divmod(Reader(part).varint(), 2)


# Sizes


@pytest.mark.parametrize(("name", "most"), [("gpt", 0.89), ("ncf", 0.82), ("resnet20", 0.95)])
def test_recorded_gradients_take_less_than_with_all_other_codecs(name, most):
    others, with_it = 0, 0
    for tensor in load(name).values():
        space, kept = Space(tensor.shape), dr.TopR(0.01).select(as_source(tensor), 0).positions
        smallest = min(size_bytes(codec, kept, space) for codec in (dr.DeltaHuffman(), dr.PcoIndex(), dr.RLE(), dr.Rice()))
        others += smallest
        with_it += min(smallest, len(check_round_trip(kept, space)))
    assert with_it <= most * others


def test_auto_takes_it_for_a_matrix_and_names_it():
    weights = np.random.default_rng(0).standard_normal(300) ** 3
    matrix = np.outer(weights, weights[:200]).astype(np.float32)
    blob = dr.parse("topr:0.01/auto/raw").encode(matrix)
    assert dr.inspect(blob).spec == "topr:0.01/shaped/raw"
    assert np.count_nonzero(dr.decode(blob)) == 600


def test_scattered_positions_take_little_more_than_the_bound():
    kept = np.flatnonzero(np.random.default_rng(1).random(2_000_000) < 0.01)
    assert 8 * size_bytes(dr.Shaped(), kept, Space((2000, 1000))) / kept.size <= 8.4


def test_whole_rows_take_about_a_bit_each():
    rows = np.flatnonzero(np.random.default_rng(2).random(4000) < 0.5)
    kept = (rows[:, None] * 64 + np.arange(64)).reshape(-1)
    assert len(check_round_trip(kept, Space((4000, 64)))) <= 4000 / 8 * 1.05


# Views


def test_the_axes_are_cut_where_it_pays():
    rng = np.random.default_rng(3)
    popular = np.sort(rng.choice(36, 3, False))
    rows = np.flatnonzero(rng.random(5000) < 0.2)
    kept = (rows[:, None] * 36 + popular).reshape(-1)
    assert view(check_round_trip(kept, Space((50, 100, 4, 9)))) == (36, False)


def test_a_matrix_and_its_transpose_take_the_same():
    rng = np.random.default_rng(4)
    flags = rng.random((150, 400)) < np.outer(rng.random(150) ** 4, rng.random(400) ** 4)
    upright = check_round_trip(np.flatnonzero(flags), Space((150, 400)))
    turned = check_round_trip(np.flatnonzero(flags.T), Space((400, 150)))
    assert view(upright)[1] != view(turned)[1]
    assert len(upright) == pytest.approx(len(turned), abs=2)


@pytest.mark.parametrize(
    "shape", [(1000,), (1000, 1), (1, 1000), (1, 1, 1000), (1000, 1, 1), (65,), (2,), (2, 2), (5, 0, 3), (7, 1, 11, 13)]
)
def test_all_shapes_come_back(shape):
    numel = int(np.prod(shape))
    for count in {0, 1, min(2, numel), numel // 3, max(numel - 1, 0), numel}:
        if count <= numel:
            check_round_trip(np.sort(np.random.default_rng(count).choice(numel, count, False)).astype(np.int64), Space(shape))


def test_none_and_all_take_no_bytes():
    assert check_round_trip(np.empty(0, np.int64), Space((7, 11))) == b""
    assert check_round_trip(np.arange(77), Space((7, 11))) == b""


@pytest.mark.parametrize("shape", [(2**40,), (2**20, 2**20), (2**50, 2**10)])
def test_very_few_positions_go_as_gaps(shape):
    kept = np.array([3, 2**39])
    chosen = arrays.choose(dr.Shaped(), kept, Space(shape))
    assert chosen in (dr.DeltaHuffman(), dr.RawIndex())
    with pytest.raises(dr.InputError, match="deltahuffman does"):
        arrays.encode(dr.Shaped(), kept, Space(shape), 0)
    assert dr.Shaped().estimate_bytes(Support(kept, 2**40), Space(shape)) == float("inf")


# Hostile bytes


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (b"", "need 1 byte"),
        (varint(0) + b"\1\2\3", "without columns"),
        (varint(2 * 4000) + b"\0" * 9, "10 positions in a table of 1 x .*: there are bits that stand for nothing"),
        (varint(2 * 10**6) + b"\0" * 9, "above"),
        (varint(2 * 10), "10 positions in a table of 100 x 10 in 0 bytes: the bytes end too early"),
        (varint(2 * 10) + b"\x80" * 2, "10 positions in a table of 100 x 10 in 2 bytes: the bytes end too early"),
        (varint(2 * 10) + b"\xff" * 200, "10 positions in a table of 100 x 10 in .* bytes: there are bits that stand for nothing"),
    ],
)
def test_wrong_sections_are_named(part, problem):
    with pytest.raises(dr.FormatError, match=problem):
        arrays.decode(dr.Shaped(), Reader(part), 10, Space((1000,)))


def test_a_table_out_of_proportion_is_refused():
    with pytest.raises(dr.CorruptError, match="rows or columns are allowed"):
        arrays.decode(dr.Shaped(), Reader(varint(2) + b"\0" * 99), 10, Space((2**40,)))


def test_a_position_behind_the_end_of_a_last_row_that_is_not_full_is_refused():
    from deepreduce import kernels

    part = varint(2 * 64) + kernels.shaped.encode(np.array([5, 100]), 2, 64, False)
    with pytest.raises(dr.CorruptError, match="position 100 in a tensor of 100"):
        arrays.decode(dr.Shaped(), Reader(part), 2, Space((100,)))


@given(part=st.binary(max_size=80), nnz=st.integers(1, 400), shape=st.sampled_from([(401,), (50, 100), (2**28, 2**28)]))
@settings(max_examples=200, deadline=None)
def test_random_sections_are_refused_or_valid(part, nnz, shape):
    try:
        positions = arrays.decode(dr.Shaped(), Reader(part), nnz, Space(shape))
    except dr.FormatError:
        return
    assert positions.shape == (nnz,)
    assert np.all(np.diff(positions) > 0)
    assert 0 <= positions[0] <= positions[-1] < np.prod(shape)
