"""What tells two versions of a model apart: xxh3-128 of every tensor, and one digest of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..message import name_text
from ..reader import varint
from .kinds import Array, Kind, Shape

if TYPE_CHECKING:
    import xxhash

DIGEST_BYTES = 16
CHECK_BYTES = 4
"""Bytes of the digest of a tensor that a patch carries: enough to say which tensor is wrong. The digest of the model is carried whole."""

BLOCK_BYTES = 1 << 18
"""Weights that are hashed right after they were compared or changed are worked on in blocks of this size, which a cache holds."""

Entry = tuple[str, Kind, Shape, bytes]


def hasher() -> xxhash.xxh3_128:
    """A new xxh3-128."""
    try:
        import xxhash
    except ImportError as error:
        raise ConfigError("deepreduce.weights needs the xxhash package: pip install 'deepreduce[weights]'") from error
    return xxhash.xxh3_128()


def digest(patterns: Array) -> bytes:
    """The digest of a tensor, by its bit patterns."""
    state = hasher()
    state.update(patterns.view("u1").data if patterns.size else b"")
    return bytes(state.digest())


class PairHasher:
    """The digests of two versions that are read side by side; one state serves both up to their first difference.

    >>> import numpy as np
    >>> both = PairHasher()
    >>> both.update(memoryview(b"1"), memoryview(b"1"), equal=True)
    >>> both.update(memoryview(b"2"), memoryview(b"3"), equal=False)
    >>> (both.old.digest(), both.new.digest()) == (digest(np.frombuffer(b"12", "u1")), digest(np.frombuffer(b"13", "u1")))
    True
    """

    def __init__(self) -> None:
        self.old = self.new = hasher()

    def update(self, old: memoryview, new: memoryview, *, equal: bool) -> None:
        """Add the next bytes of both."""
        if self.new is self.old and not equal:
            self.new = self.old.copy()
        self.old.update(old)
        if self.new is not self.old:
            self.new.update(new)


def model_digest(entries: Iterable[Entry]) -> bytes:
    """One digest of named tensors with their dtypes, shapes and digests, whatever their order."""
    state: Any = hasher()
    for name, kind, shape, tensor_digest in sorted(entries, key=lambda entry: entry[0]):
        state.update(name_text(name) + bytes((kind.code,)) + b"".join(map(varint, (len(shape), *shape))) + tensor_digest)
    return bytes(state.digest())
