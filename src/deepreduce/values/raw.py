from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codec import ValueCodec
from ..reader import Reader
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


def _little_endian(values: Values) -> Values:
    return values if np.little_endian else values.byteswap()
