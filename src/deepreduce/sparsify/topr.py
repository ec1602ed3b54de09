from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import ClassVar

from ..source import Source, top_batch
from ..tensor import Support
from .amount import ByAmount, count_of

_NUMEL = attrgetter("space.numel")


@dataclass(frozen=True, eq=False)
class TopR(ByAmount):
    """`topr`: the largest magnitudes, exactly; ties go to the lower position. A float is a ratio, an int a count.

    NaN and Inf are always selected, even where they are more than asked for. Paper, section 2.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode(dr.parse("topr:2/raw/raw").encode(np.float32([1, -4, 2, -3])))
    array([ 0., -4.,  0., -3.], dtype=float32)
    """

    selects_nonfinite: ClassVar[bool] = True

    def select(self, source: Source, seed: int) -> Support:
        return source.top(count_of(self.amount, source.numel))

    def select_batch(self, sources: Sequence[Source], seeds: Sequence[int]) -> list[Support]:
        return top_batch(sources, list(map(count_of, repeat(self.amount), map(_NUMEL, sources))))
