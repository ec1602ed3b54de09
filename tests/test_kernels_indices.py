"""The kernels of `delta`, `rice` and `rle` against slow, obvious Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepreduce.kernels import bits, codes, gaps, rice, runs, uniform

numbers_up_to_56_bits = st.one_of(st.integers(0, 3), st.integers(0, 300), st.integers(0, 2**56 - 1))
number_lists = st.lists(numbers_up_to_56_bits, min_size=1, max_size=200)
small_number_lists = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=200)
position_sets = st.sets(st.one_of(st.integers(0, 80), st.integers(0, 10_000)), min_size=1, max_size=200).map(sorted)


def blocks_of(items, size):
    return [items[start : start + size] for start in range(0, len(items), size)]


def as_bits(number, width):
    """The lowest bit first."""
    return [number >> i & 1 for i in range(width)]


def to_packed(stream):
    number = sum(bit << i for i, bit in enumerate(stream))
    return number.to_bytes((len(stream) + 7) // 8, "little")


def positions_of(numbers):
    out, position = [], -1
    for number in numbers:
        position += number + 1
        out.append(position)
    return out


def u64(numbers):
    return np.array(numbers, np.uint64)


@given(packed=st.binary(max_size=40), data=st.data())
@settings(max_examples=40, deadline=None)
def test_load_reads_56_bits_from_any_bit(packed, data):
    at = data.draw(st.integers(0, 8 * len(packed)))
    assert load_at(gaps.padded(packed), np.uint64(at)) & (2**56 - 1) == int.from_bytes(packed, "little") >> at & (2**56 - 1)


def load_at(packed, at):
    return int(gaps.load(packed, at))


@given(kept=position_sets)
@settings(max_examples=40, deadline=None)
def test_between(kept):
    assert gaps.between(np.array(kept)).tolist() == [b - a - 1 for a, b in zip([-1, *kept], kept, strict=False)]


@given(numbers=number_lists)
@settings(max_examples=40, deadline=None)
def test_gaps_pack(numbers):
    widths = gaps.widths(u64(numbers))
    blocks = blocks_of(numbers, gaps.BLOCK)
    assert widths.tolist() == [max(block).bit_length() for block in blocks]
    head = [bit for width in widths.tolist() for bit in as_bits(width, 6)]
    body = [bit for block, width in zip(blocks, widths.tolist(), strict=True) for number in block for bit in as_bits(number, width)]
    assert gaps.packed_bits(widths, len(numbers)) == len(body)
    assert gaps_packed(numbers, 6) == to_packed(head + body)


def gaps_packed(numbers, width_bits):
    widths = gaps.widths(u64(numbers))
    size_bits = widths.size * width_bits + gaps.packed_bits(widths, len(numbers))
    words = bits.zero_words(size_bits)
    gaps.pack(u64(numbers), widths, width_bits, words)
    return bits.to_bytes(words, size_bits)


@given(numbers=small_number_lists, width_bits=st.integers(4, 6))
@settings(max_examples=40, deadline=None)
def test_gaps_unpack(numbers, width_bits):
    packed, widths = gaps_packed(numbers, width_bits), gaps.widths(u64(numbers))
    size_bits = widths.size * width_bits + gaps.packed_bits(widths, len(numbers))
    out = np.empty(len(numbers), np.uint64)

    def unpack(size_bits, numel):
        return gaps.unpack(gaps.padded(packed), size_bits, width_bits, numel, out)

    positions = positions_of(numbers)
    assert unpack(size_bits, positions[-1] + 1) == size_bits
    assert out.tolist() == positions
    assert unpack(size_bits, positions[-1]) == codes.BEYOND_LIMIT
    if widths[-1]:
        assert unpack(size_bits - 1, positions[-1] + 1) == codes.ENDS_EARLY


@pytest.mark.parametrize("width", [56, 57, 63])
def test_gaps_unpack_sees_sums_far_beyond_the_end(width):
    packed = gaps.padded(to_packed(3 * as_bits(width, 6) + 192 * width * [1]))
    assert gaps.unpack(packed, 8 * packed.size - 64, 6, 2**56, np.empty(192, np.uint64)) == codes.BEYOND_LIMIT


@given(numbers=number_lists, times=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_rice_parameters(numbers, times):
    ks = max(numbers).bit_length() + 1
    padded = numbers + [0] * (-len(numbers) % rice.FINEST)
    expected = [[sum(number >> k for number in part) for k in range(ks)] for part in blocks_of(padded, rice.FINEST)]
    for dtype in [np.uint16, np.uint64] if ks <= 17 else [np.uint64]:
        quotients = rice.quotients(np.array(padded, dtype), ks)
        assert quotients.tolist() == expected
    merged, block = rice.merged(quotients, times), rice.FINEST * times
    assert merged.tolist() == [[sum(number >> k for number in part) for k in range(ks)] for part in blocks_of(numbers, block)]
    parameters, low_bits, unary_bits = rice.cheapest(merged, block, len(numbers))
    costs = [[sum(k + 1 + (number >> k) for number in part) for k in range(ks)] for part in blocks_of(numbers, block)]
    assert parameters.tolist() == [cost.index(min(cost)) for cost in costs]
    assert low_bits + unary_bits == sum(min(cost) for cost in costs)
    assert low_bits == sum(k * len(part) for k, part in zip(parameters.tolist(), blocks_of(numbers, block), strict=True))


def rice_streams(numbers, parameters, block):
    with_k = [(number, k) for part, k in zip(blocks_of(numbers, block), parameters, strict=True) for number in part]
    low = [bit for number, k in with_k for bit in as_bits(number & ((1 << k) - 1), k)]
    unary = [bit for number, k in with_k for bit in [0] * (number >> k) + [1]]
    return low, unary


@given(numbers=small_number_lists, block=st.integers(1, 70), data=st.data())
@settings(max_examples=40, deadline=None)
def test_rice_pack_and_unpack(numbers, block, data):
    count = len(blocks_of(numbers, block))
    parameters = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    low, unary = rice_streams(numbers, parameters, block)
    words = bits.zero_words(len(low + unary))
    rice.pack(u64(numbers), np.array(parameters, np.uint8), block, len(low), words)
    packed = bits.to_bytes(words, len(low + unary))
    assert packed == to_packed(low + unary)

    def unpack(packed, limit):
        out = np.empty(len(numbers), np.uint64)
        used = rice.unpack(gaps.padded(packed), np.array(parameters, np.uint8), block, len(low), limit, out)
        return used, out.tolist()

    positions = positions_of(numbers)
    assert unpack(packed, positions[-1] + 1) == (len(low + unary), positions)
    assert unpack(packed, positions[-1])[0] == codes.BEYOND_LIMIT
    without_last_end = to_packed((low + unary)[:-1])
    if 8 * len(without_last_end) >= len(low):
        assert unpack(without_last_end, positions[-1] + 1)[0] == codes.ENDS_EARLY


@pytest.mark.parametrize("k", [0, 1, 55, 56])
def test_rice_unpack_sees_numbers_far_beyond_the_limit(k):
    low, unary = rice_streams([2**k * 1000], [k], 1)
    out = np.empty(1, np.uint64)
    packed = gaps.padded(to_packed(low + unary))
    assert rice.unpack(packed, np.array([k], np.uint8), 1, len(low), min(2**k * 999, 2**56), out) == codes.BEYOND_LIMIT


@given(kept=position_sets)
@settings(max_examples=40, deadline=None)
def test_runs_split_and_fill(kept):
    bitmap = [position in set(kept) for position in range(kept[-1] + 1)]
    lengths, previous = [0], False
    for bit in bitmap:
        if bit == previous:
            lengths[-1] += 1
        else:
            lengths.append(1)
        previous = bit
    zeros, ones = runs.split(np.array(kept))
    assert zeros.tolist() == lengths[::2]
    assert ones.tolist() == lengths[1::2]
    for unit in (1, 3):
        out = np.empty(len(kept) * unit, np.int64)
        runs.fill(zeros.cumsum(), ones.cumsum(), unit, out)
        assert out.tolist() == [position * unit + step for position in kept for step in range(unit)]


def test_runs_of_nothing():
    zeros, ones = runs.split(np.empty(0, np.int64))
    assert zeros.size == ones.size == 0


@pytest.mark.parametrize(
    ("a", "b", "divisor"), [([0, 12], [18], 6), ([0], [5, 5], 5), ([7, 3], [9], 1), ([0], [0], 0), ([4, 6, 8], [10, 3], 1)]
)
def test_common_divisor(a, b, divisor):
    assert runs.common_divisor(np.array(a), np.array(b)) == divisor


def test_slices_of_positions_keep_their_gaps():
    kept = np.flatnonzero(np.random.default_rng(0).random(5000) < 0.1)
    between = np.diff(kept, prepend=-1)
    for starts in ([0], [3], [0, 100, 200], [7, 10]):
        joined = gaps.joined_slices(kept, np.array(starts), 20)
        assert np.diff(joined, prepend=-1).tolist() == [gap for start in starts for gap in between[start : start + 20]]
    assert gaps.sum_widths(kept) == sum(int(gap - 1).bit_length() + 1 for gap in between)
    assert gaps.count_adjacent(kept) == np.count_nonzero(between[1:] == 1)


def drawn(numel, count, seed):
    return np.sort(np.random.default_rng(seed).choice(numel, count, replace=False))


def test_the_bound_of_slices_is_that_of_their_densities():
    kept = np.append(drawn(10_000, 500, 1), 10_000 + drawn(40_000, 500, 2))
    expected = sum(500 * (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) / p for p in (0.05, 0.0125))
    assert uniform.bound_bits(kept, np.array([0, 500]), 500) == pytest.approx(expected, rel=0.01)
    assert uniform.bound_bits(np.arange(9), np.array([0]), 9) == 0
    assert uniform.bound_bits(np.array([7]), np.array([0]), 1) == 0
    assert uniform.bound_bits(np.array([0, 2**55]), np.array([0]), 2) == 0  # too far apart to say


@pytest.mark.parametrize("apart", [2, 5, 70, 1000])
def test_rice_bits_of_slices_are_those_of_the_best_parameter_if_random(apart):
    kept, starts = drawn(3000 * apart, 3000, 1), [0, 500, 2000]
    gaps = [gap - 1 for start in starts for gap in np.diff(kept, prepend=-1)[start : start + 500]]
    best = min(sum(k + 1 + (gap >> k) for gap in gaps) for k in range(20))
    assert best <= uniform.rice_bits(kept, np.array(starts), 500) <= 1.001 * best
    assert uniform.rice_bits(np.array([0, 1, 2, 7]), np.array([0]), 4) == 8  # the mean gap is one: no low bits


@pytest.mark.parametrize("columns", [3, 64, 500])
@pytest.mark.parametrize("count", [300, 3000, 30_000])
def test_random_positions_look_uniform_and_others_do_not(columns, count):
    numel, starts = 300_000, np.array([0, count // 3, count - 100])
    found = [uniform.looks_uniform(drawn(numel, count, seed), starts, 100, columns) for seed in range(50)]
    assert sum(found) >= 48
    whole_rows = (drawn(numel // columns, max(count // columns, 1), 0)[:, None] * columns + np.arange(columns)).reshape(-1)
    assert not uniform.looks_uniform(whole_rows, np.array([0]), min(whole_rows.size, 300), columns)
