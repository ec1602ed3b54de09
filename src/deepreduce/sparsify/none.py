from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..codec import Sparsifier
from ..source import Source
from ..tensor import Support


@dataclass(frozen=True)
class Keep(Sparsifier):
    """`none`: everything that is given: all of a dense gradient, every stored entry of a sparse one.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode_sparse(dr.parse("none/all/raw").encode(np.float32([0, 7]))).indices
    array([0, 1])
    """

    lossless: ClassVar[bool] = True
    selects_nonfinite: ClassVar[bool] = True

    def select(self, source: Source, seed: int) -> Support:
        return source.all()

    def expected_nnz(self, numel: int) -> int:
        return numel
