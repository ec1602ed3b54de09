from __future__ import annotations

from dataclasses import dataclass

from .. import kernels
from ..codec import Sparsifier
from ..source import Source
from ..tensor import Support
from .amount import check_amount, count_of, same_amount


@dataclass(frozen=True)
class RandomR(Sparsifier):
    """`randomr`: positions drawn from the seed, whatever the values. With the index codec `seeded` they cost no bytes.

    The draw depends on the size, the amount and the seed alone, and is the same on every machine. Paper, section 2.

    >>> import deepreduce as dr, numpy as np
    >>> codec = dr.parse("randomr:0.5/seeded/raw")
    >>> dr.decode_sparse(codec.encode(np.ones(8, np.float32), seed=1)).nnz
    4
    """

    amount: int | float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount(self.amount, "randomr")

    def __eq__(self, other: object) -> bool:
        return same_amount(self, other)

    def select(self, source: Source, seed: int) -> Support:
        count = count_of(self.amount, source.numel)
        return Support.trusted(kernels.draw.sample(source.numel, count, seed), source.numel)

    def expected_nnz(self, numel: int) -> int:
        return count_of(self.amount, numel)

    @property
    def density(self) -> float | None:
        return self.amount if isinstance(self.amount, float) else None

    def with_density(self, density: float) -> RandomR:
        return RandomR(float(density))
