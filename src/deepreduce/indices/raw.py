from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..reader import Reader
from ..source import Space
from ..tensor import Positions
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
