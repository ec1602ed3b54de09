"""What codecs of whole keys have in common: the keys may stand in any order."""

from __future__ import annotations

from abc import abstractmethod

from ..codec import IndexCodec
from ..reader import Part
from ..reorder import Order
from ..source import Space
from ..tensor import Positions, Support


class KeyCodec(IndexCodec):
    """An index codec that sends every position as a key of its own, in the order that a value codec asks for: that takes no section."""

    def encode(self, selected: Support, space: Space, seed: int) -> tuple[bytes, Support]:
        return self._write(selected.positions, space.numel), selected

    def attach(self, index_part: Part, support: Support, order: Order, space: Space) -> tuple[Part, bytes]:
        return self._write(support.positions[order.permutation], space.numel), b""

    @abstractmethod
    def _write(self, keys: Positions, numel: int) -> bytes:
        """The section of these keys, in their order."""


def key_bytes(numel: int) -> int:
    """Bytes of a key of its own in a tensor of so many elements.

    >>> key_bytes(2**32), key_bytes(2**32 + 1)
    (4, 8)
    """
    return 4 if numel <= 2**32 else 8
