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

Numbers = NDArray[np.uint64]

_PARAMETER_BITS = 6
_ONE_BLOCK = 1 << _PARAMETER_BITS  # a first byte below this is the only parameter; from here on it tells the size of a block
_BLOCK_SHIFTS = (5, 6, 8, 10)


@dataclass(frozen=True)
class Rice(BatchedGapCodec):
    """`rice`: Golomb-Rice codes of the gaps between positions. Lossless; 0.03 to 0.09 bits per index above the bound if uniform.

    One parameter serves all gaps, or every block has its own where that is smaller.

    >>> import deepreduce as dr, numpy as np
    >>> blob = dr.parse("randomr:0.01/rice/raw").encode(np.ones(1_000_000, np.float32))
    >>> 8 * dr.inspect(blob).index_bytes / 10_000
    8.108
    """

    def _write(self, positions: Positions, numel: int) -> bytes:
        gaps = kernels.gaps.between(positions)
        return write(gaps, plan(gaps))

    def _read(self, part: Reader, nnz: int, numel: int) -> Positions:
        view = part.rest()
        positions, used_bytes = read(view, nnz, numel)
        expect_all_used(view, used_bytes)
        return positions

    def _write_batch(self, positions: Positions, numels: Positions, bounds: Positions, ends: Positions) -> Numbers:
        return kernels.ricebatch.encode(positions, bounds, ends)

    def _read_batch(self, packed: NDArray[np.uint8], ends: Positions, numels: Positions, bounds: Positions, out: Numbers) -> bool:
        return kernels.ricebatch.decode(packed, ends, numels, bounds, out)

    def _size_bytes(self, positions: Positions, numel: int, growth: float) -> float:
        return growth * plan(kernels.gaps.between(positions)).size_bytes

    def expected_bits(self, nnz: int, numel: int) -> float:
        return entropy_bits(nnz, numel)


# Numbers as Rice codes: here the gaps, in `rle` the lengths of runs


@dataclass(frozen=True, eq=False)
class RicePlan:
    """How `count` numbers are coded: parameters[b] is that of block b. `block_shift` is None where all are one block."""

    count: int
    block_shift: int | None
    parameters: NDArray[np.uint8]
    low_bits: int
    unary_bits: int

    @property
    def block(self) -> int:
        """Numbers in a block."""
        return self.count if self.block_shift is None else 1 << self.block_shift

    @property
    def size_bytes(self) -> int:
        """The exact size of what `write` returns."""
        table_bits = 0 if self.block_shift is None else _PARAMETER_BITS * self.parameters.size
        return 1 + (table_bits + 7) // 8 + (self.low_bits + self.unary_bits + 7) // 8


def plan(numbers: Numbers) -> RicePlan:
    """The smallest of one parameter for all and one for each block, for blocks of a few sizes. There must be a number."""
    shift, parameters, low_bits, unary_bits = kernels.rice.plan(numbers)
    return RicePlan(numbers.size, shift or None, parameters, low_bits, unary_bits)


def write(numbers: Numbers, plan: RicePlan) -> bytes:
    """The parameters, the low bits of all numbers, and the rest of each in unary.

    >>> numbers = np.uint64([5, 2])
    >>> write(numbers, plan(numbers)).hex()
    '0151'
    """
    size_bits = plan.low_bits + plan.unary_bits
    words = kernels.bits.zero_words(size_bits)
    kernels.rice.pack(numbers, plan.parameters, plan.block, plan.low_bits, words)
    return _front(plan) + kernels.bits.to_bytes(words, size_bits)


def _front(plan: RicePlan) -> bytes:
    if plan.block_shift is None:
        return bytes((int(plan.parameters[0]),))
    return bytes((_ONE_BLOCK + plan.block_shift,)) + kernels.bits.pack(plan.parameters, _PARAMETER_BITS)


def read(view: memoryview, count: int, limit: int) -> tuple[Positions, int]:
    """The running sums of (number + 1), less 1, and the bytes that the numbers took. All sums must be below `limit`.

    >>> read(memoryview(bytes.fromhex("0151")), 2, 10)
    (array([5, 8]), 2)
    """
    if count > 8 * len(view):
        raise TruncatedError(f"{count} Rice codes in {len(view)} bytes")
    part = Reader(view)
    block, parameters = _read_front(part, count)
    if int(parameters.max()) > kernels.gaps.MAX_WIDTH_BITS:
        raise CorruptError(f"Rice parameter {parameters.max()}, {kernels.gaps.MAX_WIDTH_BITS} is the highest")
    front_bytes = part.offset
    low_bits = block * int(parameters.sum(dtype=np.int64)) - (parameters.size * block - count) * int(parameters[-1])
    packed = part.rest()
    if low_bits > 8 * len(packed):
        raise TruncatedError(f"{low_bits} low bits of Rice codes in {len(packed)} bytes")
    sums = np.empty(count, np.uint64)
    used_bits = kernels.rice.unpack(kernels.gaps.padded(packed), parameters, block, low_bits, limit, sums)
    expect_decoded(used_bits, f"{count} Rice codes that add up to less than {limit} in {len(packed)} bytes")
    used_bytes = (used_bits + 7) // 8
    expect_padding(packed[:used_bytes], used_bits)
    return sums.view(np.int64), front_bytes + used_bytes


def expect_all_used(view: memoryview, used_bytes: int) -> None:
    """Refuse bytes after the last code."""
    if used_bytes != len(view):
        raise CorruptError(f"Rice codes end after {used_bytes} of {len(view)} bytes")


def _read_front(part: Reader, count: int) -> tuple[int, NDArray[np.uint8]]:
    first = part.byte()
    if first < _ONE_BLOCK:
        return count, np.array([first], np.uint8)
    if first - _ONE_BLOCK not in _BLOCK_SHIFTS:
        raise CorruptError(f"Rice codes begin with {first}, which is no parameter and no block size")
    block = 1 << first - _ONE_BLOCK
    blocks = -(-count // block)
    return block, part.packed(blocks, _PARAMETER_BITS, np.uint8)
