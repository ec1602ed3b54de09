"""Sizes, extremes and hostile bytes of `delta`, `rice` and `rle`, and what `auto` chooses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepreduce as dr
from deepreduce.lab.data import load
from deepreduce.reader import Reader
from deepreduce.registry import INDEX_STAGE
from deepreduce.source import Space, as_source
from deepreduce.tensor import Support

from . import arrays
from .tensors import supports

GAP_CODECS = [dr.Delta(), dr.Rice(), dr.RLE()]
LOSSLESS = [entry.codec() for entry in INDEX_STAGE.table if entry.codec.lossless and entry.codec is not dr.Auto]


def size_bytes(codec, kept, space):
    return len(arrays.encode(codec, kept, space, 0)[0])


def decode(codec, part, nnz, space):
    reader = Reader(part)
    positions = arrays.decode(codec, reader, nnz, space)
    reader.expect_end()
    return positions


def check_round_trip(codec, kept, space):
    part, support = arrays.encode(codec, kept, space, 0)
    assert np.array_equal(support, kept)
    assert np.array_equal(decode(codec, part, kept.size, space), kept)
    return part


def scattered(numel, density, seed=0):
    """A support in which every position is kept with the same probability."""
    gaps = np.random.default_rng(seed).geometric(density, int(numel * density * 1.1))
    kept = gaps.cumsum() - 1
    return kept[kept < numel]


def bits_per_index(codec, kept, numel):
    return 8 * size_bytes(codec, kept, Space((numel,))) / kept.size


# Sizes


@pytest.mark.parametrize(("density", "most_bits"), [(0.001, 11.55), (0.01, 8.13), (0.1, 4.86)])
def test_rice_comes_near_the_bound_for_scattered_supports(density, most_bits):
    kept = scattered(16_800_000, density)
    assert bits_per_index(dr.Rice(), kept, 16_800_000) <= most_bits


def test_rice_adapts_to_blocks_where_that_pays():
    kept = np.concatenate([scattered(100_000, 0.5), 100_000 + scattered(2_000_000, 0.001)])
    alone = [size_bytes(dr.Rice(), kept[kept < 100_000], Space((100_000,))), 2_000_000 * 0.001 * 11.6 / 8]
    assert size_bytes(dr.Rice(), kept, Space((2_100_000,))) < 1.05 * sum(alone)


def test_rle_counts_whole_rows():
    rows = np.flatnonzero(np.random.default_rng(1).random(5000) < 0.4)
    kept = (rows[:, None] * 96 + np.arange(96)).reshape(-1)
    assert bits_per_index(dr.RLE(), kept, 5000 * 96) < 2.6 / 96


@pytest.mark.parametrize("codec", GAP_CODECS, ids=repr)
@given(support=supports())
@settings(max_examples=60, deadline=None)
def test_sizes_are_known_without_writing(codec, support):
    kept, shape = support
    assert codec.size_bytes(Support(kept, Space(shape).numel), Space(shape)) == size_bytes(codec, kept, Space(shape))


@pytest.mark.parametrize("codec", GAP_CODECS, ids=repr)
def test_none_and_all_take_no_bytes(codec):
    space = Space((7, 11))
    assert check_round_trip(codec, np.empty(0, np.int64), space) == b""
    assert check_round_trip(codec, np.arange(77), space) == b""


# Extremes


@pytest.mark.parametrize("codec", GAP_CODECS, ids=repr)
@pytest.mark.parametrize("numel", [2, 2**20, 2**33, 2**56])
def test_first_and_last_position_of_any_size(codec, numel):
    space = Space((numel,))
    for kept in ([0], [numel - 1], [0, numel - 1], [numel - 2, numel - 1]):
        check_round_trip(codec, np.unique(np.array(kept, np.int64)), space)


@pytest.mark.parametrize("codec", [*GAP_CODECS, dr.Auto()], ids=repr)
def test_positions_of_huge_tensors_go_raw(codec):
    space = Space((2**60,))
    kept = np.array([5, 2**59])
    chosen = arrays.choose(codec, kept, space)
    assert chosen == dr.RawIndex()
    check_round_trip(chosen, kept, space)
    if codec in GAP_CODECS:
        with pytest.raises(dr.CorruptError, match="are allowed"):
            arrays.decode(codec, Reader(b"\0" * 64), 2, space)


@pytest.mark.parametrize("codec", GAP_CODECS, ids=repr)
@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 65, 127, 128, 129, 1024, 1025, 5000])
def test_counts_around_the_blocks(codec, count):
    kept = np.unique(np.random.default_rng(count).integers(0, 50 * count, 2 * count))[:count]
    check_round_trip(codec, kept, Space((50 * count,)))


# Hostile bytes


def refused_or_valid(codec, part, nnz, space):
    try:
        positions = decode(codec, part, nnz, space)
    except dr.FormatError:
        return
    assert positions.shape == (nnz,)
    assert np.all(np.diff(positions) > 0)
    assert positions[0] >= 0
    assert positions[-1] < space.numel


@pytest.mark.parametrize("codec", GAP_CODECS, ids=repr)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_changed_sections_are_refused_or_still_valid(codec, data):
    space = Space((3000,))
    kept = np.unique(np.random.default_rng(data.draw(st.integers(0, 5))).integers(0, 3000, data.draw(st.sampled_from([1, 40, 200]))))
    part = bytearray(arrays.encode(codec, kept, space, 0)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    nnz = data.draw(st.sampled_from([kept.size, 1, 2999]))
    refused_or_valid(codec, bytes(part), nnz, space)


@pytest.mark.parametrize("codec", GAP_CODECS, ids=repr)
@given(part=st.binary(max_size=80), nnz=st.integers(1, 400), numel=st.sampled_from([401, 5000, 2**56]))
@settings(max_examples=120, deadline=None)
def test_random_sections_are_refused_or_valid(codec, part, nnz, numel):
    refused_or_valid(codec, part, nnz, Space((numel,)))


@pytest.mark.parametrize(
    ("codec", "part", "problem"),
    [
        (dr.Delta(), b"", "widths of 1 blocks"),
        (dr.Delta(), b"\x08" + b"\xff" * 9, "10 gaps among 1000 positions in 10 bytes: the bytes end too early"),
        (dr.Delta(), b"\x08" + b"\x00" * 11, "gaps end after 11 of 12 bytes"),
        (dr.Delta(), b"\xf8" + b"\xff" * 10, "10 gaps among 1000 positions in 11 bytes: a number is too large"),
        (dr.Rice(), b"\x3f" + b"\xff" * 99, "Rice parameter 63"),
        (dr.Rice(), b"\x00" + b"\x00" * 99, "10 Rice codes .* in 99 bytes: the bytes end too early"),
        (dr.Rice(), b"\x09" + b"\xff" * 20, "10 Rice codes that add up to less than 1000 in 20 bytes: a number is too large"),
        (dr.Rice(), b"\x00" + b"\xff\x03\x00", "end after 3 of 4 bytes"),
        (dr.Rice(), b"\x00" + b"\xff\x07", "bits after the last one, number 9, are not zero"),
        (dr.Delta(), b"\x01" + b"\x00\x80", "end after 2 of 3 bytes"),
        (dr.Delta(), b"\x01" + b"\x80", "bits after the last one, number 13, are not zero"),
        (dr.Rice(), b"\xff" + b"\xff" * 3, "no parameter and no block size"),
        (dr.RLE(), b"\x00\x01" + b"\xff" * 8, "units of 0"),
        (dr.RLE(), b"\x03\x01" + b"\xff" * 8, "units of 3"),
        (dr.RLE(), b"\x01\x00" + b"\xff" * 8, "no run"),
        (dr.RLE(), b"\x01\x01" + b"\x00\x01" * 2, "do not hold 10 of 1000"),
        (dr.RLE(), b"\x05\x02" + b"\x00\x03" * 2 + b"\x00", "end after 4 of 5 bytes"),
    ],
)
def test_wrong_sections_are_named(codec, part, problem):
    with pytest.raises(dr.FormatError, match=problem):
        arrays.decode(codec, Reader(part), 10, Space((1000,)))


def test_an_absurd_count_is_refused_before_anything_is_allocated():
    for codec in (dr.Delta(), dr.Rice()):
        with pytest.raises(dr.TruncatedError):
            arrays.decode(codec, Reader(b"\x01\x02\x03"), 2**50, Space((2**55,)))


# auto


def recorded_supports():
    """Top 1% of every recorded gradient: of the whole model, and of each tensor."""
    top = dr.TopR(0.01)
    for name in ("resnet20", "gpt", "ncf"):
        tensors = load(name)
        yield (
            name,
            [
                (top.select(as_source(flat), 0).positions, flat.shape)
                for flat in [np.concatenate([t.reshape(-1) for t in tensors.values()])]
            ],
        )
        yield f"{name}-tensors", [(top.select(as_source(tensor), 0).positions, tensor.shape) for tensor in tensors.values()]
    yield "ncf-nonzeros", [(dr.NonZero().select(as_source(tensor), 0).positions, tensor.shape) for tensor in load("ncf").values()]


@pytest.mark.parametrize(("name", "cases"), list(recorded_supports()), ids=lambda value: value if isinstance(value, str) else "")
def test_auto_is_within_one_per_cent_of_the_smallest_on_recorded_gradients(name, cases):
    chosen, best, pco = 0, 0, 0
    for kept, shape in cases:
        space = Space(shape)
        sizes = {codec: size_bytes(codec, kept, space) for codec in LOSSLESS}
        auto = size_bytes(arrays.choose(dr.Auto(), kept, space), kept, space)
        assert auto <= sizes[dr.PcoIndex()]
        chosen, best, pco = chosen + auto, best + min(sizes.values()), pco + sizes[dr.PcoIndex()]
    assert chosen <= 1.01 * best
    if name == "ncf-nonzeros":
        assert 8 * chosen <= 0.10 * sum(kept.size for kept, _ in cases)


@pytest.mark.parametrize("shape", [(2_000_000,), (2000, 1000), (2000, 100, 10)])
@pytest.mark.parametrize("density", [0.0005, 0.01, 0.1, 0.4])
def test_auto_takes_no_slow_codec_for_random_positions(shape, density):
    kept, space = scattered(2_000_000, density), Space(shape)
    assert dr.Shaped() not in dr.Auto().estimates(Support(kept, space.numel), space)
    smallest = min(size_bytes(codec, kept, space) for codec in LOSSLESS)
    assert size_bytes(arrays.choose(dr.Auto(), kept, space), kept, space) <= 1.01 * smallest


@pytest.mark.parametrize("shape", [(-1,), (-1, 64), (-1, 10, 3, 3)])
@pytest.mark.parametrize("count", [300, 1000, 5000, 20_000])
def test_auto_takes_rice_at_once_for_random_positions(monkeypatch, shape, count):
    space = Space((100 * count // int(np.prod(shape[1:])), *shape[1:]))
    kept = np.sort(np.random.default_rng(1).choice(space.numel, count, replace=False))
    monkeypatch.setattr(dr.Auto, "estimates", None)
    assert arrays.choose(dr.Auto(), kept, space) == dr.Rice()
    smallest = min(size_bytes(codec, kept, space) for codec in LOSSLESS)
    assert size_bytes(dr.Rice(), kept, space) <= 1.01 * smallest


def test_auto_sees_that_some_columns_are_selected_more_often():
    """Gaps do not show it: between two selected positions there are columns of both kinds."""
    weights = np.where(np.random.default_rng(4).random(1000) < 0.3, 10.0, 1.0)
    kept = np.flatnonzero(np.random.default_rng(5).random((5000, 1000)) < 0.01 * weights / weights.mean())
    space = Space((5000, 1000))
    assert arrays.choose(dr.Auto(), kept, space) == dr.Shaped()
    assert size_bytes(dr.Shaped(), kept, space) < 0.95 * size_bytes(dr.Rice(), kept, space)


@pytest.mark.parametrize("kept", [[2**49], [3, 2**49], [0, 1, 2**54, 2**55]])
def test_auto_takes_few_positions_of_a_very_large_tensor(kept):
    space = Space((2**56,))
    codec = arrays.choose(dr.Auto(), np.array(kept), space)
    assert arrays.decode(codec, Reader(arrays.encode(codec, np.array(kept), space, 0)[0]), len(kept), space).tolist() == kept


def test_auto_sees_rare_gaps_between_whole_rows():
    rows = np.delete(np.arange(4000), [700, 2100])
    kept = (rows[:, None] * 64 + np.arange(64)).reshape(-1)
    assert arrays.choose(dr.Auto(), kept, Space((4000, 64))) == dr.RLE()


@pytest.mark.parametrize("density", [0.02, 0.3])
def test_auto_extrapolates_from_a_sample(density):
    numel = 1_000_000 if density > 0.1 else 10_000_000
    rough = np.repeat(np.random.default_rng(2).random(numel // 5000) * 2 * density, 5000)
    kept = np.flatnonzero(np.random.default_rng(3).random(numel) < rough)
    space = Space((numel,))
    estimates = dr.Auto().estimates(Support(kept, numel), space)
    for codec, estimate in estimates.items():
        assert estimate == pytest.approx(size_bytes(codec, kept, space), rel=0.02)
    smallest = min(size_bytes(codec, kept, space) for codec in LOSSLESS)
    assert size_bytes(arrays.choose(dr.Auto(), kept, space), kept, space) <= 1.01 * smallest


def test_auto_is_never_named_by_a_message():
    gradient = np.random.default_rng(0).standard_normal((50, 40)).astype(np.float32)
    for spec in ("topr:0.01/auto/raw", "topr:0.7/auto/raw", "none/auto/raw", "nonzero/auto/raw"):
        blob = dr.parse(spec).encode(gradient)
        assert "auto" not in dr.inspect(blob).spec
    with pytest.raises(dr.CorruptError, match="no message can name it"):
        arrays.decode(dr.Auto(), Reader(b""), 0, Space((4,)))


def test_auto_encodes_as_what_it_chooses():
    kept, space = scattered(20_000, 0.05), Space((200, 100))
    chosen = arrays.choose(dr.Auto(), kept, space)
    assert arrays.encode(dr.Auto(), kept, space, 0)[0] == arrays.encode(chosen, kept, space, 0)[0]
