from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import ragged
from ..codec import IndexCodec
from ..errors import CorruptError
from ..reader import Part, Reader
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

    def size_bytes(self, selected: Support, space: Space, growth: float = 1) -> float:
        """The size of the index section without writing it; about that of `growth` times as many positions of the same kind."""
        return 0 if selected.nnz in (0, selected.numel) else self._size_bytes(selected.positions, space.numel, growth)

    @abstractmethod
    def _write(self, positions: Positions, numel: int) -> bytes:
        """The section for one position or more, but not all."""

    @abstractmethod
    def _read(self, part: Reader, nnz: int, numel: int) -> Positions:
        """The mirror of `_write`: positions that increase and lie below `numel`, whatever the bytes."""

    @abstractmethod
    def _size_bytes(self, positions: Positions, numel: int, growth: float) -> float:
        """Return the bytes that `_write` would take, about those of `growth` times as many positions like these."""


class BatchedGapCodec(GapCodec):
    """A codec of gaps whose kernels take the tensors of a message together."""

    def encode_batch(
        self, selected: Sequence[Support], spaces: Sequence[Space], seeds: Sequence[int]
    ) -> list[tuple[IndexCodec, Part, Support]]:
        written: list[Positions] = []
        for support in selected:
            if support.numel > self.MAX_NUMEL:
                return super().encode_batch(selected, spaces, seeds)
            written.append(_NONE if support.nnz == support.numel else support.positions)
        ends = np.empty(len(written), np.int64)
        numels = np.array(list(map(_NUMEL, selected)))
        words = self._write_batch(ragged.joined(written), numels, ragged.bounds_of(list(map(len, written))), ends)
        return list(zip(repeat(self), ragged.cut_words(words, ends), selected))

    def decode_batch(self, parts: Sequence[Part], counts: Sequence[int], spaces: Sequence[Space]) -> list[Support | Positions]:
        numels = list(map(_NUMEL, spaces))
        if max(numels) > self.MAX_NUMEL:
            return super().decode_batch(parts, counts, spaces)
        lengths = np.array(counts)
        lengths[lengths == numels] = 0
        bounds = ragged.bounds_of(lengths)
        packed, ends = ragged.joined_parts(parts)
        if bounds[-1] > 8 * packed.size:  # nothing is allocated for positions that cannot be there
            return super().decode_batch(parts, counts, spaces)
        numbers = np.empty(bounds[-1], np.uint64)
        if not self._read_batch(packed, ends, np.array(numels), bounds, numbers):
            return super().decode_batch(parts, counts, spaces)  # says what is wrong
        positions = numbers.view(np.int64)
        own: Iterable[Positions | None] = ragged.cut(positions, bounds)
        if counts != lengths.tolist():
            own = [None if nnz == numel else part for nnz, numel, part in zip(counts, numels, own, strict=True)]
        return list(map(Support.trusted, own, numels))

    @abstractmethod
    def _write_batch(self, positions: Positions, numels: Positions, bounds: Positions, ends: Positions) -> NDArray[np.uint64]:
        """The sections of the positions between two bounds each, one after another; where each ends, in bytes, goes to `ends`."""

    @abstractmethod
    def _read_batch(
        self, packed: NDArray[np.uint8], ends: Positions, numels: Positions, bounds: Positions, out: NDArray[np.uint64]
    ) -> bool:
        """The mirror of `_write_batch`; whether the sections are as a writer makes them."""


_NONE = np.empty(0, np.int64)
_NUMEL = attrgetter("numel")
