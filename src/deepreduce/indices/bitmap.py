from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..codec import IndexCodec
from ..errors import CorruptError
from ..reader import Reader
from ..source import Space
from ..tensor import Positions, Support


@dataclass(frozen=True)
class Bitmap(IndexCodec):
    """`bitmap`: one bit per element of the dense tensor. Lossless; best where a fifth or more of the elements is selected.

    >>> import deepreduce as dr, numpy as np
    >>> dr.inspect(dr.parse("topr:0.5/bitmap/raw").encode(np.arange(80, dtype=np.float32))).index_bytes
    10
    """

    def encode(self, selected: Support, space: Space, seed: int) -> tuple[bytes, Support]:
        flags = np.zeros(space.numel, np.bool_)
        flags[selected.positions] = True
        return np.packbits(flags, bitorder="little").tobytes(), selected

    def decode(self, part: Reader, nnz: int, space: Space) -> Positions:
        packed = part.array(np.uint8, (space.numel + 7) // 8)
        positions = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
        if positions.size != nnz:
            raise CorruptError(f"a bitmap has {positions.size} bits set, the header says {nnz}")
        return positions

    def max_bytes(self, nnz: int, space: Space) -> int:
        return (space.numel + 7) // 8

    def expected_bits(self, nnz: int, numel: int) -> float:
        return float(numel)
