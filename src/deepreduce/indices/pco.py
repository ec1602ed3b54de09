from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import pcodec_stream
from ..codec import IndexCodec
from ..errors import CorruptError, TruncatedError
from ..reader import Reader
from ..source import Space
from ..tensor import Positions, Support
from .entropy import entropy_bits

if TYPE_CHECKING:
    from pcodec import ChunkConfig

Gaps = NDArray[np.unsignedinteger[Any]]

_WIDTHS_BYTES = (2, 4, 8)
_NARROW_UP_TO = 1 << 16
_LEAST_CHUNK_BYTES = 4  # its length and the head of its one bin, besides the least gap
_CLASSIC_WITHOUT_DELTA = b"\x00"  # the first byte of a chunk: the mode and the kind of differences


@dataclass(frozen=True)
class PcoIndex(IndexCodec):
    """`pco`: the gaps between positions, coded by the pcodec package. Lossless; near the bound for uniform supports, below it for others.

    Each chunk of 262,144 gaps has its own histogram, whose bins are entropy coded.

    >>> import deepreduce as dr, numpy as np
    >>> rows = np.zeros((1000, 64), np.float32)
    >>> rows[[3, 40, 800]] = 1
    >>> dr.inspect(dr.parse("nonzero/pco/raw").encode(rows)).index_bytes < 40
    True
    """

    def encode(self, selected: Support, space: Space, seed: int) -> tuple[bytes, Support]:
        if not selected.nnz:
            return b"", selected
        gaps = np.diff(selected.positions, prepend=-1) - 1
        width_bytes = _width_bytes(gaps)
        return bytes((width_bytes,)) + pcodec_stream.compress(gaps.astype(f"u{width_bytes}"), _config()), selected

    def decode(self, part: Reader, nnz: int, space: Space) -> Support:
        if not nnz:
            return Support.none(space.numel)
        width_bytes = part.byte()
        if width_bytes not in _WIDTHS_BYTES:
            raise CorruptError(f"gaps of {width_bytes} bytes, known are {_WIDTHS_BYTES}")
        least_bytes = -(-nnz // pcodec_stream.CHUNK) * (_LEAST_CHUNK_BYTES + width_bytes)
        if least_bytes > part.remaining:
            raise TruncatedError(f"{nnz} gaps take {least_bytes} bytes or more, have {part.remaining}")
        gaps = np.empty(nnz, f"u{width_bytes}")
        pcodec_stream.decompress_into(part, gaps, _CLASSIC_WITHOUT_DELTA)
        return Support.trusted(_positions(gaps, space.numel), space.numel)

    def expected_bits(self, nnz: int, numel: int) -> float:
        return entropy_bits(nnz, numel)


def _width_bytes(gaps: Positions) -> int:
    """The narrower, the shorter is the table of bins; but pcodec is slow to compress many 16-bit numbers, whose table hardly counts."""
    largest_bits = int(gaps.max()).bit_length()
    widths = _WIDTHS_BYTES if gaps.size <= _NARROW_UP_TO else _WIDTHS_BYTES[1:]
    return next(width for width in widths if largest_bits <= 8 * width)


def _positions(gaps: Gaps, numel: int) -> Positions:
    if int(gaps.max()) >= numel:
        raise CorruptError(f"a gap of {gaps.max()} among {numel} positions")
    positions = gaps.astype(np.int64)
    positions += 1
    np.cumsum(positions, out=positions)
    positions -= 1
    # No step is longer than numel, so the first position beyond the end is seen, or is negative: as unsigned, it is beyond the end too.
    if int(positions.view(np.uint64).max()) >= numel:
        raise CorruptError(f"gaps that reach beyond {numel} positions")
    return positions


def _config() -> ChunkConfig:
    """Gaps are already differences, and have no common factor: both of pcodec's searches would only cost time."""
    from pcodec import ChunkConfig, DeltaSpec, ModeSpec

    return ChunkConfig(delta_spec=DeltaSpec.no_op(), mode_spec=ModeSpec.classic())
