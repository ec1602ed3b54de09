from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from .. import ragged
from ..codec import ValueCodec
from ..reader import Part, Reader
from ..reorder import Order
from ..tensor import Values


@dataclass(frozen=True)
class RawValue(ValueCodec):
    """`raw`: the values as they are, little-endian. Lossless.

    >>> import deepreduce as dr, numpy as np
    >>> dr.inspect(dr.parse("none/all/raw").encode(np.ones(80, np.float16))).value_bytes
    160
    """

    def encode(self, values: Values, seed: int) -> tuple[bytes, None]:
        return _little_endian(values).tobytes(), None

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        return _little_endian(part.array(f"u{dtype.itemsize}", nnz)).view(dtype)

    def encode_batch(self, values: Sequence[Values], seeds: Sequence[int]) -> list[tuple[ValueCodec, Part, Order | None]]:
        if len(values) == 1:  # may share its memory with the gradient; joined ones are a copy
            return super().encode_batch(values, seeds)
        sections = ragged.cut_bytes(ragged.joined(values), ragged.bounds_of(list(map(len, values))))
        return list(zip(repeat(self), sections, repeat(None)))

    def decode_batch(self, parts: Sequence[Part], counts: Sequence[int], dtype: np.dtype[Any]) -> list[Values]:
        flat = ragged.joined_elements(parts, counts, dtype)
        return super().decode_batch(parts, counts, dtype) if flat is None else ragged.cut(flat, ragged.bounds_of(counts))

    def expected_bits(self, nnz: int) -> float:
        return 32.0 * nnz


def _little_endian(values: Values) -> Values:
    return values if np.little_endian else values.byteswap()
