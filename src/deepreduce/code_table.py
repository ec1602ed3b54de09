"""The lengths of a Huffman code in a section: what is sent of a code that follows from the data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .errors import CorruptError
from .reader import Reader, varint


def write_lengths(lengths: NDArray[np.uint8]) -> bytes:
    """The packed lengths with their size in front.

    >>> write_lengths(np.uint8([2, 2, 2, 2])).hex()
    '01e4'
    """
    table = kernels.huffman.pack_lengths(lengths)
    return varint(len(table)) + table


def read_lengths(part: Reader, count: int) -> NDArray[np.uint8]:
    """The lengths for symbols 0 to count - 1; refused unless they make a code that `kernels.huffman.code_lengths` could give."""
    lengths = kernels.huffman.unpack_lengths(part.take(part.varint()), count)
    if lengths is None:
        raise CorruptError(f"the lengths before offset {part.offset} make no prefix code of {count} symbols")
    return lengths
