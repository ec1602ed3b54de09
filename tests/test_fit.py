"""fitpoly and fitdexp: quality on recorded gradients, awkward values, sizes, hostile bytes."""

import hashlib
import struct
import warnings

import ml_dtypes
import numpy as np
import pytest
from scipy.optimize import curve_fit

import deepreduce as dr
from deepreduce import kernels, reorder
from deepreduce.lab.data import load
from deepreduce.reader import Reader, varint

FITPOLY, FITDEXP = dr.FitPoly(), dr.FitDExp()


def largest(gradient, share=0.01):
    """The largest 1%, in the order of their positions."""
    flat = gradient.reshape(-1)
    kept = np.argsort(-np.abs(flat), kind="stable")[: max(1, int(flat.size * share))]
    return flat[np.sort(kept)]


def recorded(at_least=2000):
    return [(f"{name}:{key}", largest(g)) for name in ("resnet20", "gpt", "ncf") for key, g in load(name).items() if g.size >= at_least]


RECORDED = recorded()


def decode_in_order(codec, values):
    """The values in the order of the section, and what they are decoded to."""
    part, order = codec.encode(values, seed=0)
    reader = Reader(part)
    decoded = codec.decode(reader, values.size, values.dtype)
    reader.expect_end()
    return values[order.permutation], decoded


def relative_error(exact, seen):
    exact = exact.astype(np.float64)
    return float(np.linalg.norm(exact - seen) / np.linalg.norm(exact))


def runs_of(codec, values):
    descending, _ = kernels.fit.descending(values, codec.block)
    return codec._runs(descending)


# Quality on recorded gradients


@pytest.mark.parametrize(
    "codec", [FITPOLY, dr.FitPoly(1), dr.FitPoly(4, block=10**6), dr.FitPoly("paper"), dr.FitPoly(3, degree=1)], ids=str
)
def test_fitpoly_errs_as_little_as_numpy_on_the_same_segments(codec):
    for name, values in RECORDED:
        exact, decoded = decode_in_order(codec, values)
        lengths, kinds, _ = runs_of(codec, values)
        expected, start = np.zeros(values.size), 0
        for length, kind in zip(lengths, kinds, strict=True):
            if kind:
                x, y = np.linspace(-1, 1, length), exact[start : start + length].astype(np.float64)
                expected[start : start + length] = np.polyval(np.polyfit(x, y, min(codec.degree, length - 1)), x)
            start += length
        assert relative_error(exact, decoded) <= 1.01 * relative_error(exact, expected) + 1e-6, name


def double_exponential(x, a, b, c, d):
    return a * np.exp(b * x) + c * np.exp(d * x)


def scipy_error(y):
    """The squared error that scipy's search leaves, with parameters of the right size to begin with."""
    x = np.linspace(0, 1, y.size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = curve_fit(double_exponential, x, y, p0=(y[-1], -0.5, y[0] - y[-1], -20), maxfev=20_000)
    return float(np.sum((double_exponential(x, *found) - y) ** 2))


def test_fitdexp_errs_as_little_as_scipy():
    """Each tensor whole, scaled to a largest value of 1, which helps scipy only."""
    codec, compared = dr.FitDExp(block=10**6), 0
    for name, values in RECORDED:
        scaled = (values / np.abs(values).max()).astype(np.float32)
        exact, decoded = decode_in_order(codec, scaled)
        magnitudes = [np.sort(sign * exact[sign * exact > 0].astype(np.float64))[::-1] for sign in (1, -1)]
        if any(m.size < 8 for m in magnitudes):
            continue
        compared += 1
        expected = np.sqrt(sum(map(scipy_error, magnitudes))) / np.linalg.norm(exact.astype(np.float64))
        assert relative_error(exact, decoded) <= 1.1 * expected, name
    assert compared > 15


@pytest.mark.parametrize("codec", [FITPOLY, FITDEXP, dr.FitPoly(1), dr.FitPoly(degree=1)], ids=str)
def test_order_and_sign_are_right(codec):
    for name, values in RECORDED:
        exact, decoded = decode_in_order(codec, values)
        assert np.array_equal(np.sign(exact), np.sign(decoded)), name
        for start in range(0, values.size, codec.block):
            assert np.all(np.diff(decoded[start : start + codec.block]) <= 0), name


def test_fitpoly_keeps_to_its_target_error_and_fitdexp_stays_near():
    for name, values in RECORDED:
        assert relative_error(*decode_in_order(FITPOLY, values)) <= 0.03, name
        assert relative_error(*decode_in_order(FITDEXP, values)) <= 0.08, name


def test_more_segments_and_higher_degrees_err_less():
    values = largest(load("gpt")["l.layers.1.linear1.weight"])
    by_segments = [relative_error(*decode_in_order(dr.FitPoly(n), values)) for n in (1, 2, 4, 8)]
    by_degree = [relative_error(*decode_in_order(dr.FitPoly(1, degree=n), values)) for n in (0, 1, 2, 5, 9)]
    assert by_segments == sorted(by_segments, reverse=True)
    assert by_degree == sorted(by_degree, reverse=True)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e25])
