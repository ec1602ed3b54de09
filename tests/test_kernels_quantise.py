"""The kernels of the quantising value codecs against slow, obvious versions of the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deepreduce.kernels import draw, half, lloyd, quantise, sketch, ternary

FINITE = st.floats(-1e6, 1e6, width=32)
VALUES = hnp.arrays(np.float64, st.integers(0, 300), elements=FINITE)


def unit_draw(seed, i):
    """The i-th number of the rounding stream in [0, 1), in Python's own integers."""

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    state = mix(mix((seed + 0x9E3779B97F4A7C15) % 2**64) ^ draw.ROUNDING * 0xBF58476D1CE4E5B9 % 2**64)
    return (mix((state + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53


def codes_of(packed, width_bits, count):
    """The packed numbers, one bit at a time."""
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    return [sum(int(bits[i * width_bits + j]) << j for j in range(width_bits)) for i in range(count)]


@given(values=VALUES, group=st.integers(1, 400), euclidean=st.booleans())
@settings(max_examples=60, deadline=None)
def test_norms(values, group, euclidean):
    groups = [values[i : i + group] for i in range(0, values.size, group)]
    expected = [np.linalg.norm(b) if euclidean else np.abs(b).max() for b in groups]
    assert quantise.norms(values, group, euclidean) == pytest.approx(expected, rel=1e-12)


def test_the_norm_of_tiny_values_does_not_vanish():
    assert quantise.norms(np.full(4, 1e-200), 4, True)[0] >= 1e-200


@given(values=VALUES, group=st.integers(1, 70), width_bits=st.integers(2, 8), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_quantise_and_restore(values, group, width_bits, seed):
    norms = np.nextafter(quantise.norms(values, group, False).astype(np.float32), np.float32(np.inf))
    packed = quantise.quantise(values, norms, group, width_bits, seed)
    assert len(packed) == (values.size * width_bits + 7) // 8
    levels, expected = 2 ** (width_bits - 1) - 1, []
    for i, code in enumerate(codes_of(packed, width_bits, values.size)):
        scaled = abs(values[i]) * (levels / float(norms[i // group]))
        level = int(scaled) + (unit_draw(seed, i) < scaled - int(scaled))
        negative = values[i] < 0 and level > 0
        assert code == level + (negative << (width_bits - 1))
        expected.append((-1 if negative else 1) * level * (float(norms[i // group]) / levels))
    for dtype in (np.float32, np.float64):
        restored = np.empty(values.size, dtype)
        quantise.restore(packed, norms, group, width_bits, restored)
        assert restored == pytest.approx(np.array(expected, dtype), rel=1e-15, abs=0)


TERNARY = hnp.arrays(np.int8, st.integers(0, 400), elements=st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, -1]))


def slow_pack(digits):
    """Base 3, five digits a byte; then runs of zero bytes, greedily."""
    padded = [*digits, *[0] * (-len(digits) % 5)]
    folded = [sum((int(d) + 1) * 3 ** (4 - j) for j, d in enumerate(padded[i : i + 5])) for i in range(0, len(padded), 5)]
    out, i = [], 0
    while i < len(folded):
        run = 0
        while run < 14 and i + run < len(folded) and folded[i + run] == 121:
            run += 1
        out.append(243 + run - 2 if run >= 2 else folded[i])
        i += max(run, 1)
    return bytes(out)


@given(digits=TERNARY)
@settings(max_examples=150, deadline=None)
def test_ternary_digits_round_trip(digits):
    packed = ternary.pack(digits)
    assert packed == slow_pack(digits)
    assert np.array_equal(ternary.unpack(packed, digits.size), digits)


@pytest.mark.parametrize("zero_bytes", [*range(1, 33), 14 * 9, 14 * 9 + 1])
def test_zero_runs_of_every_length(zero_bytes):
    one = [1, 1, 1, 1, 1]
    digits = np.array(one + 5 * zero_bytes * [0] + one, np.int8)
    packed = ternary.pack(digits)
    assert len(packed) == 2 + -(-zero_bytes // 14)
    assert packed == slow_pack(digits)
    assert np.array_equal(ternary.unpack(packed, digits.size), digits)


@given(packed=st.binary(max_size=40), count=st.integers(0, 3000))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_digits_or_refused(packed, count):
    groups = [group for byte in packed for group in ([121] * (byte - 241) if byte >= 243 else [byte])]
    expected = [group // 3**place % 3 - 1 for group in groups for place in (4, 3, 2, 1, 0)]
    digits = ternary.unpack(packed, count)
    if len(groups) == -(-count // 5) and not any(expected[count:]):
        assert digits.tolist() == expected[:count]
    else:
        assert digits is None


@given(values=VALUES, scale=st.floats(0, 1e6))
@settings(max_examples=40, deadline=None)
def test_digits(values, scale):
    expected = np.where(np.abs(values) > scale / 2, np.sign(values), 0)
    assert np.array_equal(ternary.digits(values, scale), expected)


@given(values=VALUES, bits=st.integers(1, 8), data=st.data())
@settings(max_examples=60, deadline=None)
def test_assign_and_means(values, bits, data):
    edges = np.sort(data.draw(hnp.arrays(np.float64, 2**bits - 1, elements=FINITE)))
    ids = sketch.assign(values, edges)
    assert np.array_equal(ids, np.searchsorted(edges, values, side="right"))
    means = sketch.means(values, ids, 2**bits)
    assert np.array_equal(sketch.look_up(means, ids), means[ids])
    for bin in range(2**bits):
        inside = values[ids == bin]
        assert means[bin] == pytest.approx(inside.mean() if inside.size else 0, rel=1e-9, abs=1e-6)


@given(groups=hnp.arrays(np.uint8, st.integers(0, 200), elements=st.integers(0, 3)), rows=st.integers(1, 4), share=st.floats(0.05, 1))
@settings(max_examples=60, deadline=None)
def test_minmax_sketch_never_answers_above_what_was_inserted(groups, rows, share):
    numbers = (np.arange(groups.size) * 7 % 32).astype(np.uint8)
    cells = sketch.minmax_insert(groups, numbers, 4, rows, share, 31)
    assert cells.size == sketch.minmax_cells(groups, 4, rows, share)
    found = sketch.minmax_query(groups, cells, 4, rows, share)
    assert np.all(found <= numbers)
    for group in range(4):
        inside = groups == group
        assert set(found[inside]) <= set(numbers[inside])


def test_rounding_to_float16_is_that_of_numpy():
    """All signs, exponents and NaNs, and the two neighbours of every number that lies halfway between two of float16."""
    spread = np.arange(0, 2**32, 9973, dtype=np.uint64).astype(np.uint32)
    halfway = np.arange(0x33000000, 0x47800000, 0x1000, dtype=np.uint32)  # 2**-25 to 2**16; below the normal numbers, more than that
    values = np.concatenate([spread, halfway, halfway - 1, halfway + 1, halfway | np.uint32(2**31)]).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(np.float16)
    got = half.rounded(values).view(np.float16)
    number = ~np.isnan(values)
    assert np.array_equal(got[number].view(np.uint16), expected[number].view(np.uint16))
    assert np.isnan(got[~number]).all()
    finite = np.isfinite(values)
    assert [half.overflows(values[i : i + 1]) for i in range(0, values.size, 501)] == list((finite & np.isinf(expected))[::501])


def test_widening_of_float16_is_exact():
    halves = np.arange(2**16, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(half.widened(halves), expected, equal_nan=True)
    assert np.array_equal(np.signbit(half.widened(halves)), np.signbit(expected))


def halfway_between_levels(rising, levels, rounds):
    """Lloyd's algorithm in a few lines of numpy."""
    exact = rising.astype(np.float64)
    below = np.concatenate(([0.0], np.cumsum(exact)))
    centres = exact[(2 * np.arange(levels) + 1) * rising.size // (2 * levels)]
    for _ in range(rounds):
        cuts = np.concatenate(([0], np.searchsorted(exact, (centres[1:] + centres[:-1]) / 2), [rising.size]))
        counts, sums = np.diff(cuts), np.diff(below[cuts])
        centres = np.maximum.accumulate(np.where(counts > 0, sums / np.maximum(counts, 1), centres))
    return (centres[1:] + centres[:-1]) / 2


@given(values=hnp.arrays(np.float32, st.integers(1, 300), elements=FINITE), bits=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_the_levels_of_lloyd(values, bits):
    rising = np.sort(values)
    assert np.array_equal(lloyd.edges(rising, 1 << bits, 16), halfway_between_levels(rising, 1 << bits, 16))


def test_no_values_have_levels_too():
    assert not lloyd.edges(np.empty(0, np.float32), 4, 16).any()
