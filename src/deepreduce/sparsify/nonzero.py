from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..codec import Sparsifier
from ..source import Source
from ..tensor import Support


@dataclass(frozen=True)
class NonZero(Sparsifier):
    """`nonzero`: for gradients that are sparse by themselves. Lossless by value: a negative zero is not sent, and comes back as 0.0.

    Everything else, NaN too, keeps its bits; `none` keeps those of zeros as well.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode_sparse(dr.parse("nonzero/raw/raw").encode(np.float32([0, 7, 0]))).indices
    array([1])
    """

    lossless: ClassVar[bool] = True
    selects_nonfinite: ClassVar[bool] = True

    def select(self, source: Source, seed: int) -> Support:
        return source.nonzero()
