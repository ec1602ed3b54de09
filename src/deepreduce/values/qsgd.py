from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from math import sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .. import kernels, ragged
from ..codec import LossyValueCodec, ValueCodec
from ..errors import ConfigError, CorruptError
from ..reader import Part, Reader, expect_padding
from ..reorder import Order
from ..tensor import Values
from .floats import at_least_32_bits, limits, peak, round_up
from .raw import RawValue


@dataclass(frozen=True)
class QSGD(LossyValueCodec):
    """`qsgd`: a sign and one of ``2**(bits - 1)`` levels of the norm of its group, rounded at random so that the mean is the value. Lossy.

    Unbiased: over seeds, the decoded values average to the given ones. Takes ``bits`` bits per value and 4 bytes per group of `group`
    values. With ``norm=max`` the top level is the largest magnitude of the group; with ``norm=l2`` it is the Euclidean norm, as in the
    original method, and the error on recorded gradients 3 to 8 times as large. (Alistarh et al. 2017; paper, section 6.3.)

    >>> import deepreduce as dr, numpy as np
    >>> codec = dr.parse("none/all/qsgd:bits=4,group=8")
    >>> blob = codec.encode(np.float32([-7, 3, 0, 1]), seed=0)
    >>> dr.decode(blob), dr.inspect(blob).value_bytes
    (array([-7.,  3.,  0.,  1.], dtype=float32), 6)
    """

    bits: int = 7
    group: int = 512
    norm: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.bits <= 8:
            raise ConfigError(f"bits of qsgd lie between 2 and 8, got {self.bits}")
        if not 1 <= self.group <= 2**30:
            raise ConfigError(f"a group of qsgd has 1 to 2**30 values, got {self.group}")

    @property
    def levels(self) -> int:
        """The level that stands for the whole norm."""
        return (1 << self.bits - 1) - 1

    def choose(self, values: Values) -> ValueCodec:
        """Raw where a norm would not fit float32, or a value rounded up to the next level would not fit the dtype."""
        norm = decoded = peak(values)
        if self.norm == "l2":
            norm *= sqrt(min(self.group, values.size))
            decoded += norm / self.levels
        return self if norm <= self.largest and decoded <= float(limits(values.dtype).max) else RawValue()

    def encode(self, values: Values, seed: int) -> tuple[bytes, None]:
        norms = self._norms(values)
        packed = kernels.quantise.quantise(at_least_32_bits(values), norms, self.group, self.bits, seed)
        return norms.astype("<f4").tobytes() + packed, None

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        norms = part.array("<f4", -(-nnz // self.group)).astype(np.float32, copy=False)
        if not bool(np.all((norms >= 0) & (norms <= self.largest))):
            raise CorruptError("a norm of qsgd is negative or not finite")
        packed = part.take(kernels.bits.packed_bytes(nnz, self.bits))
        expect_padding(packed, nnz * self.bits)
        out = np.empty(nnz, np.float64 if dtype.itemsize == 8 else np.float32)
        kernels.quantise.restore(packed, norms, self.group, self.bits, out)
        with np.errstate(over="ignore"):  # only in bytes that no writer made
            return out.astype(dtype, copy=False)

    def encode_batch(self, values: Sequence[Values], seeds: Sequence[int]) -> list[tuple[ValueCodec, Part, Order | None]]:
        flat, bounds = at_least_32_bits(ragged.joined(values)), ragged.bounds_of(list(map(len, values)))
        if not kernels.qsgdbatch.peak(flat) <= self._largest_peak(values[0].dtype):
            return super().encode_batch(values, seeds)
        ends = np.empty(len(values), np.int64)
        words = kernels.qsgdbatch.encode(flat, bounds, self.group, self.norm == "l2", self.bits, np.array(seeds, np.uint64), ends)
        return list(zip(repeat(self), ragged.cut_words(words, ends), repeat(None)))

    def _largest_peak(self, dtype: np.dtype[Any]) -> float:
        """A magnitude up to which `choose` never hands over."""
        return min(self.largest, float(limits(dtype).max)) / (1 if self.norm == "max" else 2 + sqrt(self.group))

    def decode_batch(self, parts: Sequence[Part], counts: Sequence[int], dtype: np.dtype[Any]) -> list[Values]:
        bounds = ragged.bounds_of(counts)
        packed, ends = ragged.joined_parts(parts)
        if packed.size < 4 * int(bounds[-1]) * self.bits // 32:  # nothing is allocated for values that cannot be there
            return super().decode_batch(parts, counts, dtype)
        out = np.empty(bounds[-1], np.float64 if dtype.itemsize == 8 else np.float32)
        if not kernels.qsgdbatch.decode(packed, ends, bounds, self.group, self.bits, self.largest, out):
            return super().decode_batch(parts, counts, dtype)  # says what is wrong
        if out.dtype != dtype:
            with np.errstate(over="ignore"):  # only in bytes that no writer made
                out = out.astype(dtype)
        return ragged.cut(out, bounds)

    def error_bound(self, values: Values) -> Values:
        """One level of the value's own group, and the rounding to the dtype."""
        rounding = limits(values.dtype)
        step = 1 / self.levels + float(rounding.eps)
        norms = self._norms(values).astype(np.float64)
        return np.repeat(norms, self.group)[: values.size] * step + float(rounding.smallest_subnormal)

    def max_bytes(self, nnz: int, dtype: np.dtype[Any]) -> int:
        return 4 * -(-nnz // self.group) + (nnz * self.bits + 7) // 8

    def _norms(self, values: Values) -> NDArray[np.float32]:
        """The norms as they travel: no value is above its own."""
        return round_up(kernels.quantise.norms(at_least_32_bits(values), self.group, self.norm == "l2"))

    def expected_bits(self, nnz: int) -> float:
        return nnz * self.bits + 32.0 * -(-nnz // self.group)
