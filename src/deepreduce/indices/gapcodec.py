from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from ..codec import IndexCodec
from ..errors import CorruptError
from ..reader import Reader
from ..source import Space
from ..tensor import Positions
from .raw import RawIndex


class GapCodec(IndexCodec):
    """A lossless codec of the distances between positions. Where none or all are kept there is nothing to write.

    It takes tensors of up to 2**56 elements; positions of larger ones go raw.
    """

    MAX_NUMEL: ClassVar[int] = 2**56

    def choose(self, kept: Positions, space: Space) -> IndexCodec:
        return self if space.numel <= self.MAX_NUMEL else RawIndex()

    def encode(self, kept: Positions, space: Space, seed: int) -> tuple[bytes, Positions]:
        return self._write(kept, space.numel) if 0 < kept.size < space.numel else b"", kept

    def decode(self, part: Reader, nnz: int, space: Space) -> Positions:
        if space.numel > self.MAX_NUMEL:
            raise CorruptError(f"gaps in a tensor of {space.numel} elements, {self.MAX_NUMEL} are allowed")
        if 0 < nnz < space.numel:
            return self._read(part, nnz, space.numel)
        return np.arange(nnz, dtype=np.int64)

    def size_bytes(self, kept: Positions, space: Space) -> int:
        """The exact size of the index section, without writing it."""
        return self._size_bytes(kept, space.numel) if 0 < kept.size < space.numel else 0

    @abstractmethod
    def _write(self, kept: Positions, numel: int) -> bytes:
        """The section for one position or more, but not all."""

    @abstractmethod
    def _read(self, part: Reader, nnz: int, numel: int) -> Positions:
        """The mirror of `_write`."""

    @abstractmethod
    def _size_bytes(self, kept: Positions, numel: int) -> int:
        """The length of what `_write` returns."""
