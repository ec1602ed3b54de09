from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import kernels
from ..errors import CorruptError
from ..reader import Reader, varint
from ..tensor import Positions
from . import rice
from .gapcodec import GapCodec
from .rice import Numbers


@dataclass(frozen=True)
class RLE(GapCodec):
    """`rle`: the lengths of the runs of zeros and of ones in the bitmap. Lossless; best where whole rows are selected.

    Lengths are counted in their greatest common divisor (the length of a row, for whole rows) and written as Rice codes, those of
    zeros and those of ones each with their own parameters. Sections 2 and 11 of the paper.

    >>> import deepreduce as dr, numpy as np
    >>> rows = np.zeros((1000, 64), np.float32)
    >>> rows[[3, 40, 800]] = 1
    >>> dr.inspect(dr.parse("nonzero/rle/raw").encode(rows)).index_bytes
    9
    """

    def _write(self, positions: Positions, numel: int) -> bytes:
        unit, zeros, ones = _runs(positions)
        return varint(unit) + varint(ones.size) + rice.write(zeros, rice.plan(zeros)) + rice.write(ones, rice.plan(ones))

    def _read(self, part: Reader, nnz: int, numel: int) -> Positions:
        unit = part.varint(limit=nnz)
        if unit == 0 or nnz % unit:
            raise CorruptError(f"runs in units of {unit} for {nnz} positions")
        count = part.varint(limit=nnz // unit)
        if count == 0:
            raise CorruptError(f"no run for {nnz} positions")
        view = part.rest()
        zeros_before, zeros_bytes = rice.read(view, count, numel // unit)
        ones_until, ones_bytes = rice.read(view[zeros_bytes:], count, nnz // unit)
        rice.expect_all_used(view, zeros_bytes + ones_bytes)
        ones_until += 1
        if int(ones_until[-1]) * unit != nnz or int(zeros_before[-1]) * unit + nnz > numel:
            raise CorruptError(f"runs that do not hold {nnz} of {numel} positions")
        positions = np.empty(nnz, np.int64)
        kernels.runs.fill(zeros_before, ones_until, unit, positions)
        return positions

    def _size_bytes(self, positions: Positions, numel: int, growth: float) -> float:
        unit, zeros, ones = _runs(positions)
        return growth * (len(varint(unit) + varint(ones.size)) + rice.plan(zeros).size_bytes + rice.plan(ones).size_bytes)


def _runs(positions: Positions) -> tuple[int, Numbers, Numbers]:
    """The unit, and the runs of zeros and of ones in it: less 1, as none is empty, but for the first one of zeros."""
    zeros, ones = kernels.runs.split(positions)
    unit = int(kernels.runs.common_divisor(zeros, ones))
    if unit > 1:
        zeros, ones = zeros // unit, ones // unit
    ones -= 1
    zeros[1:] -= 1
    return unit, zeros.view(np.uint64), ones.view(np.uint64)
