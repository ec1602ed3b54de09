"""What codecs of whole keys have in common: the keys may stand in any order."""

from __future__ import annotations

from ..codec import IndexCodec
from ..reorder import Order
from ..source import Space
from ..tensor import Positions


class KeyCodec(IndexCodec):
    """An index codec that sends every position as a key of its own, in the order that a value codec asks for: that takes no section."""

    def attach(self, index_part: bytes, support: Positions, order: Order | None, space: Space) -> tuple[bytes, bytes]:
        if order is None:
            return index_part, b""
        return self.encode(support[order.permutation], space, seed=0)[0], b""


def key_bytes(numel: int) -> int:
    """Bytes of a key of its own in a tensor of so many elements.

    >>> key_bytes(2**32), key_bytes(2**32 + 1)
    (4, 8)
    """
    return 4 if numel <= 2**32 else 8
