from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..codec import Sparsifier
from ..errors import ConfigError
from ..source import Source, above_batch
from ..tensor import Support


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """`threshold`: every magnitude of at least a fixed level, and NaN.

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode(dr.parse("threshold:2.5/raw/raw").encode(np.float32([1, -4, 2, -3])))
    array([ 0., -4.,  0., -3.], dtype=float32)
    """

    selects_nonfinite: ClassVar[bool] = True

    level: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.level < float("inf"):
            raise ConfigError(f"threshold takes a finite level of at least 0, got {self.level}")

    def select(self, source: Source, seed: int) -> Support:
        return source.above(self.level)

    def select_batch(self, sources: Sequence[Source], seeds: Sequence[int]) -> list[Support]:
        return above_batch(sources, self.level)
