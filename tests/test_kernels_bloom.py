"""The Bloom kernels against slow obvious versions: plain Python integers, sets and dicts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepreduce.kernels import bloom, draw, policies

ALL_64 = 2**64 - 1


def mixed(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & ALL_64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & ALL_64
    return x ^ x >> 31


def number(state: int, i: int) -> int:
    return mixed((state + (i + 1) * 0x9E3779B97F4A7C15) & ALL_64)


def below(state: int, i: int, limit: int) -> int:
    return int((number(state, i) >> 11) * 2.0**-53 * limit)


def bits_of(position: int, size_bits: int, hashes: int, salt: int) -> list[int]:
    hashed = number(salt, position)
    return [((hashed * 0xD1342543DE82EF95**j & ALL_64) >> 32) * size_bits >> 32 for j in range(hashes)]


def set_bits(packed: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist())


def filter_of(positions, size_bits, hashes, salt) -> set[int]:
    return {bit for position in positions for bit in bits_of(position, size_bits, hashes, salt)}


def members(held: set[int], size_bits, hashes, salt, numel) -> list[int]:
    return [i for i in range(numel) if held.issuperset(bits_of(i, size_bits, hashes, salt))]


def algorithm_1(positives, wanted, size_bits, hashes, salt, state) -> list[int]:
    """The paper's, line by line; an item that a set holds but that was chosen before is removed when it is drawn."""
    sets = {}
    for x in positives:
        for bit in sorted(set(bits_of(x, size_bits, hashes, salt))):
            sets.setdefault(bit, []).append(x)
    chosen = {items[0] for items in sets.values() if len(items) == 1}
    order = sorted((bit for bit, items in sets.items() if len(items) > 1), key=lambda bit: (len(sets[bit]), bit))
    remaining = {bit: [x for x in sets[bit] if x not in chosen] for bit in order}
    draws = 0
    while len(chosen) < wanted:
        for bit in order:
            items, drawn = remaining[bit], None
            while items and (drawn is None or drawn in chosen):
                pick = below(state, draws, len(items))
                draws += 1
                drawn, items[pick] = items[pick], items[-1]
                items.pop()
            if drawn is not None:
                chosen.add(drawn)
            if len(chosen) == wanted:
                break
    return sorted(chosen)


@st.composite
def filters(draw_):
    numel = draw_(st.integers(1, 2000))
    kept = sorted(draw_(st.sets(st.integers(0, numel - 1), min_size=1, max_size=60)))
    return numel, kept, draw_(st.integers(1, 80)), draw_(st.integers(1, 12)), draw_(st.integers(0, ALL_64))


@given(filters())
@settings(max_examples=150, deadline=None)
def test_insert_and_members_equal_the_plain_versions(case):
    numel, kept, size_bytes, hashes, salt = case
    packed = bloom.insert(size_bytes, hashes, salt, np.array(kept, np.int64))
    held = filter_of(kept, 8 * size_bytes, hashes, salt)
    assert set_bits(packed) == held
    found = bloom.members(packed, hashes, salt, numel, numel)
    assert found.dtype == np.int64
    assert found.tolist() == members(held, 8 * size_bytes, hashes, salt, numel)
    assert set(kept) <= set(found.tolist())


