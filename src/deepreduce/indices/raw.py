from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from .. import ragged
from ..codec import IndexCodec
from ..reader import Part, Reader
from ..source import Space
from ..tensor import Positions, Support
from .keys import KeyCodec, key_bytes


@dataclass(frozen=True)
class RawIndex(KeyCodec):
    """`raw`: 32-bit keys (64-bit for tensors above 2**32 elements), as plain sparse formats send them.

    Lossless. Keys may stand in any order, so a value codec that sorts costs no order section.

    >>> import deepreduce as dr, numpy as np
    >>> dr.inspect(dr.parse("topr:2/raw/raw").encode(np.float32([1, -4, 2, -3]))).index_bytes
    8
    """

    def _write(self, keys: Positions, numel: int) -> bytes:
        return keys.astype(f"<u{key_bytes(numel)}").tobytes()

    def decode(self, part: Reader, nnz: int, space: Space) -> Positions:
        return part.array(f"<u{key_bytes(space.numel)}", nnz).astype(np.int64)

    def encode_batch(
        self, selected: Sequence[Support], spaces: Sequence[Space], seeds: Sequence[int]
    ) -> list[tuple[IndexCodec, Part, Support]]:
        if not _all_narrow(spaces):
            return super().encode_batch(selected, spaces, seeds)
        keys = ragged.joined([support.positions for support in selected]).astype(np.uint32)
        return list(zip(repeat(self), ragged.cut_bytes(keys, ragged.bounds_of([support.nnz for support in selected])), selected))

    def decode_batch(self, parts: Sequence[Part], counts: Sequence[int], spaces: Sequence[Space]) -> list[Support | Positions]:
        keys = ragged.joined_elements(parts, counts, np.dtype(np.uint32)) if _all_narrow(spaces) else None
        if keys is None:
            return super().decode_batch(parts, counts, spaces)
        return [*ragged.cut(keys.astype(np.int64), ragged.bounds_of(counts))]

    def expected_bits(self, nnz: int, numel: int) -> float:
        return 8.0 * key_bytes(numel) * nnz


def _all_narrow(spaces: Sequence[Space]) -> bool:
    return max(key_bytes(space.numel) for space in spaces) == 4
