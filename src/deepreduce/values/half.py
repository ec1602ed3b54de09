from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from ..codec import ValueCodec
from ..reader import Reader
from ..tensor import Values
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
        with _quiet():
            finite = np.isfinite(values.astype(self.wire).astype(values.dtype))
        return self if bool(np.all(finite == np.isfinite(values))) else RawValue()

    def encode(self, values: Values, seed: int) -> tuple[bytes, None]:
        with _quiet():
            return RawValue().encode(values.astype(self.wire), seed)

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        with _quiet():
            return RawValue().decode(part, nnz, self.wire).astype(dtype)

    def error_bound(self, values: Values) -> Values | float:
        """Half a unit in the last place: relative for normal numbers, absolute below them."""
        limits: Any = ml_dtypes.finfo(self.wire)  # type: ignore[no-untyped-call]
        smallest_step = float(limits.smallest_subnormal)
        return np.abs(values.astype(np.float64)) * float(limits.eps) / 2 + smallest_step


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
        return BF16().choose(values) if codec is self and self._loses_small_values(values) else codec

    def _loses_small_values(self, values: Values) -> bool:
        limits: Any = ml_dtypes.finfo(self.wire)  # type: ignore[no-untyped-call]
        small = values[np.abs(values) < float(limits.smallest_normal)].astype(np.float64)
        if not small.size:
            return False
        lost = small - small.astype(self.wire).astype(np.float64)
        finite = values[np.isfinite(values)].astype(np.float64)
        return float(np.linalg.norm(lost)) > float(np.linalg.norm(finite)) * float(limits.eps) / 2


@dataclass(frozen=True)
class BF16(_Half):
    """`bf16`: values rounded to bfloat16, relative error at most 2**-8, the range of float32. Inf and NaN go through.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode(dr.parse("none/all/bf16").encode(np.float32([0.1])))
    array([0.10009766], dtype=float32)
    """

    wire: ClassVar[np.dtype[Any]] = np.dtype(ml_dtypes.bfloat16)
