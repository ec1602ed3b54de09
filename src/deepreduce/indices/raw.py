from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..codec import IndexCodec
from ..reorder import Order
from ..source import Space
from ..sparse import Positions
from ..wire import Reader


def _key_dtype(space: Space) -> str:
    return "<u4" if space.numel <= 2**32 else "<u8"


@dataclass(frozen=True)
class RawIndex(IndexCodec):
    """`raw`: 32-bit keys (64-bit for tensors above 2**32 elements), as plain sparse formats send them.

    Lossless. Keys may stand in any order, so a value codec that sorts costs no order section.

    >>> import deepreduce as dr, numpy as np
    >>> dr.inspect(dr.parse("topr:2/raw/raw").encode(np.float32([1, -4, 2, -3]))).index_bytes
    8
    """

    def encode(self, kept: Positions, space: Space, seed: int) -> tuple[bytes, Positions]:
        return kept.astype(_key_dtype(space)).tobytes(), kept

    def decode(self, part: Reader, nnz: int, space: Space) -> Positions:
        return part.array(_key_dtype(space), nnz).astype(np.int64)

    def attach(self, index_part: bytes, support: Positions, order: Order | None, space: Space) -> tuple[bytes, bytes]:
        if order is None:
            return index_part, b""
        return self.encode(support[order.permutation], space, seed=0)[0], b""
