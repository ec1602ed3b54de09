from __future__ import annotations

from dataclasses import dataclass

from .. import kernels
from ..source import Source
from ..tensor import Support
from .amount import ByAmount, count_of


@dataclass(frozen=True, eq=False)
class RandomR(ByAmount):
    """`randomr`: positions drawn from the seed, whatever the values. With the index codec `seeded` they cost no bytes.

    The draw depends on the size, the amount and the seed alone, and is the same on every machine. Paper, section 2.

    >>> import deepreduce as dr, numpy as np
    >>> codec = dr.parse("randomr:0.5/seeded/raw")
    >>> dr.decode_sparse(codec.encode(np.ones(8, np.float32), seed=1)).nnz
    4
    """

    def select(self, source: Source, seed: int) -> Support:
        count = count_of(self.amount, source.numel)
        return Support.trusted(kernels.draw.sample(source.numel, count, seed), source.numel)
