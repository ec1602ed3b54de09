from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import kernels
from ..codec import IndexCodec
from ..reader import Reader, varint
from ..source import Space
from ..tensor import Support


@dataclass(frozen=True)
class Seeded(IndexCodec):
    """`seeded`: as many positions as were selected, drawn from the seed; only the seed is sent.

    After `randomr` these are the very positions it drew. After any other sparsifier they are random ones, with their own values.

    >>> import deepreduce as dr, numpy as np
    >>> dr.inspect(dr.parse("randomr:100/seeded/raw").encode(np.ones(5000, np.float32), seed=3)).index_bytes
    1
    """

    lossless: ClassVar[bool] = False

    def encode(self, selected: Support, space: Space, seed: int) -> tuple[bytes, Support]:
        return varint(seed), _drawn(space.numel, selected.nnz, seed)

    def decode(self, part: Reader, nnz: int, space: Space) -> Support:
        return _drawn(space.numel, nnz, part.varint())

    def expected_bits(self, nnz: int, numel: int) -> float:
        return 0.0


def _drawn(numel: int, count: int, seed: int) -> Support:
    return Support.trusted(kernels.draw.sample(numel, count, seed), numel)
