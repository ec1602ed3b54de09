from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..codec import Sparsifier
from ..errors import ConfigError
from ..source import Source, chunk_top_batch
from ..tensor import Support


@dataclass(frozen=True)
class ChunkTopR(Sparsifier):
    """`chunktopr`: the `count` largest magnitudes of every `chunk` consecutive elements, as SparseLoCo does (64 of 4,096).

    >>> import deepreduce as dr, numpy as np
    >>> dr.decode(dr.parse("chunktopr:1,chunk=2/raw/raw").encode(np.float32([1, -4, 2, -3])))
    array([ 0., -4.,  0., -3.], dtype=float32)
    """

    selects_nonfinite: ClassVar[bool] = True

    count: int = 64
    chunk: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.count <= self.chunk < 2**31:
            raise ConfigError(f"chunktopr takes 1 <= count <= chunk < 2**31, got count {self.count} and chunk {self.chunk}")

    def select(self, source: Source, seed: int) -> Support:
        return source.chunk_top(self.chunk, self.count)

    def select_batch(self, sources: Sequence[Source], seeds: Sequence[int]) -> list[Support]:
        return chunk_top_batch(sources, self.chunk, self.count)

    def expected_nnz(self, numel: int) -> int:
        whole_chunks, rest = divmod(numel, self.chunk)
        return whole_chunks * self.count + min(rest, self.count)

    @property
    def density(self) -> float:
        return self.count / self.chunk

    def with_density(self, density: float) -> ChunkTopR:
        return replace(self, count=round(density * self.chunk))
