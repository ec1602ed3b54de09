from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..reader import Reader, expect_decoded
from ..source import Space
from ..tensor import Positions, Support
from .keys import KeyCodec, key_bytes

_COUNT_BITS = 48


@dataclass(frozen=True)
class HuffmanIndex(KeyCodec):
    """`huffman`: Huffman code over the bytes of 32-bit keys (64-bit for tensors above 2**32 elements), as in the paper's section 11.

    Lossless. One code for all bytes, from how often each byte occurs in the keys 0 to numel - 1: reader and writer both compute it, so that
    it is never sent. It mostly removes the zero bytes of keys far below 2**32, and knows nothing of where the positions lie; `rice`,
    `deltahuffman` and `pco` take half of its size or less. Keys may stand in any order, so a value codec that sorts costs no order section.

    >>> import deepreduce as dr, numpy as np
    >>> blob = dr.parse("topr:0.01/huffman/raw").encode(np.random.default_rng(0).standard_normal(36864, np.float32))
    >>> info = dr.inspect(blob)
    >>> round(8 * info.index_bytes / info.nnz, 1)
    19.8
    """

    def _write(self, keys: Positions, numel: int) -> bytes:
        wide = keys.astype(f"<u{key_bytes(numel)}")
        return kernels.huffman.encode(wide.view(np.uint8).astype(np.uint16), code_lengths(numel))

    def decode(self, part: Reader, nnz: int, space: Space) -> Support | Positions:
        if not nnz:
            return Support.none(space.numel)
        width, packed = key_bytes(space.numel), part.rest()
        symbols, code = kernels.huffman.decode(packed, nnz * width, *_table(space.numel))
        expect_decoded(code, f"{nnz} keys of {width} code words in {len(packed)} bytes")
        return symbols.astype(np.uint8).view(f"<u{width}").astype(np.int64)

    def max_bytes(self, nnz: int, space: Space) -> int:
        return 2 * key_bytes(space.numel) * nnz


def byte_counts(numel: int, width_bytes: int) -> NDArray[Any]:
    """How often each byte occurs in the keys 0 to numel - 1 of this width, without enumerating them.

    >>> byte_counts(300, width_bytes=4)[[0, 1, 43, 44]]
    array([858,  46,   2,   1])
    """
    byte = np.arange(256).astype(np.int64 if width_bytes == 4 else object)  # the counts of wide keys exceed 64 bits
    counts = byte * 0
    for place in range(width_bytes):
        run = 256**place  # keys in a row with the same byte in this place; after 256 runs it starts again
        rounds, left = divmod(numel, 256 * run)
        counts += rounds * run + np.minimum(np.maximum(left - byte * run, 0), run)
    return counts


@lru_cache(maxsize=256)
def code_lengths(numel: int) -> NDArray[np.uint8]:
    """The code for the keys of a tensor of this size; not to be written to."""
    width_bytes = key_bytes(numel)
    excess_bits = max((width_bytes * numel).bit_length() - _COUNT_BITS, 0)
    return kernels.huffman.code_lengths((-(-byte_counts(numel, width_bytes) >> excess_bits)).astype(np.int64))


@lru_cache(maxsize=256)
def _table(numel: int) -> tuple[NDArray[np.int32], np.uint64]:
    return kernels.huffman.table_of(code_lengths(numel))
