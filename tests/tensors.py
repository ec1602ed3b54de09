"""Awkward tensors: hypothesis strategies, and a fixed list for tests that go through everything."""

from collections.abc import Iterable

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from deepreduce.tensor import FLOAT_DTYPES

BF16 = np.dtype(ml_dtypes.bfloat16)


def bits_of(array: np.ndarray) -> np.ndarray:
    """The bit patterns: equality that tells NaN from NaN and 0 from -0."""
    contiguous = np.ascontiguousarray(array)
    return contiguous.reshape(-1).view(f"u{array.dtype.itemsize}")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in shape, dtype and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(np.array_equal(bits_of(a), bits_of(b)))


@st.composite
def gradients(draw: st.DrawFn, finite: bool = False, max_side: int = 12) -> np.ndarray:
    """Any shape from 0-d to 4-d, any dtype, odd memory layouts; NaN, Inf, -0 and subnormals unless `finite`."""
    dtype = draw(st.sampled_from(FLOAT_DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=max_side))
    special = [0.0, -0.0, 1.0, -1.0, 1e-6, 3.0e4] + ([] if finite else [np.nan, np.inf, -np.inf])
    elements = st.one_of(st.sampled_from(special), st.floats(-100, 100, width=32))
    array = draw(hnp.arrays(np.float32, shape, elements=elements)).astype(dtype)
    layout = draw(st.sampled_from(["plain", "transposed", "strided", "reversed", "readonly"]))
    if layout == "transposed":
        array = array.T
    elif layout == "strided" and array.ndim:
        array = np.repeat(array, 2, axis=0)[::2]
    elif layout == "reversed" and array.ndim:
        array = array[::-1]
    array.flags.writeable = layout != "readonly"
    return array


@st.composite
def supports(draw: st.DrawFn, max_numel: int = 3000) -> tuple[np.ndarray, tuple[int, ...]]:
    """Increasing positions and the shape they lie in: scattered, runs, rows, none, all, the last one."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=9).filter(lambda s: np.prod(s) <= max_numel))
    numel = int(np.prod(shape))
    kind = draw(st.sampled_from(["scattered", "run", "rows", "none", "all", "last", "stride"]))
    if kind == "scattered":
        kept = draw(st.sets(st.integers(0, numel - 1), max_size=numel))
    elif kind == "run":
        start = draw(st.integers(0, numel - 1))
        kept = range(start, draw(st.integers(start, numel)))
    elif kind == "rows":
        row = shape[-1]
        kept = [p for r in draw(st.sets(st.integers(0, numel // row - 1))) for p in range(r * row, (r + 1) * row)]
    elif kind == "stride":
        kept = range(draw(st.integers(0, numel - 1)), numel, draw(st.integers(1, numel)))
    else:
        kept = {"none": [], "all": range(numel), "last": [numel - 1]}[kind]
    return np.array(sorted(kept), np.int64), shape


def fixed_gradients() -> list[np.ndarray]:
    """A few tensors that have caught bugs in codecs like these."""
    rng = np.random.default_rng(7)
    normal = rng.standard_normal
    heavy = (normal(3000) ** 5).astype(np.float32).reshape(30, 100)
    sparse = normal((64, 3, 3)).astype(np.float32) * (rng.random((64, 3, 3)) < 0.05)
    odd = normal(257).astype(np.float32)
    odd[[0, 9, 256]] = [np.nan, np.inf, -0.0]
    return [
        heavy,
        sparse,
        odd,
        np.float32(2.5).reshape(()),
        np.zeros((0, 4), np.float32),
        np.zeros(33, np.float32),
        np.full((5, 7), 1e-3, np.float64),
        -np.abs(normal(100)).astype(np.float16),
        normal((16, 16)).astype(BF16),
        (normal(999) * 1e-20).astype(np.float64),
        np.array([3e38, -1.0, 1e-45], np.float32),
        *(subnormals(dtype, values) for dtype in FLOAT_DTYPES for values in ([1, 1, 1, 1], range(-40, 60))),
    ]


def subnormals(dtype: np.dtype, multiples: Iterable[int]) -> np.ndarray:
    """Multiples of the smallest number above 0."""
    return np.array(multiples, dtype) * np.array(ml_dtypes.finfo(dtype).smallest_subnormal, dtype)
