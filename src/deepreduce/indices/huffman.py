from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..reader import Reader, expect_decoded
from ..source import Space
from ..tensor import Positions
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

    def decode(self, part: Reader, nnz: int, space: Space) -> Positions:
        width = key_bytes(space.numel)
        packed = part.rest()
        symbols, code = kernels.huffman.decode(packed, code_lengths(space.numel), nnz * width)
        expect_decoded(code, f"{nnz} keys of {width} code words in {len(packed)} bytes")
        return symbols.astype(np.uint8).view(f"<u{width}").astype(np.int64)

    def max_bytes(self, nnz: int, space: Space) -> int:
        return 2 * key_bytes(space.numel) * nnz


def byte_counts(numel: int, width_bytes: int) -> list[int]:
    """How often each byte occurs in the keys 0 to numel - 1 of this width, without enumerating them.

    >>> byte_counts(300, width_bytes=4)[:2], byte_counts(300, width_bytes=4)[43:45]
    ([858, 46], [2, 1])
    """
    counts = [0] * 256
    for place in range(width_bytes):
        run = 256**place  # keys in a row with the same byte in this place; after 256 runs it starts again
        rounds, left = divmod(numel, 256 * run)
        for byte in range(256):
            counts[byte] += rounds * run + min(max(left - byte * run, 0), run)
    return counts


@lru_cache(maxsize=256)
def code_lengths(numel: int) -> NDArray[np.uint8]:
    """The code for the keys of a tensor of this size; not to be written to."""
    counts = byte_counts(numel, key_bytes(numel))
    excess_bits = max(sum(counts).bit_length() - _COUNT_BITS, 0)
    scaled = np.array([-(-count >> excess_bits) for count in counts], np.int64)
    return kernels.huffman.code_lengths(scaled)
