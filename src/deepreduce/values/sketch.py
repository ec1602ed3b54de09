from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..code_table import read_lengths, write_lengths
from ..codec import LossyValueCodec, ValueCodec
from ..errors import ConfigError
from ..reader import Reader, expect_decoded
from ..tensor import Values
from .floats import at_least_32_bits, limits, peak
from .means import mean_dtype, read_means
from .raw import RawValue

Ids = NDArray[np.uint8]


@dataclass(frozen=True)
class Sketch(LossyValueCodec):
    """`sketch`: each value as the mean of its bin; the ``2**bits`` bins hold equally many values and one sign. Lossy.

    The numbers of the bins take `bits` bits each. ``huffman=true`` codes them, which pays where many values are equal: bins of
    quantiles are used equally often. Sent raw where the means alone would take more.

    ``groups`` (a power of two, off at 0) puts the numbers into SketchML's grouped MinMaxSketch, whose keys are the indices of the values
    in the list. Each value names its group of bins exactly; inside, its bin is read from `rows` hashed cells of which there
    are `columns` per value and row: with 8 groups of 2**8 bins, 3 + 2 * 0.2 * 5 = 5 bits per value. Where cells are shared, a value
    becomes one nearer to zero, but stays in its group. (Jiang et al. 2018; paper, sections 6.3 and 7, which leaves the groups out.)

    >>> import deepreduce as dr, numpy as np
    >>> values = np.linspace(-1, 1, 1024, dtype=np.float32)
    >>> blob = dr.parse("none/all/sketch:bits=4").encode(values)
    >>> dr.inspect(blob).value_bytes, len(set(dr.decode(blob)))
    (576, 16)
    """

    bits: int = 6
    huffman: bool = False
    groups: int = 0
    rows: int = 2
    columns: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= 8:
            raise ConfigError(f"bits of sketch lie between 1 and 8, got {self.bits}")
        if self.groups and not (2 <= self.groups < self.bins and self.groups.bit_count() == 1):
            raise ConfigError(f"groups of sketch:{self.bits} are 0 or a power of two from 2 to {self.bins // 2}, got {self.groups}")
        if self.groups and self.huffman:
            raise ConfigError("huffman codes the numbers of the bins, which are not sent where there are groups; set one of the two")
        if not 1 <= self.rows <= 8:
            raise ConfigError(f"rows of sketch lie between 1 and 8, got {self.rows}")
        if not 0 < self.columns <= 1:
            raise ConfigError(f"columns of sketch are a share of the values in (0, 1], got {self.columns}")

    @property
    def bins(self) -> int:
        """The number of bins."""
        return 1 << self.bits

    @property
    def group_size(self) -> int:
        """Bins in a group; each is its own where there are no groups."""
        return self.bins // self.groups if self.groups else 1

    def choose(self, values: Values) -> ValueCodec:
        table_bytes = self.bins * mean_dtype(values.dtype).itemsize
        packed_bytes = kernels.bits.packed_bytes(values.size, self.bits)
        fits = peak(values) <= self.largest and table_bytes + packed_bytes < values.nbytes
        return self if fits else RawValue()

    def encode(self, values: Values, seed: int) -> tuple[bytes, None]:
        ids, means = self._quantise(values)
        return RawValue().encode(means, seed)[0] + self._encode_ids(ids), None

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        means = read_means(part, self.bins, dtype)
        values: Values = means[self._decode_ids(part, nnz)]
        return values

    def error_bound(self, values: Values) -> Values:
        """The width of the value's bin (of its group, where there are groups), and the rounding of the means to float32."""
        exact = values.astype(np.float64)
        groups = self._quantise(values)[0] // self.group_size
        low, high = np.full(self.bins, np.inf), np.full(self.bins, -np.inf)
        np.minimum.at(low, groups, exact)
        np.maximum.at(high, groups, exact)
        rounding = float(limits(np.dtype(np.float32)).eps) * np.abs(exact) + float(limits(np.dtype(np.float32)).smallest_subnormal)
        widths: Values = (high - low)[groups]
        return widths + rounding

    def _quantise(self, values: Values) -> tuple[Ids, Values]:
        """The bin of each value, and the means. Bins are numbered away from zero: first those of values that are not negative."""
        numbers = at_least_32_bits(values)
        edges, negative = _edges(np.sort(numbers), self.bins, self.group_size)
        rising = kernels.sketch.assign(numbers, edges)
        outward = np.r_[np.arange(negative, self.bins), np.arange(negative - 1, -1, -1)]
        number_of = np.argsort(outward).astype(np.uint8)
        means = kernels.sketch.means(numbers, rising, self.bins)[outward]
        return number_of[rising], means.astype(mean_dtype(values.dtype))

    def _encode_ids(self, ids: Ids) -> bytes:
        if self.groups:
            return self._encode_groups(ids)
        if not self.huffman:
            return kernels.bits.pack(ids, self.bits)
        lengths = kernels.huffman.code_lengths(np.bincount(ids, minlength=self.bins))
        return write_lengths(lengths) + kernels.huffman.encode(ids.astype(np.uint16), lengths)

    def _decode_ids(self, part: Reader, nnz: int) -> NDArray[Any]:
        if self.groups:
            return self._decode_groups(part, nnz)
        if not self.huffman:
            return part.packed(nnz, self.bits, np.uint8)
        lengths = read_lengths(part, self.bins)
        packed = part.rest()
        ids, code = kernels.huffman.decode(packed, nnz, *kernels.huffman.table_of(lengths))
        expect_decoded(code, f"{nnz} code words in {len(packed)} bytes")
        return ids

    def _encode_groups(self, ids: Ids) -> bytes:
        groups, inside = ids // np.uint8(self.group_size), ids % np.uint8(self.group_size)
        cells = kernels.sketch.minmax_insert(groups, inside, self.groups, self.rows, self.columns, self.group_size - 1)
        packed = kernels.bits.pack(groups, self.groups.bit_length() - 1)
        return packed + kernels.bits.pack(cells, self.group_size.bit_length() - 1)

    def _decode_groups(self, part: Reader, nnz: int) -> NDArray[Any]:
        groups = part.packed(nnz, self.groups.bit_length() - 1, np.uint8)
        count = kernels.sketch.minmax_cells(groups, self.groups, self.rows, self.columns)
        cells = part.packed(count, self.group_size.bit_length() - 1, np.uint8)
        inside = kernels.sketch.minmax_query(groups, cells, self.groups, self.rows, self.columns)
        return groups * np.uint8(self.group_size) + inside


def _edges(rising: Values, bins: int, group_size: int) -> tuple[Values, int]:
    """The least value of each bin but the first, and how many bins are for negative values.

    No bin and no group has both signs: a value must not come back with the other one.
    """
    zero = int(np.searchsorted(rising, 0))
    negative = group_size * round(zero / max(rising.size, 1) * (bins // group_size))
    if 0 < zero < rising.size:
        negative = min(max(negative, group_size), bins - group_size)
    below = _quantiles(rising[:zero], negative)
    above = _quantiles(rising[zero:], bins - negative)
    between = np.zeros(int(0 < negative < bins), rising.dtype)
    return np.concatenate((below, between, above)), negative


def _quantiles(rising: Values, parts: int) -> Values:
    """The values that begin all but the first of `parts` equal parts; zeros where there are no values.

    A value that is so frequent that two parts would begin with it has a part of its own: the later one begins with the next value.
    """
    first = np.arange(1, parts) * rising.size // max(parts, 1)
    if not rising.size:
        return np.zeros(first.size, rising.dtype)
    starts = rising[first]
    nexts = rising[np.minimum(np.searchsorted(rising, starts, side="right"), rising.size - 1)]
    return np.where(starts == np.concatenate((rising[:1], starts[:-1])), nexts, starts)
