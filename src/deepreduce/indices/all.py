from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..codec import IndexCodec
from ..errors import CorruptError
from ..reader import Reader
from ..source import Space
from ..tensor import Positions


@dataclass(frozen=True)
class All(IndexCodec):
    """`all`: every position, in order; no index bytes. After a sparsifier it puts the elements that were dropped back in.

    >>> import deepreduce as dr, numpy as np
    >>> dr.inspect(dr.parse("none/all/raw").encode(np.ones(80, np.float32))).index_bytes
    0
    """

    lossless: ClassVar[bool] = False

    def encode(self, kept: Positions, space: Space, seed: int) -> tuple[bytes, Positions]:
        return b"", np.arange(space.numel, dtype=np.int64)

    def decode(self, part: Reader, nnz: int, space: Space) -> Positions:
        if nnz != space.numel:
            raise CorruptError(f"index codec 'all' with {nnz} values for {space.numel} positions")
        return np.arange(nnz, dtype=np.int64)