@given(filters(), st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_members_stop_at_the_number_asked_for(case, at_most):
    numel, kept, size_bytes, hashes, salt = case
    packed = bloom.insert(size_bytes, hashes, salt, np.array(kept, np.int64))
    everything = bloom.members(packed, hashes, salt, numel, numel)
    assert np.array_equal(bloom.members(packed, hashes, salt, numel, at_most), everything[:at_most])


def test_members_of_full_and_empty_filters():
    everything = bloom.members(np.full(3, 255, np.uint8), 50, 1, 20_000, 20_000)  # more than the first room for the answer
    assert np.array_equal(everything, np.arange(20_000))
    assert bloom.members(np.zeros(3, np.uint8), 1, 1, 20_000, 20_000).size == 0
    assert bloom.members(np.zeros(0, np.uint8), 1, 1, 20_000, 20_000).size == 0
    assert bloom.members(np.full(3, 255, np.uint8), 1, 1, 0, 0).size == 0


def test_positions_and_filters_beyond_32_bits_of_product():
    size_bits, salt = 8 * bloom.MAX_BYTES, ALL_64
    for position in (0, 2**31, 2**40 + 5):
        hashed = number(salt, position)
        with np.errstate(over="ignore"):
            assert int(bloom.bit_of.py_func(np.uint64(hashed), np.uint64(size_bits))) == bits_of(position, size_bits, 1, salt)[0]


def test_the_hash_in_signed_64_bit_arithmetic():
    """What a tensor library does on its device: int64 products wrap, and a right shift needs a mask."""

    def signed(n):
        return np.int64(np.uint64(n & ALL_64))

    def shifted(x, n):
        return (x >> n) & signed(2 ** (64 - n) - 1)

    numel, size_bytes, hashes, salt = 5000, 2000, 9, 0xF123456789ABCDEF
    with np.errstate(over="ignore"):
        x = signed(salt) + np.arange(1, numel + 1, dtype=np.int64) * signed(0x9E3779B97F4A7C15)
        x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
        x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
        x = x ^ shifted(x, 31)
        probes = []
        for _ in range(hashes):
            probes.append(shifted(shifted(x, 32) * (8 * size_bytes), 32))
            x = x * signed(0xD1342543DE82EF95)
    expected = [bits_of(i, 8 * size_bytes, hashes, salt) for i in range(numel)]
    assert np.array_equal(np.stack(probes, axis=1), expected)


@pytest.mark.parametrize("wanted", [0, 1, 7, 20, 25])
def test_some_of_takes_an_ordered_subset_of_the_size(wanted):
    positions = np.arange(100, 120)
    for seed in range(20):
        some = policies.some_of(positions, wanted, draw.state(seed, draw.POLICY))
        assert some.size == min(wanted, 20)
        assert np.all(np.diff(some) > 0)
        assert np.all(np.isin(some, positions))


def test_some_of_takes_every_subset_equally_often():
    seen = {}
    draws = 12_000
    for seed in range(draws):
        subset = tuple(policies.some_of(np.arange(5), 2, draw.state(seed, draw.POLICY)).tolist())
        seen[subset] = seen.get(subset, 0) + 1
    assert len(seen) == 10
    chi_square = sum((count - draws / 10) ** 2 / (draws / 10) for count in seen.values())
    assert chi_square < 27.9  # 9 degrees of freedom: one in a thousand is above


@given(filters(), st.integers(0, 2**63 - 1))
@settings(max_examples=150, deadline=None)
def test_conflict_sets_equal_algorithm_1(case, seed):
    numel, kept, size_bytes, hashes, salt = case
    packed = bloom.insert(size_bytes, hashes, salt, np.array(kept, np.int64))
    positives = bloom.members(packed, hashes, salt, numel, numel)
    start = draw.state(seed, draw.POLICY)
    chosen = policies.by_conflict_sets(positives, len(kept), 8 * size_bytes, hashes, salt, start)
    small_sets = max(np.bincount([bit for x in positives.tolist() for bit in set(bits_of(x, 8 * size_bytes, hashes, salt))])) < 255
    if small_sets:
        assert chosen.tolist() == algorithm_1(positives.tolist(), len(kept), 8 * size_bytes, hashes, salt, int(start))
    assert chosen.size == len(kept)
    assert np.all(np.diff(chosen) > 0)
    assert np.all(np.isin(chosen, positives))
    exact = policies.by_conflict_sets(positives, len(kept), 8 * size_bytes, hashes, salt, start, exact=True)
    assert exact.tolist() == algorithm_1(positives.tolist(), len(kept), 8 * size_bytes, hashes, salt, int(start))


def test_conflict_sets_above_255_have_their_exact_order_if_asked():
    numel, size_bytes, hashes, salt, kept = 60_000, 8, 1, 3, np.arange(0, 60_000, 1500)
    packed = bloom.insert(size_bytes, hashes, salt, kept)
    positives = bloom.members(packed, hashes, salt, numel, numel)
    assert positives.size > 255 * 8 * size_bytes / 2  # large conflict sets only
    start = draw.state(0, draw.POLICY)
    given = positives, kept.size, 8 * size_bytes, hashes, salt, start
    assert policies.by_conflict_sets(*given, exact=True).tolist() == algorithm_1(positives.tolist(), *given[1:5], int(start))
    assert policies.by_conflict_sets(*given).tolist() != policies.by_conflict_sets(*given, exact=True).tolist()


def test_who_is_alone_at_a_bit_is_never_left_out():
    size_bytes, hashes, salt = 150, 5, 3
    kept = np.arange(0, 3000, 20)
    packed = bloom.insert(size_bytes, hashes, salt, kept)
    positives = bloom.members(packed, hashes, salt, 3000, 3000)
    probed = [set(bits_of(x, 8 * size_bytes, hashes, salt)) for x in positives.tolist()]
    crowd = np.bincount([bit for bits in probed for bit in bits])
    alone = [x for x, bits in zip(positives.tolist(), probed, strict=True) if min(crowd[bit] for bit in bits) == 1]
    assert 0 < len(alone) < kept.size < positives.size
    assert set(alone) <= set(kept.tolist())
    chosen = policies.by_conflict_sets(positives, kept.size, 8 * size_bytes, hashes, salt, draw.state(1, draw.POLICY))
    assert set(alone) <= set(chosen.tolist())


def test_conflict_sets_of_a_hostile_filter_end_at_the_number_wanted():
    """One bit set and one hash: a single conflict set of all positives, none of them certain; and every bit set: all of them are."""
    one_bit = np.zeros(1, np.uint8)
    one_bit[0] = 16
    positives = bloom.members(one_bit, 1, 9, 100_000, 100_000)
    start = draw.state(0, draw.POLICY)
    assert policies.by_conflict_sets(positives, positives.size - 1, 8, 1, 9, start).size == positives.size - 1
    assert policies.by_conflict_sets(np.arange(50), 10, 8 * 10_000, 4, 9, start).tolist() == list(range(10))
    assert policies.by_conflict_sets(positives, positives.size + 5, 8, 1, 9, start).size == positives.size
