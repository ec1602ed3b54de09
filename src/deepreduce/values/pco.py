from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .. import pcodec_stream
from ..codec import ValueCodec
from ..errors import ConfigError
from ..reader import Reader
from ..tensor import Values

if TYPE_CHECKING:
    from pcodec import ChunkConfig


@dataclass(frozen=True)
class PcoValue(ValueCodec):
    """`pco`: the values as the pcodec package codes them. Lossless: every bit comes back, those of NaN and of -0 too.

    It finds what float values have in common: few exponents, a common factor, or mantissas that end in zeros (bfloat16 held in float32
    takes 10 bits instead of 26). Chunks of 262,144 values have a histogram each. A higher `level` searches finer histograms.

    >>> import deepreduce as dr, numpy as np
    >>> tenths = (np.arange(5000) % 10 / 10).astype(np.float32)
    >>> blob = dr.parse("none/all/pco").encode(tenths)
    >>> bool((dr.decode(blob) == tenths).all()), dr.inspect(blob).value_bytes < 5000 // 2
    (True, True)
    """

    level: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.level <= 12:
            raise ConfigError(f"the level of pco lies between 0 and 12, got {self.level}")

    def encode(self, values: Values, seed: int) -> tuple[bytes, None]:
        if not values.size:
            return b"", None
        return pcodec_stream.compress(_as_pcodec_knows(values), self._config()), None

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        values = np.empty(nnz, dtype)
        if nnz:
            pcodec_stream.decompress_into(part, _as_pcodec_knows(values))
        return values

    def _config(self) -> ChunkConfig:
        """Neighbours among gradients are no sequence: to search for differences would halve the speed for 1% of the size at best."""
        from pcodec import ChunkConfig, DeltaSpec

        return ChunkConfig(compression_level=self.level, delta_spec=DeltaSpec.no_op())


def _as_pcodec_knows(values: Values) -> Values:
    """A view of the same memory: pcodec has no bfloat16."""
    return values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values
