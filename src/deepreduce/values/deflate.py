from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codec import ValueCodec
from ..errors import ConfigError, CorruptError
from ..reader import Reader
from ..tensor import Values
from .raw import RawValue

_RAW_STREAM = -zlib.MAX_WBITS  # without zlib's own header and checksum: the message has a checksum
_TRIAL = 16384


@dataclass(frozen=True)
class Deflate(ValueCodec):
    """`deflate`: a Deflate stream of the values. Lossless; its bytes may differ between builds of zlib, all of which read them.

    With ``shuffle=true`` the first bytes of all values come first, then all second ones, and so on, each with a code of its own: exponents
    then stand together, which pays for nearly all gradients. With ``shuffle=false`` repeated values are found, the more of them the higher
    the `level`. ``auto`` tries both on the first values. (Paper, table 3.)

    >>> import deepreduce as dr, numpy as np
    >>> gradient = np.random.default_rng(0).standard_normal(4096, np.float32)
    >>> blob = dr.parse("none/all/deflate").encode(gradient)
    >>> bool((dr.decode(blob) == gradient).all()), dr.inspect(blob).value_bytes < 0.9 * gradient.nbytes
    (True, True)
    """

    level: int = 6
    shuffle: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.level <= 9:
            raise ConfigError(f"the level of deflate lies between 1 and 9, got {self.level}")

    def choose(self, values: Values) -> ValueCodec:
        if self.shuffle is not None:
            return self
        both = Deflate(self.level, True), Deflate(self.level, False)
        return min(both, key=lambda codec: len(codec.encode(values[:_TRIAL], 0)[0]))

    def encode(self, values: Values, seed: int) -> tuple[bytes, None]:
        raw, _ = RawValue().encode(values, seed)
        return (_deflate_planes(raw, values.itemsize) if self._shuffles else _deflate(raw, self.level)), None

    def decode(self, part: Reader, nnz: int, dtype: np.dtype[Any]) -> Values:
        raw = _inflate(part.rest(), nnz * dtype.itemsize)
        if self._shuffles and nnz:
            raw = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, nnz).T.tobytes()
        return RawValue().decode(Reader(raw), nnz, dtype)

    @property
    def _shuffles(self) -> bool:
        return self.shuffle is not False


def _deflate(raw: bytes, level: int) -> bytes:
    engine = zlib.compressobj(level, zlib.DEFLATED, _RAW_STREAM)
    return engine.compress(raw) + engine.flush()


def _deflate_planes(raw: bytes, itemsize: int) -> bytes:
    """The first bytes of all values, then the second ones and so on, each as a block with its own code.

    Only runs are looked for: what matches among mantissas matches by chance, and costs more bits and five times the time.
    """
    engine = zlib.compressobj(wbits=_RAW_STREAM, strategy=zlib.Z_RLE)
    planes = np.frombuffer(raw, np.uint8).reshape(-1, itemsize).T
    parts = [engine.compress(plane.tobytes()) + engine.flush(zlib.Z_BLOCK) for plane in planes]
    return b"".join(parts) + engine.flush()


def _inflate(stream: memoryview, size_bytes: int) -> bytes:
    engine = zlib.decompressobj(_RAW_STREAM)
    try:
        raw = engine.decompress(stream, size_bytes + 1)  # no more is ever allocated; at the exact limit the end would not be read
    except zlib.error as error:
        raise CorruptError(f"the values do not inflate: {error}") from error
    if len(raw) != size_bytes or not engine.eof or engine.unused_data:
        raise CorruptError(f"the values do not inflate to {size_bytes} bytes, or do not end there")
    return raw
