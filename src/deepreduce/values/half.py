from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .. import kernels, ragged
from ..codec import ValueCodec
from ..reader import Part, Reader
from ..reorder import Order
from ..tensor import Positions, Values
from .floats import at_least_32_bits
from .raw import RawValue


def _quiet() -> np.errstate:
    """Overflow is looked for, and a NaN that signals is just a NaN."""
    return np.errstate(over="ignore", invalid="ignore")


class _Half(ValueCodec):
    """Values rounded to a 16-bit float; sent raw where one that is finite would become infinite."""

    lossless: ClassVar[bool] = False
    wire: ClassVar[np.dtype[Any]]
    """The dtype on the wire."""

    def choose(self, values: Values) -> ValueCodec:
        return RawValue() if self._overflows(values, self._rounded(values)) else self

    def encode(self, values: Values, seed: int) -> tuple[bytes, None]:
        return RawValue().encode(self._rounded(values), seed)

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        return self._widened(RawValue().decode(part, nnz, self.wire), dtype)

    def encode_batch(self, values: Sequence[Values], seeds: Sequence[int]) -> list[tuple[ValueCodec, Part, Order | None]]:
        flat, bounds = ragged.joined(values), ragged.bounds_of(list(map(len, values)))
        rounded = self._rounded(flat)
        if self._overflows(flat, rounded):
            return super().encode_batch(values, seeds)
        return list(zip(repeat(self), ragged.cut_bytes(rounded, bounds), repeat(None)))

    def decode_batch(self, parts: Sequence[Part], counts: Sequence[int], dtype: np.dtype[Any]) -> list[Values]:
        flat = ragged.joined_elements(parts, counts, self.wire)
        if flat is None:
            return super().decode_batch(parts, counts, dtype)
        return ragged.cut(flat if flat.dtype == dtype else self._widened(flat, dtype), ragged.bounds_of(counts))

    def _rounded(self, values: Values) -> Values:
        with _quiet():
            return values.astype(self.wire)

    def _widened(self, rounded: Values, dtype: np.dtype[Any]) -> Values:
        with _quiet():
            return rounded.astype(dtype)

    def _overflows(self, values: Values, rounded: Values) -> bool:
        """Whether a finite value became infinite, here or in the dtype that it comes back in."""
        with _quiet():
            return not np.array_equal(np.isfinite(rounded.astype(values.dtype)), np.isfinite(values))

    def error_bound(self, values: Values) -> Values | float:
        """Half a unit in the last place: relative for normal numbers, absolute below them."""
        limits: Any = ml_dtypes.finfo(self.wire)  # type: ignore[no-untyped-call]
        smallest_step = float(limits.smallest_subnormal)
        return np.abs(values.astype(np.float64)) * float(limits.eps) / 2 + smallest_step

    def expected_bits(self, nnz: int) -> float:
        return 16.0 * nnz


@dataclass(frozen=True)
class FP16(_Half):
    """`fp16`: values rounded to float16. Inf and NaN go through. The error in the L2 norm is at most 2**-10 of that of the values.

    Each value of 6.1e-5 or more comes back within 2**-11 of itself; smaller ones lose digits, and those below 3e-8 become 0. Where that
    loss alone is above 2**-11 of the norm of all values, they are sent as `bf16`: of the same size, within 2**-8 of each value, with the
    range of float32. Where a finite value would become infinite, above 65,504, they are sent raw.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode(dr.parse("none/all/fp16").encode(np.float32([0.1])))
    array([0.09997559], dtype=float32)
    >>> dr.inspect(dr.parse("none/all/fp16").encode(np.float32([1e-8, 2e-8]))).spec
    'none/all/bf16'
    """

    wire: ClassVar[np.dtype[Any]] = np.dtype(np.float16)

    def choose(self, values: Values) -> ValueCodec:
        codec = super().choose(values)
        return BF16() if codec is self and self._loses_small_values(values, ragged.bounds_of([values.size])).any() else codec

    def encode_batch(self, values: Sequence[Values], seeds: Sequence[int]) -> list[tuple[ValueCodec, Part, Order | None]]:
        encoded = super().encode_batch(values, seeds)
        losing = np.flatnonzero(self._loses_small_values(ragged.joined(values), ragged.bounds_of(list(map(len, values))))).tolist()
        losing = [index for index in losing if encoded[index][0] is self]
        if losing:
            others = BF16().encode_batch([values[index] for index in losing], [seeds[index] for index in losing])
            for index, other in zip(losing, others, strict=True):
                encoded[index] = other
        return encoded

    def _rounded(self, values: Values) -> Values:
        if values.dtype != np.float32:
            return super()._rounded(values)
        return kernels.half.rounded(np.ascontiguousarray(values)).view(self.wire)

    def _widened(self, rounded: Values, dtype: np.dtype[Any]) -> Values:
        if dtype != np.float32:
            return super()._widened(rounded, dtype)
        return kernels.half.widened(rounded.view(np.uint16))

    def _overflows(self, values: Values, rounded: Values) -> bool:
        return kernels.half.overflows(values) if values.dtype == np.float32 else super()._overflows(values, rounded)

    def _loses_small_values(self, values: Values, bounds: Positions) -> NDArray[np.bool_]:
        """Whether the values between two bounds each lose more than 2**-11 of their norm below the normal numbers of float16."""
        return kernels.half.loses_small_values(at_least_32_bits(values), bounds)


@dataclass(frozen=True)
class BF16(_Half):
    """`bf16`: values rounded to bfloat16, relative error at most 2**-8, the range of float32. Inf and NaN go through.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode(dr.parse("none/all/bf16").encode(np.float32([0.1])))
    array([0.10009766], dtype=float32)
    """

    wire: ClassVar[np.dtype[Any]] = np.dtype(ml_dtypes.bfloat16)
