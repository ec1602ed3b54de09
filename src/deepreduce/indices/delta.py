from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..errors import CorruptError, TruncatedError
from ..reader import Reader, expect_decoded, expect_padding
from ..tensor import Positions
from .entropy import entropy_bits
from .gapcodec import BatchedGapCodec


@dataclass(frozen=True)
class Delta(BatchedGapCodec):
    """`delta`: the gaps between positions, in blocks of 64, each block as wide as its widest gap. Lossless; the fastest to decode.

    About 1.3 bits per index above the bound for uniform supports.

    >>> import deepreduce as dr, numpy as np
    >>> dr.inspect(dr.parse("topr:0.01/delta/raw").encode(np.arange(100_000, dtype=np.float32))).index_bytes
    146
    """

    def _write(self, positions: Positions, numel: int) -> bytes:
        gaps = kernels.gaps.between(positions)
        widths = kernels.gaps.widths(gaps)
        width_bits = _width_bits(numel)
        size_bits = widths.size * width_bits + kernels.gaps.packed_bits(widths, positions.size)
        words = kernels.bits.zero_words(size_bits)
        kernels.gaps.pack(gaps, widths, width_bits, words)
        return kernels.bits.to_bytes(words, size_bits)

    def _read(self, part: Reader, nnz: int, numel: int) -> Positions:
        packed = part.rest()
        blocks, width_bits, size_bits = -(-nnz // kernels.gaps.BLOCK), _width_bits(numel), 8 * len(packed)
        if blocks * width_bits > size_bits:
            raise TruncatedError(f"the widths of {blocks} blocks of gaps in {len(packed)} bytes")
        positions = np.empty(nnz, np.uint64)
        used_bits = kernels.gaps.unpack(kernels.gaps.padded(packed), size_bits, width_bits, numel, positions)
        expect_decoded(used_bits, f"{nnz} gaps among {numel} positions in {len(packed)} bytes")
        if (used_bits + 7) // 8 != len(packed):
            raise CorruptError(f"gaps end after {(used_bits + 7) // 8} of {len(packed)} bytes")
        expect_padding(packed, used_bits)
        return positions.view(np.int64)

    def _write_batch(self, positions: Positions, numels: Positions, bounds: Positions, ends: Positions) -> NDArray[np.uint64]:
        return kernels.deltabatch.encode(positions, numels, bounds, ends)

    def _read_batch(
        self, packed: NDArray[np.uint8], ends: Positions, numels: Positions, bounds: Positions, out: NDArray[np.uint64]
    ) -> bool:
        return kernels.deltabatch.decode(packed, ends, numels, bounds, out)

    def _size_bytes(self, positions: Positions, numel: int, growth: float) -> float:
        widths = kernels.gaps.widths(kernels.gaps.between(positions))
        return growth * ((widths.size * _width_bits(numel) + kernels.gaps.packed_bits(widths, positions.size) + 7) // 8)

    def expected_bits(self, nnz: int, numel: int) -> float:
        return entropy_bits(nnz, numel)


def _width_bits(numel: int) -> int:
    """Bits for the width of a block: no gap is wider than the last position."""
    return (numel - 1).bit_length().bit_length()
