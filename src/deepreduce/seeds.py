"""Seeds that are mixed by a hash, never added: no two tensors, steps or runs share their draws."""

from __future__ import annotations

from hashlib import blake2b

_SEED_BYTES = 6  # seeds travel in some messages, as varints of seven bytes


def mix(*parts: int | str) -> int:
    """Return a seed of 48 bits that depends on every part and on their order.

    >>> mix(0, 1, "layer.weight") != mix(1, 0, "layer.weight")
    True
    """
    text = "\0".join(map(repr, parts))
    return int.from_bytes(blake2b(text.encode("utf-8", "backslashreplace"), digest_size=_SEED_BYTES).digest(), "little")
