from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import kernels
from ..codec import LossyValueCodec, ValueCodec
from ..errors import ConfigError, CorruptError
from ..reader import Reader
from ..tensor import Values
from .floats import at_least_32_bits, limits, peak, round_up
from .raw import RawValue


@dataclass(frozen=True)
class ThreeLC(LossyValueCodec):
    """`threelc`: every value as -M, 0 or M, with M = s times the largest magnitude. Lossy and biased: meant for error feedback.

    Five digits go in a byte (1.6 bits per value), and up to 14 bytes of zeros in one (0.11 bits per value at best). A larger `s` gives more
    zeros. 3LC is made for dense tensors: ``none/all/threelc:s=1``. (Lim et al. 2019; paper, section 6.3.)

    The five digits are neighbours, where 3LC takes one from each fifth of the tensor: large gradients stand together, so that more
    bytes are all zero (on a ResNet-20 at s = 1: 0.16 instead of 0.20 bits per value).

    >>> import deepreduce as dr, numpy as np
    >>> blob = dr.parse("none/all/threelc:s=1").encode(np.float32([0.6, -1.0, 0.4, 0.0]))
    >>> dr.decode(blob), dr.inspect(blob).value_bytes
    (array([ 1., -1.,  0.,  0.], dtype=float32), 5)
    """

    s: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.s < 2:
            raise ConfigError(f"the sparsity multiplier s of threelc lies in [1, 2), got {self.s}")

    def choose(self, values: Values) -> ValueCodec:
        """Raw where M would not fit float32 or the dtype of the values."""
        return self if self._scale(values) <= min(self.largest, float(limits(values.dtype).max)) else RawValue()

    def encode(self, values: Values, seed: int) -> tuple[bytes, None]:
        scale = self._scale(values)
        digits = kernels.ternary.digits(at_least_32_bits(values), scale)
        return np.array(scale, "<f4").tobytes() + kernels.ternary.pack(digits), None

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        scale = part.array("<f4", 1).astype(np.float32)
        if not 0 <= scale[0] < np.inf:
            raise CorruptError(f"values of scale {scale[0]}")
        digits = kernels.ternary.unpack(part.rest(), nnz)
        if digits is None:
            raise CorruptError(f"the digits are not those of {nnz} values")
        with np.errstate(over="ignore"):  # only in bytes that no writer made
            return np.concatenate((-scale, np.zeros(1, np.float32), scale)).astype(dtype)[digits + 1]

    def error_bound(self, values: Values) -> float:
        """Half of M, and the rounding of M to the dtype."""
        rounding = limits(values.dtype)
        return self._scale(values) * (0.5 + float(rounding.eps)) + float(rounding.smallest_subnormal)

    def max_bytes(self, nnz: int, dtype: np.dtype[Any]) -> int:
        return 4 + -(-nnz // 5)

    def _scale(self, values: Values) -> float:
        """M as it travels; infinite where it is too large, NaN where a value is."""
        return float(round_up(np.array(peak(values) * self.s)))
