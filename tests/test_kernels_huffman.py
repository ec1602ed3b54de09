"""The Huffman kernels against slow and obvious versions of the same."""

import heapq
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepreduce.code_table import read_lengths, write_lengths
from deepreduce.errors import CorruptError, FormatError, TruncatedError
from deepreduce.kernels import huffman, prefixes
from deepreduce.reader import Reader, expect_decoded

many_counts = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10**6)), max_size=300).map(np.int64)


def decoded(kernel, *given):
    """What a kernel decodes; an error for its code."""
    if kernel is huffman:
        packed, lengths, count = given
        given = packed, count, *huffman.table_of(lengths)
    found, code = kernel.decode(*given)
    expect_decoded(code, "code words")
    return found


def huffman_cost(counts):
    """The size in bits of an unlimited Huffman code: the sum of all inner nodes of the tree."""
    heap = [count for count in counts if count]
    if len(heap) == 1:
        return heap[0]
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        node = heapq.heappop(heap) + heapq.heappop(heap)
        cost += node
        heapq.heappush(heap, node)
    return cost


def kraft(lengths):
    return sum(0.5 ** int(length) for length in lengths if length)


def bits_of(packed, size_bits):
    return "".join(str(packed[i // 8] >> i % 8 & 1) for i in range(size_bits))


def random_code(rng, symbols):
    """Lengths of a code for some of the symbols, far from uniform."""
    return huffman.code_lengths((rng.random(symbols) < 0.7) * (1 + rng.geometric(0.5, symbols) ** 6))


# Lengths


@given(counts=many_counts)
@settings(deadline=None)
def test_lengths_are_optimal_and_fill_the_tree(counts):
    lengths = huffman.code_lengths(counts, limit=16)
    assert np.array_equal(lengths > 0, counts > 0)
    if np.count_nonzero(counts) > 1:
        assert kraft(lengths) == 1
    if counts.sum() < 1500:  # then no word of an unlimited code is above 16 bits, as that takes a sum of Fibonacci numbers
        assert counts @ lengths == huffman_cost(counts.tolist())


@given(counts=many_counts)
@settings(deadline=None)
def test_size_is_within_a_bit_a_symbol_of_the_entropy(counts):
    used = counts[counts > 0]
    if used.size > 1:
        entropy_bits = float(used @ np.log2(used.sum() / used))
        coded_bits = int(counts @ huffman.code_lengths(counts, limit=16))
        assert entropy_bits * (1 - 1e-12) <= coded_bits < entropy_bits + used.sum()


@pytest.mark.parametrize("limit", [3, 4])
@given(counts=st.lists(st.integers(1, 10**4), min_size=2, max_size=5))
@settings(deadline=None, max_examples=40)
def test_limited_lengths_are_the_best_of_all(limit, counts):
    lengths = huffman.code_lengths(np.int64(counts), limit)
    allowed = (try_ for try_ in product(range(1, limit + 1), repeat=len(counts)) if kraft(try_) <= 1)
    assert np.dot(lengths, counts) == min(np.dot(try_, counts) for try_ in allowed)
    assert lengths.max() <= limit


def test_a_limit_holds_where_an_unlimited_code_is_longer():
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    for limit in (6, 9, 16):
        lengths = huffman.code_lengths(np.int64(fibonacci), limit)
        assert lengths.max() == limit
        assert kraft(lengths) == 1


def test_every_symbol_can_be_used_and_no_more():
    assert np.all(huffman.code_lengths(np.ones(2**12, np.int64)) == 12)
    assert np.all(huffman.code_lengths(np.ones(2**16, np.int64), limit=16) == 16)
    for count, limit in [(2**12 + 1, 12), (3, 17), (2**16 + 1, 16)]:
        with pytest.raises(ValueError, match="no code"):
            huffman.code_lengths(np.ones(count, np.int64), limit)


@given(counts=many_counts)
@settings(deadline=None)
def test_lengths_round_trip_as_bytes(counts):
    lengths = huffman.code_lengths(counts)
    written = write_lengths(lengths)
    reader = Reader(written + b"next")
    assert np.array_equal(read_lengths(reader, lengths.size), lengths)
    assert reader.remaining == 4
    assert len(write_lengths(np.append(lengths, np.zeros(999, np.uint8)))) == len(written)
    for cut in range(len(written)):
        with pytest.raises(FormatError):
            read_lengths(Reader(written[:cut]), lengths.size)


@pytest.mark.parametrize(
    "lengths",
    [[1, 1, 1], [1, 2], [2], [3, 3, 3, 3, 3, 3, 3], [1, 2, 2, 2], [0, 0, 2, 0], [16] * 17, [1, 16]],
    ids=str,
)
def test_lengths_that_make_no_code_are_refused(lengths):
    assert not huffman.is_code(np.uint8(lengths))
    with pytest.raises(CorruptError, match="no prefix code"):
        read_lengths(Reader(write_lengths(np.uint8(lengths))), len(lengths))
    with pytest.raises(ValueError, match="no prefix code"):
        decoded(huffman, bytes(9), np.uint8(lengths), 3)


def test_more_lengths_than_symbols_are_refused():
    written = write_lengths(np.uint8([2, 2, 2, 2]))
    assert np.array_equal(read_lengths(Reader(written), 7), [2, 2, 2, 2, 0, 0, 0])
    with pytest.raises(CorruptError):
        read_lengths(Reader(written), 3)


@given(table=st.binary(max_size=40), count=st.integers(0, 60))
@settings(deadline=None, max_examples=300)
def test_any_bytes_as_lengths_give_a_code_or_an_error(table, count):
    try:
        lengths = read_lengths(Reader(bytes((len(table),)) + table), count)
    except FormatError:
        return
    assert lengths.size == count
    assert huffman.is_code(lengths)


# Symbols


def test_words_are_the_canonical_ones():
    lengths = np.uint8([3, 3, 3, 3, 3, 2, 4, 4])  # the example of RFC 1951, section 3.2.2
    words = ["010", "011", "100", "101", "110", "00", "1110", "1111"]
    for symbol, word in enumerate(words):
        assert bits_of(huffman.encode(np.uint16([symbol]), lengths), len(word)) == word
    order = [7, 0, 5, 5, 6, 1]
    coded = huffman.encode(np.uint16(order), lengths)
    assert bits_of(coded, 18) == "".join(words[symbol] for symbol in order)
    assert len(coded) == 3


@pytest.mark.parametrize("symbols", [1, 2, 3, 256, 4096])
def test_symbols_round_trip(symbols):
    rng = np.random.default_rng(symbols)
    for count in (0, 1, 2, 3, 4, 5, 63, 1000):
        drawn = np.minimum(rng.geometric(0.02, count) - 1, symbols - 1).astype(np.uint16)
        counts = np.bincount(drawn, minlength=symbols)
        lengths = huffman.code_lengths(counts)
        coded = huffman.encode(drawn, lengths)
        assert len(coded) == (int(counts @ lengths) + 7) // 8
        assert np.array_equal(decoded(huffman, coded, lengths, count), drawn)


def test_the_longest_words_round_trip():
    symbols = np.arange(2**16, dtype=np.uint16)
    lengths = np.full(2**16, 16, np.uint8)
    coded = huffman.encode(symbols[::-1], lengths)
    assert len(coded) == 2 * 2**16
    assert np.array_equal(decoded(huffman, coded, lengths, 2**16), symbols[::-1])


def test_what_is_not_exactly_the_words_is_refused():
    lengths = np.uint8([1, 2, 3, 3])
    coded = huffman.encode(np.uint16([0, 1, 2, 3, 0, 0, 1]), lengths)  # 13 bits
    for cut in range(len(coded)):
        with pytest.raises(TruncatedError):
            decoded(huffman, coded[:cut], lengths, 7)
    with pytest.raises(TruncatedError):
        decoded(huffman, coded, lengths, 2**40)
    with pytest.raises(CorruptError, match="more than that"):
        decoded(huffman, coded + b"\x00", lengths, 7)
    with pytest.raises(CorruptError, match="more than that"):
        decoded(huffman, coded[:-1] + bytes((coded[-1] | 0x80,)), lengths, 7)
    with pytest.raises(CorruptError, match="bits that stand for nothing"):
        decoded(huffman, b"\x02", np.uint8([0, 1]), 2)
    with pytest.raises(CorruptError, match="bits that stand for nothing"):
        decoded(huffman, b"\x00", np.uint8([0, 0]), 2)


@given(packed=st.binary(max_size=60), count=st.integers(0, 200), seed=st.integers(0, 50))
@settings(deadline=None, max_examples=300)
def test_any_bytes_give_used_symbols_or_an_error(packed, count, seed):
    lengths = random_code(np.random.default_rng(seed), 40)
    try:
        symbols = decoded(huffman, packed, lengths, count)
    except FormatError:
        return
    assert symbols.size == count
    assert np.all(lengths[symbols] > 0)


# Prefixes of gaps


def obvious_prefix(number, finer):
    """Number the classes of equal bit length and equal `finer` bits after the highest, in rising order."""
    rest_bits = max(number.bit_length() - 1 - finer, 0)
    return (number >> rest_bits) + rest_bits * 2**finer


positions = st.one_of(
    st.sets(st.integers(0, 300), min_size=1),
    st.sets(st.integers(0, 2**63 - 2), min_size=1, max_size=40),
).map(lambda found: np.array(sorted(found), np.int64))


def encoded(kept, finer):
    counts = prefixes.prefix_counts(kept, finer)
    lengths = huffman.code_lengths(counts)
    return prefixes.encode(kept, lengths, finer, prefixes.size_bits(counts, lengths, finer)), lengths


@given(kept=positions)
@settings(deadline=None)
def test_prefixes_are_counted_for_every_fineness(kept):
    gaps = [int(a) - int(b) - 1 for a, b in zip(kept, [-1, *kept[:-1]], strict=True)]
    counts = prefixes.prefix_counts(kept, 4)
    for finer in range(4, -1, -1):
        expected = np.bincount([obvious_prefix(gap, finer) for gap in gaps], minlength=prefixes.alphabet(finer))
        assert np.array_equal(counts, expected)
        if finer:
            counts = prefixes.coarser_counts(counts, finer)


@given(kept=positions)
@settings(deadline=None)
def test_the_plan_is_the_smallest_of_all_finenesses(kept):
    sizes = []
    for finer in range(5):
        coded, lengths = encoded(kept, finer)
        sizes.append(len(write_lengths(lengths)) + len(coded))
    finer, lengths, size_bits, size_bytes = prefixes.plan(kept, 4)
    assert (finer, size_bytes) == (sizes.index(min(sizes)), min(sizes))
    coded, expected = encoded(kept, finer)
    assert np.array_equal(lengths, expected)
    assert (size_bits + 7) // 8 == len(coded)


@given(kept=positions, finer=st.integers(0, 4), room=st.integers(0, 1))
@settings(deadline=None)
def test_positions_round_trip(kept, finer, room):
    coded, lengths = encoded(kept, finer)
    numel = int(kept[-1]) + 1 + room
    assert np.array_equal(decoded(prefixes, coded, lengths, finer, kept.size, numel), kept)
    with pytest.raises(CorruptError):
        decoded(prefixes, coded + b"\x00", lengths, finer, kept.size, numel)
    with pytest.raises(CorruptError, match="a number is too large"):
        decoded(prefixes, coded, lengths, finer, kept.size, int(kept[-1]))
    for cut in range(len(coded)):
        with pytest.raises(FormatError):
            decoded(prefixes, coded[:cut], lengths, finer, kept.size, numel)


@given(packed=st.binary(max_size=80), count=st.integers(0, 200), finer=st.integers(0, 4), seed=st.integers(0, 50))
@settings(deadline=None, max_examples=300)
def test_any_bytes_give_increasing_positions_or_an_error(packed, count, finer, seed):
    lengths = random_code(np.random.default_rng(seed), prefixes.alphabet(finer))
    numel = 10 ** (seed % 19)
    try:
        kept = decoded(prefixes, packed, lengths, finer, count, numel)
    except FormatError:
        return
    assert kept.size == count
    assert np.all(np.diff(kept) > 0)
    assert count == 0 or (kept[0] >= 0 and kept[-1] < numel)
