from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import kernels
from ..codec import LossyValueCodec, ValueCodec
from ..errors import ConfigError
from ..reader import Reader
from ..tensor import Values
from .floats import at_least_32_bits, limits, peak
from .means import mean_dtype, read_means
from .raw import RawValue

_SAMPLE = 1 << 16
_ROUNDS = 16


@dataclass(frozen=True)
class Lloyd(LossyValueCodec):
    """`lloyd`: each value as the nearest of ``2**bits`` levels, which are fitted for the least squared error. Lossy.

    Takes `bits` bits per value, and 2 or 4 bytes per level. Made for dense tensors at very few bits, with error feedback:
    ``none/all/lloyd:2``. The levels are those of Lloyd's algorithm on evenly spaced values of the tensor, and then the means of what is
    nearest to them. A value may come back with the other sign. (Lloyd 1982; Max 1960.)

    >>> import deepreduce as dr, numpy as np
    >>> blob = dr.parse("none/all/lloyd:1").encode(np.float32([-3, 1, -2, 2, 3, -1] * 4))
    >>> dr.decode(blob)[:6], dr.inspect(blob).value_bytes
    (array([-2.,  2., -2.,  2.,  2., -2.], dtype=float32), 11)
    """

    bits: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= 8:
            raise ConfigError(f"bits of lloyd lie between 1 and 8, got {self.bits}")

    @property
    def levels(self) -> int:
        """The number of levels."""
        return 1 << self.bits

    def choose(self, values: Values) -> ValueCodec:
        """Raw where the levels alone would take more, or do not fit float32."""
        size_bytes = self.levels * mean_dtype(values.dtype).itemsize + kernels.bits.packed_bytes(values.size, self.bits)
        return self if peak(values) <= self.largest and size_bytes < values.nbytes else RawValue()

    def encode(self, values: Values, seed: int) -> tuple[bytes, None]:
        numbers = at_least_32_bits(values)
        ids = self._nearest(numbers)
        means = kernels.sketch.means(numbers, ids, self.levels).astype(mean_dtype(values.dtype))
        return RawValue().encode(means, seed)[0] + kernels.bits.pack(ids, self.bits), None

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        means = read_means(part, self.levels, dtype)
        patterns = kernels.sketch.look_up(means.view(f"u{means.itemsize}"), part.packed(nnz, self.bits, np.uint8))
        return patterns.view(means.dtype)

    def error_bound(self, values: Values) -> Values:
        """The distance between the smallest and the largest value of the same level, and the rounding of the levels to float32."""
        exact, ids = values.astype(np.float64), self._nearest(at_least_32_bits(values))
        low, high = np.full(self.levels, np.inf), np.full(self.levels, -np.inf)
        np.minimum.at(low, ids, exact)
        np.maximum.at(high, ids, exact)
        rounding = float(limits(np.dtype(np.float32)).eps) * np.abs(exact) + float(limits(np.dtype(np.float32)).smallest_subnormal)
        widths: Values = (high - low)[ids]
        return widths + rounding

    def _nearest(self, numbers: Values) -> Any:
        """The number of the level of each value; levels rise."""
        sample = numbers[:: numbers.size // _SAMPLE | 1]  # an odd stride meets all columns of most tensors
        return kernels.sketch.assign(numbers, kernels.lloyd.edges(np.sort(sample), self.levels, _ROUNDS).astype(numbers.dtype))

    def expected_bits(self, nnz: int) -> float:
        return min(nnz * self.bits + 32.0 * self.levels, 32.0 * nnz)
