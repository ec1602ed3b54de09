from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import kernels
from ..codec import IndexCodec
from ..reader import Reader, varint
from ..source import Space
from ..tensor import Positions


@dataclass(frozen=True)
class Seeded(IndexCodec):
    """`seeded`: as many positions as were kept, drawn from the seed; only the seed is sent.

    After `randomr` these are the very positions it drew. After any other sparsifier they are random ones, with their own values.

    >>> import deepreduce as dr, numpy as np
    >>> dr.inspect(dr.parse("randomr:100/seeded/raw").encode(np.ones(5000, np.float32), seed=3)).index_bytes
    1
    """

    lossless: ClassVar[bool] = False

    def encode(self, kept: Positions, space: Space, seed: int) -> tuple[bytes, Positions]:
        return varint(seed), kernels.draw.sample(space.numel, kept.size, seed)

    def decode(self, part: Reader, nnz: int, space: Space) -> Positions:
        return kernels.draw.sample(space.numel, nnz, part.varint())
