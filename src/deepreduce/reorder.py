"""Permutations in ceil(log2 n) bits per element (paper, section 5.1).

A value codec that sorts hands back an `Order`. It travels in a section of its own, unless the index codec can carry any order itself.
Sorting inside blocks keeps each entry at ceil(log2 block) bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import kernels
from .errors import CorruptError
from .reader import Reader, varint
from .tensor import Positions, Values


@dataclass(frozen=True, eq=False)
class Order:
    """`permutation[i]` is where the i-th value of the value section belongs; no entry leaves its block of `block` values.

    >>> order = Order(np.array([2, 0, 1]), block=3)
    >>> restore(np.array([7.0, 5.0, 6.0]), order.permutation)
    array([5., 6., 7.])
    """

    permutation: Positions
    block: int


def encode(order: Order | None) -> bytes:
    """The block size and every index inside its block; nothing for no order, or where there is nothing to permute.

    >>> encode(Order(np.array([2, 0, 1]), block=3)).hex()
    '0312'
    """
    if order is None or order.permutation.size < 2:
        return b""
    count, block = order.permutation.size, min(order.block, order.permutation.size)
    local = order.permutation - np.arange(count) // block * block
    return varint(block) + kernels.bits.pack(local.astype(np.uint64), (block - 1).bit_length())


def decode(part: Reader, count: int) -> Positions | None:
    """The permutation, or None for an empty section."""
    if not part.remaining:
        return None
    block = part.varint(limit=count)
    if block == 0:
        raise CorruptError("an order has blocks of 0 values")
    width_bits = (block - 1).bit_length()
    local = part.packed(count, width_bits)
    part.expect_end()
    starts = np.arange(count, dtype=np.int64) // block * block
    permutation = local.astype(np.int64) + starts
    if int(permutation.max(initial=0)) >= count or not bool(np.all(np.bincount(permutation, minlength=count) == 1)):
        raise CorruptError(f"an order of {count} values is not a permutation")
    return permutation


def restore(values: Values, permutation: Positions | None) -> Values:
    """The values back in the order of their positions."""
    if permutation is None:
        return values
    restored = np.empty_like(values)
    restored[permutation] = values
    return restored