def test_the_error_does_not_depend_on_the_scale(scale):
    values = largest(load("resnet20")["l.8.c2.weight"])
    scaled = (values / np.abs(values).max() * scale).astype(np.float32)
    for codec in (FITPOLY, FITDEXP):
        assert relative_error(*decode_in_order(codec, scaled)) == pytest.approx(relative_error(*decode_in_order(codec, values)), rel=0.02)


# Sizes


def test_the_values_of_a_convolution_almost_vanish():
    """The paper's Figure 10a: with raw keys, both codecs come near half of plain top-r."""
    gradient = load("resnet20")["l.8.c2.weight"]
    plain = len(dr.parse("topr:0.01/raw/raw").encode(gradient))
    for value in ("fitpoly", "fitdexp"):
        blob = dr.parse(f"topr:0.01/raw/{value}").encode(gradient)
        info = dr.inspect(blob)
        assert info.order_bytes == 0
        assert info.value_bytes < 0.06 * 4 * info.nnz
        assert len(blob) < 0.56 * plain


def test_the_order_takes_log2_block_bits_a_value():
    gradient = load("gpt")["l.layers.1.linear1.weight"]
    info = dr.inspect(dr.parse("topr:0.02/bitmap/fitpoly:block=128").encode(gradient))
    assert info.order_bytes == 2 + -(-info.nnz * 7 // 8)


# The public face


def test_specs():
    assert str(dr.parse("topr:0.01/bloom:p2,fpr=0.001/fitpoly:degree=5")) == "topr:0.01/bloom:p2,fpr=0.001/fitpoly:degree=5"
    assert str(dr.DeepReduce(dr.TopR(0.01), dr.RawIndex(), dr.FitPoly(degree=5))) == "topr:0.01/raw/fitpoly:degree=5"
    assert dr.parse("none/all/fitpoly:paper,degree=0").value == dr.FitPoly("paper", 0)
    assert dr.parse("none/all/fitpoly:auto").value == dr.FitPoly()


@pytest.mark.parametrize(
    "spec", ["fitpoly:0", "fitpoly:256", "fitpoly:some", "fitpoly:degree=16", "fitpoly:degree=-1", "fitpoly:block=1", "fitdexp:0"]
)
def test_impossible_parameters_are_refused(spec):
    with pytest.raises(dr.ConfigError):
        dr.parse(f"none/all/{spec}")


def test_a_few_values_are_sent_raw():
    info = dr.inspect(dr.parse("none/all/fitpoly").encode(np.float32([1, 2, 3, 4, 5, 6])))
    assert dr.parse(info.spec).value == dr.RawValue()


# Awkward values


AWKWARD = {
    "none": [],
    "one": [3.0],
    "two": [1.0, -2.0],
    "a zero": [0.0],
    "zeros of both signs": [0.0, -0.0, 0.0],
    "all equal": [0.25] * 1000,
    "all negative": (-np.arange(1, 700) / 7).tolist(),
    "one of many": [5.0] + [1e-9] * 99,
    "mostly zeros": [0.0] * 990 + [1.0, -1.0] * 5,
    "subnormal": (np.arange(-50, 50) * 1.4e-45).tolist(),
    "huge": (np.linspace(-3.3e38, 3.3e38, 100)).tolist(),
    "huge steps": [3.3e38] * 20 + [-3.3e38] * 20 + [1.0] * 20,
    "all magnitudes": (10.0 ** np.arange(-44, 38)).tolist(),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize(
    "codec", [FITPOLY, FITDEXP, dr.FitPoly("paper", 0), dr.FitPoly(255, 15), dr.FitPoly(block=7), dr.FitDExp(6)], ids=str
)
@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_values(kind, codec, dtype):
    values = np.clip(np.array(AWKWARD[kind]), -6e4, 6e4).astype(dtype) if dtype is np.float16 else np.array(AWKWARD[kind]).astype(dtype)
    exact, decoded = decode_in_order(codec, values)
    assert np.all(np.isfinite(decoded.astype(np.float64)))
    assert np.all(np.sign(exact.astype(np.float64)) * np.sign(decoded.astype(np.float64)) >= 0)
    assert np.all(decoded[exact == 0] == 0)
    part, order = codec.encode(values, 0)
    restored = reorder.restore(decoded, order.permutation)
    slack = np.spacing(np.abs(values)).astype(np.float64)
    assert np.all(np.abs(restored.astype(np.float64) - values.astype(np.float64)) <= codec.error_bound(values) + slack)
    assert len(part) <= codec.max_bytes(values.size, values.dtype)


def test_equal_values_come_back_exactly():
    assert np.all(decode_in_order(FITPOLY, np.full(700, 0.1, np.float32))[1] == np.float32(0.1))


def test_short_parts_come_back_almost_exactly():
    values = np.float32([9, 5, 4, 2, 1, -3, -8, -9, -20, -100])
    exact, decoded = decode_in_order(FITPOLY, values)
    assert np.allclose(exact, decoded, rtol=1e-5)


def test_a_part_without_a_double_exponential_says_so():
    """A straight line in numbers so large that the weights of its double exponential exceed float32."""
    values = np.linspace(3.4e38, 1e38, 100, dtype=np.float32)
    _, kinds, _ = runs_of(FITDEXP, values)
    assert set(kinds) == {kernels.fit.POSITIVE}
    assert relative_error(*decode_in_order(FITDEXP, values)) < 1e-6
    _, kinds, _ = runs_of(FITDEXP, largest(load("resnet20")["l.8.c2.weight"]))
    assert set(kinds) == {kernels.fit.POSITIVE_DEXP, kernels.fit.NEGATIVE_DEXP}


@pytest.mark.parametrize(
    ("codec", "sent", "seen"),
    [(FITPOLY, "ebe81bb45c69fe89", "ca91446114461b94"), (FITDEXP, "75b70b3b78e69259", "eb356bef04ed721e")],
    ids=["fitpoly", "fitdexp"],
)
def test_bytes_are_the_same_on_every_machine(codec, sent, seen):
    """Ranks must end a step with the same bits, whatever they run on: these digests were taken on x86-64 under Linux."""
    values = (np.random.default_rng(5).standard_normal(3000) ** 3).astype(np.float32)
    assert hashlib.sha256(codec.encode(values, 0)[0]).hexdigest()[:16] == sent
    assert hashlib.sha256(decode_in_order(codec, values)[1].astype("<f4").tobytes()).hexdigest()[:16] == seen


# Hostile bytes


def section(codec, runs, coefficients, nnz):
    """A section with these (length, kind) pairs, right or wrong."""
    numbers = np.array([length - 1 << codec.kind_bits | kind for length, kind in runs], np.uint64)
    packed = kernels.bits.pack(numbers, codec._run_bits(nnz))
    return varint(len(runs)) + packed + struct.pack(f"<{len(coefficients)}f", *coefficients)


def refused(codec, part, nnz, match):
    with pytest.raises(dr.FormatError, match=match):
        codec.decode(Reader(part), nnz, np.dtype(np.float32))


def test_a_right_section_is_read():
    codec = dr.FitPoly(degree=0, block=8)
    part = section(codec, [(3, 1), (2, 0), (3, 2), (2, 2)], [2.0, -1.0, -3.0], 10)
    assert codec.decode(Reader(part), 10, np.dtype(np.float32)).tolist() == [2] * 3 + [0] * 2 + [-1] * 3 + [-3] * 2


def test_wrong_sections_are_refused():
    codec = dr.FitPoly(degree=0, block=8)
    refused(codec, section(codec, [(3, 1)], [2.0], 10), 10, "10 expected")
    refused(codec, section(codec, [(8, 1), (8, 1)], [2.0, 1.0], 10), 10, "10 expected")
    refused(codec, section(codec, [(5, 1), (5, 1)], [2.0, 1.0], 10), 10, "leaves its block")
    refused(codec, section(codec, [(8, 3), (2, 1)], [2.0, 1.0], 10), 10, "kind 3")
    refused(codec, section(codec, [(8, 1), (2, 1)], [np.nan, 1.0], 10), 10, "not finite")
    refused(codec, section(codec, [(8, 1), (2, 1)], [np.inf, 1.0], 10), 10, "not finite")
    refused(codec, varint(11), 10, "above 10")
    refused(codec, section(codec, [(8, 1), (2, 1)], [1.0], 10), 10, "need")
    refused(FITDEXP, section(FITDEXP, [(10, 3)], [1.0, 1.0, -1.0, 701.0], 10), 10, "rate")
    refused(FITDEXP, section(FITDEXP, [(10, 4)], [1.0, 1.0, -1e10, 1.0], 10), 10, "rate")
    refused(FITDEXP, section(FITDEXP, [(10, 5)], [1.0, 1.0, -1.0, 1.0], 10), 10, "kind 5")


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("codec", [FITPOLY, FITDEXP, dr.FitPoly(255, 15, block=50), dr.FitDExp(20)], ids=str)
def test_changed_bytes_are_refused_or_give_finite_values(codec, dtype):
    values = (np.random.default_rng(1).standard_normal(150) ** 3).astype(np.float32)
    part, _ = codec.encode(values, 0)
    rng = np.random.default_rng(2)
    for _ in range(400):
        changed = np.frombuffer(part, np.uint8).copy()
        for at in rng.integers(0, changed.size, rng.integers(1, 4)):
            changed[at] = rng.integers(0, 256)
        try:
            decoded = codec.decode(Reader(changed), values.size, np.dtype(dtype))
        except dr.FormatError:
            continue
        assert decoded.size == values.size
        assert np.all(np.isfinite(decoded.astype(np.float64)))
