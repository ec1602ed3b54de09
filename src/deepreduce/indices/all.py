from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..codec import IndexCodec
from ..errors import CorruptError
from ..reader import Reader
from ..source import Space
from ..tensor import Support


@dataclass(frozen=True)
class All(IndexCodec):
    """`all`: every position, in order; no index bytes. After a sparsifier it puts the elements that were dropped back in.

    >>> import deepreduce as dr, numpy as np
    >>> dr.inspect(dr.parse("none/all/raw").encode(np.ones(80, np.float32))).index_bytes
    0
    """

    lossless: ClassVar[bool] = False

    def encode(self, selected: Support, space: Space, seed: int) -> tuple[bytes, Support]:
        return b"", Support.all(space.numel)

    def decode(self, part: Reader, nnz: int, space: Space) -> Support:
        if nnz != space.numel:
            raise CorruptError(f"index codec 'all' with {nnz} values for {space.numel} positions")
        return Support.all(nnz)

    def expected_bits(self, nnz: int, numel: int) -> float | None:
        return 0.0 if nnz == numel else None  # else the elements that were dropped are sent too
