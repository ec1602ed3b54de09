from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..codec import ValueCodec
from ..errors import ConfigError, CorruptError
from ..sparse import Values
from ..wire import Reader, varint

if TYPE_CHECKING:
    from pcodec import ChunkConfig

_CHUNK = 1 << 18
_HEADER_BYTES = 2


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
        if not 0 <= self.level <= 12:
            raise ConfigError(f"the level of pco lies between 0 and 12, got {self.level}")

    def encode(self, values: Values, seed: int) -> tuple[bytes, None]:
        from pcodec.wrapped import FileCompressor

        if not values.size:
            return b"", None
        file, config = FileCompressor(), self._config()
        parts = [file.write_header()]
        for chunk in _chunks(_as_pcodec_knows(values)):
            compressor = file.chunk_compressor(chunk, config)
            coded = compressor.write_meta() + compressor.write_page(0)
            parts += [varint(len(coded)), coded]
        return b"".join(parts), None

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        values = np.empty(nnz, dtype)
        if nnz:
            _decompress_into(part, _as_pcodec_knows(values))
        return values

    def _config(self) -> ChunkConfig:
        """Neighbours among gradients are no sequence: to search for differences would halve the speed for 1% of the size at best."""
        from pcodec import ChunkConfig, DeltaSpec

        return ChunkConfig(compression_level=self.level, delta_spec=DeltaSpec.no_op())


def _as_pcodec_knows(values: Values) -> Values:
    """A view of the same memory: pcodec has no bfloat16."""
    return values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values


def _chunks(values: Values) -> Iterator[Values]:
    return (values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK))


def _decompress_into(part: Reader, values: Values) -> None:
    """Fill `values`; pcodec writes there and nowhere else, and reads the bytes of one chunk at a time."""
    from pcodec.wrapped import FileDecompressor

    kind = f"{values.dtype.kind}{8 * values.itemsize}"
    header = bytes(part.take(_HEADER_BYTES))
    try:
        file, header_bytes = FileDecompressor.new(header)
        if header_bytes != _HEADER_BYTES:
            raise CorruptError(f"a pcodec header of {header_bytes} bytes, not {_HEADER_BYTES}")
        for chunk in _chunks(values):
            coded = bytes(part.take(part.varint()))
            decompressor, meta_bytes = file.chunk_decompressor(coded, kind)
            progress, page_bytes = decompressor.read_page_into(coded[meta_bytes:], chunk.size, chunk)
            if progress.n_processed != chunk.size or meta_bytes + page_bytes != len(coded):
                raise CorruptError(f"a chunk of {len(coded)} bytes does not hold {chunk.size} values exactly")
    except RuntimeError as error:
        raise CorruptError(f"pcodec refuses the values: {error}") from error
