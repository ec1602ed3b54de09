from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from ..codec import IndexCodec
from ..errors import CorruptError
from ..reader import Reader
from ..source import Space
from ..tensor import Positions, Support
from .raw import RawIndex


class GapCodec(IndexCodec):
    """A lossless codec of the distances between positions. Where none or all are selected there is nothing to write.

    It takes tensors of up to 2**56 elements; positions of larger ones go raw.
    """

    MAX_NUMEL: ClassVar[int] = 2**56

    def choose(self, selected: Support, space: Space) -> IndexCodec:
        return self if space.numel <= self.MAX_NUMEL else RawIndex()

    def encode(self, selected: Support, space: Space, seed: int) -> tuple[bytes, Support]:
        return b"" if selected.nnz in (0, selected.numel) else self._write(selected.positions, space.numel), selected

    def decode(self, part: Reader, nnz: int, space: Space) -> Support:
        if space.numel > self.MAX_NUMEL:
            raise CorruptError(f"gaps in a tensor of {space.numel} elements, {self.MAX_NUMEL} are allowed")
        if 0 < nnz < space.numel:
            return Support.trusted(self._read(part, nnz, space.numel), space.numel)
        return Support.all(nnz) if nnz else Support.none(space.numel)

    def size_bytes(self, selected: Support, space: Space) -> int:
        """The exact size of the index section, without writing it."""
        return 0 if selected.nnz in (0, selected.numel) else self._size_bytes(selected.positions, space.numel)

    @abstractmethod
    def _write(self, positions: Positions, numel: int) -> bytes:
        """The section for one position or more, but not all."""

    @abstractmethod
    def _read(self, part: Reader, nnz: int, numel: int) -> Positions:
        """The mirror of `_write`: positions that increase and lie below `numel`, whatever the bytes."""

    @abstractmethod
    def _size_bytes(self, positions: Positions, numel: int) -> int:
        """The length of what `_write` returns."""
