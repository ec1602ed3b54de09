from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np

from .. import kernels
from ..codec import LossyValueCodec, ValueCodec, spelled
from ..errors import ConfigError, CorruptError
from ..reader import Reader, varint
from ..reorder import Order
from ..tensor import Values
from .raw import RawValue


class CurveCodec(LossyValueCodec):
    """Sorted values as curves: what `fitpoly` and `fitdexp` share.

    The values are sorted descending inside blocks of `block`, and each block is a positive part, zeros and a negative part. The section
    is a list of runs, each a stretch of one part with one curve through it::

        number of runs (varint) | kind and length - 1 of each run, packed in bits | coefficients of all runs (float32)
    """

    block: int
    kind_bits: ClassVar[int]
    kinds: ClassVar[int]
    """How many kinds of runs there are, from 0 on, and the bits that hold one."""

    @property
    @abstractmethod
    def polynomial_degree(self) -> int:
        """The degree of the polynomials among the runs."""

    @property
    @abstractmethod
    def smallest_curve_bytes(self) -> int:
        """What one curve takes; as few bytes of values are sent raw."""

    @abstractmethod
    def _runs(self, descending: Values) -> tuple[Values, Values, Values]:
        """Lengths, kinds and coefficients of the runs."""

    def _check_block(self) -> None:
        if not 2 <= self.block <= 2**31:
            raise ConfigError(f"values are fitted in blocks of 2 to 2**31, got {self.block}")

    def choose(self, values: Values) -> ValueCodec:
        return RawValue() if values.nbytes <= self.smallest_curve_bytes else super().choose(values)

    def encode(self, values: Values, seed: int) -> tuple[bytes, Order]:
        descending, permutation = kernels.fit.descending(values.astype(np.float32), self.block)
        lengths, kinds, coefficients = self._runs(descending)
        packed = kernels.bits.pack((lengths - 1 << self.kind_bits | kinds).astype(np.uint64), self._run_bits(values.size))
        part = varint(lengths.size) + packed + coefficients.astype("<f4").tobytes()
        return part, Order(permutation, self.block)

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        count = part.varint(limit=nnz)
        run_bits = self._run_bits(nnz)
        runs = part.packed(count, run_bits).astype(np.int64)
        lengths, kinds = (runs >> self.kind_bits) + 1, runs & ((1 << self.kind_bits) - 1)
        self._check_runs(lengths, kinds, nnz)
        terms = kernels.fit.terms(lengths, kinds, self.polynomial_degree)
        coefficients = part.array("<f4", int(terms.sum())).astype(np.float32, copy=False)
        if not np.all(np.isfinite(coefficients)):
            raise CorruptError("a coefficient is not finite")
        self._check_coefficients(kinds, terms, coefficients)
        values = kernels.fit.decode(lengths, kinds, terms, coefficients, self.block)
        limit = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
        return np.clip(values, -limit, limit, out=values).astype(dtype)

    def _run_bits(self, nnz: int) -> int:
        return max(min(self.block, nnz) - 1, 0).bit_length() + self.kind_bits

    def _check_runs(self, lengths: Values, kinds: Values, nnz: int) -> None:
        ends = lengths.cumsum()
        if int(lengths.sum()) != nnz:
            raise CorruptError(f"runs of {int(lengths.sum())} values announced, {nnz} expected")
        if np.any((ends - lengths) // self.block != (ends - 1) // self.block):
            raise CorruptError(f"a run leaves its block of {self.block} values")
        if np.any(kinds >= self.kinds):
            raise CorruptError(f"a run of kind {int(kinds.max())}, known are 0 to {self.kinds - 1}")

    def _check_coefficients(self, kinds: Values, terms: Values, coefficients: Values) -> None:
        """Refuse finite coefficients that no writer makes."""

    def error_bound(self, values: Values) -> Values | float:
        """In each sign part of a block, the square root of the summed squared distances from the mean of the part, and rounding.

        Least squares does no worse than a constant in the sum of all squared errors of the part, so no single error is larger. Typical
        errors are far smaller.
        """
        exact = values.astype(np.float64)
        parts = np.arange(values.size) // self.block * 3 + np.sign(exact).astype(np.int64) + 1
        counts = np.maximum(np.bincount(parts), 1)
        centred = exact - (np.bincount(parts, exact) / counts)[parts]
        deviation = np.sqrt(np.bincount(parts, centred * centred))
        largest = np.zeros(counts.size)
        np.maximum.at(largest, parts, np.abs(exact))
        limits: Any = ml_dtypes.finfo(values.dtype)  # type: ignore[no-untyped-call]
        steps = np.finfo(np.float32).smallest_subnormal * 8.0 + float(limits.smallest_subnormal)
        rounding = largest * (2**-20 * np.sqrt(counts) + float(limits.eps)) + steps * np.sqrt(counts)
        bound: Values = (deviation * (1.001 + float(limits.eps)) + rounding)[parts]
        return np.where(exact == 0, 0.0, bound)

    def max_bytes(self, nnz: int, dtype: np.dtype[Any]) -> int:
        return 10 + 4 * nnz + kernels.bits.packed_bytes(nnz, self._run_bits(nnz))


@dataclass(frozen=True)
class FitPoly(CurveCodec):
    """`fitpoly`: sorted values as polynomials, fitted piece by piece in blocks of `block` values (paper, section 5).

    Lossy; changes the order: ceil(log2 block) bits per value restore it, except beside `raw` keys. No value changes its sign,
    zeros stay zero, and the decoded values of a block are non-increasing where the given ones are.

    `segments` is the number of pieces for each sign: a number; `paper` for the paper's ceil(2 sqrt(M)), Remark 4's for degree 0, where M is
    the change of slope from one end to the other; or `auto`, which cuts until the relative L2 error is at most 3%, or until no piece can be
    cut that has more values than the degree. The paper's M has the unit of the values: gradients of 1e-3 get one piece whatever their
    shape, those of 1e3 far too many. `auto` does not depend on the scale, and took the fewest bytes for its error on the largest 1% of
    recorded gradients; so did blocks of 512, beside any index codec that needs the order sent.

    >>> import deepreduce as dr, numpy as np
    >>> gradient = np.random.default_rng(0).standard_normal(36864).astype(np.float32)
    >>> blob = dr.parse("topr:0.01/raw/fitpoly").encode(gradient)
    >>> dr.inspect(blob).value_bytes, dr.inspect(blob).nnz
    (52, 369)
    >>> sent, exact = dr.decode_sparse(blob), gradient[dr.decode_sparse(blob).indices]
    >>> float(np.linalg.norm(sent.values - exact) / np.linalg.norm(exact)) < 0.02
    True
    """

    segments: int | Literal["paper"] | None = None
    degree: int = spelled(5)
    block: int = 512

    kind_bits: ClassVar[int] = 2
    kinds: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.segments not in (None, "paper", *range(1, 256)):
            raise ConfigError(f"segments are 1 to 255, paper or auto (None), got {self.segments!r}")
        if not 0 <= self.degree <= 15:
            raise ConfigError(f"a degree is 0 to 15, got {self.degree}")
        self._check_block()

    @property
    def polynomial_degree(self) -> int:
        return self.degree

    @property
    def smallest_curve_bytes(self) -> int:
        return 4 * (self.degree + 1)

    def _runs(self, descending: Values) -> tuple[Values, Values, Values]:
        fit = kernels.fit
        segments = fit.TARGET if self.segments is None else fit.PAPER if self.segments == "paper" else self.segments
        return fit.encode(descending, self.block, self.degree, segments)
